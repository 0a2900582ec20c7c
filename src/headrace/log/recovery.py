"""Opening a partition: distinguish the log from the remains of a crash.

Of closed segments only name and size are checked; only the last segment is read, batch by batch. After
its valid batches there may be:

- zeros: space that was preallocated and never written. Nothing is wrong.
- a *torn tail*: invalid bytes, and no valid batch with ``AFTER_SYNC`` after them. They were being written
  when the process or the machine stopped, and were never confirmed. They are copied to a file
  (``<segment>.torn-<n>``) and cut off, and the start continues.
- *damage*: invalid bytes, and a valid batch with ``AFTER_SYNC`` after them. So these bytes were once safely
  on disk. Nothing is cut or renumbered; the partition opens read-only, valid records can be read, and
  ``headrace doctor --repair`` gives up the damaged range on demand.

``AFTER_SYNC`` distinguishes a torn commit (the disk wrote its third batch but not its second) from a
flipped bit in old data. It cannot speak for the last commit, so the caller says how far the log once reached
(``reached``, ``witness.py``): if the valid batches end before that, nothing is torn, and what is missing is
damage, even at the end of the file or without any file. See ``docs/format.md``.

After a failed fsync, the cached tail may not be on disk, although reads return it and a second fsync
would succeed. The marker ``@suspect`` makes the next start copy the valid part of the last segment to a
new file and sync that. If the last broker did not stop cleanly for an unknown reason (``unclean``), the bytes
since the last batch with ``AFTER_SYNC`` are written again, over themselves, and synced: earlier bytes were
synced with success. An ``OSError`` from :func:`recover` may be such a failed fsync, so the start after it
must not trust the cache, either.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files, Handle
from headrace.log.batch import AFTER_SYNC, HEADER_BYTES, is_newer, parse_header
from headrace.log.index import Index
from headrace.log.interface import CLEAN, LastStop
from headrace.log.producers import Producers
from headrace.log.segment import Damage, Found, base_offset_of, log_name, scan

logger = logging.getLogger("headrace.log")
PAGE_BYTES = 64 << 10
"""No smaller than the pages and blocks of any system: a failed write may have lost a whole one."""


@dataclass
class LastSegment:
    """The last segment, as a scan found it."""

    path: Path
    base_offset: int
    size: int
    """Bytes of valid log; appends continue from here."""
    index: Index
    damage: list[tuple[int, int]] = field(default_factory=list)
    """Offset ranges (first, end) that cannot be read."""
    torn_bytes: int = 0
    last_timestamp: int = 0

    @property
    def end_offset(self) -> int:
        """The offset after the last record, whether it can be read or not."""
        return max(self.index.end_offset, *(end for _, end in self.damage), self.base_offset)


@dataclass
class Recovered:
    """A partition as it is on disk."""

    closed: list[tuple[int, int]]
    """(base offset, bytes) of the segments before the last."""
    last: LastSegment | None
    producers: Producers


def segments_of(files: Files, directory: Path) -> list[tuple[int, int]]:
    found = []
    for name in files.names(directory):
        base = base_offset_of(name)
        if base is not None:
            found.append((base, files.file_size(directory / name)))
    return sorted(found)


def recover(files: Files, directory: Path, stop: LastStop = CLEAN) -> Recovered:
    """Read the partition's directory and cut off a torn tail; change nothing else."""
    for name in files.names(directory):
        if name.endswith(".tmp"):
            files.remove(directory / name)
    # A killed process may have created a file whose name is not on disk yet.
    files.sync_directory(directory)
    segments = segments_of(files, directory)
    if len(segments) > 1 and segments[-1][1] == 0 and _is_stray(files, directory, segments):
        files.remove(directory / log_name(segments.pop()[0]))
    if not segments:
        return Recovered([], None, Producers())
    base, _ = segments[-1]
    producers = producers_before(files, directory, segments)
    last = _open_last(files, directory / log_name(base), base, producers, stop)
    if stop.suspect:
        _rewrite(files, last)
    return Recovered(segments[:-1], last, producers)


def _is_stray(files: Files, directory: Path, segments: list[tuple[int, int]]) -> bool:
    """Whether an empty last segment begins before the end of the log.

    Otherwise the empty segment stays: it shows that the segment before it is closed. The end of that
    segment must then not be taken for a torn tail and cut off.
    """
    (base, size), (empty, _) = segments[-2:]
    path = directory / log_name(base)
    try:
        index = Index.load(files.read_file(path.with_suffix(".idx")), base, size)
    except OSError:
        index = None
    if index is not None:
        return index.end_offset > empty
    handle = files.open(path)
    try:
        parts = scan(files, handle, size, base_offset=base)
        return any(isinstance(part, Found) and part.batch.end_offset > empty for part in parts)
    finally:
        handle.close()


def _open_last(
    files: Files, path: Path, base: int, producers: Producers, stop: LastStop
) -> LastSegment:
    handle = files.open(path, write=True)
    try:
        last, torn, unsynced = read_last(files, handle, path, base, producers, stop.reached)
        if torn:
            last.torn_bytes = _cut(files, handle, path, last.size, files.size(handle))
        if stop.unclean:
            _write_again(files, handle, unsynced - unsynced % PAGE_BYTES, last.size)
        # Records that were written but not synced before a crash become visible now.
        files.sync(handle)
        return last
    finally:
        handle.close()


def read_last(
    files: Files, handle: Handle, path: Path, base: int, producers: Producers, reached: int = 0
) -> tuple[LastSegment, bool, int]:
    """The last segment, whether it has a torn tail, and where the part begins that a sync may never have
    reached. Nothing is changed. The log had reached the offset ``reached`` once, as others witness."""
    last = LastSegment(path, base, 0, Index(base))
    parts = list(scan(files, handle, files.size(handle), base_offset=base))
    # Everything before the last batch with AFTER_SYNC was on disk once, even if it is damaged now.
    synced = max((number for number, part in enumerate(parts) if _after_sync(part)), default=-1)
    vouched = len(parts) if _end_of(parts, synced, base) < reached else synced
    for part in parts:
        if isinstance(part, Damage):
            _refuse_newer(files, handle, path, part)
    torn = False
    for number, part in enumerate(parts):
        end = last.index.end_offset
        if isinstance(part, Found):
            last.index.add(part.batch, part.position, part.size)
            producers.add_batch(part.batch)
        elif number < vouched and number + 1 < len(parts):
            following = parts[number + 1]
            assert isinstance(following, Found)
            last.damage.append((end, following.batch.base_offset))
        elif number < vouched and end < reached:
            last.damage.append((end, max(reached, claimed_end(files, handle, part, end))))
        else:
            torn = not part.zeros or number + 1 < len(parts)
            break
    if last.end_offset < reached:  # the file was cut short between two batches
        last.damage.append((last.end_offset, reached))
    last.size = last.index.log_bytes
    last.last_timestamp = last.index.max_timestamp
    return last, torn, parts[synced].position if synced >= 0 else 0


def _end_of(parts: list[Found | Damage], synced: int, base: int) -> int:
    """Where the log ends if the first damage after the part ``synced`` is torn."""
    end = base
    for number, part in enumerate(parts):
        if isinstance(part, Found):
            end = part.batch.end_offset
        elif number > synced:
            break
    return end


def claimed_end(files: Files, handle: Handle, damage: Damage, expected: int) -> int:
    """The offset after the records of a damaged place, as far as headers there are still valid."""
    at = damage.position
    while at < damage.end:
        parsed = parse_header(files.read_at(handle, at, HEADER_BYTES))
        if parsed is None or parsed[0].base_offset != expected:
            break
        header, body_len = parsed
        expected = header.end_offset
        at += HEADER_BYTES + body_len
    return expected


def _write_again(files: Files, handle: Handle, start: int, end: int) -> None:
    """Write bytes over themselves: their pages may be marked clean and not be on disk."""
    for at in range(start, end, limits.COMMIT_BYTES_MAX):
        chunk = files.read_at(handle, at, min(limits.COMMIT_BYTES_MAX, end - at))
        files.write_at(handle, at, [chunk])


def _after_sync(part: Found | Damage) -> bool:
    return isinstance(part, Found) and bool(part.batch.flags & AFTER_SYNC)


def _refuse_newer(files: Files, handle: Handle, path: Path, damage: Damage) -> None:
    """Refuse a batch of a newer version: it is not damage, and must not be cut off."""
    if is_newer(files.read_at(handle, damage.position, HEADER_BYTES)):
        raise DataCorrupt(
            f"{path} was written by a newer version of Headrace; start that version, or give this "
            "one another data directory",
            code="newer_format",
        )


def _cut(files: Files, handle: Handle, path: Path, keep: int, size: int) -> int:
    """Copy the bytes after ``keep`` to another file, then cut them off. Returns their number."""
    tail = files.read_at(handle, keep, size - keep).rstrip(b"\0")
    number = 0
    while files.exists(aside := path.with_name(f"{path.stem}.torn-{number}")):
        number += 1
    files.replace(aside, [tail])
    files.truncate(handle, keep)
    files.sync(handle)
    logger.warning(
        "%s/%s: the last %d bytes were never completed; cut, and kept in %s",
        path.parent.parent.name,
        path.parent.name,
        len(tail),
        aside.name,
    )
    return len(tail)


def _rewrite(files: Files, last: LastSegment) -> None:
    """Copy the valid bytes to a new file: pages of the old file may be marked clean but not be on disk."""
    handle = files.open(last.path)
    try:
        chunks = [
            files.read_at(handle, at, min(limits.COMMIT_BYTES_MAX, last.size - at))
            for at in range(0, last.size, limits.COMMIT_BYTES_MAX)
        ]
    finally:
        handle.close()
    files.replace(last.path, chunks)
    logger.warning("%s was written anew after a failed sync", last.path)


def producers_before(files: Files, directory: Path, segments: list[tuple[int, int]]) -> Producers:
    """The producers at the beginning of the last segment."""
    for number in range(len(segments) - 1, -1, -1):
        producers = _snapshot(files, directory, segments[number][0])
        if producers is None and number == 0:
            producers = Producers()
        if producers is None:
            continue
        for base, size in segments[number:-1]:
            _replay(files, directory / log_name(base), base, size, producers)
        return producers
    raise AssertionError("unreachable: the first segment needs no snapshot")


def _snapshot(files: Files, directory: Path, base: int) -> Producers | None:
    try:
        raw = files.read_file(directory / f"{base:020d}.producers")
    except FileNotFoundError:
        return None
    return Producers.load(raw)


def _replay(files: Files, path: Path, base: int, size: int, producers: Producers) -> None:
    handle = files.open(path)
    try:
        for part in scan(files, handle, size, base_offset=base):
            if isinstance(part, Found):
                producers.add_batch(part.batch)
    except OSError as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from error
    finally:
        handle.close()
