"""The oracle of the topics: what was sent, and what may and must stand where.

Every value is unique and leads back to the call that sent it. ``see`` is told of each record that is read or
delivered, ``look`` reads what is new. From these and the answers of the calls:

===============  =======================================================================================
lost             answered or once seen, and not there
invented         there, but never sent, definitely refused, cancelled or aborted
unstable         one offset, two values
duplicate        at more offsets than it was sent or redriven
reordered        behind a message of the same partition that was sent later
early            a delayed message before its time; a staged one before its commit
torn             a part of a commit, or of a producer's batch, without the rest
===============  =======================================================================================

Topics that promise less (``interval``, ``never``, memory) are forgiven what they may lose: :meth:`LogOracle.lost_tail`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.broker.engine import Engine
from headrace.errors import HeadraceError, OutcomeUnknown
from headrace.log.batch import LOST
from headrace.model import DEAD_LETTER_SUFFIX, Receipt
from tests.fakes import FaultyFiles
from tests.fakes.time import running

Place = tuple[str, int, int]
"""Topic, partition, offset."""


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(eq=False)
class Commit:
    """A commit of staged batches."""

    name: str
    number: int
    records: list[Sent]
    pieces: list[str] = field(default_factory=list)
    invoked: bool = False
    state: str = "asked"


@dataclass(eq=False)
class Sent:
    """One message that somebody wanted to be stored."""

    number: int
    value: bytes
    topic: str
    kind: str
    """plain, producer, delayed, staged or edited"""
    key: bytes | None = None
    headers: dict[str, str] | None = None
    target: str | None = None
    expires_ms: int = 0
    state: str = "asked"
    """asked, ok, refused, unknown"""
    sent_at: int = 0
    answered_at: int | None = None
    copies: int = 1
    """How often it may stand in its topic: each redrive allows one more."""
    places: list[Place] = field(default_factory=list)
    redriven_for: set[str | None] = field(default_factory=set)
    due_ms: int = 0
    peak_ms: int = 0
    """The latest that it was by the wall clock before the clock was set back."""
    commit: Commit | None = None
    producer: tuple[int, int, int] | None = None
    """Producer id, epoch, sequence."""

    def __repr__(self) -> str:
        return f"<{self.kind} {self.number} to {self.topic}, {self.state}, at {self.places}>"


@dataclass(frozen=True)
class StoredRecord:
    """A record as the log has it."""

    sent: Sent
    timestamp: int
    target: str | None
    expires_ms: int


@dataclass(frozen=True)
class Letter:
    group: str
    origin: Place
    sent: Sent
    attempts: int
    topic: str
    offset: int


def number_of(value: bytes) -> int:
    head = value.partition(b"|")[0]
    return int(head) if head.isdigit() else -1


class LogOracle:
    def __init__(self, files: FaultyFiles) -> None:
        self.files = files
        self.topics: dict[str, dict[str, Any]] = {}
        """Name -> settings, as they were given."""
        self.sent: dict[int, Sent] = {}
        self.known: dict[tuple[str, int], dict[int, StoredRecord]] = {}
        self.by_key: dict[tuple[str, bytes], list[Place]] = {}
        self.letters: dict[tuple[str, int], Letter] = {}
        """(dead-letter topic, offset) -> letter"""
        self.commits: list[Commit] = []
        self.batches: list[list[Sent]] = []
        """Batches of idempotent producers: stored whole or not at all."""
        self.engine: Engine | None = None
        self.tick = 0
        self._looked: dict[tuple[str, int], int] = {}
        self._ends: dict[tuple[str, int], int] = {}

    # --- what is sent -------------------------------------------------------------------------
    def new(self, topic: str, kind: str, filler: bytes = b"", **more: Any) -> Sent:
        self.tick += 1
        number = len(self.sent)
        sent = Sent(number, b"%d|" % number + filler, topic, kind, sent_at=self.tick, **more)
        self.sent[number] = sent
        return sent

    def answered(
        self, sents: list[Sent], receipts: list[Receipt], error: HeadraceError | None
    ) -> None:
        """A publish was answered."""
        self.tick += 1
        for sent in sents:
            if sent.state == "ok":
                continue  # a repetition
            if error is None:
                sent.state, sent.answered_at = "ok", self.tick
            elif isinstance(error, OutcomeUnknown):
                sent.state = "unknown"
            else:
                self.refused(sent, error)
        if error is None and len(receipts) == 1 and receipts[0].offset >= 0:
            receipt = receipts[0]
            if receipt.count != len(sents):
                raise Violation("lost", f"a receipt of {receipt.count} for {len(sents)} messages")
            for sent, offset in zip(sents, receipt.offsets, strict=True):
                place = (receipt.topic, receipt.partition, offset)
                if sent.places and place not in sent.places:
                    raise Violation("unstable", f"{sent} was answered with {place}")
                if not sent.places:
                    # It is not read yet, but what is read there has to be this.
                    sent.places.append(place)
                    self._remember(
                        place, StoredRecord(sent, receipt.timestamp, sent.target, sent.expires_ms)
                    )

    def refused(self, sent: Sent, error: HeadraceError) -> None:
        if sent.state == "unknown":
            return  # an earlier try may have been stored
        sent.state = "refused"
        if sent.places:
            raise Violation("invented", f"{sent} was refused with {error.code}, and is there")

    # --- what is there --------------------------------------------------------------------------
    def _remember(self, place: Place, stored: StoredRecord) -> None:
        topic, partition, offset = place
        known = self.known.setdefault((topic, partition), {})
        before = known.get(offset)
        if before is not None:
            if before.sent is not stored.sent:
                raise Violation("unstable", f"{place} was {before.sent} and is {stored.sent}")
            return
        known[offset] = stored
        if stored.sent.key is not None:
            self.by_key.setdefault((topic, stored.sent.key), []).append(place)

    def see(
        self, place: Place, value: bytes, key: bytes | None, stored: dict[str, Any]
    ) -> StoredRecord:
        """A record stands there."""
        sent = self.sent.get(number_of(value))
        if sent is None or sent.value != value or sent.topic != place[0] or sent.key != key:
            raise Violation("invented", f"{place} holds {value[:40]!r} (key {key!r}), {sent}")
        if sent.state == "refused":
            raise Violation("invented", f"{place}: {sent}")
        if place not in sent.places:
            if not sent.places:  # a redriven copy comes later anyway
                self._check_time(sent)
            sent.places.append(place)
            if len(sent.places) > sent.copies:
                raise Violation("duplicate", f"{sent}, and may be there {sent.copies} times")
        found = StoredRecord(sent, stored["timestamp"], stored["target"], stored["expires_ms"])
        headers = dict(stored["headers"])
        was_redriven = headers.pop("headrace-origin-timestamp", None) is not None
        if was_redriven and not sent.redriven_for:
            raise Violation("invented", f"{place} says that it was redriven: {sent}")
        if headers != (sent.headers or {}):
            raise Violation("invented", f"{place} has the headers {stored['headers']}: {sent}")
        if found.target not in {sent.target, *sent.redriven_for}:
            raise Violation("invented", f"{place} is for {found.target}: {sent}")
        self._remember(place, found)
        return found

    def _check_time(self, sent: Sent) -> None:
        assert self.engine is not None
        if sent.due_ms and max(sent.peak_ms, self.engine.now_ms()) < sent.due_ms:
            late = sent.due_ms - self.engine.now_ms()
            raise Violation("early", f"{sent} {late} ms before its time")
        if sent.commit is not None and not sent.commit.invoked:
            raise Violation("early", f"{sent} before its commit")

    def look_at(self, topic: str, partition: int) -> None:
        """Read what is new in a partition."""
        assert self.engine is not None
        log = self.engine.partition(topic, partition).log
        where = (topic, partition)
        end = log.end_offset
        if end < self._ends.get(where, 0):
            raise Violation("lost", f"{where} ends at {end} and had reached {self._ends[where]}")
        self._ends[where] = end
        offset = max(self._looked.get(where, 0), log.start_offset)
        while offset < end:
            try:
                with (
                    self.files.spared(),
                    running(None),
                ):  # the faults are for the broker, and we may wait
                    batches = log.read(offset, 1 << 20)
            except HeadraceError as error:
                raise Violation(
                    "lost", f"{where} offset {offset} cannot be read: {error}"
                ) from error
            for batch in batches:
                if batch.flags & LOST:
                    raise Violation("lost", f"{where} says that {batch} is lost")
                first = offset - batch.base_offset
                targets, expiry = batch.targets(), batch.expiry()
                for index, message in enumerate(
                    batch.messages(topic, partition, first, batch.count), first
                ):
                    if message.offset != offset:
                        raise Violation("gap", f"{where}: {message.offset} instead of {offset}")
                    offset += 1
                    if offset > end:
                        break
                    self._read(message, targets and targets[index], expiry and expiry[index])
            self._looked[where] = offset

    def _read(self, message: Any, target: bytes | None, expires_ms: int | None) -> None:
        if message.topic.endswith(DEAD_LETTER_SUFFIX):
            self._read_letter(message)
            return
        self.see(
            (message.topic, message.partition, message.offset),
            message.value,
            message.key,
            {
                "timestamp": message.timestamp,
                "headers": message.headers,
                "target": target.decode() if target else None,
                "expires_ms": expires_ms or 0,
            },
        )

    def _read_letter(self, message: Any) -> None:
        headers = message.headers
        origin = (
            headers["headrace-origin-topic"],
            int(headers["headrace-origin-partition"]),
            int(headers["headrace-origin-offset"]),
        )
        sent = self.sent.get(number_of(message.value))
        place = (message.topic, message.offset)
        if sent is None or sent.value != message.value or sent.key != message.key:
            raise Violation("invented", f"dead letter {place}: {message}")
        known = self.known.get(origin[:2], {}).get(origin[2])
        may_be_gone = self.is_lax(origin[0]) or self.is_volatile(origin[0]) or sent.kind == "edited"
        if not may_be_gone and (known is None or known.sent is not sent):
            raise Violation("invented", f"dead letter {place} of {origin}, where {known} stands")
        letter = Letter(
            headers["headrace-subscription"],
            origin,
            sent,
            int(headers["headrace-attempts"]),
            *place,
        )
        before = self.letters.setdefault(place, letter)
        if before.sent is not sent:
            raise Violation("unstable", f"dead letter {place} was {before}")

    def look(self, *, everything: bool = False) -> None:
        """Read what is new everywhere, in one turn of the loop: a commit is there whole or not at all."""
        assert self.engine is not None
        if everything:
            self._looked.clear()
        for topic in list(self.engine.topics):
            if topic.name in self.topics or topic.name.endswith(DEAD_LETTER_SUFFIX):
                for partition in topic.partitions:
                    self.look_at(topic.name, partition.number)
        for commit in self.commits:
            there = sum(bool(sent.places) for sent in commit.records)
            if there not in (0, len(commit.records)):
                raise Violation("torn", f"{there} of {commit}")
            if commit.state == "ok" and not there:
                raise Violation("lost", f"{commit}")
        for batch in self.batches:
            there = sum(bool(sent.places) for sent in batch)
            if there not in (0, len(batch)):
                raise Violation("torn", f"{there} of {batch}")

    # --- what may be lost -----------------------------------------------------------------------
    def is_lax(self, topic: str) -> bool:
        """A power cut may take what was answered last."""
        settings = self.topics.get(topic, {})
        return settings.get("durability", "always") != "always"

    def is_volatile(self, topic: str) -> bool:
        return not self.topics.get(topic, {}).get("durable", True)

    def restarted(self, *, power_cut: bool) -> dict[tuple[str, int], int]:
        """The broker was started again. Returns where logs end that were allowed to lose their tail."""
        assert self.engine is not None
        shorter: dict[tuple[str, int], int] = {}
        for sent in self.sent.values():
            forgiven = power_cut and self.is_lax(sent.topic) and not sent.places
            if sent.state == "asked" or (sent.state == "ok" and forgiven):
                sent.state = "unknown"
        for commit in self.commits:
            if commit.state == "asked":
                commit.state = "unknown"
        for topic, partition in sorted(self.known.keys() | self._ends.keys()):
            if topic not in self.topics:
                continue
            lost = self.is_volatile(topic) or (power_cut and self.is_lax(topic))
            end = self.engine.partition(topic, partition).log.end_offset
            if lost:
                end = 0 if self.is_volatile(topic) else end
                self.lost_tail(topic, partition, end)
                shorter[topic, partition] = end
        return shorter

    def lost_tail(self, topic: str, partition: int, end: int) -> None:
        """The partition lost what stood from ``end`` on, as its settings allow."""
        where = (topic, partition)
        known = self.known.get(where, {})
        for offset in [offset for offset in known if offset >= end]:
            sent = known.pop(offset).sent
            place = (topic, partition, offset)
            sent.places.remove(place)
            if not sent.places:
                sent.state = "unknown"
            if sent.key is not None:
                self.by_key[topic, sent.key].remove(place)
        self._looked[where] = min(self._looked.get(where, 0), end)
        self._ends[where] = min(self._ends.get(where, 0), end)

    # --- the end --------------------------------------------------------------------------------
    def finish(self) -> None:
        """Everything was read: is everything there, and in order?"""
        for sent in self.sent.values():
            if sent.state == "ok" and not sent.places and not self.is_volatile(sent.topic):
                raise Violation("lost", f"{sent}")
        for known in self.known.values():
            last, sequences = -1, dict[int, tuple[int, int]]()
            for offset in sorted(known):
                sent = known[offset].sent
                if sent.copies > 1:
                    continue  # it may be a copy
                if sent.kind == "plain":
                    if sent.number < last:
                        raise Violation("reordered", f"{sent} stands behind number {last}")
                    last = sent.number
                elif sent.producer is not None:
                    producer, *order = sent.producer
                    if sequences.get(producer, (-1, -1)) >= tuple(order):
                        raise Violation("reordered", f"{sent} of producer {sent.producer}")
                    sequences[producer] = (order[0], order[1])
