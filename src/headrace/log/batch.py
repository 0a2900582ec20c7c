"""The columnar batch: it is appended, stored, read, sent and passed to Spark.

Little-endian. A header of 64 bytes, then a body whose length is a multiple of 8::

     0 u32 magic            "HRB1"; all-zero bytes can never be a batch
     4 u32 header_crc       crc32c of bytes 8..64
     8 u32 body_crc         crc32c of the body as stored
    12 u32 body_len         bytes, multiple of 8
    16 u64 base_offset      stamped by the broker, outside body_crc
    24 u32 count            records, at least 1
    28 u16 flags            which columns exist, and the compression
    30 u16 version          1, or 2 with origins
    32 i64 base_timestamp   ms; the time of every record if there is no column of times
    40 i64 max_timestamp    ms
    48 u64 producer_id      0: none
    56 u32 producer_epoch
    60 u32 first_sequence
    64 body

The body consists of the columns that the flags name, in this order, each padded with zeros to 8 bytes::

    binary  := offsets i32[count+1] from 0, pad; bytes, pad          (as Arrow lays it out)
    values  := binary
    keys    := validity bits u8[ceil(count/8)], pad; binary            flag 0x01
    headers := list offsets i32[count+1], pad; names binary[n]; texts binary[n]     flag 0x02
    times   := i64[count]                                                           flag 0x04
    ids     := 16 bytes [count], all zero: derived                                  flag 0x08
    expiry  := i64[count] ms, 0: never                                              flag 0x10
    targets := binary, subscription a record is meant for, empty: all               flag 0x20

A compressed body (flags 0x0300: 0 none, 1 zstd) is ``u32 plain_len, u32 packed_len``, the packed
bytes, pad. Builtins (``accumulate``, ``array``, ``join``, ``pairwise``) encode and decode a whole column:
no Python bytecode runs per record, except in the final slicing.

Only the broker sets the three other flags. ``AFTER_SYNC`` (0x8000): when this batch was written, all
bytes before it were known to be on disk. So invalid bytes *before* such a batch are damage, while invalid
bytes after the last one are a torn write that was never confirmed. ``LOST`` (0x4000): the batch has no
columns and stands for ``count`` records that were destroyed and that ``headrace doctor`` gave up.
``STAGED`` (0x2000): the batch waits for its commit; its header says when it arrived, and its column of
times, if any, is as the client made it.

Version 2 is a batch that the broker made of several when it rewrote a closed segment (``rewriting.py``): after the
body come its *origins*, the newest batches of each idempotent producer among them (``producers.py``), so that a
repetition of one of them is still recognized. ``body_len`` counts them, ``body_crc`` does not; ``producer_id`` is 0,
``producer_epoch`` is their length in bytes and ``first_sequence`` their crc32c. Only logs have such batches: without its
origins it is a batch of version 1 with the same body, and that is what clients get.

Rules:
- A batch from outside is hostile until ``admission.check`` has passed it. A batch that we wrote is trusted
  after its checksums match.
- The body never changes after it was made, except in ``commit.clamp_times``. Stamping writes a new header;
  it does not touch or copy the body, or compute its checksum.

Rejected: records stored row by row (three times slower in both directions, and Arrow cannot use them);
numpy (a dependency of 60 MB; builtins do the same at memory speed).
"""

from __future__ import annotations

import gc
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any, cast

import google_crc32c
import zstandard

from headrace import limits
from headrace.contents import TOMBSTONE_HEADER, is_tombstone
from headrace.errors import DataCorrupt, TooLarge
from headrace.log import body as bodies
from headrace.log.body import COMPRESSION as COMPRESSION
from headrace.log.body import HAS_EXPIRY as HAS_EXPIRY
from headrace.log.body import HAS_HEADERS as HAS_HEADERS
from headrace.log.body import HAS_IDS as HAS_IDS
from headrace.log.body import HAS_KEYS as HAS_KEYS
from headrace.log.body import HAS_TARGETS as HAS_TARGETS
from headrace.log.body import HAS_TIMES as HAS_TIMES
from headrace.log.body import ZSTD as ZSTD
from headrace.log.columns import Columns, Headers
from headrace.model import Message, Settling

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Headrace's columns are little-endian and this machine is not")

MAGIC = 0x31425248  # "HRB1"
VERSION = 1
WITH_ORIGINS = 2
"""The version of a batch with origins."""
ORIGIN_BYTES = 24
HEADER = struct.Struct("<IIIIQIHHqqQII")
HEADER_BYTES = HEADER.size
_STAMPED = struct.Struct("<IIQIHHqqQII")  # the header from body_crc on
_PREFIX = struct.Struct("<II")

COLUMNS = HAS_KEYS | HAS_HEADERS | HAS_TIMES | HAS_IDS | HAS_EXPIRY | HAS_TARGETS
STAGED = 0x2000
LOST = 0x4000
AFTER_SYNC = 0x8000

_PAD = [bytes(n) for n in range(8)]

APART_BYTES_MIN = 64 << 10
"""A batch of this size has a read of its own, so that its body is not copied out of a larger read."""

crc32c = google_crc32c.value
ColumnReader = Callable[[int, int], list[Any] | None]
"""A method such as ``Batch.keys``."""


def _pad(size: int) -> bytes:
    return _PAD[-size & 7]


# --- encoding -----------------------------------------------------------------------------------
def _binary(parts: list[bytes], items: Sequence[bytes]) -> None:
    offsets = array("i", accumulate(map(len, items), initial=0))
    raw = offsets.tobytes()
    parts.append(raw)
    parts.append(_pad(len(raw)))
    parts += items
    parts.append(_pad(offsets[-1]))


def _fixed(parts: list[bytes], raw: bytes) -> None:
    parts.append(raw)
    parts.append(_pad(len(raw)))


def encode(columns: Columns) -> Batch:
    """A batch that has not been stamped: offset, times and producer are still zero."""
    values = columns.values
    count = len(values)
    assert 0 < count <= limits.BATCH_RECORDS_MAX
    flags = 0
    parts: list[bytes] = []
    try:
        _binary(parts, values)
        keys = columns.keys
        if keys is not None:
            flags |= HAS_KEYS
            bits = int("".join(["0" if key is None else "1" for key in reversed(keys)]), 2)
            _fixed(parts, bits.to_bytes((count + 7) // 8, "little"))
            _binary(parts, [key or b"" for key in keys])
        headers = columns.headers
        if headers is not None:
            flags |= HAS_HEADERS
            lists = array("i", accumulate([len(h) if h else 0 for h in headers], initial=0))
            _fixed(parts, lists.tobytes())
            items = list(chain.from_iterable([h.items() for h in headers if h]))
            _binary(parts, [name.encode() for name, _ in items])
            _binary(parts, [text.encode() for _, text in items])
        if columns.times is not None:
            flags |= HAS_TIMES
            _fixed(parts, array("q", columns.times).tobytes())
        if columns.ids is not None:
            flags |= HAS_IDS
            _fixed(parts, b"".join(columns.ids))
        if columns.expiry is not None:
            flags |= HAS_EXPIRY
            _fixed(parts, array("q", columns.expiry).tobytes())
        if columns.targets is not None:
            flags |= HAS_TARGETS
            _binary(parts, columns.targets)
    except OverflowError:
        raise TooLarge(
            f"a batch has at most {limits.BATCH_BYTES_MAX} bytes; publish fewer messages at once",
            code="batch_too_large",
        ) from None
    body = b"".join(parts)
    if len(body) > limits.BATCH_BYTES_MAX:
        raise TooLarge(
            f"the batch has {len(body)} bytes, the limit is {limits.BATCH_BYTES_MAX}; "
            "publish fewer messages at once",
            code="batch_too_large",
        )
    batch = Batch(body, crc32c(body), count, flags)
    if count <= _VALUES_KEPT_MAX:  # so readers at the end do not decode it again
        batch._values = list(values)
    return batch


@dataclass(slots=True, eq=False)
class Batch:
    """One batch in memory: the header's fields, the body as stored, columns decoded on demand."""

    _body: bytes
    body_crc: int
    count: int
    flags: int
    base_offset: int = 0
    base_timestamp: int = 0
    max_timestamp: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    first_sequence: int = 0
    origins: bytes = b""
    origins_bytes: int = 0
    """With ``origins_crc``, what the header says about them."""
    origins_crc: int = 0
    _plain: bytes | None = None
    _values: list[bytes] | None = None
    _sliced: int = 0
    """Values that were decoded in slices and not kept: the first reader of a batch may be the only one."""
    _keys: list[bytes | None] | None = None
    _ends: dict[int, int] | None = None

    # --- as bytes ---------------------------------------------------------------------------
    @property
    def body(self) -> bytes:
        return self._body

    @property
    def end_offset(self) -> int:
        """The offset after the last record."""
        return self.base_offset + self.count

    @property
    def stored_bytes(self) -> int:
        return HEADER_BYTES + len(self._body) + len(self.origins)

    def header(self) -> bytes:
        """The header of version 1, whatever origins the batch has."""
        producer = (self.producer_id, self.producer_epoch, self.first_sequence)
        return self._header(VERSION, len(self._body), producer)

    def _header(self, version: int, body_len: int, producer: tuple[int, int, int]) -> bytes:
        rest = _STAMPED.pack(
            self.body_crc,
            body_len,
            self.base_offset,
            self.count,
            self.flags,
            version,
            self.base_timestamp,
            self.max_timestamp,
            *producer,
        )
        return _PREFIX.pack(MAGIC, crc32c(rest)) + rest

    def raw(self) -> bytes:
        """The batch for a client: without origins."""
        return self.header() + self._body

    def stored(self) -> bytes:
        """The batch for a log: with its origins, if it has any."""
        origins = self.origins
        if not origins:
            return self.raw()
        producer = (0, len(origins), crc32c(origins))
        body_len = len(self._body) + len(origins)
        return self._header(WITH_ORIGINS, body_len, producer) + self._body + origins

    def pack(self) -> None:
        """Compress the body of a new batch, if that makes it smaller."""
        body = self._body
        if self.flags & (COMPRESSION | LOST) or not (
            limits.COMPRESS_BYTES_MIN <= len(body) <= limits.CLIENT_BATCH_BYTES_MAX
        ):
            return
        packed = zstandard.ZstdCompressor(level=1).compress(body)
        if len(packed) + 16 < len(body):
            self._body = b"".join(
                (_PREFIX.pack(len(body), len(packed)), packed, _pad(8 + len(packed)))
            )
            self.body_crc = crc32c(self._body)
            self.flags |= ZSTD

    # --- columns ----------------------------------------------------------------------------
    # Each method takes ``low`` and ``high`` and decodes these records only.
    @property
    def plain_bytes(self) -> int:
        """The size of the body when it is unpacked, by its own word; nothing is unpacked."""
        return bodies.plain_bytes(self._body, self.flags)

    @property
    def memory_bytes(self) -> int:
        """The most memory that this batch holds, now or after its columns were read."""
        size = plain = len(self._body)
        flags = self.flags
        if flags & COMPRESSION:
            plain = self.plain_bytes
            size += plain
        if self.count <= _DECODED_RECORDS_MAX and plain <= _DECODED_BYTES_MAX:  # _keeps_decoded
            size += plain + (2 if flags & HAS_KEYS else 1) * self.count * _ITEM_BYTES
        return size + _OBJECT_BYTES

    @property
    def _keeps_decoded(self) -> bool:
        """Whether values and keys stay decoded for the next reader; other batches are read in slices."""
        return self.count <= _DECODED_RECORDS_MAX and self.plain_bytes <= _DECODED_BYTES_MAX

    def plain(self) -> bytes:
        """The body, unpacked. A lost batch has no body; this raises an explicit error."""
        if not self.flags & (COMPRESSION | LOST):
            return self._body
        if self.flags & LOST:
            raise DataCorrupt(
                f"offsets {self.base_offset} to {self.end_offset - 1} were destroyed and given up "
                "by a repair; continue at the next offset",
                code="records_lost",
            )
        plain = self._plain
        if plain is None:
            plain = self._plain = bodies.unpack(self._body, self.flags)
        return plain

    def values(self, low: int = 0, high: int | None = None) -> list[bytes]:
        high = self.count if high is None else high
        values = self._values
        if values is None:
            if high - low < self.count:
                self._sliced += high - low
            if not self._keeps_decoded or (high - low < self.count and self._sliced <= self.count):
                return bodies.binary(self.plain(), 0, self.count, low, high)
            values = self._values = bodies.binary(self.plain(), 0, self.count, 0, self.count)
        return values if high - low == self.count else values[low:high]

    def remember(self, values: Sequence[bytes]) -> None:
        """Keep the values decoded, if a reader would keep them."""
        if self._keeps_decoded:
            self._values = list(values)

    def forget(self) -> None:
        """Drop the decoded columns; they are decoded again on request."""
        self._values = self._keys = self._plain = None

    def column(self, flag: int) -> int:
        """Where the column begins in the plain body."""
        if self._ends is None:
            self._ends = bodies.layout(self.plain(), self.count, self.flags)
        return self._ends[flag]

    def keys(self, low: int = 0, high: int | None = None) -> list[bytes | None] | None:
        if not self.flags & HAS_KEYS:
            return None
        high = self.count if high is None else high
        keys = self._keys
        if keys is None:
            plain, start = self.plain(), self.column(HAS_KEYS)
            if not self._keeps_decoded:
                return bodies.keys(plain, start, self.count, low, high)
            keys = self._keys = bodies.keys(plain, start, self.count, 0, self.count)
        return keys if high - low == self.count else keys[low:high]

    def headers(self, low: int = 0, high: int | None = None) -> list[Headers] | None:
        """A new dict for each record that has headers, None for each other record."""
        if not self.flags & HAS_HEADERS:
            return None
        start, high = self.column(HAS_HEADERS), self.count if high is None else high
        return cast(list[Headers], bodies.headers(self.plain(), start, self.count, low, high))

    def nulls(self, low: int = 0, high: int | None = None) -> list[int]:
        """Which of the values ``low:high`` are null (``contents.py``), counted from ``low``. Most batches have none."""
        if not self.flags & HAS_HEADERS:
            return []
        if self.plain().find(TOMBSTONE_HEADER.encode(), self.column(HAS_HEADERS)) < 0:
            return []
        pairs = zip(self.values(low, high), self.headers(low, high) or (), strict=True)
        return [at for at, (value, own) in enumerate(pairs) if own and is_tombstone(value, own)]

    def nullable(self, low: int = 0, high: int | None = None) -> list[bytes | None]:
        """The values, with None for those that are null."""
        found: list[bytes | None] = list(self.values(low, high))
        for at in self.nulls(low, high):
            found[at] = None
        return found

    def header_count(self) -> int:
        """Of all records together."""
        if not self.flags & HAS_HEADERS:
            return 0
        end = self.column(HAS_HEADERS) + 4 * (self.count + 1)
        return int.from_bytes(self.plain()[end - 4 : end], "little")

    def _longs(self, flag: int, low: int = 0, high: int | None = None) -> list[int]:
        start = self.column(flag)
        return bodies.longs(self.plain(), start, low, self.count if high is None else high)

    def times(self, low: int = 0, high: int | None = None) -> list[int] | None:
        if self.flags & (HAS_TIMES | STAGED) != HAS_TIMES:
            return None
        return self._longs(HAS_TIMES, low, high)

    def expiry(self, low: int = 0, high: int | None = None) -> list[int] | None:
        return self._longs(HAS_EXPIRY, low, high) if self.flags & HAS_EXPIRY else None

    def ids(self, low: int = 0, high: int | None = None) -> list[bytes] | None:
        if not self.flags & HAS_IDS:
            return None
        start = self.column(HAS_IDS)
        return bodies.identities(self.plain(), start, low, self.count if high is None else high)

    def targets(self, low: int = 0, high: int | None = None) -> list[bytes] | None:
        if not self.flags & HAS_TARGETS:
            return None
        high = self.count if high is None else high
        return bodies.binary(self.plain(), self.column(HAS_TARGETS), self.count, low, high)

    def some(self, column: ColumnReader, indexes: Sequence[int]) -> list[Any] | None:
        """``column`` at the indexes, which are in order; None if the batch does not have it.

        ``batch.some(batch.keys, [3, 5])``. Neighbours are decoded together, far ones one by one.
        """
        if not indexes:
            return []
        first, end = indexes[0], indexes[-1] + 1
        if end - first <= _SPARSE * len(indexes):
            part = column(first, end)
            if part is None or end - first == len(indexes):
                return part
            if isinstance(indexes, range):
                return part[:: indexes.step]
            return [part[index - first] for index in indexes]
        found = []
        for index in indexes:
            one = column(index, index + 1)
            if one is None:
                return None
            found += one
        return found

    def value_bytes(self, low: int, high: int) -> int:
        """The size of the values ``low:high``; for a packed batch that nobody has unpacked, on average."""
        if self.flags & COMPRESSION and self._plain is None:
            return self.plain_bytes * (high - low) // self.count
        offsets = bodies.offsets_of(self.plain(), 0, self.count)
        return int(offsets[high] - offsets[low])

    def fitting(self, low: int, high: int, bytes_max: int) -> int:
        """How far the values from ``low`` on have at most so many bytes; one is always allowed."""
        if self.plain_bytes <= bytes_max:
            return high
        return bodies.fitting(bodies.offsets_of(self.plain(), 0, self.count), low, high, bytes_max)

    def columns(self, indexes: Sequence[int] | None = None) -> Columns:
        """All columns, decoded, as the client gave them (except the times, which the broker sets);
        of the records at ``indexes``, if they are given."""
        wanted = range(self.count) if indexes is None else indexes
        return Columns(
            self.some(self.values, wanted) or [],
            self.some(self.keys, wanted),
            self.some(self.headers, wanted),
            self.some(self.times, wanted),
            self.some(self.ids, wanted),
            self.some(self.expiry, wanted),
            self.some(self.targets, wanted),
        )

    def messages(
        self,
        topic: str,
        partition: int,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        *,
        attempt: int = 1,
        settling: Settling | None = None,
        lease: Any = None,
    ) -> list[Message]:
        """Message objects for the records ``start:stop:step``."""
        stop = self.count if stop is None else stop
        indexes = range(start, stop, step)
        offsets = range(self.base_offset + start, self.base_offset + stop, step)
        with no_collection(stop - start):
            return self._messages(
                topic, partition, offsets, indexes, repeat(attempt), settling, lease
            )

    def message(self, topic: str, partition: int, offset: int) -> Message:
        """The record at the offset, which lies in this batch."""
        index = offset - self.base_offset
        return self.messages(topic, partition, index, index + 1)[0]

    def pick(
        self,
        topic: str,
        partition: int,
        indexes: Sequence[int],
        attempts: Iterable[int],
        settling: Settling | None = None,
        lease: Any = None,
        offsets: Sequence[int] | None = None,
    ) -> list[Message]:
        """Message objects for some records, in order, each with its own attempt (and offset, if given)."""
        if offsets is None:
            offsets = [self.base_offset + index for index in indexes]
        return self._messages(topic, partition, offsets, indexes, attempts, settling, lease)

    def _messages(
        self,
        topic: str,
        partition: int,
        offsets: Sequence[int],
        indexes: Sequence[int],
        attempts: Iterable[int],
        settling: Settling | None,
        lease: Any,
    ) -> list[Message]:
        if not indexes:
            return []
        some = self.some
        keys = headers = times = ids = None
        if self.flags & COLUMNS:  # most batches that hold one message have values alone
            keys, headers = some(self.keys, indexes), some(self.headers, indexes)
            times, ids = some(self.times, indexes), some(self.ids, indexes)
        return list(
            map(
                Message,
                repeat(topic),
                repeat(partition),
                offsets,
                repeat(self.base_timestamp) if times is None else times,
                repeat(None) if keys is None else keys,
                some(self.values, indexes) or (),
                repeat(None) if headers is None else headers,
                repeat(None) if ids is None else ids,
                attempts,
                repeat(settling),
                repeat(lease),
            )
        )


def no_collection(count: int) -> AbstractContextManager[None]:
    """Pause the garbage collector while thousands of objects without cycles are created.

    Measured: the collector's passes cost as much as the creation of the messages.
    """
    if count < _COLLECTION_MATTERS or not gc.isenabled():
        return _AS_USUAL
    return _without_collection()


_AS_USUAL = nullcontext()


@contextmanager
def _without_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_COLLECTION_MATTERS = 256
_VALUES_KEPT_MAX = 256
_DECODED_RECORDS_MAX = limits.BATCH_RECORDS_TARGET
_DECODED_BYTES_MAX = 2 * limits.BATCH_BYTES_TARGET
"""A batch that the broker gathered stays decoded for the next reader. One that a client made may be far
larger; each reader decodes its own slice of that."""
_SPARSE = 4
"""If a reader wants fewer than every fourth record, they are decoded one by one."""
_ITEM_BYTES = 48
"""A decoded value or key without its bytes: the object and its place in the list."""
_OBJECT_BYTES = 1024


# --- parsing ------------------------------------------------------------------------------------
def parse_header(raw: bytes, at: int = 0) -> tuple[Batch, int] | None:
    """A batch without its body, and the body's length; None if there is no valid header."""
    if len(raw) - at < HEADER_BYTES:
        return None
    (
        magic,
        header_crc,
        body_crc,
        body_len,
        base_offset,
        count,
        flags,
        version,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        first_sequence,
    ) = HEADER.unpack_from(raw, at)
    if magic != MAGIC or crc32c(raw[at + 8 : at + HEADER_BYTES]) != header_crc:
        return None
    origins_bytes = origins_crc = 0
    if version == WITH_ORIGINS:
        origins_bytes, origins_crc = producer_epoch, first_sequence
        if producer_id or not 0 < origins_bytes <= body_len or origins_bytes % ORIGIN_BYTES:
            return None
        producer_epoch = first_sequence = 0
    elif version != VERSION:
        return None
    if (
        body_len & 7
        or body_len > limits.BATCH_BYTES_MAX
        or not 0 < count <= limits.BATCH_RECORDS_MAX
        or base_offset + count > limits.OFFSET_MAX
    ):
        return None
    batch = Batch(
        b"",
        body_crc,
        count,
        flags,
        base_offset,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        first_sequence,
    )
    if origins_bytes:
        batch.origins_bytes, batch.origins_crc = origins_bytes, origins_crc
    return batch, body_len


def is_newer(raw: bytes) -> bool:
    """Whether these bytes are a whole header of a newer version.

    Every version begins with "HRB" and has the same checksum of its header, so an older broker can
    distinguish a newer log from damage, and does not touch it.
    """
    if len(raw) < HEADER_BYTES:
        return False
    fields = HEADER.unpack_from(raw)
    magic, header_crc, version = fields[0], fields[1], fields[7]
    return bool(
        magic & 0xFF_FFFF == MAGIC & 0xFF_FFFF
        and version > WITH_ORIGINS
        and crc32c(raw[8:HEADER_BYTES]) == header_crc
    )


def parse(raw: bytes, at: int = 0) -> Batch | None:
    """The whole valid batch that begins at ``at``, or None."""
    parsed = parse_header(raw, at)
    if parsed is None:
        return None
    batch, body_len = parsed
    return complete(batch, body_len, raw[at + HEADER_BYTES : at + HEADER_BYTES + body_len])


def complete(batch: Batch, body_len: int, body: bytes) -> Batch | None:
    """The batch of :func:`parse_header` with its body, which is not copied if there are no origins; None if it is
    damaged."""
    size = batch.origins_bytes
    if len(body) != body_len:
        return None
    if size:
        batch.origins, body = body[body_len - size :], body[: body_len - size]
        if crc32c(batch.origins) != batch.origins_crc:
            return None
    if crc32c(body) != batch.body_crc:
        return None
    batch._body = body
    return batch


def verified(batch: Batch, body_len: int, body: bytes) -> bool:
    """Whether this is the body of :func:`parse_header`'s batch; it is not kept, except for the origins."""
    whole = complete(batch, body_len, body)
    batch._body = b""
    return whole is not None


def lost(base_offset: int, count: int, timestamp: int) -> Batch:
    """A batch that stands for destroyed records."""
    batch = Batch(b"", crc32c(b""), count, LOST | AFTER_SYNC)
    batch.base_offset = base_offset
    batch.base_timestamp = batch.max_timestamp = timestamp
    return batch
