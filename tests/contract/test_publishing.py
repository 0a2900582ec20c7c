"""The contract: publishing and reading."""

import uuid
from datetime import datetime, timedelta

import pytest

from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
    TooLarge,
    TopicNotFound,
)
from headrace.model import derive_id, topic_hash
from headrace.testing import wait_until
from tests.contract.front_end import CAPITALS, CLASSES, DUPLICATE, HEADERS, FrontEnd, Session

needs = pytest.mark.needs
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_offsets_are_gapless_from_zero(session: Session) -> None:
    """A publish is answered with its place."""
    assert [session.publish("orders", b"%d" % number).offset for number in range(5)] == [*range(5)]


def test_what_was_published_can_be_fetched_at_once(session: Session) -> None:
    """An acknowledged message is there for every reader, at its offset."""
    session.publish("orders", b"zero")
    stored = session.publish("orders", b"one")
    (got,) = session.fetch("orders", stored.offset)
    assert (got.value, got.offset) == (b"one", stored.offset)


def test_any_bytes_are_carried(session: Session) -> None:
    """No byte means anything to the broker, not even none at all."""
    values = [b"", b"\0", bytes(range(256)), b"\r\nPUB a 1\r\n", "Köln".encode()]
    for value in values:
        session.publish("orders", value)
    assert [got.value for got in session.fetch("orders")] == values


def test_fetching_begins_where_it_is_told(session: Session) -> None:
    """By offset, from the earliest, from the latest, and no more than asked for."""
    for number in range(5):
        session.publish("orders", b"%d" % number)
    assert [got.value for got in session.fetch("orders", 3)] == [b"3", b"4"]
    assert [got.offset for got in session.fetch("orders", 1, limit=2)] == [1, 2]
    assert next(got.value for got in session.fetch("orders", "earliest")) == b"0"
    assert session.fetch("orders", "latest") == []
    assert session.fetch("orders", 5) == []


def test_fetching_begins_at_a_time(front: FrontEnd, session: Session) -> None:
    """The first message that is not older than the time."""
    session.publish("orders", b"early")
    early = session.fetch("orders")[0].timestamp or _now_ms()
    wait_until(lambda: _now_ms() > early + 20)
    between = datetime.fromtimestamp((early + 10) / 1000).astimezone()
    session.publish("orders", b"late")
    assert [got.value for got in session.fetch("orders", between)] == [b"late"]
    assert session.fetch("orders", between + timedelta(hours=1)) == []
    assert len(session.fetch("orders", between - timedelta(hours=1))) == 2


def _now_ms() -> int:
    return int(datetime.now().timestamp() * 1000)


@needs(HEADERS)
def test_keys_headers_and_ids_are_carried_untouched(session: Session) -> None:
    """Whatever the broker does with a message, these arrive as they were sent."""
    headers = {"source": "api", "traceparent": TRACEPARENT, "ort": "Köln", "empty": ""}
    id = uuid.uuid4()
    inbox = session.subscribe("orders")
    member = session.join("billing", "orders")
    stored = session.publish("orders", b"one", headers, key="customer-7", id=str(id))
    assert stored.id == id
    for got in (session.fetch("orders")[0], inbox.get(), member.get()):
        assert got.value == b"one"
        assert got.key == b"customer-7"
        assert got.headers == headers
        assert got.id == id


@needs(HEADERS, CAPITALS)
def test_capitals_in_the_names_of_headers_are_kept(session: Session) -> None:
    """A name is what the publisher made it."""
    session.publish("orders", b"one", {"Ort": "Köln", "ort": "Bonn"})
    assert session.fetch("orders")[0].headers == {"Ort": "Köln", "ort": "Bonn"}


@needs(HEADERS)
def test_a_null_value_is_carried_by_a_header(session: Session) -> None:
    """A protocol without null has an empty value; an empty value without the header is no null."""
    inbox = session.subscribe("orders")
    member = session.join("billing", "orders")
    session.publish("orders", b"", {"kafka-tombstone": "true"}, key="a")
    session.publish("orders", b"", key="a")
    for one, other in (session.fetch("orders"), inbox.take(2), member.take(2)):
        assert not one.value
        assert one.headers == {"kafka-tombstone": "true"}
        assert (other.value, other.headers) == (b"", {})


@needs(HEADERS)
def test_a_key_may_be_any_bytes(session: Session) -> None:
    """A key that is no text arrives as it was, too."""
    inbox = session.subscribe("orders")
    for key in (b"\xff\0\xfe", b"", b"a=b\0c=d"):
        session.publish("orders", b"one", key=key)
        assert inbox.get().key == key
    assert [got.key for got in session.fetch("orders")] == [b"\xff\0\xfe", b"", b"a=b\0c=d"]


@needs(HEADERS)
def test_without_an_id_one_is_derived_that_is_the_same_everywhere(session: Session) -> None:
    """From topic, partition and offset, so it needs no room."""
    inbox = session.subscribe("orders")
    stored = session.publish("orders", b"one")
    expected = derive_id(topic_hash("orders"), 0, 0)
    assert stored.id == expected
    assert inbox.get().id == expected
    assert session.fetch("orders")[0].id == expected


def test_a_key_chooses_the_partition_and_keeps_its_order(session: Session) -> None:
    """All messages of a key lie in one partition, one behind the other."""
    session.create_topic("orders", partitions=4)
    inbox = session.join("billing", "orders")
    for number in range(12):
        session.publish("orders", b"%d" % number, key=f"customer-{number % 3}")
    found = inbox.take(12)
    for customer in range(3):
        mine = [got for got in found if int(got.value) % 3 == customer]
        assert [int(got.value) for got in mine] == [
            customer,
            customer + 3,
            customer + 6,
            customer + 9,
        ]
        assert len({got.partition for got in mine}) == 1


def test_a_repeated_idempotency_key_is_stored_once(session: Session) -> None:
    """A caller that is not sure may ask again and gets the first answer."""
    first = session.publish("orders", b"one", idempotency_key="order-101")
    again = session.publish("orders", b"one", idempotency_key="order-101")
    other = session.publish("orders", b"two", idempotency_key="order-102")
    assert (again.offset, other.offset) == (first.offset, first.offset + 1)
    assert [got.value for got in session.fetch("orders")] == [b"one", b"two"]


@needs(DUPLICATE)
def test_a_repetition_says_that_it_is_one(session: Session) -> None:
    """Who counts what was stored can tell."""
    assert not session.publish("orders", b"one", idempotency_key="order-101").duplicate
    assert session.publish("orders", b"one", idempotency_key="order-101").duplicate


def test_a_repetition_is_known_after_a_restart(front: FrontEnd) -> None:
    """What makes it idempotent is stored with the message."""
    first = front.open().publish("orders", b"one", idempotency_key="order-101")
    front.restart()
    session = front.open()
    assert session.publish("orders", b"one", idempotency_key="order-101").offset == first.offset
    assert len(session.fetch("orders")) == 1


# --- refusals -------------------------------------------------------------------------------------
def refused(call: object, *arguments: object, **options: object) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        call(*arguments, **options)  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize(
    ("name", "code"),
    [("a/b", "invalid_topic"), ("..", "invalid_topic"), ("x" * 250, "invalid_topic"),
     ("__scheduled", "invalid_topic"), ("a*b", "invalid_topic")],
)  # fmt: skip
def test_a_name_that_cannot_be_is_refused_when_publishing(
    session: Session, name: str, code: str
) -> None:
    """The same code on every way in, and nothing is made of it."""
    assert refused(session.publish, name, b"x").code == code
    assert session.publish("orders", b"x").offset == 0


def test_a_message_that_is_too_large_is_refused(front: FrontEnd, session: Session) -> None:
    """With its own code; whoever is connected otherwise is not disturbed."""
    other = front.open()
    assert refused(session.publish, "orders", bytes((1 << 20) + 1)).code == "message_too_large"
    assert other.publish("orders", bytes(1 << 20)).offset == 0


def test_reading_where_nothing_is_says_why(session: Session) -> None:
    """A topic that is not there, and an offset that is not there yet, are two things."""
    assert refused(session.fetch, "nowhere", 0).code == "topic_not_found"
    session.publish("orders", b"x")
    assert refused(session.fetch, "orders", 7).code == "offset_out_of_range"
    assert refused(session.fetch, "orders", -1).code == "invalid_offset"
    assert refused(session.fetch, "orders", "yesterday").code == "invalid_offset"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"id": "not-a-uuid"}, "invalid_id"),
        ({"partition": 9}, "invalid_partition"),
        ({"to": "a/b"}, "invalid_subscription"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    session: Session, options: dict[str, object], code: str
) -> None:
    """Nothing is stored then."""
    session.publish("orders", b"x")
    assert refused(session.publish, "orders", b"y", **options).code == code
    assert len(session.fetch("orders")) == 1


@needs(CLASSES)
def test_errors_have_the_same_class_everywhere(session: Session) -> None:
    """What a program catches in process it catches over the network too."""
    session.publish("orders", b"x")
    with pytest.raises(InvalidArgument):
        session.publish("a/b", b"x")
    with pytest.raises(TooLarge):
        session.publish("orders", bytes((1 << 20) + 1))
    with pytest.raises(TopicNotFound):
        session.fetch("nowhere", 0)
    with pytest.raises(OffsetOutOfRange):
        session.fetch("orders", 7)
    with pytest.raises(NotFound):
        session.stats("nobody", "orders")
    with pytest.raises(InvalidArgument):
        session.create_topic("other", partitions=0)


def test_a_full_queue_refuses_and_takes_again(session: Session) -> None:
    """max_queue_size counts what is unread; the refusal may pass, and does."""
    session.create_topic("orders", max_queue_size=2)
    inbox = session.join("billing", "orders")
    session.publish("orders", b"one")
    session.publish("orders", b"two")
    first, _second = inbox.take(2)
    inbox.ack(first)
    assert session.publish("orders", b"three").offset == 2


def test_a_topic_can_be_made_twice_but_not_in_two_ways(session: Session) -> None:
    """The same again is fine; other settings are a conflict."""
    session.create_topic("orders", partitions=2)
    session.create_topic("orders", partitions=2)
    assert refused(session.create_topic, "orders", partitions=3).code in (
        "topic_exists",
        "conflict",
    )


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"partitions": 0}, "invalid_setting"),
        ({"partitions": "many"}, "invalid_setting"),
        ({"durability": "sometimes"}, "invalid_setting"),
        ({"colour": "red"}, "unknown_setting"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    session: Session, settings: dict[str, object], code: str
) -> None:
    """By the same code everywhere, and the topic is not made."""
    assert refused(session.create_topic, "orders", **settings).code == code
    assert refused(session.fetch, "orders", 0).code == "topic_not_found"


def test_a_deleted_topic_is_gone(session: Session) -> None:
    """And begins anew when it is published to again."""
    session.publish("orders", b"x")
    session.delete_topic("orders")
    assert refused(session.fetch, "orders", 0).code == "topic_not_found"
    assert refused(session.delete_topic, "orders").code == "topic_not_found"
    assert session.publish("orders", b"y").offset == 0
