"""What a subscription does with its messages and members, one rule at a time.

``test_subscription_machine.py`` runs all of it in any order against a model.
"""

from itertools import groupby

import pytest

from headrace import limits
from headrace.broker.deadlines import _SLACK
from headrace.errors import (
    InvalidArgument,
    StaleDelivery,
    SubscriptionNotFound,
    TopicNotFound,
)
from tests.broker.rig import GROUP, TOPIC, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- who gets what ----------------------------------------------------------------------------
def test_every_subscription_gets_every_message(rig: Rig) -> None:
    """Two groups over one topic each get all of it, in order."""
    inboxes = [rig.join(rig.subscribe(name)) for name in ("billing", "mail")]
    rig.numbers(5)
    for inbox in inboxes:
        assert inbox.values == [b"0", b"1", b"2", b"3", b"4"]
        assert inbox.attempts == [1] * 5


def test_members_share_message_by_message(rig: Rig) -> None:
    """Of a batch shared by three, each member gets every third record."""
    group = rig.subscribe()
    inboxes = [rig.join(group) for _ in range(3)]
    rig.numbers(10)
    assert [inbox.offsets for inbox in inboxes] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_the_turn_goes_on_from_batch_to_batch(rig: Rig) -> None:
    """The member behind the last one served is the next, whatever the size of the batches."""
    group = rig.subscribe()
    inboxes = [rig.join(group) for _ in range(3)]
    published = 0
    for size in (1, 1, 2, 4, 1, 5, 3):
        rig.numbers(size, start=published)
        published += size
    for turn, inbox in enumerate(inboxes):
        assert inbox.offsets == list(range(turn, published, 3))


def test_a_full_member_is_passed_over(rig: Rig) -> None:
    """Round-robin is over the members with room; nobody gets more than their prefetch."""
    group = rig.subscribe()
    small, large = rig.join(group, prefetch=2), rig.join(group, prefetch=100)
    rig.numbers(10)
    assert small.offsets == [0, 2]
    assert large.offsets == [1, 3, 4, 5, 6, 7, 8, 9]
    assert group.in_flight() == 10


def test_prefetch_bounds_what_is_out_until_it_is_settled(rig: Rig) -> None:
    """A member with a prefetch of 3 has three out; each ack lets one more come."""
    group = rig.subscribe()
    rig.numbers(10)
    inbox = rig.join(group, prefetch=3)
    seen = []
    while batch := inbox.take():
        assert group.in_flight() <= 3
        seen += [message.offset for message in batch]
        inbox.ack(batch[0])
        rig.run()
        seen += [message.offset for message in inbox.messages]
        for message in (*batch[1:], *inbox.take()):
            inbox.ack(message)
        rig.run()
    assert seen == list(range(10))
    assert group.lag() == 0


def test_a_sink_without_room_gets_nothing_until_it_says_so(rig: Rig) -> None:
    """A full connection is not written to; ``wake`` is how it says that it can take more."""
    group = rig.subscribe()
    inbox = rig.join(group, space=0)
    rig.numbers(3)
    assert inbox.messages == []
    inbox.space = 2
    group.wake()
    rig.run()
    assert inbox.offsets[:2] == [0, 1]


def test_large_messages_are_bounded_by_bytes_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unsettled bytes of a member have a bound, and each ack of a lease frees its share."""
    monkeypatch.setattr(limits, "PREFETCH_BYTES_MAX", 10_000)
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.publish(TOPIC, *[bytes(2_000)] * 20)
    first = inbox.take()
    assert 3 <= len(first) <= 5
    inbox.ack(first[0])
    rig.run()
    assert len(inbox.take()) == 1  # not only when the last of the lease is settled
    rig.publish("huge", bytes(50_000))
    assert len(rig.join(rig.subscribe(topic="huge")).messages) == 1  # one is always allowed


def test_partitions_take_turns(rig: Rig) -> None:
    """A group over many partitions reads them in turn, a batch at a time, not one to its end."""
    size = limits.SMALL_BATCH_RECORDS + 1
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but({"partitions": 3}))
    for _ in range(4):
        for partition in range(3):
            rig.publish(TOPIC, *[b"x"] * size, partition=partition)
    inbox = rig.join(rig.subscribe(), 12 * size)
    turns = [partition for partition, _ in groupby(m.partition for m in inbox.messages)]
    assert turns == ([0, 1, 2] * len(turns))[: len(turns)]
    assert len(turns) >= 12
    for partition in range(3):
        offsets = [m.offset for m in inbox.messages if m.partition == partition]
        assert offsets == list(range(4 * size))


def test_auto_ack_is_done_on_delivery(rig: Rig) -> None:
    """A member that acknowledges on delivery has nothing out and sees nothing again."""
    group = rig.subscribe()
    inbox = rig.join(group, prefetch=2, auto_ack=True)
    rig.numbers(6)
    assert inbox.offsets == [0, 1, 2, 3, 4, 5]
    assert all(delivery.lease is None for delivery in inbox.deliveries)
    assert (group.lag(), group.in_flight(), group.tally.acked) == (0, 0, 6)
    inbox.leave()
    assert rig.join(group).messages == []


# --- settling ---------------------------------------------------------------------------------
def test_an_ack_is_once(rig: Rig) -> None:
    """A second ack, an ack of another lease's offset and one of a made-up lease are refused."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(1)
    rig.numbers(1, start=1)
    first, second = inbox.take()
    inbox.ack(first)
    with pytest.raises(StaleDelivery):
        inbox.ack(first)
    with pytest.raises(StaleDelivery):
        group.ack(second.lease.id, first.offset)
    with pytest.raises(StaleDelivery):
        group.ack(12345, 0)
    for settle in (group.nack, group.release, group.ack_up_to):
        with pytest.raises(StaleDelivery):
            settle(first.lease.id, first.offset)
    with pytest.raises(StaleDelivery):
        group.extend(first.lease.id)
    assert group.lag() == 1


def test_ack_lease_run_and_up_to(rig: Rig) -> None:
    """Many can be acknowledged at once: a lease, a run of it, all up to one; others stay out."""
    group = rig.subscribe()
    one, two = rig.join(group), rig.join(group)
    rig.numbers(10)  # one: 0 2 4 6 8, two: 1 3 5 7 9
    lease = one.messages[0].lease
    assert group.ack_up_to(lease.id, 4) == 3
    assert group.lag() == 7
    with pytest.raises(StaleDelivery):
        group.ack_up_to(lease.id, 2)
    assert group.ack_run(lease.id, 4, 7) == 1  # 4 was not out any more, 6 is done now
    assert group.ack_lease(lease.id) == 1
    assert group.ack_lease(two.messages[0].lease.id) == 5
    assert (group.lag(), group.in_flight()) == (0, 0)
    assert one.member is not None
    assert (one.member.in_flight, one.member.in_flight_bytes) == (0, 0)


def test_ack_up_to_is_about_one_partition(rig: Rig) -> None:
    """What the member holds of other partitions is not touched."""
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but({"partitions": 2}))
    inbox = rig.join(group := rig.subscribe())
    for partition in (0, 1):
        for _ in range(3):
            rig.publish(TOPIC, b"x", partition=partition)
    last = [m for m in inbox.messages if m.partition == 0][-1]
    assert group.ack_up_to(last.lease.id, last.offset) == 3
    assert group.in_flight() == 3
    assert group.cursors[(TOPIC, 1)].position == 0


def test_a_nack_comes_back_after_the_backoff(rig: Rig) -> None:
    """0.1 s, then twice as long each time, up to the cap, with the attempt counted."""
    group = rig.subscribe(backoff=1.0, backoff_max=5.0, max_deliveries=0)
    inbox = rig.join(group)
    rig.numbers(1)
    for attempt, pause in enumerate((1.0, 2.0, 4.0, 5.0, 5.0), start=1):
        (message,) = inbox.take()
        assert message.attempt == attempt
        assert message.retry_count == attempt - 1
        inbox.nack(message)
        rig.advance(pause - 0.001)
        assert inbox.messages == []
        rig.advance(0.001)
    assert group.tally.redelivered == 5


def test_a_nack_with_a_delay_of_its_own(rig: Rig) -> None:
    """The caller's delay replaces the backoff; 0 is at once."""
    group = rig.subscribe(backoff=60.0)
    inbox = rig.join(group)
    rig.numbers(2)
    first, second = inbox.take()
    inbox.nack(first, delay=0)
    inbox.nack(second, delay=3.5)
    rig.run()
    assert [(m.offset, m.attempt) for m in inbox.take()] == [(0, 2)]
    rig.advance(3.4)
    assert inbox.messages == []
    rig.advance(0.1)
    assert [(m.offset, m.attempt) for m in inbox.take()] == [(1, 2)]


def test_each_delay_has_its_time(rig: Rig) -> None:
    """Of several waiting retries each comes when it is due, not when the next deadline is."""
    group = rig.subscribe(ack_timeout=1000.0)
    inbox = rig.join(group)
    rig.numbers(4)
    for delay, message in enumerate(inbox.take(), start=1):
        inbox.nack(message, delay=delay)
    for offset in range(4):
        rig.advance(1)
        assert inbox.offsets == [offset]
        inbox.ack(*inbox.take())


def test_retries_go_before_fresh_ones(rig: Rig) -> None:
    """What has failed keeps its room until the journal has the failure, and is then delivered again."""
    group = rig.subscribe()
    rig.numbers(6)
    inbox = rig.join(group, prefetch=2)
    first, second = inbox.take()
    inbox.nack(first, delay=0)
    inbox.ack(second)
    rig.run()
    assert sorted(inbox.offsets) == [0, 2]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", True, [], 1e12])
def test_a_bad_delay_is_refused_and_settles_nothing(rig: Rig, bad: object) -> None:
    """A delay or an extension that is no number of seconds leaves the delivery as it was."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(1)
    (message,) = inbox.take()
    with pytest.raises(InvalidArgument) as caught:
        inbox.nack(message, delay=bad)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_delay"
    with pytest.raises(InvalidArgument) as caught:
        group.extend(message.lease.id, bad)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_seconds"
    with pytest.raises(InvalidArgument):
        inbox.nack(message, reason=7)  # type: ignore[arg-type]
    assert group.in_flight() == 1
    inbox.ack(message)


def test_release_does_not_count(rig: Rig) -> None:
    """A message given back unopened comes again at once, with the same attempt number."""
    group = rig.subscribe(max_deliveries=1)
    inbox = rig.join(group)
    rig.numbers(1)
    for _ in range(3):
        (message,) = inbox.take()
        assert message.attempt == 1
        group.release(message.lease.id, message.offset)
        rig.run()
    assert group.tally.dead_lettered == 0


# --- time -------------------------------------------------------------------------------------
def test_the_deadline_sends_it_again(rig: Rig) -> None:
    """Past the ack timeout and the backoff another attempt begins, and the old ack is stale."""
    group = rig.subscribe(ack_timeout=10.0, backoff=1.0)
    inbox = rig.join(group)
    rig.numbers(3)
    first = inbox.take()
    inbox.ack(first[1])
    rig.advance(9.999)
    assert group.in_flight() == 2
    rig.advance(0.001)
    assert group.in_flight() == 0
    with pytest.raises(StaleDelivery):
        inbox.ack(first[0])
    rig.advance(1.0)
    assert [(m.offset, m.attempt) for m in inbox.messages] == [(0, 2), (2, 2)]
    assert group.tally.timeouts == 2


def test_the_deadline_ignores_the_wall_clock(rig: Rig) -> None:
    """A wall clock that jumps a day ahead or back ends no delivery."""
    group = rig.subscribe(ack_timeout=10.0)
    rig.join(group)
    rig.numbers(1)
    rig.clock.jump(86_400_000)
    rig.advance(5)
    rig.clock.jump(-2 * 86_400_000)
    rig.advance(4)
    assert group.in_flight() == 1
    rig.advance(1)
    assert group.in_flight() == 0


def test_an_extension_is_more_time(rig: Rig) -> None:
    """The deadline moves to so many seconds from now, or to a whole ack timeout from now."""
    group = rig.subscribe(ack_timeout=10.0, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(1)
    (message,) = inbox.take()
    rig.advance(9)
    assert group.extend(message.lease.id) == 10.0
    rig.advance(9)
    assert group.extend(message.lease.id, 30) == 30
    rig.advance(29)
    inbox.ack(message)
    rig.advance(100)
    assert inbox.messages == []
    assert group.tally.timeouts == 0


def test_an_extension_can_be_shorter(rig: Rig) -> None:
    """A member that knows it is about to fail may ask for less."""
    group = rig.subscribe(ack_timeout=1000.0, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(1)
    group.extend(inbox.take()[0].lease.id, 1)
    rig.advance(1)
    assert inbox.attempts == [2]


def test_settled_deadlines_do_not_pile_up(rig: Rig) -> None:
    """With a timeout of hours, a million settled deliveries leave a bounded trace."""
    group = rig.subscribe(ack_timeout=limits.ACK_TIMEOUT_S_MAX)
    inbox = rig.join(group)
    for number in range(3 * _SLACK):
        rig.numbers(1, start=number)
        inbox.ack(*inbox.take())
    assert len(group._deadlines) <= _SLACK + 2
    rig.numbers(1)
    lease = inbox.take()[0].lease
    for _ in range(3 * _SLACK):
        group.extend(lease.id)
    assert len(group._deadlines) <= _SLACK + 4
    assert rig.loop.timers < 10


# --- members come and go ------------------------------------------------------------------------
def test_what_a_lost_member_had_goes_to_the_others(rig: Rig) -> None:
    """A member that vanishes uses up an attempt; what it had settled stays settled."""
    group = rig.subscribe()
    gone, left = rig.join(group), rig.join(group)
    rig.numbers(4)  # gone: 0 2
    gone.ack(gone.messages[0])
    left.take()
    gone.leave()
    rig.run()
    assert [(m.offset, m.attempt) for m in left.messages] == [(2, 2)]
    with pytest.raises(StaleDelivery):
        gone.ack(gone.messages[1])
    gone.leave()  # a second time is no mistake


def test_leaving_in_good_order_does_not_count(rig: Rig) -> None:
    """A member that says it began none of them gives them back with the same attempt number."""
    group = rig.subscribe()
    gone = rig.join(group)
    rig.numbers(2)
    gone.leave(count_attempt=False)
    assert rig.join(group).attempts == [1, 1]


def test_without_members_messages_wait(rig: Rig) -> None:
    """Nothing is delivered to nobody, and nothing is lost meanwhile."""
    group = rig.subscribe()
    rig.numbers(3)
    assert (group.lag(), group.tally.delivered) == (3, 0)
    assert rig.join(group).offsets == [0, 1, 2]


def test_deleting_a_subscription_tells_its_members(rig: Rig) -> None:
    """The members hear why; the name is free again and starts anew."""
    group = rig.subscribe()
    inbox = rig.join(group)
    rig.numbers(2)
    rig.wait(rig.engine.unsubscribe, group)
    assert isinstance(inbox.ends[0], SubscriptionNotFound)
    with pytest.raises(SubscriptionNotFound):
        rig.engine.subscription(GROUP)
    rig.reopen()
    assert rig.engine.subscriptions() == []
    assert rig.join(rig.subscribe()).offsets == [0, 1]


def test_deleting_the_topic_ends_the_subscription(rig: Rig) -> None:
    """A group over the topic alone goes with it; one over a wildcard stays, and lets it go."""
    plain, wide = rig.subscribe(), rig.subscribe("all", "*")
    members = rig.join(plain), rig.join(wide)
    rig.numbers(3)
    rig.numbers(2, topic="users")
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert isinstance(members[0].ends[0], TopicNotFound)
    assert members[1].ends == []
    assert (wide.lag(), wide.in_flight()) == (2, 2)
    with pytest.raises(StaleDelivery):
        wide.ack(members[1].messages[0].lease.id, 0)
    rig.numbers(1)  # made anew by this publish
    assert [(m.topic, m.offset) for m in members[1].messages][-1] == (TOPIC, 0)


# --- dead letters -----------------------------------------------------------------------------
def test_after_max_deliveries_it_is_a_dead_letter(rig: Rig) -> None:
    """Payload, key, headers, origin, reason and attempts are kept, and the message is done."""
    group = rig.subscribe(max_deliveries=2, backoff=0.0)
    inbox = rig.join(group)
    receipt = rig.publish(TOPIC, b"poison", keys=["k"], headers=[{"colour": "red"}])
    inbox.nack(inbox.take()[0], reason="first")
    rig.run()
    inbox.nack(inbox.take()[0], reason="cannot be read:\n line 1")
    rig.advance(1)
    (letter,) = rig.letters()
    assert (letter.message.value, letter.message.key) == (b"poison", b"k")
    assert letter.message.headers == {"colour": "red"}
    assert (letter.message.topic, letter.message.partition, letter.message.offset) == (TOPIC, 0, 0)
    assert letter.message.id == receipt.id
    assert letter.reason == "cannot be read: line 1"
    assert (letter.subscription, letter.attempts) == (GROUP, 2)
    assert (group.lag(), group.tally.dead_lettered, inbox.messages) == (0, 1, [])


def test_the_dead_letter_is_durable_before_the_message_is_done(rig: Rig) -> None:
    """While it is on its way to the disk the message is not done: a crash may double, not lose."""
    group = rig.subscribe(max_deliveries=1)
    inbox = rig.join(group)
    rig.numbers(1)
    rig.workers.hold = True
    inbox.nack(inbox.take()[0])
    rig.run()
    assert group.lag() == 1
    assert rig.workers.held >= 1
    while rig.workers.held:
        rig.workers.release()
        rig.run()
    assert group.lag() == 0
    assert len(rig.letters()) == 1


def test_a_dead_letter_that_cannot_be_stored_is_tried_again() -> None:
    """On a full disk the message stays undone, and its letter is stored later; it is not delivered again."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    group = rig.subscribe(max_deliveries=1, backoff_max=5.0)
    inbox = rig.join(group)
    rig.numbers(1)
    files.fail("mkdir", repeat=True)
    inbox.nack(inbox.take()[0])
    rig.run()
    assert group.lag() == 1
    files.heal()
    rig.advance(5)
    assert inbox.messages == []
    assert group.lag() == 0
    [letter] = rig.letters()
    assert (letter.attempts, letter.reason) == (1, "does not fit")


def test_timeouts_and_lost_members_lead_there_too(rig: Rig) -> None:
    """The reason says what the last failure was."""
    group = rig.subscribe(max_deliveries=1, ack_timeout=5.0)
    rig.join(group)
    rig.numbers(1)
    rig.advance(5)
    inbox = rig.join(group)
    rig.numbers(2)
    rig.join(group)
    inbox.leave()
    rig.advance(10)
    assert {letter.reason for letter in rig.letters()} == {"ack timeout", "member left"}
    assert len(rig.letters()) == 3


def test_zero_max_deliveries_is_for_ever(rig: Rig) -> None:
    """Without a limit a message comes again as often as it fails."""
    group = rig.subscribe(max_deliveries=0, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(1)
    for attempt in range(1, 50):
        (message,) = inbox.take()
        assert message.attempt == attempt
        inbox.nack(message)
        rig.run()


def test_a_move_forgets_what_was_on_its_way_to_the_dead_letters(rig: Rig) -> None:
    """A seek while a dead letter is being stored delivers the message again, as it was asked to."""
    group = rig.subscribe(max_deliveries=1)
    inbox = rig.join(group)
    rig.numbers(1)
    inbox.nack(inbox.take()[0])
    rig.wait(rig.engine.seek, group, 0)
    assert inbox.offsets == [0]
    assert (group.lag(), group.in_flight()) == (1, 1)
