"""Crash states: before every single disk operation of a saga the machine is copied, and the copy loses its power.

A *saga* is a short life of a broker without faults: publishes of every kind, acks, dead letters, delayed messages,
staged commits, retention, rewritten segments, new and deleted topics, restarts. Right before each operation that changes the disk, the
disk is cloned as it is, unsynced writes included, and each clone crashes: unsynced sectors dropped, torn or
reordered, names lost or kept. A broker is started on it, one time in five with another power cut during its
recovery. What it then has is compared with what had been asked for and answered up to that operation:

- answered and gone: lost; there and never asked for, refused or cancelled: invented; there twice: duplicate
- a commit is there whole or not at all; a delayed message waits or was published, and not both
- a position never lies beyond what was acknowledged, and is not behind what was flushed
- the broker works: it takes a message, and delivers everything that is not done

Rejected: enumerating every subset of unsynced sectors (2^n); dice with chances from cruel to kind find the same
kinds of states in a fraction of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from headrace.broker.publishing import Publish
from headrace.errors import HeadraceError
from headrace.log.batch import encode
from headrace.model import Message, Receipt, TopicSettings
from tests.broker.rig import Inbox, Rig
from tests.fakes import FaultyFiles, Mains, PowerFailed, SimulatedFiles
from tests.fakes.eager import eager_rewriting
from tests.fakes.faults import CHANGES, Fault
from tests.faults.scenario import Outcome, RunOptions, Scenario

GROUP = "workers"
STEPS = 25
ANOMALIES_MAX = 10
TRIES = 6
"""Crashes of the machine before one operation."""


class Forked(FaultyFiles):
    """Calls ``before`` ahead of every operation that changes the disk."""

    def __init__(self, disk: SimulatedFiles):
        super().__init__(disk)
        self.disk = disk
        self.before: Callable[[], None] = lambda: None

    def _meet(self, kind: str, path: Path) -> Fault | None:
        if kind in CHANGES:
            self.before()
        return None


@dataclass(eq=False)
class Fact:
    """A message that was asked for; a call that was made and perhaps answered."""

    value: bytes
    topic: str
    kind: str
    answered: bool = False
    place: tuple[int, int] | None = None
    cancelled: bool = False
    """Asked for; ``refused`` when that was answered."""
    refused: bool = False
    commit: int | None = None


class Saga:
    """Drives a broker and knows at each moment what may and what must be on its disk."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.files = Forked(SimulatedFiles())
        self.rig = Rig(self.files, topic={"segment_bytes": 4096}, events_interval=0.0)
        self.facts: dict[bytes, Fact] = {}
        self.topics: dict[str, tuple[bool, bool]] = {}
        """Name -> (must exist, must not exist)."""
        self.commits: dict[int, bool] = {}
        """Number -> whether it was answered."""
        self.acked: set[tuple[str, int, int]] = set()
        self.flushed: set[tuple[str, int, int]] = set()
        self.subscribed = False
        self.inbox: Inbox | None = None
        self.open_messages: list[Message] = []
        self.staged: list[str] = []
        self.delayed: list[tuple[Fact, Any]] = []
        self.sequence = 0
        self.rewritten = 0
        """Segments, in all lives of the saga."""
        self.has_removed = False
        """Retention may have deleted segments."""

    # --- what happens -----------------------------------------------------------------------
    def begin(self) -> None:
        self.create("orders", partitions=2)
        self.create("notes", partitions=1, compression="zstd", retention_hours=0.001)
        self.rig.subscribe(GROUP, "orders", max_deliveries=2, ack_timeout=30.0, backoff=0.0)
        self.subscribed = True
        self.inbox = self.rig.join(self.rig.engine.subscription(GROUP), 20)

    def create(self, name: str, **settings: Any) -> None:
        self.topics[name] = (False, False)
        self.rig.engine.create_topic(name, TopicSettings(segment_bytes=4096, **settings))
        self.topics[name] = (True, False)

    def fact(self, topic: str, kind: str, **more: Any) -> Fact:
        value = b"%d|" % len(self.facts) + self.random.randbytes(
            self.random.choice((0, 20, 300, 900))
        )
        fact = self.facts[value] = Fact(value, topic, kind, **more)
        return fact

    def publish(self) -> None:
        topic = self.random.choice(("orders", "notes"))
        facts = [self.fact(topic, "plain") for _ in range(self.random.choice((1, 3, 10)))]
        partition = self.random.randrange(2) if topic == "orders" else 0
        self._publish(facts, partition)

    def chat(self) -> None:
        """One message at a time, enough to close a segment that is then rewritten."""
        for _ in range(12):
            self._publish([self.fact("orders", "plain")], 0)

    def produce(self) -> None:
        facts = [self.fact("orders", "producer") for _ in range(2)]
        self._publish(facts, 0, producer=(7, 0, self.sequence))
        self.sequence += 2
        if self.random.random() < 0.5:  # as if the answer had been lost
            self._publish(facts, 0, producer=(7, 0, self.sequence - 2))

    def _publish(self, facts: list[Fact], partition: int, **more: Any) -> None:
        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            assert error is None, error
            for fact, offset in zip(facts, receipts[0].offsets, strict=True):
                fact.answered, fact.place = True, (partition, offset)

        columns = self.rig.columns([fact.value for fact in facts])
        self.rig.engine.publish(Publish(facts[0].topic, columns, partition, **more), done)
        self.rig.run()

    def delay(self) -> None:
        fact = self.fact("orders", "delayed")

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            assert error is None, error
            fact.answered = True
            self.delayed.append((fact, receipts[0].id))

        due = self.rig.clock.now_ms() + self.random.choice((100, 3_000))
        columns = self.rig.columns([fact.value])
        self.rig.engine.publish(Publish("orders", columns, deliver_at=due), done)
        self.rig.run()

    def cancel(self) -> None:
        waiting = {item.id for item in self.rig.engine.schedule.listing().collect()}
        for fact, id in self.delayed:
            if id in waiting:
                fact.cancelled = True
                self.rig.wait(self.rig.engine.schedule.cancel, id)
                fact.refused = True
                return

    def stage(self) -> None:
        facts = [self.fact("orders", "staged", commit=len(self.commits)) for _ in range(3)]
        batch = encode(self.rig.columns([fact.value for fact in facts]))
        self.staged.append(self.rig.wait(self.rig.engine.staging.stage, "orders", 1, batch))

    def commit(self) -> None:
        if self.staged:
            number, pieces = len(self.commits), self.staged
            self.commits[number] = False
            self.staged = []
            self.rig.wait(self.rig.engine.staging.commit, "job", number, pieces)
            self.commits[number] = True

    def settle(self) -> None:
        assert self.inbox is not None
        self.open_messages += self.inbox.take()
        for _ in range(min(len(self.open_messages), 8)):
            message = self.open_messages.pop(self.random.randrange(len(self.open_messages)))
            if self.random.random() < 0.2:
                self.inbox.nack(message, 0.0)  # the second time it becomes a dead letter
                if message.attempt == 2:
                    self.acked.add((message.topic, message.partition, message.offset))
            else:
                self.acked.add((message.topic, message.partition, message.offset))
                self.inbox.ack(message)
        self.rig.run()

    def flush(self) -> None:
        asked = set(self.acked)
        burying = self.rig.engine.subscription(GROUP)._burying
        assert not burying
        self.rig.flush()
        self.flushed = asked

    def wait(self) -> None:
        seconds = self.random.choice((0.06, 1.0, 11.0))
        self.has_removed |= seconds > 10
        self.rig.advance(seconds)

    def make_topic(self) -> None:
        name = f"made-{len(self.topics)}"
        self.create(name)
        if self.random.random() < 0.6:
            self._publish([self.fact(name, "plain")], 0)
        if self.random.random() < 0.6:
            self.topics[name] = (False, False)
            self.rig.wait(self.rig.engine.delete_topic, name)
            self.topics[name] = (False, True)

    def restart(self) -> None:
        self._count_rewritten()
        self.rig.reopen()
        self.flushed = set(self.acked)
        self.open_messages.clear()
        self.inbox = self.rig.join(self.rig.engine.subscription(GROUP), 20)

    def _count_rewritten(self) -> None:
        assert self.rig.engine.rewriter is not None
        self.rewritten += self.rig.engine.rewriter.segments

    def go(self) -> None:
        steps = (
            *[self.publish] * 5,
            *[self.settle] * 4,
            *[self.chat] * 2,
            self.produce,
            self.produce,
            self.delay,
            self.cancel,
            self.stage,
            self.commit,
            self.flush,
            self.wait,
            self.make_topic,
            self.restart,
        )
        self.begin()
        for _ in range(STEPS):
            self.random.choice(steps)()
            self.rig.advance(0.02)  # some steps of a rewrite
        self._count_rewritten()
        self.rig.close()


class Wrong(Exception):
    """What a broker found on its disk is not what it had promised."""


def judge(saga: Saga, disk: SimulatedFiles, random: Random) -> None:
    """Start a broker on a disk after a crash, and compare."""
    mains = Mains(disk, sector=random.choice([8, 64, 512]), ordered=True)
    rig = Rig(mains, topic={"segment_bytes": 4096}, events_interval=0.0)
    rig.clock.set(saga.rig.clock.now_ms())
    if random.random() < 0.2:
        mains.plan(random.randint(1, 15), random.getrandbits(32))
    for _ in range(3):
        mains.restored()
        try:
            rig.open()
        except PowerFailed:
            rig.abandon()
        else:
            break
    mains.countdown = 0
    if mains.dead:  # it was cut right behind its recovery
        mains.restored()
        rig.abandon()
        rig.open()
    _judge_topics(saga, rig)
    found = _judge_messages(saga, rig)
    _judge_delayed(saga, rig, found)
    if saga.subscribed:
        _judge_group(saga, rig)
    rig.publish(
        "orders" if saga.topics.get("orders", (False,))[0] else "fresh", b"new|", partition=0
    )


def _judge_topics(saga: Saga, rig: Rig) -> None:
    for name, (must, must_not) in saga.topics.items():
        there = rig.engine.topics.get(name) is not None
        if (must and not there) or (must_not and there):
            raise Wrong(f"topic {name}: {'lost' if must else 'invented'}")


def _judge_messages(saga: Saga, rig: Rig) -> dict[bytes, tuple[int, int]]:
    found: dict[bytes, tuple[int, int]] = {}
    starts: dict[tuple[str, int], int] = {}
    for name in saga.topics:
        topic = rig.engine.topics.get(name)
        for partition in topic.partitions if topic is not None else ():
            if partition.log.read_only:
                raise Wrong(f"{name}/{partition.number} is read-only: {partition.log.read_only}")
            starts[name, partition.number] = partition.log.start_offset
            for message in rig.read(name, partition.number):
                fact = saga.facts.get(message.value)
                if fact is None or fact.topic != name or fact.refused:
                    raise Wrong(f"invented: {message}, {fact}")
                if message.value in found:
                    raise Wrong(f"duplicate: {message} and at {found[message.value]}")
                found[message.value] = (partition.number, message.offset)
    commits: dict[int, list[bool]] = {}
    for value, fact in saga.facts.items():
        if fact.commit is not None:
            commits.setdefault(fact.commit, []).append(value in found)
            if value in found and fact.commit not in saga.commits:
                raise Wrong(f"seen before its commit: {fact}")
        elif fact.answered and fact.kind != "delayed" and saga.topics[fact.topic][0]:
            assert fact.place is not None
            if fact.place[1] < starts[fact.topic, fact.place[0]] and fact.topic == "notes":
                continue  # retention
            if found.get(value) != fact.place:
                raise Wrong(f"lost or moved: {fact} is at {found.get(value)}")
    for number, there in commits.items():
        answered = saga.commits.get(number, False)
        if any(there) != all(there) or (answered and not all(there)):
            raise Wrong(f"commit {number}: {sum(there)} of {len(there)}, answered: {answered}")
    return found


def _judge_delayed(saga: Saga, rig: Rig, found: dict[bytes, tuple[int, int]]) -> None:
    waiting = {item.id for item in rig.engine.schedule.listing().collect()}
    for fact, id in saga.delayed:
        states = (fact.value in found) + (id in waiting)
        if states > 1 or (states == 0 and not fact.cancelled):
            raise Wrong(f"delayed: {fact} is in {states} states")
        if fact.refused and states:
            raise Wrong(f"cancelled: {fact} is there")


def _judge_group(saga: Saga, rig: Rig) -> None:
    group = rig.engine.subscription(GROUP)
    for (topic, number), cursor in group.cursors.items():
        done = {
            (topic, number, offset)
            for offset in range(cursor.partition.log.end_offset)
            if cursor.is_done(offset)
        }
        if done - saga.acked:
            raise Wrong(f"skipped: {sorted(done - saga.acked)}")
        missing = {place for place in saga.flushed if place[:2] == (topic, number)} - done
        if missing:
            raise Wrong(f"acks that were flushed are lost: {sorted(missing)}")
    inbox = rig.join(group, 100_000)
    if len(inbox.messages) != group.lag():
        raise Wrong(f"{group.lag()} to be delivered, {len(inbox.messages)} were")


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    operations = rewritten = 0
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    seed = options.seed
    try:
        while outcome.amount < options.amount and len(outcome.anomalies) < ANOMALIES_MAX:
            saga = Saga(seed)
            dice = Random(seed)

            def before(saga: Saga = saga, dice: Random = dice, seed: int = seed) -> None:
                nonlocal operations
                if outcome.amount >= options.amount or len(outcome.anomalies) >= ANOMALIES_MAX:
                    return
                operations += 1
                for _ in range(TRIES):
                    number = dice.getrandbits(32)
                    random = Random(number)
                    disk = saga.files.disk.clone()
                    disk.crash(
                        random,
                        sector=random.choice([8, 64, 512]),
                        # File systems keep the order of removals, and retention relies on it.
                        ordered=random.random() < 0.7 or saga.has_removed,
                        garbage=random.random() < 0.3,
                    )
                    outcome.amount += 1
                    try:
                        judge(saga, disk, random)
                    except (Wrong, HeadraceError, AssertionError, OSError) as error:
                        outcome.anomalies.append(
                            f"saga {seed}, operation {operations}, dice {number}: "
                            f"{type(error).__name__}: {error}"
                        )

            saga.files.before = before
            with eager_rewriting():
                saga.go()
            rewritten += saga.rewritten
            seed += 1
            options.progress(f"{outcome.amount:,} states, {seed - options.seed} sagas")
    finally:
        logging.disable(disabled)
    outcome.figures = {
        "sagas": seed - options.seed,
        "disk operations": operations,
        "segments rewritten": rewritten,
    }
    return outcome


SCENARIO = Scenario(
    name="crash-states",
    what="power cuts before every disk operation: unsynced writes dropped, torn, reordered",
    unit="states",
    amount=50_000,
    quick=2_000,
    run=run,
)
