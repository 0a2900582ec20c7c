"""A data directory as a store: a backup, or the directory of a stopped broker, read with no broker.

It is only read: nothing is locked, repaired or written, not even a missing index. A partition's
end is found by recovery's rule (``log/recovery.py``): space that was never written ends the data, and so
does a torn tail; damage before the end is an error that names the offsets. Records of a commit of staged
batches that was decided and not finished (``broker/staging.py``) are not read: a broker does not show them
either before it has finished the commit.

The directory of a running broker may be read, too, at your own risk: the broker may not have confirmed
the newest records yet, and retention may delete a segment that a task is about to open, which is data
loss like any other.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from headrace import limits
from headrace.errors import InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.files import Files, Handle
from headrace.log.batch import Batch
from headrace.log.directory import JOURNAL, TOPIC_SETTINGS
from headrace.log.index import Index
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.recovery import read_last, segments_of
from headrace.log.segment import Found, Readers, Segment, log_name, offset_at_time, scan
from headrace.model import check_topic_name, is_pattern, pattern_matches
from headrace.spark.source.positions import Extent, Known, TaskSpan, TopicExtents

READ_BYTES = 2 << 20
LOOK_AGAIN_S = 0.25
"""How often a directory is checked for new records."""


class ReadOnlyFiles(Files):
    """A disk that is only read."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> Handle:
        if write or create:
            raise OSError(errno.EROFS, "a data directory is only read here", str(path))
        return super().open(path)


class _ReadOnlySegment(Segment):
    """A segment whose index, if it has no good one, is made in memory alone.

    A broker may rewrite the file meanwhile: then it has another size, and the index is that of the open file.
    """

    def _load_index(self) -> Index | None:
        return super()._load_index() if self._files.size(self.handle()) == self.size else None

    def _rebuild_index(self) -> Index:
        return self._scan_index()


@dataclass
class _StoredPartition:
    """The segments of a partition."""

    segments: list[_ReadOnlySegment]
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


class _StagedCommit(NamedTuple):
    """A commit that was decided and not finished (``docs/format.md``, journal entry ``T``)."""

    producer: int
    epoch: int
    records: dict[tuple[str, int], int]
    """The number of records for each partition."""


def unfinished_commits(raw: bytes) -> list[_StagedCommit]:
    """The commits in a journal's bytes whose records may be stored in part."""
    newest: dict[str, dict[str, Any]] = {}
    for payload in entries_in(raw)[0]:
        if payload[:1] == b"T":
            item = orjson.loads(payload[1:])
            newest[item["name"]] = item
    found = []
    for item in newest.values():
        if not item["finished"] and "producer" in item:
            records: dict[tuple[str, int], int] = {}
            for _, count, partition, topic in item["pieces"]:
                records[topic, partition] = records.get((topic, partition), 0) + count
            found.append(_StagedCommit(item["producer"], item["epoch"], records))
    return found


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

    def names(self) -> list[str]:
        """All topics, the internal ones too."""
        try:
            return [
                name
                for name in self._files.names(self.path)
                if not name.startswith("@") and self._files.is_directory(self.path / name)
            ]
        except OSError as error:
            raise InvalidArgument(
                f"option path: {self.path} cannot be read: {error.strerror or error}",
                code="invalid_option",
            ) from None

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        names = self.names()
        hidden = self._hidden()
        found: dict[str, TopicExtents] = {}
        for each in wanted:
            matching = [name for name in names if pattern_matches(each, name)]
            if not matching and not is_pattern(each):
                raise TopicNotFound(f"there is no topic {each!r} in {self.path}")
            for name in matching:
                if name not in found:
                    found[name] = self._topic(name, at_ms, hidden)
        return dict(sorted(found.items()))

    def _topic(
        self, name: str, at_ms: int | None, hidden: dict[tuple[str, int], int]
    ) -> TopicExtents:
        check_topic_name(name, internal=True)
        directory = self.path / name
        try:
            incarnation = int(
                orjson.loads((directory / TOPIC_SETTINGS).read_bytes())["incarnation"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            incarnation = 0  # the directories are the truth; a broker would adopt it as well
        numbers = sorted(
            int(each) for each in self._files.names(directory) if each.isascii() and each.isdigit()
        )
        extents = {}
        for number in numbers:
            found = self._partition(name, number)
            end = hidden.get((name, number), found.end)
            at = None if at_ms is None else offset_at_time(found.segments, end, at_ms)
            extents[number] = Extent(found.start, end, found.bytes, at)
        return TopicExtents(incarnation, extents)

    # --- commits that were not finished -------------------------------------------------------
    def _hidden(self) -> dict[tuple[str, int], int]:
        """The first offset, in each partition, of a commit that was not finished."""
        try:
            commits = unfinished_commits(self._files.read_file(self.path / JOURNAL))
        except FileNotFoundError:
            return {}
        hidden: dict[tuple[str, int], int] = {}
        for commit in commits:
            stored = {where: self._stored(*where, commit) for where in commit.records}
            if any(stored[where][1] < count for where, count in commit.records.items()):
                hidden |= {where: first for where, (first, count) in stored.items() if count}
        return hidden

    def _stored(self, topic: str, number: int, commit: _StagedCommit) -> tuple[int, int]:
        """(first offset, how many) of the commit's records: the last ones, if there are any."""
        try:
            partition = self._partition(topic, number)
        except TopicNotFound:  # it was deleted, and the commit is finished without it
            return 0, commit.records[topic, number]
        first, count = partition.end, 0
        for segment in reversed(partition.segments):
            handle = segment.handle()
            parts = list(scan(self._files, handle, segment.size, base_offset=segment.base_offset))
            for part in reversed(parts):
                if not isinstance(part, Found):
                    return first, count
                batch = part.batch
                if (batch.producer_id, batch.producer_epoch) != (commit.producer, commit.epoch):
                    return first, count
                first, count = batch.base_offset, count + batch.count
        return first, count

    # --- segments -------------------------------------------------------------------------------

    def _partition(self, topic: str, number: int) -> _StoredPartition:
        directory = self.path / topic / str(number)
        try:
            found = segments_of(self._files, directory)
        except FileNotFoundError:
            raise TopicNotFound(f"there is no {topic}/{number} in {self.path}") from None
        if not found:
            return _StoredPartition([], 0)
        segments = [
            _ReadOnlySegment(self._files, self._readers, directory / log_name(base), base, size)
            for base, size in found[:-1]
        ]
        base, _ = found[-1]
        path = directory / log_name(base)
        size, index = self._look_at_last(path, base)
        before = segments[-1].index().end_offset if segments and not index.batches else 0
        if before > base:  # an empty file, created and never used: recovery would remove it
            return _StoredPartition(segments, before)
        segments.append(_ReadOnlySegment(self._files, self._readers, path, base, size, index))
        return _StoredPartition(segments, index.end_offset)

    def _look_at_last(self, path: Path, base: int) -> tuple[int, Index]:
        """How much of the last segment is log, by recovery's rule (``log/recovery.py``)."""
        status = path.stat()
        known = self._last.get(path)
        if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
            return known[2], known[3]
        with closing(self._files.open(path)) as handle:
            found, _, _ = read_last(self._files, handle, path, base, Producers())
        self._last[path] = (status.st_size, status.st_mtime_ns, found.size, found.index)
        return found.size, found.index

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            now = self.topics(wanted or list(known))
            for topic, state in now.items():
                before = known.get(topic)
                if before is None or state.incarnation != before.incarnation:
                    return True
                for number, extent in state.partitions.items():
                    seen = before.partitions.get(number)
                    if extent.end > seen.end if seen is not None else wanted:
                        return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, LOOK_AGAIN_S))

    def bounds(self, span: TaskSpan) -> tuple[int, int]:
        found = self._partition(span.topic, span.partition)
        return found.start, found.end

    def read(self, span: TaskSpan) -> Iterator[list[Batch]]:
        found = self._partition(span.topic, span.partition)
        offset = span.start
        for segment, end in zip(found.segments, found.ends(), strict=True):
            while segment.base_offset <= offset < min(end, span.end):
                try:
                    batches = segment.read(
                        offset, end, READ_BYTES, run_bytes=limits.BATCH_BYTES_TARGET
                    )
                except FileNotFoundError:
                    raise OffsetOutOfRange(f"{segment.path} was deleted meanwhile") from None
                yield batches
                offset = batches[-1].end_offset
        if offset < span.end:
            raise OffsetOutOfRange(
                f"offset {offset} does not exist: {span.topic}/{span.partition} holds {found.start} to "
                f"{found.end - 1}"
            )
