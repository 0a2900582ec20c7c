"""Counts and checksums of the messages of a partition, the same however they are batched.

Every column is a stream of bytes with a checksum of its own, and so are the lengths of its items: logs join small batches,
and the streams stay the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

import google_crc32c

from headrace.log.batch import LOST, Batch
from headrace.log.columns import NO_ID


class MessageDigest:
    """What is known of some messages, in order. Two are equal if the messages are."""

    def __init__(self) -> None:
        self.records = 0
        self.lost = 0
        """Of these, the destroyed ones."""
        self._sums: dict[str, int] = {}

    def add(self, batch: Batch, low: int = 0) -> None:
        """The batch's records from index ``low`` on."""
        count = batch.count - low
        self.records += count
        if batch.flags & LOST:
            self.lost += count
            return
        high = batch.count
        self._binary("values", batch.values(low, high))
        self._binary("keys", batch.keys(low, high) or list(repeat(None, count)))
        self._binary("headers", _flat(batch.headers(low, high), count))
        self._longs("times", batch.times(low, high) or list(repeat(batch.base_timestamp, count)))
        self._binary("ids", batch.ids(low, high) or list(repeat(NO_ID, count)))
        self._longs("expiry", batch.expiry(low, high) or list(repeat(0, count)))
        self._binary("targets", batch.targets(low, high) or list(repeat(b"", count)))

    def _binary(self, column: str, items: Sequence[bytes | None]) -> None:
        self._longs(f"{column} lengths", [-1 if item is None else len(item) for item in items])
        self._extend(column, b"".join([item or b"" for item in items]))

    def _longs(self, column: str, numbers: Sequence[int]) -> None:
        self._extend(column, array("q", numbers).tobytes())

    def _extend(self, column: str, data: bytes) -> None:
        self._sums[column] = google_crc32c.extend(self._sums.get(column, 0), data)

    @property
    def checksum(self) -> int:
        """Of all columns."""
        return int(google_crc32c.value(array("Q", self._sums.values()).tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageDigest):
            return NotImplemented
        return (self.records, self.lost, self._sums) == (other.records, other.lost, other._sums)

    __hash__ = None  # type: ignore[assignment]


def _flat(headers: Sequence[object] | None, count: int) -> list[bytes]:
    if headers is None:
        return [b""] * count
    found = []
    for each in headers:
        items = each.items() if isinstance(each, dict) else ()
        found.append(b"".join([f"{name}\0{text}\n".encode() for name, text in items]))
    return found
