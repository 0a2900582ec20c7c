"""The topics of a cluster in Kafka, as each of its nodes has them.

Every node opens every partition and follows it; the owners of the slots claim theirs (``Host``, in ``headrace/cluster``). Which topics
exist is in the definitions, which any node may change (``definitions.py``). The state of each slot is a partition of the
topic ``state``, so its number of partitions is the number of slots, for ever.

A partition's slot is the hash of its topic plus its number: the partitions of one topic are in different slots. The broker's own
topics are all in slot 0, because delayed messages and staged batches are each one thing with one owner.

Every topic is in Kafka: one in memory would end with its node, and the others would not know it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from zlib import crc32

from headrace.budget import Budget
from headrace.clock import Clock, Loop
from headrace.engine.kafka.definitions import Definitions
from headrace.engine.kafka.hints import group_of
from headrace.engine.kafka.journal import KafkaJournal
from headrace.engine.kafka.link import KafkaLink
from headrace.engine.kafka.log import Host, KafkaLog
from headrace.engine.kafka.replica import Replica
from headrace.engine.kafka.topics import KafkaTopics
from headrace.errors import DataCorrupt
from headrace.log.cache import BatchCache
from headrace.log.interface import CLEAN, Deletion, LastStop, Log, TopicRecord
from headrace.log.storage import MemoryStorage
from headrace.log.workers import Workers
from headrace.model import INTERNAL_PREFIX, TopicSettings

logger = logging.getLogger("headrace.kafka")


class SharedStorage(MemoryStorage):
    """See :class:`headrace.log.interface.Storage`."""

    durable = True

    def __init__(
        self,
        link: KafkaLink,
        *,
        clock: Clock,
        loop: Loop,
        budget: Budget | None = None,
        unsafe: bool = False,
        slots: int = 16,
    ):
        super().__init__(clock=clock, loop=loop, budget=budget)
        self.link = link
        self.kafka = KafkaTopics(link.admin, link.cluster, link.timeout, unsafe=unsafe)
        self.slots = slots
        """How many a new cluster gets; then, how many this one has."""
        self.slot_of = self._slot_of
        self.cache = BatchCache(budget=self.budget)
        self._workers = Workers(loop, count=2)
        self.host: Host | None = None
        self.on_read_back: Callable[[float], None] = lambda seconds: None
        self._records: list[TopicRecord] = []
        self._opened: dict[tuple[int, int], KafkaLog] = {}
        self._closed = False

    def _slot_of(self, topic: str, number: int) -> int:
        if topic.startswith(INTERNAL_PREFIX):
            return 0
        return (crc32(topic.encode()) + number) % self.slots

    # --- starting, in a thread ------------------------------------------------------------------
    def prepare(self) -> None:
        """Check what is in Kafka, and create the topic of the definitions if the cluster is new."""
        self.link.reach()
        existing = self.kafka.existing()
        self.kafka.check(existing)
        if self.kafka.definitions not in existing:
            left = next(filter(self.kafka.holds_messages, existing), None)
            if left is not None:
                raise _missing(self.kafka.definitions, f"topics of it are left, for example {left}")
            self.kafka.create({self.kafka.definitions: 1})
        self.kafka.check_rights(self.kafka.definitions, (self.link.group, group_of(self.link)))

    def prepare_state(self, *, is_founded: bool) -> None:
        """The topic with a partition for each slot; a cluster that is founded must have it."""
        existing = self.kafka.existing()
        if self.kafka.state not in existing:
            if is_founded:
                raise _missing(self.kafka.state, "it held the positions of all subscriptions")
            self.kafka.create({self.kafka.state: self.slots})
            existing = self.kafka.existing()
        self.slots = existing[self.kafka.state]

    def open_all(self, records: list[TopicRecord], *, claim: bool = False) -> None:
        """Read all partitions to their ends, and follow them. ``claim``: this node alone is to own them all."""
        existing, logs = self.kafka.existing(), []
        for topic in records:
            name = self.kafka.name_of(topic)
            if existing.get(name, 0) < topic.settings.partitions:
                raise DataCorrupt(
                    f"topic {topic.name!r} is defined, but Kafka has {existing.get(name, 0)} of its "
                    f"{topic.settings.partitions} partitions ({name}): somebody has deleted it there",
                    code="kafka_topic_missing",
                )
            for number in range(topic.settings.partitions):
                log = self._opened[topic.incarnation, number] = self.make_log(topic, number)
                logs.append(log)
        self.link.open([log.replica for log in logs], self.link.logs, claim=claim)
        self._records = records

    # --- the broker's side ----------------------------------------------------------------------
    def topics(self, defaults: TopicSettings) -> list[TopicRecord]:
        return self._records

    def open(self, topic: TopicRecord, number: int, stop: LastStop = CLEAN) -> Log:
        log = self._opened.pop((topic.incarnation, number))
        log.opened(stop.reached)
        return log

    def make_log(self, topic: TopicRecord, number: int) -> KafkaLog:
        assert self.host is not None
        log = KafkaLog(
            self.link,
            self.kafka.name_of(topic),
            number,
            topic.settings,
            clock=self._clock,
            loop=self._loop,
            cache=self.cache,
            workers=self._workers,
            host=self.host,
        )
        log.about = (topic.name, number)
        log.on_commit = lambda seconds, count: self.on_commit(seconds, count)
        log.on_read_back = lambda seconds: self.on_read_back(seconds)
        return log

    def follow(self, logs: list[KafkaLog]) -> None:
        """Logs of partitions that are new: they are read from their beginning."""
        self.link.logs.follow([log.replica for log in logs])

    def create(self, topic: TopicRecord) -> list[Log]:
        raise AssertionError("the definitions decide which topics there are")

    def delete(self, topic: TopicRecord) -> Deletion:
        return Deletion(lambda done: done())

    # --- for the node -----------------------------------------------------------------------------
    def journal_of(self, slot: int) -> KafkaJournal:
        return KafkaJournal(self.link, self.kafka.state, slot)

    def define(
        self, apply: Callable[[bytes], object], snapshot: Callable[[], list[bytes]]
    ) -> Definitions:
        return Definitions(self.link, self.kafka.definitions, apply, snapshot)

    def ends(self, replicas: list[Replica]) -> dict[Replica, int]:
        """Where each ends in Kafka now. Blocks."""
        places = {(each.topic, each.number): each for each in replicas}
        found = self.link.ends(places)
        return {places[place]: end for place, end in found.items()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._workers.close()
            self.link.close()


def _missing(topic: str, why: str) -> DataCorrupt:
    return DataCorrupt(
        f"topic {topic} is missing in Kafka: somebody has deleted it there, and {why}. Bring a backup into a new cluster "
        "('headrace cluster import')",
        code="kafka_topic_missing",
    )
