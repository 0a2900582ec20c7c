"""Rewriting closed segments: small batches become large ones, in the background.

A program that publishes one message at a time leaves batches of one record, and they take a reader several times
as long as large ones, for ever (``run.py`` helps, but each header has to be checked all the same). So when a segment
with small batches is closed, a copy with large batches replaces it::

    <base>.log ──read, check──▶ runs ──▶ <base>.log.tmp ──sync──▶ read back ──rename──▶ <base>.log ──▶ <base>.idx
                                                                    │
                            a flaw, a full disk, a stop: <base>.log.tmp is removed, nothing has changed

Rules:
- Offsets, times and every column stay. What producers published stays known: a batch that was made of batches of
  idempotent producers has their newest ones as its origins (``producers.py``). Large batches are copied byte for byte.
- The rename is the only change. Before it, the new file is complete, synced and read back; so a crash leaves the old
  file or the new one, both whole, and perhaps a ``.tmp``, which the next start removes. The index is replaced after
  it: until then the old index does not fit, because the new file is always shorter, and is made anew.
- A reader that has the old file open reads on: its ``Segment`` holds the old file before the rename.
- Only closed segments, all of whose records are shown, are touched; never one with damage, with lost or staged
  batches, or of a partition that is read-only. Retention does not delete a segment while it is being renamed.
- One segment at a time, in a worker, in steps of half a millisecond with pauses (``limits.REWRITE_*``): the
  interpreter is for the loop. A step that finds its log closed gives up.
- All batches of a rewritten segment are ``AFTER_SYNC``: all of it was on disk before it had its name.

Rejected: joining several segments into one file (two segments would hold the same records after a crash);
rewriting the active segment (a commit would wait); a step without pauses (while a thread computes, the loop gets
the interpreter only every 5 ms).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace import limits
from headrace.clock import Clock, Loop, Timer
from headrace.errors import HeadraceError
from headrace.files import Files, Handle
from headrace.log.batch import (
    AFTER_SYNC,
    HEADER_BYTES,
    LOST,
    STAGED,
    WITH_ORIGINS,
    Batch,
    parse,
    parse_header,
)
from headrace.log.index import Index
from headrace.log.producers import Producers
from headrace.log.run import merge, take
from headrace.log.segment import Segment
from headrace.log.workers import Workers

logger = logging.getLogger("headrace.log")
_HEAD = struct.Struct("<IQIHH16xQII")
"""From byte 12 of a header: body_len, base_offset, count, flags, version, and the producer."""


class Unfit(Exception):
    """The segment stays as it is."""


@dataclass(slots=True, eq=False)
class Rewrite:
    """One segment that is being rewritten. All methods run in a worker, one at a time."""

    _files: Files
    segment: Segment
    end_offset: int
    """Where the next segment begins."""
    _pack: bool
    _source: Handle | None = None
    _target: Handle | None = None
    _read: int = 0
    _written: int = 0
    _offset: int = 0
    """Of the next record to read; then, of the next one to read back."""
    _parts: list[Batch] = field(default_factory=list)
    _bytes: int = 0
    _single: bytes = b""
    """The bytes of the only batch in ``_parts``, which is copied if no other joins it."""
    _producers: Producers = field(default_factory=Producers)
    _checked: int = 0
    batches: int = 0
    """Batches that were read."""
    _made: int = 0
    """Batches that were written."""
    index: Index = field(init=False)

    def __post_init__(self) -> None:
        self.index = Index(self.segment.base_offset)

    @property
    def path(self) -> Path:
        return self.segment.path.with_name(self.segment.path.name + ".tmp")

    # --- steps ------------------------------------------------------------------------------
    def begin(self) -> int:
        """Look whether it is worth it, and open the files."""
        segment = self.segment
        index = segment.known_index()
        if index is not None and (
            index.batches < limits.REWRITE_BATCHES_MIN
            or index.end_offset != self.end_offset
            or not segment.is_small()
        ):
            raise Unfit("its batches are large")
        free = self._files.free_bytes(segment.path.parent)
        if free < segment.size + 2 * limits.DISK_RESERVE_BYTES_DEFAULT:
            raise Unfit("there is no room for a copy")
        self._source = self._files.open(segment.path)
        if self._files.size(self._source) != segment.size:
            raise Unfit("its size is not what it was")
        self._target = self._files.open(self.path, write=True, create=True)
        self._files.truncate(self._target, 0)
        self._offset = segment.base_offset
        return 0

    def step(self) -> int | None:
        """Copy the next piece, or read one back; returns how many bytes that was, None after the last one."""
        if self._read < self.segment.size:
            return self._copy()
        if self._checked == 0:
            if self._offset != self.end_offset:
                raise Unfit("its end is missing")
            self._flush()
            if self.batches < self._made * limits.REWRITE_GAIN_MIN:
                raise Unfit("few of its batches can be joined")
            if self._written >= self.segment.size:
                raise Unfit("it would become larger")
            assert self._target is not None
            self._files.sync(self._target)
            self._offset = self.segment.base_offset
        return self._check() if self._checked < self._written else None

    def finish(self) -> Segment:
        """Put the new file in the place of the old one."""
        segment = self.segment
        assert self._source is not None
        current = self._files.open(segment.path)
        is_same = self._files.identity(current) == self._files.identity(self._source)
        current.close()
        if not is_same:
            raise Unfit("another file is in its place")
        segment.held = self._source
        try:
            self._files.rename(self.path, segment.path)
        except OSError:
            segment.held = None
            raise
        try:  # syncs the directory, too
            self._files.replace(segment.index_path, [self.index.dump()])
        except OSError as error:  # the index is made anew when it is needed; both files are whole
            logger.warning("%s could not be written: %s", segment.index_path, error)
        self._close()
        return segment.replaced_by(self._written, self.index)

    def discard(self) -> None:
        self._close()
        with suppress(OSError):
            self._files.remove(self.path)

    def _close(self) -> None:
        if self._target is not None:
            self._target.close()
        self._source = self._target = None  # readers of the old file may hold the source

    # --- copying ----------------------------------------------------------------------------
    def _copy(self) -> int:
        assert self._source is not None
        data = self._files.read_at(self._source, self._read, limits.REWRITE_PIECE_BYTES)
        at = 0
        while at < len(data):
            parsed = parse_header(data, at)
            if self._offset == self.end_offset:
                # A power cut may leave the zeros that were reserved after the last batch.
                if data[at:].strip(b"\0"):
                    raise Unfit("it has more after its end")
                at = len(data)
                break
            if parsed is None:
                if len(data) - at >= HEADER_BYTES or at == 0:
                    raise Unfit("it has damage")
                break  # the next piece begins with it
            head, size = parsed
            if at + HEADER_BYTES + size > len(data):
                if at:
                    break
                data = self._files.read_at(self._source, self._read, HEADER_BYTES + size)
            if head.flags & (LOST | STAGED):
                raise Unfit("it has lost or staged batches")
            room = limits.BATCH_RECORDS_TARGET - sum(part.count for part in self._parts)
            found = take(data, at, self._offset, self.end_offset, records_max=max(room, 1))
            if found is None:
                raise Unfit("it has damage")
            batch, following = found
            self._add(batch, data[at:following], head)
            self._offset = batch.end_offset
            at = following
        self._read += at
        return at

    def _add(self, batch: Batch, raw: bytes, head: Batch) -> None:
        """A batch, or a run of small ones that begins with ``head``."""
        is_one = batch.count == head.count
        if is_one:
            self.batches += 1
            if (
                batch.count > limits.REWRITE_BATCH_RECORDS
                or max(len(raw), batch.plain_bytes) > limits.REWRITE_BATCH_BYTES
            ):
                self._flush()
                self._write(raw)
                return
            batch.values()  # decoded now, so that the step that joins them is short
        size = sum(part.count for part in self._parts) + batch.count
        if (
            size > limits.BATCH_RECORDS_TARGET
            or self._bytes + batch.stored_bytes > limits.REWRITTEN_BYTES_TARGET
        ):
            self._flush()
        self._single = raw if is_one and not self._parts else b""
        self._parts.append(batch)
        self._bytes += batch.stored_bytes
        if is_one:
            self._producers.add_batch(batch)
        else:
            self._add_origins(raw)

    def _add_origins(self, raw: bytes) -> None:
        """Remember the producers of the batches in these bytes, whose checksums are right."""
        at = 0
        while at < len(raw):
            size, base, count, _, version, producer, epoch, first = _HEAD.unpack_from(raw, at + 12)
            if version == WITH_ORIGINS:
                batch = parse(raw, at)
                assert batch is not None
                self._producers.add_batch(batch)
            elif producer:
                self._producers.add(producer, epoch, first, count, base)
            at += HEADER_BYTES + size
            self.batches += 1

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        if self._single:
            self._write(self._single)
        else:
            batch = merge(parts)
            batch.flags |= AFTER_SYNC
            batch.origins = self._producers.origins(batch.base_offset)
            if self._pack:
                batch.pack()
            self._write(batch.stored())
        self._producers = Producers()
        self._bytes = 0
        self._single = b""

    def _write(self, raw: bytes) -> None:
        assert self._target is not None
        self._written += self._files.write_at(self._target, self._written, [raw])
        self._made += 1

    # --- reading back -----------------------------------------------------------------------
    def _check(self) -> int:
        """Read a batch back, and add it to the index."""
        assert self._target is not None
        parsed = parse_header(self._files.read_at(self._target, self._checked, HEADER_BYTES))
        size = HEADER_BYTES + parsed[1] if parsed is not None else 0
        batch = parse(self._files.read_at(self._target, self._checked, size))
        if batch is None or batch.base_offset != self._offset:
            raise Unfit("its copy did not read back as it was written")
        self.index.add(batch, self._checked, size)
        self._checked += size
        self._offset = batch.end_offset
        if self._checked == self._written and self._offset != self.end_offset:
            raise Unfit("its copy has another end")
        return size


class Rewritten(Protocol):
    """A log, as the rewriter sees it."""

    def next_rewrite(self) -> Rewrite | None:
        """The next segment to look at; None if there is none now."""

    def may_replace(self, segment: Segment) -> bool:
        """Whether the segment is still there; if so, it stays until ``replaced`` or ``kept``."""

    def replaced(self, old: Segment, new: Segment) -> None: ...

    def kept(self, segment: Segment) -> None: ...

    def unsettled(self) -> int:
        """Closed segments that nobody has looked at."""


class Rewriter:
    """Rewrites the segments of all logs, one at a time. On the loop, except for the steps themselves."""

    def __init__(self, loop: Loop, workers: Workers, clock: Clock, *, enabled: bool = True):
        self._loop, self._workers, self._clock = loop, workers, clock
        self._enabled = enabled
        self._logs: dict[Rewritten, None] = {}
        """Logs that may have something to rewrite."""
        self._log: Rewritten | None = None
        """The log that is being worked on."""
        self._rewrite: Rewrite | None = None
        self._timer: Timer | None = None
        self._leaving: Callable[[], None] | None = None
        self.segments = self.bytes = self.batches = 0
        """What was rewritten: segments, the bytes and batches that they had."""
        self.saved_bytes = 0

    @property
    def pending(self) -> int:
        """Closed segments that are being rewritten, or that nobody has looked at."""
        return sum(log.unsettled() for log in self._logs) + (self._rewrite is not None)

    def offer(self, log: Rewritten) -> None:
        """The log has closed a segment."""
        if self._enabled:
            self._logs[log] = None
            if self._log is None:
                self._pause(0.0, self._next)

    def leave(self, log: Rewritten, done: Callable[[], None]) -> None:
        """The log is being closed: ``done`` is called when nothing of it is under way."""
        self._logs.pop(log, None)
        if self._log is not log:
            if self._log is None and not self._logs and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            done()
            return
        self._leaving = done
        if self._timer is not None and self._rewrite is not None:
            self._timer.cancel()
            self._timer = None
            self._abandon(self._rewrite)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(max(seconds, 0.001), self._wake, then)

    def _wake(self, then: Callable[[], None]) -> None:
        self._timer = None
        then()

    def _next(self) -> None:
        """Begin with the next segment of the next log."""
        while self._logs and self._log is None:
            log = next(iter(self._logs))
            rewrite = log.next_rewrite()
            if rewrite is None:
                del self._logs[log]
                continue
            del self._logs[log]
            self._logs[log] = None  # the other logs have their turn first
            self._log, self._rewrite = log, rewrite
            self._submit(rewrite.begin)

    def _step(self) -> None:
        assert self._rewrite is not None
        self._submit(self._rewrite.step)

    def _submit(self, work: Callable[[], int | None]) -> None:
        clock = self._clock

        def timed() -> tuple[int | None, float]:
            started = clock.seconds()
            return work(), clock.seconds() - started

        self._workers.submit(timed, self._stepped)

    def _stepped(
        self, result: tuple[int | None, float] | None, error: BaseException | None
    ) -> None:
        rewrite, log = self._rewrite, self._log
        assert rewrite is not None
        assert log is not None
        if error is not None or self._leaving is not None:
            self._abandon(rewrite, error)
            return
        assert result is not None
        size, took = result
        if size is not None:
            rest = max(size / limits.REWRITE_BYTES_PER_S, took) / limits.REWRITE_SHARE - took
            self._pause(rest, self._step)
        elif log.may_replace(rewrite.segment):
            self._workers.submit(rewrite.finish, self._finished)
        else:
            self._abandon(rewrite)

    def _finished(self, new: Segment | None, error: BaseException | None) -> None:
        rewrite, log = self._rewrite, self._log
        assert rewrite is not None
        assert log is not None
        if new is None:
            log.kept(rewrite.segment)
            self._abandon(rewrite, error)
            return
        self.segments += 1
        self.batches += rewrite.batches
        self.bytes += rewrite.segment.size
        self.saved_bytes += rewrite.segment.size - new.size
        log.replaced(rewrite.segment, new)
        self._done(None, None)

    def _abandon(self, rewrite: Rewrite, error: BaseException | None = None) -> None:
        if isinstance(error, OSError):
            logger.warning("%s was not rewritten: %s", rewrite.segment.path, error)
        elif error is not None and not isinstance(error, (Unfit, HeadraceError)):
            logger.error("%s was not rewritten", rewrite.segment.path, exc_info=error)
        self._workers.submit(rewrite.discard, self._done)

    def _done(self, _result: object, _error: BaseException | None) -> None:
        self._log = self._rewrite = None
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()
        if self._logs:
            self._pause(0.0, self._next)
