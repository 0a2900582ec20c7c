"""A run: neighbouring small batches as one batch, so that readers do not feel how messages were published.

Most programs publish one message at a time, and then the log has batches of one record. Each batch costs a
reader a header, two checksums, an object and a decode; each delivery costs a lease and a frame. So small batches are
joined where they enter memory, once for all readers: from a file (:func:`take`, in ``segment.py`` and in the
clients), and in the cache of a broker, where recent commits are (:func:`merge`).

Rules:
- Nothing is lost: offsets, times, keys, headers, ids, expiry times and targets are those of the batches. If only
  some of them have a column, the others get empty values for it. If their times differ, there is a column of times.
- The result has no producer: it is for readers. Only a log looks at producers, in its own batches.
- ``LOST`` and ``STAGED`` batches are never part of a run: a reader must see that records are lost, and a commit takes a
  staged batch as it is.
- A run has at most ``BATCH_RECORDS_TARGET`` records and ``BATCH_BYTES_TARGET`` bytes, like a batch that the
  group commit gathers. On the event loop it is shorter (``limits.RUN_RECORDS``), because to make it takes time there.
- Only *small* batches are joined, so a record is copied a few times at most, however often readers meet.

Measured, for a record of 100 bytes: :func:`take` 1.5 us, where parsing each batch and decoding it takes 5.

Rejected: joining in each reader (every protocol would need it, and every subscription would pay for it);
skipping the checksums (a flipped bit would be delivered).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final

from headrace import limits
from headrace.log.batch import (
    AFTER_SYNC,
    COMPRESSION,
    HAS_EXPIRY,
    HAS_HEADERS,
    HAS_IDS,
    HAS_KEYS,
    HAS_TARGETS,
    HEADER_BYTES,
    LOST,
    MAGIC,
    STAGED,
    Batch,
    crc32c,
    encode,
    parse,
)
from headrace.log.columns import NO_ID, Columns

_SINGLE: Final = struct.Struct("<IIIIQQq24xII")
"""A batch with one record: magic, header_crc, body_crc, body_len, base_offset, (count, flags, version), time, and
the two offsets of the column of values."""
_PLAIN: Final = 1 | 1 << 48
"""Count, flags and version of a batch with one value and no other column."""
_NOT_AFTER_SYNC: Final = ~(AFTER_SYNC << 32)
_FEW: Final = 8
"""After fewer plain records than this, other batches are looked at, too."""


def is_small(batch: Batch) -> bool:
    """Whether the batch may be part of a run."""
    return (
        batch.count <= limits.SMALL_BATCH_RECORDS
        and not batch.flags & (LOST | STAGED)
        and batch.stored_bytes <= limits.SMALL_BATCH_BYTES
        and batch.plain_bytes <= limits.SMALL_BATCH_BYTES
    )


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch with the records of all of these, which follow each other and are small."""
    if len(batches) == 1:
        return batches[0]
    flags = 0
    for batch in batches:
        flags |= batch.flags
    values: list[bytes] = []
    times: list[int] = []
    for batch in batches:
        values += batch.values()
        times += batch.times() or repeat(batch.base_timestamp, batch.count)
    columns = Columns(values)
    if flags & HAS_KEYS:
        columns.keys = _filled(batches, Batch.keys, None)
    if flags & HAS_HEADERS:
        columns.headers = _filled(batches, Batch.headers, None)
    if flags & HAS_IDS:
        columns.ids = _filled(batches, Batch.ids, NO_ID)
    if flags & HAS_EXPIRY:
        columns.expiry = _filled(batches, Batch.expiry, 0)
    if flags & HAS_TARGETS:
        columns.targets = _filled(batches, Batch.targets, b"")
    return _run(columns, times, batches[0].base_offset)


def _filled(
    batches: Sequence[Batch], column: Callable[[Batch], list[Any] | None], absent: Any
) -> list[Any]:
    parts: Iterable[Iterable[Any]] = (
        column(batch) or repeat(absent, batch.count) for batch in batches
    )
    return list(chain.from_iterable(parts))


def _run(columns: Columns, times: list[int], base_offset: int) -> Batch:
    if times[0] != times[-1]:  # they never run backwards
        columns.times = times
    batch = encode(columns)
    batch.base_offset = base_offset
    batch.base_timestamp, batch.max_timestamp = times[0], times[-1]
    batch.remember(columns.values)
    return batch


def take(
    data: bytes,
    at: int,
    offset: int,
    end: int,
    *,
    bytes_max: int = limits.BATCH_BYTES_TARGET,
    records_max: int = limits.BATCH_RECORDS_TARGET,
) -> tuple[Batch, int] | None:
    """The batch at the place ``at``, joined with the small ones after it, and the place after them.

    The first batch begins at ``offset``; no batch begins at ``end`` or later. All checksums are checked. None if
    there is no such batch.
    """
    found, following = _singles(data, at, offset, end, bytes_max, records_max)
    if found is not None:
        return found, following
    start, records = at, 0
    batches: list[Batch] = []
    while at < len(data) and offset < end:
        batch = parse(data, at)
        if batch is None or batch.base_offset != offset:
            break
        records += batch.count
        size = at - start + batch.stored_bytes
        if batches and (not is_small(batch) or records > records_max or size > bytes_max):
            break
        batches.append(batch)
        at += batch.stored_bytes
        offset = batch.end_offset
        if batch.flags & COMPRESSION:  # to unpack one takes as long as to join several
            records_max -= _FEW
        if not is_small(batches[0]):
            break
    return (merge(batches), at) if batches else None


def take_all(data: bytes, at: int, end: int) -> tuple[list[Batch], int]:
    """The batches from the place ``at`` on that begin before the offset ``end``, small ones joined, and the place
    after them: the end of the bytes, or a batch that begins later, is damaged or does not follow the one before it.
    """
    found: list[Batch] = []
    while at < len(data):
        offset = int.from_bytes(data[at + 16 : at + 24], "little")
        if offset >= end or (found and offset != found[-1].end_offset):
            break
        taken = take(data, at, offset, end)
        if taken is None:
            break
        batch, at = taken
        found.append(batch)
    return found, at


def _singles(
    data: bytes, at: int, offset: int, end: int, bytes_max: int, records_max: int
) -> tuple[Batch | None, int]:
    """A run of batches with one plain value each; None if they are too few.

    The tightest loop that checks everything: it makes no object for a batch.
    """
    unpack, crc = _SINGLE.unpack_from, crc32c
    values: list[bytes] = []
    times: list[int] = []
    first = offset
    stop = min(len(data), at + bytes_max) - _SINGLE.size
    most = min(end, offset + records_max)
    while at <= stop and offset < most:
        magic, header_crc, body_crc, size, base, shape, time, zero, length = unpack(data, at)
        body = at + HEADER_BYTES
        following = body + size
        if (
            magic != MAGIC
            or shape & _NOT_AFTER_SYNC != _PLAIN
            or base != offset
            or zero
            or length + 8 > size
            or size > limits.SMALL_BATCH_BYTES
            or crc(data[at + 8 : body]) != header_crc
            or crc(data[body:following]) != body_crc
        ):
            break
        values.append(data[body + 8 : body + 8 + length])
        times.append(time)
        offset += 1
        at = following
    if len(values) < _FEW:
        return None, at
    return _run(Columns(values), times, first), at
