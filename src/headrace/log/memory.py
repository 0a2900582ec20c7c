"""A partition in memory, behind the same interface as the one on disk.

Nothing survives the process. A record is kept until ``drop_before`` lets it go; the broker calls
that once every subscription is done with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from headrace import limits
from headrace.clock import Clock, Loop
from headrace.errors import Closed, OffsetOutOfRange
from headrace.log.batch import Batch
from headrace.log.commit import gather
from headrace.log.interface import Append
from headrace.log.producers import Producers

DECODED_KEPT = 64
"""Batches at the end that may stay decoded: who follows is here, who is far behind takes the time."""


class MemoryLog:
    """See :class:`headrace.log.interface.Log`."""

    def __init__(self, *, clock: Clock, loop: Loop):
        self._clock, self._loop = clock, loop
        self._batches: list[Batch] = []
        self._bases: list[int] = []
        self._bytes = 0
        self._waiting: list[Append] = []
        self._closed = False
        self._last_timestamp = 0
        self._producers = Producers()
        self.start_offset = 0
        self.end_offset = 0
        self.read_only: str | None = None
        self._next_offset = 0
        self._held = False
        self._parked: list[Append] = []
        self.on_advance: Callable[[], None] = lambda: None
        self.on_commit: Callable[[float, int], None] = lambda seconds, count: None
        self._first_arrival = 0.0

    def append(self, entry: Append) -> None:
        if self._closed:
            entry.fail(Closed("the log is closed"))
            return
        if self._held and not entry.hidden:
            self._parked.append(entry)
            return
        if not self._waiting:
            self._first_arrival = self._clock.seconds()
            self._loop.call_soon(self._commit)
        self._waiting.append(entry)

    @property
    def is_held(self) -> bool:
        return self._held

    def hold(self) -> None:
        assert not self._held
        self._commit()  # what was appended before is shown as always
        self._held = True

    def hide_from(self, offset: int) -> None:
        raise AssertionError("a memory log is empty at a start")

    def release(self) -> None:
        assert self._held
        self._held = False
        self.end_offset = self._next_offset
        # In the next turn: whoever releases several partitions has released all of them by then.
        self._loop.call_soon(self.on_advance)
        parked, self._parked = self._parked, []
        for entry in parked:
            self.append(entry)

    def _commit(self) -> None:
        entries, self._waiting = self._waiting, []
        if not entries:  # close was faster
            return
        arrived = self._first_arrival
        while entries:
            group, entries = gather(
                entries,
                end_offset=self._next_offset,
                last_timestamp=self._last_timestamp,
                now_ms=self._clock.now_ms(),
                producers=self._producers,
            )
            for batch in group.batches:
                self._producers.add_batch(batch)
                self._batches.append(batch)
                if len(self._batches) > DECODED_KEPT:
                    self._batches[-1 - DECODED_KEPT].forget()
                self._bases.append(batch.base_offset)
                self._bytes += batch.stored_bytes
            self._last_timestamp = group.timestamp
            self._next_offset = group.offset
            if not self._held:
                self.end_offset = group.offset
            try:
                if not self._held:
                    self.on_advance()
            finally:
                for entry in group.entries:
                    entry.done(entry)
            if group.batches:
                count = sum(batch.count for batch in group.batches)
                self.on_commit(self._clock.seconds() - arrived, count)

    def read(self, offset: int, max_bytes: int = limits.READ_BYTES_DEFAULT) -> list[Batch]:
        end = self.end_offset
        if offset == end:
            return []
        if not self.start_offset <= offset < end:
            raise OffsetOutOfRange(
                f"offset {offset} is not there: the partition holds {self.start_offset} to "
                f"{end - 1} in memory"
                if end > self.start_offset
                else f"offset {offset} is not there: the partition is empty (next offset {end})"
            )
        at = bisect_right(self._bases, offset) - 1
        found = [self._batches[at]]
        taken = found[0].stored_bytes
        for batch in self._batches[at + 1 : at + 1 + limits.LEASE_RECORDS_MAX]:
            taken += batch.stored_bytes
            if taken > max_bytes:
                break
            found.append(batch)
        return found

    def whereabouts(self, offset: int) -> None:
        return None

    def read_cached(self, offset: int) -> Batch:
        return self.read(offset, 1)[0]

    def offset_at(self, timestamp_ms: int) -> int:
        at = bisect_right(self._batches, timestamp_ms - 1, key=lambda batch: batch.max_timestamp)
        if at == len(self._batches):
            return self.end_offset
        batch = self._batches[at]
        times = batch.times() or [batch.base_timestamp]
        first = next(number for number, time in enumerate(times) if time >= timestamp_ms)
        return max(batch.base_offset + first, self.start_offset)

    def drop_before(self, offset: int) -> None:
        """Batches go whole, but ``start_offset`` is exact: what was dropped is not shown again."""
        if offset <= self.start_offset:
            return
        at = bisect_right(self._batches, offset, key=lambda batch: batch.end_offset)
        self._bytes -= sum(batch.stored_bytes for batch in self._batches[:at])
        del self._batches[:at]
        del self._bases[:at]
        self.start_offset = min(offset, self.end_offset)

    def size_bytes(self) -> int:
        return self._bytes

    def last_producer_batch(self, producer_id: int) -> tuple[int, int] | None:
        return self._producers.last(producer_id)

    def next_sequence(self, producer_id: int, epoch: int | None = None) -> int:
        return self._producers.next_sequence(producer_id, epoch)

    def close(self, done: Callable[[], None]) -> None:
        self._closed = True
        self._commit()
        self._batches, self._bases = [], []
        done()
