"""The rule of claims, stretches and checkpoints, against a Kafka that does its worst.

A state machine runs processes over one Kafka partition, in any interleaving. What a process sends lies
``in_flight``: it may arrive late, twice or never, also after its process was told that it failed, or has died. Processes
pause (nobody runs them), crash, and start again at any checkpoint that was ever committed. Owners delete records before
a checkpoint, now or later.

``history`` holds every record that ever arrived. The truth is what a reader of all of it finds. At each step:
- whoever has read to a position knows what the truth was there, wherever he began;
- an answer is true: the message is at that offset, and no other process ever answers for it;
- a definite error is true: that attempt is never found later;
- a message that is sent again, to whomever, is stored once.

The same machine with a mistake planted in it has to fail, else it proves nothing.

Each byte of a string decides one step, so hypothesis finds, shrinks and repeats a failure. (Its own state machines take
a hundred times as long for each step, and then find less.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

PROCESSES_MAX = 4
IN_FLIGHT_MAX = 6
NAMES = "abcdefghijkl"
Option = TypeVar("Option")


class Attempt(NamedTuple):
    """A message as one process stores it: ``name`` is the producer's number, the same when it is sent again."""

    name: str
    serial: int


class Sent(NamedTuple):
    entry: Entry
    value: Any
    sender: Any


class View:
    """What a reader knows: the rule, and a fold of all that is valid."""

    def __init__(self, ownership: Ownership, parts: Callable[[], Parts] = Parts):
        self.ownership = ownership
        self.known: dict[str, int] = {}
        """Message -> offset: what idempotent producers have stored."""
        self.note = 0
        """A position: it changes in memory, and only checkpoints store it."""
        self.parts = parts()

    def fold(self, entry: Entry, value: Any) -> None:
        """A valid record."""
        if isinstance(entry, Stretch):
            for number, attempt in enumerate(value):
                self.known[attempt.name] = entry.first_offset + number
        whole = self.parts.read(entry, value)
        if whole is not None:
            self.known = {name: offset for part in whole for name, offset in part[0].items()}
            self.note = whole[-1][1]

    def facts(self) -> tuple[Any, ...]:
        now = self.ownership
        return (now.epoch, now.next_offset, now.next_number, dict(self.known), self.note)


class Process(View):
    """A node's process. It knows only what it has read."""

    def __init__(self, model: Cluster, name: str, position: int):
        first = model.history[position].entry if position else None
        beginning = Ownership()
        if position:
            assert isinstance(first, Checkpoint), "a partition begins with a checkpoint"
            beginning = Ownership.beginning_at(first)
        super().__init__(beginning)
        self.model, self.position, self.began = model, position, position
        self.seat = Seat(name, self.ownership)
        self.whole = position == 0
        """Whether all of the checkpoint was read that it began with."""
        self.sent: Sent | None = None
        self.pieces: list[Any] = []
        """The parts of a checkpoint that are still to be sent."""
        self.parts_total = 0
        self.first_part = -1
        self.checkpoint_at = -1

    # --- sending ------------------------------------------------------------------------------
    def claim(self) -> None:
        self.model.send(Sent(self.seat.claim(), None, self))

    def publish(self, name: str) -> None:
        if name in self.known:
            self.model.answered(self, name, self.known[name])
        elif self.seat.under_way is None:
            self.model.serial += 1
            self.sent = Sent(self.seat.stretch(1), (Attempt(name, self.model.serial),), self)
            self.model.send(self.sent)

    def begin_checkpoint(self, parts: int, note: int) -> None:
        names = list(self.known)
        self.pieces = [
            ({name: self.known[name] for name in names[part::parts]}, note) for part in range(parts)
        ]
        self.parts_total = parts
        self.send_part()

    def send_part(self) -> None:
        part = self.parts_total - len(self.pieces) + 1
        self.sent = Sent(self.seat.checkpoint(part, self.parts_total), self.pieces.pop(0), self)
        self.model.send(self.sent)

    def send_again(self) -> None:
        if self.sent is not None:
            self.model.send(self.sent)

    def reported(self, sent: Sent) -> None:
        """Kafka says that it has stored it. That says nothing about whether it is valid."""

    def failed(self, sent: Sent) -> None:
        """Kafka does not answer. The record may still arrive: its publisher has to wait, or hears nothing definite."""
        self.send_again()

    # --- reading ------------------------------------------------------------------------------
    def read(self) -> None:
        at = self.position
        self.position += 1
        if at in self.model.removed:
            return
        entry, value, _ = self.model.history[at]
        judgement = self.seat.read(entry)
        if judgement is not Judgement.VOID:
            self.fold(entry, value)
            if isinstance(entry, Checkpoint) and entry.part == entry.parts:
                self.whole = True
        if judgement in (Judgement.TAKEN, Judgement.LOST):
            self.dropped()
        elif judgement is Judgement.STORED:
            self.stored(at, entry)

    def dropped(self) -> None:
        """What was under way is void, now and for ever."""
        sent, self.sent, self.pieces = self.sent, None, []
        if sent is not None and isinstance(sent.entry, Stretch):
            self.model.refused(sent)

    def stored(self, at: int, entry: Entry) -> None:
        sent, self.sent = self.sent, None
        assert sent is not None
        if isinstance(entry, Stretch):
            for number, attempt in enumerate(sent.value):
                offset = entry.first_offset + number
                self.model.answered(self, attempt.name, offset)
                assert offset not in self.model.answered_first, "two owners answer for one offset"
                self.model.answered_first.add(offset)
        elif isinstance(entry, Checkpoint):
            if entry.part == 1:
                self.first_part = at
            if entry.part == entry.parts:
                self.checkpoint_at = self.first_part
                self.model.hints.append(self.first_part)
            else:
                self.send_part()

    def deletes_before(self) -> int:
        """How far it may delete: to the newest checkpoint that it has read back, all of it."""
        return self.checkpoint_at


class Cluster:
    process: ClassVar[type[Process]] = Process
    compaction_key: ClassVar[Callable[[Sent], object] | None] = None

    def __init__(self, choices: bytes) -> None:
        self.choices = iter(choices)
        self.history: list[Sent] = []
        self.truth: list[tuple[Any, ...]] = [View(Ownership()).facts()]
        self.view = View(Ownership())
        self.stored: dict[int, Attempt] = {}
        self.removed: set[int] = set()
        self.in_flight: list[Sent] = []
        self.deletes: list[int] = []
        self.begins = 0
        self.hints: list[int] = []
        self.processes: list[Process] = []
        self.serial = self.started = 0
        self.answers: dict[int, tuple[str, str]] = {}
        self.answered_first: set[int] = set()
        self.refusals: set[Attempt] = set()

    # --- what processes call ------------------------------------------------------------------
    def send(self, sent: Sent) -> None:
        if len(self.in_flight) < IN_FLIGHT_MAX:
            self.in_flight.append(sent)

    def answered(self, process: Process, name: str, offset: int) -> None:
        attempt = self.stored.get(offset)
        assert attempt is not None, f"{name} was answered at {offset}, where nothing is valid"
        assert attempt.name == name, f"{name} was answered at {offset}, where {attempt} is"
        before = self.answers.setdefault(offset, (name, process.seat.node))
        assert before[0] == name, f"{offset} was answered for {before} and for {name}"

    def refused(self, sent: Sent) -> None:
        for attempt in sent.value:
            assert attempt not in self.stored.values(), f"{attempt} was refused and is stored"
            self.refusals.add(attempt)

    # --- choosing -----------------------------------------------------------------------------
    def run(self) -> None:
        steps = [
            *(self.read,) * 6,
            *(self.arrive,) * 5,
            *(self.publish,) * 3,
            *(self.checkpoint,) * 2,
            *(self.start, self.claim, self.crash, self.fail),
            *(self.ask_to_delete, self.delete_records),
            *((self.compact,) if self.compaction_key is not None else ()),
        ]
        try:
            while True:
                self.pick(steps)()
        except StopIteration:
            self.end()

    def pick(self, options: Sequence[Option]) -> Option:
        return options[next(self.choices) % len(options)]

    def owners(self) -> list[Process]:
        return [process for process in self.processes if process.seat.owned]

    # --- Kafka ----------------------------------------------------------------------------------
    def arrive(self) -> None:
        """A record is stored; a copy of it may still arrive later."""
        if not self.in_flight:
            return
        sent = self.pick(self.in_flight)
        if self.pick((True, True, False)):
            self.in_flight.remove(sent)
        self.store(sent)
        if sent.sender in self.processes:
            sent.sender.reported(sent)

    def store(self, sent: Sent) -> None:
        self.history.append(sent)
        entry, value, _ = sent
        if self.view.ownership.apply(entry):
            self.view.fold(entry, value)
            if isinstance(entry, Stretch):
                for number, attempt in enumerate(value):
                    assert attempt not in self.refusals, f"{attempt} was refused and is stored"
                    names = [each.name for each in self.stored.values()]
                    assert attempt.name not in names, f"{attempt} is stored twice"
                    self.stored[entry.first_offset + number] = attempt
        self.truth.append(self.view.facts())

    def fail(self) -> None:
        """Its sender hears that it failed. It may be lost, or arrive all the same."""
        if not self.in_flight:
            return
        sent = self.pick(self.in_flight)
        if self.pick((True, False)):
            self.in_flight.remove(sent)
        if sent.sender in self.processes:
            sent.sender.failed(sent)

    def delete_records(self) -> None:
        if self.deletes:
            self.begins = max(self.begins, self.pick(self.deletes))

    def compact(self) -> None:
        """Only with a mistake planted: somebody has set cleanup.policy=compact."""
        key = type(self).compaction_key
        assert key is not None
        last = {key(sent): at for at, sent in enumerate(self.history)}
        self.removed = set(range(len(self.history))) - set(last.values())

    # --- processes ------------------------------------------------------------------------------
    def start(self) -> None:
        if len(self.processes) < PROCESSES_MAX:
            places = [self.begins, *(hint for hint in self.hints if hint > self.begins)]
            self.started += 1
            self.processes.append(self.process(self, f"n{self.started}", self.pick(places)))

    def crash(self) -> None:
        if self.processes:
            self.processes.remove(self.pick(self.processes))

    def read(self) -> None:
        if not self.processes:
            self.start()
        process = self.pick(self.processes)
        for _ in range(self.pick((1, 2, 20))):
            if process.position < self.begins:  # deleted while it slept: it has lost its place
                self.processes.remove(process)
                return
            if process.position == len(self.history):
                return
            process.read()
            # Of a compacted topic, only the end is promised to be the same.
            if process.whole and (not self.removed or process.position == len(self.history)):
                found, truth = process.facts(), self.truth[process.position]
                assert found == truth, (
                    f"{process.seat.node} began at {process.began}: {found}, not {truth}"
                )

    def claim(self) -> None:
        able = [process for process in self.processes if process.whole]
        if able:
            self.pick(able).claim()

    def publish(self) -> None:
        owners = self.owners()
        if owners:
            self.pick(owners).publish(self.pick(NAMES))

    def checkpoint(self) -> None:
        owners = [process for process in self.owners() if process.seat.under_way is None]
        if owners:
            self.pick(owners).begin_checkpoint(self.pick((1, 2)), next(self.choices))

    def ask_to_delete(self) -> None:
        able = [process for process in self.processes if process.deletes_before() > 0]
        if able:
            self.deletes.append(self.pick(able).deletes_before())

    # --- at the end -----------------------------------------------------------------------------
    def end(self) -> None:
        """A new process reads what is left, knows all that was ever answered, and can go on."""
        process = self.process(self, "last", self.begins)
        self.in_flight, self.processes = [], [process]

        def settle() -> None:
            while self.in_flight:
                self.store(self.in_flight.pop())
            while process.position < len(self.history):
                process.read()

        settle()
        for offset, (name, _) in self.answers.items():
            assert process.known.get(name) == offset, f"{name} was answered at {offset}; it is lost"
        process.claim()
        settle()
        assert process.seat.owned == process.ownership.epoch, "the last process cannot own it"


@given(st.binary(min_size=20, max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_interleaving_keeps_the_promises(choices: bytes) -> None:
    """No two owners answer for one offset, nothing answered is void, and every reader comes to the same result."""
    Cluster(choices).run()


def runs(cluster: type[Cluster], seeds: range) -> None:
    for seed in seeds:
        try:
            cluster(Random(seed).randbytes(300)).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_long_interleavings_keep_the_promises() -> None:
    """The same for many long runs, in which owners change often."""
    runs(Cluster, range(2_000))


# --- planted mistakes -----------------------------------------------------------------------------
class AnswersEarly(Process):
    """It answers when Kafka has stored the record, and does not read it back."""

    def reported(self, sent: Sent) -> None:
        if sent == self.sent and isinstance(sent.entry, Stretch):
            self.model.answered(self, sent.value[0].name, sent.entry.first_offset)


class RefusesEarly(Process):
    """It takes a report of failure for a definite error."""

    def failed(self, sent: Sent) -> None:
        if sent == self.sent and isinstance(sent.entry, Stretch):
            self.model.refused(sent)
            self.sent = self.seat.under_way = None


class ServesEarly(Process):
    """It serves when it has sent its claim, and has not read it back."""

    def claim(self) -> None:
        claim = self.seat.claim()
        self.seat.owned = claim.epoch
        self.ownership.epoch = claim.epoch
        self.model.send(Sent(claim, None, self))


class SharesItsName(Process):
    """All processes have one name."""

    def __init__(self, model: Cluster, name: str, position: int):
        super().__init__(model, "node", position)


class AcceptsEqualEpochs(Ownership):
    def apply(self, entry: Entry) -> bool:
        if isinstance(entry, Claim) and entry.epoch == self.epoch:
            return True
        return super().apply(entry)


class AcceptsOldEpochs(Ownership):
    def apply(self, entry: Entry) -> bool:
        if not isinstance(entry, Claim) and entry.epoch < self.epoch:
            entry = entry._replace(epoch=self.epoch)
        return super().apply(entry)


class AcceptsAnyOffset(Ownership):
    def apply(self, entry: Entry) -> bool:
        if isinstance(entry, Stretch) and entry.epoch == self.epoch:
            self.next_offset = entry.first_offset
        return super().apply(entry)


class AcceptsAnyNumber(Ownership):
    def apply(self, entry: Entry) -> bool:
        if isinstance(entry, Checkpoint):
            entry = entry._replace(number=self.next_number)
        return super().apply(entry)


def judging_by(rule_with_mistake: type[Ownership]) -> type[Process]:
    """Processes, and the truth itself, judge by a wrong rule."""

    def changed(before: Ownership) -> Ownership:
        return rule_with_mistake(before.epoch, before.next_offset, before.next_number)

    def begin(self: Process, model: Cluster, name: str, position: int) -> None:
        Process.__init__(self, model, name, position)
        self.ownership = self.seat.ownership = changed(self.ownership)
        model.view.ownership = changed(model.view.ownership)

    return type(rule_with_mistake.__name__, (Process,), {"__init__": begin})


class ForgetsTheEpoch(Process):
    """A checkpoint without the epoch: whoever begins there accepts what an old owner sends."""

    def __init__(self, model: Cluster, name: str, position: int):
        super().__init__(model, name, position)
        if position:
            self.ownership.epoch = 0


class ForgetsProducers(Process):
    """A checkpoint without the producers: a message that is sent again is stored twice."""

    def begin_checkpoint(self, parts: int, note: int) -> None:
        self.known, known = {}, self.known
        super().begin_checkpoint(parts, note)
        self.known = known


class DeletesEarly(Process):
    """It deletes to a checkpoint whose last part it has not read back."""

    def deletes_before(self) -> int:
        return self.first_part


class BeginsAnywhere(Process):
    """It commits the place of a checkpoint that it has sent, and not read back."""

    def reported(self, sent: Sent) -> None:
        if isinstance(sent.entry, Checkpoint) and sent.entry.part == 1:
            self.model.hints.append(len(self.model.history) - 1)


MISTAKES: list[type[Process]] = [
    AnswersEarly,
    RefusesEarly,
    ServesEarly,
    SharesItsName,
    judging_by(AcceptsEqualEpochs),
    judging_by(AcceptsOldEpochs),
    judging_by(AcceptsAnyOffset),
    judging_by(AcceptsAnyNumber),
    ForgetsTheEpoch,
    ForgetsProducers,
    DeletesEarly,
    BeginsAnywhere,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_is_found(mistake: type[Process]) -> None:
    """The machine is strong enough to find each mistake that the rule forbids."""
    cluster = type("Mistaken", (Cluster,), {"process": mistake})
    with pytest.raises(AssertionError, match="seed"):
        runs(cluster, range(20_000))


def without_epoch(sent: Sent) -> object:
    """Keys of a compacted topic: what the record is about."""
    entry = sent.entry
    if isinstance(entry, Stretch):
        return "stretch", sent.value[0].name
    return entry.node if isinstance(entry, Claim) else ("checkpoint", entry.part)


def with_epoch(sent: Sent) -> object:
    return sent.entry.epoch, without_epoch(sent)


@pytest.mark.parametrize("key", [without_epoch, with_epoch])
def test_a_compacted_topic_loses_what_was_answered(key: Callable[[Sent], object]) -> None:
    """Compaction breaks the rule even if the epoch is in the key: so the engine refuses such a topic."""
    cluster = type("Compacted", (Cluster,), {"compaction_key": staticmethod(key)})
    with pytest.raises(AssertionError, match="seed"):
        runs(cluster, range(20_000))
