"""Order by key: one message of a key at a time, in the order of publishing, whatever goes wrong."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import limits
from headrace.broker.delivery import Delivery, Member
from headrace.model import Message
from tests.broker.rig import GROUP, TOPIC, Inbox, Rig

KEYS = [b"a", b"b", b"c", None]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)),
        st.tuples(st.just("join"), st.integers(1, 6)),
        st.tuples(st.just("leave"), st.tuples(st.integers(0, 9), st.booleans())),
        st.tuples(st.just("ack"), st.integers(0, 99)),
        st.tuples(st.just("nack"), st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.5, 7.0]))),
        st.tuples(st.just("release"), st.integers(0, 99)),
        st.tuples(st.just("advance"), st.sampled_from([0.01, 1.0, 5.0, 20.0])),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("seek"), st.integers(0, 1)),
        st.tuples(st.just("skip"), st.tuples(st.integers(0, 1), st.floats(0, 1))),
        st.tuples(st.just("restart"), st.none()),
    ),
    min_size=5,
    max_size=60,
)


class Watch:
    """Sees every delivery and complains about the first one that breaks the order."""

    def __init__(self, rig: Rig):
        self.rig = rig
        self.out: dict[bytes, Message] = {}
        self.completed: dict[bytes, list[int]] = defaultdict(list)
        self.inboxes: list[Inbox] = []

    def join(self, prefetch: int) -> Inbox:
        watch = self

        class Seen(Inbox):
            def deliver(self, delivery: Delivery) -> None:
                before = len(self.messages)
                super().deliver(delivery)
                for message in self.messages[before:]:
                    watch.delivered(message)

        inbox = Seen()
        inbox.subscription = self.rig.engine.subscription(GROUP)
        inbox.member = Member("member", inbox, prefetch)
        self.inboxes.append(inbox)
        inbox.subscription.join(inbox.member)
        self.rig.run()
        return inbox

    def delivered(self, message: Message) -> None:
        key = message.key
        if key is None:
            return
        other = self.out.get(key)
        if other is not None:
            assert not other.lease.is_out(other.offset), f"{other} is out, and so is {message}"
        self.out[key] = message
        group = self.rig.engine.subscription(GROUP)
        cursor = group.cursors[(TOPIC, message.partition)]
        for earlier in self.rig.read(TOPIC, message.partition):
            if earlier.offset < message.offset and earlier.key == key:
                assert cursor.is_done(earlier.offset), f"{earlier} is not done before {message}"

    def held(self) -> list[tuple[Inbox, Message]]:
        return [
            (inbox, message)
            for inbox in self.inboxes
            for message in inbox.messages
            if message.lease.is_out(message.offset)
        ]


@settings(max_examples=300)
@given(STEPS)
def test_one_at_a_time_and_in_order(steps: list[tuple[str, object]]) -> None:
    """Through nacks, timeouts, lost members, dead letters, seeks and restarts."""
    rig = Rig(topic={"partitions": 2})
    rig.subscribe(ordering="key", ack_timeout=10.0, backoff=1.0, max_deliveries=3)
    watch = Watch(rig)
    for kind, argument in steps:
        run(rig, watch, kind, argument)
    rig.workers.hold = False
    rig.workers.release()
    rig.run()
    watch.join(1000)
    for _ in range(60):
        for inbox, message in watch.held():
            inbox.ack(message)
        rig.advance(5)
    group = rig.engine.subscription(GROUP)
    assert group.lag() == 0
    assert group.in_flight() == 0
    assert not group._order.busy
    assert not group._order._parked


def run(rig: Rig, watch: Watch, kind: str, argument: object) -> None:
    held = watch.held()
    match kind, argument:
        case "publish", list(keys):
            rig.send(TOPIC, *[b"x"] * len(keys), keys=keys)
        case "join", int(prefetch):
            watch.join(prefetch)
        case "leave", (int(number), bool(count)) if watch.inboxes:
            watch.inboxes.pop(number % len(watch.inboxes)).leave(count_attempt=count)
        case "ack", int(number) if held:
            inbox, message = held[number % len(held)]
            inbox.ack(message)
        case "nack", (int(number), float(delay)) if held:
            inbox, message = held[number % len(held)]
            inbox.nack(message, delay)
        case "release", int(number) if held:
            inbox, message = held[number % len(held)]
            assert inbox.subscription is not None
            inbox.subscription.release(message.lease.id, message.offset)
        case "advance", float(seconds):
            rig.advance(seconds)
        case "hold", bool(hold):
            rig.workers.hold = hold
            if not hold:
                rig.workers.release()
        case "seek", int(partition):
            rig.ask(
                rig.engine.seek, rig.engine.subscription(GROUP), "earliest", partition=partition
            )
        case "skip", (int(partition), float(where)):
            group = rig.engine.subscription(GROUP)
            cursor = group.cursors[(TOPIC, partition)]
            group.advance(cursor, round(where * rig.log(TOPIC, partition).end_offset))
        case "restart", _:
            rig.workers.hold = False
            rig.workers.release()
            rig.run()
            rig.reopen()
            watch.inboxes.clear()
            watch.out.clear()
    rig.run()


def keyed(rig: Rig, *keys: str, topic: str = TOPIC) -> None:
    rig.publish(topic, *[f"{key}{n}" for n, key in enumerate(keys)], keys=list(keys))


def test_a_busy_key_waits_and_others_go() -> None:
    """The second message of a key comes when the first is done; other keys do not wait for it."""
    rig = Rig()
    group = rig.subscribe(ordering="key")
    inbox = rig.join(group)
    keyed(rig, "a", "a", "b", "a", "b")
    assert inbox.values == [b"a0", b"b2"]
    inbox.ack(inbox.messages[0])
    rig.run()
    assert inbox.values == [b"a0", b"b2", b"a1"]
    inbox.nack(inbox.messages[2], delay=5)
    inbox.ack(inbox.messages[1])
    rig.run()
    assert inbox.values[3:] == [b"b4"]
    rig.advance(5)
    assert inbox.values[4:] == [b"a1"]


def test_messages_without_a_key_are_not_ordered() -> None:
    """They go out as if there were no order."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(ordering="key"))
    rig.publish(TOPIC, b"0", b"1", b"2", keys=[None, b"k", None])
    rig.numbers(2, start=3)
    assert inbox.values == [b"0", b"1", b"2", b"3", b"4"]


def test_a_key_is_busy_until_its_dead_letter_is_stored() -> None:
    """The next message of the key waits for the disk, and a seek elsewhere does not let it out."""
    rig = Rig(topic={"partitions": 2})
    group = rig.subscribe(ordering="key", max_deliveries=1)
    inbox = rig.join(group)
    keyed(rig, "a", "a")
    partition = inbox.messages[0].partition
    rig.workers.hold = True
    inbox.nack(inbox.take()[0])
    rig.run()
    rig.ask(rig.engine.seek, group, "earliest", partition=1 - partition)
    rig.run()
    assert inbox.messages == []
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    assert inbox.values == [b"a1"]


def test_a_key_is_freed_when_retention_took_its_message() -> None:
    """A message that can no longer be read does not hold its key for ever."""
    rig = Rig(topic={"retain_unread": False, "retention_hours": 1})
    group = rig.subscribe(ordering="key", ack_timeout=3 * 3600.0, max_deliveries=0)
    inbox = rig.join(group)
    keyed(rig, "a")
    rig.roll()
    keyed(rig, "a", "a")
    rig.advance(2 * 3600)
    assert rig.log().start_offset == 1
    inbox.nack(inbox.take()[0], delay=0)
    for value in (b"a0", b"a1"):
        rig.run()
        assert inbox.values == [value]
        inbox.ack(*inbox.take())
    assert group.lag() == 0


def test_an_expired_message_frees_its_key() -> None:
    """A parked message whose time ends lets the next of its key pass."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(ordering="key", ack_timeout=100.0))
    keyed(rig, "a")
    rig.publish(TOPIC, b"short", keys=["a"], ttl=5)
    keyed(rig, "a")
    rig.advance(10)
    inbox.ack(*inbox.take())
    rig.run()
    assert inbox.values == [b"a0"]


def test_auto_ack_keeps_the_order() -> None:
    """A member that acknowledges on delivery gets every message of a key, in order."""
    rig = Rig()
    group = rig.subscribe(ordering="key")
    keyed(rig, *"aabbabab")
    inbox = rig.join(group, auto_ack=True)
    for key in (b"a", b"b"):
        offsets = [m.offset for m in inbox.messages if m.key == key]
        assert offsets == sorted(offsets)
    assert sorted(inbox.offsets) == list(range(8))
    assert group.lag() == 0


def test_the_order_is_kept_over_partitions_and_topics() -> None:
    """One key that lies in several partitions is still with one member at a time."""
    rig = Rig()
    group = rig.subscribe(topic="orders.*", ordering="key")
    inbox = rig.join(group)
    keyed(rig, "a", topic="orders.eu")
    keyed(rig, "a", topic="orders.us")
    assert [m.topic for m in inbox.messages] == ["orders.eu"]
    rig.wait(rig.engine.delete_topic, "orders.eu")
    assert [m.topic for m in inbox.messages] == ["orders.eu", "orders.us"]


def test_what_is_set_aside_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy key stops the reading of its partition at a bound; other partitions go on."""
    monkeypatch.setattr(limits, "ORDERED_PARKED_MAX", 10)
    rig = Rig(topic={"partitions": 2})
    group = rig.subscribe(ordering="key")
    inbox = rig.join(group)
    rig.publish(TOPIC, *[b"slow"] * 100, keys=["slow"] * 100, partition=0)
    rig.publish(
        TOPIC, *[b"%d" % n for n in range(50)], keys=[b"%d" % n for n in range(50)], partition=1
    )
    assert group.cursors[(TOPIC, 0)].parked == 10
    assert len(inbox.messages) == 51
    done = 0
    while inbox.messages:
        done += len(inbox.messages)
        inbox.ack(*inbox.take())
        rig.run()
    assert (done, group.lag()) == (150, 0)
