"""The sparse index of a segment: where to begin reading for an offset or a time.

There is at most one entry per ``INDEX_INTERVAL_BYTES`` of log: the batch that begins there. The index is
in memory while a segment grows, and is written to a file (``.idx``) when the segment is closed. It is only a
hint: the segment can be read without it. If the file is missing, fails its checksum or has another
``log_bytes``, the index is rebuilt from the log.

File, little-endian::

     0 u32 magic "HRI1"      4 u32 crc32c of bytes 8..end
     8 u64 log_bytes        16 u64 end_offset      24 i64 max_timestamp
    32 u32 batches          36 u32 entries
    40 offsets u64[entries], positions u64[entries], times i64[entries] (base timestamps)
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from headrace import limits
from headrace.log.batch import Batch, crc32c

MAGIC = 0x31495248  # "HRI1"
_HEAD = struct.Struct("<IIQQqII")


@dataclass(slots=True, eq=False)
class Index:
    end_offset: int
    """Of the records in the index; the segment's first offset while it has none."""
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    positions: array[int] = field(default_factory=lambda: array("Q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    log_bytes: int = 0
    max_timestamp: int = 0
    batches: int = 0

    def add(self, batch: Batch, position: int, size: int) -> None:
        """Add the batch at ``position``; ``size`` is its length in bytes, with its header."""
        if not self.positions or position - self.positions[-1] >= limits.INDEX_INTERVAL_BYTES:
            self.offsets.append(batch.base_offset)
            self.positions.append(position)
            self.times.append(batch.base_timestamp)
        self.log_bytes = position + size
        self.end_offset = batch.base_offset + batch.count
        self.max_timestamp = max(self.max_timestamp, batch.max_timestamp)
        self.batches += 1

    def position_of(self, offset: int) -> int:
        """A position at or before the batch that holds the offset."""
        at = bisect_right(self.offsets, offset) - 1
        return self.positions[at] if at >= 0 else 0

    def offset_of_time(self, timestamp_ms: int) -> int:
        """The base offset of a batch at or before the first one that reaches the time."""
        at = bisect_left(self.times, timestamp_ms) - 1
        return self.offsets[max(at, 0)]

    # --- file -------------------------------------------------------------------------------
    def dump(self) -> bytes:
        rest = b"".join(
            (
                struct.pack(
                    "<QQqII",
                    self.log_bytes,
                    self.end_offset,
                    self.max_timestamp,
                    self.batches,
                    len(self.offsets),
                ),
                self.offsets.tobytes(),
                self.positions.tobytes(),
                self.times.tobytes(),
            )
        )
        return struct.pack("<II", MAGIC, crc32c(rest)) + rest

    @classmethod
    def load(cls, raw: bytes, base_offset: int, log_bytes: int) -> Index | None:
        """The index, or None if it is invalid or belongs to a log of another size."""
        if len(raw) < _HEAD.size:
            return None
        magic, crc, size, end_offset, max_timestamp, batches, entries = _HEAD.unpack_from(raw)
        if magic != MAGIC or size != log_bytes or len(raw) != _HEAD.size + 24 * entries:
            return None
        if crc32c(raw[8:]) != crc:
            return None
        index = cls(base_offset)
        index.log_bytes, index.end_offset = size, end_offset
        index.max_timestamp, index.batches = max_timestamp, batches
        at = _HEAD.size
        for column in (index.offsets, index.positions, index.times):
            column.frombytes(raw[at : at + 8 * entries])
            at += 8 * entries
        return index
