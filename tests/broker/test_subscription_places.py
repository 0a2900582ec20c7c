"""Where a subscription stands: starting, moving, many topics, what is passed over, restarts."""

import tracemalloc
from typing import Any

import pytest

from headrace import Broker, limits
from headrace.broker.delivery import Delivery, Member
from headrace.errors import (
    Closed,
    Conflict,
    InvalidArgument,
    OffsetOutOfRange,
    StaleDelivery,
)
from headrace.log.batch import LOST, Batch
from tests.broker.rig import DATA, GROUP, TOPIC, Inbox, Rig, damage, flip
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- where it starts, and moving it ---------------------------------------------------------------
def test_where_a_subscription_starts(rig: Rig) -> None:
    """At the earliest, at the latest, at an offset, or at a time."""
    rig.numbers(3)
    rig.advance(10)
    noon = rig.clock.now_ms()
    rig.numbers(3, start=3)
    starts = {
        "earliest": rig.subscribe("earliest"),
        "latest": rig.subscribe("latest", start="latest"),
        "offset": rig.subscribe("offset", start=4),
        "time": rig.subscribe("time", start_time_ms=noon),
        "end": rig.subscribe("end", start=6),
    }
    rig.numbers(1, start=6)
    firsts = {name: rig.join(group).offsets[0] for name, group in starts.items()}
    assert firsts == {"earliest": 0, "latest": 6, "offset": 4, "time": 3, "end": 6}


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (7, "offset_out_of_range"),
        (-1, "invalid_offset"),
        (1 << 62, "invalid_offset"),
        ("yesterday", "invalid_offset"),
        (True, "invalid_offset"),
        (1.5, "invalid_offset"),
        (None, "invalid_offset"),
    ],
)
def test_a_bad_start_makes_nothing(rig: Rig, start: object, code: str) -> None:
    """A subscription that cannot start where it is told is not made at all."""
    rig.numbers(3)
    with pytest.raises((InvalidArgument, OffsetOutOfRange)) as caught:
        rig.subscribe(start=start)
    assert caught.value.code == code
    assert rig.engine.all_subscriptions() == []
    rig.reopen()
    assert rig.engine.all_subscriptions() == []


def test_seek_back_and_forth(rig: Rig) -> None:
    """Everything from there on comes again, as attempt 1; what was out is stale."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(5)
    old = inbox.take()
    inbox.ack(*old[:4])
    inbox.nack(old[4], delay=100)
    rig.wait(rig.engine.seek, group, 2)
    assert [(m.offset, m.attempt) for m in inbox.take()] == [(2, 1), (3, 1), (4, 1)]
    rig.wait(rig.engine.seek, group, "latest")
    assert (group.lag(), group.in_flight()) == (0, 0)
    rig.advance(1000)
    assert inbox.messages == []
    rig.wait(rig.engine.seek, group, "earliest")
    assert inbox.offsets == [0, 1, 2, 3, 4]


def test_seek_to_a_time_survives_a_crash(rig: Rig) -> None:
    """The move is durable when it is answered."""
    group = rig.subscribe(ack_timeout=1000.0)
    inbox = rig.join(group)
    rig.numbers(2)
    rig.advance(60)
    noon = rig.clock.now_ms()
    rig.numbers(2, start=2)
    inbox.ack(*inbox.take())
    rig.flush()
    rig.wait(rig.engine.seek, group, "earliest", time_ms=noon)
    rig.crash()
    assert rig.join().offsets == [2, 3]


def test_seek_in_one_partition(rig: Rig) -> None:
    """Others stay where they are; a partition that is not there is refused before any moves."""
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but({"partitions": 2}))
    group = rig.subscribe()
    inbox = rig.join(group)
    for partition in (0, 1):
        rig.publish(TOPIC, b"x", partition=partition)
    inbox.ack(*inbox.take())
    rig.wait(rig.engine.seek, group, 0, partition=1)
    assert [(m.partition, m.offset) for m in inbox.take()] == [(1, 0)]
    with pytest.raises(InvalidArgument) as caught:
        rig.engine.seek(group, 0, lambda error: None, partition=2)
    assert caught.value.code == "invalid_partition"
    with pytest.raises(OffsetOutOfRange):
        rig.engine.seek(group, 2, lambda error: None)
    assert group.in_flight() == 1


def test_a_seek_makes_room_for_other_partitions(rig: Rig) -> None:
    """A member that is full of one partition gets the other one's when that is moved away."""
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but({"partitions": 2}))
    group = rig.subscribe()
    inbox = rig.join(group, prefetch=2)
    rig.publish(TOPIC, b"a", b"b", partition=0)
    rig.publish(TOPIC, b"c", b"d", partition=1)
    assert [m.partition for m in inbox.take()] == [0, 0]
    rig.wait(rig.engine.seek, group, "latest", partition=0)
    assert [m.partition for m in inbox.take()] == [1, 1]


# --- over many topics ---------------------------------------------------------------------------
def test_a_wildcard_finds_topics_made_later(rig: Rig) -> None:
    """From their first record on, however the subscription itself started."""
    rig.numbers(2, topic="orders.eu")
    group = rig.subscribe(topic="orders.*", start="latest")
    inbox = rig.join(group)
    rig.numbers(1, topic="orders.us")
    rig.numbers(1, topic="orders.eu.old")
    rig.numbers(1, topic="users")
    rig.numbers(1, topic="orders.eu")
    assert [(m.topic, m.offset) for m in inbox.messages] == [("orders.us", 0), ("orders.eu", 2)]


def test_a_wildcard_survives_a_restart(rig: Rig) -> None:
    """Each topic's position is its own; one that was made just before is not forgotten."""
    group = rig.subscribe(topic="orders.>")
    inbox = rig.join(group)
    rig.numbers(3, topic="orders.eu")
    rig.numbers(3, topic="orders.us.west")
    inbox.ack(*[m for m in inbox.messages if m.topic == "orders.eu" or m.offset == 0])
    rig.reopen()
    assert sorted((m.topic, m.offset) for m in rig.join().messages) == [
        ("orders.us.west", 1),
        ("orders.us.west", 2),
    ]


def test_a_wildcard_leaves_internal_topics_alone(rig: Rig) -> None:
    """Dead letters and the broker's own topics have to be named; ``>`` does not feed on itself."""
    group = rig.subscribe(topic=">", max_deliveries=1)
    inbox = rig.join(group)
    rig.numbers(1)
    rig.publish(TOPIC, b"later", delay=5)
    inbox.nack(inbox.take()[0])
    rig.run()
    assert len(rig.letters()) == 1
    rig.advance(5)
    assert [m.topic for m in inbox.messages] == [TOPIC]


def test_partitions_added_later_are_read(rig: Rig) -> None:
    """A topic that grows is read in its new partitions from their first record on."""
    group = rig.subscribe(start="latest")
    inbox = rig.join(group)
    rig.wait(rig.engine.change_topic, TOPIC, {"partitions": 3})
    for partition in range(3):
        rig.publish(TOPIC, b"x", partition=partition)
    assert [m.partition for m in inbox.take()] == [0, 1, 2]
    rig.reopen()
    assert sorted(rig.engine.subscription(GROUP).cursors) == [(TOPIC, n) for n in range(3)]


def test_several_groups_of_one_name(rig: Rig) -> None:
    """A name may be used over several topics; alone it is then ambiguous."""
    rig.subscribe(topic="a")
    rig.subscribe(topic="b")
    with pytest.raises(Conflict) as caught:
        rig.engine.subscription(GROUP)
    assert caught.value.code == "ambiguous_subscription"
    assert rig.engine.subscription(GROUP, "b").pattern == "b"


# --- what is passed over --------------------------------------------------------------------------
def test_a_direct_message_goes_to_its_target_alone(rig: Rig) -> None:
    """Others are done with it at once and do not wait for it."""
    groups = {name: rig.subscribe(name) for name in ("billing", "mail")}
    inboxes = {name: rig.join(group) for name, group in groups.items()}
    rig.publish(TOPIC, b"for all")
    rig.publish(TOPIC, b"for mail", to="mail")
    rig.publish(TOPIC, b"for nobody", to="nobody")
    assert inboxes["billing"].values == [b"for all"]
    assert inboxes["mail"].values == [b"for all", b"for mail"]
    inboxes["billing"].ack(*inboxes["billing"].messages)
    assert groups["billing"].lag() == 0
    assert groups["billing"].tally.skipped == 2


def test_a_message_past_its_time_is_not_delivered(rig: Rig) -> None:
    """Its own time to live counts, else its topic's; retries end with it too."""
    group = rig.subscribe(ack_timeout=1000.0)
    rig.publish(TOPIC, b"short", ttl=5)
    rig.publish(TOPIC, b"long", ttl=50)
    rig.publish(TOPIC, b"for ever")
    rig.advance(5)
    inbox = rig.join(group)
    assert inbox.values == [b"long", b"for ever"]
    long, _ = inbox.take()
    inbox.nack(long, delay=60)
    rig.advance(60)
    assert inbox.messages == []
    assert (group.tally.expired, group.lag(), group.in_flight()) == (2, 1, 1)


def test_the_topics_own_time_to_live(rig: Rig) -> None:
    """A message's own time wins over its topic's, in both directions."""
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but({"message_ttl_ms": 10_000}))
    group = rig.subscribe()
    rig.publish(TOPIC, b"topic's")
    rig.publish(TOPIC, b"shorter", ttl=5)
    rig.publish(TOPIC, b"longer", ttl=100)
    rig.advance(6)
    inbox = rig.join(group)
    assert inbox.values == [b"topic's", b"longer"]
    rig.advance(4)
    assert rig.join(rig.subscribe("late")).values == [b"longer"]
    rig.wait(rig.engine.change_topic, TOPIC, {"message_ttl_ms": None})
    assert rig.join(rig.subscribe("later")).values == [b"topic's", b"longer"]


def broken_middle() -> Rig:
    """A partition of five batches, one record each, of which the third fails its checksum."""
    rig = Rig()
    for number in range(5):
        rig.numbers(1, start=number)
    rig.close()
    path = DATA / TOPIC / "0" / f"{0:020d}.log"
    size = rig.files.file_size(path) // 5
    damage(rig, path, flip(2 * size + 70))
    return rig


def test_damage_stops_a_subscription_visibly() -> None:
    """What lies before is delivered, then it stops and says so; a seek past the damage goes on."""
    rig = broken_middle()
    group = rig.subscribe()
    inbox = rig.join(group)
    assert inbox.values == [b"0", b"1"]
    inbox.ack(*inbox.take())
    (place,) = group.statistics()["partitions"]
    assert "2" in place["blocked"]
    assert group.lag() == 3
    rig.advance(100)
    assert inbox.messages == []
    rig.wait(rig.engine.seek, group, 3)
    assert inbox.values == [b"3", b"4"]
    assert group.statistics()["partitions"][0]["blocked"] is None


def test_what_a_repair_gave_up_is_passed_over(rig: Rig) -> None:
    """A batch that stands for lost records counts as lost and does not stop anybody."""
    group = rig.subscribe()
    rig.numbers(2)
    rig.close()
    lost = Batch(b"", 0, 3, LOST)
    lost.base_offset = 2
    path = DATA / TOPIC / "0" / f"{0:020d}.log"
    damage(rig, path, lambda content: content.extend(lost.raw()))
    group = rig.open().subscription(GROUP)
    rig.numbers(2, start=5)
    inbox = rig.join(group)
    assert inbox.values == [b"0", b"1", b"5", b"6"]
    inbox.ack(*inbox.take())
    assert (group.lag(), group.tally.lost) == (0, 3)


def test_a_disk_that_cannot_be_read_for_a_while() -> None:
    """A read error stops the subscription for a second; then it goes on where it was."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    group = rig.subscribe()
    rig.numbers(3)
    rig.reopen()
    group = rig.engine.subscription(GROUP)
    files.fail("read_at", repeat=True)
    inbox = rig.join(group)
    assert inbox.messages == []
    assert "cannot be read" in group.cursors[(TOPIC, 0)].blocked
    files.heal()
    rig.advance(1)
    assert inbox.offsets == [0, 1, 2]


def test_a_read_error_does_not_outlive_the_broker() -> None:
    """A subscription that waits to read again has no timer after the close."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.subscribe()
    rig.numbers(3)
    rig.reopen()
    files.fail("read_at", repeat=True)
    assert rig.join(rig.engine.subscription(GROUP)).messages == []
    files.heal()
    rig.close()
    assert rig.loop.timers == 0


def test_a_read_error_does_not_outlive_its_topic() -> None:
    """A wildcard group that waits to read again forgets that when the topic is deleted."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files, Rig().directory)
    rig.numbers(3)
    rig.reopen()
    group = rig.subscribe(topic="*")
    files.fail("read_at", repeat=True)
    rig.join(group)
    cursor = group.cursors[(TOPIC, 0)]
    group.detach(TOPIC)
    files.heal()
    rig.advance(10)
    assert cursor not in group._reading._queue
    assert group.lag() == 0


def test_retention_may_overtake(rig: Rig) -> None:
    """Where unread messages may be forgotten, the group goes on with what is there and counts."""
    rig.engine.create_topic(
        TOPIC, rig.engine.topics.defaults.but({"retain_unread": False, "retention_hours": 1})
    )
    group = rig.subscribe(ack_timeout=3600 * 3.0)
    inbox = rig.join(group, prefetch=1)
    rig.numbers(4)
    rig.roll()
    rig.numbers(2, start=4)
    assert inbox.offsets == [0]
    rig.advance(3600 * 2)
    assert rig.log().start_offset == 4
    inbox.nack(inbox.take()[0], delay=0)  # it was out, and cannot be read again
    rig.run()
    assert group.tally.lost == 4
    for offset in (4, 5):
        assert inbox.offsets == [offset]
        inbox.ack(*inbox.take())
        rig.run()
    assert group.lag() == 0
    assert group.cursors[(TOPIC, 0)].position == 6


# --- over a restart -------------------------------------------------------------------------------
def test_attempts_survive_a_restart(rig: Rig) -> None:
    """A message that has failed twice comes as its third attempt, in the next process too."""
    group = rig.subscribe(max_deliveries=3, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(3)
    for _ in range(2):
        bad = next(m for m in inbox.messages if m.offset == 1)
        inbox.messages = [m for m in inbox.messages if m.offset != 1]
        inbox.nack(bad)
        rig.run()
    rig.reopen()
    inbox = rig.join()
    assert [(m.offset, m.attempt) for m in inbox.messages] == [(0, 1), (2, 1), (1, 3)]
    inbox.nack(inbox.messages[2], reason="still")
    rig.run()
    assert rig.letters()[0].attempts == 3


def test_acks_out_of_order_survive_a_restart(rig: Rig) -> None:
    """Only what was not acknowledged comes again."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(10)
    inbox.ack(*[inbox.messages[n] for n in (7, 1, 3, 9)])
    rig.reopen()
    assert rig.join().offsets == [0, 2, 4, 5, 6, 8]


def test_deliveries_of_an_earlier_process_are_stale(rig: Rig) -> None:
    """An ack that was on its way while the broker was restarted is refused, not misread."""
    rig.join(rig.subscribe())
    rig.numbers(1)
    old = rig.engine.subscription(GROUP).leases.popitem()[0]
    rig.kill()
    inbox = rig.join()
    assert inbox.messages[0].lease.id != old
    with pytest.raises(StaleDelivery):
        rig.engine.subscription(GROUP).ack(old, 0)


def test_settings_can_change_and_survive(rig: Rig) -> None:
    """Subscribing again with other settings changes them; with none it changes nothing."""
    rig.subscribe(ack_timeout=5.0)
    group = rig.subscribe(max_deliveries=9)
    assert (group.settings.ack_timeout, group.settings.max_deliveries) == (5.0, 9)
    rig.subscribe()
    rig.crash()
    settings = rig.engine.subscription(GROUP).settings
    assert (settings.ack_timeout, settings.max_deliveries) == (5.0, 9)
    with pytest.raises(InvalidArgument) as caught:
        rig.subscribe(colour="red")
    assert caught.value.code == "unknown_setting"


def test_the_order_changes_only_between_members(rig: Rig) -> None:
    """While somebody reads, the order stays; then what waited behind a key is not forgotten."""
    group = rig.subscribe(ordering="key", backoff=0.0)
    inbox = rig.join(group)
    rig.publish(TOPIC, b"a1", b"a2", b"b1", keys=["a", "a", "b"])
    assert inbox.values == [b"a1", b"b1"]
    with pytest.raises(Conflict) as caught:
        rig.subscribe(ordering="none")
    assert caught.value.code == "subscription_busy"
    inbox.leave()
    rig.subscribe(ordering="none")
    inbox = rig.join(group)
    found = sorted((message.value, message.attempt) for message in inbox.messages)
    assert found == [(b"a1", 2), (b"a2", 1), (b"b1", 2)]
    inbox.leave()
    rig.subscribe(ordering="key")
    inbox = rig.join(group)
    assert inbox.values == [b"a1", b"b1"]
    inbox.ack(*inbox.take())
    rig.run()
    assert inbox.values == [b"a2"]


def test_a_change_of_order_reads_again_up_to_the_damage() -> None:
    """What lay before it and was not done is delivered, though the group had stopped there."""
    rig = broken_middle()
    group = rig.subscribe()
    rig.join(group).leave(count_attempt=False)
    assert group.cursors[(TOPIC, 0)].blocked is not None
    rig.subscribe(ordering="key")
    assert rig.join(group).values == [b"0", b"1"]
    assert group.cursors[(TOPIC, 0)].blocked is not None


def test_closing_the_engine_ends_every_member(rig: Rig) -> None:
    """Each sink hears once that it is over, and nothing is delivered or settled behind it."""
    inboxes = [rig.join(rig.subscribe()), rig.join(rig.subscribe("mail")), rig.follow()]
    rig.numbers(1)
    rig.close()
    assert [len(inbox.ends) for inbox in inboxes] == [1, 1, 1]
    assert all(end is not None and end.code == "closed" for inbox in inboxes for end in inbox.ends)


def test_nobody_joins_what_has_ended(rig: Rig) -> None:
    """Whoever comes too late is told so, and does not wait for ever."""
    group = rig.subscribe()
    rig.wait(rig.engine.unsubscribe, group)
    with pytest.raises(Closed):
        rig.join(group)


def test_statistics_say_what_is_going_on(rig: Rig) -> None:
    """Members, lag, in flight, waiting for a retry and the counters, by name."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(5)
    inbox.ack(inbox.messages[0])
    inbox.nack(inbox.messages[1], delay=50)
    found = group.statistics()
    assert found | {
        "members": 1, "lag": 4, "in_flight": 3, "waiting_for_retry": 1, "acked": 1, "nacked": 1,
        "delivered": 5, "redelivered": 0, "name": GROUP, "topic": TOPIC,
    } == found  # fmt: skip
    assert found["partitions"][0]["position"] == 1


def test_a_million_unsettled_messages_are_cheap() -> None:
    """A group with a million out costs a few bytes for each, not an object."""

    class Counter(Inbox):
        count = 0

        def deliver(self, delivery: Delivery) -> None:
            self.count += len(delivery)

    rig = Rig(directory=None, topic={"max_queue_size": 1_000_000})
    group = rig.subscribe(ack_timeout=10.0, max_deliveries=0)
    for _ in range(10):
        rig.publish(TOPIC, *[b"x"] * 100_000)
    inbox = Counter()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        group.join(Member("greedy", inbox, prefetch=1_000_000))
        rig.run()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (inbox.count, group.in_flight()) == (1_000_000, 1_000_000)
    assert after - before < 5_000_000
    acked = sum(group.ack_lease(lease_id) for lease_id in list(group.leases)[::2])
    assert group.lag() == 1_000_000 - acked
    rig.advance(10)  # the deadline of all of the others, at once
    assert group.in_flight() == 0


@pytest.mark.parametrize("topic", [{"durable": False}, {"durability": "never"}])
def test_a_message_does_not_inherit_the_failures_of_one_that_was_lost(
    topic: dict[str, Any],
) -> None:
    """A topic may lose its end with the power; the next message there has all its attempts.

    Or all but one: after a crash the broker counts a delivery that it may have forgotten.
    """
    rig = Rig(topic=topic)
    group = rig.subscribe(max_deliveries=3, backoff=0.0)
    inbox = rig.join(group)
    rig.publish(TOPIC, b"lost")
    for attempt in (1, 2):
        (message,) = inbox.take()
        assert message.attempt == attempt
        inbox.nack(message, 0.0 if attempt == 1 else 60.0)
        rig.run()
    rig.flush()
    rig.abandon()
    for name in rig.disk.names(DATA / TOPIC):  # what was never synced is gone
        if rig.disk.is_directory(DATA / TOPIC / name):
            rig.disk.remove_tree(DATA / TOPIC / name)
    rig.disk.kill()
    rig.open()
    inbox = rig.join()
    rig.publish(TOPIC, b"new")
    (message,) = inbox.messages
    assert (message.value, message.offset) == (b"new", 0)
    assert message.attempt <= 2


def test_the_positions_of_all_subscriptions_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wildcard has one in each partition: a few hundred wildcards over thousands of topics were gigabytes."""
    monkeypatch.setattr(limits, "POSITIONS_MAX", 5)
    with Broker() as broker:
        for name in ("a.1", "a.2", "a.3"):
            broker.create_topic(name)
        broker.subscription("first", "a.*").close()
        with pytest.raises(InvalidArgument) as refused:
            broker.subscription("second", "a.*")
        assert refused.value.code == "too_many_subscriptions"
        broker.subscription("third", "a.1").close()
        assert sorted(s["name"] for s in broker.subscriptions()) == ["first", "third"]
