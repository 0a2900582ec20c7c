"""Reads one whole segment and divides it into pieces. A survey changes nothing.

The pieces follow each other without a gap in the offsets. A piece is in one of four states::

    valid     batches one after the other; every checksum and every column is good
    lost      batches that stand for records which an earlier repair gave up
    checksum  offsets whose bytes fail their checksum
    columns   a batch whose checksum matches, but whose columns make no sense

The last segment may also have a torn end, by the same rule as in recovery: no batch with AFTER_SYNC
follows it, and nobody knows that the log once reached further (``log/witness.py``). A closed segment has
none: the next segment's name says how far it once reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace import limits
from headrace.errors import DataCorrupt, InvalidArgument
from headrace.files import Files, Handle
from headrace.log.admission import check_columns
from headrace.log.batch import (
    AFTER_SYNC,
    COLUMNS,
    COMPRESSION,
    HAS_TIMES,
    HEADER_BYTES,
    LOST,
    STAGED,
    Batch,
    crc32c,
    is_newer,
    parse,
    parse_header,
)
from headrace.log.index import Index
from headrace.log.producers import check_origins
from headrace.log.recovery import claimed_end
from headrace.log.segment import Damage, Found, scan

_KNOWN_FLAGS = COLUMNS | COMPRESSION | LOST | STAGED | AFTER_SYNC

State = Literal["valid", "lost", "checksum", "columns"]


@dataclass(slots=True)
class Piece:
    state: State
    position: int
    end_position: int
    first: int
    end: int
    batches: int = 0
    last_time: int = 0
    after_sync: bool = False
    """A batch in it confirms that everything before it was on disk."""
    headers: list[Batch] = field(default_factory=list)
    """Of damaged batches: headers that are still valid, from ``first`` on. They give the times and
    the producer of the records."""

    @property
    def damaged(self) -> bool:
        return self.state in ("checksum", "columns")

    @property
    def records(self) -> int:
        return self.end - self.first


@dataclass
class Survey:
    path: Path
    base_offset: int
    size: int
    closed: bool
    last_time: int
    index: Index
    """Built from the valid batches."""
    pieces: list[Piece] = field(default_factory=list)
    torn_bytes: int = 0
    torn_records: int = 0
    """Records of whole batches among the torn bytes; recovery cuts them off too."""
    trailing_bytes: int = 0
    """Bytes after the last batch of a closed segment that stand for no offset."""
    backwards_at: int | None = None
    """The first offset whose time is earlier than the one before it."""
    newer_at: int | None = None
    """The position of a batch whose version this code cannot read."""

    @property
    def damaged(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.damaged]

    @property
    def end_offset(self) -> int:
        return self.pieces[-1].end if self.pieces else self.base_offset


def survey(
    files: Files,
    path: Path,
    base_offset: int,
    *,
    limit: int | None,
    previous_time: int = 0,
    reached: int = 0,
) -> Survey:
    """Read a segment. ``limit`` is the base offset of the next one, None for the last. ``reached``: all
    offsets before it were once on disk.

    ``OSError`` when the disk cannot read it.
    """
    handle = files.open(path)
    try:
        size = files.size(handle)
        found = Survey(
            path, base_offset, size, limit is not None, previous_time, Index(base_offset)
        )
        damage: Damage | None = None
        for part in scan(files, handle, size, base_offset=base_offset):
            if isinstance(part, Damage):
                damage = part
                head = files.read_at(handle, part.position, HEADER_BYTES)
                if found.newer_at is None and is_newer(head):
                    found.newer_at = part.position
                continue
            if damage is not None:
                _add_damage(files, handle, found, damage, part.batch.base_offset)
                damage = None
            _add_batch(found, part, _state_of(files, handle, found, part))
        if limit is None and _sure_end(found) < reached:
            if found.end_offset < reached:
                rest = damage or Damage(size, size, True)
                end = max(reached, claimed_end(files, handle, rest, found.end_offset))
                _add_damage(files, handle, found, rest, end)
        elif limit is None:
            if damage is not None and not damage.zeros:
                _add_damage(files, handle, found, damage, found.end_offset)
            _cut_torn(files, handle, found)
        elif found.end_offset < limit and (damage is not None or not size):
            _add_damage(files, handle, found, damage or Damage(0, 0, True), limit)
        elif damage is not None:
            found.trailing_bytes = damage.end - damage.position
        return found
    finally:
        handle.close()


def _state_of(files: Files, handle: Handle, found: Survey, part: Found) -> State:
    """Look into a batch whose checksum was good."""
    if part.batch.flags & LOST:
        return "lost" if part.size == HEADER_BYTES + len(part.batch.origins) else "columns"
    if part.batch.flags & ~_KNOWN_FLAGS:
        found.newer_at = part.position
        return "valid"
    batch = parse(files.read_at(handle, part.position, part.size))
    if batch is None:  # the disk does not read the same twice
        return "checksum"
    try:
        check_origins(batch)
        check_columns(batch, headers_max=limits.BATCH_BYTES_MAX)
    except InvalidArgument:
        pass  # a limit was lower when it was checked; it can be read all the same
    except DataCorrupt:
        return "columns"
    if batch.flags & (HAS_TIMES | STAGED) == HAS_TIMES:
        times = batch.times() or []
        in_order = sorted(times) == times and times[0] == batch.base_timestamp
        in_order = in_order and times[-1] == batch.max_timestamp
        if not in_order and found.backwards_at is None:
            found.backwards_at = batch.base_offset
    return "valid"


def _add_batch(found: Survey, part: Found, state: State) -> None:
    head = part.batch
    if head.base_timestamp < found.last_time and found.backwards_at is None:
        found.backwards_at = head.base_offset
    found.last_time = max(found.last_time, head.max_timestamp)
    found.index.add(head, part.position, part.size)
    piece = found.pieces[-1] if found.pieces else None
    if piece is None or piece.damaged or piece.state != state:
        piece = Piece(state, part.position, part.position, head.base_offset, head.base_offset)
        found.pieces.append(piece)
    piece.end_position = part.position + part.size
    piece.end = head.end_offset
    piece.last_time = max(piece.last_time, head.max_timestamp)
    piece.batches += 1
    piece.after_sync |= bool(head.flags & AFTER_SYNC)
    if piece.damaged:
        piece.headers.append(head)


def _add_damage(files: Files, handle: Handle, found: Survey, damage: Damage, end: int) -> None:
    piece = Piece("checksum", damage.position, damage.end, found.end_offset, end)
    at, expected = damage.position, piece.first
    while at < damage.end:
        parsed = parse_header(files.read_at(handle, at, HEADER_BYTES))
        if parsed is None or parsed[0].base_offset != expected or parsed[0].end_offset > end:
            break
        head, body_len = parsed
        if head.origins_bytes:  # a repetition of one of these batches is then still recognized
            start = at + HEADER_BYTES + body_len - head.origins_bytes
            origins = files.read_at(handle, start, head.origins_bytes)
            head.origins = origins if crc32c(origins) == head.origins_crc else b""
        piece.headers.append(head)
        expected = head.end_offset
        at += HEADER_BYTES + body_len
    found.pieces.append(piece)


def _first_torn(pieces: list[Piece]) -> int:
    """Recovery's rule: the first damage after the last AFTER_SYNC, and all that follows, is torn."""
    synced = max((n for n, piece in enumerate(pieces) if piece.after_sync), default=-1)
    damaged = (n for n in range(synced + 1, len(pieces)) if pieces[n].state == "checksum")
    return next(damaged, len(pieces))


def _sure_end(found: Survey) -> int:
    """Where the log ends if what looks torn is torn."""
    number = _first_torn(found.pieces)
    return found.pieces[number].first if number < len(found.pieces) else found.end_offset


def _cut_torn(files: Files, handle: Handle, found: Survey) -> None:
    pieces = found.pieces
    for number in range(_first_torn(pieces), len(pieces)):
        if pieces[number].state == "checksum":
            start = pieces[number].position
            tail = files.read_at(handle, start, found.size - start)
            # The zeros at the end are space that was reserved and never written.
            found.torn_bytes = len(tail.rstrip(b"\0"))
            found.torn_records = sum(p.records for p in pieces[number + 1 :] if not p.damaged)
            found.pieces = pieces[:number]
            return
