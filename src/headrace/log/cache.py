"""Recently written and read batches, decoded once for all readers.

All partitions of a broker share the cache. It is bounded in bytes and in number; batches used longest ago
are dropped first. ``find`` returns the batch that holds an offset: a member with room for five hundred
messages needs the same batch of ten thousand twenty times, and it is read and decoded once. Only the event
loop's thread uses the cache, except for ``get``.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict

from headrace import limits
from headrace.log.batch import Batch


class BatchCache:
    def __init__(
        self,
        bytes_max: int = limits.BATCH_CACHE_BYTES,
        count_max: int = limits.BATCH_CACHE_COUNT,
    ):
        self._bytes_max, self._count_max = bytes_max, count_max
        self._bytes = 0
        self._batches: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._bases: dict[int, list[int]] = {}
        """Log -> base offsets of its batches here, in order."""

    def put(self, log: int, batch: Batch) -> None:
        if batch.stored_bytes * 4 > self._bytes_max:
            return
        key = (log, batch.base_offset)
        if key in self._batches:
            self._drop(key)
        self._bytes += batch.stored_bytes
        self._batches[key] = batch
        insort(self._bases.setdefault(log, []), batch.base_offset)
        while self._bytes > self._bytes_max or len(self._batches) > self._count_max:
            self._drop(next(iter(self._batches)))

    def _drop(self, key: tuple[int, int]) -> None:
        log, base = key
        self._bytes -= self._batches.pop(key).stored_bytes
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

    def forget(self, log: int) -> None:
        for base in list(self._bases.get(log, ())):
            self._drop((log, base))
