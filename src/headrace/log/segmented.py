"""The segments of a partition, for readers. ``partition.py`` adds the writer.

Rules:
- ``end_offset`` and the list of segments are replaced, never changed in place. A reader in another thread takes
  ``end_offset`` first and the list second.
- A reader on the loop never waits for the disk (``fetching.py``). A reader in another thread does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TypeVar

from headrace import limits
from headrace.clock import Clock, Loop
from headrace.errors import DataCorrupt
from headrace.log.base import BaseLog, out_of_range
from headrace.log.batch import COMPRESSION, Batch
from headrace.log.cache import BatchCache
from headrace.log.fetching import Fetching
from headrace.log.interface import ClosedSegment, ReadPending, Whereabouts
from headrace.log.producers import Producers
from headrace.log.run import is_small, merge
from headrace.log.segment import Segment, offset_at_time
from headrace.log.workers import Workers

Result = TypeVar("Result")


class SegmentedLog(BaseLog):
    """The reading half of a partition on disk."""

    thread_safe_reads = True

    def __init__(
        self,
        number: int,
        *,
        clock: Clock,
        loop: Loop,
        producers: Producers,
        workers: Workers,
        cache: BatchCache,
        fetching: Fetching,
    ):
        super().__init__(clock, loop, producers)
        self.number = number
        self._segments: tuple[Segment, ...] = ()
        self._workers, self._cache, self._fetching = workers, cache, fetching
        self._unpacking: dict[int, list[Callable[[], None]]] = {}
        """Base offset of a batch that is being unpacked -> who waits for it."""
        self._large: Batch | None = None
        """The last one that was unpacked so; the cache may be too small for it."""

    def read(self, offset: int, max_bytes: int = limits.READ_BYTES_DEFAULT) -> list[Batch]:
        end = self.end_offset
        if offset == end:
            return []
        self._segment_for(offset, end)
        cached = self._cache.get(self.number, offset)
        if cached is not None and (cached.end_offset == end or cached.stored_bytes >= max_bytes):
            return [cached]
        run_bytes = min(max_bytes, limits.BATCH_BYTES_TARGET)
        work = partial(self._read, offset, max_bytes, run_bytes, limits.BATCH_RECORDS_TARGET)
        return self._fetching.read((self.number, "read", offset, max_bytes), work)

    def _read(
        self, offset: int, max_bytes: int, run_bytes: int, run_records: int, at_once: bool
    ) -> list[Batch]:
        end = self.end_offset
        segment, limit = self._segment_for(offset, end)
        is_followed = segment.is_followed(offset)
        try:
            found = segment.read(
                offset, limit, max_bytes,
                run_bytes=run_bytes, run_records=run_records, at_once=at_once,
            )  # fmt: skip
            if is_followed and not at_once:
                with suppress(OSError):  # the reader hears of it when it comes there
                    segment.read_ahead(found[-1].end_offset)
        except FileNotFoundError:
            # Another thread may have dropped it in the meantime; then this raises the right error.
            self._segment_for(offset, end)
            raise
        return found

    def readable_from(self, offset: int) -> int:
        end = self.end_offset
        while offset < end:
            segment, limit = self._segment_for(offset, end)
            try:
                segment.read(offset, limit, 1)
                return offset
            except DataCorrupt:
                offset = segment.after_damage(offset, limit)
        return end

    def whereabouts(self, offset: int) -> Whereabouts:
        def find(at_once: bool) -> Whereabouts:
            return self._segment_for(offset, self.end_offset)[0].whereabouts(offset, at_once)

        return self._fetching.read((self.number, "where", offset), find)

    def read_cached(self, offset: int) -> Batch:
        start, end = self.start_offset, self.end_offset
        if not start <= offset < end:
            raise out_of_range(offset, start, end)
        batch = self._cache.find(self.number, offset)
        if batch is not None and batch.end_offset < end and is_small(batch):
            following = self._cache.following(self.number, batch, end)
            if len(following) > 1:
                batch = merge(following)
                self._cache.put(self.number, batch)
        if batch is None and self._large is not None:
            large, self._large = self._large, None
            if large.base_offset <= offset < large.end_offset:
                batch = self._large = large
        if batch is None:
            work = partial(self._read, offset, 1, limits.RUN_BYTES, limits.RUN_RECORDS)
            batch = self._fetching.read((self.number, "cached", offset), work)[0]
            self._cache.put(self.number, batch)
            if batch.flags & COMPRESSION and batch.plain_bytes > limits.CLIENT_BATCH_BYTES_MAX * 2:
                self._unpack(batch)
        if batch.base_offset in self._unpacking:
            raise ReadPending(self._unpacking[batch.base_offset].append)
        return batch

    def _unpack(self, batch: Batch) -> None:
        """In a worker: an earlier version accepted batches that take the loop too long."""
        waiting: list[Callable[[], None]] = []
        self._unpacking[batch.base_offset] = waiting

        def unpacked(_result: object, _error: BaseException | None) -> None:
            del self._unpacking[batch.base_offset]
            self._large = batch
            for callback in waiting:  # they read again, and get the error, if there was one
                self._loop.call_soon(callback)

        self._workers.submit(batch.plain, unpacked)

    def _segment_for(self, offset: int, end: int) -> tuple[Segment, int]:
        """The segment that holds the offset, and the offset after its last record."""
        segments = self._segments
        start = segments[0].base_offset if segments else end
        if not start <= offset < end:
            raise out_of_range(offset, start, end)
        at = bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
        following = segments[at + 1 : at + 2]
        return segments[at], min(end, following[0].base_offset) if following else end

    def offset_at(self, timestamp_ms: int) -> int:
        """See :class:`~headrace.log.interface.Log`. Damaged records are skipped."""

        def find(at_once: bool) -> tuple[int, int]:
            end = self.end_offset
            return self._with_segments(
                lambda segments: offset_at_time(segments, end, timestamp_ms, at_once)
            ), end

        key = (self.number, "time", timestamp_ms)
        known = self._fetching.answer(key)
        if known is not None:  # one request may ask more partitions than files can be open
            offset, end = known
            if offset >= self.start_offset and (offset < end or end == self.end_offset):
                return int(offset)
        return self._fetching.read(key, find, small=True)[0]

    def _with_segments(self, find: Callable[[tuple[Segment, ...]], Result]) -> Result:
        """What is found in the segments, or in those that are left if retention drops some meanwhile."""
        while True:
            segments = self._segments
            try:
                return find(segments)
            except FileNotFoundError:
                if segments is self._segments:  # retention dropped nothing: the file is missing
                    raise

    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def closed_segments(self) -> list[ClosedSegment]:
        """All segments except the active one."""

        def find(at_once: bool) -> list[ClosedSegment]:
            return self._with_segments(lambda segments: self._closed_of(segments, at_once))

        return self._fetching.read((self.number, "closed"), find)

    def _closed_of(self, segments: tuple[Segment, ...], at_once: bool) -> list[ClosedSegment]:
        found = []
        for segment, following in pairwise(segments):
            index = segment.index(at_once)
            newest = index.max_timestamp
            if index.end_offset < following.base_offset:
                # Its end is damaged, and those records were at most as new as the next segment.
                times = following.index(at_once).times[:1]
                newest = max(newest, *times, 0) or self._last_timestamp
            found.append(
                ClosedSegment(segment.base_offset, following.base_offset, segment.size, newest)
            )
        return found
