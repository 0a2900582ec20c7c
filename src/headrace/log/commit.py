"""The arithmetic of group commit: waiting entries become batches with offsets and times, or get an error.

There are no files, no clock and no loop here. The disk log and the memory log both use it, so both treat a
repeated batch, a gap and a clock that runs backwards in the same way.

Entries with columns are gathered, in order, into batches of about ``BATCH_BYTES_TARGET``; a large entry is
cut into several batches. Whole batches, and those of idempotent producers, are not changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat

from headrace import limits
from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.batch import (
    AFTER_SYNC,
    COMPRESSION,
    HAS_TIMES,
    LOST,
    STAGED,
    Batch,
    crc32c,
    encode,
)
from headrace.log.columns import concat, pieces
from headrace.log.interface import Append
from headrace.log.producers import Producers


@dataclass(slots=True, eq=False)
class CommitGroup:
    """The batches of one commit. Entries that are refused or repeated already have their answer."""

    offset: int
    timestamp: int
    batches: list[Batch] = field(default_factory=list)
    entries: list[Append] = field(default_factory=list)

    def place(self, entries: Sequence[Append], batches: Sequence[Batch], now_ms: int) -> None:
        """Set the offsets and times of the entries. Their records fill the batches exactly."""
        offset = self.offset
        number = len(self.batches)
        for batch in batches:
            self._stamp(batch, now_ms)
        # Read it from the stored batch: a batch whose times had to change was replaced by a new one.
        timestamp = self.batches[number].base_timestamp
        for entry in entries:
            entry.first_offset = offset
            entry.timestamp = timestamp
            offset += entry.count
        assert offset == self.offset

    def keep(self, entry: Append, batch: Batch) -> None:
        """Place a batch of another log at its own offset, with its own times, producer and flags."""
        if batch.base_offset != self.offset:
            entry.error = InvalidArgument(
                f"a copied batch begins at offset {batch.base_offset}, and the log ends at {self.offset}",
                code="invalid_offset",
            )
            return
        batch.flags &= ~AFTER_SYNC
        entry.first_offset, entry.timestamp = batch.base_offset, batch.base_timestamp
        self.batches.append(batch)
        self.offset += batch.count
        self.timestamp = max(self.timestamp, batch.max_timestamp)

    def _stamp(self, batch: Batch, now_ms: int) -> None:
        now_ms = max(now_ms, self.timestamp)
        if batch.flags & (HAS_TIMES | STAGED) == HAS_TIMES:
            batch = clamp_times(batch, self.timestamp, now_ms)
        else:
            batch.base_timestamp = batch.max_timestamp = now_ms
        batch.base_offset = self.offset
        batch.flags &= ~AFTER_SYNC
        self.batches.append(batch)
        self.offset += batch.count
        self.timestamp = batch.max_timestamp


def clamp_times(batch: Batch, low: int, high: int) -> Batch:
    """Make the batch's column of times non-decreasing, and between ``low`` and ``high``.

    Times never run backwards in a partition, so a client whose clock is years ahead would otherwise move
    the times of all later records.
    """
    times = batch._longs(HAS_TIMES)
    within = times if max(times) <= high else list(map(min, times, repeat(high)))
    fixed = list(accumulate(within, max, initial=low))[1:]
    if fixed != times:
        start = batch.column(HAS_TIMES)
        plain = batch.plain()
        body = plain[:start] + array("q", fixed).tobytes() + plain[start + 8 * batch.count :]
        new = Batch(body, crc32c(body), batch.count, batch.flags & ~COMPRESSION)
        new.producer_id = batch.producer_id
        new.producer_epoch = batch.producer_epoch
        new.first_sequence = batch.first_sequence
        batch = new
    batch.base_timestamp = fixed[0]
    batch.max_timestamp = fixed[-1]
    return batch


def gather(
    entries: Sequence[Append],
    *,
    end_offset: int,
    last_timestamp: int,
    now_ms: int,
    producers: Producers,
) -> tuple[CommitGroup, list[Append]]:
    """One group of the entries, in order, and the entries that must wait for the next group."""
    group = CommitGroup(end_offset, last_timestamp)
    run = _Run(group, now_ms)
    new: dict[int, list[Append]] = {}
    size = 0
    left: list[Append] = []
    for number, entry in enumerate(entries):
        if size and size + entry.bytes > limits.COMMIT_BYTES_MAX:
            left = list(entries[number:])
            break
        size += entry.bytes
        group.entries.append(entry)
        if entry.batch is None and not entry.producer_id and entry.columns.times is None:  # type: ignore[union-attr]
            run.add(entry)
            continue
        run.close()
        if entry.copied:
            assert entry.batch is not None
            group.keep(entry, entry.batch)
            continue
        if entry.producer_id and not _is_new(entry, new, producers):
            continue
        if entry.refusal is not None:
            entry.error = entry.refusal
            continue
        try:
            batch = entry.batch or encode(entry.columns)  # type: ignore[arg-type]
        except HeadraceError as error:
            entry.error = error
            continue
        if not entry.hidden:  # only a commit may store a batch whose records were lost
            batch.flags &= ~LOST
        if entry.staged:
            batch.flags |= STAGED
        batch.producer_id = entry.producer_id
        batch.producer_epoch = entry.producer_epoch
        batch.first_sequence = entry.first_sequence
        if entry.producer_id:
            new.setdefault(entry.producer_id, []).append(entry)
        group.place([entry], [batch], now_ms)
    run.close()
    return group, left


@dataclass(slots=True, eq=False)
class _Run:
    """Entries that are gathered into one batch."""

    _group: CommitGroup
    _now_ms: int
    _entries: list[Append] = field(default_factory=list)
    _bytes: int = 0
    _records: int = 0

    def add(self, entry: Append) -> None:
        if self._entries and (
            self._bytes + entry.bytes > limits.BATCH_BYTES_TARGET
            or self._records + entry.count > limits.BATCH_RECORDS_TARGET
        ):
            self.close()
        self._entries.append(entry)
        self._bytes += entry.bytes
        self._records += entry.count

    def close(self) -> None:
        entries, self._entries = self._entries, []
        self._bytes = self._records = 0
        if not entries:
            return
        try:
            columns = concat([e.columns for e in entries if e.columns is not None])
            batches = list(map(encode, pieces(columns)))
        except HeadraceError as error:
            for entry in entries:
                entry.error = error
            return
        self._group.place(entries, batches, self._now_ms)


def _is_new(entry: Append, new: dict[int, list[Append]], producers: Producers) -> bool:
    """Whether to store an idempotent entry; if not, its answer is set.

    ``new`` holds the entries that this group stores; they are added to the table when they are durable.
    """
    epoch = entry.producer_epoch
    earlier = new.get(entry.producer_id, [])
    newest = earlier[-1].producer_epoch if earlier else -1
    if newest > epoch:
        entry.error = producers.fenced(entry.producer_id, epoch, newest)
        return False
    if newest == epoch:
        last = earlier[-1]
        if entry.first_sequence == (last.first_sequence + last.count) & 0xFFFF_FFFF:
            return True
        for twin in earlier:
            same = (twin.producer_epoch, twin.first_sequence, twin.count)
            if same == (epoch, entry.first_sequence, entry.count):
                entry.first_offset, entry.duplicate = twin.first_offset, True
                entry.timestamp = twin.timestamp
                return False
    verdict = producers.judge(entry.producer_id, epoch, entry.first_sequence, entry.count)
    if isinstance(verdict, HeadraceError):
        entry.error = verdict
    elif verdict is not None:
        entry.first_offset, entry.duplicate = verdict, True
    elif newest == epoch:
        # In order according to the table, but this group already stores later records: a reused sequence.
        entry.error = producers.gap(entry.producer_id, entry.first_sequence)
    else:
        return True
    return False
