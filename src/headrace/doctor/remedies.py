"""The remedies for the files of a partition, each applied whole or not at all.

Rules:
- Offsets never change. Destroyed records are replaced by batches with the flag LOST, which stand for
  exactly the offsets that are gone; everything else is copied byte for byte.
- Nothing that could be data is deleted. A segment that is written anew is first copied to
  ``<name>.damaged-<n>``. (Copied, not renamed: a crash between two renames would leave a partition
  without the segment.)
- A new file is read back and compared before it takes the old file's place.
- An index is removed before the log under it changes, so that no crash leaves one that fits by
  chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace import limits
from headrace.doctor.findings import count
from headrace.doctor.survey import Gone, Survey
from headrace.errors import DataCorrupt
from headrace.files import Files
from headrace.log.batch import Batch, lost
from headrace.log.index import Index
from headrace.log.segment import Found, scan

_COPY_BYTES = 4 << 20


class Remedy(Protocol):
    @property
    def bytes_written(self) -> int:
        """How much it adds to the disk."""

    def apply(self, files: Files) -> str:
        """Do it, durably; returns a sentence that says what was done."""


@dataclass(frozen=True)
class RewriteSegment:
    """Write the segment anew, with lost batches where its records are gone."""

    survey: Survey
    previous_time: int
    """The newest time before this segment; 0 when there is none."""

    @property
    def bytes_written(self) -> int:
        return self.survey.size

    def apply(self, files: Files) -> str:
        survey = self.survey
        path = survey.path
        index_path = path.with_suffix(".idx")
        if files.exists(index_path):
            files.remove(index_path)
            files.sync_directory(path.parent)
        aside = aside_path(files, path)
        files.replace(aside, _copy(files, path, 0, survey.size))
        index = _write_segment(
            files, path, survey.base_offset, survey.end_offset, self._content(files)
        )
        if survey.closed:
            files.replace(index_path, [index.dump()])
        gone = sum(piece.end - piece.first for piece in survey.gone)
        return (
            f"written anew with {count(gone, 'record')} given up as lost; every other record is "
            f"where it was, and the file as it was is kept in {aside.name}"
        )

    def _content(self, files: Files) -> Iterator[bytes]:
        time = self.previous_time
        for piece in self.survey.pieces:
            if isinstance(piece, Gone):
                if not time and not piece.headers:
                    time = next((run.first_time for run in self.survey.runs), 0)
                for batch in lost_batches(piece.first, piece.end, time, piece.headers):
                    time = max(time, batch.max_timestamp)
                    yield batch.raw()
            else:
                yield from _copy(files, self.survey.path, piece.position, piece.end_position)
                time = max(time, piece.last_time)


@dataclass(frozen=True)
class FillGap:
    """Make a segment of lost batches where one is missing."""

    path: Path
    first: int
    end: int
    time: int

    @property
    def bytes_written(self) -> int:
        return 64 * (2 + (self.end - self.first) // limits.BATCH_RECORDS_MAX) + 4096

    def apply(self, files: Files) -> str:
        content = (batch.raw() for batch in lost_batches(self.first, self.end, self.time))
        index = _write_segment(files, self.path, self.first, self.end, content)
        files.replace(self.path.with_suffix(".idx"), [index.dump()])
        return f"made, with {count(self.end - self.first, 'record')} given up as lost"


@dataclass(frozen=True)
class WriteIndex:
    path: Path
    index: Index

    @property
    def bytes_written(self) -> int:
        return 4096 + 24 * len(self.index.positions)

    def apply(self, files: Files) -> str:
        files.replace(self.path, [self.index.dump()])
        return "made anew from its segment"


@dataclass(frozen=True)
class MoveAside:
    path: Path
    bytes_written: int = 0

    def apply(self, files: Files) -> str:
        aside = aside_path(files, self.path)
        files.rename(self.path, aside)
        files.sync_directory(self.path.parent)
        return f"moved out of the way to {aside.name}"


@dataclass(frozen=True)
class RemoveLeftover:
    """Remove a file that was being written under a temporary name and never took its place."""

    path: Path
    bytes_written: int = 0

    def apply(self, files: Files) -> str:
        files.remove(self.path)
        files.sync_directory(self.path.parent)
        return "removed"


# --- pieces -------------------------------------------------------------------------------------
def aside_path(files: Files, path: Path) -> Path:
    """The first name of the form ``<name>.damaged-<n>`` that is free."""
    number = 0
    while files.exists(path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return path.with_name(f"{path.name}.damaged-{number}")


def lost_batches(first: int, end: int, time: int, headers: Iterable[Batch] = ()) -> Iterator[Batch]:
    """Batches that stand for the offsets; where a header survived, with its times and producer.

    Keeping the producer means that a retry of the lost batch is still known as one, and that its
    next batch is no gap.
    """
    for header in headers:
        batch = lost(first, header.count, max(time, header.base_timestamp))
        batch.max_timestamp = max(batch.base_timestamp, header.max_timestamp)
        batch.producer_id = header.producer_id
        batch.producer_epoch = header.producer_epoch
        batch.first_sequence = header.first_sequence
        yield batch
        first, time = batch.end_offset, batch.max_timestamp
    while first < end:
        size = min(end - first, limits.BATCH_RECORDS_MAX)
        yield lost(first, size, time)
        first += size


def _copy(files: Files, path: Path, start: int, end: int) -> Iterator[bytes]:
    handle = files.open(path)
    try:
        while start < end:
            data = files.read_at(handle, start, min(_COPY_BYTES, end - start))
            if not data:
                raise DataCorrupt(f"{path} became shorter while it was read")
            yield data
            start += len(data)
    finally:
        handle.close()


def _write_segment(
    files: Files, path: Path, base_offset: int, end_offset: int, content: Iterable[bytes]
) -> Index:
    """Write a segment, prove that it is one without a flaw, and only then put it in place."""
    temporary = files.write_temporary(path, content)
    index = Index(base_offset)
    handle = files.open(temporary)
    try:
        whole = True
        for part in scan(files, handle, files.size(handle), base_offset=base_offset):
            if isinstance(part, Found):
                index.add(part.batch, part.position, part.size)
            else:
                whole = False
    finally:
        handle.close()
    if not whole or index.end_offset != end_offset:
        raise DataCorrupt(f"{temporary} did not read back as it was written; nothing was replaced")
    files.rename(temporary, path)
    files.sync_directory(path.parent)
    return index
