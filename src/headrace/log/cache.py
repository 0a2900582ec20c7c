"""Recently written and read batches, decoded once for all readers.

All partitions of a broker share the cache. It is bounded in number and in bytes of memory: a batch counts
with all that it can become when it is unpacked and decoded, so reading it does not change the sum. Batches
used longest ago are dropped first. The newest one stays even if it is larger than the cache, because it is
read in slices, and unpacking all of it for each slice would take far longer.

A batch replaces all others that hold one of its records, so no entry hides another one. Runs of small batches
(``run.py``) replace their parts in this way.

``find`` returns the batch that holds an offset: a member with room for five hundred messages needs the same
batch of ten thousand twenty times, and it is read and decoded once. Only the event loop's thread uses the
cache, except for ``get``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

from headrace import limits
from headrace.budget import Budget
from headrace.log.batch import Batch
from headrace.log.run import is_small


class BatchCache:
    def __init__(
        self,
        bytes_max: int = limits.BATCH_CACHE_BYTES,
        count_max: int = limits.BATCH_CACHE_COUNT,
        budget: Budget | None = None,
    ):
        self._budget = budget or Budget()
        self._bytes_max, self._count_max = min(bytes_max, self._budget.limit // 4), count_max
        self._bytes = 0
        self._sizes: dict[tuple[int, int], int] = {}
        """As they were counted: the log may pack a batch after it was put here."""
        self._batches: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._bases: dict[int, list[int]] = {}
        """Log -> base offsets of its batches here, in order."""

    def put(self, log: int, batch: Batch) -> None:
        for base in self._overlapping(log, batch):
            self._drop((log, base))
        key = (log, batch.base_offset)
        size = self._sizes[key] = batch.memory_bytes
        self._batches[key] = batch
        self._add(size)
        insort(self._bases.setdefault(log, []), batch.base_offset)
        while len(self._batches) > 1 and (
            self._bytes > self._bytes_max or len(self._batches) > self._count_max
        ):
            self._drop(next(iter(self._batches)))

    def _overlapping(self, log: int, batch: Batch) -> list[int]:
        """Bases of the batches that hold one of its records."""
        bases = self._bases.get(log)
        if bases is None or bases[-1] < batch.base_offset:  # a new one at the end, as a rule
            if bases is None or self._batches[log, bases[-1]].end_offset <= batch.base_offset:
                return []
            return bases[-1:]
        low = bisect_left(bases, batch.base_offset)
        if low and self._batches[log, bases[low - 1]].end_offset > batch.base_offset:
            low -= 1
        return bases[low : bisect_left(bases, batch.end_offset)]

    def _add(self, size: int) -> None:
        self._bytes += size
        self._budget.used += size

    def _drop(self, key: tuple[int, int]) -> None:
        log, base = key
        del self._batches[key]
        self._add(-self._sizes.pop(key))
        bases = self._bases[log]
        del bases[bisect_right(bases, base) - 1]
        if not bases:
            del self._bases[log]

    def get(self, log: int, base_offset: int) -> Batch | None:
        """The batch that begins at the offset."""
        return self._batches.get((log, base_offset))

    def find(self, log: int, offset: int) -> Batch | None:
        """The batch that holds the offset."""
        bases = self._bases.get(log)
        at = bisect_right(bases, offset) - 1 if bases else -1
        if at < 0 or bases is None:
            return None
        key = (log, bases[at])
        batch = self._batches[key]
        if offset >= batch.end_offset:
            return None
        self._batches.move_to_end(key)
        return batch

    def following(self, log: int, batch: Batch, end: int) -> list[Batch]:
        """The batch, and small ones that follow it without a gap and end before ``end`` or there."""
        found, records, size = [batch], batch.count, batch.stored_bytes
        bases = self._bases[log]
        at = bisect_right(bases, batch.base_offset)
        for base in bases[at : at + limits.RUN_RECORDS]:
            after = self._batches[log, base]
            records += after.count
            size += after.stored_bytes
            if (
                base != found[-1].end_offset
                or after.end_offset > end
                or records > limits.RUN_RECORDS
                or size > limits.RUN_BYTES
                or not is_small(after)
            ):
                break
            found.append(after)
        return found

    def forget(self, log: int) -> None:
        for base in list(self._bases.get(log, ())):
            self._drop((log, base))
