"""The oracle of one subscription: what may be delivered now, and what must be before the end.

==================  ====================================================================================
invented            delivered, but not in the log, or meant for another subscription
expired             delivered after its time to live
done                delivered again after an ack that is still known
out twice           delivered while another member has it
attempt             its number is not that of the failures so far, or above ``max_deliveries``
out of turn         ordered by key: before an earlier message of its key was done
stale               a settlement of an ended delivery was accepted, or of a running one refused
skipped             never delivered, and nothing explains it
dead letter         stored for a message that had not failed often enough, or doubled for no reason
==================  ====================================================================================

A crash forgets what was not flushed: acks (``unsure``), and failures (``failures_least``). After a crash of a
broker whose journal found no room, the deliveries that it made need not count. A seek makes everything behind it
new, and excuses what lies before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.broker.delivery import Delivery, Member
from headrace.broker.subscription import Subscription
from headrace.errors import StaleDelivery
from headrace.model import Message, pattern_matches
from tests.broker.rig import Inbox
from tests.faults.simulation.logs import LogOracle, Place, StoredRecord, Violation

if TYPE_CHECKING:
    from tests.faults.simulation.world import SimulatedMachine


def place_of(message: Message) -> Place:
    return message.topic, message.partition, message.offset


@dataclass(eq=False)
class Out:
    """A delivery that is not settled."""

    member: WatchedMember
    message: Message
    lease: int
    attempt: int


class WatchedMember(Inbox):
    """A member that tells its group's oracle of every delivery."""

    def __init__(self, group: GroupOracle, prefetch: int, *, auto_ack: bool = False):
        super().__init__()
        self.group = group
        self.member = Member("member", self, prefetch, auto_ack)

    def deliver(self, delivery: Delivery) -> None:
        for message in delivery.messages(self):
            self.group.delivered(self, message)


@dataclass(eq=False)
class GroupOracle:
    world: SimulatedMachine
    log: LogOracle
    name: str
    pattern: str
    settings: dict[str, Any]
    members: list[WatchedMember] = field(default_factory=list)
    out: dict[Place, Out] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    """Lease -> when it ends."""
    ended: list[Message] = field(default_factory=list)
    """Deliveries that are over: to settle them again is refused."""
    seen: set[Place] = field(default_factory=set)
    excused: set[Place] = field(default_factory=set)
    """A seek, an advance or the start went past these."""
    done: set[Place] = field(default_factory=set)
    unsure: set[Place] = field(default_factory=set)
    """Done, but a crash came before that was durable: they may come again."""
    durable_done: set[Place] = field(default_factory=set)
    failures: dict[Place, int] = field(default_factory=dict)
    failures_least: dict[Place, int] = field(default_factory=dict)
    durable_failures: dict[Place, int] = field(default_factory=dict)
    handed: dict[Place, int] = field(default_factory=dict)
    """How often it was delivered, but for deliveries that were given back and not begun."""
    handed_before: dict[Place, int] = field(default_factory=dict)
    """The same, at the last start."""
    crashes: int = 0
    seeks: int = 0
    cross: dict[str, bool] = field(default_factory=dict)
    """Topic -> whether it had read everything whenever partitions were added: then keys keep their order."""
    _moved: dict[tuple[str, int], int] = field(default_factory=dict)
    """Partition -> how often it was moved: an earlier flush says nothing about it."""
    _unanswered: dict[tuple[str, int], tuple[set[Place], dict[Place, int]]] = field(
        default_factory=dict
    )
    """Partition -> what was done, and what had failed, before a seek that was not answered yet."""
    _last: dict[tuple[str, int, bytes], int] = field(default_factory=dict)
    _letters: dict[tuple[Place, int], int] = field(default_factory=dict)
    """(origin, number of the message) -> its letters. After a restart a topic in memory begins anew, and
    another message has the offset."""
    _letters_read: set[tuple[str, int]] = field(default_factory=set)

    @property
    def max_deliveries(self) -> int:
        return int(self.settings["max_deliveries"])

    @property
    def ordered(self) -> bool:
        return bool(self.settings["ordering"] == "key")

    @property
    def subscription(self) -> Subscription:
        return self.world.engine.subscription(self.name, self.pattern)

    def _wrong(self, kind: str, text: str) -> Violation:
        return Violation(kind, f"{self.name} over {self.pattern}: {text}")

    # --- deliveries -------------------------------------------------------------------------
    def delivered(self, inbox: WatchedMember, message: Message) -> None:
        self.time_passed()
        place = place_of(message)
        self.log.look_at(*place[:2])
        stored = self.log.known.get(place[:2], {}).get(place[2])
        if stored is None or stored.sent.value != message.value or stored.sent.key != message.key:
            raise self._wrong("invented", f"{message}, where {stored} stands")
        if stored.target not in (None, self.name):
            raise self._wrong("invented", f"{message} is for {stored.target}")
        now_ms, now = self.world.clock.now_ms(), self.world.loop.time()
        if self.has_expired(place, stored, now_ms):
            raise self._wrong("expired", f"{message} at {now_ms}: {stored}")
        if place in self.done and place not in self.unsure:
            raise self._wrong("done", f"{message} was done")
        if place in self.out:
            left = self.deadlines[self.out[place].lease] - now
            raise self._wrong("out twice", f"{message}, {left} s left")
        # After a crash the broker counts what may have been out as one more failure.
        least, most = self.failures_least.get(place, 0), self.failures.get(place, 0) + self.crashes
        if not least < message.attempt <= most + 1:
            raise self._wrong(
                "attempt", f"{message.attempt} of {message}, {least} to {most} failed"
            )
        handed = self.handed[place] = self.handed.get(place, 0) + 1
        if self.max_deliveries and max(message.attempt, handed) > self.max_deliveries:
            raise self._wrong("attempt", f"delivery {handed}, attempt {message.attempt}: {message}")
        self.failures[place] = self.failures_least[place] = message.attempt - 1
        if self.ordered and message.key is not None:
            self._check_turn(place, message.key)
        self.done.discard(place)
        self.unsure.discard(place)
        self.seen.add(place)
        if message.lease is None:
            self.done.add(place)
            return
        lease = message.lease.id
        self.deadlines.setdefault(lease, now + self.settings["ack_timeout"])
        self.out[place] = Out(inbox, message, lease, message.attempt)

    def has_expired(self, place: Place, stored: StoredRecord, now_ms: int) -> bool:
        ends = stored.expires_ms
        ttl = self.log.topics[place[0]].get("message_ttl_ms")
        if not ends and ttl:
            ends = stored.timestamp + ttl
        return bool(ends) and ends <= now_ms

    def _check_turn(self, place: Place, key: bytes) -> None:
        topic, partition, offset = place
        last = self._last.get((topic, partition, key), -1)
        if offset < last:
            raise self._wrong("out of turn", f"{place} of {key!r} after {last}")
        self._last[topic, partition, key] = offset
        sent_at = self.log.known[topic, partition][offset].sent.sent_at
        for other in self.log.by_key[topic, key]:
            if other == place:
                continue
            if other[1] == partition:
                if other[2] > offset:
                    continue
            else:
                earlier = self.log.known[other[:2]][other[2]].sent
                answered = earlier.answered_at
                if (
                    not self.cross.get(topic, True)
                    or answered is None
                    or answered > sent_at
                    or earlier.kind not in ("plain", "producer")
                    or len(earlier.places) > 1
                    or self.log.known[topic, partition][offset].sent.kind == "delayed"
                ):
                    continue
            if not self.is_finished(other):
                raise self._wrong("out of turn", f"{place} of {key!r} while {other} is not done")

    def is_finished(self, place: Place) -> bool:
        """Whether nothing more is to be done with a message that stands in the log."""
        # What has expired once stays done when the clock is set back.
        now_ms = max(self.world.highest_ms, self.world.clock.now_ms())
        if place in self.out:
            return False
        if place in self.done or place in self.excused:
            return True
        stored = self.log.known[place[:2]][place[2]]
        if stored.target not in (None, self.name) or self.has_expired(place, stored, now_ms):
            return True
        return self.is_dead(place)

    def is_dead(self, place: Place) -> bool:
        """Whether it has failed too often, or may have when the broker crashed, and its letter is stored."""
        often = self.failures.get(place, 0) + self.crashes >= self.max_deliveries
        return bool(self.max_deliveries and often and self._find_letter(place))

    def _find_letter(self, place: Place) -> bool:
        engine = self.world.engine
        name = engine.dead_letters.topic_name(self.subscription, place[0])
        if engine.topics.get(name) is not None:
            self.log.look_at(name, 0)
        return any(
            letter.origin == place and letter.group == self.name
            for letter in self.log.letters.values()
        )

    def _end(self, place: Place, *, failed: bool, begun: bool = True) -> Out:
        out = self.out.pop(place)
        if not begun:
            self.handed[place] -= 1
        self.ended.append(out.message)
        del self.ended[:-50]
        if failed:
            for known in (self.failures, self.failures_least):
                known[place] = known.get(place, 0) + 1
        return out

    def time_passed(self) -> None:
        """What ended by its deadline has failed."""
        now = self.world.loop.time()
        for place, out in list(self.out.items()):
            if self.deadlines[out.lease] <= now:
                self._end(place, failed=True)

    # --- what members do ----------------------------------------------------------------------
    def join(self, prefetch: int, *, auto_ack: bool = False) -> WatchedMember:
        inbox = WatchedMember(self, prefetch, auto_ack=auto_ack)
        inbox.subscription = self.subscription
        self.members.append(inbox)
        assert inbox.member is not None
        inbox.subscription.join(inbox.member)
        return inbox

    def leave(self, inbox: WatchedMember, *, count: bool) -> None:
        self.members.remove(inbox)
        for place, out in list(self.out.items()):
            if out.member is inbox:
                self._end(place, failed=count, begun=count)
        inbox.leave(count_attempt=count)

    def ack(self, place: Place) -> None:
        out = self.out[place]
        self._settle(out, lambda: self.subscription.ack(out.lease, place[2]))
        self._done(place)

    def _settle(self, out: Out, call: Any) -> Any:
        try:
            return call()
        except StaleDelivery as error:
            raise self._wrong("stale", f"{out} is running and was refused: {error}") from error

    def _done(self, place: Place) -> None:
        self._end(place, failed=False)
        self.done.add(place)

    def ack_lease(self, place: Place) -> None:
        out = self.out[place]
        mine = [p for p, other in self.out.items() if other.lease == out.lease]
        count = self._settle(out, lambda: self.subscription.ack_lease(out.lease))
        if count != len(mine):
            raise self._wrong("stale", f"{count} of {mine} were acknowledged")
        for each in mine:
            self._done(each)

    def ack_up_to(self, place: Place) -> None:
        out = self.out[place]
        mine = [
            p
            for p, other in self.out.items()
            if other.member is out.member and p[:2] == place[:2] and p[2] <= place[2]
        ]
        count = self._settle(out, lambda: self.subscription.ack_up_to(out.lease, place[2]))
        if count != len(mine):
            raise self._wrong("stale", f"{count} of {mine} were acknowledged")
        for each in mine:
            self._done(each)

    def nack(self, place: Place, delay: float | None) -> None:
        out = self._end(place, failed=True)
        self._settle(out, lambda: self.subscription.nack(out.lease, place[2], delay, "refused"))

    def release(self, place: Place) -> None:
        out = self._end(place, failed=False, begun=False)
        self._settle(out, lambda: self.subscription.release(out.lease, place[2]))

    def extend(self, place: Place, seconds: float | None) -> None:
        out = self.out[place]
        granted = self._settle(out, lambda: self.subscription.extend(out.lease, seconds))
        self.deadlines[out.lease] = self.world.loop.time() + granted

    def settle_again(self, message: Message) -> None:
        """An ended delivery is refused, whatever is asked for."""
        group = self.subscription
        for late in (group.ack, group.nack, group.release, group.ack_up_to):
            try:
                late(message.lease.id, message.offset)
            except StaleDelivery:
                continue
            raise self._wrong("stale", f"{late.__name__} of {message} was accepted")

    # --- moving -----------------------------------------------------------------------------
    def _places(self, topic: str, partition: int) -> set[Place]:
        return {(topic, partition, offset) for offset in self.log.known.get((topic, partition), {})}

    def _counts(self) -> tuple[dict[Place, int], ...]:
        return (
            self.failures,
            self.failures_least,
            self.durable_failures,
            self.handed,
            self.handed_before,
        )

    def _forget_out(self, where: tuple[str, int], before: int | None = None) -> None:
        for place in [p for p in self.out if p[:2] == where and (before is None or p[2] < before)]:
            self._end(place, failed=False)

    def seek(self, topic: str, partition: int, target: int) -> dict[str, Any]:
        """It is asked for. Returns what :meth:`seek_answered` needs."""
        where = (topic, partition)
        self.seeks += 1
        self._moved[where] = self._moved.get(where, 0) + 1
        self.cross[topic] = False
        self.log.look_at(topic, partition)
        self._forget_out(where)
        mine = self._places(topic, partition)
        past = {place for place in mine if place[2] < target}
        done, failed = self._unanswered.setdefault(where, (set(), {}))
        done |= self.done & mine
        failed |= {place: count for place, count in self.failures.items() if place in mine}
        self.done = (self.done - mine) | past
        self.unsure -= mine
        for known in self._counts():
            for place in mine & known.keys():
                del known[place]
        self.excused |= past
        self.durable_done -= mine
        for key in [key for key in self._last if key[:2] == where]:
            del self._last[key]
        return {"where": where, "moved": self._moved[where], "past": past}

    def seek_answered(self, where: tuple[str, int], moved: int, past: set[Place]) -> None:
        if self._moved[where] == moved:
            self._unanswered.pop(where, None)
            self.durable_done |= past

    def advance(self, topic: str, partition: int, target: int) -> None:
        self.log.look_at(topic, partition)
        past = {place for place in self._places(topic, partition) if place[2] < target}
        self._forget_out((topic, partition), target)
        # Their failures stay known: a crash may forget the advance, and then the broker counts on from them.
        self.done |= past
        self.unsure -= past
        self.excused |= past

    def grown(self, topic: str) -> None:
        """Partitions were added to a topic, just now.

        Keys keep their order over that if the group has read everything, also what is just being stored.
        """
        read = all(
            cursor.next >= cursor.partition.log.end_offset
            for (name, _), cursor in self.subscription.cursors.items()
            if name == topic
        ) and not any(
            sent.topic == topic and sent.answered_at is None for sent in self.log.sent.values()
        )
        self.cross[topic] = self.cross.get(topic, True) and read

    # --- durability ---------------------------------------------------------------------------
    def flushing(self) -> tuple[Any, ...]:
        return set(self.done - self.unsure), dict(self.failures_least), dict(self._moved)

    def flushed(
        self, done: set[Place], failures: dict[Place, int], moved: dict[tuple[str, int], int]
    ) -> None:
        """All that was so when the flush was asked for is durable, unless it was moved since."""

        def same(place: Place) -> bool:
            return self._moved.get(place[:2], 0) == moved.get(place[:2], 0)

        self.durable_done |= {place for place in done if same(place)}
        for place, count in failures.items():
            if same(place):
                self.durable_failures[place] = max(count, self.durable_failures.get(place, 0))

    def stopping(self) -> None:
        """The broker is about to stop in good order.

        It takes back what is out, and does not count it. It also takes it back when the disk refuses
        something later in the stop (the note that the stop was clean): the members were let go before.
        """
        for place in list(self.out):
            self._end(place, failed=False, begun=False)

    def restarted(
        self, *, clean: bool, interrupted: bool, shorter: dict[tuple[str, int], int]
    ) -> None:
        """The broker began anew. After a clean stop nothing is forgotten.

        ``interrupted``: one start or more did not come to its end.
        """
        self.crashes += interrupted
        for place in list(self.out):
            self._end(place, failed=False)
        self.members.clear()
        self.deadlines.clear()
        self._last.clear()
        self.cross = dict.fromkeys(self.log.topics, False)
        if clean:
            self.durable_done = self.done - self.unsure
            self.durable_failures = dict(self.failures_least)
        else:
            self.crashes += 1
            for done, failed in self._unanswered.values():  # it stands where it stood, or not
                self.done |= done
                for place, count in failed.items():
                    self.failures[place] = max(count, self.failures.get(place, 0))
            self.unsure |= self.done - self.durable_done
            self.failures_least = dict(self.durable_failures)
            if self.world.uncounted:
                before = self.handed_before
                self.handed = {p: min(n, before.get(p, 0)) for p, n in self.handed.items()}
        self._unanswered.clear()
        for where, end in shorter.items():
            self._lose(where, end)
        self.handed_before = dict(self.handed)

    def _lose(self, where: tuple[str, int], end: int) -> None:
        self._moved[where] = self._moved.get(where, 0) + 1
        for places in (self.seen, self.done, self.unsure, self.durable_done, self.excused):
            gone = {p for p in places if p[:2] == where and p[2] >= end}
            places -= gone
        for known in self._counts():
            for place in [p for p in known if p[:2] == where and p[2] >= end]:
                del known[place]
        # The subscription may have been beyond the end, and begins there: what it had done before
        # it counts as before, but the bits beyond its position are gone.
        self.unsure |= {p for p in self.done if p[:2] == where}
        for known in (self.durable_failures, self.failures_least, self.handed):
            for place in [p for p in known if p[:2] == where]:
                del known[place]

    # --- dead letters -------------------------------------------------------------------------
    def check_letters(self) -> None:
        for where, letter in self.log.letters.items():
            if letter.group != self.name or where in self._letters_read:
                continue
            if not pattern_matches(self.pattern, letter.origin[0]):
                continue
            self._letters_read.add(where)
            if letter.sent.kind == "edited":
                continue
            if not self.max_deliveries or letter.attempts < self.max_deliveries:
                raise self._wrong("dead letter", f"{letter} after {letter.attempts} attempts")
            which = (letter.origin, letter.sent.number)
            count = self._letters[which] = self._letters.get(which, 0) + 1
            # A letter that was redriven to a topic that began anew may come to stand at the same offset.
            redriven = letter.sent.copies if self.log.is_volatile(letter.origin[0]) else 0
            if count > 1 + self.crashes + self.seeks + redriven:
                raise self._wrong("dead letter", f"{count} letters of {letter.origin}")

    # --- the end --------------------------------------------------------------------------------
    def check_idle(self) -> str | None:
        """None when nothing is left to be done; else what is."""
        group = self.subscription
        if group.lag():
            return f"{self.name} lags by {group.lag()}: {group.statistics()}"
        if group.in_flight() or self.out:
            return f"{self.name} has {group.in_flight()} in flight, expected {len(self.out)}"
        if group.statistics()["waiting_for_retry"]:
            return f"{self.name}: {group.statistics()['waiting_for_retry']} wait for a retry"
        return None

    def finish(self) -> None:
        """Everything has arrived: was each message delivered, or is there a reason why not?"""
        self.check_letters()
        now_ms = self.world.highest_ms
        for (topic, partition), known in self.log.known.items():
            if not pattern_matches(self.pattern, topic):
                continue
            for offset, stored in known.items():
                place = (topic, partition, offset)
                if place in self.seen or place in self.excused:
                    continue
                if stored.target not in (None, self.name):
                    continue
                if self.has_expired(place, stored, now_ms):
                    continue
                if self.crashes and self._find_letter(place):
                    continue  # it may have been out when the broker crashed
                raise self._wrong("skipped", f"{place} was never delivered: {stored.sent}")
            for offset in known:
                place = (topic, partition, offset)
                if place in self.seen and place not in self.done and place not in self.excused:
                    if self.has_expired(place, known[offset], now_ms) or self._find_letter(place):
                        continue
                    raise self._wrong("skipped", f"{place} was delivered and never done")
