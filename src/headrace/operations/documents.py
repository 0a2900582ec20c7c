"""Values as JSON between broker and client (``views.py`` is how they are shown).

Each pair of functions loses nothing: bytes that are not text are sent as base64, with ``encoding``.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, get_args, get_origin

import orjson

from headrace.model import (
    DeadLetter,
    Message,
    ProducerIdentity,
    Receipt,
    Scheduled,
    position_text,
)


def pack(value: bytes) -> dict[str, str]:
    try:
        return {"data": value.decode()}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(value).decode(), "encoding": "base64"}


def unpack(document: dict[str, Any]) -> bytes:
    text: str = document["data"]
    if document.get("encoding") == "base64":
        return base64.b64decode(text, validate=True)
    return text.encode()


def place(item: Message | Receipt) -> dict[str, Any]:
    return {
        "id": str(item.id),
        "topic": item.topic,
        "partition": item.partition,
        "offset": item.offset,
    }


def message(item: Message) -> dict[str, Any]:
    return {
        **place(item),
        "timestamp": item.timestamp,
        "key": None if item.key is None else pack(item.key),
        "headers": dict(item.headers),
        "attempt": item.attempt,
        **pack(item.value or b""),  # the headers tell that it is null
    }


def to_message(document: dict[str, Any]) -> Message:
    return Message(
        document["topic"],
        document["partition"],
        document["offset"],
        document["timestamp"],
        None if document["key"] is None else unpack(document["key"]),
        unpack(document),
        document["headers"],
        uuid.UUID(document["id"]).bytes,
        document.get("attempt", 1),
    )


def letter(
    item: DeadLetter,
    message: Callable[[Message], dict[str, Any]] = message,
    time: Callable[[int], int | str] = int,
) -> dict[str, Any]:
    return {
        "offset": item.offset,
        "subscription": item.subscription,
        "reason": item.reason,
        "attempts": item.attempts,
        "timestamp": time(item.timestamp),
        "message": message(item.message),
    }


def to_letter(document: dict[str, Any]) -> DeadLetter:
    return DeadLetter(
        document["offset"],
        to_message(document["message"]),
        document["subscription"],
        document["reason"],
        document["attempts"],
        document["timestamp"],
    )


def scheduled(item: Scheduled) -> dict[str, Any]:
    return {"id": str(item.id), "topic": item.topic, "deliver_at": item.deliver_at}


def to_scheduled(document: dict[str, Any]) -> Scheduled:
    return Scheduled(uuid.UUID(document["id"]), document["topic"], document["deliver_at"])


def receipt(item: Receipt) -> dict[str, Any]:
    return {
        **place(item),
        "timestamp": item.timestamp,
        "count": item.count,
        "duplicate": item.duplicate,
    }


def put_key(properties: dict[str, str], key: bytes | None) -> None:
    """Add a key to the properties; a key that is not plain text is sent as base64."""
    if key is None:
        return
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        properties["key64"] = base64.b64encode(key).decode()
    else:
        properties["key"] = text


# --- by type ----------------------------------------------------------------------------------------
_DUMPS: dict[type, Callable[[Any], Any]] = {
    Message: message,
    DeadLetter: letter,
    Scheduled: scheduled,
    Receipt: receipt,
    datetime: position_text,
    bytes: pack,
}
_LOADS: dict[Any, Callable[[Any], Any]] = {
    Message: to_message,
    DeadLetter: to_letter,
    Scheduled: to_scheduled,
    ProducerIdentity: lambda document: ProducerIdentity(int(document["id"]), document["epoch"]),
}


OPTIONS = (
    orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_NON_STR_KEYS
)


def dumps(value: Any) -> bytes:
    """JSON of a value that may hold messages, letters, times and bytes."""
    return orjson.dumps(
        value,
        default=_dump,
        option=OPTIONS,
    )


def _dump(value: Any) -> Any:
    encode = _DUMPS.get(type(value))
    if encode is not None:
        return encode(value)
    if isinstance(value, ProducerIdentity):
        return {"id": str(value.id), "epoch": value.epoch}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def load(document: Any, kind: Any) -> Any:
    """Convert a document to a declared type; results that are plain dicts are not changed."""
    if get_origin(kind) is list and get_args(kind)[0] in _LOADS:
        read = _LOADS[get_args(kind)[0]]
        return [read(item) for item in document]
    return _LOADS[kind](document) if kind in _LOADS else document
