"""Where records are read: a live broker, or a data directory with no broker at all.

A :class:`Store` says what there is (:meth:`~Store.topics`), waits for more (:meth:`~Store.wait`) and
reads (:meth:`~Store.read`). It is a value: pickled to executors it is its options, and what it opened
stays behind. :func:`records` is how a task reads: it stands between a store's errors and
``failOnDataLoss``, so that both stores lose, and complain, alike.

**The directory** is only read: nothing is locked, repaired or written, not even an index that is
missing. Its end is found by recovery's rule: space that was never written ends the data, and so does a
torn tail; damage before the end is an error that names the offsets. A directory that a live broker
writes into may be read, too, at one's own risk: the newest records may be such as the broker has not
promised to anybody yet, and retention may delete a segment that a task is about to open, which is data
loss like any other.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from headrace.client.reader import BatchReader
from headrace.client.threads import BrokerClient
from headrace.errors import (
    DataCorrupt,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
    TopicNotFound,
)
from headrace.files import Files, Handle
from headrace.log.batch import AFTER_SYNC, LOST, Batch
from headrace.log.index import Index
from headrace.log.recovery import segments_of
from headrace.log.segment import Found, Readers, Segment, log_name, scan
from headrace.model import check_topic_name, is_pattern, pattern_matches
from headrace.spark.arrow import Part
from headrace.spark.connecting import connect
from headrace.spark.options import Connection, SourceOptions
from headrace.spark.positions import RETENTION, Extent, Known, Loss, Span, Topic, loss_error

logger = logging.getLogger("headrace.spark")
READ_BYTES = 2 << 20
LOOK_AGAIN_S = 0.25
"""How often a directory is looked at for news."""


class Store(Protocol):
    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        """What there is of these topics and wildcards; with a time, also where it begins."""

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        """Until there is more than what is known; False when the time is up."""

    def read(self, span: Span) -> Iterator[list[Batch]]:
        """The batches that hold the span's offsets, in order, some at a time."""

    def bounds(self, span: Span) -> tuple[int, int]:
        """The first offset and the end of the span's partition, now."""

    def close(self) -> None: ...


def open_store(options: SourceOptions) -> BrokerStore | DirectoryStore:
    if options.path is not None:
        return DirectoryStore(Path(options.path))
    assert options.connection is not None
    return BrokerStore(options.connection)


# --- a live broker ----------------------------------------------------------------------------------
class BrokerStore:
    def __init__(self, connection: Connection):
        self.connection = connection
        self._client: BrokerClient | None = None
        self._reader: BatchReader | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (BrokerStore, (self.connection,))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # --- the driver's part ------------------------------------------------------------------
    @property
    def client(self) -> BrokerClient:
        """Connected; the first time it waits for a broker that is not up yet."""
        if self._client is None:
            self._client = connect(self.connection)
        return self._client

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        found = self.client.positions(list(wanted), at=at_ms)
        return {
            topic: Topic(
                partitions[0]["incarnation"],
                {
                    part["partition"]: Extent(
                        part["start"], part["end"], part["bytes"], part.get("offset")
                    )
                    for part in partitions
                },
            )
            for topic, partitions in found.items()
        }

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        ends = {
            topic: {number: extent.end for number, extent in state.partitions.items()}
            for topic, state in known.items()
        }
        return self.client.wait_for(ends, topics=list(wanted), timeout=seconds)

    # --- an executor's part -----------------------------------------------------------------
    @property
    def reader(self) -> BatchReader:
        if self._reader is None:
            self._reader = BatchReader(
                self.connection.addresses,
                token=self.connection.token,
                tls=self.connection.tls_context(),
                timeout=self.connection.timeout,
            )
        return self._reader

    def read(self, span: Span) -> Iterator[list[Batch]]:
        return self.reader.read(
            span.topic, span.partition, span.start, span.end, incarnation=span.incarnation
        )

    def bounds(self, span: Span) -> tuple[int, int]:
        return self.reader.bounds(span.topic, span.partition)


# --- a data directory ---------------------------------------------------------------------------------
class ReadOnlyFiles(Files):
    """A disk that is only read."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> Handle:
        if write or create:
            raise OSError(errno.EROFS, "a data directory is only read here", str(path))
        return super().open(path)


class _Segment(Segment):
    """A segment whose index, if it has none that is good, is made in memory alone."""

    def _rebuild_index(self) -> Index:
        index = Index(self.base_offset)
        for part in scan(self._files, self.handle(), self.size, base_offset=self.base_offset):
            if isinstance(part, Found):
                index.add(part.batch, part.position, part.size)
        index.log_bytes = self.size
        return index


@dataclass
class _Partition:
    """The segments of a partition, as they lie there."""

    segments: list[_Segment]
    end: int

    @property
    def start(self) -> int:
        return self.segments[0].base_offset if self.segments else 0

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def ends(self) -> list[int]:
        """Where each segment ends: where the next one begins."""
        return [*(segment.base_offset for segment in self.segments[1:]), self.end]

    def offset_at(self, time_ms: int) -> int:
        for segment, end in zip(self.segments, self.ends(), strict=True):
            index = segment.index()
            if index.batches and index.max_timestamp < time_ms:
                continue
            batch = segment.batch_at_time(time_ms, end)
            if batch is not None:
                times = batch.times() or [batch.base_timestamp]
                later = (number for number, each in enumerate(times) if each >= time_ms)
                return batch.base_offset + next(later, 0)
        return self.end


class DirectoryStore:
    def __init__(self, path: Path):
        self.path = path
        self._files = ReadOnlyFiles()
        self._readers = Readers(self._files)
        self._last: dict[Path, tuple[int, int, int, Index]] = {}
        """Last segments as they were scanned: size and time of the file, bytes of log, index."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (DirectoryStore, (self.path,))

    def close(self) -> None:
        self._readers = Readers(self._files)
        self._last.clear()

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        try:
            names = [
                name
                for name in self._files.names(self.path)
                if not name.startswith("@") and self._files.is_directory(self.path / name)
            ]
        except OSError as error:
            raise InvalidArgument(
                f"option path: {self.path} cannot be read: {error.strerror or error}",
                code="invalid_option",
            ) from None
        found: dict[str, Topic] = {}
        for each in wanted:
            matching = [name for name in names if pattern_matches(each, name)]
            if not matching and not is_pattern(each):
                raise TopicNotFound(f"there is no topic {each!r} in {self.path}")
            for name in matching:
                if name not in found:
                    found[name] = self._topic(name, at_ms)
        return dict(sorted(found.items()))

    def _topic(self, name: str, at_ms: int | None) -> Topic:
        check_topic_name(name, internal=True)
        directory = self.path / name
        try:
            incarnation = int(orjson.loads((directory / "topic.json").read_bytes())["incarnation"])
        except (OSError, ValueError, KeyError, TypeError):
            incarnation = 0  # the directories are the truth; a broker would adopt it as well
        numbers = sorted(
            int(each) for each in self._files.names(directory) if each.isascii() and each.isdigit()
        )
        extents = {}
        for number in numbers:
            found = self._partition(name, number)
            at = None if at_ms is None else found.offset_at(at_ms)
            extents[number] = Extent(found.start, found.end, found.bytes, at)
        return Topic(incarnation, extents)

    def _partition(self, topic: str, number: int) -> _Partition:
        directory = self.path / topic / str(number)
        try:
            found = segments_of(self._files, directory)
        except FileNotFoundError:
            raise TopicNotFound(f"there is no {topic}/{number} in {self.path}") from None
        if not found:
            return _Partition([], 0)
        segments = [
            _Segment(self._files, self._readers, directory / log_name(base), base, size)
            for base, size in found[:-1]
        ]
        base, _ = found[-1]
        path = directory / log_name(base)
        size, index = self._look_at_last(path, base)
        segments.append(_Segment(self._files, self._readers, path, base, size, index))
        return _Partition(segments, index.end_offset)

    def _look_at_last(self, path: Path, base: int) -> tuple[int, Index]:
        """How much of the last segment is log, by recovery's rule (``log/recovery.py``)."""
        status = path.stat()
        known = self._last.get(path)
        if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
            return known[2], known[3]
        handle = self._files.open(path)
        parts = list(scan(self._files, handle, self._files.size(handle), base_offset=base))
        vouched = [
            number
            for number, part in enumerate(parts)
            if isinstance(part, Found) and part.batch.flags & AFTER_SYNC
        ]
        index = Index(base)
        for number, part in enumerate(parts):
            if isinstance(part, Found):
                index.add(part.batch, part.position, part.size)
            elif number > max(vouched, default=-1):
                break
        self._last[path] = (status.st_size, status.st_mtime_ns, index.log_bytes, index)
        return index.log_bytes, index

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            now = self.topics(wanted)
            for topic, state in now.items():
                before = known.get(topic)
                if before is None or state.incarnation != before.incarnation:
                    return True
                for number, extent in state.partitions.items():
                    if (
                        number not in before.partitions
                        or extent.end > before.partitions[number].end
                    ):
                        return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, LOOK_AGAIN_S))

    def bounds(self, span: Span) -> tuple[int, int]:
        found = self._partition(span.topic, span.partition)
        return found.start, found.end

    def read(self, span: Span) -> Iterator[list[Batch]]:
        found = self._partition(span.topic, span.partition)
        if not found.start <= span.start <= span.end <= found.end:
            raise OffsetOutOfRange(
                f"{span.topic}/{span.partition} holds {found.start} to {found.end - 1}"
            )
        offset = span.start
        for segment, end in zip(found.segments, found.ends(), strict=True):
            while segment.base_offset <= offset < min(end, span.end):
                try:
                    batches = segment.read(offset, end, READ_BYTES)
                except FileNotFoundError:
                    raise OffsetOutOfRange(f"{segment.path} was deleted meanwhile") from None
                offset = batches[-1].end_offset
                yield batches


# --- how a task reads -----------------------------------------------------------------------------------
def records(store: Store, span: Span, *, fail_on_data_loss: bool) -> Iterator[Part]:
    """All records of the span. What is gone is an error that names it, or a warning that does."""

    def lost(first: int, end: int, why: str) -> int:
        end = min(end, span.end)
        loss = Loss(span.topic, span.partition, first, end - 1, why)
        if fail_on_data_loss:
            raise loss_error([loss])
        logger.warning("failOnDataLoss is false, so this is skipped: %s", loss)
        return end

    offset = span.start
    while offset < span.end:
        try:
            for batches in store.read(span._replace(start=offset)):
                for batch in batches:
                    end = min(batch.end_offset, span.end)
                    if end <= offset:
                        continue
                    if batch.flags & LOST:
                        offset = lost(offset, end, "were destroyed and given up by a repair")
                        continue
                    yield Part(batch, offset - batch.base_offset, end - batch.base_offset)
                    offset = end
            return
        except OffsetOutOfRange:
            start, end = store.bounds(span)
            if offset < start:
                offset = lost(offset, start, RETENTION)
            elif end < span.end:
                offset = lost(max(offset, end), span.end, "were there once and are not any more")
        except NotFound as error:
            offset = lost(offset, span.end, f"are gone: {error.message}")
        except DataCorrupt as error:
            offset = lost(offset, _behind(store, span, offset), f"are damaged: {error.message}")


def _behind(store: Store, span: Span, offset: int) -> int:
    """The first offset behind damage at ``offset`` that can be read; the span's end if none can."""

    def first_readable(at: int) -> int | None:
        try:
            batches = next(store.read(span._replace(start=at)), None)
        except DataCorrupt:
            return None
        return max(batches[0].base_offset, offset + 1) if batches else None

    low, step = offset, 1
    found: int | None = None
    while found is None and low + step < span.end:
        found = first_readable(low + step)
        if found is None:
            low, step = low + step, step * 2
    if found is None:
        found = first_readable(span.end - 1)
        if found is None:
            return span.end
    while found - low > 1:  # low cannot be read, found can
        middle = (low + found) // 2
        readable = first_readable(middle)
        low, found = (middle, found) if readable is None else (low, min(readable, found))
    return found


__all__ = ["BrokerStore", "DirectoryStore", "Store", "open_store", "records"]
