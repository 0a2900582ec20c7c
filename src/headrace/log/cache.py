"""Recently written and read batches, decoded once for all who read them next.

Shared by all partitions of a broker and bounded in bytes. Keyed by the log and the batch's base
offset: readers that follow the tail ask for exactly that. Used on the event loop's thread only.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace import limits
from headrace.log.batch import Batch


class BatchCache:
    def __init__(self, bytes_max: int = limits.BATCH_CACHE_BYTES):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[tuple[int, int], Batch] = OrderedDict()

    def put(self, log: int, batch: Batch) -> None:
        if batch.stored_bytes * 4 > self._bytes_max:
            return
        key = (log, batch.base_offset)
        old = self._batches.pop(key, None)
        self._bytes += batch.stored_bytes - (old.stored_bytes if old else 0)
        self._batches[key] = batch
        while self._bytes > self._bytes_max:
            _, gone = self._batches.popitem(last=False)
            self._bytes -= gone.stored_bytes

    def get(self, log: int, base_offset: int) -> Batch | None:
        return self._batches.get((log, base_offset))

    def forget(self, log: int) -> None:
        for key in [key for key in self._batches if key[0] == log]:
            self._bytes -= self._batches.pop(key).stored_bytes
