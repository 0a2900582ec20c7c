"""The body of a batch: how it is unpacked, where its columns are, and the records of a slice.

Rules:
- A slice costs what its own records cost, however large the batch is: a member with room for a hundred
  messages of a batch of a million must not decode a million. No function here walks over records that
  were not asked for.
- A size is checked before memory is allocated for it. A packed body says how long it is when it is
  unpacked; the decompressor never makes more than that.

Rejected: keeping every decoded column with its batch. Headers became twenty times as large as their bytes,
and a reader of one slice paid for all of them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import pairwise

import zstandard

from headrace import limits
from headrace.errors import DataCorrupt

HAS_KEYS = 0x01
HAS_HEADERS = 0x02
HAS_TIMES = 0x04
HAS_IDS = 0x08
HAS_EXPIRY = 0x10
HAS_TARGETS = 0x20
COMPRESSION = 0x0300
ZSTD = 0x0100
PREFIX = struct.Struct("<II")
"""Of a packed body: plain_len, packed_len."""


# --- unpacking ------------------------------------------------------------------------------------
def plain_bytes(body: bytes, flags: int) -> int:
    """How many bytes the body has when it is unpacked, by its own word. Nothing is unpacked."""
    if not flags & COMPRESSION:
        return len(body)
    return int(PREFIX.unpack_from(body)[0]) if len(body) >= PREFIX.size else 0


def unpack(body: bytes, flags: int) -> bytes:
    if flags & COMPRESSION != ZSTD or len(body) < PREFIX.size:
        raise DataCorrupt(f"the batch is compressed in a way that is not known ({flags:#06x})")
    plain_len, packed_len = PREFIX.unpack_from(body)
    if plain_len > limits.BATCH_BYTES_MAX or PREFIX.size + packed_len > len(body):
        raise DataCorrupt("the compressed batch claims impossible lengths")
    packed = body[PREFIX.size : PREFIX.size + packed_len]
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


# --- where columns are ----------------------------------------------------------------------------
def binary_end(plain: bytes, start: int, count: int) -> int:
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


def layout(plain: bytes, count: int, flags: int) -> dict[int, int]:
    """Column flag -> where it begins; 0 is the values, -1 the end of the last column."""
    starts = {0: 0}
    at = binary_end(plain, 0, count)
    if flags & HAS_KEYS:
        starts[HAS_KEYS] = at
        at += (count + 7) // 8
        at = binary_end(plain, at + (-at & 7), count)
    if flags & HAS_HEADERS:
        starts[HAS_HEADERS] = at
        size = 4 * (count + 1)
        if at + size > len(plain):
            raise DataCorrupt("the header column of the batch ends after its body")
        total = int.from_bytes(plain[at + size - 4 : at + size], "little", signed=True)
        if not 0 <= total <= len(plain):
            raise DataCorrupt("the header column of the batch makes no sense")
        at = binary_end(plain, at + size + (-size & 7), total)
        at = binary_end(plain, at, total)
    for flag, width in ((HAS_TIMES, 8), (HAS_IDS, 16), (HAS_EXPIRY, 8)):
        if flags & flag:
            starts[flag] = at
            at += width * count
            if at > len(plain):
                raise DataCorrupt("a column of the batch ends after its body")
    if flags & HAS_TARGETS:
        starts[HAS_TARGETS] = at
        at = binary_end(plain, at, count)
    starts[-1] = at
    return starts


# --- slices ---------------------------------------------------------------------------------------
def offsets_of(plain: bytes, start: int, count: int) -> memoryview:
    """The offsets of a binary column that begins at ``start``: ``count + 1`` of them."""
    return memoryview(plain)[start : start + 4 * (count + 1)].cast("i")


def binary(plain: bytes, start: int, count: int, low: int, high: int) -> list[bytes]:
    """The items ``low:high`` of a binary column that has ``count`` of them."""
    size = 4 * (count + 1)
    offsets = memoryview(plain)[start + 4 * low : start + 4 * (high + 1)].cast("i")
    base = start + size + (-size & 7)
    first, last = offsets[0], offsets[high - low]
    if first == last:
        return [b""] * (high - low)
    data = plain[base + first : base + last]
    if first:
        return [data[a - first : b - first] for a, b in pairwise(offsets)]
    items: list[bytes] = []
    append = items.append  # the fastest way to cut a whole column
    for end in offsets[1:]:
        append(data[first:end])
        first = end
    return items


def validity(plain: bytes, start: int, low: int, high: int) -> str | None:
    """Of a column's items ``low:high``: "1" for one that exists, "0" for none; None if all exist."""
    first = low >> 3
    bits = int.from_bytes(plain[start + first : start + ((high + 7) >> 3)], "little")
    bits = (bits >> (low & 7)) & ((1 << (high - low)) - 1)
    if bits == (1 << (high - low)) - 1:
        return None
    return bin(bits | 1 << (high - low))[:2:-1]


def keys(plain: bytes, start: int, count: int, low: int, high: int) -> list[bytes | None]:
    size = (count + 7) // 8
    items = binary(plain, start + size + (-size & 7), count, low, high)
    valid = validity(plain, start, low, high)
    if valid is None:
        return list(items)
    return [item if bit == "1" else None for item, bit in zip(items, valid, strict=True)]


def headers(
    plain: bytes, start: int, count: int, low: int, high: int
) -> list[dict[str, str] | None]:
    """A new dict for each record that has headers, None for each other record."""
    size = 4 * (count + 1)
    lists = offsets_of(plain, start, count)
    total, first, last = lists[count], lists[low], lists[high]
    if first == last:
        return [None] * (high - low)
    start += size + (-size & 7)
    names = binary(plain, start, total, first, last)
    texts = binary(plain, binary_end(plain, start, total), total, first, last)
    pairs = [(name.decode(), text.decode()) for name, text in zip(names, texts, strict=True)]
    return [
        dict(pairs[a - first : b - first]) if a != b else None
        for a, b in pairwise(lists[low : high + 1])
    ]


def longs(plain: bytes, start: int, low: int, high: int) -> list[int]:
    return memoryview(plain)[start + 8 * low : start + 8 * high].cast("q").tolist()


def identities(plain: bytes, start: int, low: int, high: int) -> list[bytes]:
    return [plain[at : at + 16] for at in range(start + 16 * low, start + 16 * high, 16)]


def fitting(offsets: memoryview, low: int, high: int, bytes_max: int) -> int:
    """The largest end up to ``high`` with which the items from ``low`` on have at most so many bytes; one
    item is always allowed."""
    if offsets[high] - offsets[low] <= bytes_max:
        return high
    return max(bisect_right(offsets, offsets[low] + bytes_max, low, high + 1) - 1, low + 1)
