"""Kafka's clients as the bridge uses them, and Kafka's errors as sentences that say what to do."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec

from headrace.errors import (
    Conflict,
    Forbidden,
    HeadraceError,
    NotFound,
    StorageFailed,
    TooLarge,
    Unauthenticated,
)

ASK_S = 15.0
"""How long a question to Kafka may take."""
LOOK_AGAIN_S = 0.05
LEADER_S = 3.0
"""How long one look for the leaders of partitions may take."""
QUEUE_KBYTES = 16 << 10
"""What a consumer may fetch ahead."""
MESSAGE_BYTES_MAX = 256 << 20
REPLICAS = 3
_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)  # fmt: skip
_NO_LEADER = (
    KafkaError._NOENT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)
_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_LOGIN = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)
silent = logging.getLogger("headrace.bridge.kafka")
"""What librdkafka itself says: the bridge says it in its own words."""
silent.addHandler(logging.NullHandler())
silent.propagate = False


def explained(error: KafkaError, what: str) -> HeadraceError:
    """What an error of Kafka means, while ``what`` was tried."""
    code, text = error.code(), f"{what}: {error.str()}"
    if code in _FORBIDDEN:
        return Forbidden(f"Kafka: {text}. Give the bridge's user the right, and start again")
    if code in _LOGIN:
        return Unauthenticated(f"Kafka: {text}. Check the login in the file of --kafka-config")
    if code in _UNKNOWN:
        return NotFound(
            f"Kafka: {text}. Create the topic in Kafka, or check its name",
            code="kafka_topic_not_found",
        )
    if code in _LARGE:
        return TooLarge(
            f"Kafka: {text}. Raise max.message.bytes of the topic", code="message_too_large"
        )
    if code in _FENCED:
        return replaced(error.str())
    # To begin again after a fatal error could be to fight with another bridge for ever.
    is_fatal = code == KafkaError._FATAL or error.fatal()
    return StorageFailed(f"Kafka: {text}", code="kafka_unavailable", retryable=not is_fatal)


def replaced(how: str) -> Conflict:
    return Conflict(
        f"another bridge of this name has started and has taken over ({how}); run one at a time, or give each its "
        "own --name",
        code="bridge_replaced",
    )


def failed(error: KafkaException, what: str) -> NoReturn:
    raise explained(error.args[0], what) from None


@dataclass(eq=False)
class KafkaPlace:
    """A Kafka cluster, and how to reach it."""

    servers: str
    options: dict[str, str] = field(default_factory=dict)
    """Properties of librdkafka."""
    on_trouble: Callable[[str], None] = lambda text: None
    """Told when no node of Kafka can be reached; librdkafka goes on trying."""

    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.servers,
            "client.id": "headrace-bridge",
            "socket.keepalive.enable": True,
            "reconnect.backoff.max.ms": 1000,
            "receive.message.max.bytes": 2 * MESSAGE_BYTES_MAX,
            "error_cb": self._heard,
            **self.options,
        }

    def _heard(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.on_trouble(f"Kafka does not answer at {self.servers}; trying again")
        elif error.code() in _LOGIN:
            self.on_trouble(f"Kafka refuses the login: {error.str()}")

    def admin(self) -> AdminClient:
        return AdminClient(self._common(), logger=silent)

    def consumer(self, group: str | None = None, **more: Any) -> Consumer:
        """It reads what it is told to read, and follows no group. ``group`` only stores positions for lag tools."""
        settings = {
            "group.id": group or f"headrace-bridge-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": QUEUE_KBYTES,
            "fetch.wait.max.ms": 100,
            "allow.auto.create.topics": False,
        }
        return Consumer({**self._common(), **settings, **more}, logger=silent)

    def producer(self, transactional_id: str, **more: Any) -> Producer:
        settings = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 60_000,
            "linger.ms": 5,
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "partitioner": "murmur2_random",  # that of Kafka's Java clients
            "delivery.report.only.error": True,
        }
        return Producer({**settings, **self._common(), **more}, logger=silent)


class KafkaInquiry:
    """Questions to Kafka; each waits at most ``ASK_S`` seconds."""

    def __init__(self, place: KafkaPlace):
        self._place = place
        self._admin = place.admin()

    def cluster(self) -> str:
        """The cluster's id. :class:`StorageFailed` if nobody answers."""
        try:
            return str(self._admin.list_topics(timeout=ASK_S).cluster_id)
        except KafkaException as error:
            found = explained(error.args[0], f"{self._place.servers} cannot be asked")
            if isinstance(found, StorageFailed):
                found = StorageFailed(
                    f"Kafka does not answer at {self._place.servers}; check the address and the login",
                    code="kafka_unavailable",
                )
            raise found from None

    def partitions(self, topic: str) -> int:
        """How many it has; :class:`NotFound` if it does not exist."""
        try:
            found = self._admin.list_topics(topic, timeout=ASK_S).topics[topic]
        except KafkaException as error:
            failed(error, f"topic {topic} cannot be read")
        if found.error is not None:
            raise explained(found.error, f"topic {topic} cannot be read")
        return len(found.partitions)

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """What distinguishes a topic from an earlier one of its name; empty if Kafka does not say it."""
        found = {}
        for topic, future in self._admin.describe_topics(TopicCollection(list(topics))).items():
            try:
                found[topic] = str(future.result(ASK_S + 1).topic_id)
            except (KafkaException, TimeoutError):
                found[topic] = ""
        return found

    def offsets(
        self, places: Iterable[tuple[str, int]], spec: OffsetSpec
    ) -> dict[tuple[str, int], int]:
        """Where partitions begin or end. A topic that was just created may have no leaders for a moment."""
        wanted, found = set(places), dict[tuple[str, int], int]()
        deadline = time.monotonic() + ASK_S
        while wanted:
            asked = self._admin.list_offsets(
                {TopicPartition(*place): spec for place in wanted}, request_timeout=LEADER_S
            )
            for place, future in asked.items():
                try:
                    found[place.topic, place.partition] = future.result(ASK_S + 1).offset
                except KafkaException as error:
                    if error.args[0].code() not in _NO_LEADER or time.monotonic() > deadline:
                        failed(error, f"topic {place.topic} does not say where it begins and ends")
                else:
                    wanted.discard((place.topic, place.partition))
            for topic in {topic for topic, _ in wanted}:
                self._admin.list_topics(
                    topic, timeout=ASK_S
                )  # librdkafka would remember "no leader"
                time.sleep(LOOK_AGAIN_S)
        return found

    def message_bytes_max(self, topic: str) -> int:
        """The largest record that the topic takes, if Kafka says so."""
        resource = ConfigResource("topic", topic)
        try:
            asked = self._admin.describe_configs([resource], request_timeout=ASK_S)
            return int(asked[resource].result(ASK_S + 1)["max.message.bytes"].value)
        except (KafkaException, TimeoutError, KeyError):  # a right that the bridge can do without
            return MESSAGE_BYTES_MAX

    def create(self, topic: str, config: dict[str, str]) -> None:
        """A topic with one partition; fine if it exists."""
        try:
            nodes = len(self._admin.list_topics(timeout=ASK_S).brokers)
            new = NewTopic(
                topic, num_partitions=1, replication_factor=min(REPLICAS, nodes), config=config
            )
            self._admin.create_topics([new], operation_timeout=ASK_S)[topic].result(ASK_S + 1)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                failed(
                    error, f"topic {topic}, which keeps the bridge's positions, cannot be created"
                )
