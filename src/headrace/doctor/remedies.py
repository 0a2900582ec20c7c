"""The remedies for the files of a partition, each applied whole or not at all.

Rules:
- Offsets never change. Destroyed records are replaced by batches with the flag LOST, which stand for
  exactly the offsets that are gone; everything else is copied byte for byte.
- Nothing that could be data is deleted. A segment is copied to ``<name>.damaged-<n>`` before it is
  rewritten. (Copied, not renamed: a crash between two renames would leave a partition without the
  segment.)
- A new file is read back and checked before it takes the old file's place.
- An index is removed before the log under it changes, so that no crash leaves one that fits by
  chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace import limits
from headrace.doctor.findings import count
from headrace.doctor.survey import Survey, survey
from headrace.errors import DataCorrupt
from headrace.files import Files
from headrace.log.batch import Batch, lost
from headrace.log.segment import SCAN_BYTES


@dataclass(frozen=True, eq=False)
class Remedy:
    apply: Callable[[Files], str]
    """Do it, durably; returns a sentence that says what was done."""
    bytes_written: int = 0
    """How much it adds to the disk."""


# --- what a remedy applies ------------------------------------------------------------------------
def rewrite_segment(found: Survey, previous_time: int, files: Files) -> str:
    """Write the segment again, with lost batches where its records are gone.

    ``previous_time`` is the newest time before this segment; 0 when there is none.
    """
    path, index_path = found.path, found.path.with_suffix(".idx")
    if files.exists(index_path):
        files.remove(index_path)
        files.sync_directory(path.parent)
    aside = _aside_path(files, path)
    files.replace(aside, _copy(files, path, 0, found.size))
    content = _repaired(files, found, previous_time)
    index = _write_segment(files, path, found.base_offset, found.end_offset, content)
    if found.closed:
        files.replace(index_path, [index])
    gone = count(sum(piece.records for piece in found.damaged), "record")
    return (
        f"rewritten with {gone} given up as lost; every other record keeps its offset, and "
        f"{aside.name} keeps the file as it was"
    )


def fill_gap(path: Path, first: int, end: int, time: int, files: Files) -> str:
    """Write a segment of lost batches where one is missing."""
    content = (batch.raw() for batch in _lost_batches(first, end, time))
    index = _write_segment(files, path, first, end, content)
    files.replace(path.with_suffix(".idx"), [index])
    return f"created, with {count(end - first, 'record')} given up as lost"


def write_index(path: Path, index: bytes, files: Files) -> str:
    files.replace(path, [index])
    return "rebuilt from its segment"


def move_aside(path: Path, files: Files) -> str:
    aside = _aside_path(files, path)
    files.rename(path, aside)
    files.sync_directory(path.parent)
    return f"moved aside to {aside.name}"


def remove_leftover(path: Path, files: Files) -> str:
    """Remove the temporary file of a write that was never finished."""
    files.remove(path)
    files.sync_directory(path.parent)
    return "removed"


# --- their parts --------------------------------------------------------------------------------
def _repaired(files: Files, found: Survey, time: int) -> Iterator[bytes]:
    for piece in found.pieces:
        if not piece.damaged:
            yield from _copy(files, found.path, piece.position, piece.end_position)
            time = max(time, piece.last_time)
            continue
        if not time and not piece.headers and found.index.times:
            time = found.index.times[0]
        for batch in _lost_batches(piece.first, piece.end, time, piece.headers):
            time = max(time, batch.max_timestamp)
            yield batch.stored()


def _aside_path(files: Files, path: Path) -> Path:
    """The first name of the form ``<name>.damaged-<n>`` that is free."""
    number = 0
    while files.exists(path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return path.with_name(f"{path.name}.damaged-{number}")


def _lost_batches(
    first: int, end: int, time: int, headers: Iterable[Batch] = ()
) -> Iterator[Batch]:
    """Batches that stand for the offsets; where a header survived, with its times and producer.

    Keeping the producer means that a retry of the lost batch is still recognized, and that its next
    batch is no gap.
    """
    for header in headers:
        batch = lost(first, header.count, max(time, header.base_timestamp))
        batch.max_timestamp = max(batch.base_timestamp, header.max_timestamp)
        batch.producer_id = header.producer_id
        batch.producer_epoch = header.producer_epoch
        batch.first_sequence = header.first_sequence
        batch.origins = header.origins
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
            data = files.read_at(handle, start, min(SCAN_BYTES, end - start))
            if not data:
                raise DataCorrupt(f"{path} became shorter while it was read")
            yield data
            start += len(data)
    finally:
        handle.close()


def _write_segment(
    files: Files, path: Path, base_offset: int, end_offset: int, content: Iterable[bytes]
) -> bytes:
    """Write a segment and rename it into place once it has read back without a flaw.

    Returns the bytes of its index.
    """
    temporary = files.write_temporary(path, content)
    found = survey(files, temporary, base_offset, limit=end_offset)
    if found.damaged or found.trailing_bytes or found.end_offset != end_offset:
        raise DataCorrupt(f"{temporary} did not read back as it was written; nothing was replaced")
    files.rename(temporary, path)
    files.sync_directory(path.parent)
    return found.index.dump()
