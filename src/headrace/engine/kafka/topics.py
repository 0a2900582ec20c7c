"""The topics in Kafka: how they are named and created, and which of their settings would lose messages.

Everything of a cluster ``shop`` has names that begin with ``shop.``::

    shop.definitions   shop.state        the two journals, one partition each
    shop.orders.1f3a…                    topic orders; the number is its incarnation, so that a deleted topic and a
                                         new one of the same name have nothing in common

Kafka must not delete or compact anything by itself, must keep what it has confirmed when a node of it dies, and must
not let a replica that lacks records become the leader. A topic that does not promise this is refused at the start,
unless ``kafka_unsafe`` allows it (for one Kafka node on a laptop, nothing has to be allowed: there, one replica is
all that there can be).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from headrace.engine.kafka.link import (
    FORBIDDEN,
    RECORD_BYTES_MAX,
    Timeout,
    failure_of,
    forbidden,
)
from headrace.errors import StorageFailed
from headrace.log.interface import TopicRecord

logger = logging.getLogger("headrace.kafka")
NAME_CHARS_MAX = 249
REPLICAS = 3
LOOK_AGAIN_S = 0.01
NEEDED = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}
"""Settings without which records are lost; Headrace creates its topics with them."""


RIGHTS = frozenset(
    {
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.CREATE,
        AclOperation.DELETE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE_CONFIGS,
    }
)
"""On topics whose names begin with the cluster's name and a dot."""
GROUP_RIGHTS = frozenset({AclOperation.READ})
COORDINATOR_MOVES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
)


class KafkaTopics:
    """All methods block, for at most ``timeout`` seconds."""

    def __init__(self, admin: AdminClient, cluster: str, timeout: float, *, unsafe: bool):
        self._admin, self._cluster, self._timeout, self._unsafe = admin, cluster, timeout, unsafe

    @property
    def definitions(self) -> str:
        return f"{self._cluster}.definitions"

    @property
    def state(self) -> str:
        return f"{self._cluster}.state"

    def name_of(self, topic: TopicRecord) -> str:
        tail = f".{topic.incarnation:014x}"
        return f"{self._cluster}.{topic.name}"[: NAME_CHARS_MAX - len(tail)] + tail

    def holds_messages(self, name: str) -> bool:
        """Whether a topic in Kafka is one that ``name_of`` names."""
        return re.fullmatch(rf"{re.escape(self._cluster)}\..*\.[0-9a-f]{{14}}", name) is not None

    def existing(self) -> dict[str, int]:
        """Topic -> partitions, of this cluster."""
        try:
            found = self._admin.list_topics(timeout=self._timeout)
        except KafkaException as error:
            raise Timeout(f"Kafka cannot be reached: {error}") from None
        self._nodes = len(found.brokers)
        prefix = f"{self._cluster}."
        return {
            name: len(topic.partitions)
            for name, topic in found.topics.items()
            if name.startswith(prefix) and topic.error is None
        }

    def create(self, topics: dict[str, int]) -> None:
        """Create topics, with so many partitions each. One that exists already is fine."""
        if not topics:
            return
        replicas = min(REPLICAS, self._nodes)
        config = {
            **NEEDED,
            "min.insync.replicas": str(max(1, replicas - 1)),
            "max.message.bytes": str(RECORD_BYTES_MAX + (1 << 20)),
            "compression.type": "producer",
        }
        new = [
            NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=config)
            for name, partitions in topics.items()
        ]
        asked = self._admin.create_topics(new, operation_timeout=self._timeout)
        for name, future in asked.items():
            what = f"topic {name} cannot be created"
            fine = KafkaError.TOPIC_ALREADY_EXISTS
            self._result(future, what, fine, f"CREATE on topic {name}")
        for name, partitions in topics.items():
            self._wait_for_leaders(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        self._result(
            self._admin.create_partitions([NewPartitions(name, total)])[name],
            f"topic {name} cannot get more partitions",
            KafkaError.INVALID_PARTITIONS,
            f"ALTER on topic {name}",
        )
        self._wait_for_leaders(name, total)

    def _wait_for_leaders(self, name: str, partitions: int) -> None:
        """Kafka answers before all of its nodes know the topic."""
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                found = self._admin.list_topics(name, timeout=self._timeout).topics[name]
            except KafkaException as error:
                raise Timeout(f"Kafka cannot be reached: {error}") from None
            leaders = [each.leader for each in found.partitions.values() if each.leader >= 0]
            if found.error is None and len(leaders) >= partitions:
                return
            time.sleep(LOOK_AGAIN_S)
        raise Timeout(f"Kafka: topic {name} has no leaders after {self._timeout:g} seconds")

    def delete(self, name: str) -> None:
        self._result(
            self._admin.delete_topics([name], operation_timeout=self._timeout)[name],
            f"topic {name} cannot be deleted",
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            f"DELETE on topic {name}",
        )

    def _result(self, future: Future[Any], what: str, fine: int, right: str) -> None:
        try:
            future.result(self._timeout + 1)
        except KafkaException as error:
            if error.args[0].code() != fine:
                raise failure_of(error, what, right) from None
        except TimeoutError:
            raise Timeout(f"Kafka: {what}: no answer in {self._timeout:g} seconds") from None

    # --- rights -------------------------------------------------------------------------------
    def check_rights(self, topic: str, groups: Iterable[str]) -> None:
        """Refuse to start without the rights that a node needs sooner or later; ``topic`` stands for all of the cluster's."""
        topics, names = TopicCollection([topic]), list(groups)
        more: Any = {"include_authorized_operations": True, "request_timeout": self._timeout}
        missing = [
            *self._missing(lambda: self._admin.describe_topics(topics, **more), RIGHTS, "topic"),
            *self._missing(
                lambda: self._admin.describe_consumer_groups(names, **more), GROUP_RIGHTS, "group"
            ),
        ]
        if missing:
            raise forbidden("; ".join(missing))

    def _missing(
        self, ask: Callable[[], dict[str, Future[Any]]], needed: frozenset[AclOperation], kind: str
    ) -> list[str]:
        """Asks again while a group has no coordinator: in a new Kafka, or after one of its nodes was stopped."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return [
                    f"{', '.join(sorted(each.name for each in lacks))} on {kind} {name}"
                    for name, future in ask().items()
                    if (lacks := needed - self._allowed(future, needed))
                ]
            except KafkaException as error:
                is_moving = error.args[0].code() in COORDINATOR_MOVES
                if not is_moving or time.monotonic() > deadline:
                    raise failure_of(error, f"the {kind}s cannot be described") from None
                time.sleep(LOOK_AGAIN_S)
            except TimeoutError:
                raise Timeout(f"Kafka does not describe the {kind}s") from None

    def _allowed(
        self, future: Future[Any], needed: frozenset[AclOperation]
    ) -> frozenset[AclOperation]:
        try:
            allowed = future.result(self._timeout + 1).authorized_operations
        except KafkaException as error:
            if error.args[0].code() not in FORBIDDEN:
                raise
            return frozenset()  # not even to describe it, which every right includes
        return needed if allowed is None else frozenset(allowed)  # None: Kafka does not say

    # --- safety -------------------------------------------------------------------------------
    def check(self, names: Iterable[str]) -> None:
        """Refuse topics whose settings would lose messages."""
        faults = self._faults(list(names))
        if not faults:
            return
        text = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        if self._unsafe:
            logger.warning(
                "Kafka's settings may lose messages, which kafka_unsafe allows: %s", text
            )
            return
        raise StorageFailed(
            f"Kafka's settings would lose messages: {text}. Change them (kafka-configs.sh), or start with "
            "kafka_unsafe if the messages may be lost",
            code="kafka_topic_unsafe",
            retryable=False,
        )

    def _faults(self, names: list[str]) -> list[str]:
        if not names:
            return []
        metadata = self._admin.list_topics(timeout=self._timeout)
        asked = self._admin.describe_configs(
            [ConfigResource("topic", name) for name in names], request_timeout=self._timeout
        )
        found: list[str] = []
        for resource, future in asked.items():
            name = resource.name
            try:
                config = {
                    key: entry.value for key, entry in future.result(self._timeout + 1).items()
                }
            except KafkaException as error:
                what = f"the settings of topic {name} are unknown"
                raise failure_of(error, what, f"DESCRIBE_CONFIGS on topic {name}") from None
            except TimeoutError:
                raise Timeout(f"Kafka does not say how topic {name} is set") from None
            found += [
                f"{name} has {key}={config.get(key)}, not {needed}"
                for key, needed in NEEDED.items()
                if config.get(key) != needed
            ]
            partitions = metadata.topics[name].partitions.values()
            replicas = min((len(each.replicas) for each in partitions), default=0)
            if replicas < min(REPLICAS, self._nodes):
                found.append(f"{name} has {replicas} replicas on {self._nodes} nodes")
            elif int(config.get("min.insync.replicas") or 1) < max(1, replicas - 1):
                found.append(
                    f"{name} has min.insync.replicas={config.get('min.insync.replicas')} of {replicas}"
                )
        return found
