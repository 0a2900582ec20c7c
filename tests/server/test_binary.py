"""The binary protocol's types, seen from a raw socket."""

import json
import struct
from typing import Any

import pytest

from headrace.errors import (
    Closed,
    Conflict,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    NotFound,
    QueueFull,
    StaleDelivery,
    TooLarge,
)
from headrace.log.batch import encode, parse
from headrace.log.columns import Columns
from headrace.testing import RunningServer, wait_until
from headrace.wire.binary import PROPERTIES_BYTES_MAX
from tests.contract.raw_binary import (
    ACK,
    ADMIN,
    CLOSED,
    CREATE_SUBSCRIPTION,
    CREATE_TOPIC,
    DATA,
    DELETE_SUBSCRIPTION,
    EXTEND,
    FETCH,
    HEARTBEAT,
    NACK,
    PUBLISH,
    SUBSCRIBE,
    UNSUBSCRIBE,
    FrameSocket,
    frame,
)

PUBLISH_BATCH, DELIVER, SETTLE, CREDIT, STAGE = 16, 23, 24, 26, 27


def refused(
    frames: FrameSocket, type_: int, properties: dict[str, Any], body: bytes = b""
) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        frames.ask(type_, properties, body)
    assert frames.ask(HEARTBEAT).type == HEARTBEAT  # it goes on
    return caught.value


def admin(frames: FrameSocket, op: str, **arguments: object) -> Any:
    return json.loads(frames.ask(ADMIN, None, json.dumps({"op": op, **arguments}).encode()).body)


def join(
    frames: FrameSocket, name: str = "billing", topic: str = "orders", **options: object
) -> None:
    frames.ask(CREATE_SUBSCRIPTION, {"subscription": name, "topic": topic})
    frames.ask(SUBSCRIBE, {"subscription": name, "topic": topic, "ack": "manual", **options})


# --- mistakes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("type_", "properties", "body", "kind", "code"),
    [
        (15, {}, b"", InvalidArgument, "unknown_command"),
        (DATA, {}, b"", InvalidArgument, "unknown_command"),
        (1 << 31, {}, b"", InvalidArgument, "unknown_command"),
        (CREATE_TOPIC, {}, b"", InvalidArgument, "missing_property"),
        (CREATE_TOPIC, {"topic": "a", "partitions": "x"}, b"", InvalidArgument, "bad_command"),
        (CREATE_TOPIC, {"topic": "a"}, b"{", InvalidArgument, "bad_frame"),
        (CREATE_TOPIC, {"topic": "a"}, b"[]", InvalidArgument, "bad_frame"),
        (CREATE_TOPIC, {"topic": "a"}, b'{"name": "b"}', InvalidArgument, "unknown_setting"),
        (CREATE_TOPIC, {"topic": "a"}, b'{"self": 1}', InvalidArgument, "unknown_setting"),
        (PUBLISH, {}, b"x", InvalidArgument, "missing_property"),
        (PUBLISH, {"topic": "a/b"}, b"x", InvalidArgument, "invalid_topic"),
        (PUBLISH, {"topic": "a", "key64": "%%%"}, b"x", InvalidArgument, "invalid_key"),
        (PUBLISH, {"topic": "a"}, bytes((1 << 20) + 1), TooLarge, "message_too_large"),
        (PUBLISH_BATCH, {"topic": "a"}, b"", DataCorrupt, "invalid_batch"),
        (STAGE, {}, b"", InvalidArgument, "missing_property"),
        (STAGE, {"topic": "a"}, b"HRB1" + bytes(100), DataCorrupt, "invalid_batch"),
        (PUBLISH_BATCH, {"topic": "a"}, b"HRB1" + bytes(100), DataCorrupt, "invalid_batch"),
        (FETCH, {"topic": "nowhere"}, b"", NotFound, "topic_not_found"),
        (FETCH, {}, b"", InvalidArgument, "missing_property"),
        (CREATE_SUBSCRIPTION, {"topic": "a"}, b"", InvalidArgument, "missing_property"),
        (
            CREATE_SUBSCRIPTION,
            {"subscription": "s", "topic": "a"},
            b'{"start": 5}',
            InvalidArgument,
            "unknown_setting",
        ),
        (DELETE_SUBSCRIPTION, {"subscription": "s"}, b"", NotFound, "subscription_not_found"),
        (SUBSCRIBE, {}, b"", InvalidArgument, "missing_property"),
        (SUBSCRIBE, {"subscription": "s"}, b"", NotFound, "subscription_not_found"),
        (SUBSCRIBE, {"topic": "a", "credit": "-1"}, b"", InvalidArgument, "bad_command"),
        (UNSUBSCRIBE, {"topic": "a"}, b"", NotFound, "not_subscribed"),
        (ACK, {}, b"", InvalidArgument, "missing_property"),
        (ACK, {"lease": "5", "offset": "5"}, b"", StaleDelivery, "stale_delivery"),
        (NACK, {"lease": "5", "offset": "5"}, b"", StaleDelivery, "stale_delivery"),
        (EXTEND, {"lease": "5"}, b"", StaleDelivery, "stale_delivery"),
        (SETTLE, {}, b"123", InvalidArgument, "bad_frame"),
        (ADMIN, {}, b"", InvalidArgument, "bad_frame"),
        (ADMIN, {}, b"[]", InvalidArgument, "bad_frame"),
        (ADMIN, {}, b"{}", InvalidArgument, "unknown_operation"),
        (ADMIN, {}, b'{"op": ["x"]}', InvalidArgument, "unknown_operation"),
    ],
)
def test_a_mistake_is_answered_by_class_and_code_and_the_conversation_goes_on(
    frames: FrameSocket,
    type_: int,
    properties: dict[str, str],
    body: bytes,
    kind: type[HeadraceError],
    code: str,
) -> None:
    """The answer has the number of the request; the next request is understood."""
    frames.ask(HEARTBEAT)
    error = refused(frames, type_, properties, body)
    assert isinstance(error, kind)
    assert error.code == code


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("create_topic", {}),
        ("create_topic", {"topic": 5}),
        ("create_topic", {"topic": "a", "settings": []}),
        ("create_topic", {"topic": "a", "settings": {"name": "b"}}),
        ("create_topic", {"topic": "a", "colour": "red"}),
        ("change_topic", {"topic": "orders", "settings": {"self": 1}}),
        ("create_subscription", {"subscription": "s", "topic": "a", "settings": {"start": 1}}),
        ("create_subscription", {"subscription": "s", "topic": "a", "start": 1.5}),
        ("create_subscription", {"subscription": "s", "topic": "a", "start": True}),
        ("seek", {"subscription": "billing", "to": "soon"}),
        ("seek", {"subscription": "billing", "to": -5}),
        ("seek", {"subscription": "billing", "to": 1 << 70}),
        ("dead_letters", {"subscription": "billing", "limit": "all"}),
        ("redrive", {"subscription": "billing", "offsets": ["a"]}),
        ("redrive", {"subscription": "billing", "offsets": [[1]]}),
        ("redrive", {"subscription": "billing", "rate": -1}),
        ("redrive", {"subscription": "billing", "to": "the moon"}),
        ("purge_dead_letters", {"subscription": "billing", "offsets": [None]}),
        ("purge_dead_letters", {"subscription": "billing", "offsets": {"a": 1}}),
        ("edit_dead_letter", {"subscription": "billing", "offset": 0, "value": {}}),
        ("edit_dead_letter", {"subscription": "billing", "offset": 0, "value": {"data": 5}}),
        (
            "edit_dead_letter",
            {"subscription": "billing", "offset": 0, "value": {"data": "?", "encoding": "base64"}},
        ),
        ("edit_dead_letter", {"subscription": "billing", "offset": 0, "headers": {"a": 5}}),
        ("edit_dead_letter", {"subscription": "billing", "offset": 0, "headers": {"a\n": "x"}}),
        ("offset_at", {"topic": "orders", "at": "soon"}),
        ("find", {"id": "nobody"}),
        ("cancel", {"id": 5}),
        ("producer", {"name": "a/b"}),
    ],
)  # fmt: skip
def test_administration_refuses_what_cannot_be_in_words(
    frames: FrameSocket, op: str, arguments: dict[str, object]
) -> None:
    """Whatever the JSON holds: a typed error, never silence, never 'bug'."""
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    frames.ask(
        CREATE_SUBSCRIPTION,
        {"subscription": "billing", "topic": "orders"},
        b'{"max_deliveries": 1, "backoff": 0}',
    )
    frames.ask(SUBSCRIBE, {"subscription": "billing", "ack": "manual"})
    got = frames.next_arrival()
    frames.ask(NACK, {"lease": got.properties["lease"], "offset": 0})
    wait_until(
        lambda: admin(frames, "dead_letter_topics") == [{"topic": "billing.dlq", "letters": 1}]
    )
    error = refused(frames, ADMIN, {}, json.dumps({"op": op, **arguments}).encode())
    assert isinstance(error, (InvalidArgument, NotFound, HeadraceError))
    assert error.code not in ("bug", "error")


@pytest.mark.parametrize("length", [0, 31, 1 << 27, (1 << 32) - 1])
def test_a_length_that_makes_no_sense_ends_the_conversation(
    frames: FrameSocket, length: int
) -> None:
    """With an error that belongs to no request; what was before it is answered."""
    frames.send(frame(PUBLISH, 1, {"topic": "orders"}, b"x") + struct.pack(">I", length + 1 if length == 1 << 27 else length))  # fmt: skip
    if length == 1 << 27:  # as long as a frame may be: nothing is wrong yet
        assert frames.read().sequence == 1
        return
    assert frames.read().sequence == 1
    last = frames.read()
    assert (last.type, last.sequence, last.properties["status"]) == (ACK, 0, "error")
    with pytest.raises(Closed):
        frames.read()


def test_an_error_that_quotes_its_cause_fits_into_an_answer(frames: FrameSocket) -> None:
    """A name of 200 KB is refused in a sentence that is much shorter."""
    error = refused(frames, CREATE_SUBSCRIPTION, {"topic": "a", "subscription": "\x01" * 200_000})
    assert error.code == "invalid_subscription"
    assert len(error.message) < 10_000 < PROPERTIES_BYTES_MAX


# --- publishing and reading -------------------------------------------------------------------------
def test_a_batch_is_published_and_fetched_as_it_is(frames: FrameSocket) -> None:
    """The broker stamps its place and its time; the columns come back as they went."""
    batch = encode(Columns([b"one", b"two"], [b"k", None], [{"a": "b"}, None]))
    answer = frames.ask(PUBLISH_BATCH, {"topic": "orders"}, batch.raw()).properties
    assert (answer["offset"], answer["count"]) == ("0", "2")
    fetched = frames.ask(FETCH, {"topic": "orders", "offset": 0})
    found = parse(fetched.body)
    assert found is not None
    assert found.columns().values == [b"one", b"two"]
    assert found.columns().keys == [b"k", None]
    assert found.body == batch.body


def test_a_batch_of_an_idempotent_producer_is_stored_once(frames: FrameSocket) -> None:
    """Sent again it is answered with the first offset; with a gap it is refused."""
    batch = encode(Columns([b"one", b"two"]))
    batch.producer_id, batch.first_sequence = 77, 0
    first = frames.ask(PUBLISH_BATCH, {"topic": "orders"}, batch.raw()).properties
    again = frames.ask(PUBLISH_BATCH, {"topic": "orders"}, batch.raw()).properties
    assert (again["offset"], again["duplicate"]) == (first["offset"], "true")
    batch.first_sequence = 5
    assert refused(frames, PUBLISH_BATCH, {"topic": "orders"}, batch.raw()).code == "sequence_gap"
    assert admin(frames, "topic", topic="orders")["messages"] == 2


def test_a_piece_is_staged_for_a_commit(frames: FrameSocket) -> None:
    """Both halves of what it is meant for, or neither; then it is refused in words."""
    raw = encode(Columns([b"one"])).raw()
    for half in ({"name": "job"}, {"number": "1"}, {"name": "job", "number": "x"}):
        assert isinstance(refused(frames, STAGE, {"topic": "a", **half}, raw), InvalidArgument)
    answer = frames.ask(STAGE, {"topic": "a", "name": "job", "number": "1"}, raw).properties
    again = frames.ask(STAGE, {"topic": "a", "name": "job", "number": "1"}, raw).properties
    done = admin(frames, "commit_staged", name="job", number=1, pieces=[answer["piece"]])
    assert done == {"committed": True}
    assert admin(frames, "abort_staged", pieces=[again["piece"]]) == {"aborted": 1}


def test_waiting_holds_up_nothing_behind_it(frames: FrameSocket) -> None:
    """A long poll answers when there is something; the questions after it are answered before."""
    admin(frames, "create_topic", topic="orders")
    body = {"op": "wait_for", "positions": {"orders": {"0": 0}}, "wait": 30}
    frames.send(frame(ADMIN, 1_000, None, json.dumps(body).encode()))
    frames.send(frame(PUBLISH, 1_001, {"topic": "orders"}, b"x"))
    answers = [frames.read(), frames.read()]
    assert sorted(answer.sequence for answer in answers) == [1_000, 1_001]
    (news,) = [answer for answer in answers if answer.sequence == 1_000]
    assert json.loads(news.body) == {"news": True}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("positions", {}),
        ("positions", {"topics": 7}),
        ("positions", {"topics": "orders", "at": "soon"}),
        ("wait_for", {"positions": {}}),
        ("wait_for", {"positions": {"orders": {"x": 0}}, "wait": 1}),
        ("wait_for", {"positions": {"orders": 0}, "wait": 1}),
        ("wait_for", {"positions": {"orders": {"0": "0"}}, "wait": 1}),
        ("wait_for", {"positions": {}, "wait": -1}),
        ("advance", {"subscription": "group"}),
        ("advance", {"subscription": "__staging", "positions": {}}),
        ("commit_staged", {"name": "job", "number": 1}),
        ("commit_staged", {"name": "job", "number": "1", "pieces": []}),
        ("commit_staged", {"name": "job", "number": 1, "pieces": [7]}),
        ("commit_staged", {"name": "job", "number": 1, "pieces": [], "more": 1}),
        ("abort_staged", {"pieces": "7"}),
    ],
)
def test_what_jobs_ask_is_checked(frames: FrameSocket, op: str, arguments: dict[str, Any]) -> None:
    """Whatever is missing, left over or of another type is refused in words."""
    admin(frames, "create_topic", topic="orders")
    body = json.dumps({"op": op, **arguments}).encode()
    assert isinstance(refused(frames, ADMIN, {}, body), InvalidArgument)


def test_a_full_queue_is_refused_as_something_that_may_pass(frames: FrameSocket) -> None:
    """retryable=true: the very same publish may succeed later."""
    frames.ask(CREATE_TOPIC, {"topic": "orders"}, b'{"max_queue_size": 1}')
    frames.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    error = refused(frames, PUBLISH, {"topic": "orders"}, b"y")
    assert isinstance(error, QueueFull)
    assert error.retryable


def test_a_fetch_is_as_large_as_it_is_asked_for(frames: FrameSocket) -> None:
    """At least one batch, and no more than max_bytes beyond it."""
    for _ in range(10):
        frames.ask(PUBLISH, {"topic": "orders"}, bytes(1000))
    small = frames.ask(FETCH, {"topic": "orders", "offset": 0, "max_bytes": 1})
    large = frames.ask(FETCH, {"topic": "orders", "offset": 0})
    assert 1000 < len(small.body) < 2000
    assert len(large.body) > 10_000
    assert (large.properties["start_offset"], large.properties["end_offset"]) == ("0", "10")


# --- deliveries -----------------------------------------------------------------------------------
def test_the_answer_to_a_subscribe_comes_before_the_first_delivery(frames: FrameSocket) -> None:
    """So a client knows what the delivery belongs to."""
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    frames.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
    frames.send(frame(SUBSCRIBE, 50, {"subscription": "billing"}))
    assert frames.read().sequence == 50
    assert frames.read().type == DATA


def test_without_a_word_a_delivery_is_acknowledged_by_itself(frames: FrameSocket) -> None:
    """As in the seed: a SUBSCRIBE without ack=manual has nothing to acknowledge."""
    frames.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
    frames.ask(SUBSCRIBE, {"subscription": "billing"})
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    got = frames.next_arrival()
    assert (got.type, got.sequence, got.body) == (DATA, 0, b"x")
    assert "lease" not in got.properties
    assert admin(frames, "subscription", subscription="billing")["lag"] == 0


def test_deliveries_in_batches_come_as_they_lie_in_the_log(frames: FrameSocket) -> None:
    """mode=batch: one frame for many messages, settled in runs."""
    join(frames, mode="batch")
    batch = encode(Columns([b"%d" % number for number in range(10)]))
    frames.ask(PUBLISH_BATCH, {"topic": "orders"}, batch.raw())
    got = frames.next_arrival()
    assert got.type == DELIVER
    found = parse(got.body)
    assert found is not None
    assert found.values() == [b"%d" % number for number in range(10)]
    lease = int(got.properties["lease"])
    answer = frames.ask(SETTLE, {}, struct.pack(">QQQ", lease, 0, 6)).properties
    assert "stale" not in answer
    answer = frames.ask(SETTLE, {}, struct.pack(">QQQQQQ", lease, 5, 9, 999, 0, 4)).properties
    assert answer["stale"] == "7", "two were settled before, five belong to no delivery"
    assert admin(frames, "subscription", subscription="billing")["lag"] == 0


def test_a_run_that_is_none_settles_nothing(frames: FrameSocket) -> None:
    """From behind to before: not an error, and not a negative number either."""
    join(frames, mode="batch")
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    lease = int(frames.next_arrival().properties["lease"])
    answer = frames.ask(SETTLE, {}, struct.pack(">QQQ", lease, 9, 0)).properties
    assert int(answer.get("stale", "0")) >= 0
    assert admin(frames, "subscription", subscription="billing")["in_flight"] == 1


def test_acknowledging_up_to_an_offset(frames: FrameSocket) -> None:
    """Everything that this member holds before it is done too."""
    join(frames)
    for number in range(5):
        frames.ask(PUBLISH, {"topic": "orders"}, b"%d" % number)
    got = [frames.next_arrival() for _ in range(5)]
    lease = got[3].properties["lease"]
    frames.ask(ACK, {"lease": lease, "offset": 3, "up_to": "true"})
    stats = admin(frames, "subscription", subscription="billing")
    assert (stats["lag"], stats["in_flight"]) == (1, 1)


def test_a_message_given_back_unread_does_not_count_as_an_attempt(frames: FrameSocket) -> None:
    """NACK with release=true: the next delivery is the first again."""
    join(frames)
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    got = frames.next_arrival()
    frames.ask(NACK, {"lease": got.properties["lease"], "offset": 0, "release": "true"})
    again = frames.next_arrival()
    assert "attempt" not in again.properties
    frames.ask(NACK, {"lease": again.properties["lease"], "offset": 0, "delay": 0})
    assert frames.next_arrival().properties["attempt"] == "2"


def test_only_as_many_are_out_as_the_prefetch_says(frames: FrameSocket) -> None:
    """Each settled one makes room for one more."""
    join(frames, prefetch=2)
    for number in range(5):
        frames.ask(PUBLISH, {"topic": "orders"}, b"%d" % number)
    first, second = frames.next_arrival(), frames.next_arrival()
    assert admin(frames, "subscription", subscription="billing")["in_flight"] == 2
    assert frames.arrived == []
    frames.ask(ACK, {"lease": first.properties["lease"], "offset": first.sequence})
    assert frames.next_arrival().body == b"2"
    assert second.body == b"1"


def test_a_plain_subscriber_with_credit_gets_as_many_as_it_has_room_for(
    frames: FrameSocket,
) -> None:
    """CREDIT makes more room; nothing is lost meanwhile."""
    frames.ask(SUBSCRIBE, {"topic": "orders", "channel": "c", "credit": 2})
    for number in range(5):
        frames.ask(PUBLISH, {"topic": "orders"}, b"%d" % number)
    assert [frames.next_arrival().body for _ in range(2)] == [b"0", b"1"]
    assert frames.ask(HEARTBEAT).type == HEARTBEAT
    assert frames.arrived == []
    frames.send(frame(CREDIT, 0, {"topic": "orders", "channel": "c", "count": 2}))
    got = [frames.next_arrival() for _ in range(2)]
    assert [each.body for each in got] == [b"2", b"3"]
    assert {each.properties["channel"] for each in got} == {"c"}


def test_two_channels_of_one_topic_on_one_connection(frames: FrameSocket) -> None:
    """Each delivery says for which of them it is."""
    for channel in ("a", "b"):
        frames.ask(SUBSCRIBE, {"topic": "orders", "channel": channel})
    error = refused(frames, SUBSCRIBE, {"topic": "orders", "channel": "a"})
    assert isinstance(error, Conflict)
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    assert {frames.next_arrival().properties["channel"] for _ in range(2)} == {"a", "b"}
    frames.ask(UNSUBSCRIBE, {"topic": "orders", "channel": "a"})
    frames.ask(PUBLISH, {"topic": "orders"}, b"y")
    assert frames.next_arrival().properties["channel"] == "b"


@pytest.mark.parametrize(
    ("operation", "code", "kind"),
    [
        ({"op": "delete_topic", "topic": "orders"}, "topic_not_found", "topic_not_found"),
        (
            {"op": "delete_subscription", "subscription": "billing"},
            "subscription_not_found",
            "subscription_not_found",
        ),
    ],
)
def test_the_end_of_a_subscription_is_told(
    frames: FrameSocket, server: RunningServer, operation: dict[str, str], code: str, kind: str
) -> None:
    """CLOSED says which one it was and why, with the kind of the error."""
    join(frames)
    other = FrameSocket(server.address)
    other.ask(ADMIN, None, json.dumps(operation).encode())
    closed = frames.next_arrival()
    assert closed.type == CLOSED
    properties = closed.properties
    assert (properties["subscription"], properties["pattern"]) == ("billing", "orders")
    assert (properties["code"], properties["kind"]) == (code, kind)
    assert refused(frames, UNSUBSCRIBE, {"subscription": "billing"}).code == "not_subscribed"
    other.close()


def test_many_large_dead_letters_are_listed_in_portions(
    frames: FrameSocket, server: RunningServer
) -> None:
    """More than a frame can carry: as many as fit come, and the rest when asked for."""
    settings = b'{"max_deliveries": 1, "backoff": 0}'
    frames.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"}, settings)
    frames.ask(SUBSCRIBE, {"subscription": "billing", "ack": "manual", "prefetch": 1})
    value = b"\xff" * (1 << 20)
    for _ in range(20):
        frames.ask(PUBLISH, {"topic": "orders"}, value)
        got = frames.next_arrival()
        frames.ask(NACK, {"lease": got.properties["lease"], "offset": got.sequence})
    wait_until(lambda: admin(frames, "dead_letter_topics")[0]["letters"] == 20)
    first = admin(frames, "dead_letters", subscription="billing")
    assert 1 <= len(first) < 20
    found = first
    while page := admin(frames, "dead_letters", subscription="billing", after=found[-1]["offset"]):
        found += page
    assert [letter["offset"] for letter in found] == list(range(20))
