"""The columnar batch: it is appended, stored, read, sent and passed to Spark.

Little-endian. A header of 64 bytes, then a body whose length is a multiple of 8::

     0 u32 magic            "HRB1"; all-zero bytes can never be a batch
     4 u32 header_crc       crc32c of bytes 8..64
     8 u32 body_crc         crc32c of the body as stored
    12 u32 body_len         bytes, multiple of 8
    16 u64 base_offset      stamped by the broker, outside body_crc
    24 u32 count            records, at least 1
    28 u16 flags            which columns exist, and the compression
    30 u16 version          1
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

Rules:
- A batch from outside is hostile until :func:`check` has passed it. A batch that we wrote is trusted
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
from itertools import accumulate, chain, pairwise, repeat
from operator import sub
from typing import Any

import google_crc32c
import zstandard

from headrace import limits
from headrace.errors import DataCorrupt, TooLarge
from headrace.log.columns import Columns, Headers
from headrace.log.header_columns import check_count, check_texts
from headrace.model import Message, Settling

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Headrace's columns are little-endian and this machine is not")

MAGIC = 0x31425248  # "HRB1"
VERSION = 1
HEADER = struct.Struct("<IIIIQIHHqqQII")
HEADER_BYTES = HEADER.size
_STAMPED = struct.Struct("<IIQIHHqqQII")  # the header from body_crc on
_PREFIX = struct.Struct("<II")

HAS_KEYS = 0x01
HAS_HEADERS = 0x02
HAS_TIMES = 0x04
HAS_IDS = 0x08
HAS_EXPIRY = 0x10
HAS_TARGETS = 0x20
COLUMNS = 0x3F
COMPRESSION = 0x0300
ZSTD = 0x0100
STAGED = 0x2000
LOST = 0x4000
AFTER_SYNC = 0x8000

_PAD = [bytes(n) for n in range(8)]

APART_BYTES_MIN = 64 << 10
"""A batch of this size has a read of its own, so that its body is not copied out of a larger read."""

crc32c = google_crc32c.value


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
    _plain: bytes | None = None
    _values: list[bytes] | None = None
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
        return HEADER_BYTES + len(self._body)

    def header(self) -> bytes:
        rest = _STAMPED.pack(
            self.body_crc,
            len(self._body),
            self.base_offset,
            self.count,
            self.flags,
            VERSION,
            self.base_timestamp,
            self.max_timestamp,
            self.producer_id,
            self.producer_epoch,
            self.first_sequence,
        )
        return _PREFIX.pack(MAGIC, crc32c(rest)) + rest

    def raw(self) -> bytes:
        return self.header() + self._body

    def pack(self) -> None:
        """Compress the body of a new batch, if that makes it smaller."""
        body = self._body
        if self.flags & (COMPRESSION | LOST) or len(body) < limits.COMPRESS_BYTES_MIN:
            return
        packed = zstandard.ZstdCompressor(level=1).compress(body)
        if len(packed) + 16 < len(body):
            self._body = b"".join(
                (_PREFIX.pack(len(body), len(packed)), packed, _pad(8 + len(packed)))
            )
            self.body_crc = crc32c(self._body)
            self.flags |= ZSTD

    # --- columns ----------------------------------------------------------------------------
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
        if self._plain is None:
            self._plain = _unpack(self._body, self.flags)
        return self._plain

    def values(self) -> list[bytes]:
        if self._values is None:
            self._values = _read_binary(self.plain(), 0, self.count)[0]
        return self._values

    def forget(self) -> None:
        """Drop the decoded columns; they are decoded again on request."""
        self._values = self._keys = self._plain = None

    def column(self, flag: int) -> int:
        """Where the column begins in the plain body."""
        if self._ends is None:
            self._ends = _layout(self.plain(), self.count, self.flags)
        return self._ends[flag]

    def keys(self) -> list[bytes | None] | None:
        if not self.flags & HAS_KEYS:
            return None
        if self._keys is None:
            start = self.column(HAS_KEYS)
            size = (self.count + 7) // 8
            bits = int.from_bytes(self.plain()[start : start + size], "little")
            bits &= (1 << self.count) - 1
            start += size + (-size & 7)
            keys = _read_binary(self.plain(), start, self.count)[0]
            if bits == (1 << self.count) - 1:
                self._keys = list(keys)
            else:
                valid = bin(bits | 1 << self.count)[:2:-1]
                self._keys = [
                    key if bit == "1" else None for key, bit in zip(keys, valid, strict=True)
                ]
        return self._keys

    def headers(self) -> list[Headers] | None:
        """A new dict for each record that has headers, None for each other record."""
        if not self.flags & HAS_HEADERS:
            return None
        plain = self.plain()
        start = self.column(HAS_HEADERS)
        size = 4 * (self.count + 1)
        lists = memoryview(plain)[start : start + size].cast("i")
        total = lists[-1]
        names, start = _read_binary(plain, start + size + (-size & 7), total)
        texts, _ = _read_binary(plain, start, total)
        pairs = [(name.decode(), text.decode()) for name, text in zip(names, texts, strict=True)]
        return [dict(pairs[a:b]) if a != b else None for a, b in pairwise(lists)]

    def _longs(self, flag: int) -> list[int]:
        start = self.column(flag)
        return memoryview(self.plain())[start : start + 8 * self.count].cast("q").tolist()

    def times(self) -> list[int] | None:
        return self._longs(HAS_TIMES) if self.flags & (HAS_TIMES | STAGED) == HAS_TIMES else None

    def expiry(self) -> list[int] | None:
        return self._longs(HAS_EXPIRY) if self.flags & HAS_EXPIRY else None

    def ids(self) -> list[bytes] | None:
        if not self.flags & HAS_IDS:
            return None
        start = self.column(HAS_IDS)
        plain = self.plain()
        return [plain[at : at + 16] for at in range(start, start + 16 * self.count, 16)]

    def targets(self) -> list[bytes] | None:
        if not self.flags & HAS_TARGETS:
            return None
        return _read_binary(self.plain(), self.column(HAS_TARGETS), self.count)[0]

    def columns(self) -> Columns:
        """All columns, decoded, as the client gave them (except the times, which the broker sets)."""
        return Columns(
            self.values(),
            self.keys(),
            self.headers(),
            self.times(),
            self.ids(),
            self.expiry(),
            self.targets(),
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
        cut = slice(start, stop, step)
        offsets = range(self.base_offset + start, self.base_offset + stop, step)
        with no_collection(stop - start):
            return self._messages(
                topic, partition, offsets, lambda c: c[cut], repeat(attempt), settling, lease
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
        """Message objects for some records, each with its own attempt (and offset, if given)."""
        if offsets is None:
            offsets = [self.base_offset + index for index in indexes]
        return self._messages(
            topic, partition, offsets, lambda c: [c[i] for i in indexes], attempts, settling, lease
        )

    def _messages(
        self,
        topic: str,
        partition: int,
        offsets: Sequence[int],
        some: Callable[[Sequence[Any]], Sequence[Any]],
        attempts: Iterable[int],
        settling: Settling | None,
        lease: Any,
    ) -> list[Message]:
        """``some`` takes the wanted records out of a column."""
        keys, headers, times, ids = self.keys(), self.headers(), self.times(), self.ids()
        return list(
            map(
                Message,
                repeat(topic),
                repeat(partition),
                offsets,
                repeat(self.base_timestamp) if times is None else some(times),
                repeat(None) if keys is None else some(keys),
                some(self.values()),
                repeat(None) if headers is None else some(headers),
                repeat(None) if ids is None else some(ids),
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


# --- decoding -----------------------------------------------------------------------------------
def _read_binary(plain: bytes, start: int, count: int) -> tuple[list[bytes], int]:
    """The items of a binary column and where the next column begins."""
    size = 4 * (count + 1)
    offsets = memoryview(plain)[start : start + size].cast("i")
    base = start + size + (-size & 7)
    total = offsets[count]
    items: list[bytes] = []
    append = items.append
    data = plain[base : base + total]
    low = 0
    for high in offsets[1:]:
        append(data[low:high])
        low = high
    return items, base + total + (-total & 7)


def _binary_end(plain: bytes, start: int, count: int) -> int:
    """Where a binary column ends, checked against the body but not item by item."""
    size = 4 * (count + 1)
    base = start + size + (-size & 7)
    if base > len(plain):
        raise DataCorrupt("a column of the batch ends after its body")
    total = int.from_bytes(plain[start + size - 4 : start + size], "little", signed=True)
    end = base + total + (-total & 7)
    if total < 0 or end > len(plain):
        raise DataCorrupt("a column of the batch ends after its body")
    return end


def _layout(plain: bytes, count: int, flags: int) -> dict[int, int]:
    """Column flag -> where it begins; 0 is the values, -1 the end of the last column."""
    starts = {0: 0}
    at = _binary_end(plain, 0, count)
    if flags & HAS_KEYS:
        starts[HAS_KEYS] = at
        at += (count + 7) // 8
        at = _binary_end(plain, at + (-at & 7), count)
    if flags & HAS_HEADERS:
        starts[HAS_HEADERS] = at
        size = 4 * (count + 1)
        if at + size > len(plain):
            raise DataCorrupt("the header column of the batch ends after its body")
        total = int.from_bytes(plain[at + size - 4 : at + size], "little", signed=True)
        if not 0 <= total <= len(plain):
            raise DataCorrupt("the header column of the batch makes no sense")
        at = _binary_end(plain, at + size + (-size & 7), total)
        at = _binary_end(plain, at, total)
    for flag, width in ((HAS_TIMES, 8), (HAS_IDS, 16), (HAS_EXPIRY, 8)):
        if flags & flag:
            starts[flag] = at
            at += width * count
            if at > len(plain):
                raise DataCorrupt("a column of the batch ends after its body")
    if flags & HAS_TARGETS:
        starts[HAS_TARGETS] = at
        at = _binary_end(plain, at, count)
    starts[-1] = at
    return starts


def _unpack(body: bytes, flags: int) -> bytes:
    if flags & COMPRESSION != ZSTD or len(body) < 8:
        raise DataCorrupt(f"the batch is compressed in a way that is not known ({flags:#06x})")
    plain_len, packed_len = _PREFIX.unpack_from(body)
    if plain_len > limits.BATCH_BYTES_MAX or 8 + packed_len > len(body):
        raise DataCorrupt("the compressed batch claims impossible lengths")
    packed = body[8 : 8 + packed_len]
    try:
        # Check this first: zstd trusts a size in the frame itself, whatever max_output_size is.
        if zstandard.frame_content_size(packed) not in (-1, plain_len):
            raise DataCorrupt("the compressed batch has another length than it says")
        plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=plain_len)
    except zstandard.ZstdError as error:
        raise DataCorrupt(f"the compressed batch cannot be unpacked: {error}") from None
    if len(plain) != plain_len:
        raise DataCorrupt("the compressed batch has another length than it says")
    return plain


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
    if (
        version != VERSION
        or body_len & 7
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
        and version > VERSION
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
    """The batch of :func:`parse_header` with its body, which is not copied; None if it is damaged."""
    if len(body) != body_len or crc32c(body) != batch.body_crc:
        return None
    batch._body = body
    return batch


# --- batches from outside ----------------------------------------------------------------------
def check(raw: bytes, *, message_bytes_max: int) -> Batch:
    """Parse and check a batch from a client. Raises :class:`DataCorrupt` or :class:`TooLarge`."""
    if len(raw) > HEADER_BYTES + limits.BATCH_BYTES_MAX:
        raise TooLarge(
            f"a batch has at most {limits.BATCH_BYTES_MAX} bytes", code="batch_too_large"
        )
    parsed = parse_header(raw)
    if parsed is None or HEADER_BYTES + parsed[1] != len(raw):
        raise DataCorrupt("these bytes are not one whole batch", code="invalid_batch")
    batch = parse(raw)
    if batch is None:
        raise DataCorrupt("the batch fails its checksum", code="invalid_batch")
    if batch.flags & ~(COLUMNS | COMPRESSION):
        raise DataCorrupt(f"the batch has unknown flags {batch.flags:#06x}", code="invalid_batch")
    check_columns(batch, message_bytes_max)
    return batch


def check_columns(
    batch: Batch,
    message_bytes_max: int = limits.MESSAGE_BYTES_CEILING,
    headers_max: int = limits.HEADERS_PER_BATCH_MAX,
) -> None:
    """Check that the body has the columns that the flags name, whole and in bounds. Raises as above."""
    try:
        _check_columns(batch, message_bytes_max, headers_max)
    except (ValueError, IndexError, struct.error) as error:
        raise DataCorrupt(f"the batch makes no sense: {error}", code="invalid_batch") from None
    except DataCorrupt as error:
        raise DataCorrupt(error.message, code="invalid_batch") from None


def _check_columns(batch: Batch, message_bytes_max: int, headers_max: int) -> None:
    plain, count = batch.plain(), batch.count
    end = batch.column(-1)
    if end != len(plain):
        raise DataCorrupt("the body has bytes after the last column")
    size = _check_offsets(plain, 0, count, message_bytes_max)
    if size > message_bytes_max:
        raise TooLarge(
            f"a message in the batch has {size} bytes, the limit is {message_bytes_max} "
            "(max_message_size)",
            code="message_too_large",
        )
    if batch.flags & HAS_KEYS:
        start = batch.column(HAS_KEYS)
        size = (count + 7) // 8
        most = limits.KEY_BYTES_MAX
        if _check_offsets(plain, start + size + (-size & 7), count, most) > most:
            raise TooLarge(f"a key has at most {limits.KEY_BYTES_MAX} bytes", code="key_too_large")
    if batch.flags & HAS_HEADERS:
        start = batch.column(HAS_HEADERS)
        size = 4 * (count + 1)
        total = int.from_bytes(plain[start + size - 4 : start + size], "little")
        check_count(total, headers_max)
        most = limits.HEADERS_PER_MESSAGE_MAX
        if _check_offsets(plain, start, count, most, binary=False) > most:
            raise TooLarge(
                f"a message has at most {limits.HEADERS_PER_MESSAGE_MAX} headers",
                code="headers_too_large",
            )
        lists = memoryview(plain)[start : start + size].cast("i")
        start += size + (-size & 7)
        _check_offsets(plain, start, total)
        texts = _binary_end(plain, start, total)
        _check_offsets(plain, texts, total)
        check_texts(plain, lists, start, texts, total)
    if batch.flags & HAS_TIMES and not min(times := batch._longs(HAS_TIMES)) >= 0:
        raise DataCorrupt(f"a record has the time {min(times)}")
    if batch.flags & HAS_EXPIRY and not min(batch._longs(HAS_EXPIRY)) >= 0:
        raise DataCorrupt("a record has a negative time to live")
    if batch.flags & HAS_TARGETS:
        _check_offsets(plain, batch.column(HAS_TARGETS), count)
        b"".join(batch.targets() or ()).decode("ascii")  # they are names


def _check_offsets(
    plain: bytes, start: int, count: int, most: int | None = None, *, binary: bool = True
) -> int:
    """Check that offsets begin at 0, never fall and stay inside. Returns the size of the largest item, or
    a bound for it that is at most ``most``; without ``most``, any number."""
    offsets = memoryview(plain)[start : start + 4 * (count + 1)].cast("i").tolist()
    # To sort a sorted list takes one comparison per item, so this is the fastest check.
    if offsets[0] != 0 or sorted(offsets) != offsets:
        raise DataCorrupt("the offsets of a column are not in order")
    if binary:
        _binary_end(plain, start, count)
    total = offsets[-1]
    if most is None or total <= most:
        return total
    return max(map(sub, offsets[1:], offsets), default=0)


def lost(base_offset: int, count: int, timestamp: int) -> Batch:
    """A batch that stands for destroyed records."""
    batch = Batch(b"", crc32c(b""), count, LOST | AFTER_SYNC)
    batch.base_offset = base_offset
    batch.base_timestamp = batch.max_timestamp = timestamp
    return batch
