"""The nouns: names, wildcards, ids, messages, receipts and settings, and what each refuses."""

import math
import pickle
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.contents import check_headers, check_key, check_value
from headrace.errors import Closed, HeadraceError, InvalidArgument, RequestTimeout, TooLarge
from headrace.model import (
    Message,
    Receipt,
    SubscriptionSettings,
    TopicSettings,
    check_pattern,
    check_reason,
    check_subscription_name,
    check_topic_name,
    derive_id,
    is_pattern,
    parse_id,
    pattern_matches,
    split_id,
    topic_hash,
)
from headrace.times import check_seconds

WORD = st.text("abcAB09_-", min_size=1, max_size=4)
NAMES = st.lists(WORD, min_size=1, max_size=4).map(".".join)


# --- names --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * 200, "...", "-", "a..b", "_private"])
def test_names(name: str) -> None:
    """Letters, digits, dot, underscore and hyphen; a name is given back as it is."""
    assert check_topic_name(name) == name
    assert check_subscription_name(name) == name
    assert check_pattern(name) == name


@pytest.mark.parametrize(
    "bad",
    ["", ".", "..", "a/b", "a\\b", "a b", "a\n", "\na", "a\0b", "ä", "a*", "a>", "@a", "a%2f", "a:b",
     "__a", "x" * 250, b"a", None, 7, True, ["a"], "a\u2028", "١"],
)  # fmt: skip
def test_names_that_are_none(bad: Any) -> None:
    """A name becomes a directory and a word on the wire, so it is strict."""
    with pytest.raises(InvalidArgument) as caught:
        check_topic_name(bad)
    assert caught.value.code == "invalid_topic"
    with pytest.raises(InvalidArgument) as caught:
        check_subscription_name(bad)
    assert caught.value.code == "invalid_subscription"


def test_the_brokers_own_names() -> None:
    """Two underscores in front belong to the broker, which may use them."""
    assert check_topic_name("__scheduled", internal=True) == "__scheduled"
    assert check_subscription_name("__schedule", internal=True) == "__schedule"


def test_a_subscription_name_leaves_room_for_its_dead_letters() -> None:
    """The longest name with ``.dlq`` behind it is a topic's name."""
    longest = "x" * limits.SUBSCRIPTION_NAME_CHARS_MAX
    check_topic_name(check_subscription_name(longest) + ".dlq")
    with pytest.raises(InvalidArgument):
        check_subscription_name(longest + "x")


# --- wildcards ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pattern", "topic", "meant"),
    [
        ("orders", "orders", True),
        ("orders", "orders.eu", False),
        ("orders.*", "orders.eu", True),
        ("orders.*", "orders", False),
        ("orders.*", "orders.eu.west", False),
        ("orders.>", "orders.eu", True),
        ("orders.>", "orders.eu.west", True),
        ("orders.>", "orders", False),
        ("*", "orders", True),
        ("*", "orders.eu", False),
        (">", "orders", True),
        (">", "a.b.c.d", True),
        ("*.eu", "orders.eu", True),
        ("*.eu", "eu", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c", True),
        (">", "__scheduled", False),
        ("*", "__scheduled", False),
        (">", "billing.dlq", False),
        ("*.dlq", "billing.dlq", False),
        ("billing.dlq", "billing.dlq", True),
        ("__scheduled", "__scheduled", True),
    ],
)
def test_what_a_pattern_means(pattern: str, topic: str, meant: bool) -> None:
    """``*`` is one word, a last ``>`` the rest; internal and dead-letter topics must be named."""
    assert pattern_matches(pattern, topic) is meant


@pytest.mark.parametrize("pattern", ["*", ">", "a.*", "*.a", "a.>", "*.*", "a.*.>"])
def test_patterns(pattern: str) -> None:
    """Wildcards stand alone between dots."""
    assert is_pattern(pattern)
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize(
    "bad", ["a*", "*a", ">.a", "a.>.b", "a..*", ".*", "*.", "a.**", "a b.*", "*" * 250, "ä.*"]
)
def test_patterns_that_are_none(bad: str) -> None:
    """Anything else with a star or an arrow in it is refused."""
    with pytest.raises(InvalidArgument) as caught:
        check_pattern(bad)
    assert caught.value.code == "invalid_topic"


@given(NAMES, st.data())
def test_a_topic_is_meant_by_its_own_generalisations(topic: str, data: st.DataObject) -> None:
    """Any words replaced by ``*``, or any tail by ``>``, still mean the topic."""
    words = topic.split(".")
    loose = [data.draw(st.sampled_from([word, "*"])) for word in words]
    hidden = topic.startswith("__") or topic.endswith(".dlq")
    pattern = ".".join(loose)
    assert pattern_matches(pattern, topic) is (not hidden or pattern == topic)
    cut = data.draw(st.integers(0, len(words) - 1))
    tail = ".".join([*loose[:cut], ">"])
    assert check_pattern(tail)
    assert pattern_matches(tail, topic) is not hidden


# --- ids ------------------------------------------------------------------------------------------
@given(
    NAMES,
    st.integers(0, limits.PARTITIONS_PER_TOPIC_MAX - 1),
    st.integers(0, limits.OFFSET_MAX),
)
def test_an_id_leads_back(topic: str, partition: int, offset: int) -> None:
    """Topic, partition and offset make a UUID, and the UUID gives them back."""
    derived = derive_id(topic_hash(topic), partition, offset)
    assert split_id(derived) == (topic_hash(topic), partition, offset)
    assert (derived.version, derived.variant) == (8, uuid.RFC_4122)
    assert parse_id(str(derived)) == parse_id(derived) == derived


@given(st.uuids(version=4) | st.uuids(version=1))
def test_a_clients_id_is_not_mistaken_for_one(own: uuid.UUID) -> None:
    """Random and time-based UUIDs are no derived ones."""
    assert split_id(own) is None


@pytest.mark.parametrize("bad", ["", "x", 7, None, b"1234567890123456", "1" * 33, []])
def test_ids_that_are_none(bad: Any) -> None:
    """What is no UUID is refused by name."""
    with pytest.raises(InvalidArgument) as caught:
        parse_id(bad)
    assert caught.value.code == "invalid_id"


def test_the_hash_is_a_promise() -> None:
    """Ids are kept by users, so the hash of a name must never change."""
    assert topic_hash("orders") == 0x1C168ADB00D2
    assert str(derive_id(topic_hash("orders"), 3, 17)) == "1c168adb-00d2-8003-8000-000000000011"


# --- messages and receipts ------------------------------------------------------------------------
def message(**more: Any) -> Message:
    given = {"topic": "orders", "partition": 1, "offset": 7, "timestamp": 5, "key": None,
             "value": b"v", "headers": None}  # fmt: skip
    return Message(**(given | more))


def test_a_message() -> None:
    """Its value has three names; its id is derived unless it was given; retries are attempts less one."""
    plain = message(value="grüße".encode(), attempt=3)
    assert plain.value == plain.payload == plain.body
    assert (plain.text(), plain.headers, plain.retry_count) == ("grüße", {}, 2)
    assert plain.id == derive_id(topic_hash("orders"), 1, 7)
    assert message(id=bytes(16)).id == plain.id
    own = uuid.uuid4()
    assert message(id=own.bytes).id == own


def test_messages_are_equal_by_what_they_say() -> None:
    """Place and content count; the time and the attempt do not."""
    assert message() == message(timestamp=6, attempt=2)
    assert hash(message()) == hash(message(attempt=2))
    for other in ({"topic": "x"}, {"partition": 2}, {"offset": 8}, {"value": b"w"}, {"key": b"k"},
                  {"headers": {"a": "b"}}):  # fmt: skip
        assert message() != message(**other)
    assert message() != "message"
    assert len({message(), message()}) == 1


def test_a_message_that_was_not_delivered_cannot_be_settled() -> None:
    """A fetched one says what to use instead."""
    for settle in (message().ack, message().nack, message().extend):
        with pytest.raises(Closed) as caught:
            settle()
        assert caught.value.code == "not_a_delivery"


def test_settling_goes_to_whoever_handed_it_out() -> None:
    """With the delay, the reason and the seconds that were given."""
    calls: list[Any] = []

    class Settler:
        def ack(self, message: Message) -> None:
            calls.append(("ack", message.offset))

        def nack(self, message: Message, delay: float | None, reason: str) -> None:
            calls.append(("nack", delay, reason))

        def extend(self, message: Message, seconds: float | None) -> None:
            calls.append(("extend", seconds))

    held = message(settling=Settler())
    held.ack()
    held.nack(2.5, "late")
    held.nack()
    held.extend(9)
    assert calls == [("ack", 7), ("nack", 2.5, "late"), ("nack", None, "nack"), ("extend", 9)]


def test_what_they_look_like() -> None:
    """Short enough for a log line."""
    assert repr(message()) == "<Message orders/1@7 b'v'>"
    assert len(repr(message(value=bytes(10_000)))) < 400
    assert repr(Receipt("orders", 0, 3, 0, 4)) == "<Receipt orders/0@3..6>"
    assert repr(Receipt("orders", 0, 3, 0, duplicate=True)) == "<Receipt orders/0@3 (again)>"


def test_a_receipt() -> None:
    """It says where the first record is and how many follow."""
    receipt = Receipt("orders", 2, 5, 99, 3)
    assert (receipt.offsets, receipt.timestamp) == (range(5, 8), 99)
    assert receipt.id == derive_id(topic_hash("orders"), 2, 5)
    own = uuid.uuid4()
    assert Receipt("orders", 2, 5, 99, id=own.bytes).id == own


# --- settings -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("ack_timeout", 0), ("ack_timeout", -1), ("ack_timeout", math.nan), ("ack_timeout", math.inf),
        ("ack_timeout", "30"), ("ack_timeout", limits.ACK_TIMEOUT_S_MAX + 1), ("ack_timeout", None),
        ("max_deliveries", -1), ("max_deliveries", 1.5), ("max_deliveries", True),
        ("max_deliveries", limits.MAX_DELIVERIES_MAX + 1), ("ordering", "random"),
        ("ordering", None), ("backoff", -0.1), ("backoff", "x"), ("backoff_max", 86_401),
        ("dead_letter_topic", "a/b"), ("dead_letter_topic", "__x"), ("dead_letter_topic", 7),
    ],
)  # fmt: skip
def test_bad_settings_of_a_subscription(name: str, bad: Any) -> None:
    """Each is refused, in the making and in a change, and the error names it."""
    with pytest.raises(InvalidArgument) as caught:
        SubscriptionSettings(**{name: bad})
    if name != "dead_letter_topic":
        assert name in caught.value.message
    with pytest.raises(InvalidArgument):
        SubscriptionSettings().but({name: bad})


def test_settings_round_trip() -> None:
    """As a dict and back; some changed; unknown ones refused by name."""
    settings = SubscriptionSettings(ack_timeout=5, ordering="key")
    assert SubscriptionSettings.of(settings.as_dict()) == settings
    assert settings.but({"max_deliveries": 9}).ack_timeout == 5
    topic = TopicSettings(partitions=3, durability="interval")
    assert TopicSettings.of(topic.as_dict()) == topic
    for kind in (SubscriptionSettings, TopicSettings):
        with pytest.raises(InvalidArgument) as caught:
            kind.of({"colour": "red"})
        assert caught.value.code == "unknown_setting"
        assert "colour" in caught.value.message


@given(st.floats(0, 100), st.floats(0, 1000), st.integers(1, 10_000))
def test_the_backoff_doubles_up_to_its_cap(first: float, cap: float, attempt: int) -> None:
    """Never less than before, never above the cap, whatever the attempt."""
    settings = SubscriptionSettings(backoff=first, backoff_max=cap)
    pause = settings.delay_after(attempt)
    assert pause == min(cap, first * 2 ** min(attempt - 1, 40))
    assert pause <= settings.delay_after(attempt + 1) <= cap


# --- what a message may be made of ------------------------------------------------------------------
def test_values_and_keys() -> None:
    """Bytes of any kind, or text; within their bounds."""
    for given_, stored in (
        (b"a", b"a"),
        ("ä", "ä".encode()),
        (bytearray(b"b"), b"b"),
        (memoryview(b"c"), b"c"),
    ):
        assert check_value(given_, 10) == check_key(given_) == stored
    assert check_value(b"", 0) == b""
    assert len(check_value(bytes(10), 10)) == 10
    with pytest.raises(TooLarge) as caught:
        check_value(bytes(11), 10)
    assert caught.value.code == "message_too_large"
    with pytest.raises(TooLarge) as caught:
        check_key(bytes(limits.KEY_BYTES_MAX + 1))
    assert caught.value.code == "key_too_large"
    for bad in (1, None, {1}, "\ud800"):
        with pytest.raises(InvalidArgument):
            check_value(bad, 10)
        with pytest.raises(InvalidArgument):
            check_key(bad)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4))
def test_headers_that_pass_fit_everywhere(headers: dict[str, str]) -> None:
    """What is accepted has printable names, no line ends, no NUL, and is Unicode."""
    try:
        assert check_headers(headers) is headers
    except InvalidArgument:
        return
    for name, value in headers.items():
        assert name.isprintable()
        assert "=" not in name
        assert name
        assert not {"\0", "\r", "\n"} & set(value)
        (name + value).encode()


@pytest.mark.parametrize("bad", [-1, "1", True, None, math.nan, math.inf, 11, [1]])
def test_seconds(bad: Any) -> None:
    """A number from 0 to a bound; the code says which argument it was."""
    with pytest.raises(InvalidArgument) as caught:
        check_seconds("delay", bad, 10)
    assert caught.value.code == "invalid_delay"
    assert check_seconds("delay", 10, 10) == 10.0
    assert check_seconds("delay", 0, 10) == 0.0


def test_a_reason_is_text() -> None:
    """Whatever it says; nothing else."""
    assert check_reason("") == ""
    with pytest.raises(InvalidArgument) as caught:
        check_reason(None)
    assert caught.value.code == "invalid_reason"


def test_errors_travel() -> None:
    """An error that was pickled is the same error: class, code, sentence and whether to retry."""
    for error in (
        InvalidArgument("no", code="invalid_topic"),
        Closed("over"),
        HeadraceError("x", code="y", retryable=True),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (again.code, again.message, again.retryable) == (
            error.code,
            error.message,
            error.retryable,
        )
        assert str(again) == error.message
        assert error.code in repr(error)


# --- JSON, times and durations ----------------------------------------------------------------------
def test_a_dict_or_a_list_is_published_as_json() -> None:
    """Nothing is lost on the way: long numbers and text beyond ASCII are kept."""
    value = {"id": 2**70, "name": "Grüße", "items": [1, None, True, 2.5]}
    message = Message("orders", 0, 0, 0, None, check_value(value, 1000), None)
    assert message.json() == value
    assert check_value([1, {"a": "b"}], 100) == b'[1,{"a":"b"}]'


@pytest.mark.parametrize(
    "value", [{"time": datetime.now(UTC)}, [float("nan")], [b"bytes"], {(1, 2): 3}, ["\ud800"]]
)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    """With a sentence, and not by storing something else."""
    with pytest.raises(InvalidArgument) as caught:
        check_value(value, 1000)
    assert caught.value.code == "invalid_value"


def test_a_value_that_is_not_json_says_so() -> None:
    """The error names the message."""
    message = Message("orders", 3, 7, 0, None, b"{oops", None)
    with pytest.raises(InvalidArgument, match=r"orders/3@7.*is not JSON") as caught:
        message.json()
    assert caught.value.code == "invalid_json"


def test_a_value_that_is_not_json_is_a_value_error() -> None:
    """Whoever knows the module ``json`` writes ``except ValueError``, also for JSON that is nested too deeply."""
    for value in (b"{oops", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match="is not JSON"):
            Message("orders", 3, 7, 0, None, value, None).json()


def test_a_delayed_receipt_has_no_place() -> None:
    """Not an offset that looks like one."""
    own = uuid.uuid4()
    receipt = Receipt("orders", None, None, 99, id=own.bytes)
    assert (receipt.partition, receipt.offset, list(receipt.offsets)) == (None, None, [])
    assert (receipt.is_delayed, receipt.id) == (True, own)
    assert repr(receipt) == "<Receipt orders, delayed>"


def test_a_request_timeout_is_a_timeout() -> None:
    """Code that knows nothing of Headrace catches it; it is still all that a HeadraceError is."""
    error = RequestTimeout("too late", code="no_message")
    assert isinstance(error, TimeoutError)
    assert (str(error), error.code, error.retryable) == ("too late", "no_message", True)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (RequestTimeout, "too late", "no_message")
