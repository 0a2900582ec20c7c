"""A partition in memory, with the same interface as the one on disk.

Nothing survives the end of the process. A record is kept until ``drop_before`` drops it; the broker calls
that when every subscription has finished it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from headrace import limits
from headrace.budget import Budget, Share
from headrace.clock import Clock, Loop
from headrace.errors import Closed
from headrace.log.base import BaseLog, out_of_range
from headrace.log.batch import Batch
from headrace.log.interface import Append, ClosedSegment
from headrace.log.producers import Producers
from headrace.log.run import is_small, merge
from headrace.log.segment import offset_in
from headrace.model import TopicSettings

DECODED_KEPT = 64
"""Batches at the end that stay decoded for followers; a reader far from the end decodes again."""


class MemoryLog(BaseLog):
    """See :class:`headrace.log.interface.Log`."""

    durable = False
    thread_safe_reads = False

    def __init__(self, *, clock: Clock, loop: Loop, budget: Budget | None = None):
        super().__init__(clock, loop, Producers())
        self._held_memory = Share(budget or Budget())
        self._batches: list[Batch] = []
        self._bases: list[int] = []
        self._bytes = 0
        self._waiting: list[Append] = []
        self._first_arrival = 0.0
        self.start_offset = 0
        self.end_offset = 0

    def append(self, entry: Append) -> None:
        if self._closed:
            entry.fail(self.failed or Closed("the log is closed"))
            return
        # A batch counts as it is when it is decoded, which is how readers keep it here.
        batch = entry.batch
        size = entry.bytes if batch is None else batch.memory_bytes
        refusal = self._held_memory.refusal(size)
        if refusal is not None:
            entry.fail(refusal)
            return
        self._put(entry)

    def _enqueue(self, entry: Append) -> None:
        is_first = not self._waiting
        self._waiting.append(entry)
        if is_first:
            self._first_arrival = self._clock.seconds()
            if entry.at_once:
                self._commit()
            else:
                self._loop.call_soon(self._commit)

    def hold(self) -> None:
        self._commit()  # entries that were appended earlier become visible as usual
        super().hold()

    def _commit(self) -> None:
        entries, self._waiting = self._waiting, []
        arrived = self._first_arrival
        while entries:
            group, entries = self._gather(entries)
            count = 0
            for batch in group.batches:
                count += batch.count
                self._producers.add_batch(batch)
                self._batches.append(batch)
                if len(self._batches) > DECODED_KEPT:
                    self._batches[-1 - DECODED_KEPT].forget()
                self._bases.append(batch.base_offset)
                self._bytes += batch.stored_bytes
                self._held_memory.add(batch.memory_bytes)
            self._last_timestamp = group.timestamp
            self._next_offset = group.offset
            if not self._held:
                self.end_offset = group.offset
            self._answer(group.entries, shown=not self._held)
            if count:
                self.on_commit(self._clock.seconds() - arrived, count)

    def read(self, offset: int, max_bytes: int = limits.READ_BYTES_DEFAULT) -> list[Batch]:
        if offset == self.end_offset:
            return []
        at = self._at(offset)
        found = [self._batches[at]]
        taken = found[0].stored_bytes
        for batch in self._batches[at + 1 : at + 1 + limits.LEASE_RECORDS_MAX]:
            taken += batch.stored_bytes
            if taken > max_bytes:
                break
            found.append(batch)
        return found

    def read_cached(self, offset: int) -> Batch:
        at = self._at(offset)
        batch = self._batches[at]
        if batch.end_offset < self.end_offset and is_small(batch):
            stop = self._run_from(at)
            if stop - at > 1:
                return self._join(at, stop)
        return batch

    def _run_from(self, at: int) -> int:
        """Where the small batches end that follow the one at ``at``; none of them is hidden."""
        records = size = 0
        for number in range(at, min(at + limits.RUN_RECORDS, len(self._batches))):
            batch = self._batches[number]
            records += batch.count
            size += batch.stored_bytes
            if (
                records > limits.RUN_RECORDS
                or size > limits.RUN_BYTES
                or batch.end_offset > self.end_offset
                or not is_small(batch)
            ):
                return number
        return min(at + limits.RUN_RECORDS, len(self._batches))

    def _join(self, at: int, stop: int) -> Batch:
        """Keep these batches as one from now on."""
        old = self._batches[at:stop]
        batch = merge(old)
        self._batches[at:stop] = [batch]
        self._bases[at:stop] = [batch.base_offset]
        self._bytes += batch.stored_bytes - sum(each.stored_bytes for each in old)
        self._held_memory.add(batch.memory_bytes - sum(each.memory_bytes for each in old))
        return batch

    def _at(self, offset: int) -> int:
        """The number of the batch that holds the offset."""
        if not self.start_offset <= offset < self.end_offset:
            raise out_of_range(offset, self.start_offset, self.end_offset)
        return bisect_right(self._bases, offset) - 1

    def offset_at(self, timestamp_ms: int) -> int:
        at = bisect_right(self._batches, timestamp_ms - 1, key=lambda batch: batch.max_timestamp)
        if at == len(self._batches):
            return self.end_offset
        return max(offset_in(self._batches[at], timestamp_ms), self.start_offset)

    def whereabouts(self, offset: int) -> None:
        return None

    def drop_before(self, offset: int) -> None:
        """Only whole batches are dropped, but ``start_offset`` is exact: dropped records are not shown again."""
        if offset <= self.start_offset:
            return
        at = bisect_right(self._batches, offset, key=lambda batch: batch.end_offset)
        self._bytes -= sum(batch.stored_bytes for batch in self._batches[:at])
        self._held_memory.add(-sum(batch.memory_bytes for batch in self._batches[:at]))
        del self._batches[:at]
        del self._bases[:at]
        self.start_offset = min(offset, self.end_offset)

    def size_bytes(self) -> int:
        return self._bytes

    # --- not in memory: segments, settings ------------------------------------------------------
    def closed_segments(self) -> list[ClosedSegment]:
        return []

    def roll_if_old(self, now_ms: int) -> None:
        pass

    def roll_soon(self, bytes_min: int) -> None:
        pass

    def change(self, settings: TopicSettings) -> None:
        pass

    def close(self, done: Callable[[], None]) -> None:
        self._closed = True
        self._commit()
        self._refuse_parked()
        self._batches, self._bases = [], []
        self._held_memory.clear()
        done()
