"""The idempotent producers that a partition remembers.

A producer numbers its records in each partition: 0, 1, 2… A batch has the number of its first
record. The broker remembers the last few batches of each producer. If a batch is sent again (because
the answer was lost), it is answered with its first offset and stored once. A number that is too high is a
gap: records in between never arrived. The batch is refused, because to store it would make the loss
permanent.

The table is rebuilt from batch headers when a partition is opened; with a snapshot for each segment, older
segments need not be read. The table is bounded: producers used longest ago are forgotten first.

A batch that was made of several has their *origins*: rows of ``u64 producer_id, u32 epoch, u32 first_sequence, u32
count, u32 index`` of its first record in the batch, in the order of the table that they alone make. There are at most
as many for a producer as the table remembers, so to add them gives the table that the single batches would give.

Snapshot: ``u32 magic "HRP1", u32 crc32c of the rest, u32 rows``, then rows of
``u64 producer_id, u32 epoch, u32 first_sequence, u32 count, u64 base_offset``, oldest use first.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from headrace import limits
from headrace.errors import DataCorrupt, HeadraceError, ProducerFenced, SequenceGap
from headrace.log.batch import Batch, crc32c

MAGIC = 0x31505248  # "HRP1"
_HEAD = struct.Struct("<III")
_ROW = struct.Struct("<QIIIQ")
_ORIGIN = struct.Struct("<QIIII")
_WRAP = 0xFFFF_FFFF


@dataclass(slots=True, eq=False)
class KnownProducer:
    epoch: int
    batches: list[tuple[int, int, int]]
    """(first sequence, count, base offset), oldest first."""

    def next_sequence(self) -> int:
        first, count, _ = self.batches[-1]
        return (first + count) & _WRAP


class Producers:
    """producer id -> its newest batches in this partition, least recently used first."""

    def __init__(self) -> None:
        self._table: OrderedDict[int, KnownProducer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def judge(
        self, producer_id: int, epoch: int, first_sequence: int, count: int
    ) -> int | HeadraceError | None:
        """The first offset of a repetition, an error, or None if the batch is new and in order."""
        known = self._table.get(producer_id)
        if known is None or epoch > known.epoch:
            if first_sequence != 0:
                return SequenceGap(
                    f"producer {producer_id} begins with sequence {first_sequence} here, not 0; "
                    "an earlier batch never arrived, or the producer was idle for too long"
                )
            return None
        if epoch < known.epoch:
            return self.fenced(producer_id, epoch, known.epoch)
        if first_sequence == known.next_sequence():
            return None
        for first, stored, offset in known.batches:
            if first == first_sequence and stored == count:
                return offset
        return SequenceGap(
            f"producer {producer_id} sent sequence {first_sequence} ({count} records) where "
            f"{known.next_sequence()} was due, and it is no repetition of its last "
            f"{len(known.batches)} batches"
        )

    @staticmethod
    def fenced(producer_id: int, epoch: int, newest: int) -> ProducerFenced:
        return ProducerFenced(
            f"producer {producer_id} has been taken over by epoch {newest}; "
            f"epoch {epoch} can publish no more"
        )

    @staticmethod
    def gap(producer_id: int, first_sequence: int) -> SequenceGap:
        return SequenceGap(
            f"producer {producer_id} sent sequence {first_sequence} again with other records"
        )

    def add(self, producer_id: int, epoch: int, first_sequence: int, count: int, base: int) -> None:
        known = self._table.get(producer_id)
        if known is None or known.epoch != epoch:
            self._table[producer_id] = KnownProducer(epoch, [(first_sequence, count, base)])
        else:
            known.batches.append((first_sequence, count, base))
            del known.batches[: -limits.PRODUCER_BATCHES_KEPT]
        self._table.move_to_end(producer_id)
        while len(self._table) > limits.PRODUCERS_PER_PARTITION_MAX:
            self._table.popitem(last=False)

    def add_batch(self, batch: Batch) -> None:
        for producer_id, epoch, first, count, index in _ORIGIN.iter_unpack(batch.origins):
            self.add(producer_id, epoch, first, count, batch.base_offset + index)
        if batch.producer_id:
            self.add(
                batch.producer_id,
                batch.producer_epoch,
                batch.first_sequence,
                batch.count,
                batch.base_offset,
            )

    def last(self, producer_id: int) -> tuple[int, int] | None:
        known = self._table.get(producer_id)
        if known is None:
            return None
        _, count, offset = known.batches[-1]
        return offset, count

    def next_sequence(self, producer_id: int, epoch: int | None = None) -> int:
        known = self._table.get(producer_id)
        if known is None or epoch not in (None, known.epoch):
            return 0
        return known.next_sequence()

    def origins(self, base_offset: int) -> bytes:
        """All batches of the table, as the origins of a batch that begins at the offset."""
        return b"".join(
            _ORIGIN.pack(producer_id, known.epoch, first, count, offset - base_offset)
            for producer_id, known in self._table.items()
            for first, count, offset in known.batches
        )

    # --- snapshot ---------------------------------------------------------------------------
    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The arguments of ``add`` that make the same table."""
        for producer_id, known in self._table.items():
            for first, count, offset in known.batches:
                yield producer_id, known.epoch, first, count, offset

    def dump(self) -> bytes:
        rows = [_ROW.pack(*row) for row in self.rows()]
        rest = struct.pack("<I", len(rows)) + b"".join(rows)
        return struct.pack("<II", MAGIC, crc32c(rest)) + rest

    @classmethod
    def load(cls, raw: bytes) -> Producers | None:
        """The table, or None if the snapshot is invalid."""
        if len(raw) < _HEAD.size:
            return None
        magic, crc, rows = _HEAD.unpack_from(raw)
        if magic != MAGIC or crc32c(raw[8:]) != crc or len(raw) != _HEAD.size + rows * _ROW.size:
            return None
        table = cls()
        for producer_id, epoch, first, count, offset in _ROW.iter_unpack(raw[_HEAD.size :]):
            table.add(producer_id, epoch, first, count, offset)
        return table


def check_origins(batch: Batch) -> None:
    """:class:`DataCorrupt` if the origins of a batch cannot be those of its records."""
    for producer_id, _, _, count, index in _ORIGIN.iter_unpack(batch.origins):
        if not producer_id or not count or index + count > batch.count:
            raise DataCorrupt("the origins of the batch are not those of its records")
