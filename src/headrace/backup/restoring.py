"""Makes a data directory of a generation.

Rules:
- The target is empty or does not exist. ``@restoring`` is its first file and goes last: a broker does not start
  on a directory in which a restore was interrupted.
- Every file is verified while it is copied, and everything is synced before ``@restoring`` goes.
- A file of the backup becomes a closed segment, with a new index. After the last one comes an empty segment with
  the table of producers: so recovery has nothing to guess, and the broker appends there.
- ``@run`` says that the broker has stopped, and where each partition ends: a lost file is then noticed.
- Damage stops the restore. With ``salvage`` it goes on: damaged records are marked as lost, as a repair by
  ``headrace doctor`` would; without a journal, subscriptions begin at the earliest message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c

from headrace.access.file import NAME as ACCESS_FILE
from headrace.backup.journal import framed, without_topics
from headrace.backup.manifest import (
    ACCESS,
    JOURNAL,
    READ_BYTES,
    BackupDirectory,
    KeptFile,
    KeptPartition,
    KeptTopic,
    Manifest,
    foreign_names,
)
from headrace.backup.sources import lost_batches
from headrace.backup.verifying import damaged_ranges
from headrace.clock import Clock
from headrace.errors import DataCorrupt, InvalidArgument, StorageFull, TopicNotFound
from headrace.files import Files, Handle
from headrace.log.directory import JOURNAL as JOURNAL_FILE
from headrace.log.directory import RESTORING, TOPIC_SETTINGS, DataDirectory
from headrace.log.index import Index
from headrace.log.journal import entries_in
from headrace.log.producers import Producers
from headrace.log.segment import Damage, Found, log_name, scan
from headrace.log.storage import settings_content
from headrace.model import INTERNAL_PREFIX, is_pattern, pattern_matches

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are copied."""


@dataclass
class Restored:
    manifest: Manifest
    topics: int = 0
    records: int = 0
    bytes: int = 0
    lost: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(topic, partition, first, end) that the backup could not give back."""
    problems: list[str] = field(default_factory=list)
    """What else was damaged."""


def restore(
    directory: BackupDirectory,
    target: Path,
    *,
    generation: int | None = None,
    topics: list[str] | None = None,
    salvage: bool = False,
    progress: Progress = lambda done, total: None,
) -> Restored:
    """``topics``: names and wildcards; delayed and staged messages are then left out."""
    directory.check()
    files = directory.files
    if files.exists(target) and (not files.is_directory(target) or foreign_names(files, target)):
        raise InvalidArgument(
            f"{target} is not empty; restore into a new directory, and give that to the broker",
            code="target_not_empty",
        )
    with directory.locked():
        return _Restore(
            directory, target, directory.load(generation), topics, salvage, progress
        ).run()


class _Restore:
    def __init__(
        self,
        directory: BackupDirectory,
        target: Path,
        manifest: Manifest,
        topics: list[str] | None,
        salvage: bool,
        progress: Progress,
    ):
        self._backup, self._target, self._files = directory, target, directory.files
        self._manifest, self._salvage, self._progress = manifest, salvage, progress
        self._topics = [topic for topic in manifest.topics if _is_wanted(topic.topic, topics)]
        self._all = topics is None
        names = [topic.topic for topic in manifest.topics]
        for each in topics or []:  # a misspelt one must not be missed only when it is needed
            if not any(_is_wanted(name, [each]) for name in names):
                known = ", ".join(name for name in names if not name.startswith("__"))
                raise TopicNotFound(f"the generation has no topic {each}; it has {known or 'none'}")
        self._total = sum(
            file.bytes for topic in self._topics for kept in topic.partitions for file in kept.files
        )
        self.done = Restored(manifest)

    def run(self) -> Restored:
        files, target = self._files, self._target
        files.make_directory(target)
        free = files.free_bytes(target)
        if free < self._total:
            raise StorageFull(
                f"the generation has {self._total:,} bytes, and {free:,} are free at {target}",
                retryable=False,
            )
        restoring = target / RESTORING
        files.replace(
            restoring, [b"an unfinished restore; remove this directory and restore again\\n"]
        )
        for topic in self._topics:
            self._restore_topic(topic)
        self._restore_journal()
        self._restore_access()
        run = DataDirectory(target, files, Clock())
        run.end_run(
            {
                t.topic: (t.incarnation, [k.end for k in t.partitions])
                for t in self._topics
                if t.partitions
            },
            clean=self._manifest.clean,
        )
        files.make_private(target)
        files.remove(restoring)
        files.sync_directory(target)
        return self.done

    def _broken(self, sentence: str) -> None:
        """Go on if that is wanted, or stop."""
        if not self._salvage:
            raise DataCorrupt(
                f"{sentence}. Nothing was finished. Restore another generation (--generation), or what can "
                "be read of this one (--salvage)",
                code="backup_damaged",
            )
        self.done.problems.append(sentence)

    # --- messages -----------------------------------------------------------------------------
    def _restore_topic(self, topic: KeptTopic) -> None:
        home = self._target / topic.topic
        self._files.make_directory(home)
        self._files.replace(home / TOPIC_SETTINGS, [settings_content(topic.record())])
        self._files.make_directories(home, map(str, range(len(topic.partitions))))
        for number, kept in enumerate(topic.partitions):
            self._restore_partition(topic, number, kept)
        self._files.sync_directory(home)
        self.done.topics += 1

    def _restore_partition(self, topic: KeptTopic, number: int, kept: KeptPartition) -> None:
        source, home = (
            self._backup.partition(topic, number),
            self._target / topic.topic / str(number),
        )
        for file in kept.files:
            base = max(file.base, kept.start)
            path = home / log_name(base)
            if base > file.base or not self._copy(source / file.name, path, file, topic, number):
                self._copy_batches(source / file.name, path, file, base, topic, number)
            self._index(path, base)
        self.done.records += kept.records
        if not kept.end:
            return
        producers = Producers().dump()
        if kept.producers is not None:
            try:
                producers = self._backup.read(source / kept.producers.name, kept.producers)
            except DataCorrupt as error:
                self._broken(str(error))
        self._files.replace(home / f"{kept.end:020d}.producers", [producers])
        self._files.open(home / log_name(kept.end), write=True, create=True).close()
        self._files.sync_directory(home)

    def _copy(
        self, source: Path, path: Path, file: KeptFile, topic: KeptTopic, number: int
    ) -> bool:
        """Copy the file; False: it is damaged, and what is left of it is to be copied."""
        if self._files.exists(source):
            crc = 0

            def content() -> Iterator[bytes]:
                nonlocal crc
                handle = self._files.open(source)
                try:
                    for at in range(0, file.bytes, READ_BYTES):
                        data = self._files.read_at(handle, at, min(READ_BYTES, file.bytes - at))
                        crc = google_crc32c.extend(crc, data)
                        self._advance(len(data))
                        yield data
                finally:
                    handle.close()

            self._files.replace(path, content())
            if crc == file.crc and self._files.file_size(path) == file.bytes:
                return True
            ranges = damaged_ranges(self._files, source, file)
        else:
            ranges = [(file.base, file.end)]
        damage = ", ".join(f"{first} to {end - 1}" for first, end in ranges[:5])
        self._broken(
            f"{topic.topic}/{number}: offsets {damage or f'{file.base} to {file.end - 1}'} are damaged in "
            f"{source.relative_to(self._backup.path)}"
        )
        return False

    def _copy_batches(
        self, source: Path, path: Path, file: KeptFile, base: int, topic: KeptTopic, number: int
    ) -> None:
        """Copy the valid batches from ``base`` on, and mark the others as lost."""
        handle = self._files.open(source) if self._files.exists(source) else None

        def lost(first: int, end: int, time: int) -> Iterator[bytes]:
            if not self._salvage:
                self._broken(f"{topic.topic}/{number}: offsets {first} to {end - 1} are damaged")
            self.done.lost.append((topic.topic, number, first, end))
            for batch in lost_batches(first, end, time):
                yield batch.raw()

        def content() -> Iterator[bytes]:
            at, time = base, 0
            for part in self._parts(handle, file):
                if part.batch.end_offset <= base:
                    continue
                if part.batch.base_offset > at:
                    yield from lost(at, part.batch.base_offset, time)
                assert handle is not None
                yield self._files.read_at(handle, part.position, part.size)
                at, time = part.batch.end_offset, part.batch.max_timestamp
            if at < file.end:
                yield from lost(at, file.end, time)

        try:
            self._files.replace(path, content())
        finally:
            if handle is not None:
                handle.close()
        self._advance(file.bytes)

    def _parts(self, handle: Handle | None, file: KeptFile) -> Iterator[Found]:
        if handle is not None:
            for part in scan(self._files, handle, file.bytes, base_offset=file.base):
                if not isinstance(part, Damage):
                    yield part

    def _index(self, path: Path, base: int) -> None:
        index = index_of(self._files, path, base)
        self._files.replace(path.with_suffix(".idx"), [index.dump()])

    def _advance(self, size: int) -> None:
        self.done.bytes += size
        self._progress(min(self.done.bytes, self._total), self._total)

    # --- the rest -----------------------------------------------------------------------------
    def _restore_journal(self) -> None:
        if self._manifest.journal is None:
            return
        path = self._backup.folder(self._manifest.generation) / JOURNAL
        try:
            entries = entries_in(self._backup.read(path, self._manifest.journal))[0]
        except DataCorrupt as error:
            self._broken(f"{error}; it holds subscriptions and their positions")
            return
        if not self._all:
            kept = {topic.topic for topic in self._topics}
            entries = without_topics(entries, kept.__contains__)
        self._files.replace(self._target / JOURNAL_FILE, framed(entries))

    def _restore_access(self) -> None:
        if self._manifest.access is None:
            return
        path = self._backup.folder(self._manifest.generation) / ACCESS
        try:
            raw = self._backup.read(path, self._manifest.access)
        except DataCorrupt as error:
            self._broken(f"{error}; it holds users, tokens and their rights")
            return
        self._files.replace(self._target / ACCESS_FILE, [raw])


def index_of(files: Files, path: Path, base: int) -> Index:
    """The index of a segment, from its batches."""
    handle = files.open(path)
    try:
        size = files.size(handle)
        index = Index(base)
        for part in scan(files, handle, size, base_offset=base):
            if isinstance(part, Damage):
                raise DataCorrupt(f"{path} is damaged at byte {part.position}; restore again")
            index.add(part.batch, part.position, part.size)
        index.log_bytes = size
        return index
    finally:
        handle.close()


def _is_wanted(topic: str, wanted: list[str] | None) -> bool:
    if wanted is None or topic in wanted:
        return True
    patterns = [each for each in wanted if is_pattern(each)]
    return not topic.startswith(INTERNAL_PREFIX) and any(
        pattern_matches(p, topic) for p in patterns
    )
