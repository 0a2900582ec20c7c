"""The progress of one subscription in one partition: a position, and the done offsets beyond it.

``position`` is the first offset that is not done. Beyond it, done offsets are kept as bits in chunks
of 4096, so that a million messages acknowledged in any order cost 125 KB, an ack costs the same at
any depth, and the position moves over a full chunk in one step. ``next`` is the first offset not yet
read; the messages between the two are delivered to members, waiting for a retry, or done.

For the journal the cursor remembers the changes since it was last written: runs of newly done offsets,
and attempts. It remembers none while the next write is a whole snapshot. Replaying changes on an older
state gives the newer one, even where they overlap: writing something twice does no harm.

How far first deliveries may go, and what may have been delivered when a broker was killed, is in
``attempts.py``; the numbers are here, because the journal keeps them by cursor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.broker.topic import Partition

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
_LOW = CHUNK - 1
_FULL = (1 << CHUNK) - 1
_DELTA = struct.Struct("<IBQII")
_NUMBER = struct.Struct("<I")
RUNS_KEPT_MAX = 100_000
DOUBTS_KEPT_MAX = 16
UNLIMITED = 1 << 63
"""An offset that no log reaches."""


class Cursor:
    __slots__ = (
        "_chunks",
        "_fresh_attempts",
        "_fresh_runs",
        "_rewrite",
        "ahead",
        "allowed",
        "attempts",
        "blocked",
        "doubts",
        "high",
        "next",
        "number",
        "parked",
        "partition",
        "position",
        "reserve_at",
        "reserved",
        "reserved_at",
        "waiting",
    )

    def __init__(self, number: int, partition: Partition, position: int):
        self.number = number
        self.partition = partition
        self.position = position
        self.next = position
        self.high = position
        """The offset after the highest done one: nothing at or above it is done."""
        self.attempts: dict[int, int] = {}
        """Offset that is not done -> failed deliveries so far. It includes a retry that is out, or about
        to be (``Attempts``)."""
        self.blocked: str | None = None
        """Why nothing more is read here, or None."""
        self.parked = 0
        self.doubts: list[list[int]] = []
        """``[offset, count]``, in order: what is before the offset, not done and has no attempts of its own
        may have been delivered so often by brokers that were killed."""
        self.reserved = 0
        """The journal has, or is about to have, that first deliveries may go up to here."""
        self.allowed = 0
        """The journal has it."""
        self.reserve_at = 0
        """Beyond this offset more is to be reserved."""
        self.ahead = 0
        self.reserved_at = -1.0
        self.waiting = False
        """The next first delivery waits for the journal."""
        self._chunks: dict[int, int] = {}
        self._fresh_runs: list[list[int]] = []
        self._fresh_attempts: dict[int, int] = {}
        self._rewrite = True

    # --- doing ------------------------------------------------------------------------------
    def is_done(self, offset: int) -> bool:
        if offset < self.position:
            return True
        chunk = self._chunks.get(offset >> CHUNK_BITS)
        return chunk is not None and bool(chunk >> (offset & _LOW) & 1)

    def done(self, offset: int) -> bool:
        """Mark one offset done. False: it was already."""
        if offset < self.position:
            return False
        if offset == self.position and not self._chunks:
            self.position = offset + 1
            if self.high < self.position:
                self.high = self.position
        else:
            number = offset >> CHUNK_BITS
            chunk = self._chunks.get(number, 0)
            bit = 1 << (offset & _LOW)
            if chunk & bit:
                return False
            self._chunks[number] = chunk | bit
            if offset >= self.high:
                self.high = offset + 1
            if offset == self.position:
                self._advance()
        if not self._rewrite:
            runs = self._fresh_runs
            if runs and runs[-1][1] == offset:
                runs[-1][1] = offset + 1
            elif len(runs) < RUNS_KEPT_MAX:
                runs.append([offset, offset + 1])
            else:
                self.rewrite()
        if self.attempts:
            self.attempts.pop(offset, None)
        return True

    def forget_attempts(self, end: int) -> None:
        """Nothing at or after ``end`` has failed: those records are gone."""
        if any(offset >= end for offset in self.attempts):
            self.attempts = {o: n for o, n in self.attempts.items() if o < end}

    def done_run(self, start: int, stop: int) -> None:
        """Mark all offsets in ``start:stop`` done."""
        start = max(start, self.position)
        if start >= stop:
            return
        if start == self.position and not self._chunks:
            self.position = stop
            self.high = max(self.high, stop)
        else:
            self._set_bits(start, stop)
            self.high = max(self.high, stop)
            if start == self.position:
                self._advance()
        if not self._rewrite:
            if len(self._fresh_runs) < RUNS_KEPT_MAX:
                self._fresh_runs.append([start, stop])
            else:
                self.rewrite()
        if self.attempts:
            for offset in [o for o in self.attempts if start <= o < stop]:
                del self.attempts[offset]

    def _set_bits(self, start: int, stop: int) -> None:
        while start < stop:
            number = start >> CHUNK_BITS
            end = min(stop, (number + 1) << CHUNK_BITS)
            bits = ((1 << (end - start)) - 1) << (start & _LOW)
            self._chunks[number] = self._chunks.get(number, 0) | bits
            start = end

    def _advance(self) -> None:
        """Move the position over everything that is done."""
        while True:
            number = self.position >> CHUNK_BITS
            chunk = self._chunks.get(number)
            if chunk is None:
                break
            open_bits = ~chunk & _FULL & -(1 << (self.position & _LOW))
            if open_bits:
                low = (open_bits & -open_bits).bit_length() - 1
                self.position = (number << CHUNK_BITS) + low
                if self.position >= self.high:
                    del self._chunks[number]
                break
            del self._chunks[number]
            self.position = (number + 1) << CHUNK_BITS
        # A chunk below the position is no longer needed.
        if self.position >= self.high and self._chunks:
            self._chunks.clear()

    def failed(self, offset: int, attempt: int) -> None:
        """Remember that delivery number ``attempt`` of the offset failed."""
        self.attempts[offset] = attempt
        if not self._rewrite:
            self._fresh_attempts[offset] = attempt

    def failures(self, offset: int) -> int:
        """How often it was delivered without success, or may have been."""
        count = self.attempts.get(offset, 0)
        if not count:
            for before, doubted in self.doubts:
                if offset < before:
                    return doubted
        return count

    def recall(self, reserved: int, doubts: list[list[int]], *, clean: bool, limit: int) -> None:
        """After a start: what the journal knows about deliveries, and whether the last broker was killed.

        Records that do not exist, or were lost, have not been delivered: others will have their offsets.
        """
        end = self.partition.log.end_offset
        reserved = min(reserved, end)
        self.doubts = []
        for before, count in doubts:
            if min(before, end) > (self.doubts[-1][0] if self.doubts else self.position):
                self.doubts.append([min(before, end), count])
        if clean or not limit or reserved <= self.position:
            return
        most = max(limit - 1, 1)
        counted: list[list[int]] = []
        after = self.position
        for before, count in self.doubts:
            if after < reserved:
                counted.append([min(before, reserved), max(min(count + 1, most), count)])
            if before > reserved:
                counted.append([before, count])
            after = before
        if after < reserved:
            counted.append([reserved, 1])
        # Equal counts are one; of too many, the oldest join the next, which have lower counts.
        merged: list[list[int]] = []
        for before, count in counted:
            if merged and merged[-1][1] == count:
                merged[-1][0] = before
            else:
                merged.append([before, count])
        while len(merged) > DOUBTS_KEPT_MAX:
            merged[1][1] = merged[0][1]
            del merged[0]
        self.doubts = merged
        self.rewrite()

    def seek(self, offset: int) -> bool:
        """Begin again at the offset: everything from there on is to be delivered.

        True: doubts were dropped, which the journal has to know.
        """
        doubted, self.doubts = bool(self.doubts), []
        self.position = self.next = self.high = offset
        self._chunks.clear()
        self.attempts.clear()
        self.blocked = None
        self.parked = 0
        self.rewrite()
        return doubted

    # --- asking -----------------------------------------------------------------------------
    def undone(self, stop: int, start: int = 0) -> Iterator[int]:
        """Offsets from the position, or from ``start`` on, up to ``stop`` that are not done, in order."""
        offset = max(self.position, start)
        while offset < stop:
            chunk = self._chunks.get(offset >> CHUNK_BITS)
            end = min(stop, (offset | _LOW) + 1)
            if chunk is None:
                yield from range(offset, end)
            else:
                for at in range(offset, end):
                    if not chunk >> (at & _LOW) & 1:
                        yield at
            offset = end

    def _beyond(self) -> Iterator[tuple[int, int]]:
        """The first offset of each chunk, and its bits at or above the position."""
        for number, chunk in self._chunks.items():
            if number == self.position >> CHUNK_BITS:
                chunk &= -(1 << (self.position & _LOW))
            yield number << CHUNK_BITS, chunk

    def done_count(self, stop: int | None = None) -> int:
        """Done offsets at or above the position, up to ``stop`` if it is given."""
        count = 0
        for base, chunk in self._beyond():
            if stop is not None and base + CHUNK > stop:
                chunk &= (1 << max(stop - base, 0)) - 1
            count += chunk.bit_count()
        return count

    def undone_count(self, stop: int) -> int:
        """Offsets from the position up to ``stop`` that are not done."""
        return max(stop - self.position - self.done_count(stop), 0)

    def lag(self) -> int:
        """Messages that are not done, up to the partition's end."""
        end = self.partition.log.end_offset
        if not self._chunks:  # as most have none
            return max(end - self.position, 0)
        return self.undone_count(end)

    def runs(self) -> list[list[int]]:
        """Done offsets beyond the position as ``[start, stop]``, in order."""
        found: list[list[int]] = []
        for start, bits in sorted(self._beyond()):
            while bits:
                gap = (bits & -bits).bit_length() - 1
                start, bits = start + gap, bits >> gap
                length = (~bits & (bits + 1)).bit_length() - 1
                if found and found[-1][1] == start:
                    found[-1][1] += length
                else:
                    found.append([start, start + length])
                start, bits = start + length, bits >> length
        return found

    # --- the journal ------------------------------------------------------------------------
    @property
    def dirty(self) -> bool:
        return self._rewrite or bool(self._fresh_runs) or bool(self._fresh_attempts)

    def rewrite(self) -> None:
        """Write a whole snapshot next time, not only the changes."""
        self._rewrite = True
        self._fresh_runs.clear()
        self._fresh_attempts.clear()

    def take_delta(self) -> bytes:
        """The changes since the last call, for the journal."""
        if self._rewrite:
            payload = self.snapshot()
        else:
            runs = [run for run in self._fresh_runs if run[1] > self.position]
            payload = self._pack(0, runs, self._fresh_attempts)
        self._rewrite = False
        self._fresh_runs, self._fresh_attempts = [], {}
        return payload

    def snapshot(self) -> bytes:
        if (
            not self._chunks and not self.attempts
        ):  # as most are, and there may be a hundred thousand
            return b"C" + _DELTA.pack(self.number, 1, self.position, 0, 0)
        return self._pack(1, self.runs(), self.attempts)

    def _pack(self, reset: int, runs: list[list[int]], attempts: dict[int, int]) -> bytes:
        parts = [
            b"C",
            _DELTA.pack(self.number, reset, self.position, len(runs), len(attempts)),
            struct.pack(f"<{2 * len(runs)}Q", *(edge for run in runs for edge in run)),
            struct.pack(f"<{len(attempts)}Q", *attempts.keys()),
            struct.pack(f"<{len(attempts)}I", *attempts.values()),
        ]
        return b"".join(parts)

    def apply(self, payload: bytes) -> None:
        """Replay a journal entry that was made by this cursor."""
        _, reset, position, runs, attempts = _DELTA.unpack_from(payload, 1)
        if reset:
            self.seek(position)
        elif position > self.position:
            self._chunks = {
                number: chunk
                for number, chunk in self._chunks.items()
                if number >= position >> CHUNK_BITS
            }
            self.position = position
            self.high = max(self.high, position)
            self._advance()
        at = 1 + _DELTA.size
        edges = struct.unpack_from(f"<{2 * runs}Q", payload, at)
        at += 16 * runs
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            self.done_run(start, stop)
        offsets = struct.unpack_from(f"<{attempts}Q", payload, at)
        counts = struct.unpack_from(f"<{attempts}I", payload, at + 8 * attempts)
        for offset, count in zip(offsets, counts, strict=True):
            if not self.is_done(offset):
                self.attempts[offset] = count
        if self.attempts:
            self.attempts = {o: n for o, n in self.attempts.items() if o >= self.position}
        self.next = self.position
        self._fresh_runs.clear()
        self._fresh_attempts.clear()
        self._rewrite = False

    @staticmethod
    def renumbered(payload: bytes, number: int) -> bytes:
        """The same entry, of a cursor with another number."""
        return payload[:1] + _NUMBER.pack(number) + payload[1 + _NUMBER.size :]

    @staticmethod
    def number_of(payload: bytes) -> int:
        number: int = _DELTA.unpack_from(payload, 1)[0]
        return number
