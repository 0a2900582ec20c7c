"""The broker's own state in Kafka: a journal as on disk (``log/journal.py``), under the rule.

A write is a stretch with framed entries; a rewriting is a checkpoint with all of them, after which everything before it is
deleted. Each slot has one: positions, attempts, and in slot 0 commits of staged batches.

It blocks, as the one on disk does; the caller runs it in a worker. If Kafka does not answer, ``append`` and ``rewrite``
raise ``TimeoutError`` (an ``OSError``): the record may still arrive. That does no harm, because the state journal
writes everything again after an ``OSError``, and what comes later counts. If another node has taken over, they raise
``SyncFailed``: the slot is lost.
"""

from __future__ import annotations

import threading

from headrace import limits
from headrace.engine.kafka.link import RECORD_BYTES_MAX, KafkaLink, Timeout
from headrace.engine.kafka.replica import Replica
from headrace.engine.kafka.rule import Checkpoint, Claim, Stretch
from headrace.log.journal import entries_in, frame
from headrace.log.workers import SyncFailed

PART_BYTES = RECORD_BYTES_MAX // 8


def open_together(link: KafkaLink, journals: list[KafkaJournal]) -> list[list[bytes]]:
    """Read and claim them all at once; what each of them holds. Blocks."""
    link.open([journal.replica for journal in journals], link.journals)
    return [journal.opened() or [] for journal in journals]


class KafkaJournal:
    """See :class:`headrace.log.interface.StateLog`."""

    def __init__(self, link: KafkaLink, topic: str, number: int = 0):
        self._link = link
        self.topic = topic
        self.replica = Replica(link, topic, number, self)
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._lost: str | None = None
        self._entries: list[bytes] | None = []
        """What was read, until it is opened."""
        self._is_empty = True
        self.damaged = 0
        self.size = self.snapshot_bytes = 0
        self._first_part = 0

    # --- what the replica tells -----------------------------------------------------------------
    def stretched(self, at: int, entry: Stretch, value: bytes, *, ours: bool) -> None:
        self._is_empty = False
        self.size += len(value)
        if self._entries is not None:
            self._entries += self._parsed(value)
        self._notify()

    def checkpointed(self, at: int, entry: Checkpoint, parts: list[bytes], *, ours: bool) -> None:
        self._is_empty = False
        self.size = self.snapshot_bytes = sum(map(len, parts))
        if self._entries is not None:
            self._entries = self._parsed(b"".join(parts))
        self._first_part = at
        self._notify()

    def part_stored(self) -> None:
        self._notify()

    def claimed(self, claim: Claim, *, ours: bool) -> None:
        pass

    def lost(self, claim: Claim) -> None:
        self._lost = claim.node.partition("/")[0]
        self._notify()

    def unknown(self) -> None:
        pass

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _parsed(self, value: bytes) -> list[bytes]:
        found, damaged, end = entries_in(value)
        self.damaged += damaged + (end != len(value))
        return found

    # --- blocking -----------------------------------------------------------------------------
    def open(self) -> list[bytes] | None:
        """All entries, oldest first; None if nothing was ever written."""
        self._link.open([self.replica], self._link.journals)
        return self.opened()

    def opened(self) -> list[bytes] | None:
        """What was read."""
        entries, self._entries = self._entries, None
        return None if self._is_empty else entries

    def append(self, payloads: list[bytes]) -> None:
        frames = [frame(payload) for payload in payloads]
        with self._writing:
            self._wait()
            low = 0
            while low < len(frames):
                high, size = low, 0
                while high < len(frames) and (high == low or size + len(frames[high]) < PART_BYTES):
                    size += len(frames[high])
                    high += 1
                self.replica.stretch(high - low, b"".join(frames[low:high]))
                self._wait()
                low = high

    def rewrite(self, payloads: list[bytes]) -> None:
        content = b"".join(map(frame, payloads))
        parts = [content[low : low + PART_BYTES] for low in range(0, len(content), PART_BYTES)]
        parts = parts or [b""]
        with self._writing:
            self._wait()
            for number, part in enumerate(parts, 1):
                self.replica.checkpoint(number, len(parts), part)
                self._wait()
        self._link.delete_before(self.replica, self._first_part)

    def _wait(self) -> None:
        """Until nothing is under way."""
        seat = self.replica.seat
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: seat.under_way is None or self._lost is not None, self._link.timeout
            )
        if self._lost is not None:
            raise SyncFailed(f"node {self._lost} has taken over {self.topic} in Kafka")
        if not is_done:
            raise Timeout(f"Kafka has not answered for {self._link.timeout:g} seconds")

    @property
    def wants_rewrite(self) -> bool:
        return self.size > max(4 * self.snapshot_bytes, limits.JOURNAL_REWRITE_BYTES_MIN)

    def close(self) -> None:
        self._link.journals.leave(self.replica)
