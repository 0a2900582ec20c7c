"""Whose turn it is, what is to be tried again, when a delivery ends, and a request for a few messages."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.broker.deadlines import Deadlines
from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.members import Members
from headrace.broker.pull import Pull
from headrace.broker.retries import Retries
from headrace.errors import HeadraceError, StaleDelivery, SubscriptionNotFound
from tests.broker.rig import GROUP, TOPIC, Inbox, Rig

OWNER: Any = SimpleNamespace()
"""The subscription of leases that are looked at by themselves."""


# --- members --------------------------------------------------------------------------------------
def deal(members: Members, count: int) -> list[list[int]]:
    """Deal ``count`` messages as a subscription does; what each member got, in order of joining."""
    everybody = list(members)
    got: dict[int, list[int]] = {id(member): [] for member in everybody}
    left = list(range(count))
    while left:
        chosen, room = members.next(len(left), 10)
        if not chosen:
            break
        taken = min(len(left), len(chosen) * room)
        for number, member in enumerate(chosen):
            share = left[number : taken : len(chosen)]
            got[id(member)] += share
            member.in_flight += len(share)
        left = left[taken:]
    return [got[id(member)] for member in everybody]


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(1, 25), min_size=1, max_size=6),
)
def test_dealing_is_one_by_one_in_turn(prefetches: list[int], sizes: list[int]) -> None:
    """However the messages come, the next one goes to the next member that has room."""
    members = Members()
    for prefetch in prefetches:
        members.add(Member("m", Inbox(), prefetch))
    room = list(prefetches)
    turn = 0
    for size in sizes:
        expected: list[list[int]] = [[] for _ in prefetches]
        for number in range(size):
            for step in range(len(room)):
                at = (turn + step) % len(room)
                if room[at]:
                    room[at] -= 1
                    expected[at].append(number)
                    turn = at + 1
                    break
        assert deal(members, size) == expected


def test_a_member_has_room_by_number_bytes_and_sink() -> None:
    """The smallest of the three counts; one message is always allowed."""
    inbox = Inbox(space=7)
    member = Member("m", inbox, prefetch=10)
    assert member.room() == 7
    member.in_flight = 8
    assert member.room() == 2
    member.in_flight = 10
    assert member.room() == 0
    member.in_flight, member.in_flight_bytes = 0, 0
    assert member.room_for(limits.PREFETCH_BYTES_MAX * 2) == 1
    assert member.room_for(limits.PREFETCH_BYTES_MAX // 3) == 3
    member.in_flight, member.in_flight_bytes = 1, limits.PREFETCH_BYTES_MAX
    assert member.room() == 0


# --- leases ---------------------------------------------------------------------------------------
def lease_of(
    cursor: Any, offsets: Any, attempts: Any = 1, *, id: int = 1, deadline: float = 0.0
) -> Lease:
    count = len(offsets)
    member = Member("m", Inbox())
    return Lease(
        id, OWNER, member, cursor, offsets, attempts, deadline, 100, count, (1 << count) - 1
    )


@given(st.data())
def test_a_lease_is_a_set_of_bits(data: st.DataObject) -> None:
    """Which offsets it has and which are out, whether they are a range or a list."""
    if data.draw(st.booleans()):
        step = data.draw(st.integers(1, 4))
        offsets: Any = range(10, 10 + step * data.draw(st.integers(1, 20)), step)
    else:
        offsets = sorted(data.draw(st.sets(st.integers(0, 60), min_size=1, max_size=20)))
    cursor: Any = SimpleNamespace()
    lease = lease_of(cursor, offsets)
    settled = data.draw(st.sets(st.sampled_from(list(offsets))))
    for offset in settled:
        lease.mask &= ~(1 << lease.index(offset))
    for offset in range(70):
        assert lease.is_out(offset) == (offset in offsets and offset not in settled)
        assert (lease.index(offset) >= 0) == (offset in offsets)
    assert [offsets[at] for at in lease.out()] == [o for o in offsets if o not in settled]


def test_attempts_of_a_lease() -> None:
    """One number for all, or one for each."""
    cursor: Any = SimpleNamespace()
    assert lease_of(cursor, range(3), 2).attempt_at(1) == 2
    assert lease_of(cursor, range(3), [1, 5, 2]).attempt_at(1) == 5


def test_members_of_one_connection_share_a_register_of_leases() -> None:
    """A lease is found by its id while it is out, and not after it was settled or has ended."""
    rig = Rig()
    by_id: dict[int, Lease] = {}
    groups = [rig.subscribe(f"group-{number}") for number in range(3)]
    inboxes = [Inbox() for _ in groups]
    for group, inbox in zip(groups, inboxes, strict=True):
        group.join(Member("m", inbox, by_id=by_id))
    rig.publish(TOPIC, b"one")
    ids = [inbox.messages[0].lease.id for inbox in inboxes]
    assert [by_id[id].subscription for id in ids] == groups
    groups[0].ack(ids[0], 0)
    groups[1].seek(groups[1].cursors[(TOPIC, 0)], 1)
    groups[2].close()
    assert by_id == {}


# --- deadlines and retries ------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 100))), st.lists(st.floats(0, 30)))
def test_deadlines(changes: list[tuple[int, float]], pauses: list[float]) -> None:
    """Each lease ends once, at its last deadline or after, and never before; settled ones never."""
    leases: dict[int, Lease] = {}
    deadlines = Deadlines(leases)
    cursor: Any = SimpleNamespace()
    for number, at in changes:
        if at < 10 and number in leases:
            del leases[number]  # settled
            continue
        if number not in leases:
            leases[number] = lease_of(cursor, range(1), id=number, deadline=at)
        leases[number].deadline = at
        deadlines.add(leases[number])
    now = 0.0
    for pause in [*pauses, 1000.0]:
        coming = deadlines.next()
        assert coming is None or coming <= min(lease.deadline for lease in leases.values())
        now += pause
        due = {number for number, lease in leases.items() if lease.deadline <= now}
        ended = []
        for lease in deadlines.expired(now):
            ended.append(lease.id)
            del leases[lease.id]  # as its end would
        assert sorted(ended) == sorted(due)
    assert not leases
    assert deadlines.next() is None


def test_retries_come_in_the_order_of_their_times() -> None:
    """At once before later; those of one moment in the order they were added."""
    retries = Retries()
    one: Any = SimpleNamespace()
    two: Any = SimpleNamespace()
    retries.add(one, 1)
    retries.add_at(5.0, one, 2)
    retries.add_at(3.0, two, 3)
    retries.add_at(5.0, two, 4)
    assert (len(retries), retries.next_due()) == (4, 3.0)
    retries.collect(5.0)
    assert list(retries.ready) == [(one, 1), (two, 3), (one, 2), (two, 4)]
    assert retries.next_due() is None
    retries.add_at(9.0, two, 5)
    retries.forget(two)
    assert list(retries) == [(one, 1), (one, 2)]


# --- pulls ----------------------------------------------------------------------------------------
class Pulled:
    """A pull and what it was answered with."""

    def __init__(self, rig: Rig, limit: int = 10, wait: float = 0.0):
        self.answers: list[tuple[list[Delivery], HeadraceError | None]] = []
        self.pull = Pull(
            rig.engine.subscription(GROUP),
            rig.loop,
            limit,
            lambda *answer: self.answers.append(answer),
        )
        self.pull.start(wait)
        rig.run()

    @property
    def offsets(self) -> list[int]:
        ((deliveries, error),) = self.answers
        assert error is None
        return [message.offset for d in deliveries for message in d.messages()]


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.subscribe(ack_timeout=10.0, backoff=0.0)
    return rig


def test_a_pull_takes_what_is_there(rig: Rig) -> None:
    """Up to its limit, at once; what it got is out until it is acknowledged or overdue."""
    group = rig.engine.subscription(GROUP)
    rig.numbers(5)
    first = Pulled(rig, 3)
    assert first.offsets == [0, 1, 2]
    assert (len(group.members), group.in_flight()) == (0, 3)
    first.pull.ack()
    assert group.lag() == 2
    second = Pulled(rig)
    assert second.offsets == [3, 4]
    rig.advance(10)
    with pytest.raises(StaleDelivery):
        group.ack_lease(next(iter(second.answers[0][0])).lease.id)  # type: ignore[union-attr]
    second.pull.ack()  # too late: it comes again, and that is no error
    assert Pulled(rig).offsets == [3, 4]


def test_a_pull_waits(rig: Rig) -> None:
    """Until something comes, or until its time is up."""
    waiting = Pulled(rig, wait=5)
    assert waiting.answers == []
    rig.numbers(2)
    assert waiting.offsets == [0, 1]
    empty = Pulled(rig, wait=5)
    rig.advance(5)
    assert empty.offsets == []
    assert Pulled(rig, wait=0).offsets == []
    assert not rig.engine.subscription(GROUP).members


def test_a_pull_that_nobody_waits_for_any_more(rig: Rig) -> None:
    """What it got goes back at once, and was no delivery."""
    rig.numbers(2)
    gone = Pulled(rig)
    gone.pull.cancel()
    rig.run()
    inbox = rig.join()
    assert [(m.offset, m.attempt) for m in inbox.take()] == [(0, 1), (1, 1)]
    waiting = Pulled(rig, wait=5)
    waiting.pull.cancel()
    rig.numbers(1)
    assert inbox.offsets == [2]


def test_a_pull_ends_with_its_subscription(rig: Rig) -> None:
    """It is answered with the reason; others that wait are, too."""
    waiting = [Pulled(rig, wait=50) for _ in range(3)]
    rig.wait(rig.engine.unsubscribe, rig.engine.subscription(GROUP))
    for pulled in waiting:
        ((deliveries, error),) = pulled.answers
        assert deliveries == []
        assert isinstance(error, SubscriptionNotFound)


def test_the_order_cannot_change_under_a_pull(rig: Rig) -> None:
    """What is out counts, though its member has withdrawn."""
    rig.numbers(1, topic=TOPIC)
    pulled = Pulled(rig)
    with pytest.raises(HeadraceError) as caught:
        rig.subscribe(ordering="key")
    assert caught.value.code == "subscription_busy"
    pulled.pull.ack()
    rig.subscribe(ordering="key")


# --- a member that is frozen ------------------------------------------------------------------------
def test_a_frozen_member_makes_no_dead_letters_while_another_is_idle() -> None:
    """It lets every deadline pass, and the other acknowledges everything that it gets."""
    rig = Rig()
    group = rig.subscribe(max_deliveries=3, ack_timeout=10.0, backoff=0.0)
    frozen, healthy = rig.join(group, prefetch=50), rig.join(group, prefetch=50)
    for number in range(20):
        rig.numbers(20, start=20 * number)
        for _ in range(5):
            healthy.ack(*healthy.take())
            rig.advance(5)
    assert group.lag() == 0
    assert group.tally.dead_lettered == 0
    assert len(frozen.messages) < 20, "after its first deadline it gets nothing more"


def test_a_member_that_missed_a_deadline_gets_one_message_at_a_time() -> None:
    """Only if nobody else has room; after it has settled one, it is like the others."""
    rig = Rig()
    group = rig.subscribe(ack_timeout=10.0, backoff=0.0)
    slow = rig.join(group, prefetch=5)
    rig.numbers(5)
    busy = rig.join(group, prefetch=5)
    slow.take()
    rig.advance(10)
    assert len(busy.messages) == 5
    assert slow.messages == []
    rig.numbers(5, start=5)
    assert slow.offsets == [5]
    slow.ack(*slow.take())
    rig.run()
    assert slow.offsets == [6, 7, 8, 9]


def test_a_member_alone_is_not_passed_over() -> None:
    """There is nobody better."""
    rig = Rig()
    group = rig.subscribe(ack_timeout=10.0, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(3)
    inbox.take()
    rig.advance(10)
    assert len(inbox.messages) == 3


def test_the_last_attempt_goes_to_another_member_and_alone() -> None:
    """Not to the one that had the attempt before, even if that one has more room."""
    rig = Rig()
    group = rig.subscribe(max_deliveries=2, backoff=0.0)
    first = rig.join(group, prefetch=100)
    rig.numbers(3)
    for message in first.take():
        first.nack(message, delay=5)
    other = rig.join(group, prefetch=2)
    rig.numbers(1, start=3)
    rig.advance(5)
    taken = [inbox for inbox in (first, other) if any(m.attempt == 2 for m in inbox.messages)]
    assert taken == [other]
    assert all(len(d) == 1 for d in other.deliveries)
    while group.lag():
        first.ack(*first.take())
        other.ack(*other.take())
        rig.advance(1)
    assert group.tally.dead_lettered == 0
