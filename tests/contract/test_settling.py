"""The contract: acknowledging, failing, giving up."""

import pytest

from headrace.errors import HeadraceError, StaleDelivery
from headrace.testing import wait_until
from tests.contract.front_end import DEAD_LETTERS, HEADERS, FrontEnd, Got, Inbox, Session

needs = pytest.mark.needs
AGAIN = {"backoff": 0.0, "ack_timeout": 30.0}


def test_an_acknowledged_message_is_done(session: Session) -> None:
    """The subscription has no lag then."""
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    member.ack(member.get())
    stats = session.stats("billing", "orders")
    assert (stats["lag"], stats["in_flight"], stats["acked"]) == (0, 0, 1)


def test_acknowledging_in_any_order(session: Session) -> None:
    """Only what was not acknowledged comes again."""
    session.create_subscription("billing", "orders", **AGAIN)
    for number in range(6):
        session.publish("orders", b"%d" % number)
    member = session.join("billing", "orders")
    found = member.take(6)
    for number in (5, 1, 3):
        member.ack(found[number])
    member.close()
    assert session.join("billing", "orders").values(3) == [b"0", b"2", b"4"]


def test_a_nack_brings_it_again_with_the_next_attempt(session: Session) -> None:
    """Before fresh ones, with its attempt number."""
    session.create_subscription("billing", "orders", **AGAIN)
    member = session.join("billing", "orders", prefetch=1)
    session.publish("orders", b"one")
    session.publish("orders", b"two")
    first = member.get()
    assert (first.value, first.attempt) == (b"one", 1)
    member.nack(first)
    again = member.get()
    assert (again.value, again.offset, again.attempt) == (b"one", first.offset, 2)
    member.ack(again)
    assert member.get().value == b"two"


def test_a_nack_with_a_delay_lets_others_go_first(session: Session) -> None:
    """It comes again, but not before its time."""
    session.create_subscription("billing", "orders", **AGAIN)
    member = session.join("billing", "orders", prefetch=1)
    session.publish("orders", b"one")
    session.publish("orders", b"two")
    member.nack(member.get(), delay=0.2)
    second = member.get()
    assert second.value == b"two"
    member.ack(second)
    again = member.get()
    assert (again.value, again.attempt) == (b"one", 2)


def test_a_message_that_is_not_settled_in_time_comes_again(session: Session) -> None:
    """The ack timeout is the subscription's; the attempt is counted."""
    session.create_subscription("billing", "orders", ack_timeout=0.2, backoff=0.0)
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    first = member.get()
    again = member.get()
    assert (again.value, again.attempt) == (b"one", 2)
    assert again.offset == first.offset
    assert session.stats("billing", "orders")["timeouts"] >= 1


def test_an_ack_that_comes_too_late_is_refused(session: Session) -> None:
    """It belongs to a delivery that has ended, and does not touch the one that has not."""
    session.create_subscription("billing", "orders", ack_timeout=0.2, backoff=0.0)
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    first = member.get()
    again = member.get()
    with pytest.raises(StaleDelivery):
        member.ack(first)
    while not _is_acked(member, again):
        again = member.get()  # this machine was busy
    assert session.stats("billing", "orders")["lag"] == 0


def _is_acked(member: Inbox, message: Got) -> bool:
    try:
        member.ack(message)
    except StaleDelivery:
        return False
    return True


@pytest.mark.parametrize("second", ["ack", "nack"])
def test_a_message_is_settled_once(session: Session, second: str) -> None:
    """What follows is refused, whatever it says."""
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    got = member.get()
    member.ack(got)
    with pytest.raises(StaleDelivery):
        getattr(member, second)(got)
    assert session.stats("billing", "orders")["lag"] == 0


def test_a_longer_deadline_can_be_asked_for(session: Session) -> None:
    """Extending keeps it out beyond its ack timeout."""
    session.create_subscription("billing", "orders", ack_timeout=0.4, backoff=0.0)
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    first = member.get()
    session.publish("orders", b"two")
    member.get()  # a delivery of its own: to extend one extends all of its messages
    member.extend(first, 60)
    again = member.get()
    assert (again.value, again.attempt) in ((b"two", 2), (b"one", 2))
    if again.value == b"two":
        member.ack(first)


def test_an_extension_without_a_number_is_one_ack_timeout(session: Session) -> None:
    """From now on."""
    session.create_subscription("billing", "orders", ack_timeout=30)
    member = session.join("billing", "orders")
    session.publish("orders", b"one")
    got = member.get()
    member.extend(got)
    member.ack(got)


def test_what_a_member_held_goes_to_the_others_when_it_leaves(
    front: FrontEnd, session: Session
) -> None:
    """At once, not after the ack timeout."""
    first = front.open().join("billing", "orders")
    session.publish("orders", b"one")
    assert first.get().value == b"one"
    second = front.open().join("billing", "orders")
    first.close()
    assert second.get().value == b"one"


def test_a_message_that_keeps_failing_is_given_up(session: Session) -> None:
    """After max_deliveries attempts it goes to the dead letters, and the rest goes on."""
    session.create_subscription("billing", "orders", max_deliveries=3, **AGAIN)
    member = session.join("billing", "orders", prefetch=1)
    session.publish("orders", b"bad")
    session.publish("orders", b"good")
    for attempt in (1, 2, 3):
        got = member.get()
        assert (got.value, got.attempt) == (b"bad", attempt)
        member.nack(got, reason="broken")
    assert member.get().value == b"good"
    wait_until(lambda: session.stats("billing", "orders")["dead_lettered"] == 1)
    (letter,) = session.fetch("billing.dlq", 0)
    assert letter.value == b"bad"


@needs(DEAD_LETTERS, HEADERS)
def test_a_dead_letter_has_its_payload_its_origin_and_the_reason(session: Session) -> None:
    """Everything it takes to understand what happened, and to send it again."""
    session.create_subscription("billing", "orders", max_deliveries=1, **AGAIN)
    session.publish("orders", b"fine", to="nobody")
    stored = session.publish("orders", b"bad", {"source": "api"}, key="customer-7")
    member = session.join("billing", "orders")
    member.nack(member.get(), reason="no such customer")
    wait_until(lambda: session.stats("billing", "orders")["dead_lettered"] == 1)
    (letter,) = session.dead_letters("billing")
    assert letter.message.value == b"bad"
    assert letter.message.key == b"customer-7"
    assert dict(letter.message.headers) == {"source": "api"}
    assert (letter.message.topic, letter.message.partition) == ("orders", 0)
    assert letter.message.offset == stored.offset
    assert letter.message.id == stored.id
    assert letter.subscription == "billing"
    assert letter.reason == "no such customer"
    assert letter.attempts == 1


@needs(DEAD_LETTERS)
def test_dead_letters_are_redriven_to_the_subscription_that_failed(session: Session) -> None:
    """They come again as new messages, to it and to nobody else; the list is empty then."""
    session.create_subscription("billing", "orders", max_deliveries=1, **AGAIN)
    member, other = session.join("billing", "orders"), session.join("mail", "orders")
    for number in range(3):
        session.publish("orders", b"%d" % number)
    for got in member.take(3):
        member.nack(got, reason="down")
    wait_until(lambda: session.stats("billing", "orders")["dead_lettered"] == 3)
    letters = [letter.message.value for letter in session.dead_letters("billing")]
    assert sorted(letters) == [b"0", b"1", b"2"]
    assert session.redrive("billing") == 3
    assert sorted(member.values(3)) == [b"0", b"1", b"2"]
    assert session.dead_letters("billing") == []
    session.publish("orders", b"end")
    assert other.values(4) == [b"0", b"1", b"2", b"end"]


@needs(DEAD_LETTERS)
def test_without_dead_letters_that_is_said(session: Session) -> None:
    """An empty list if the subscription exists. A misspelt name must not look like that: it has a code."""
    session.create_subscription("billing", "orders")
    assert session.dead_letters("billing") == []
    with pytest.raises(HeadraceError) as caught:
        session.dead_letters("biling")
    assert caught.value.code == "no_dead_letters"


def test_joining_what_is_not_a_name_is_refused(session: Session) -> None:
    """The same codes as for every other name."""
    with pytest.raises(HeadraceError) as caught:
        session.join("a/b", "orders")
    assert caught.value.code == "invalid_subscription"
    with pytest.raises(HeadraceError) as caught:
        session.join("billing", "a/b")
    assert caught.value.code == "invalid_topic"
    with pytest.raises(HeadraceError) as caught:
        session.subscribe("a..>.b")
    assert caught.value.code == "invalid_topic"
