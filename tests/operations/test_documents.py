"""What travels as JSON comes back as it went."""

import base64
import json
import uuid

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.model import DeadLetter, Message, Receipt, Scheduled
from headrace.operations import documents, views
from headrace.server.views import value_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(st.binary(max_size=40), TEXT.map(str.encode))
TIMES = st.integers(0, limits.TIMESTAMP_MS_MAX)
OFFSETS = st.integers(0, (1 << 53) - 1)
IDS = st.uuids()


@st.composite
def messages(draw: st.DrawFn) -> Message:
    return Message(
        draw(TEXT),
        draw(st.integers(0, 4095)),
        draw(OFFSETS),
        draw(TIMES),
        draw(st.none() | VALUES),
        draw(VALUES),
        draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        draw(st.none() | IDS.map(lambda id: id.bytes)),
        draw(st.integers(1, 100)),
    )


def there_and_back(document: object) -> dict[str, object]:
    """Through real JSON, as the wire does it."""
    loaded: dict[str, object] = orjson.loads(orjson.dumps(document))
    return loaded


@given(VALUES)
def test_bytes_come_back_as_they_went(value: bytes) -> None:
    """Text travels as text, the rest as base64, and says so."""
    document = documents.pack(value)
    assert documents.unpack(there_and_back(document)) == value
    assert ("encoding" in document) == (not _is_text(value))


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(messages())
def test_a_message_comes_back_as_it_went(message: Message) -> None:
    """Every field, the derived id too."""
    back = documents.to_message(there_and_back(documents.message(message)))
    assert back == message
    assert (back.id, back.timestamp, back.attempt) == (
        message.id,
        message.timestamp,
        message.attempt,
    )


@given(messages(), TEXT, TEXT, st.integers(0, 100), OFFSETS, TIMES)
def test_a_dead_letter_comes_back_as_it_went(
    message: Message, name: str, reason: str, attempts: int, offset: int, timestamp: int
) -> None:
    """With the message inside it."""
    letter = DeadLetter(offset, message, name, reason, attempts, timestamp)
    assert documents.to_letter(there_and_back(documents.letter(letter))) == letter


@given(IDS, TEXT, TIMES)
def test_a_scheduled_message_comes_back_as_it_went(
    id: uuid.UUID, topic: str, deliver_at: int
) -> None:
    """Its id cancels it, so it must be the same."""
    item = Scheduled(id, topic, deliver_at)
    assert documents.to_scheduled(there_and_back(documents.scheduled(item))) == item


def test_a_receipt_is_what_other_clients_expect() -> None:
    """id, topic, partition, offset and timestamp, as a publish over HTTP answers."""
    document = documents.receipt(Receipt("orders", 2, 7, 1000, count=3, duplicate=True))
    id = document.pop("id")
    assert uuid.UUID(id).version == 8
    assert document == {
        "topic": "orders",
        "partition": 2,
        "offset": 7,
        "timestamp": 1000,
        "count": 3,
        "duplicate": True,
    }


@pytest.mark.parametrize(
    ("key", "properties"),
    [
        (None, {}),
        (b"", {"key": ""}),
        (b"customer-7", {"key": "customer-7"}),
        ("Köln".encode(), {"key": "Köln"}),
        (b"\xff", {"key64": base64.b64encode(b"\xff").decode()}),
        (b"a\0b", {"key64": base64.b64encode(b"a\0b").decode()}),
    ],
)
def test_a_key_travels_as_text_where_it_is_text(
    key: bytes | None, properties: dict[str, str]
) -> None:
    """A NUL would end the property, so such a key travels as base64 too."""
    found: dict[str, str] = {}
    documents.put_key(found, key)
    assert found == properties


def test_documents_are_plain_json() -> None:
    """Nothing in them needs more than the standard library to be read."""
    message = Message("orders", 0, 1, 2, b"k", b"\xff", {"a": "b"})
    assert json.loads(json.dumps(documents.message(message)))["encoding"] == "base64"


def test_a_null_value_is_shown_as_null() -> None:
    """And what is shown can be published again; the JSON text ``null`` is another value."""
    headers = {"kafka-tombstone": "true"}
    message = Message("orders", 0, 7, 1, b"k", b"", headers)
    assert message.value is None
    shown = json.loads(views.dumps(message))
    assert (shown["data"], shown["headers"]) == (None, headers)
    assert value_of(shown["data"], None, shown["headers"]) == b""
    assert value_of(None, None, {}) == b"null"
    assert documents.to_message(json.loads(documents.dumps(message))).value is None
    assert Message("orders", 0, 7, 1, b"k", b"x", headers).value == b"x"
