"""The kinds of arguments that operations take: each with its bounds, its schema and its reader.

A kind is an annotation. Most kinds are a plain type with bounds, which msgspec checks. A kind with a
:class:`Reader` is read by our own function, because it accepts types that JSON does not have (a datetime,
a UUID, bytes) or has an error code of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from headrace import limits
from headrace.contents import check_headers
from headrace.errors import InvalidArgument
from headrace.model import (
    check_pattern,
    check_pipeline_name,
    check_principal_name,
    check_subscription_name,
    check_topic_name,
    parse_id,
    parse_position,
)
from headrace.notation import SECONDS, duration_ms, duration_parts
from headrace.operations.documents import unpack
from headrace.times import to_ms

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """How a value of this kind is read, and what JSON schema describes it."""

    read: Callable[[Any], Any]
    schema: Schema

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class AliasOf:
    """The argument has this name on the wire."""

    name: str


@dataclass(frozen=True, slots=True)
class Code:
    """The error code of a refusal."""

    code: str


class Raises:
    """Error codes of every operation that takes an argument of this kind."""

    def __init__(self, *codes: str):
        self.codes = codes


# --- schemas that msgspec cannot say ----------------------------------------------------------------
RESERVED: Schema = {"type": "string", "pattern": r"^(__|\.{1,2}$)"}
"""Names that users cannot choose: they belong to the broker, or are ``.`` or ``..``."""
TOPIC: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,249}$", "not": RESERVED}
SUBSCRIPTION: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,200}$", "not": RESERVED}
PATTERN: Schema = {
    "type": "string",
    "description": "A topic, or a pattern: * for one word, > at the end for the rest.",
    "maxLength": limits.TOPIC_NAME_CHARS_MAX,
    "pattern": r"^([A-Za-z0-9._-]+|>|(\*|[A-Za-z0-9_-]+)(\.(\*|[A-Za-z0-9_-]+))*(\.>)?)$",
    "not": RESERVED,
}
OFFSET: Schema = {"type": "integer", "minimum": 0, "maximum": limits.OFFSET_MAX}
DURATION: Schema = {"type": "string", "pattern": "^[0-9]{1,6}(ms|s|m|h|d|w)$"}
PLACE: Schema = {
    "description": "earliest, latest, an offset, a time, a duration ago (1h), or @ and milliseconds since 1970.",
    "anyOf": [
        {"type": "string", "enum": ["earliest", "latest"]},
        {"type": "string", "pattern": "^@?[0-9]{1,12}$"},
        DURATION,
        {"type": "string", "format": "date-time"},
    ],
}
POSITION: Schema = {**PLACE, "anyOf": [OFFSET, *PLACE["anyOf"]]}
"""In JSON an offset may be a number."""


def _existing(value: object) -> str:
    """A name to look up. If it is not a valid name, the answer is "not found"."""
    if not isinstance(value, str):
        raise InvalidArgument(f"a name is a str, not {type(value).__name__}")
    return value


def _payload(value: object) -> bytes:
    """Bytes or text from Python; ``{"data": ..., "encoding": ...}`` from JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        assert isinstance(value, dict)
        return unpack(value)
    except (AssertionError, KeyError, TypeError, AttributeError, ValueError):
        raise InvalidArgument(
            'a value is {"data": "..."}, with "encoding": "base64" for binary data',
            code="invalid_value",
        ) from None


class Correction(NamedTuple):
    """New contents of a dead letter; None: as it is."""

    value: bytes | None = None
    key: bytes | None = None
    headers: Mapping[str, str] | None = None


def _corrections(value: object) -> dict[int, Correction]:
    """By the letters' offsets."""
    if not isinstance(value, (list, tuple)) or len(value) > limits.OFFSETS_PER_REQUEST_MAX:
        raise InvalidArgument(
            f"corrections are a list of at most {limits.OFFSETS_PER_REQUEST_MAX} objects"
        )
    found: dict[int, Correction] = {}
    for each in value:
        names = each.keys() if isinstance(each, dict) else set()
        offset = each["offset"] if "offset" in names else None
        if type(offset) is not int or offset in found or not names <= _CORRECTED:
            raise InvalidArgument(
                "a correction has the offset of one dead letter, and its new value, key or headers: "
                f"{each!r:.80} is none, or the second one of its letter"
            )
        value, key, headers = each.get("value"), each.get("key"), each.get("headers")
        found[offset] = Correction(
            None if value is None else _payload(value),
            None if key is None else _payload(key),
            None if headers is None else check_headers(headers),
        )
    return found


_CORRECTED = {"offset", "value", "key", "headers"}


def _time_ms(value: object) -> int:
    at = parse_position(value) if isinstance(value, str) else value
    if isinstance(at, datetime):
        return to_ms(at)
    if type(at) is not int or at < 0:
        raise InvalidArgument(
            "at is a time: a datetime, or milliseconds since 1970", code="invalid_offset"
        )
    return at


def expiry_ms(value: object) -> int:
    if isinstance(value, str) and duration_parts(value) is not None:  # from now on
        value = time.time_ns() // 1_000_000 + duration_ms(value)
    try:
        at = parse_position(value)
    except InvalidArgument:
        at = None
    if isinstance(at, datetime):
        return to_ms(at)
    if type(at) is not int or at < 0:
        raise InvalidArgument(
            "expires is a time (a datetime, an ISO time, milliseconds since 1970) or a duration such "
            "as 90d",
            code="invalid_expiry",
        )
    return at


TopicName = Annotated[str, Reader(check_topic_name, TOPIC)]
"""The name of a topic that a user may create."""
UserTopic = Annotated[TopicName, Raises("topic_not_found")]
"""A topic that exists and that a user may change: none of the broker's own."""
ExistingTopic = Annotated[str, Reader(_existing, TOPIC), Raises("topic_not_found")]
"""Any topic that exists, also one of the broker's own."""
TopicFilter = Annotated[str, Reader(_existing, {"type": "string"})]
"""A topic that makes an ambiguous name unique, or limits a list."""
TopicPattern = Annotated[str, Reader(check_pattern, PATTERN)]
SubscriptionName = Annotated[str, Reader(check_subscription_name, SUBSCRIPTION)]
DefinedSubscription = Annotated[
    SubscriptionName, Raises("subscription_not_found", "ambiguous_subscription")
]
"""One that exists. If several have the name, the operation's ``topic`` says which."""
ExistingSubscription = Annotated[str, Reader(_existing, SUBSCRIPTION)]
PipelineName = Annotated[str, Reader(check_pipeline_name, SUBSCRIPTION)]
KnownPipeline = Annotated[PipelineName, Raises("pipeline_not_found")]
"""One that has reported."""
MessageId = Annotated[uuid.UUID | str, Reader(parse_id, {"type": "string", "format": "uuid"})]
ExistingMessage = Annotated[MessageId, Raises("message_not_found")]
Position = Annotated[str | int | datetime, Reader(parse_position, POSITION)]
Time = Annotated[int | datetime | str, Reader(_time_ms, PLACE)]
"""A datetime, or milliseconds since 1970."""
Headers = Annotated[
    Mapping[str, str],
    Reader(check_headers, {"type": "object", "additionalProperties": {"type": "string"}}),
]
Payload = Annotated[bytes | str, Reader(_payload, {"type": "object"})]
Corrections = Annotated[
    Sequence[Mapping[str, Any]],
    Reader(
        _corrections,
        {
            "type": "array",
            "maxItems": limits.OFFSETS_PER_REQUEST_MAX,
            "items": {
                "type": "object",
                "required": ["offset"],
                "properties": {
                    "offset": OFFSET,
                    "value": {"type": "object"},
                    "key": {"type": "object"},
                    "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "additionalProperties": False,
            },
        },
    ),
]
"""``{"offset": 3, "value": …, "key": …, "headers": …}`` for each dead letter; what is left out stays as it is."""
Partition = Annotated[int, Meta(ge=0, le=limits.PARTITIONS_PER_TOPIC_MAX)]
Offset = Annotated[int, Meta(ge=0, le=limits.OFFSET_MAX)]
LetterOffset = Annotated[Offset, Raises("message_not_found")]
"""Of a dead letter that exists."""
AfterOffset = Annotated[int, Meta(ge=-1, le=limits.OFFSET_MAX)]
"""List what follows this offset; -1: from the first."""
Offsets = Annotated[list[Offset], Meta(max_length=limits.OFFSETS_PER_REQUEST_MAX)]
Limit = Annotated[int, Meta(ge=1, le=limits.LISTED_MAX)]
Rate = Annotated[float, Meta(ge=0.001, le=1e6)]
Seconds = Annotated[float, Meta(ge=0, le=limits.DELAY_S_MAX), SECONDS]
Topics = str | list[str]
"""A name, a pattern, or a list of these."""
Pieces = Annotated[list[str], Meta(max_length=limits.COMMIT_PIECES_MAX)]
TimeMs = Annotated[int, Meta(ge=0, le=limits.TIMESTAMP_MS_MAX)]
PrincipalName = Annotated[str, Reader(check_principal_name, SUBSCRIPTION)]
"""The name of a user or of a token."""
ExistingUser = Annotated[PrincipalName, Raises("user_not_found")]
ExistingToken = Annotated[PrincipalName, Raises("token_not_found")]
Password = Annotated[str, Meta(min_length=1, max_length=1024), Code("invalid_password")]
GrantList = Annotated[list[str], Meta(max_length=limits.GRANTS_MAX)]
"""``RIGHTS:TOPICS`` or ``RIGHTS:TOPICS:NAMES``."""
CertificateNames = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=100)
]
"""Subject or alternative names of client certificates."""
QuotaValues = Annotated[dict[str, float | None], Meta(max_length=20)]
Expiry = Annotated[
    int | datetime | str,
    Reader(
        expiry_ms,
        {
            "description": "A time, milliseconds since 1970, or a duration from now (90d).",
            "anyOf": [
                DURATION,
                {"type": "string", "format": "date-time"},
                {"type": "integer", "minimum": 0, "maximum": limits.TIMESTAMP_MS_MAX},
            ],
        },
    ),
]
Positions = Mapping[str, Mapping[int, Offset]]
"""``{topic: {partition: offset}}``."""
