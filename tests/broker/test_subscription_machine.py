"""A subscription in any order of events against a simple model.

The model is a set of what is done, what is out with whom, and how often each message has failed. What
a crash may forget is kept apart from what was durable before it: after a flush, an acknowledged message
never comes again, and a failed attempt is never forgotten.
"""

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.broker import positions
from headrace.broker.delivery import Delivery, Member
from headrace.broker.subscription import Subscription
from headrace.errors import StaleDelivery
from headrace.model import Message
from tests.broker.rig import GROUP, TOPIC, Inbox, Rig

Place = tuple[int, int]  # partition, offset
ACK_TIMEOUT = 10.0
PICK = st.integers(0, 1_000_000)


def place_of(message: Message) -> Place:
    return message.partition, message.offset


class Watched(Inbox):
    """A member's sink that tells the machine of every delivery."""

    def __init__(self, machine: "SubscriptionMachine", prefetch: int):
        super().__init__()
        self._machine = machine
        self.subscription = machine.group
        self.member = Member("member", self, prefetch)

    def deliver(self, delivery: Delivery) -> None:
        before = len(self.messages)
        super().deliver(delivery)
        for message in self.messages[before:]:
            self._machine.delivered(self, message)


class SubscriptionMachine(RuleBasedStateMachine):
    @initialize(
        partitions=st.integers(1, 3),
        max_deliveries=st.sampled_from([0, 1, 3]),
        ordering=st.sampled_from(["none", "key"]),
        seed=st.integers(0, 1 << 30),
    )
    def start(self, partitions: int, max_deliveries: int, ordering: str, seed: int) -> None:
        self.rig = Rig(topic={"partitions": partitions, "segment_bytes": 4096}, seed=seed)
        self.rig.subscribe(
            ordering=ordering,
            ack_timeout=ACK_TIMEOUT,
            backoff=0.5,
            backoff_max=4.0,
            max_deliveries=max_deliveries,
        )
        self.partitions = partitions
        self.max_deliveries = max_deliveries
        self.members: list[Watched] = []
        self.published: set[Place] = set()
        self.seen: set[Place] = set()
        self.excused: set[Place] = set()
        """A seek went past these."""
        self.out: dict[Place, tuple[Watched, Message]] = {}
        self.done: set[Place] = set()
        self.unsure: set[Place] = set()
        """Done, but a crash came before that was durable: they may come again."""
        self.failures: dict[Place, int] = {}
        self.failures_least: dict[Place, int] = {}
        self.durable_done: set[Place] = set()
        self.durable_failures: dict[Place, int] = {}
        self.settled: list[Message] = []
        self.deliveries: Counter[Place] = Counter()
        """How often each was really delivered; one that was not begun does not count."""

    @property
    def group(self) -> Subscription:
        return self.rig.engine.subscription(GROUP)

    # --- what the engine does ---------------------------------------------------------------
    def delivered(self, inbox: Watched, message: Message) -> None:
        place = place_of(message)
        assert place in self.published, f"{message} was never published"
        assert place not in self.done or place in self.unsure, f"{message} was done"
        before = self.out.pop(place, None)
        if before is not None:
            # Not settled by us: it must have ended by its deadline.
            assert not before[1].lease.is_out(message.offset), f"{message} is out twice"
            self.failed(place)
        least, most = self.failures_least.get(place, 0), self.failures.get(place, 0)
        assert least < message.attempt <= most + 1, f"attempt {message.attempt} of {message}"
        self.failures[place] = self.failures_least[place] = message.attempt - 1
        self.deliveries[place] += 1
        assert not self.max_deliveries or self.deliveries[place] <= self.max_deliveries, message
        self.done.discard(place)
        self.unsure.discard(place)
        self.seen.add(place)
        self.out[place] = (inbox, message)

    def failed(self, place: Place) -> None:
        self.failures[place] = self.failures.get(place, 0) + 1
        self.failures_least[place] = self.failures_least.get(place, 0) + 1

    def reconcile(self) -> None:
        """What ended by a deadline has failed; what failed too often is done once it is buried."""
        for place, (_, message) in list(self.out.items()):
            if not message.lease.is_out(message.offset):
                del self.out[place]
                self.settled.append(message)
                self.failed(place)
        if self.max_deliveries:
            for place, count in self.failures.items():
                if count >= self.max_deliveries and place not in self.out:
                    partition, offset = place
                    if self.group.cursors[(TOPIC, partition)].is_done(offset):
                        self.done.add(place)

    def settle(self) -> None:
        self.rig.run()
        self.reconcile()

    # --- what happens -----------------------------------------------------------------------
    @rule(count=st.integers(1, 30), partition=PICK, keys=st.lists(st.sampled_from("abc")))
    def publish(self, count: int, partition: int, keys: list[str]) -> None:
        partition %= self.partitions
        named = [keys[n] if n < len(keys) else None for n in range(count)] if keys else None
        first = self.end_of(partition)
        self.published |= {(partition, offset) for offset in range(first, first + count)}
        receipt = self.rig.publish(
            TOPIC, *[b"%d" % n for n in range(count)], keys=named, partition=partition
        )
        assert receipt.offset == first
        self.reconcile()

    @rule(prefetch=st.integers(1, 12))
    def join(self, prefetch: int) -> None:
        if len(self.members) < 5:
            inbox = Watched(self, prefetch)
            self.members.append(inbox)
            self.group.join(inbox.member)
            self.settle()

    @precondition(lambda self: self.members)
    @rule(pick=PICK, count=st.booleans())
    def leave(self, pick: int, count: bool) -> None:
        inbox = self.members.pop(pick % len(self.members))
        for place, (holder, message) in list(self.out.items()):
            if holder is inbox:
                del self.out[place]
                self.settled.append(message)
                if count:
                    self.failed(place)
                else:
                    self.deliveries[place] -= 1
        inbox.leave(count_attempt=count)
        self.settle()

    def pick(self, pick: int) -> tuple[Place, Watched, Message]:
        place = sorted(self.out)[pick % len(self.out)]
        return place, *self.out[place]

    @precondition(lambda self: self.out)
    @rule(pick=PICK)
    def ack(self, pick: int) -> None:
        place, inbox, message = self.pick(pick)
        inbox.ack(message)
        self.end(place)
        self.settle()

    def end(self, place: Place) -> None:
        _, message = self.out.pop(place)
        self.settled.append(message)
        self.done.add(place)

    @precondition(lambda self: self.out)
    @rule(pick=PICK)
    def ack_lease(self, pick: int) -> None:
        _, _, message = self.pick(pick)
        mine = [p for p, (_, other) in self.out.items() if other.lease is message.lease]
        assert self.group.ack_lease(message.lease.id) == len(mine)
        for place in mine:
            self.end(place)
        self.settle()

    @precondition(lambda self: self.out)
    @rule(pick=PICK)
    def ack_up_to(self, pick: int) -> None:
        (partition, offset), inbox, message = self.pick(pick)
        mine = [
            place
            for place, (holder, _) in self.out.items()
            if holder is inbox and place[0] == partition and place[1] <= offset
        ]
        assert self.group.ack_up_to(message.lease.id, offset) == len(mine)
        for place in mine:
            self.end(place)
        self.settle()

    @precondition(lambda self: self.out)
    @rule(pick=PICK, delay=st.sampled_from([None, 0.0, 0.1, 3.0, 30.0]))
    def nack(self, pick: int, delay: float | None) -> None:
        place, inbox, message = self.pick(pick)
        del self.out[place]
        self.settled.append(message)
        self.failed(place)
        inbox.nack(message, delay)
        self.settle()

    @precondition(lambda self: self.out)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        place, _, message = self.pick(pick)
        del self.out[place]
        self.settled.append(message)
        self.deliveries[place] -= 1
        self.group.release(message.lease.id, message.offset)
        self.settle()

    @precondition(lambda self: self.out)
    @rule(pick=PICK, seconds=st.sampled_from([None, 0.5, 60.0]))
    def extend(self, pick: int, seconds: float | None) -> None:
        _, _, message = self.pick(pick)
        self.group.extend(message.lease.id, seconds)

    @precondition(lambda self: self.settled)
    @rule(pick=PICK)
    def stale(self, pick: int) -> None:
        message = self.settled[pick % len(self.settled)]
        for late in (self.group.ack, self.group.nack, self.group.release, self.group.ack_up_to):
            try:
                late(message.lease.id, message.offset)
            except StaleDelivery:
                continue
            raise AssertionError(f"{late.__name__} of {message} was accepted")

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.5, 2.0, 5.0, ACK_TIMEOUT, 40.0]))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)
        self.reconcile()

    @rule(partition=PICK, where=st.floats(0, 1))
    def seek(self, partition: int, where: float) -> None:
        partition %= self.partitions
        end = self.rig.log(TOPIC, partition).end_offset
        target = round(where * end)
        for place in [place for place in self.out if place[0] == partition]:
            self.settled.append(self.out.pop(place)[1])
        mine = {place for place in self.published if place[0] == partition}
        self.done -= mine
        self.unsure -= mine
        for known in (self.failures, self.failures_least):
            for place in mine & known.keys():
                del known[place]
        for place in mine:
            del self.deliveries[place]
        past = {place for place in mine if place[1] < target}
        self.done |= past
        self.excused |= past
        self.rig.wait(self.rig.engine.seek, self.group, target, partition=partition)
        self.reconcile()
        # Durable when it is answered, whatever was durable there before.
        self.durable_done = {p for p in self.durable_done if p[0] != partition} | past
        self.durable_failures = {
            p: n for p, n in self.durable_failures.items() if p[0] != partition
        }

    @rule(partition=PICK, where=st.floats(0, 1))
    def move_along(self, partition: int, where: float) -> None:
        """A reader that keeps its own position says how far it has come."""
        partition %= self.partitions
        target = round(where * self.end_of(partition))
        past = {p for p in self.published if p[0] == partition and p[1] < target}
        for place in past & self.out.keys():
            self.settled.append(self.out.pop(place)[1])
        for known in (self.failures, self.failures_least):
            for place in past & known.keys():
                del known[place]
        self.done |= past
        self.unsure -= past
        self.excused |= past
        done, failures = self.done - self.unsure, dict(self.failures_least)
        place_of_topic = {TOPIC: {partition: target}}
        self.rig.wait(positions.advance, self.rig.engine, self.group, place_of_topic)
        self.durable_done, self.durable_failures = done, failures
        self.reconcile()

    @rule()
    def flush(self) -> None:
        done, failures = self.done - self.unsure, dict(self.failures_least)
        self.rig.flush()
        self.durable_done, self.durable_failures = done, failures
        self.reconcile()

    @rule()
    def restart(self) -> None:
        """In good order: nothing is forgotten; what was out is out no more."""
        self.deliveries.subtract(self.out.keys())
        self.rig.reopen()
        self.began_anew()
        self.durable_done = self.done - self.unsure
        self.durable_failures = dict(self.failures_least)

    @rule(seed=st.integers(0, 1 << 30), ordered=st.booleans(), killed=st.booleans())
    def crash(self, seed: int, ordered: bool, killed: bool) -> None:
        """What was not flushed may be forgotten: acks, and failed attempts. What may have been out counts
        as delivered once more; nothing is delivered too often."""
        for place in self.published:
            self.failures[place] = self.failures.get(place, 0) + 1
        if self.max_deliveries == 1:  # what may have been out becomes a dead letter
            self.excused |= self.published
        if killed:
            self.rig.kill()
        else:
            self.rig.crash(Random(seed), ordered=ordered)
        self.began_anew()
        self.unsure |= self.done - self.durable_done
        self.failures_least = dict(self.durable_failures)

    def began_anew(self) -> None:
        self.members.clear()
        self.settled += [message for _, message in self.out.values()]
        self.out.clear()

    # --- what must hold ---------------------------------------------------------------------
    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert self.group.in_flight() == len(self.out)
        for inbox in self.members:
            assert inbox.member is not None
            mine = sum(holder is inbox for holder, _ in self.out.values())
            assert inbox.member.in_flight == mine <= inbox.member.prefetch
            assert bool(inbox.member.leases) == bool(mine)
            assert (inbox.member.in_flight_bytes > 0) == bool(mine)

    def teardown(self) -> None:
        """At the end everything is delivered, and nothing is stuck."""
        if not hasattr(self, "rig"):
            return
        last = Watched(self, 10_000)
        self.members.append(last)
        self.group.join(last.member)
        idle = 0
        while self.group.lag() and idle < 40:
            self.settle()
            idle += not self.out
            for place, (inbox, message) in list(self.out.items()):
                inbox.ack(message)
                self.end(place)
            if not self.out:
                self.rig.advance(5 if idle else 0.01)
                self.reconcile()
        assert self.group.lag() == 0, f"{self.group.lag()} are stuck"
        assert self.group.in_flight() == 0
        assert self.published - self.seen - self.excused == set()
        places = {(p, offset) for p in range(self.partitions) for offset in range(self.end_of(p))}
        assert places == self.published

    def end_of(self, partition: int) -> int:
        return int(self.rig.log(TOPIC, partition).end_offset)


TestSubscriptionMachine = SubscriptionMachine.TestCase
TestSubscriptionMachine.settings = settings(max_examples=60, stateful_step_count=50)
