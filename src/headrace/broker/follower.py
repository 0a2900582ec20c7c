"""An ephemeral subscription: every message from now on, to one sink, gone with it.

There is nothing to acknowledge and nothing is kept. A slow follower reads later from the log, so it
costs an offset and not a buffer. When unread records are dropped (by retention, or in a memory topic
that every subscription is done with), it continues with the first record that exists and counts the
ones it missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.delivery import Context, Delivery, Sink
from headrace.broker.selection import select
from headrace.errors import DataCorrupt, HeadraceError, OffsetOutOfRange
from headrace.log.batch import LOST
from headrace.log.interface import ReadPending
from headrace.model import pattern_matches

if TYPE_CHECKING:
    from headrace.broker.topic import Partition

logger = logging.getLogger("headrace.broker")


@dataclass(slots=True, eq=False)
class Follower:
    _context: Context
    pattern: str
    sink: Sink
    allowed: Callable[[str], bool] = lambda topic: True
    """Whether its owner may read a topic that the pattern matches."""
    topic_created: bool = False
    """The topic did not exist: it was created for this."""
    closed: bool = False
    delivered: int = 0
    missed: int = 0
    _places: dict[tuple[str, int], tuple[Partition, int]] = field(default_factory=dict)
    _behind: dict[tuple[str, int], None] = field(default_factory=dict)
    _pending: set[tuple[str, int]] = field(default_factory=set)
    """The partitions whose logs still fetch what was asked for."""
    _pumping: bool = False

    def attach(self, partition: Partition, offset: int) -> None:
        self._places[(partition.topic, partition.number)] = (partition, offset)
        partition.watchers[self] = None
        self._context.budget.used += limits.FOLLOWED_PARTITION_BYTES
        if offset < partition.log.end_offset:
            self.on_advance(partition.topic, partition.number, False)

    def __len__(self) -> int:
        """The number of partitions that it follows."""
        return len(self._places)

    def __bool__(self) -> bool:
        return True

    def matches(self, topic: str) -> bool:
        """Whether it gets the messages of a topic."""
        return pattern_matches(self.pattern, topic) and self.allowed(topic)

    def topics(self) -> set[str]:
        return {topic for topic, _ in self._places}

    def place(self, topic: str, partition: int) -> int:
        """The next offset it will read."""
        return self._places[(topic, partition)][1]

    def move(self, partition: Partition, offset: int) -> None:
        """Go on at another offset."""
        self._places[(partition.topic, partition.number)] = (partition, offset)
        self.on_advance(partition.topic, partition.number, False)

    def detach(self, topic: str) -> None:
        for key in [key for key in self._places if key[0] == topic]:
            partition, _ = self._places.pop(key)
            self._behind.pop(key, None)
            partition.watchers.pop(self, None)
            self._context.budget.used -= limits.FOLLOWED_PARTITION_BYTES

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None:
        self._behind[(topic, partition)] = None
        if at_once and not self._pumping:
            self.pump()
        else:
            self.wake()

    def wake(self) -> None:
        """The sink may have room again, or there is something new."""
        if not self._pumping and self._behind and not self.closed:
            self._pumping = True
            self._context.pace.soon(self.pump)

    def pump(self) -> None:
        self._pumping = True  # a wake-up during a delivery waits for the next turn
        try:
            unfinished = self._pump()
        finally:
            self._pumping = False
        if unfinished:
            self.wake()

    def _pump(self) -> bool:
        """Deliver for a while; returns whether there is more to deliver now."""
        pace = self._context.pace
        deadline = pace.deadline()
        while self._behind and not self.closed:
            room = self.sink.room()
            if room <= 0:
                return False
            key = next(iter(self._behind))
            del self._behind[key]
            partition, offset = self._places[key]
            if offset < partition.log.end_offset:
                moved = self._deliver(partition, offset, room)
                if moved is None or key not in self._places:
                    continue  # not fetched yet; or it was closed, or the topic deleted, meanwhile
                self._places[key] = (partition, moved)
                if moved < partition.log.end_offset:
                    self._behind[key] = None
            if pace.is_past(deadline):
                return True
        return False

    def _deliver(self, partition: Partition, offset: int, room: int) -> int | None:
        """Hand over what fits; returns the next offset, or None when the log still fetches."""
        log = partition.log
        try:
            batch = log.read_cached(offset)
        except ReadPending as pending:
            key = (partition.topic, partition.number)
            if key not in self._pending:
                self._pending.add(key)
                pending.then(lambda: self._fetched(key))
            return None
        except OffsetOutOfRange:
            self.missed += log.start_offset - offset
            return log.start_offset
        except (DataCorrupt, OSError) as error:
            logger.error(
                "a follower of %s cannot read on: %s",
                partition.topic,
                error,
                extra={"topic": partition.topic},
            )
            self.close(
                error if isinstance(error, HeadraceError) else DataCorrupt(f"cannot read: {error}")
            )
            return offset
        start = offset - batch.base_offset
        stop = min(batch.count, start + min(room, limits.LEASE_RECORDS_MAX))
        if batch.flags & LOST:
            self.missed += batch.count - start
            return batch.end_offset
        stop = batch.fitting(start, stop, limits.LEASE_BYTES_MAX)
        chosen = select(
            batch,
            range(start, stop),
            target=b"",
            ttl_ms=partition.message_ttl_ms,
            now_ms=self._context.now_ms(),
        )
        indexes = chosen.wanted
        if indexes:
            self.delivered += len(indexes)
            partition.consumed += len(indexes)
            self.sink.deliver(Delivery(partition.topic, partition.number, batch, indexes))
        return batch.base_offset + stop

    def _fetched(self, key: tuple[str, int]) -> None:
        self._pending.discard(key)
        if key in self._places:
            self._behind[key] = None
            self.wake()

    def close(self, error: HeadraceError | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        for partition, _ in self._places.values():
            partition.watchers.pop(self, None)
        self._context.budget.used -= limits.FOLLOWED_PARTITION_BYTES * len(self._places)
        self._places.clear()
        self.sink.closed(error)
