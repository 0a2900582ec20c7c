"""What all nodes of a cluster agree on: topics, subscriptions, named producers. Any node may change it.

It is one partition under the rule (``rule.py``). Every node follows it and applies its entries in order, so all come to the same
state. A node that wants to change something claims the partition first. When it has read its claim back, it has
read all that others wrote before, so it can decide: does this topic exist already? Then it writes, and reads that back. If
another node claimed in between, the write is void, and the node claims and decides again.

    claim 1 A   [topic orders]   claim 2 B   [topic orders]: B finds it, writes nothing   claim 3 A   [subscription email]

So there is no leader to wait for, and nothing to forward. Changes are rare; two nodes that change things at the same time take
turns, with pauses of random length.

A checkpoint replaces all entries when they have become many. Everything runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from headrace import limits
from headrace.engine.kafka.journal import PART_BYTES
from headrace.engine.kafka.link import KafkaLink
from headrace.engine.kafka.replica import Replica
from headrace.engine.kafka.rule import Checkpoint, Claim, Stretch
from headrace.errors import OutcomeUnknown, StorageFailed
from headrace.log.journal import entries_in, frame

logger = logging.getLogger("headrace.kafka")
PAUSE_S = 0.02
"""After another node's claim; twice as long each time, up to a second."""


class Definitions:
    def __init__(
        self,
        link: KafkaLink,
        topic: str,
        apply: Callable[[bytes], object],
        snapshot: Callable[[], list[bytes]],
    ):
        self._link, self.topic = link, topic
        self.replica = Replica(link, topic, 0, self)
        self._apply, self._snapshot = apply, snapshot
        self.early: list[bytes] = []
        """What was read before ``begin``."""
        self._begun = False
        self._lock: asyncio.Lock | None = None
        self._news = asyncio.Event()
        self._size = self._snapshot_bytes = 0
        self._first_part = 0
        self._stored = False
        """The last change counts. Another node may have claimed since, before we could look."""

    # --- what the replica tells -----------------------------------------------------------------
    def stretched(self, at: int, entry: Stretch, value: bytes, *, ours: bool) -> None:
        found, _, _ = entries_in(value)
        self._size += len(value)
        self._stored = self._stored or ours
        if not self._begun:
            self.early += found
            return
        for payload in found:
            try:
                self._apply(payload)
            except Exception:  # the others must be applied all the same
                logger.exception("%s: %r", self.topic, payload[:200])
        self._news.set()

    def checkpointed(self, at: int, entry: Checkpoint, parts: list[bytes], *, ours: bool) -> None:
        content = b"".join(parts)
        self._size = self._snapshot_bytes = len(content)
        self._first_part = at
        if not self._begun:
            self.early = entries_in(content)[0]
        else:
            self._news.set()

    def part_stored(self) -> None:
        self._news.set()

    def claimed(self, claim: Claim, *, ours: bool) -> None:
        if self._begun:
            self._news.set()

    def lost(self, claim: Claim) -> None:
        self._news.set()

    def unknown(self) -> None:
        pass

    # --- starting -----------------------------------------------------------------------------
    def open(self) -> None:
        """Read it to the end, and follow it. Blocks; not on the loop."""
        self._link.open([self.replica], self._link.logs, claim=False)

    def begin(self) -> list[bytes]:
        """On the loop: what was read until now; the rest is applied at once."""
        self._lock, self._begun = asyncio.Lock(), True
        early, self.early = self.early, []
        return early

    # --- changing -----------------------------------------------------------------------------
    async def change(self, decide: Callable[[], list[bytes]]) -> None:
        """Write what ``decide`` returns, when this node knows everything that was written before.

        It may be called several times, and raises if there is nothing to be done about it. What it returned has been
        applied when this returns.
        """
        assert self._lock is not None
        try:
            async with asyncio.timeout(self._link.timeout), self._lock:
                await self._change(decide)
        except TimeoutError:
            if self.replica.seat.under_way is not None:
                raise OutcomeUnknown(
                    f"Kafka has not answered for {self._link.timeout:g} seconds: this may be stored, now or later"
                ) from None
            raise StorageFailed(
                f"Kafka has not answered for {self._link.timeout:g} seconds; nothing was stored, try again",
                code="kafka_unavailable",
            ) from None

    async def _change(self, decide: Callable[[], list[bytes]]) -> None:
        replica, pause = self.replica, PAUSE_S
        while True:
            await self._until(lambda: replica.seat.under_way is None)  # of one that gave up waiting
            if not replica.is_ours:
                await self._claim()
                if not replica.is_ours:
                    await asyncio.sleep(random.uniform(0, pause))
                    pause = min(2 * pause, 1.0)
                continue
            payloads = decide()
            if not payloads:
                return
            self._stored = False
            replica.stretch(len(payloads), b"".join(map(frame, payloads)))
            await self._until(lambda: replica.seat.under_way is None)
            if self._stored:
                grown = self._size > max(4 * self._snapshot_bytes, limits.JOURNAL_REWRITE_BYTES_MIN)
                if grown and replica.is_ours:
                    await self._rewrite()
                return

    async def _claim(self) -> None:
        """Until this node has read its claim, or another one's."""
        replica, epoch = self.replica, self.replica.seat.ownership.epoch
        replica.claim()
        await self._until(lambda: replica.seat.ownership.epoch > epoch)

    async def _rewrite(self) -> None:
        replica = self.replica
        owned, content = replica.seat.owned, b"".join(map(frame, self._snapshot()))
        parts = [content[low : low + PART_BYTES] for low in range(0, len(content), PART_BYTES)]
        for number, part in enumerate(parts, 1):
            if replica.seat.owned != owned:
                return
            replica.checkpoint(number, len(parts), part)
            await self._until(lambda: replica.seat.under_way is None)
        if replica.seat.owned == owned:
            self._link.remember(replica, self._first_part)
            self._link.delete_before(replica, self._first_part)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._news.clear()
            await self._news.wait()
