"""One file of a partition: batches one after the other, beginning at the offset in its name.

A read walks the batch headers from the nearest index entry, or continues where an earlier read has ended. With
``at_once`` it takes only what is in memory, or raises :class:`NotAtHand` (``fetching.py``). Every
header and body that it returns has passed its checksum. If one fails, the reader gets a :class:`DataCorrupt`
that names exactly the offsets that cannot be read; later records stay readable.

:func:`scan` is the only code that looks for batches in bytes that may be damaged; recovery, the
index rebuild and the doctor all use it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

from headrace import limits
from headrace.errors import DataCorrupt
from headrace.files import Files, Handle, NotAtHand
from headrace.log.batch import (
    APART_BYTES_MIN,
    HEADER_BYTES,
    MAGIC,
    Batch,
    complete,
    parse,
    parse_header,
    verified,
)
from headrace.log.index import Index
from headrace.log.interface import Whereabouts
from headrace.log.run import take

logger = logging.getLogger("headrace.log")
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
SCAN_BYTES = 4 << 20
AHEAD_BYTES = 4 << 20
SEEN_MAX = 64
"""Readers of one segment that continue without a search."""
versions = count(1)


def log_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


def base_offset_of(name: str) -> int | None:
    """The offset in a segment's file name; None for any other file."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if suffix == "log" and dot and len(stem) == 20 and stem.isdigit() else None


@dataclass(frozen=True, slots=True)
class Found:
    """A valid batch in a scan. ``batch`` has no body unless the caller requested it."""

    position: int
    size: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes where a valid batch should begin but does not. ``end`` is the next valid batch, or
    the end of the bytes. ``zeros``: all of them are zero."""

    position: int
    end: int
    zeros: bool


class _Window:
    """A sliding read-ahead over a file, so that a scan reads each byte once."""

    def __init__(self, files: Files, handle: Handle, size: int):
        self._files, self._handle, self._size = files, handle, size
        self._start = 0
        self._data = b""

    def get(self, position: int, length: int) -> bytes:
        """Bytes at ``position``; fewer than ``length`` only at the end."""
        length = min(length, self._size - position)
        if position < self._start or position + length > self._start + len(self._data):
            want = min(max(length, SCAN_BYTES), self._size - position)
            self._start = position
            self._data = self._files.read_at(self._handle, position, want)
        at = position - self._start
        return self._data[at : at + length]

    def batch_at(self, position: int) -> tuple[Batch, int] | None:
        """A valid batch (body verified, not kept) and its size."""
        parsed = parse_header(self.get(position, HEADER_BYTES))
        if parsed is None:
            return None
        batch, body_len = parsed
        body = self.get(position + HEADER_BYTES, body_len)
        return (batch, HEADER_BYTES + body_len) if verified(batch, body_len, body) else None


def scan(
    files: Files, handle: Handle, size: int, *, start: int = 0, base_offset: int
) -> Iterator[Found | Damage]:
    """All valid batches of the file in order, and the damage between and after them.

    A batch counts only if it continues the offsets: it begins at the end of the last batch or, after
    damage, later. Batches begin at multiples of 8. A file may be shorter than ``size``, if it was cut in the
    meantime; then the scan ends where the file ends.
    """
    size = min(size, files.size(handle))
    window = _Window(files, handle, size)
    position, expected = start, base_offset
    while position < size:
        found = window.batch_at(position)
        if found is not None and found[0].base_offset == expected:
            batch, length = found
            yield Found(position, length, batch)
            position += length
            expected = batch.end_offset
            continue
        end = _next_valid(window, position, size, expected)
        yield Damage(position, end, _all_zero(window, position, end))
        if end < size:
            following = window.batch_at(end)
            assert following is not None
            expected = following[0].base_offset
        position = end


def _next_valid(window: _Window, position: int, size: int, expected: int) -> int:
    """Where the next valid batch after ``position`` begins, or ``size``."""
    at = position + 8 - position % 8
    header = parse_header(window.get(position, HEADER_BYTES))
    if header is not None and header[0].base_offset == expected:
        # The header gives the length of its damaged body. The scan skips the body: a message may
        # contain the bytes of a batch, and readers must not see those.
        at = position + HEADER_BYTES + header[1]
    while at < size:
        chunk = window.get(at, SCAN_BYTES)
        if not chunk:
            break
        hit = chunk.find(_MAGIC_BYTES)
        while hit >= 0:
            candidate = at + hit
            if candidate % 8 == 0:
                found = window.batch_at(candidate)
                if found is not None and found[0].base_offset > expected:
                    return candidate
            hit = chunk.find(_MAGIC_BYTES, hit + 1)
        # The magic may cross the border of two reads; batches are aligned, so 8 bytes are enough.
        at += max(len(chunk) - 4, 8) if at + len(chunk) < size else len(chunk)
        at += -at % 8 if at < size else 0
    return size


def _all_zero(window: _Window, position: int, end: int) -> bool:
    while position < end:
        chunk = window.get(position, min(SCAN_BYTES, end - position))
        if not chunk or chunk.count(0) != len(chunk):
            return False
        position += len(chunk)
    return True


class Readers:
    """The read handles of closed segments; the least recently used is dropped first.

    Readers in any thread use it, so it has a lock. No code waits while it holds the lock.
    """

    def __init__(self, files: Files, count_max: int = limits.OPEN_READERS_MAX):
        self._files = files
        self._max = count_max
        self._open: OrderedDict[tuple[Path, int], Handle] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: Path, version: int = 0) -> Handle:
        """``version`` tells files apart that have been at the path one after the other."""
        handle = self.known(path, version)
        if handle is not None:
            return handle
        handle = self._files.open(path)
        with self._lock:
            self._open[path, version] = handle
            while len(self._open) > self._max:
                # Do not close it here: another thread may be reading. The last reference closes it.
                self._open.popitem(last=False)
        return handle

    def known(self, path: Path, version: int = 0) -> Handle | None:
        """The handle, if the file is open."""
        with self._lock:
            handle = self._open.get((path, version))
            if handle is not None:
                self._open.move_to_end((path, version))
            return handle

    def forget(self, path: Path, version: int = 0) -> None:
        with self._lock:
            self._open.pop((path, version), None)


@dataclass(slots=True, eq=False)
class Segment:
    """A segment for readers. ``size`` bytes of it may be read."""

    _files: Files
    _readers: Readers
    path: Path
    base_offset: int
    size: int
    _index: Index | None = None
    held: Handle | None = None
    """Of the file that is being written, or of one that was replaced: its readers read on."""
    version: int = 0
    """Tells its file from others at the same path: from the one before it was rewritten (``rewriting.py``), and from that
    of an earlier topic of the same name, which a thread may still read."""
    _is_forgotten: bool = False
    _seen: dict[int, int] = field(default_factory=dict)
    """Offset -> position of the batch that begins there, where earlier reads have ended. Threads share it: each
    step on it is one operation of a dict."""
    _located: dict[int, int] = field(default_factory=dict)
    """The same for batches that only a scan finds, because there is damage before them."""

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".idx")

    def handle(self, at_once: bool = False) -> Handle:
        held = self.held
        if held is None:
            readers = self._readers
            found = readers.known(self.path, self.version)
            if found is None:
                if at_once:
                    raise NotAtHand
                found = readers.get(self.path, self.version)
            if self._is_forgotten:  # by now: an open file would keep its space on the disk
                self._readers.forget(self.path, self.version)
            held = self.held or found  # the file may have been replaced before it was opened
        return held

    def forget(self) -> None:
        """The file is gone, or nobody reads it any more, besides threads that have begun to."""
        self._is_forgotten = True
        self._readers.forget(self.path, self.version)

    def replaced_by(self, size: int, index: Index) -> Segment:
        """The same records in a new file at the same path."""
        new = Segment(self._files, self._readers, self.path, self.base_offset, size, index)
        new.version = next(versions)
        return new

    def index(self, at_once: bool = False) -> Index:
        """The index. For a closed segment it is read from its file, or rebuilt if the file is invalid."""
        if self._index is None:
            if at_once:
                raise NotAtHand
            self._index = self._load_index() or self._rebuild_index()
        return self._index

    def known_index(self) -> Index | None:
        """The index, if there is a valid one; it is not kept in memory for this."""
        return self._index or self._load_index()

    def is_small(self) -> bool:
        """Whether its batches are small on average: it is worth to rewrite it once it is closed."""
        index = self.known_index()
        return index is None or (
            index.end_offset - self.base_offset <= limits.REWRITE_BATCH_RECORDS * index.batches
            and self.size <= limits.REWRITE_BATCH_BYTES * index.batches
        )

    def _load_index(self) -> Index | None:
        try:
            raw = self._files.read_file(self.index_path)
        except OSError:
            return None
        return Index.load(raw, self.base_offset, self.size)

    def _scan_index(self) -> Index:
        index = Index(self.base_offset)
        for part in scan(self._files, self.handle(), self.size, base_offset=self.base_offset):
            if isinstance(part, Found):
                index.add(part.batch, part.position, part.size)
        index.log_bytes = self.size
        return index

    def _rebuild_index(self) -> Index:
        index = self._scan_index()
        try:
            self._files.replace(self.index_path, [index.dump()])
        except OSError as error:  # a full disk, or another reader does the same: continue
            logger.warning("%s could not be written: %s", self.index_path, error)
        return index

    def read(
        self,
        offset: int,
        end_offset: int,
        max_bytes: int,
        *,
        run_bytes: int = 0,
        run_records: int = limits.BATCH_RECORDS_TARGET,
        at_once: bool = False,
    ) -> list[Batch]:
        """Whole valid batches, from the one that holds ``offset`` up to ``end_offset``.

        ``end_offset`` is where the next segment begins, or the log ends. At least one batch, or
        :class:`DataCorrupt` that names the damaged offsets. With ``run_bytes``, small neighbours come as one
        batch (``run.py``) of at most this size and ``run_records``.
        """
        position = self._seen.get(offset, -1)
        if position < 0:
            position = self._located.get(offset, -1)
        if position < 0:
            position = self.index(at_once).position_of(offset)
        batches: list[Batch] = []
        taken = 0
        want = max(max_bytes, run_bytes, limits.INDEX_INTERVAL_BYTES) + 4096
        load = want if want < APART_BYTES_MIN else 4096  # enough to see how large the batches are
        data, at = b"", 0
        next_offset = offset
        while taken < max_bytes and (position < self.size or not batches):
            if position >= self.size:
                # The file is cut short, or the index is wrong. An empty result would look like the end.
                position = self._locate(offset, end_offset, at_once)
                data, at = b"", 0
            if len(data) - at < HEADER_BYTES:
                data, at = self._load(position, load, at_once), 0
            parsed = parse_header(data, at)
            whole: Batch | None = None
            if parsed is not None and parsed[0].base_offset <= next_offset:
                batch, body_len = parsed
                size = HEADER_BYTES + body_len
                if batch.end_offset <= offset:
                    position += size
                    at += size
                    continue
                if batch.base_offset >= end_offset or (batches and taken + size > max_bytes):
                    break
                if size >= APART_BYTES_MIN and at + size > len(data):
                    body = self._load(position + HEADER_BYTES, body_len, at_once)
                    whole = complete(batch, body_len, body)
                else:
                    small = run_bytes and size <= limits.SMALL_BATCH_BYTES
                    if at + size > len(data) or (load < want and small):
                        load = want
                        data, at = self._load(position, max(size, want), at_once), 0
                    if small:
                        found = take(
                            data, at, batch.base_offset, end_offset,
                            bytes_max=run_bytes, records_max=run_records,
                        )  # fmt: skip
                        if found is not None:
                            whole, size = found[0], found[1] - at
                    else:
                        whole = parse(data, at)
            if whole is None:
                if batches:
                    break  # the next read reports the damage after them
                position = self._locate(offset, end_offset, at_once)
                data, at = b"", 0
                continue
            batches.append(whole)
            next_offset = whole.end_offset
            position += size
            at += size
            taken += size
        self._seen.pop(offset, None)
        self._remember(next_offset, position)
        return batches

    def is_followed(self, offset: int) -> bool:
        """Whether an earlier read has ended here: its reader goes through the segment."""
        return offset in self._seen

    def read_ahead(self, offset: int) -> None:
        """Bring what follows a place where a read has ended into the page cache: its reader will need it next."""
        position = self._seen.get(offset)
        if position is not None:
            self._load(position, AHEAD_BYTES)

    def _remember(self, offset: int, position: int) -> None:
        """Where the batch at the offset begins: the next read need not search for it."""
        if len(self._seen) >= SEEN_MAX:
            self._seen.clear()
        self._seen[offset] = position

    def whereabouts(self, offset: int, at_once: bool = False) -> Whereabouts:
        """From a batch at or before the offset to the end."""
        position = min(self.index(at_once).position_of(offset), self.size)
        identity = self._files.identity(self.handle(at_once))
        return Whereabouts(self.path.absolute(), identity, position, self.size - position)

    def _load(self, position: int, length: int, at_once: bool = False) -> bytes:
        read = self._files.read_at_once if at_once else self._files.read_at
        return read(self.handle(at_once), position, min(length, self.size - position))

    def _locate(self, offset: int, end_offset: int, at_once: bool = False) -> int:
        """Scan the whole segment for the batch, or raise an error that names exactly the damaged offsets."""
        if at_once:
            raise NotAtHand
        low, high = self.base_offset, end_offset
        for part in scan(self._files, self.handle(), self.size, base_offset=self.base_offset):
            if isinstance(part, Found):
                if part.batch.base_offset > offset:
                    high = part.batch.base_offset
                    break
                if part.batch.end_offset > offset:
                    if len(self._located) >= SEEN_MAX:
                        self._located.clear()
                    self._located[offset] = part.position  # a read at once does not look for it
                    return part.position
                low = part.batch.end_offset
        raise DataCorrupt(
            f"{self.path.parent.parent.name}/{self.path.parent.name}: offsets {low} to {high - 1} "
            f"are damaged in {self.path.name} and cannot be read; 'headrace doctor' says more",
        )

    def batch_at_time(
        self, timestamp_ms: int, end_offset: int, at_once: bool = False
    ) -> Batch | None:
        """The first readable batch with a record at the time or later."""
        index = self.index(at_once)
        offset = index.offset_of_time(timestamp_ms) if index.batches else end_offset
        while offset < end_offset:
            try:
                batches = self.read(
                    offset, end_offset, limits.INDEX_INTERVAL_BYTES, at_once=at_once
                )
            except DataCorrupt:
                offset = self.after_damage(offset, end_offset)
                continue
            for batch in batches:
                if batch.max_timestamp >= timestamp_ms:
                    return batch
                offset = batch.end_offset
        return None

    def after_damage(self, offset: int, end_offset: int) -> int:
        for part in scan(self._files, self.handle(), self.size, base_offset=self.base_offset):
            if isinstance(part, Found) and part.batch.base_offset > offset:
                return part.batch.base_offset
        return end_offset


# --- times ----------------------------------------------------------------------------------------
def offset_in(batch: Batch, timestamp_ms: int) -> int:
    """The first offset of the batch whose record is not older than the time."""
    times = batch.times() or [batch.base_timestamp]
    return batch.base_offset + next(
        (number for number, time in enumerate(times) if time >= timestamp_ms), 0
    )


def offset_at_time(
    segments: Sequence[Segment], end: int, timestamp_ms: int, at_once: bool = False
) -> int:
    """The first offset of a partition whose record is not older than the time; ``end`` if there is none."""
    segments = [s for s in segments if s.base_offset < end]
    low, high = 0, len(segments)
    while low < high:  # the first segment that reaches the time
        middle = probe = (low + high) // 2
        while probe > low and not segments[probe].index(at_once).batches:
            probe -= 1  # that segment is empty and has no time
        if segments[probe].index(at_once).max_timestamp < timestamp_ms:
            low = middle + 1
        else:
            high = probe
    for number in range(low, len(segments)):
        following = segments[number + 1 : number + 2]
        limit = following[0].base_offset if following else end
        batch = segments[number].batch_at_time(timestamp_ms, limit, at_once)
        if batch is not None:
            return offset_in(batch, timestamp_ms)
    return end
