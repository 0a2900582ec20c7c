"""A small checksummed journal of the broker's own state: one file, appended and sometimes rewritten.

Entry: ``u32 length, u32 crc32c of the payload``, payload, zeros up to a multiple of 8. A length of
zero ends the journal (preallocated space is zeros). The first entry is the format's name.

Rules:
- A torn last entry is cut off. A damaged entry in the middle is skipped if the next one can be found
  (entries begin at multiples of 8); it is counted in ``damaged``, and a copy of the file is kept. So damage
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
ENTRY_BYTES_MAX = 64 << 20
RESERVE_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    pad = bytes(-len(payload) & 7)
    return _HEAD.pack(len(payload), crc32c(payload)) + payload + pad


def _entry_at(raw: bytes, at: int) -> bytes | None:
    if at + 8 > len(raw):
        return None
    length, crc = _HEAD.unpack_from(raw, at)
    if not 0 < length <= ENTRY_BYTES_MAX or at + 8 + length > len(raw):
        return None
    payload = raw[at + 8 : at + 8 + length]
    return payload if crc32c(payload) == crc else None


def entries_in(raw: bytes) -> tuple[list[bytes], int, int]:
    """All entries of a journal's bytes, the number of damaged places that were skipped, and the end."""
    entries: list[bytes] = []
    at = end = damaged = 0
    while at + 8 <= len(raw):
        payload = _entry_at(raw, at)
        if payload is not None:
            entries.append(payload)
            at += 8 + len(payload) + (-len(payload) & 7)
            end = at
            continue
        following = _next_entry(raw, at)
        if following is None:
            break
        damaged += 1
        at = following
    return entries, damaged, end


def _next_entry(raw: bytes, at: int) -> int | None:
    """The next place after ``at`` with a valid entry."""
    limit = len(raw.rstrip(b"\0"))
    at += 8
    while at < limit:
        if _entry_at(raw, at) is not None:
            return at
        at += 8
    return None


class Journal:
    """Blocking; the caller runs ``append`` and ``rewrite`` in a worker, one at a time."""

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
        frames = [frame(payload) for payload in payloads]
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
