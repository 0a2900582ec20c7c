"""Reads every byte of a backup and says what is damaged: which generation, topic, partition and offsets.

A file is read once, however many generations need it. If its checksum is right, it is what was written. If
not, its batches are examined one by one, to name the offsets that are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.backup.manifest import (
    ACCESS,
    JOURNAL,
    BackupDirectory,
    KeptFile,
    KeptTopic,
    Manifest,
    SmallFile,
    checksums,
)
from headrace.errors import DataCorrupt
from headrace.files import Files
from headrace.log.journal import entries_in
from headrace.log.segment import Damage, scan

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are read."""


@dataclass(frozen=True)
class Flaw:
    """Something that is damaged or missing."""

    generations: list[int]
    file: str
    sentence: str
    topic: str | None = None
    partition: int | None = None
    first: int | None = None
    end: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class BackupVerdict:
    generations: list[int]
    files: int = 0
    bytes: int = 0
    flaws: list[Flaw] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.flaws


@dataclass
class _Wanted:
    topic: KeptTopic
    partition: int
    sizes: dict[int, list[tuple[int, KeptFile]]] = field(default_factory=dict)
    """Bytes -> (generation, the file as that generation has it)."""


def verify(
    directory: BackupDirectory,
    generation: int | None = None,
    progress: Progress = lambda done, total: None,
) -> BackupVerdict:
    """Examine all generations, or one of them."""
    directory.check()
    with directory.locked() as numbers:
        if generation is not None or not numbers:
            numbers = [directory.load(generation).generation]
        verdict = BackupVerdict(numbers)
        wanted: dict[Path, _Wanted] = {}
        for number in numbers:
            try:
                manifest = directory.load(number)
            except DataCorrupt as error:
                path = directory.folder(number)
                verdict.flaws.append(Flaw([number], _inside(directory, path), error.message))
                continue
            _examine_small(directory, manifest, verdict)
            for topic, partition, kept in manifest.partitions():
                for file in kept.files:
                    path = directory.partition(topic, partition) / file.name
                    sizes = wanted.setdefault(path, _Wanted(topic, partition)).sizes
                    sizes.setdefault(file.bytes, []).append((number, file))
        total = sum(max(each.sizes) for each in wanted.values())

        def count(size: int) -> None:
            verdict.bytes += size
            progress(verdict.bytes, total)

        for path, each in sorted(wanted.items()):
            verdict.files += 1
            _examine_file(directory, path, each, verdict, count)
        return verdict


def _examine_small(directory: BackupDirectory, manifest: Manifest, verdict: BackupVerdict) -> None:
    number, folder = manifest.generation, directory.folder(manifest.generation)
    small: list[tuple[Path, SmallFile | None, KeptTopic | None, int | None]] = [
        (folder / JOURNAL, manifest.journal, None, None),
        (folder / ACCESS, manifest.access, None, None),
    ]
    for topic, partition, kept in manifest.partitions():
        if kept.producers is not None:
            path = directory.partition(topic, partition) / kept.producers.name
            small.append((path, kept.producers, topic, partition))
    for path, expected, of, place in small:
        if expected is None:
            continue
        verdict.files += 1
        try:
            raw = directory.read(path, expected)
            verdict.bytes += len(raw)
            if path.name == JOURNAL and entries_in(raw)[1]:
                raise DataCorrupt("entries of the journal of subscriptions are damaged")
        except (DataCorrupt, OSError) as error:
            name = None if of is None else of.topic
            verdict.flaws.append(Flaw([number], _inside(directory, path), str(error), name, place))


def _examine_file(
    directory: BackupDirectory,
    path: Path,
    wanted: _Wanted,
    verdict: BackupVerdict,
    count: Callable[[int], None],
) -> None:
    name, topic, partition = _inside(directory, path), wanted.topic.topic, wanted.partition
    every = sorted(wanted.sizes.items())
    largest = every[-1][1][0][1]
    try:
        found = checksums(directory.files, path, wanted.sizes, count)
    except OSError as error:
        generations = [number for _, uses in every for number, _ in uses]
        why = (
            "it is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        )
        verdict.flaws.append(
            Flaw(generations, name, why, topic, partition, largest.base, largest.end)
        )
        return
    wrong = [
        (file, [number for number, _ in uses])
        for size, uses in every
        for file in [uses[0][1]]
        if found[size] != file.crc
    ]
    if not wrong:
        return
    file, _ = wrong[-1]
    generations = sorted({number for _, numbers in wrong for number in numbers})
    ranges = damaged_ranges(directory.files, path, file)
    for first, end in ranges or [(file.base, file.end)]:
        why = (
            f"offsets {first} to {end - 1} are damaged"
            if ranges
            else "its checksum is wrong, though every batch in it is valid: it is another file"
        )
        verdict.flaws.append(Flaw(generations, name, why, topic, partition, first, end))


def damaged_ranges(files: Files, path: Path, file: KeptFile) -> list[tuple[int, int]]:
    """Offsets (first, end) of a file that cannot be read."""
    handle = files.open(path)
    ranges = []
    try:
        at = file.base
        for part in scan(files, handle, file.bytes, base_offset=file.base):
            if isinstance(part, Damage):
                continue
            if part.batch.base_offset > at:
                ranges.append((at, part.batch.base_offset))
            at = part.batch.end_offset
        if at < file.end:
            ranges.append((at, file.end))
    finally:
        handle.close()
    return ranges


def _inside(directory: BackupDirectory, path: Path) -> str:
    return str(path.relative_to(directory.path))
