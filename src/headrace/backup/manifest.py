"""What belongs to a generation, and the directory that holds the generations.

A manifest is hostile until it was read: its checksum is compared, its types are checked, and each name in it
must be one that a backup writes. So no manifest leads to a path outside of the backup or the restored directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import google_crc32c
import msgspec
from msgspec import Meta

from headrace import limits
from headrace.errors import DataCorrupt, DirectoryLocked, HeadraceError, InvalidArgument, NotFound
from headrace.files import Files
from headrace.log.interface import TopicRecord
from headrace.log.sealed import seal, unseal
from headrace.model import TopicSettings, check_topic_name

FORMAT = 1
MARK = "@backup"
LOCK = "@lock"
UNFINISHED = "@unfinished"
GENERATIONS = "generations"
TOPICS = "topics"
MANIFEST = "manifest.json"
JOURNAL = "journal"
ACCESS = "access.json"
READ_BYTES = 4 << 20
_LOG = re.compile(r"[0-9]{20}(-[0-9]{1,6})?\.log")
_PRODUCERS = re.compile(r"[0-9]{6,9}\.producers")
_GENERATION = re.compile(r"[0-9]{6,9}")
Whole = Annotated[int, Meta(ge=0, le=limits.OFFSET_MAX)]
Crc = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]


class KeptFile(msgspec.Struct, array_like=True, frozen=True):
    """A file with batches; only its first ``bytes`` belong to the generation."""

    name: str
    base: Whole
    end: Whole
    bytes: Whole
    batches: Whole
    tail: Whole
    """Where its last batch begins."""
    crc: Crc
    """crc32c of the bytes."""


class SmallFile(msgspec.Struct, array_like=True, frozen=True):
    name: str
    bytes: Whole
    crc: Crc


class KeptPartition(msgspec.Struct, frozen=True):
    start: Whole
    end: Whole
    files: list[KeptFile] = []
    """In order and without gaps. The first may begin before ``start``: those records are not restored."""
    producers: SmallFile | None = None
    lost: list[tuple[int, int]] = []
    """Offsets (first, end) that the source could not read."""

    @property
    def records(self) -> int:
        return self.end - self.start


class KeptTopic(msgspec.Struct, frozen=True):
    topic: str
    incarnation: Whole
    created_ms: int
    owner: str | None
    settings: dict[str, Any]
    partitions: list[KeptPartition]

    @property
    def directory(self) -> str:
        return f"{self.topic}@{self.incarnation:x}"

    def record(self) -> TopicRecord:
        known = {k: v for k, v in self.settings.items() if k in TopicSettings.__dataclass_fields__}
        settings = TopicSettings.of(known)
        return TopicRecord(self.topic, settings, self.incarnation, self.created_ms, self.owner)


class Manifest(msgspec.Struct):
    format: int
    generation: Whole
    time: int
    """The point in time, in milliseconds since 1970."""
    finished: int
    source: str
    clean: bool
    """False: a copy of a directory whose broker was killed."""
    topics: list[KeptTopic]
    journal: SmallFile | None = None
    access: SmallFile | None = None
    access_left_out: bool = False
    copied: Whole = 0
    """Bytes of messages that were copied for this generation."""
    left_out: list[str] = []
    """Topics that were deleted while it was taken."""

    def partitions(self) -> Iterator[tuple[KeptTopic, int, KeptPartition]]:
        for topic in self.topics:
            for number, partition in enumerate(topic.partitions):
                yield topic, number, partition

    @property
    def size(self) -> int:
        """Bytes of messages."""
        return sum(file.bytes for _, _, kept in self.partitions() for file in kept.files)

    @property
    def records(self) -> int:
        return sum(kept.records for _, _, kept in self.partitions())

    @property
    def lost(self) -> int:
        return sum(end - first for _, _, kept in self.partitions() for first, end in kept.lost)

    def dump(self) -> bytes:
        return seal(msgspec.to_builtins(self))


def parse(raw: bytes) -> Manifest:
    """A manifest whose every name is safe; :class:`DataCorrupt` if it is damaged or makes no sense."""
    document = unseal(raw)
    if document.get("format") != FORMAT:
        raise DataCorrupt(
            f"its format is {document.get('format')!r}, and this version of Headrace reads {FORMAT}"
        )
    try:
        manifest = msgspec.convert(document, Manifest, strict=True)
        _check(manifest)
    except (msgspec.ValidationError, HeadraceError, ValueError) as error:
        raise DataCorrupt(f"it makes no sense ({error})") from None
    return manifest


def _check(manifest: Manifest) -> None:
    seen = set()
    for topic in manifest.topics:
        check_topic_name(topic.topic, internal=True)
        if topic.topic in seen or len(topic.partitions) > limits.PARTITIONS_PER_TOPIC_MAX:
            raise ValueError(f"topic {topic.topic} cannot be so")
        seen.add(topic.topic)
        topic.record()
    for topic, number, kept in manifest.partitions():
        where = f"{topic.topic}/{number}"
        if kept.producers is not None and not _PRODUCERS.fullmatch(kept.producers.name):
            raise ValueError(f"{where} has a file {kept.producers.name!r}")
        at = kept.files[0].base if kept.files else kept.end
        for file in kept.files:
            if not _LOG.fullmatch(file.name) or int(file.name[:20]) != file.base:
                raise ValueError(f"{where} has a file {file.name!r}")
            if not (file.base == at < file.end) or file.tail >= file.bytes:
                raise ValueError(f"{where} has a gap at offset {at}")
            at = file.end
        if at != kept.end or not (kept.start <= kept.end):
            raise ValueError(f"{where} ends at {at}, not at {kept.end}")
        if kept.files and kept.files[0].base > kept.start:
            raise ValueError(f"{where} begins at {kept.files[0].base}, not at {kept.start}")
    for small, name in ((manifest.journal, JOURNAL), (manifest.access, ACCESS)):
        if small is not None and small.name != name:
            raise ValueError(f"it has a file {small.name!r}")


class BackupDirectory:
    def __init__(self, path: Path, files: Files | None = None):
        self.path = path
        self.files = files or Files()

    # --- opening ------------------------------------------------------------------------------
    def check(self) -> None:
        """:class:`NotFound` or :class:`InvalidArgument` if it is not a backup."""
        if not self.files.exists(self.path):
            raise NotFound(f"directory {self.path} does not exist", code="backup_not_found")
        if not self.files.exists(self.path / MARK):
            raise InvalidArgument(
                f"{self.path} is not a backup: no 'headrace backup' has finished there; to look at a data "
                "directory use 'headrace doctor'",
                code="not_a_backup",
            )
        document = unseal(self.files.read_file(self.path / MARK))
        if document.get("format") != FORMAT:
            raise InvalidArgument(
                f"{self.path} was written by another version of Headrace", code="newer_format"
            )

    def create(self) -> None:
        """Make it a backup, if it is empty or does not exist."""
        if self.files.exists(self.path / MARK):
            self.check()
            return
        if self.files.exists(self.path) and (
            not self.files.is_directory(self.path) or foreign_names(self.files, self.path)
        ):
            raise InvalidArgument(
                f"{self.path} is not empty and not a backup; name a new directory, or an earlier backup",
                code="not_a_backup",
            )
        for directory in (self.path, self.path / GENERATIONS, self.path / TOPICS):
            self.files.make_directory(directory)
        self.files.make_private(self.path)
        self.files.replace(self.path / MARK, [seal({"format": FORMAT})])

    @contextmanager
    def locked(self) -> Iterator[list[int]]:
        """For one command at a time; yields the numbers of the generations. A read-only medium can be read, too."""
        lock = self.path / LOCK
        try:
            handle = self.files.open(lock, write=True, create=True)
        except OSError:
            handle = self.files.open(lock)
        try:
            if not self.files.lock(handle):
                raise DirectoryLocked(
                    f"another headrace backup, restore or verify uses {self.path}; wait for its end"
                )
            yield self.numbers()
        finally:
            handle.close()

    # --- generations --------------------------------------------------------------------------
    def numbers(self) -> list[int]:
        """The generations that were finished, oldest first."""
        home = self.path / GENERATIONS
        names = self.files.names(home) if self.files.exists(home) else []
        return [
            int(name)
            for name in names
            if _GENERATION.fullmatch(name) and self.files.exists(home / name / MANIFEST)
        ]

    def folder(self, number: int) -> Path:
        return self.path / GENERATIONS / f"{number:06d}"

    def load(self, number: int | None = None) -> Manifest:
        """A generation; the newest, if none is named."""
        numbers = self.numbers()
        if not numbers:
            raise NotFound(f"{self.path} has no finished generation", code="generation_not_found")
        number = numbers[-1] if number is None else number
        if number not in numbers:
            known = ", ".join(map(str, numbers))
            raise NotFound(
                f"{self.path} has no generation {number}; it has {known}",
                code="generation_not_found",
            )
        path = self.folder(number) / MANIFEST
        try:
            manifest = parse(self.files.read_file(path))
        except DataCorrupt as error:
            raise DataCorrupt(
                f"{path} is damaged: {error}; use another generation (--generation)",
                code="manifest_damaged",
            ) from None
        if manifest.generation != number:
            raise DataCorrupt(f"{path} is of generation {manifest.generation}")
        return manifest

    def unfinished(self) -> Manifest | None:
        """What a backup that was killed had copied; None if there is nothing that can be used.

        A file may be longer than it says if the backup was finished after all: then it must not be used.
        """
        try:
            found = parse(self.files.read_file(self.path / UNFINISHED))
        except (OSError, DataCorrupt):
            return None
        return found if found.generation > max(self.numbers(), default=0) else None

    def partition(self, topic: KeptTopic, number: int) -> Path:
        return self.path / TOPICS / topic.directory / str(number)

    def remove_unused(self, used: Iterable[Manifest]) -> None:
        """Remove files of messages that none of these manifests mentions, and folders without a manifest."""
        files = self.files
        wanted: set[Path] = set()
        for manifest in used:
            for topic, number, kept in manifest.partitions():
                home = self.partition(topic, number)
                wanted.update(home / file.name for file in kept.files)
                if kept.producers is not None:
                    wanted.add(home / kept.producers.name)
        homes = {path.parent for path in wanted}
        for topic_home in self._folders(self.path / TOPICS):
            for home in self._folders(topic_home):
                for name in files.names(home):
                    if home / name not in wanted:
                        files.remove(home / name)
                if home not in homes:
                    with suppress(OSError):
                        home.rmdir()
            with suppress(OSError):  # it has partitions
                topic_home.rmdir()
        for folder in self._folders(self.path / GENERATIONS):
            if not files.exists(folder / MANIFEST):
                files.remove_tree(folder)

    def _folders(self, path: Path) -> list[Path]:
        names = self.files.names(path) if self.files.exists(path) else []
        return [path / name for name in names if self.files.is_directory(path / name)]

    def forget(self, number: int) -> None:
        """Remove a generation; its manifest first, so that it is whole or not there."""
        self.files.remove(self.folder(number) / MANIFEST)
        self.files.sync_directory(self.folder(number))
        self.files.remove_tree(self.folder(number))

    # --- files --------------------------------------------------------------------------------
    def write(self, path: Path, content: list[bytes]) -> SmallFile:
        self.files.make_directory(path.parent)
        self.files.replace(path, content)
        crc = 0
        for part in content:
            crc = google_crc32c.extend(crc, part)
        return SmallFile(path.name, sum(map(len, content)), crc)

    def read(self, path: Path, expected: SmallFile) -> bytes:
        """The content of a small file; :class:`DataCorrupt` if it is not what was written."""
        try:
            raw = self.files.read_file(path)
        except FileNotFoundError:
            raise DataCorrupt(f"{path} is missing") from None
        if len(raw) != expected.bytes or google_crc32c.value(raw) != expected.crc:
            raise DataCorrupt(f"{path} is damaged: its checksum is wrong")
        return raw


def checksums(
    files: Files, path: Path, sizes: Iterable[int], progress: Callable[[int], None]
) -> dict[int, int | None]:
    """crc32c of the first bytes of a file, for each of the sizes, in one pass; None: it is shorter."""
    handle = files.open(path)
    try:
        there, at, crc = files.size(handle), 0, 0
        found: dict[int, int | None] = {}
        for size in sorted(set(sizes)):
            while at < min(size, there):
                data = files.read_at(handle, at, min(READ_BYTES, size - at))
                if not data:
                    break
                crc = google_crc32c.extend(crc, data)
                at += len(data)
                progress(len(data))
            found[size] = crc if at == size else None
        return found
    finally:
        handle.close()


def foreign_names(files: Files, path: Path) -> list[str]:
    """What is in a directory that should be empty; a file system of its own has ``lost+found``."""
    return [name for name in files.names(path) if name != "lost+found"]
