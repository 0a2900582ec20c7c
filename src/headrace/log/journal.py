"""A small checksummed journal of the broker's own state: one file, appended and sometimes rewritten.

Frame: ``u32 length, u32 crc32c of the payload``, payload, zeros up to a multiple of 8. A length of
zero ends the journal (preallocated space is zeros). The payload is one entry, or several that were
appended together: a zero byte, and ``u32 length`` before each. The first entry is the format's name.

Rules:
- What is appended together has one checksum. So a power cut, which may keep the end of a write and not its
  beginning, leaves a torn end and nothing that looks like damage.
- A torn last frame is cut off. A damaged frame in the middle is skipped if the next one can be found
  (frames begin at multiples of 8); it is counted in ``damaged``, and a copy of the file is kept. So damage
  can make the state older, never newer, and the caller decides what older means.
- ``rewrite`` replaces the file by a snapshot, completely or not at all.
- Space is preallocated, so acks and positions can still be written when the disk is full for publishes.
"""

from __future__ import annotations

import errno
import logging
import struct
from pathlib import Path

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files, Handle
from headrace.log.batch import crc32c
from headrace.log.workers import SyncFailed

logger = logging.getLogger("headrace.log")
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_SEVERAL = b"\0"
FRAME_BYTES_MAX = 64 << 20
TOGETHER_BYTES_MAX = 32 << 20
RESERVE_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    pad = bytes(-len(payload) & 7)
    return _HEAD.pack(len(payload), crc32c(payload)) + payload + pad


def _together(entries: list[bytes]) -> list[bytes]:
    """One frame for all entries, so that all are there or none; more only beyond ``TOGETHER_BYTES_MAX``."""
    if len(entries) == 1 and not entries[0].startswith(_SEVERAL):
        return [frame(entries[0])]
    frames, parts, size = [], [_SEVERAL], 0
    for entry in entries:
        if size + len(entry) > TOGETHER_BYTES_MAX and size:
            frames.append(frame(b"".join(parts)))
            parts, size = [_SEVERAL], 0
        parts += (_LENGTH.pack(len(entry)), entry)
        size += len(entry) + 4
    return [*frames, frame(b"".join(parts))]


def _apart(payload: bytes) -> list[bytes]:
    if not payload.startswith(_SEVERAL):
        return [payload]
    entries, at = [], 1
    while at < len(payload):
        (length,) = _LENGTH.unpack_from(payload, at)
        at += 4 + length
        entries.append(payload[at - length : at])
    return entries


def _frame_at(raw: bytes, at: int) -> bytes | None:
    if at + 8 > len(raw):
        return None
    length, crc = _HEAD.unpack_from(raw, at)
    if not 0 < length <= FRAME_BYTES_MAX or at + 8 + length > len(raw):
        return None
    payload = raw[at + 8 : at + 8 + length]
    return payload if crc32c(payload) == crc else None


def entries_in(raw: bytes) -> tuple[list[bytes], int, int]:
    """All entries of a journal's bytes, the number of damaged places that were skipped, and the end."""
    entries: list[bytes] = []
    at = end = damaged = 0
    while at + 8 <= len(raw):
        payload = _frame_at(raw, at)
        if payload is not None:
            entries += _apart(payload)
            at += 8 + len(payload) + (-len(payload) & 7)
            end = at
            continue
        following = _next_frame(raw, at)
        if following is None:
            break
        damaged += 1
        at = following
    return entries, damaged, end


def _next_frame(raw: bytes, at: int) -> int | None:
    """The next place after ``at`` with a valid frame."""
    limit = len(raw.rstrip(b"\0"))
    at += 8
    while at < limit:
        if _frame_at(raw, at) is not None:
            return at
        at += 8
    return None


class Journal:
    """Blocking; the caller runs ``append`` and ``rewrite`` in a worker, one at a time. See ``interface.StateLog``."""

    def __init__(self, files: Files, path: Path, magic: bytes):
        self._files = files
        self._magic = magic
        self.path = path
        self.damaged = 0
        self.size = 0
        self.snapshot_bytes = 0
        self._allocated = 0
        self._handle: Handle | None = None

    def open(self) -> list[bytes] | None:
        """All entries, oldest first; None when the file does not exist."""
        if not self._files.exists(self.path):
            return None
        raw = self._files.read_file(self.path)
        entries, self.damaged, end = entries_in(raw)
        if entries and entries[0] == self._magic:
            entries = entries[1:]
        elif not self.damaged:
            raise DataCorrupt(
                f"{self.path} is not a journal of this version of Headrace; "
                "move it aside to start without it (subscriptions begin again at the earliest)"
            )
        if self.damaged:
            aside = self.path.with_name(self.path.name + ".damaged")
            self._files.replace(aside, [raw])
            logger.error(
                "%s: %d damaged places were skipped; the file as it was is kept in %s",
                self.path, self.damaged, aside.name,
            )  # fmt: skip
        self.size = end
        self._allocated = len(raw)
        tail = raw[end:]
        if tail.count(0) != len(tail):
            handle = self._writer()
            self._files.truncate(handle, end)
            self._files.sync(handle)
            self._allocated = end
        return entries

    def _writer(self) -> Handle:
        if self._handle is None:
            self._handle = self._files.open(self.path, write=True)
        return self._handle

    def append(self, payloads: list[bytes]) -> None:
        """Write and sync. An ``OSError`` leaves the journal as it was; ``SyncFailed`` is final."""
        handle = self._writer()
        frames = _together(payloads)
        size = sum(map(len, frames))
        try:
            if self.size + size > self._allocated:
                self._reserve(handle, size)
            self._files.write_at(handle, self.size, frames)
        except OSError as cause:
            self._take_back(handle, cause)
            raise
        self._sync(handle)
        self.size += size

    def _reserve(self, handle: Handle, size: int) -> None:
        """Reserve room for this write and more; on a full disk, for this write alone."""
        end = self.size + max(size, RESERVE_BYTES)
        try:
            self._files.allocate(handle, self._allocated, end - self._allocated)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            end = self.size + size
            self._files.allocate(handle, self._allocated, end - self._allocated)
        self._allocated = end

    def _take_back(self, handle: Handle, cause: OSError) -> None:
        """Undo a failed append: a refused entry must not appear after a restart."""
        try:
            self._files.truncate(handle, self.size)
        except OSError as error:
            raise SyncFailed(
                f"{self.path}: a write failed ({cause}) and could not be taken back ({error})"
            ) from error
        self._allocated = self.size
        self._sync(handle)

    def _sync(self, handle: Handle) -> None:
        try:
            self._files.sync(handle)
        except OSError as error:
            raise SyncFailed(f"{self.path}: {error}") from error

    def rewrite(self, payloads: list[bytes]) -> None:
        """Replace everything by a snapshot. Errors as with ``append``."""
        frames = [frame(self._magic), *map(frame, payloads)]
        temporary = self._files.write_temporary(self.path, frames)
        self._files.rename(temporary, self.path)
        # From here on the old file is deleted; an append to it would be lost.
        self._handle = None
        self.size = self.snapshot_bytes = self._allocated = sum(map(len, frames))
        try:
            self._files.sync_directory(self.path.parent)
        except OSError as error:
            raise SyncFailed(f"{self.path}: {error}") from error

    @property
    def wants_rewrite(self) -> bool:
        return self.size > max(4 * self.snapshot_bytes, limits.JOURNAL_REWRITE_BYTES_MIN)

    def close(self) -> None:
        if self._handle is not None:
            self._files.truncate(self._handle, self.size)
            self._handle = None
