"""What the clients of a life do: one method for each kind of step, named in ``STEPS``.

A step asks for something and tells the oracle. Answers come later, when the disk jobs run, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from headrace.broker import positions
from headrace.broker.publishing import Publish, idempotency_producer
from headrace.errors import (
    HeadraceError,
    MessageNotFound,
    OutcomeUnknown,
    ProducerFenced,
    SequenceGap,
    unreadable,
)
from headrace.log.batch import encode
from headrace.model import DEAD_LETTER_SUFFIX, DeadLetter, Receipt
from tests.faults.simulation.groups import GroupOracle
from tests.faults.simulation.logs import Commit, LogOracle, Sent, Violation
from tests.faults.simulation.world import SimulatedMachine

KEYS = (b"a", b"b", b"c", b"d", b"e")
PARTITIONS_MAX = 5


class SimulatedProducer:
    """An idempotent producer: it sends a batch again until it knows what became of it."""

    def __init__(self, topic: str, partition: int):
        self.topic, self.partition = topic, partition
        self.identity: tuple[int, int] | None = None
        self.next = 0
        self.pending: list[Sent] | None = None
        self.busy = False
        self.last: tuple[list[Sent], int] | None = None
        """The newest batch that was answered, and its offset."""


class Clients:
    def __init__(self, world: SimulatedMachine, log: LogOracle, random: Random):
        self.world, self.log, self.random = world, log, random
        self.groups: list[GroupOracle] = []
        self.producers: list[SimulatedProducer] = []
        self.drivers: dict[str, Commit] = {}
        """Name -> the commit that is being prepared, or whose outcome its driver does not know."""
        self.numbers: dict[str, int] = {}
        self.repeated: dict[str, Sent] = {}
        """Idempotency key -> the message that was sent with it."""
        self.delayed: list[tuple[Sent, Any]] = []
        self.open_calls = 0
        """Calls that were made in this life of the broker and are not answered."""

    # --- helpers ----------------------------------------------------------------------------
    def topic(self, **wanted: bool) -> str | None:
        """One of the topics; ``always``: that loses nothing, ``kept``: by retention neither."""
        names = [
            name
            for name, settings in self.log.topics.items()
            if not (wanted.get("always") and (self.log.is_lax(name) or self.log.is_volatile(name)))
            and not (wanted.get("kept") and settings.get("retention_hours", 24.0) is not None)
        ]
        return self.random.choice(names) if names else None

    def partitions(self, topic: str) -> int:
        return len(self.world.engine.topics.find(topic).partitions)

    def filler(self) -> bytes:
        size = self.random.choice((0, 5, 40, 300, 900))
        if self.random.random() < 0.5:
            return b"x" * size
        return self.random.randbytes(size)

    def headers(self) -> dict[str, str] | None:
        return {"n": str(self.random.randrange(100))} if self.random.random() < 0.2 else None

    def ask(self, call: Callable[..., Any], done: Callable[..., None], *args: Any) -> bool:
        """Call with an answer to come; False when it was refused at once."""
        self.open_calls += 1
        calls = 0
        world, engine = self.world, self.world.engine

        def answered(*given: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise Violation("doubled", f"{call} was answered {calls} times")
            if world._engine is engine:
                self.open_calls -= 1
            done(*given)

        try:
            call(*args, answered)
        except (HeadraceError, OSError) as raised:
            error = raised if isinstance(raised, HeadraceError) else unreadable(raised)
            self.open_calls -= 1
            if calls:
                raise Violation("doubled", f"{call} was answered and raised {error}") from error
            done_with_error(done, error)
            return False
        return True

    # --- publishing -------------------------------------------------------------------------
    def publish(self) -> None:
        topic = self.topic()
        assert topic is not None
        count = self.random.choice((1, 1, 2, 5, 20))
        keyed = self.random.random() < 0.6
        more: dict[str, Any] = {}
        shared: dict[str, Any] = {"headers": self.headers()}
        if self.random.random() < 0.1:
            more["ttl"] = self.random.choice((0.5, 5.0, 100.0))
            shared["expires_ms"] = self.world.clock.now_ms() + int(more["ttl"] * 1000)
        if self.random.random() < 0.1:
            more["to"] = shared["target"] = self.random.choice(self.groups).name
        keys = [
            self.random.choice(KEYS) if keyed and self.random.random() < 0.9 else None
            for _ in range(count)
        ]
        sents = [self.log.new(topic, "plain", self.filler(), key=key, **shared) for key in keys]
        if count == 1 and not keys[0] and not more and not shared["headers"]:
            publish = Publish(topic, sents[0].value)
        else:
            columns = self.world.columns(
                [sent.value for sent in sents],
                keys=keys if keyed else None,
                headers=shared["headers"],
                **more,
            )
            partition = None
            if not any(keys) and self.random.random() < 0.3:
                partition = self.random.randrange(self.partitions(topic))
            publish = Publish(topic, columns, partition)
        self._publish(publish, sents)

    def _publish(self, publish: Publish, sents: list[Sent]) -> None:
        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            self.log.answered(sents, receipts, error)

        self.ask(self.world.engine.publish, done, publish)

    def publish_once(self) -> None:
        """With an idempotency key; sometimes again with one that was used before."""
        topic = self.topic(always=True)
        if topic is None or self.partitions(topic) != self.log.topics[topic]["partitions"]:
            return  # partitions were added: a key may lead elsewhere
        known = [key for key, sent in self.repeated.items() if sent.topic == topic]
        if known and self.random.random() < 0.5:
            name = self.random.choice(known)
            sent = self.repeated[name]
            if sent.state == "refused":
                sent.state = "asked"
        else:
            name = f"once-{len(self.repeated)}"
            sent = self.repeated[name] = self.log.new(topic, "once", self.filler())
        publish = Publish(
            topic, self.world.columns([sent.value]), producer=idempotency_producer(name)
        )
        self._publish(publish, [sent])

    def produce(self) -> None:
        """An idempotent producer sends its next batch, or the last one again."""
        if not self.producers or (len(self.producers) < 4 and self.random.random() < 0.2):
            topic = self.topic(always=True)
            if topic is None:
                return
            place = self.random.randrange(self.partitions(topic))
            self.producers.append(SimulatedProducer(topic, place))
        producer = self.random.choice(self.producers)
        if producer.busy:
            return
        if producer.identity is None:
            self._identify(producer)
            return
        again = producer.last is not None and self.random.random() < 0.2
        if producer.pending is not None:
            sents = producer.pending
        elif again:
            assert producer.last is not None
            sents = producer.last[0]
        else:
            count = self.random.choice((1, 3, 8))
            sents = [
                self.log.new(
                    producer.topic,
                    "producer",
                    self.filler(),
                    producer=(*producer.identity, producer.next + index),
                )
                for index in range(count)
            ]
            self.log.batches.append(sents)
            producer.pending = sents
        self._send(producer, sents)

    def _send(self, producer: SimulatedProducer, sents: list[Sent]) -> None:
        first = sents[0].producer
        assert first is not None
        columns = self.world.columns([sent.value for sent in sents])
        publish = Publish(producer.topic, columns, producer.partition, producer=first)
        producer.busy = True
        fresh = sents is producer.pending

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            producer.busy = False
            if isinstance(error, (SequenceGap, ProducerFenced)):
                raise Violation("lost", f"{sents[0]} was refused: {error}")
            doubt = any(sent.state == "unknown" for sent in sents)
            self.log.answered(sents, receipts, error)
            if error is None:
                if not fresh and not receipts[0].duplicate:
                    raise Violation("duplicate", f"{sents[0]} was stored again")
                producer.last = (sents, receipts[0].offset)
                if fresh:
                    producer.pending = None
                    producer.next += len(sents)
            elif fresh and not doubt and not isinstance(error, OutcomeUnknown):
                producer.pending = None

        self.ask(self.world.engine.publish, done, publish)

    def _identify(self, producer: SimulatedProducer) -> None:
        producer.busy = True

        def done(id: int, epoch: int, error: HeadraceError | None) -> None:
            producer.busy = False
            if error is None:
                producer.identity, producer.next = (id, epoch), 0

        name = f"p{self.producers.index(producer)}" if self.random.random() < 0.5 else None
        self.ask(self.world.engine.publishing.producer, done, name)

    def take_over(self) -> None:
        """A producer gets a new epoch: its batch under way is nobody's any more."""
        if self.producers:
            producer = self.random.choice(self.producers)
            if not producer.busy:
                producer.identity = producer.pending = producer.last = None

    def delay(self) -> None:
        topic = self.topic()
        assert topic is not None
        delay = self.random.choice((0.01, 0.3, 2.0, 20.0, 90.0))
        key = self.random.choice((*KEYS, None, None))
        now = self.world.clock.now_ms()
        sent = self.log.new(
            topic,
            "delayed",
            self.filler(),
            key=key,
            headers=self.headers(),
            due_ms=now + int(delay * 1000),
        )
        columns = self.world.columns(
            [sent.value], keys=[key] if key else None, headers=sent.headers
        )
        publish = Publish(topic, columns, deliver_at=sent.due_ms)

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            self.log.answered([sent], [], error)
            if error is None:
                self.delayed.append((sent, receipts[0].id))

        self.ask(self.world.engine.publish, done, publish)

    def cancel(self) -> None:
        if not self.delayed:
            return
        sent, id = self.delayed.pop(self.random.randrange(len(self.delayed)))
        if sent.places or sent.state != "ok":
            return
        sent.state = "unknown"

        def done(error: HeadraceError | None) -> None:
            if error is None:
                sent.state = "refused"
                if sent.places:
                    raise Violation("invented", f"{sent} was cancelled")
            elif isinstance(error, MessageNotFound):
                sent.state = "ok"  # it was published already, or is just being so

        self.ask(self.world.engine.schedule.cancel, done, id)

    # --- staged commits -----------------------------------------------------------------------
    def stage(self) -> None:
        topic = self.topic(always=True, kept=True)
        if topic is None:
            return
        name = self.random.choice(("job", "nightly"))
        commit = self.drivers.get(name)
        if commit is None:
            number = self.numbers[name] = self.numbers.get(name, -1) + 1
            commit = self.drivers[name] = Commit(name, number, [])
        if commit.invoked:
            return
        sents = [
            self.log.new(topic, "staged", self.filler(), commit=commit)
            for _ in range(self.random.choice((1, 4, 12)))
        ]
        batch = encode(self.world.columns([sent.value for sent in sents]))
        partition = self.random.randrange(self.partitions(topic))
        waiting = commit

        def done(piece: str | None, error: HeadraceError | None) -> None:
            if error is None and piece is not None and not waiting.invoked:
                waiting.pieces.append(piece)
                waiting.records += sents
            else:
                for sent in sents:
                    sent.state = "refused"

        engine = self.world.engine
        owned = {"name": name, "number": commit.number} if self.random.random() < 0.5 else {}
        self.ask(lambda done: engine.staging.stage(topic, partition, batch, done, **owned), done)

    def commit(self) -> None:
        if not self.drivers:
            return
        commit = self.drivers[self.random.choice(list(self.drivers))]
        if commit.pieces and commit.state != "calling":
            self._commit(commit)

    def _commit(self, commit: Commit) -> None:
        if not commit.invoked:
            commit.invoked = True
            self.log.commits.append(commit)
        name = commit.name
        before, commit.state = commit.state, "calling"

        def done(first: bool, error: HeadraceError | None) -> None:
            if error is None:
                commit.state = "ok"
                for sent in commit.records:
                    sent.state = "ok"
                if first and before == "ok":
                    raise Violation("duplicate", f"{commit} was made again")
                self.drivers.pop(name, None)
            elif before == "ok":
                commit.state = "ok"
            elif isinstance(error, MessageNotFound):
                raise Violation("lost", f"a staged batch of {commit}: {error}")
            else:
                commit.state = "unknown" if before == "unknown" else "asked"
                if isinstance(error, OutcomeUnknown) or error.code in ("closed", "broker_failed"):
                    commit.state = "unknown"

        self.ask(self.world.engine.staging.commit, done, name, commit.number, commit.pieces)

    def commit_again(self) -> None:
        """A driver that does not know repeats its commit: nothing changes."""
        made = [commit for commit in self.log.commits if commit.state == "ok"]
        if made:
            self._commit(self.random.choice(made))

    def abort(self) -> None:
        names = [n for n, c in self.drivers.items() if not c.invoked and c.pieces]
        if not names:
            return
        name = self.random.choice(names)
        commit = self.drivers.pop(name)
        for sent in commit.records:
            sent.state = "refused"
        self.ask(self.world.engine.staging.abort, lambda error: None, commit.pieces)

    # --- members ----------------------------------------------------------------------------
    def group(self) -> GroupOracle:
        return self.random.choice(self.groups)

    def join(self) -> None:
        group = self.group()
        if len(group.members) < 4:
            group.join(self.random.choice((1, 3, 10, 100)), auto_ack=self.random.random() < 0.05)

    def leave(self) -> None:
        group = self.group()
        if group.members:
            group.leave(self.random.choice(group.members), count=self.random.random() < 0.6)

    def settle(self) -> None:
        """A member does something with some of what it has."""
        group = self.group()
        for _ in range(self.random.choice((1, 3, 10, 30))):
            if not group.out:
                return
            place = self.random.choice(sorted(group.out))
            what = self.random.random()
            if what < 0.55:
                group.ack(place)
            elif what < 0.65:
                group.ack_lease(place)
            elif what < 0.72:
                group.ack_up_to(place)
            elif what < 0.88:
                group.nack(place, self.random.choice((None, None, 0.0, 0.2, 30.0)))
            elif what < 0.93:
                group.release(place)
            else:
                group.extend(place, self.random.choice((None, 0.5, 40.0)))
            if self.random.random() < 0.3:
                self.world.run()

    def settle_late(self) -> None:
        group = self.group()
        if group.ended:
            group.settle_again(self.random.choice(group.ended))

    def seek(self) -> None:
        group = self.group()
        subscription = group.subscription
        if not subscription.cursors:
            return
        topic, partition = self.random.choice(sorted(subscription.cursors))
        log = self.world.engine.partition(topic, partition).log
        target = self.random.randint(log.start_offset, log.end_offset)
        where: Any = {log.start_offset: "earliest", log.end_offset: "latest"}.get(target, target)
        moved = group.seek(topic, partition, target)

        def done(error: HeadraceError | None) -> None:
            if error is None:
                group.seek_answered(**moved)

        engine = self.world.engine
        self.ask(
            lambda done: engine.seek(subscription, where, done, topic=topic, partition=partition),
            done,
        )

    def move_along(self) -> None:
        """A reader that keeps its own position says how far it has come."""
        group = self.group()
        subscription = group.subscription
        if not subscription.cursors or self.random.random() < 0.5:
            return
        topic, partition = self.random.choice(sorted(subscription.cursors))
        log = self.world.engine.partition(topic, partition).log
        target = self.random.randint(log.start_offset, log.end_offset)
        group.advance(topic, partition, target)
        self.ask(
            positions.advance,
            lambda error: None,
            self.world.engine,
            subscription,
            {topic: {partition: target}},
        )

    def flush(self) -> None:
        known = [(group, group.flushing()) for group in self.groups]

        def done(error: HeadraceError | None) -> None:
            if error is None:
                for group, was in known:
                    group.flushed(*was)

        self.ask(self.world.engine.state.flush, done)

    # --- operators --------------------------------------------------------------------------
    def grow(self) -> None:
        topic = self.topic()
        assert topic is not None
        count = self.partitions(topic)

        def done(*_: object) -> None:  # publishes went on while the disk made the partition
            for group in self.groups:
                if any(name == topic for name, _ in group.subscription.cursors):
                    group.grown(topic)

        if count < PARTITIONS_MAX and self.world.engine.topics.when_unchanged(topic) is None:
            self.world.engine.change_topic(topic, {"partitions": count + 1}, done)

    def listed(self, group: GroupOracle) -> list[DeadLetter]:
        """The dead letters of a group, each known to the oracle."""
        engine, topic = self.world.engine, group.name + DEAD_LETTER_SUFFIX
        if engine.topics.get(topic) is None:
            return []
        self.log.look_at(topic, 0)
        try:
            found = engine.dead_letters.listing(group.name, limit=1000).collect()
        except OSError:  # a planned fault
            return []
        return [letter for letter in found if (topic, letter.offset) in self.log.letters]

    def redrive(self) -> None:
        group = self.group()
        letters = self.world.engine.dead_letters
        name, listed = group.name, self.listed(group)
        if not listed:
            return
        to = self.random.choice(("subscription", "topic"))
        chosen = [letter for letter in listed if self.random.random() < 0.7]
        for letter in chosen:
            sent = self.log.letters[name + DEAD_LETTER_SUFFIX, letter.offset].sent
            sent.copies += 1
            sent.redriven_for.add(letter.subscription if to == "subscription" else None)
        self.ask(
            lambda done: letters.redrive(
                name, done, offsets=[letter.offset for letter in chosen], to=to
            ),
            lambda count, error: None,
        )

    def purge(self) -> None:
        group = self.group()
        letters = self.world.engine.dead_letters
        listed = [letter.offset for letter in self.listed(group)]
        if listed:
            offsets = self.random.sample(listed, self.random.randint(1, len(listed)))
            self.ask(letters.purge, lambda count, error: None, group.name, offsets)

    def edit(self) -> None:
        group = self.group()
        letters, listed = self.world.engine.dead_letters, self.listed(group)
        if not listed:
            return
        letter = self.random.choice(listed)
        message = letter.message
        sent = self.log.new(
            message.topic,
            "edited",
            self.filler(),
            key=message.key,
            headers=dict(message.headers) or None,
            copies=0,
        )
        sent.state = "unknown"
        self.ask(
            letters.edit, lambda offset, error: None, group.name, letter.offset, sent.value, None
        )

    def retain(self) -> None:
        self.log.look()
        self.world.engine.retention.run()

    # --- after a restart ------------------------------------------------------------------------
    def restarted(self) -> None:
        self.open_calls = 0
        for producer in self.producers:
            producer.busy = False
        for name, commit in list(self.drivers.items()):
            if not commit.invoked and self.random.random() < 0.5:
                del self.drivers[name]  # the job is gone
                for sent in commit.records:
                    sent.state = "refused"
            elif commit.state == "calling":
                commit.state = "unknown"

    def finish(self) -> None:
        """Clients send again what they have no answer for."""
        for producer in self.producers:
            if producer.pending is not None and not producer.busy:
                self._send(producer, producer.pending)
        for commit in list(self.drivers.values()):
            if commit.invoked and commit.state != "calling":
                self._commit(commit)


def done_with_error(done: Callable[..., None], error: HeadraceError) -> None:
    """A refusal that was raised, told like one that was answered."""
    names = done.__code__.co_argcount if hasattr(done, "__code__") else 1
    done(*[[] if names == 2 else 0] * (names - 1), error)


STEPS: dict[str, Callable[[Clients], None]] = {
    "publish": Clients.publish,
    "publish_once": Clients.publish_once,
    "produce": Clients.produce,
    "take_over": Clients.take_over,
    "delay": Clients.delay,
    "cancel": Clients.cancel,
    "stage": Clients.stage,
    "commit": Clients.commit,
    "commit_again": Clients.commit_again,
    "abort": Clients.abort,
    "join": Clients.join,
    "leave": Clients.leave,
    "settle": Clients.settle,
    "settle_late": Clients.settle_late,
    "seek": Clients.seek,
    "move_along": Clients.move_along,
    "flush": Clients.flush,
    "grow": Clients.grow,
    "redrive": Clients.redrive,
    "purge": Clients.purge,
    "edit": Clients.edit,
    "retain": Clients.retain,
}
"""The name of each step, and what it does."""
