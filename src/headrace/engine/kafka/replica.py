"""One Kafka partition as this node reads and writes it: the rule, applied to bytes.

A :class:`Replica` is told every record of its partition, in order, by one thread at a time: by the thread that opens it,
then by a :class:`~headrace.engine.kafka.tail.Tail`. It judges each and tells its *keeper*, which is a partition of a
topic (``log.py``) or a journal (``journal.py``). It sends one record at a time, and again when Kafka refused it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from headrace.engine.kafka.records import entry_of, key_of, owner_in
from headrace.engine.kafka.rule import (
    Checkpoint,
    Claim,
    Entry,
    Judgement,
    Ownership,
    Parts,
    Seat,
    Stretch,
)
from headrace.errors import DataCorrupt

if TYPE_CHECKING:
    from headrace.engine.kafka.link import KafkaLink

logger = logging.getLogger("headrace.kafka")


class Keeper(Protocol):
    """What a replica tells."""

    def stretched(self, at: int, entry: Stretch, value: bytes, *, ours: bool) -> None:
        """A valid stretch, at Kafka's offset ``at``. ``ours``: it is the one that was under way."""

    def checkpointed(self, at: int, entry: Checkpoint, parts: list[bytes], *, ours: bool) -> None:
        """A whole valid checkpoint, whose first part is at ``at``."""

    def part_stored(self) -> None:
        """A part of our checkpoint is stored, and is not the last."""

    def claimed(self, claim: Claim, *, ours: bool) -> None:
        """Its node owns the partition now."""

    def lost(self, claim: Claim) -> None:
        """We owned the partition, and another node owns it now: what was under way is void."""

    def unknown(self) -> None:
        """What is sent does not find its topic. Called on the loop."""


class Replica:
    def __init__(self, link: KafkaLink, topic: str, number: int, keeper: Keeper):
        self.link = link
        self.topic, self.number = topic, number
        self._keeper = keeper
        self.seat = Seat(link.node, Ownership())
        self._parts = Parts()
        self._first_part = 0
        self.position = 0
        """Kafka's offset of the next record."""
        self.began = 0
        """Kafka's offset at which we began to read."""
        self.begins = 0
        """Kafka's offset of the first record that is left."""
        self._starts_at: int | None = None
        self._sent: tuple[Entry, bytes] | None = None
        self._tries = 0
        """How often Kafka did not take it."""
        self.owner: str | None = None
        """The node that owns the partition, as far as was read."""
        self.is_behind = False
        """Records were deleted before they were read here: this node has slept for too long."""

    def begin(self, position: int, begins: int) -> None:
        """Begin to read at a checkpoint, or at 0."""
        self.position = self.began = position
        self.begins = begins
        self._starts_at = position or None

    # --- reading ------------------------------------------------------------------------------
    def read(self, at: int, key: bytes | None, value: bytes | None) -> None:
        if at < self.position:
            return
        entry = entry_of(key)
        if self._starts_at is not None:
            if not isinstance(entry, Checkpoint) or entry.part != 1:
                raise DataCorrupt(
                    f"{self.topic}/{self.number} of Kafka begins at its offset {at} without a checkpoint: "
                    "something else than Headrace has deleted its records",
                    code="kafka_topic_unsafe",
                )
            self._starts_at = None
            self.seat.ownership = Ownership.beginning_at(entry)
        self.position = at + 1
        if entry is None:
            logger.warning("%s/%d: record %d is not Headrace's", self.topic, self.number, at)
            return
        owned = self.seat.owned is not None
        judgement = self.seat.read(entry)
        if judgement is Judgement.VOID:
            return
        value = value or b""
        ours = judgement is Judgement.STORED
        if ours:
            self._sent = None
        whole = self._parts.read(entry, value)
        if isinstance(entry, Claim):
            self._sent, self.owner = None, entry.node
            self._keeper.claimed(entry, ours=judgement is Judgement.TAKEN)
            if owned and judgement is Judgement.LOST:
                self._keeper.lost(entry)
        elif isinstance(entry, Stretch):
            self._keeper.stretched(at, entry, value, ours=ours)
        else:
            if entry.part == 1:
                self._first_part = at
            if self.owner is None:
                self.owner = owner_in(key or b"", entry)
            if whole is not None:
                self._keeper.checkpointed(self._first_part, entry, whole, ours=ours)
            elif ours:
                self._keeper.part_stored()

    def overtaken(self) -> None:
        """Another node has owned the partition for so long that its claim is deleted already."""
        self.is_behind = True
        if self.seat.owned is not None:
            self.seat.owned = self.seat.under_way = self._sent = None
            self._keeper.lost(Claim(self.seat.ownership.epoch + 1, "another"))

    @property
    def is_ours(self) -> bool:
        return self.seat.owned is not None and self.seat.owned == self.seat.ownership.epoch

    # --- writing ------------------------------------------------------------------------------
    def claim(self) -> None:
        self._put(self.seat.claim(), b"")

    def stretch(self, records: int, value: bytes) -> None:
        self._put(self.seat.stretch(records), value)

    def checkpoint(self, part: int, parts: int, value: bytes) -> None:
        self._put(self.seat.checkpoint(part, parts), value)

    def _put(self, entry: Entry, value: bytes) -> None:
        self._sent, self._tries = (entry, value), 0
        self._send(entry, value)

    def _send(self, entry: Entry, value: bytes) -> None:
        key = key_of(entry, self.link.node)
        again, unknown = partial(self._again, entry), self._keeper.unknown
        self.link.send(self.topic, self.number, key, value, again, unknown, self._tries)

    def forget(self) -> None:
        """Nobody waits for what was sent: it is not sent again."""
        self._sent = None

    def _again(self, entry: Entry) -> None:
        """Kafka did not take it. It is the same record: if it arrives twice, one of them is void."""
        sent = self._sent
        if sent is not None and sent[0] == entry:
            self._tries += 1
            self._send(*sent)
