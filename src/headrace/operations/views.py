"""Messages, dead letters, delayed messages and receipts as people and programs see them: the one shape of
HTTP, WebSocket, event streams and ``--json``::

    {"id": ..., "topic": ..., "partition": ..., "offset": ..., "data": ..., "key": ..., "headers": {...},
     "timestamp": "2023-01-01T00:00:00.000Z", "attempt": 1, "retryCount": 0}

``data`` is the JSON that was published, as it was, and null for a null value, which has the header
``kafka-tombstone``; what is not JSON is shown as text, and what is not
text as base64 with ``"encoding": "base64"``. A key that is not text is ``key64``. ``retryCount`` is
``attempt`` - 1. (Between broker and client, ``documents.py`` is used, from which a message can be made again.)
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import orjson

from headrace.errors import InvalidArgument
from headrace.model import DeadLetter, Message, Receipt, Scheduled
from headrace.operations import documents, exact_json

CONTENT_TYPE = "content-type"


YEAR_9999_MS = 253_402_300_799_999
"""A record may have a later time; ISO 8601 and Python have no form for it."""


def iso(timestamp_ms: int) -> str:
    time = min(timestamp_ms, YEAR_9999_MS)
    text = datetime.fromtimestamp(time / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def is_json_type(content_type: str | None) -> bool:
    if not content_type:
        return True
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("application/json", "text/json") or kind.endswith("+json")


def data_of(message: Message) -> dict[str, Any]:
    """``data`` and, where needed, ``encoding``."""
    value = message.value
    if value is None:
        return {"data": None}
    if is_json_type(message.headers.get(CONTENT_TYPE)):
        try:
            if len(value) > exact_json.DECODED_BYTES_MAX:
                exact_json.check(value)
            else:
                orjson.loads(value)
            return {"data": orjson.Fragment(value)}
        except (orjson.JSONDecodeError, InvalidArgument):
            pass
    return documents.pack(value)


def message_view(message: Message, *, delivery: str | None = None) -> dict[str, Any]:
    view: dict[str, Any] = {
        **documents.place(message),
        **data_of(message),
        "headers": dict(message.headers),
        "timestamp": iso(message.timestamp),
        "attempt": message.attempt,
        "retryCount": message.retry_count,
    }
    if message.key is not None:
        try:
            view["key"] = message.key.decode()
        except UnicodeDecodeError:
            view["key64"] = base64.b64encode(message.key).decode()
    if delivery is not None:
        view["delivery"] = delivery
    return view


def letter_view(letter: DeadLetter) -> dict[str, Any]:
    return documents.letter(letter, message_view, iso)


def scheduled_view(item: Scheduled) -> dict[str, Any]:
    return {"id": str(item.id), "topic": item.topic, "deliver_at": iso(item.deliver_at)}


def receipt_view(receipt: Receipt) -> dict[str, Any]:
    view = documents.place(receipt) | {"timestamp": iso(receipt.timestamp)}
    if receipt.is_delayed:
        del view["partition"], view["offset"]
        view["scheduled"] = True
    if receipt.duplicate:
        view["duplicate"] = True
        if not receipt.timestamp:  # it is known that it was stored, not when
            del view["timestamp"]
    return view


_VIEWS: dict[type, Any] = {
    Message: message_view,
    DeadLetter: letter_view,
    Scheduled: scheduled_view,
    Receipt: receipt_view,
}


def view(value: Any) -> Any:
    """What JSON has no form for, as it is shown; for ``default=`` of an encoder."""
    make = _VIEWS.get(type(value))
    if make is None:
        raise TypeError(f"{type(value).__name__} cannot be shown")
    return make(value)


def dumps(value: Any) -> bytes:
    """JSON of a value that may hold messages, letters, delayed messages and receipts."""
    return orjson.dumps(value, default=view, option=documents.OPTIONS)
