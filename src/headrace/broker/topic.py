"""A topic: its settings, its partitions, and the partition that a record goes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace import limits
from headrace.errors import Done, HeadraceError, InvalidArgument
from headrace.log.interface import Log, TopicRecord
from headrace.model import TopicSettings, topic_hash
from headrace.partitioning import Partitioner, partition_of_key

if TYPE_CHECKING:
    from headrace.broker.history import HistoryRing

PUMPED_AT_ONCE_MAX = 4
"""Up to this many watchers get a new record in the turn of the loop that stored it. More of them
would delay the answer to the publisher, so then all are woken for the next turn."""


class Watcher(Protocol):
    """A subscription or a follower."""

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None: ...


@dataclass(slots=True, eq=False)
class Partition:
    """One partition, and the watchers that wait for its next record."""

    topic: str
    number: int
    log: Log
    message_ttl_ms: int | None = None
    watchers: dict[Watcher, None] = field(default_factory=dict)
    """In the order in which they came; a list would take as long to leave as there are others."""
    first_end: int = field(init=False)
    """Where the log ended when it was opened; later records were published since."""
    consumed: int = 0
    """Messages acknowledged or followed since then, all subscriptions together."""
    run: int = 0
    """The place of its last run of messages of one client (``publishers.py``)."""

    def __post_init__(self) -> None:
        self.first_end = self.log.end_offset
        self.log.on_advance = self._advanced

    def _advanced(self) -> None:
        watchers = self.watchers
        at_once = len(watchers) <= PUMPED_AT_ONCE_MAX
        for watcher in tuple(watchers):
            watcher.on_advance(self.topic, self.number, at_once)


class Topic:
    def __init__(self, record: TopicRecord, logs: Iterable[Log] = ()):
        self.record = record
        self.name = record.name
        self.hash = topic_hash(record.name)
        self.settings = record.settings
        self.incarnation = record.incarnation
        self.identity = (record.name, record.incarnation)
        self.created_ms = record.created_ms
        self.partitions: list[Partition] = []
        self.published = 0
        self.published_bytes = 0
        self.refused = 0
        self.appending = 0
        """Records on their way into the log; they count against ``max_queue_size``."""
        self.making: list[Done] | None = None
        """Who waits until it is stored; None when it is, or when it is known that it cannot be."""
        self.refusal: HeadraceError | None = None
        """Why it could not be stored."""
        self.ring: HistoryRing | None = None
        """Its last ten minutes (``history.py``)."""
        self._partitioner = Partitioner()
        self.add_partitions(logs)

    def add_partitions(self, logs: Iterable[Log]) -> None:
        for log in logs:
            number, ttl_ms = len(self.partitions), self.settings.message_ttl_ms
            self.partitions.append(Partition(self.name, number, log, ttl_ms))

    def apply(self, settings: TopicSettings) -> None:
        self.settings = settings
        self.record = self.record._replace(settings=settings, adopted=False)
        for partition in self.partitions:
            partition.message_ttl_ms = settings.message_ttl_ms
            partition.log.change(settings)

    def partition(self, number: int) -> Partition:
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgument(
                f"a partition is a whole number, not {number!r}", code="invalid_partition"
            )
        if not 0 <= number < len(self.partitions):
            raise InvalidArgument(
                f"topic {self.name!r} has no partition {number}: it has 0 to "
                f"{len(self.partitions) - 1}",
                code="invalid_partition",
            )
        return self.partitions[number]

    # --- where a record goes ----------------------------------------------------------------
    def partition_of_key(self, key: bytes) -> int:
        return partition_of_key(key, len(self.partitions))

    def partition_of_producer(self, producer_id: int, usual: int) -> int:
        """Where the producer's earlier batches are, even if there were fewer partitions then; else ``usual``.

        A repetition must find the first one, and the log of a partition knows its producers.
        """
        if self.partitions[usual].log.last_producer_batch(producer_id) is None:
            for partition in self.partitions:
                if partition.log.last_producer_batch(producer_id) is not None:
                    return partition.number
        return usual

    def next_partition(self, size: int) -> int:
        """For a batch of this size without keys: the next partition in turn."""
        return self._partitioner.take(len(self.partitions), size)

    # --- asking -----------------------------------------------------------------------------
    def end_offsets(self) -> list[int]:
        return [partition.log.end_offset for partition in self.partitions]

    def published_total(self) -> int:
        return sum(p.log.end_offset - p.first_end for p in self.partitions)

    def consumed_total(self) -> int:
        return sum(partition.consumed for partition in self.partitions)

    def size_bytes(self) -> int:
        return sum(partition.log.size_bytes() for partition in self.partitions)


def check_offset(where: object) -> int:
    if isinstance(where, bool) or not isinstance(where, int):
        raise InvalidArgument(
            f"a position is 'earliest', 'latest' or an offset, not {where!r}",
            code="invalid_offset",
        )
    if not 0 <= where <= limits.OFFSET_MAX:
        raise InvalidArgument(f"{where} is not an offset", code="invalid_offset")
    return where
