"""The contract: who gets which message."""

import functools
import itertools
import operator
import time
from datetime import datetime

import pytest

from headrace.errors import Closed, HeadraceError, NotFound
from headrace.testing import wait_until
from tests.contract.front_end import CLASSES, MEMBERSHIP, SCHEDULE, SEEK, STAY, FrontEnd, Session

needs = pytest.mark.needs


def wait_for_members(session: Session, name: str, topic: str, count: int) -> None:
    wait_until(lambda: session.stats(name, topic)["members"] == count, what=f"{count} members")


# --- plain subscriptions --------------------------------------------------------------------------
def test_a_plain_subscriber_gets_what_comes_from_now_on(session: Session) -> None:
    """Not what was there before."""
    session.publish("orders", b"before")
    inbox = session.subscribe("orders")
    session.publish("orders", b"after")
    assert inbox.get().value == b"after"


def test_every_plain_subscriber_gets_every_message(front: FrontEnd, session: Session) -> None:
    """Fan-out to several, in the order of the topic."""
    inboxes = [session.subscribe("orders") for _ in range(2)]
    inboxes.append(front.open().subscribe("orders"))
    for number in range(10):
        session.publish("orders", b"%d" % number)
    for inbox in inboxes:
        assert inbox.values(10) == [b"%d" % number for number in range(10)]


def test_topics_are_kept_apart(session: Session) -> None:
    """Each subscriber gets its own topic and nothing else."""
    orders, users = session.subscribe("orders"), session.subscribe("users")
    session.publish("orders", b"Order #123")
    session.publish("users", b"User login")
    session.publish("orders", b"the end")
    assert orders.values(2) == [b"Order #123", b"the end"]
    assert users.get().value == b"User login"


def test_a_wildcard_stands_for_one_word_or_for_all_the_rest(session: Session) -> None:
    """Also for topics that are made later."""
    one_word, rest = session.subscribe("orders.*"), session.subscribe("orders.>")
    session.publish("orders.eu", b"eu")
    session.publish("orders.eu.de", b"de")
    session.publish("orders", b"none")
    session.publish("orders.us", b"us")
    first, second = one_word.take(2)
    assert {first.value, second.value} == {b"eu", b"us"}
    assert {got.topic for got in (first, second)} == {"orders.eu", "orders.us"}
    assert set(rest.values(3)) == {b"eu", b"de", b"us"}


def test_a_subscription_over_a_wildcard_covers_topics_that_come_later(session: Session) -> None:
    """From their first message on."""
    member = session.join("audit", "orders.>")
    session.publish("orders.eu", b"eu")
    got = member.get()
    assert (got.value, got.topic) == (b"eu", "orders.eu")
    member.ack(got)
    session.publish("orders.us", b"us")
    assert member.get().value == b"us"


def test_a_plain_subscription_has_nothing_to_acknowledge(session: Session) -> None:
    """It is refused in words, not ignored."""
    inbox = session.subscribe("orders")
    session.publish("orders", b"x")
    got = inbox.get()
    with pytest.raises(HeadraceError):
        inbox.ack(got)


# --- subscriptions --------------------------------------------------------------------------------
def test_a_subscription_begins_with_the_earliest_message(session: Session) -> None:
    """Unless told otherwise: nobody loses what was there before the first start."""
    session.publish("orders", b"before")
    assert session.join("billing", "orders").get().value == b"before"


def test_a_subscription_begins_where_it_is_told(session: Session) -> None:
    """At an offset, or at the end."""
    for number in range(3):
        session.publish("orders", b"%d" % number)
    session.create_subscription("third", "orders", start=2)
    session.create_subscription("new", "orders", start="latest")
    session.publish("orders", b"3")
    assert session.join("third", "orders").get().value == b"2"
    assert session.join("new", "orders").get().value == b"3"


def test_every_subscription_gets_every_message(session: Session) -> None:
    """Fan-out: one does not take anything from another."""
    members = [session.join(name, "orders") for name in ("billing", "mail", "stock")]
    for number in range(5):
        session.publish("orders", b"%d" % number)
    for member in members:
        assert member.values(5) == [b"%d" % number for number in range(5)]


@needs(MEMBERSHIP)
def test_the_members_of_a_subscription_share_in_turn(front: FrontEnd, session: Session) -> None:
    """Round-robin, message by message; each message goes to one of them."""
    members = [front.open().join("billing", "orders") for _ in range(3)]
    wait_for_members(session, "billing", "orders", 3)
    for number in range(12):
        session.publish("orders", b"%d" % number)
    shares = [[int(value) for value in member.values(4)] for member in members]
    assert sorted(functools.reduce(operator.iadd, shares, [])) == [*range(12)]
    for share in shares:
        assert [b - a for a, b in itertools.pairwise(share)] == [3, 3, 3]


@needs(MEMBERSHIP)
def test_a_member_without_room_is_passed_over(front: FrontEnd, session: Session) -> None:
    """Whoever has room gets it: a slow member does not hold up the others."""
    slow = front.open().join("billing", "orders", prefetch=1)
    wait_for_members(session, "billing", "orders", 1)
    session.publish("orders", b"0")
    held = slow.get()
    quick = front.open().join("billing", "orders", prefetch=100)
    for number in range(1, 6):
        session.publish("orders", b"%d" % number)
    assert quick.values(5) == [b"1", b"2", b"3", b"4", b"5"]
    slow.ack(held)
    session.publish("orders", b"6")


def test_a_direct_message_goes_to_the_one_it_names(session: Session) -> None:
    """And to nobody else, neither a subscription nor a plain subscriber."""
    billing, mail = session.join("billing", "orders"), session.join("mail", "orders")
    plain = session.subscribe("orders")
    session.publish("orders", b"for billing", to="billing")
    session.publish("orders", b"for all")
    assert billing.values(2) == [b"for billing", b"for all"]
    assert mail.get().value == b"for all"
    assert plain.get().value == b"for all"


def test_what_was_acknowledged_does_not_come_again(session: Session) -> None:
    """Not to the next member, and not after it has left."""
    session.publish("orders", b"one")
    session.publish("orders", b"two")
    member = session.join("billing", "orders")
    first, second = member.take(2)
    member.ack(first)
    member.close()
    got = session.join("billing", "orders").get()
    assert got.value == second.value


def test_a_message_does_not_outlive_its_time(session: Session) -> None:
    """After its ttl it is passed over; it stays in the log."""
    session.publish("orders", b"short", ttl=0.02)
    session.publish("orders", b"long", ttl=3600)
    made = datetime.now().timestamp()
    wait_until(lambda: datetime.now().timestamp() > made + 0.05)
    assert session.join("billing", "orders").get().value == b"long"
    assert len(session.fetch("orders")) == 2


# --- delayed --------------------------------------------------------------------------------------
def test_a_delayed_message_comes_when_its_time_has_come(session: Session) -> None:
    """After messages that were published before its time."""
    inbox = session.subscribe("orders")
    began = time.monotonic()
    assert session.publish("orders", b"later", delay=0.3).offset is None
    session.publish("orders", b"now")
    in_time = time.monotonic() - began < 0.3  # a busy machine may take longer
    values = inbox.values(2)
    assert time.monotonic() - began >= 0.3
    assert values == [b"now", b"later"] if in_time else sorted(values) == [b"later", b"now"]


@needs(SCHEDULE)
def test_delayed_messages_are_listed_and_cancelled(session: Session) -> None:
    """By the id of their receipt; what was cancelled never comes."""
    session.publish("orders", b"third", delay=900)
    second = session.publish("orders", b"second", delay=600)
    session.publish("users", b"other", delay=600)
    waiting = session.scheduled("orders")
    assert next(item.id for item in waiting) == second.id
    assert len(waiting) == 2
    assert waiting[0].deliver_at < waiting[1].deliver_at
    assert second.id is not None
    session.cancel(second.id)
    assert len(session.scheduled("orders")) == 1
    with pytest.raises(HeadraceError) as caught:
        session.cancel(second.id)
    assert caught.value.code == "not_scheduled"


@needs(SCHEDULE)
def test_delayed_messages_wait_over_a_restart(front: FrontEnd) -> None:
    """They are as durable as any other."""
    front.open().publish("orders", b"later", delay=600)
    front.restart()
    assert len(front.open().scheduled("orders")) == 1


# --- moving and ending ----------------------------------------------------------------------------
@needs(SEEK)
def test_a_subscription_can_be_replayed(session: Session) -> None:
    """From an offset, from the beginning; what was out becomes stale."""
    for number in range(4):
        session.publish("orders", b"%d" % number)
    member = session.join("billing", "orders")
    for got in member.take(4):
        member.ack(got)
    session.seek("billing", "orders", 2)
    assert member.values(2) == [b"2", b"3"]
    session.seek("billing", "orders", "earliest")
    assert member.values(4) == [b"0", b"1", b"2", b"3"]
    session.seek("billing", "orders", "latest")
    session.publish("orders", b"4")
    assert member.get().value == b"4"


def test_leaving_a_plain_subscription_ends_it(session: Session) -> None:
    """There are no more messages, and that is said."""
    inbox = session.subscribe("orders")
    session.publish("orders", b"one")
    assert inbox.get().value == b"one"
    inbox.close()
    session.publish("orders", b"two")
    with pytest.raises((Closed, OSError)):
        inbox.get()


def test_leaving_a_subscription_leaves_its_place(session: Session) -> None:
    """Who joins later goes on where it stood."""
    session.publish("orders", b"one")
    member = session.join("billing", "orders")
    member.ack(member.get())
    member.close()
    session.publish("orders", b"two")
    assert session.join("billing", "orders").get().value == b"two"


@needs(MEMBERSHIP)
def test_a_deleted_subscription_tells_its_members(session: Session) -> None:
    """They hear why there is nothing more."""
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    member.ack(member.get())
    session.delete_subscription("billing", "orders")
    with pytest.raises(HeadraceError) as caught:
        member.get()
    assert caught.value.code == "subscription_not_found"
    with pytest.raises(HeadraceError):
        session.stats("billing", "orders")


@needs(MEMBERSHIP)
def test_a_deleted_topic_takes_its_subscriptions_along(session: Session) -> None:
    """The members hear of the topic."""
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    member.get()
    session.delete_topic("orders")
    with pytest.raises(HeadraceError) as caught:
        member.get()
    assert caught.value.code == "topic_not_found"


@needs(CLASSES)
def test_the_end_of_a_subscription_is_an_error_of_the_same_class(session: Session) -> None:
    """NotFound, in process and over the network."""
    member = session.join("billing", "orders")
    session.delete_subscription("billing", "orders")
    with pytest.raises(NotFound) as caught:
        member.get()
    assert type(caught.value).__name__ == "SubscriptionNotFound"


# --- restarts -------------------------------------------------------------------------------------
def test_messages_and_positions_are_there_after_a_restart(front: FrontEnd) -> None:
    """What was acknowledged stays so, what was not comes again."""
    session = front.open()
    for number in range(4):
        session.publish("orders", b"%d" % number)
    member = session.join("billing", "orders")
    for got in member.take(2):
        member.ack(got)
    session.close()
    front.restart()
    session = front.open()
    assert [got.value for got in session.fetch("orders")] == [b"0", b"1", b"2", b"3"]
    assert session.join("billing", "orders").values(2) == [b"2", b"3"]
    assert session.publish("orders", b"4").offset == 4


@needs(STAY)
def test_who_is_connected_goes_on_after_a_restart(front: FrontEnd) -> None:
    """Publishing, plain subscriptions and memberships come back by themselves."""
    session = front.open()
    plain, member = session.subscribe("orders"), session.join("billing", "orders")
    session.publish("orders", b"before")
    assert plain.get().value == b"before"
    member.ack(member.get())
    front.restart()
    wait_for_members(session, "billing", "orders", 1)
    session.publish("orders", b"after")
    got = member.get()
    assert got.value == b"after"
    member.ack(got)
    assert plain.get().value == b"after"
