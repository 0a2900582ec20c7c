"""One segment, read as a whole: valid batches, lost offsets, and an unfinished end.

A survey changes nothing. It turns the parts that :func:`headrace.log.segment.scan` finds into
pieces::

    BatchRun  valid batches, one after the other, every checksum and every column checked
    Gone      offsets that no valid batch holds: bytes that fail their checksum, or columns that
              make no sense although it matches
    Torn      the unfinished end of the last segment, by the same rule as in recovery: no batch
              with AFTER_SYNC follows it

A closed segment has no torn end: the next segment's name says how far it once reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import DataCorrupt, InvalidArgument
from headrace.files import Files, Handle
from headrace.log.batch import (
    AFTER_SYNC,
    COLUMNS,
    COMPRESSION,
    HAS_TIMES,
    HEADER_BYTES,
    LOST,
    STAGED,
    Batch,
    check_columns,
    is_newer,
    parse,
    parse_header,
)
from headrace.log.index import Index
from headrace.log.segment import SCAN_BYTES, Damage, Found, scan

_KNOWN_FLAGS = COLUMNS | COMPRESSION | LOST | STAGED | AFTER_SYNC

Progress = Callable[[int], None]
"""Told how many further bytes have been read."""


@dataclass(slots=True)
class BatchRun:
    position: int
    end_position: int
    first: int
    end: int
    first_time: int
    last_time: int
    batches: int
    after_sync: bool
    """Some batch in it vouches for everything before it."""
    lost: list[tuple[int, int]]
    """Offset ranges (first, end) that an earlier repair has given up."""

    @property
    def lost_records(self) -> int:
        return sum(end - first for first, end in self.lost)


@dataclass(slots=True)
class Gone:
    position: int
    end_position: int
    first: int
    end: int
    cause: str
    """``checksum`` or ``columns``."""
    headers: list[Batch]
    """Headers that are still valid, from ``first`` on: their records' times and producer are known."""
    after_sync: bool = False


@dataclass(slots=True)
class Torn:
    position: int
    bytes: int
    batches: int
    """Whole batches among the torn bytes; they are cut off with them."""
    records: int


@dataclass
class Survey:
    path: Path
    base_offset: int
    size: int
    closed: bool
    pieces: list[BatchRun | Gone] = field(default_factory=list)
    torn: Torn | None = None
    trailing_bytes: int = 0
    """Bytes after the last batch of a closed segment that stand for no offset."""
    index: Index = field(init=False)
    """Made of the valid batches."""
    disagreement: str | None = None
    """Why the index that was given is not this segment's."""
    backwards_at: int | None = None
    """The first offset whose time is earlier than the one before it."""
    newer_at: int | None = None
    """Where a batch of a version begins that this one cannot read."""
    last_time: int = 0

    @property
    def runs(self) -> list[BatchRun]:
        return [piece for piece in self.pieces if isinstance(piece, BatchRun)]

    @property
    def gone(self) -> list[Gone]:
        return [piece for piece in self.pieces if isinstance(piece, Gone)]

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
    index: Index | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Read all of a segment. ``limit`` is where the next one begins, None for the last.

    ``OSError`` when the disk cannot read it.
    """
    handle = files.open(path)
    try:
        surveyor = _Surveyor(files, handle, base_offset, limit, previous_time, index)
        return surveyor.run(progress)
    finally:
        handle.close()


class _Surveyor:
    def __init__(
        self,
        files: Files,
        handle: Handle,
        base_offset: int,
        limit: int | None,
        previous_time: int,
        index: Index | None,
    ):
        self.files, self.handle, self.limit = files, handle, limit
        self.size = files.size(handle)
        self.survey = Survey(handle.path, base_offset, self.size, closed=limit is not None)
        self.survey.index = Index(base_offset)
        self.survey.last_time = previous_time
        self.expected = base_offset
        self.given = index
        self.given_entry = 0
        self.damage: Damage | None = None

    def run(self, progress: Progress | None) -> Survey:
        told = 0
        for part in scan(self.files, self.handle, self.size, base_offset=self.expected):
            if isinstance(part, Damage):
                self._is_newer(part)
                self.damage = part
                continue
            if self.damage is not None:
                self._gone(self.damage, part.batch.base_offset)
                self.damage = None
            self._found(part)
            if progress is not None and part.position + part.size - told >= SCAN_BYTES:
                progress(part.position + part.size - told)
                told = part.position + part.size
        self._finish()
        if progress is not None:
            progress(self.size - told)
        return self.survey

    # --- valid bytes ------------------------------------------------------------------------
    def _found(self, part: Found) -> None:
        survey, head = self.survey, part.batch
        trouble = self._look_into(part)
        if head.base_timestamp < survey.last_time and survey.backwards_at is None:
            survey.backwards_at = head.base_offset
        survey.last_time = max(survey.last_time, head.max_timestamp)
        survey.index.add(head, part.position, part.size)
        self._compare_index(part)
        self.expected = head.end_offset
        after_sync = bool(head.flags & AFTER_SYNC)
        end_position = part.position + part.size
        if trouble is not None:
            survey.pieces.append(
                Gone(part.position, end_position, head.base_offset, head.end_offset,
                     trouble, [head], after_sync)
            )  # fmt: skip
            return
        last = survey.pieces[-1] if survey.pieces else None
        if not isinstance(last, BatchRun):
            last = BatchRun(part.position, part.position, head.base_offset, head.base_offset,
                       head.base_timestamp, head.base_timestamp, 0, False, [])  # fmt: skip
            survey.pieces.append(last)
        last.end_position = end_position
        last.end = head.end_offset
        last.last_time = max(last.last_time, head.max_timestamp)
        last.batches += 1
        last.after_sync |= after_sync
        if head.flags & LOST:
            if last.lost and last.lost[-1][1] == head.base_offset:
                last.lost[-1] = (last.lost[-1][0], head.end_offset)
            else:
                last.lost.append((head.base_offset, head.end_offset))

    def _look_into(self, part: Found) -> str | None:
        """``columns`` when the body makes no sense, though its checksum matches."""
        head = part.batch
        if head.flags & LOST:
            return None if part.size == HEADER_BYTES else "columns"
        if head.flags & ~_KNOWN_FLAGS:
            self.survey.newer_at = part.position
            return None
        batch = parse(self.files.read_at(self.handle, part.position, part.size))
        if batch is None:  # the disk does not read the same twice
            return "checksum"
        try:
            check_columns(batch)
        except InvalidArgument:
            pass  # a limit was lower when it was checked; it can be read all the same
        except DataCorrupt:
            return "columns"
        if batch.flags & (HAS_TIMES | STAGED) == HAS_TIMES:
            times = batch.times() or []
            in_order = sorted(times) == times and times[0] == batch.base_timestamp
            in_order = in_order and times[-1] == batch.max_timestamp
            if not in_order and self.survey.backwards_at is None:
                self.survey.backwards_at = batch.base_offset
        return None

    def _compare_index(self, part: Found) -> None:
        """Whether the given index knows this batch by the offset and time that it has."""
        given = self.given
        if given is None or self.survey.disagreement or self.given_entry >= len(given.positions):
            return
        entry = self.given_entry
        if given.positions[entry] < part.position:
            self.survey.disagreement = f"no batch begins at byte {given.positions[entry]}"
        elif given.positions[entry] == part.position:
            self.given_entry += 1
            if given.offsets[entry] != part.batch.base_offset:
                self.survey.disagreement = f"it has another offset for byte {part.position}"
            elif given.times[entry] != part.batch.base_timestamp:
                self.survey.disagreement = f"it has another time for byte {part.position}"

    # --- damaged bytes ----------------------------------------------------------------------
    def _is_newer(self, damage: Damage) -> None:
        """A whole header that only its version keeps us from reading is no damage."""
        raw = self.files.read_at(self.handle, damage.position, HEADER_BYTES)
        if self.survey.newer_at is None and is_newer(raw):
            self.survey.newer_at = damage.position

    def _gone(self, damage: Damage, end: int) -> None:
        headers: list[Batch] = []
        at, expected = damage.position, self.expected
        while at < damage.end:
            parsed = parse_header(self.files.read_at(self.handle, at, HEADER_BYTES))
            if parsed is None or parsed[0].base_offset != expected or parsed[0].end_offset > end:
                break
            head, body_len = parsed
            headers.append(head)
            expected = head.end_offset
            at += HEADER_BYTES + body_len
        self.survey.pieces.append(
            Gone(damage.position, damage.end, self.expected, end, "checksum", headers)
        )
        self.expected = end

    def _finish(self) -> None:
        survey, damage, limit = self.survey, self.damage, self.limit
        if limit is None:
            self._find_torn()
        elif damage is not None and self.expected < limit:
            self._gone(damage, limit)
        elif damage is not None:
            survey.trailing_bytes = damage.end - damage.position
        elif not survey.pieces and self.expected < limit:
            self._gone(Damage(0, 0, True), limit)  # an empty file where there were records
        given = self.given
        if given is None or survey.disagreement:
            return
        if self.given_entry < len(given.positions):
            survey.disagreement = f"no batch begins at byte {given.positions[self.given_entry]}"
        elif given.end_offset != survey.index.end_offset:
            survey.disagreement = (
                f"it ends at offset {given.end_offset}, the log at {survey.index.end_offset}"
            )
        elif given.max_timestamp != survey.index.max_timestamp:
            survey.disagreement = "its newest time is not the log's"
        elif not given.positions and survey.index.positions:
            survey.disagreement = "it is empty"

    def _find_torn(self) -> None:
        """Recovery's rule: from the first damage after the last AFTER_SYNC on, all is torn."""
        survey = self.survey
        pieces = survey.pieces
        vouched = max((n for n, piece in enumerate(pieces) if piece.after_sync), default=-1)
        for number in range(vouched + 1, len(pieces)):
            piece = pieces[number]
            if isinstance(piece, Gone) and piece.cause == "checksum":
                following = pieces[number + 1 :]
                survey.pieces = pieces[:number]
                survey.torn = Torn(
                    piece.position,
                    self._data_end() - piece.position,
                    sum(run.batches for run in following if isinstance(run, BatchRun)),
                    sum(part.end - part.first for part in following if isinstance(part, BatchRun)),
                )
                return
        if self.damage is not None and not self.damage.zeros:
            start = self.damage.position
            survey.torn = Torn(start, self._data_end() - start, 0, 0)

    def _data_end(self) -> int:
        """Where the zeros begin that fill the file up: space reserved and never written."""
        end = self.size
        while end > 0:
            start = max(0, end - SCAN_BYTES)
            data = self.files.read_at(self.handle, start, end - start).rstrip(b"\0")
            if data:
                return start + len(data)
            end = start
        return 0
