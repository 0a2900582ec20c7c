"""Arrow columns to a columnar batch, with no Python per record.

A batch's binary column is laid out as Arrow lays it out: int32 offsets from 0, then the bytes. So a
value column of Spark has the bytes that go to the broker; the columns only have to be put one after the
other, with a checksum. Three things are converted, each by one call for the whole column: a slice begins
at another offset than 0, so its offsets are moved; a null has no bytes in a batch but may have some in
Arrow, so nulls become empty; 64-bit offsets become 32-bit ones.

The result is byte for byte what ``log.batch.encode`` makes of the same records; a test says so.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace import limits
from headrace.errors import TooLarge
from headrace.log.batch import HAS_HEADERS, HAS_KEYS, HAS_TIMES, Batch, crc32c

_PAD = [bytes(n) for n in range(8)]
Parts = list[Any]
"""Bytes and Arrow buffers, joined once at the end."""


def encode(
    values: pa.Array,
    keys: pa.Array | None = None,
    headers: pa.Array | None = None,
    times: pa.Array | None = None,
) -> Batch:
    """A batch that has not been stamped.

    ``values``: binary without nulls. ``keys``: binary. ``headers``: list of struct of two strings
    without nulls inside. ``times``: int64 without nulls, milliseconds.
    """
    count = len(values)
    assert 0 < count <= limits.BATCH_RECORDS_MAX
    flags = 0
    parts: Parts = []
    _binary(parts, values)
    if keys is not None:
        flags |= HAS_KEYS
        _validity(parts, keys)
        _binary(parts, pc.fill_null(keys, b"") if keys.null_count else keys)
    if headers is not None:
        flags |= HAS_HEADERS
        lists, items = _lists(headers)
        _fixed(parts, lists)
        for field in items.flatten():
            _binary(parts, field)
    if times is not None:
        flags |= HAS_TIMES
        at = 8 * times.offset
        _fixed(parts, memoryview(times.buffers()[1])[at : at + 8 * count])
    size = sum(map(len, parts))
    if size > limits.BATCH_BYTES_MAX:
        raise TooLarge(
            f"the batch has {size} bytes, the limit is {limits.BATCH_BYTES_MAX}",
            code="batch_too_large",
        )
    body = b"".join(parts)
    return Batch(body, crc32c(body), count, flags)


def data_bytes(array: pa.Array) -> int:
    """How many bytes the items of a binary column have together."""
    offsets = _offsets(array)
    return int(offsets[-1] - offsets[0])


def cut(array: pa.Array, bytes_max: int, rows_max: int) -> list[tuple[int, int]]:
    """(start, count) of runs of items that have about ``bytes_max`` bytes; one item at least each."""
    count = len(array)
    offsets = _offsets(array)
    if offsets[-1] - offsets[0] <= bytes_max and count <= rows_max:
        return [(0, count)]
    cuts = []
    start = 0
    while start < count:
        # The last row whose end is not beyond the limit: a search, because offsets never fall.
        limit, low, high = offsets[start] + bytes_max, start + 1, min(start + rows_max, count)
        while low < high:
            middle = (low + high + 1) // 2
            if offsets[middle] <= limit:
                low = middle
            else:
                high = middle - 1
        cuts.append((start, low - start))
        start = low
    return cuts


def _offsets(array: pa.Array) -> memoryview:
    """The item offsets of a non-empty binary array, as they lie in Arrow."""
    start = 4 * array.offset
    return memoryview(array.buffers()[1])[start : start + 4 * (len(array) + 1)].cast("i")


def _fixed(parts: Parts, raw: Any) -> None:
    parts.append(raw)
    parts.append(_PAD[-len(raw) & 7])


def _binary(parts: Parts, array: pa.Array) -> None:
    count = len(array)
    if not count:
        parts.append(bytes(8))
        return
    offsets = _offsets(array)
    first, last = offsets[0], offsets[count]
    buffers = array.buffers()
    if first:
        raw = pa.Array.from_buffers(pa.int32(), count + 1, [None, buffers[1]], offset=array.offset)
        _fixed(parts, memoryview(pc.subtract(raw, pa.scalar(first, pa.int32())).buffers()[1]))
    else:
        _fixed(parts, offsets.cast("B"))
    if last > first:
        _fixed(parts, memoryview(buffers[2])[first:last])


def _validity(parts: Parts, array: pa.Array) -> None:
    count = len(array)
    size = (count + 7) // 8
    if array.null_count:
        # As booleans the bits begin at 0, whatever the slice; the bits after the last must be cleared.
        raw = bytearray(memoryview(pc.is_valid(array).buffers()[1])[:size])
    else:
        raw = bytearray(b"\xff" * size)
    if count & 7:
        raw[-1] &= (1 << (count & 7)) - 1
    _fixed(parts, raw)


def _lists(array: pa.Array) -> tuple[Any, pa.Array]:
    """The list offsets from 0 on, and the items of those lists that are not null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths)
    raw = bytes(4) + memoryview(ends.buffers()[1])[: 4 * len(array)].tobytes()
    return raw, array.flatten()
