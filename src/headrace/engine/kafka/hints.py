"""Which slots this node should own: a hint from Kafka's group protocol.

Every node is a member of the consumer group ``<cluster>.nodes`` over the topic of the slots' state. Kafka gives each slot to one
member, and moves few when members come and go (*cooperative-sticky*). A node that stops hands its slots back first; those of one
that dies or hangs are given to others after the session timeout.

It is only a hint. A node that got a slot claims it, and one that lost it finds out by reading (``rule.py``).

A node that was killed and is started again does not wait for the session of its former self to end: if the group still knows a member
of its name, that one is dead, because one process at a time has the data directory. So it takes that member's slots at once
(``cluster/node.py``), until the group has divided all slots anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaException

from headrace.engine.kafka.link import KafkaLink
from headrace.engine.kafka.tail import POLL_S

logger = logging.getLogger("headrace.kafka")
HEARTBEAT_S = 0.25
"""How soon a member hears that slots are to be divided anew."""


def group_of(link: KafkaLink) -> str:
    return f"{link.cluster}.nodes"


def nodes_of(link: KafkaLink) -> list[tuple[str, list[int]]] | None:
    """Each node of the group, and the slots that it should own; None: Kafka does not answer. Blocks."""
    group = group_of(link)
    try:
        found = link.admin.describe_consumer_groups([group])[group].result(link.timeout)
    except (KafkaException, TimeoutError) as error:
        logger.info("the group of nodes: %s", error)
        return None
    return [
        (each.client_id, sorted(place.partition for place in each.assignment.topic_partitions))
        for each in found.members
    ]


class SlotHints:
    """``gained`` and ``handed_back`` are called in a thread; the second one waits until the slots are let go."""

    def __init__(
        self,
        link: KafkaLink,
        topic: str,
        session_s: float,
        gained: Callable[[list[int]], None],
        handed_back: Callable[[list[int]], None],
    ):
        self._link, self._topic, self._session_s = link, topic, session_s
        self._gained, self._handed_back = gained, handed_back
        self._closed = threading.Event()
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-kafka-slots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Hand all slots back, and take none until ``rejoin``."""
        self._paused.set()

    def rejoin(self) -> None:
        self._paused.clear()

    def _run(self) -> None:
        while not self._closed.is_set():
            consumer = self._link.member(group_of(self._link), self._session_s, HEARTBEAT_S)

            def assigned(consumer: Consumer, partitions: list[Any]) -> None:
                consumer.incremental_assign(partitions)
                if partitions:
                    consumer.pause(partitions)  # only the assignment matters
                self._gained([each.partition for each in partitions])

            def revoked(consumer: Consumer, partitions: list[Any]) -> None:
                self._handed_back([each.partition for each in partitions])
                consumer.incremental_unassign(partitions)

            consumer.subscribe(
                [self._topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked
            )
            while not self._closed.is_set() and not self._paused.is_set():
                try:
                    consumer.poll(POLL_S)
                except KafkaException as error:
                    logger.info("the group of nodes: %s", error)
            consumer.close()  # hands everything back and leaves the group
            while self._paused.is_set() and not self._closed.is_set():
                self._closed.wait(POLL_S)

    def members(self) -> list[tuple[str, list[int]]] | None:
        return nodes_of(self._link)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(self._link.timeout)
