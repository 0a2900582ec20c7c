"""A Kafka record becomes a message and a record again, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bridge.translating import (
    HEADERS_HEADER,
    TOMBSTONE_HEADER,
    KafkaRecord,
    to_message,
    to_record,
)
from headrace.contents import check_headers
from headrace.errors import TooLarge

NAMES = st.one_of(
    st.sampled_from(
        ["a", "b", "", "a=b", "é", "kafka-tombstone", "kafka-headers", "headrace-time"]
    ),
    st.text(max_size=5).filter(lambda text: text.isascii()),
)
HEADERS = st.lists(st.tuples(NAMES, st.one_of(st.none(), st.binary(max_size=8))), max_size=5)


@given(
    key=st.one_of(st.none(), st.binary(max_size=8)),
    value=st.one_of(st.none(), st.binary(max_size=8)),
    headers=HEADERS,
)
def test_a_record_comes_back_as_it_was(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    """Keys, values, tombstones and any headers survive the way there and back."""
    record = KafkaRecord(key, value, headers, 17)
    message = to_message(record, 100)
    if message.headers:
        check_headers(message.headers)
    back = to_record(message.value, message.key, message.headers, 17)
    assert (back.key, back.value, list(back.headers), back.timestamp) == (key, value, headers, 17)


def test_plain_headers_are_headers() -> None:
    """Headers that Headrace can hold have their own names and texts."""
    record = KafkaRecord(b"k", b"v", [("trace", b"1"), ("who", "Zoë".encode())], 1)
    assert to_message(record, 10).headers == {"trace": "1", "who": "Zoë"}


def test_other_headers_are_kept_aside() -> None:
    """Of a name that occurs twice, the first is a header, and all are in one header of the bridge."""
    message = to_message(KafkaRecord(None, b"v", [("a", b"1"), ("a", b"\xff")], 1), 10)
    assert message.headers == {"a": "1", HEADERS_HEADER: '[["a","MQ=="],["a","/w=="]]'}


def test_a_tombstone_is_marked() -> None:
    """A null value is an empty one with a header; an empty value is only empty."""
    assert to_message(KafkaRecord(b"k", None, [], 1), 10) == (b"", b"k", {TOMBSTONE_HEADER: "true"})
    assert to_message(KafkaRecord(b"k", b"", [], 1), 10) == (b"", b"k", None)


def test_the_mark_of_somebody_else_is_a_header() -> None:
    """A message that is not empty is no tombstone, and headers that the bridge has not made are passed on."""
    record = to_record(b"x", None, {TOMBSTONE_HEADER: "true", HEADERS_HEADER: "what?"}, 1)
    assert record.value == b"x"
    assert dict(record.headers) == {TOMBSTONE_HEADER: b"true", HEADERS_HEADER: b"what?"}


@pytest.mark.parametrize(
    "record",
    [
        KafkaRecord(None, b"x" * 11, [], 1),
        KafkaRecord(b"k" * (1 << 17), b"", [], 1),
        KafkaRecord(None, b"", [("a", b"x" * (1 << 17))], 1),
        KafkaRecord(None, b"", [("a", b"\xff" * (1 << 17))], 1),
        KafkaRecord(None, b"", [("a", b"1")] * 20_000, 1),
    ],
    ids=["value", "key", "text header", "binary header", "many headers"],
)
def test_what_is_too_large_is_refused(record: KafkaRecord) -> None:
    """A value, key or headers above a limit of the broker raise TooLarge."""
    with pytest.raises(TooLarge):
        to_message(record, 10)
