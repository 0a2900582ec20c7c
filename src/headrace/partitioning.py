"""Which partition a record goes to: one policy for the broker, the embedded broker and the clients.

- A record with a key goes to ``crc32c(key) % partitions``, so the same key always goes to the same
  partition, whoever publishes it.
- Records without a key take the partitions in turn, a batch at a time: records that are stored together
  go to one partition, the next batch goes to the next partition. Whole batches cost less than a batch of
  one record in every partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c


def partition_of_key(key: bytes, partitions: int) -> int:
    return int(google_crc32c.value(key)) % partitions


class Partitioner:
    """Places the records of one topic. It remembers which partition is next."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = 0

    def current(self, partitions: int) -> int:
        """Where records without a key go until :meth:`next` is called."""
        return self._turn % partitions

    def next(self, partitions: int) -> int:
        """Move on to the next partition; a batch without keys goes there."""
        self._turn = (self._turn + 1) % partitions
        return self._turn


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
