"""Batches from outside: everything that is checked before the broker believes a client's batch.

A batch comes with checksums, but whoever made it also made those. So its size is checked before it is
unpacked, its columns before they are used, and each check costs a few nanoseconds per record: it runs on the
event loop, and a client must not be able to hold that for long.

Rules:
- ``CLIENT_BATCH_RECORDS_MAX`` and ``CLIENT_BATCH_BYTES_MAX`` bound what a client may send, not what can be read:
  batches that an earlier version accepted are delivered in slices.
- Whole columns are checked with builtins (``header_columns.py``): no loop in Python runs over records.
"""

from __future__ import annotations

import struct
from operator import sub

from headrace import limits
from headrace.errors import DataCorrupt, TooLarge
from headrace.log import body as bodies
from headrace.log.batch import COLUMNS, HEADER_BYTES, Batch, parse, parse_header
from headrace.log.body import COMPRESSION, HAS_EXPIRY, HAS_HEADERS, HAS_KEYS, HAS_TARGETS, HAS_TIMES
from headrace.log.header_columns import check_count, check_texts


def check(raw: bytes, *, message_bytes_max: int) -> Batch:
    """Parse and check a batch from a client. Raises :class:`DataCorrupt` or :class:`TooLarge`."""
    if len(raw) > HEADER_BYTES + limits.BATCH_BYTES_MAX:
        raise TooLarge(
            f"a batch has at most {limits.BATCH_BYTES_MAX} bytes", code="batch_too_large"
        )
    parsed = parse_header(raw)
    if parsed is None or HEADER_BYTES + parsed[1] != len(raw) or parsed[0].origins_bytes:
        raise DataCorrupt("these bytes are not one whole batch", code="invalid_batch")
    batch = parse(raw)
    if batch is None:
        raise DataCorrupt("the batch fails its checksum", code="invalid_batch")
    if batch.flags & ~(COLUMNS | COMPRESSION):
        raise DataCorrupt(f"the batch has unknown flags {batch.flags:#06x}", code="invalid_batch")
    _check_size(batch, message_bytes_max)
    check_columns(batch, message_bytes_max)
    if batch.flags & COMPRESSION:
        batch.forget()  # it may be a thousand times as large as what the queues count
    return batch


def _check_size(batch: Batch, message_bytes_max: int) -> None:
    """Before anything is unpacked: would it take the broker too long to look at?"""
    if batch.count > limits.CLIENT_BATCH_RECORDS_MAX:
        raise TooLarge(
            f"the batch has {batch.count} messages, the limit is "
            f"{limits.CLIENT_BATCH_RECORDS_MAX}; publish fewer at once",
            code="batch_too_large",
        )
    most = limits.CLIENT_BATCH_BYTES_MAX + message_bytes_max
    if most < batch.plain_bytes <= limits.BATCH_BYTES_MAX:
        unpacked = " when it is unpacked" if batch.flags & COMPRESSION else ""
        raise TooLarge(
            f"the batch has {batch.plain_bytes} bytes{unpacked}, the limit is {most}; publish fewer "
            "messages at once",
            code="batch_too_large",
        )


def check_columns(
    batch: Batch,
    message_bytes_max: int = limits.MESSAGE_BYTES_CEILING,
    headers_max: int = limits.BATCH_HEADERS_MAX,
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
        # Count here, because a repeated name is only one item in a dict.
        most = limits.HEADERS_PER_MESSAGE_MAX
        if _check_offsets(plain, start, count, most, binary=False) > most:
            raise TooLarge(
                f"a message has at most {limits.HEADERS_PER_MESSAGE_MAX} headers",
                code="headers_too_large",
            )
        lists = bodies.offsets_of(plain, start, count)
        start += size + (-size & 7)
        _check_offsets(plain, start, total)
        texts = bodies.binary_end(plain, start, total)
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
        bodies.binary_end(plain, start, count)
    total = offsets[-1]
    if most is None or total <= most:
        return total
    return max(map(sub, offsets[1:], offsets), default=0)
