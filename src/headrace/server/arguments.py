"""Arguments that arrive as text, in text commands, binary properties and HTTP queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from msgspec import Meta

from headrace.checking import check
from headrace.errors import InvalidArgument
from headrace.model import PublishOptions, Receipt
from headrace.notation import MILLISECONDS, parse_time
from headrace.operations.arguments import Seconds
from headrace.server.views import key_of


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def number_of(text: str, name: str) -> int:
    if _is_number(text):
        return int(text)
    raise InvalidArgument(f"{name} is a whole number, not {text[:40]!r}", code="bad_command")


def seconds_of(text: str, name: str) -> float:
    return float(check(name, text, Seconds, strict=False))


def milliseconds_of(text: str, name: str, high: int, code: str = "invalid_argument") -> int:
    """A number of milliseconds, or a duration with a unit."""
    kind = Annotated[int, Meta(ge=0, le=high), MILLISECONDS]
    return int(check(name, text, kind, code=code, strict=False))


def time_of(text: str, name: str) -> int:
    """Milliseconds since 1970, or a time."""
    return int(text) if _is_number(text) else parse_time(name, text, code="bad_command")


def _as_it_is(text: str, name: str) -> str:
    return text


PUBLISH_OPTIONS: dict[str, Callable[[str, str], Any]] = {
    "key": _as_it_is,
    "key64": lambda text, name: key_of(text),
    "id": _as_it_is,
    "to": _as_it_is,
    "partition": number_of,
    "delay": seconds_of,
    "deliver_at": time_of,
    "ttl": seconds_of,
    "timestamp": time_of,
    "idempotency_key": _as_it_is,
    "producer_id": number_of,
    "producer_epoch": number_of,
    "producer_sequence": number_of,
}


def publish_options(given: Mapping[str, str]) -> PublishOptions:
    """The options of a publish by their names on the wire; all of them must be known."""
    options = {name: PUBLISH_OPTIONS[name](text, name) for name, text in given.items()}
    key = options.pop("key64", None)
    if key is not None:
        options["key"] = key
    producer_id = options.pop("producer_id", None)
    epoch, sequence = options.pop("producer_epoch", 0), options.pop("producer_sequence", 0)
    if producer_id is not None and "idempotency_key" not in options:
        options["producer"] = (producer_id, epoch, sequence)
    return cast(PublishOptions, options)


def publish_arguments(given: Mapping[str, str]) -> tuple[dict[str, str], PublishOptions]:
    """(headers, options): ``h.<name>`` is a header, and so is any name that is no option."""
    headers: dict[str, str] = {}
    options: dict[str, str] = {}
    for name, text in given.items():
        if name not in PUBLISH_OPTIONS:
            headers[name.removeprefix("h.")] = text
        elif text or name != "idempotency_key":  # an empty one is none
            options[name] = text
    return headers, publish_options(options)


def receipt_properties(receipt: Receipt) -> dict[str, str]:
    properties = {
        "topic": receipt.topic,
        "partition": str(receipt.partition),
        "offset": str(receipt.offset),
        "timestamp": str(receipt.timestamp),
        "count": str(receipt.count),
        "id": str(receipt.id),
    }
    if receipt.is_delayed:
        del properties["offset"], properties["partition"]
        properties["scheduled"] = "true"
    if receipt.duplicate:
        properties["duplicate"] = "true"
    return properties
