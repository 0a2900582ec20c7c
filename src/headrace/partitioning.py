"""Which partition a record goes to: one policy for the broker, the embedded broker and the clients.

- A record with a key goes to ``crc32c(key) % partitions``, so the same key always goes to the same
  partition, whoever publishes it.
- Records without a key take the partitions in turn, a batch at a time: records that are stored together
  go to one partition, the next batch goes to the next partition. Whole batches cost less than a batch of
  one record in every partition. A partition that got far more bytes than the others is passed over, so
  large and small batches are balanced by bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c

from headrace import limits

AHEAD_BYTES = 64 << 10
"""A partition is passed over if it is this much ahead of the average: small batches simply take turns."""


def partition_of_key(key: bytes, partitions: int) -> int:
    return int(google_crc32c.value(key)) % partitions


class Partitioner:
    """Places the records of one topic. It remembers which partition is next, and what each got."""

    __slots__ = ("_bytes", "_gathered", "_total", "_turn")

    def __init__(self, first: int = 0) -> None:
        self._turn = first
        self._bytes: list[int] = []
        self._total = 0
        self._gathered = 0
        """Bytes since the turn came to the current partition."""

    def current(self, partitions: int) -> int:
        """Where records without a key go until :meth:`next` is called."""
        return self._turn % partitions

    def next(self, partitions: int) -> int:
        """Move on to the next partition that is not ahead of the others; a batch without keys goes there."""
        turn, sizes = (self._turn + 1) % partitions, self._sizes(partitions)
        while (sizes[turn] - AHEAD_BYTES) * partitions > self._total:
            turn = (turn + 1) % partitions
        self._turn, self._gathered = turn, 0
        return turn

    def add(self, partitions: int, size: int) -> None:
        """Bytes went to the current partition. If they are enough for a batch, the next has its turn."""
        self._sizes(partitions)[self._turn % partitions] += size
        self._total += size
        self._gathered += size
        if self._gathered >= limits.BATCH_BYTES_TARGET:
            self.next(partitions)

    def take(self, partitions: int, size: int) -> int:
        """The partition of a batch of this size without keys."""
        turn = self.next(partitions)
        self._bytes[turn] += size
        self._total += size
        return turn

    def _sizes(self, partitions: int) -> list[int]:
        if len(self._bytes) != partitions:  # a new partition need not make up for its past
            self._bytes = [0] * partitions
            self._total = 0
        return self._bytes


def spread(
    keys: Sequence[bytes | None], partitions: int, keyless: int
) -> list[tuple[int, list[int]]]:
    """(partition, indexes of its records) in the order of the partitions.

    Records without a key go to the partition ``keyless``.
    """
    first = keys[0]
    if keys.count(first) == len(keys):  # as over HTTP, where a request has one key
        number = keyless if first is None else partition_of_key(first, partitions)
        return [(number, list(range(len(keys))))]
    places: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        number = keyless if key is None else partition_of_key(key, partitions)
        places.setdefault(number, []).append(index)
    return sorted(places.items())
