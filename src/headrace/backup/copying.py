"""Takes a generation: copies what the backup does not have yet, and writes the manifest last.

The rules are in the head of this package. Memory: one read of batches, the manifests, and the journal of
subscriptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import google_crc32c

from headrace import limits
from headrace.backup.journal import framed, without_topics
from headrace.backup.manifest import (
    ACCESS,
    FORMAT,
    JOURNAL,
    MANIFEST,
    UNFINISHED,
    BackupDirectory,
    KeptFile,
    KeptPartition,
    KeptTopic,
    Manifest,
    SmallFile,
)
from headrace.backup.sources import BackupLost, BackupSource, PointInTime
from headrace.clock import Clock
from headrace.errors import DataCorrupt, HeadraceError, TopicNotFound
from headrace.files import Files, Handle
from headrace.log.batch import LOST, Batch, encode, lost, parse
from headrace.log.columns import NO_ID
from headrace.log.interface import TopicRecord
from headrace.log.producers import Producers
from headrace.log.segment import log_name

Progress = Callable[[int, int], None]
"""Told how many messages of how many are copied."""
NOTE_S = 60.0
"""How often a backup notes what it has copied."""
BEGINNINGS_MAX = 10
BEGIN_AGAIN_S = 0.5
PATIENCE_S = 120.0
"""How long a broker that was lost is waited for: longer than it keeps a backup that nobody reads."""


class Pacer:
    """Keeps the copied bytes under a rate, by sleeping."""

    def __init__(self, rate: float | None, renew: Callable[[], None]):
        self._rate, self._renew = rate, renew
        self._started = time.monotonic()
        self._bytes = 0

    def copied(self, size: int) -> None:
        self._renew()
        if self._rate is None:
            return
        self._bytes += size
        due = self._started + self._bytes / self._rate
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self._renew()


class _FileWriter:
    """Appends batches to a file of the backup; only what was synced gets into a manifest."""

    def __init__(self, files: Files, home: Path, kept: KeptFile):
        self._files = files
        self.kept = kept
        self._handle: Handle = files.open(home / kept.name, write=True, create=True)
        files.truncate(self._handle, kept.bytes)  # what a killed backup has left

    def write(self, found: list[Batch]) -> int:
        kept = self.kept
        parts = [part for batch in found for part in (batch.header(), batch.body)]
        size = self._files.write_at(self._handle, kept.bytes, parts)
        crc = kept.crc
        for part in parts:
            crc = google_crc32c.extend(crc, part)
        self.kept = KeptFile(
            kept.name,
            kept.base,
            found[-1].end_offset,
            kept.bytes + size,
            kept.batches + len(found),
            kept.bytes + size - found[-1].stored_bytes,
            crc,
        )
        return size

    def synced(self) -> KeptFile:
        self._files.sync(self._handle)
        return self.kept

    def close(self) -> KeptFile:
        try:
            self._files.sync(self._handle)
        finally:
            self._handle.close()
        return self.kept


@dataclass
class Copying:
    """One try to take a generation."""

    directory: BackupDirectory
    source: BackupSource
    generation: int
    known: dict[tuple[str, int, int], KeptPartition]
    """(topic, incarnation, partition) -> what the backup has of it."""
    point: PointInTime
    pacer: Pacer
    progress: Progress
    may_append: bool = True
    """False: the manifest of another generation is damaged, and nobody knows what it needs."""
    copied: int = 0
    """Bytes of messages."""
    damaged: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(topic, partition, first, end) that the source could not read."""
    missing: list[str] = field(default_factory=list)
    """Files of earlier generations that were not there any more and were copied again."""
    topics: list[KeptTopic] = field(default_factory=list)
    _done: int = 0
    _total: int = 0
    _noted: float = field(default_factory=time.monotonic)

    def run(self) -> Manifest:
        for topic in self.point.topics:
            for number, (start, end) in enumerate(topic.extents):
                known = self._known(topic.record, number)
                self._total += end - max(start, min(end, known.end if known else 0))
        left_out = []
        for topic in self.point.topics:
            kept = kept_topic(topic.record)
            self.topics.append(kept)
            try:
                for number, (start, end) in enumerate(topic.extents):
                    kept.partitions.append(self._partition(topic.record, kept, number, start, end))
                    self._note_if_due()
            except TopicNotFound:
                self.topics.remove(kept)
                left_out.append(kept.topic)
        return self._finish(left_out)

    def _known(self, topic: TopicRecord, number: int) -> KeptPartition | None:
        return self.known.get((topic.name, topic.incarnation, number))

    # --- a partition --------------------------------------------------------------------------
    def _partition(
        self, topic: TopicRecord, kept: KeptTopic, number: int, start: int, end: int
    ) -> KeptPartition:
        known = self._known(topic, number)
        home = self.directory.partition(kept, number)
        files = [] if known is None else self._confirmed(topic, number, home, known, start, end)
        at = files[-1].end if files else start
        goes_on = known is not None and bool(files) and at == known.end
        lost = [] if known is None else [(a, b) for a, b in known.lost if start < b <= at]
        if known is not None and at == end and (goes_on or known.end == end):
            return KeptPartition(start, end, files, known.producers, lost)
        producers = Producers()
        if goes_on and known is not None and known.producers is not None:
            with suppress(DataCorrupt):
                raw = self.directory.read(home / known.producers.name, known.producers)
                producers = Producers.load(raw) or producers

        def partition(files: list[KeptFile], stop: int) -> KeptPartition:
            """What there is up to ``stop``."""
            damaged = [(a, b) for a, b in self.source.damaged if b <= stop] if at < stop else []
            known_there = self.source.producers(topic, number) if stop == end else Producers()
            table = _merged(known_there, producers, stop)
            small = self._producers(home, table, known)
            return KeptPartition(start, stop, files, small, lost + damaged)

        def note(files: list[KeptFile], stop: int) -> None:
            kept.partitions.append(partition(files, stop))
            self.note()
            kept.partitions.pop()

        files = self._copy(topic, number, home, files, at, end, producers, note)
        whole = partition(files, end)
        self.damaged += [
            (topic.name, number, first, stop) for first, stop in whole.lost[len(lost) :]
        ]
        return whole

    def _confirmed(
        self,
        topic: TopicRecord,
        number: int,
        home: Path,
        known: KeptPartition,
        start: int,
        end: int,
    ) -> list[KeptFile]:
        """The files that are whole in size and have the same last records as the source."""
        files: list[KeptFile] = []
        for kept in known.files:
            if kept.end <= start:
                continue  # retention has deleted it
            try:
                is_whole = self.directory.files.file_size(home / kept.name) >= kept.bytes
            except FileNotFoundError:
                is_whole = False
            if not is_whole:
                self.missing.append(str((home / kept.name).relative_to(self.directory.path)))
                break
            files.append(kept)
        while files and (files[-1].end > end or not self._is_same(topic, number, home, files[-1])):
            files.pop()
        if files and files[0].base > start:
            return []
        return files

    def _is_same(self, topic: TopicRecord, number: int, home: Path, kept: KeptFile) -> bool:
        self.pacer.copied(0)
        found = self.source.batch_at(topic, number, kept.end - 1)
        if found is None:
            return True  # the source has lost what the backup has
        handle = self.directory.files.open(home / kept.name)
        try:
            mine = parse(self.directory.files.read_at(handle, kept.tail, kept.bytes - kept.tail))
        finally:
            handle.close()
        if mine is None or mine.flags & LOST or found.flags & LOST:
            return mine is not None and bool(found.flags & LOST)
        first = max(mine.base_offset, found.base_offset)
        return records(mine, first, kept.end) == records(found, first, kept.end)

    def _copy(
        self,
        topic: TopicRecord,
        number: int,
        home: Path,
        files: list[KeptFile],
        at: int,
        end: int,
        producers: Producers,
        note: Callable[[list[KeptFile], int], None],
    ) -> list[KeptFile]:
        """Append what is new, in files of the size of a segment."""
        if at == end:
            return files
        disk = self.directory.files
        disk.make_directory(home)
        files = list(files)
        writer: _FileWriter | None = None
        try:
            for whole in self.source.read(topic, number, at, end):
                found = [_within(batch, at, end) for batch in whole]
                if found[0].base_offset != at or found[-1].end_offset > end:
                    raise DataCorrupt(
                        f"{topic.name}/{number}: the source has a batch from offset "
                        f"{found[0].base_offset} where {at} was due; the backup was not finished"
                    )
                if writer is None:
                    is_new = not files or _is_full(files[-1], topic) or not self.may_append
                    kept = self._new_file(home, at) if is_new else files.pop()
                    writer = _FileWriter(disk, home, kept)
                size = writer.write(found)
                for batch in found:
                    producers.add_batch(batch)
                self.copied += size
                self._done += found[-1].end_offset - at
                at = found[-1].end_offset
                if _is_full(writer.kept, topic):
                    files.append(writer.close())
                    writer = None
                self.progress(self._done, self._total)
                self.pacer.copied(size)
                if self._is_note_due():
                    disk.sync_directory(home)
                    note([*files, writer.synced()] if writer else files, at)
        except BaseException:  # also Ctrl-C: what is copied is copied
            if writer is not None:
                files.append(writer.close())
                writer = None
            disk.sync_directory(home)
            if files:
                with suppress(HeadraceError):  # the broker may be gone
                    note(files, at)
            raise
        finally:
            if writer is not None:
                files.append(writer.close())
        disk.sync_directory(home)
        return files

    def _new_file(self, home: Path, base: int) -> KeptFile:
        name, number = log_name(base), 0
        while self.directory.files.exists(home / name):  # it belongs to another generation
            number += 1
            name = f"{base:020d}-{number}.log"
        return KeptFile(name, base, base, 0, 0, 0, 0)

    def _producers(
        self, home: Path, producers: Producers, known: KeptPartition | None
    ) -> SmallFile | None:
        if not len(producers):
            return None
        raw = producers.dump()
        old = None if known is None else known.producers
        if old is not None and (old.bytes, old.crc) == (len(raw), google_crc32c.value(raw)):
            return old
        return self.directory.write(home / f"{self.generation:06d}.producers", [raw])

    # --- manifests ----------------------------------------------------------------------------
    def _manifest(self, topics: list[KeptTopic]) -> Manifest:
        point = self.point
        return Manifest(
            FORMAT,
            self.generation,
            point.time,
            Clock().now_ms(),
            self.source.name,
            point.clean,
            topics,
            copied=self.copied,
        )

    def _is_note_due(self) -> bool:
        return time.monotonic() - self._noted >= NOTE_S

    def _note_if_due(self) -> None:
        if self._is_note_due():
            self.note()

    def note(self) -> None:
        """Remember what is copied, for the next backup if this one is killed."""
        self._noted = time.monotonic()
        manifest = self._manifest([topic for topic in self.topics if topic.partitions])
        self.directory.files.replace(self.directory.path / UNFINISHED, [manifest.dump()])

    def _finish(self, left_out: list[str]) -> Manifest:
        manifest, folder = self._manifest(self.topics), self.directory.folder(self.generation)
        manifest.left_out = left_out
        journal = self.point.journal
        if left_out:
            there = {topic.topic for topic in self.topics}
            journal = without_topics(journal, there.__contains__)
        if journal:
            manifest.journal = self.directory.write(folder / JOURNAL, framed(journal))
        if self.point.access:
            manifest.access = self.directory.write(folder / ACCESS, [self.point.access])
        manifest.access_left_out = self.point.access is None
        self.directory.files.make_directory(folder)
        self.directory.files.replace(folder / MANIFEST, [manifest.dump()])
        return manifest


def kept_topic(record: TopicRecord) -> KeptTopic:
    settings = record.settings.as_dict()
    return KeptTopic(record.name, record.incarnation, record.created_ms, record.owner, settings, [])


def records(batch: Batch, first: int, end: int) -> list[tuple[Any, ...]]:
    """What the batch says of each record, whatever other records it has: a broker joins small batches."""
    columns = batch.columns(range(first - batch.base_offset, end - batch.base_offset))
    absent: dict[str, Any] = {"keys": None, "headers": None, "times": batch.base_timestamp}
    absent |= {"ids": NO_ID, "expiry": 0, "targets": b""}
    given = [getattr(columns, name) or repeat(nothing) for name, nothing in absent.items()]
    return list(zip(columns.values, *given, strict=False))


def _within(batch: Batch, first: int, end: int) -> Batch:
    """The part of the batch from ``first`` on and before ``end``; as a rule that is all of it."""
    if first <= batch.base_offset and batch.end_offset <= end:
        return batch
    low = max(first, batch.base_offset)
    if batch.flags & LOST:
        return lost(low, min(end, batch.end_offset) - low, batch.base_timestamp)
    columns = batch.columns(
        range(low - batch.base_offset, min(end, batch.end_offset) - batch.base_offset)
    )
    part = encode(columns)
    times = columns.times or [batch.base_timestamp]
    part.base_offset, part.base_timestamp, part.max_timestamp = low, times[0], times[-1]
    return part


def _is_full(kept: KeptFile, topic: TopicRecord) -> bool:
    return kept.bytes >= topic.settings.segment_bytes or kept.batches >= limits.SEGMENT_BATCHES_MAX


def _merged(theirs: Producers, ours: Producers, end: int) -> Producers:
    """The table at the end: what the copied batches say, and of other producers what the source knows."""
    merged = Producers()
    known = {row[0] for row in ours.rows()}
    for row in theirs.rows():
        producer, _, _, count, base = row
        if producer not in known and base + count <= end:
            merged.add(*row)
    for row in ours.rows():
        merged.add(*row)
    return merged


# --- the whole ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Taken:
    """What a backup has done."""

    manifest: Manifest
    copied: int
    """Bytes of messages, also by tries that failed."""
    damaged: list[tuple[str, int, int, int]]
    missing: list[str]
    forgotten: list[int]
    """Generations that were removed."""
    began: int
    """How often it had to begin."""


def take(
    directory: BackupDirectory,
    source: BackupSource,
    *,
    keep: int = 7,
    rate: float | None = None,
    progress: Progress = lambda done, total: None,
) -> Taken:
    """Add a generation to the backup; of the older ones, the newest ``keep - 1`` stay."""
    directory.create()
    with directory.locked() as numbers:
        copied = began = 0
        pacer = Pacer(rate, source.renew)
        while True:
            began += 1
            copying = _begin(directory, source, pacer, progress, began > 1)
            try:
                manifest = copying.run()
                break
            except BackupLost:
                if began >= BEGINNINGS_MAX:
                    raise
            finally:
                copied += copying.copied
                source.end()
        with suppress(FileNotFoundError):
            directory.files.remove(directory.path / UNFINISHED)
        kept = [*numbers, manifest.generation][-keep:]
        forgotten = [number for number in numbers if number not in kept]
        for number in forgotten:
            directory.forget(number)
        _tidy(directory)
        return Taken(manifest, copied, copying.damaged, copying.missing, forgotten, began)


def _begin(
    directory: BackupDirectory,
    source: BackupSource,
    pacer: Pacer,
    progress: Progress,
    is_again: bool,
) -> Copying:
    known: dict[tuple[str, int, int], KeptPartition] = {}
    manifests, is_whole = _tidy(directory)
    for manifest in manifests[-2:]:  # the newest, and what a killed backup has copied
        for topic, number, kept in manifest.partitions():
            known[(topic.topic, topic.incarnation, number)] = kept
    generation = max(directory.numbers(), default=0) + 1
    point = _point(source, is_again)
    return Copying(directory, source, generation, known, point, pacer, progress, is_whole)


def _point(source: BackupSource, is_again: bool) -> PointInTime:
    """A new point in time. If the broker was lost, wait until it is back, and has forgotten the old one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return source.begin()
        except HeadraceError as error:
            may_help = error.retryable or error.code in ("backup_running", "connect_failed")
            if not (is_again and may_help) or time.monotonic() > deadline:
                raise
        time.sleep(BEGIN_AGAIN_S)


def _tidy(directory: BackupDirectory) -> tuple[list[Manifest], bool]:
    """Remove what no manifest mentions, unless one cannot be read.

    Returns the manifests, the newest last, and whether all of them could be read.
    """
    manifests = []
    is_whole = True
    for number in directory.numbers():
        try:
            manifests.append(directory.load(number))
        except DataCorrupt:  # 'headrace verify' tells of it
            is_whole = False
    unfinished = directory.unfinished()
    if unfinished is not None:
        manifests.append(unfinished)
    if is_whole:
        directory.remove_unused(manifests)
    return manifests, is_whole
