"""A Kafka record as a Headrace message, and back. Nothing is lost on the way there and back.

========================  =====================================================================================
of the Kafka record       in Headrace
========================  =====================================================================================
key, value                the same bytes; a null key is no key
value null (a tombstone)  a null value: an empty one, and the header ``kafka-tombstone: true``
headers                   the same names and texts; what Headrace's headers cannot hold (a name that occurs twice,
                          bytes that are not UTF-8, null, line ends) is in ``kafka-headers``: all headers of the record,
                          as JSON: ``[["name", "base64 of the value" or null], …]``
timestamp                 the message's time (``client/own_times.py`` says when it is in ``headrace-time``)
========================  =====================================================================================

Back in Kafka, these three headers are gone, and the record is what it was.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from headrace.client.own_times import TIME_HEADER
from headrace.contents import (
    TOMBSTONE_HEADER,
    TOMBSTONE_TEXT,
    check_headers,
    check_key,
    check_value,
    is_tombstone,
)
from headrace.errors import HeadraceError
from headrace.log.columns import Headers

HEADERS_HEADER = "kafka-headers"
OURS = frozenset({TOMBSTONE_HEADER, HEADERS_HEADER, TIME_HEADER})
KafkaHeaders = Sequence[tuple[str, bytes | None]]


class KafkaRecord(NamedTuple):
    """What is copied of a record."""

    key: bytes | None
    value: bytes | None
    headers: KafkaHeaders
    timestamp: int | None
    """In milliseconds since 1970; None: it has none."""


class Translated(NamedTuple):
    """The columns of a message."""

    value: bytes
    key: bytes | None
    headers: Headers


def to_message(record: KafkaRecord, bytes_max: int) -> Translated:
    """:class:`~headrace.errors.TooLarge` if the broker does not take so large a message."""
    headers = _headers_in(record.headers) if record.headers else None
    if record.value is None:
        headers = {TOMBSTONE_HEADER: TOMBSTONE_TEXT, **(headers or {})}
    if headers:
        check_headers(headers)
    key = None if record.key is None else check_key(record.key)
    return Translated(check_value(record.value or b"", bytes_max), key, headers)


def _headers_in(headers: KafkaHeaders) -> dict[str, str]:
    found: dict[str, str] = {}
    is_whole = True
    for name, value in headers:
        text = _text(name, value)
        if text is None or name in found:
            is_whole = False
        else:
            found[name] = text
    if not is_whole:
        rows = [
            [name, None if value is None else b64encode(value).decode()] for name, value in headers
        ]
        found[HEADERS_HEADER] = orjson.dumps(rows).decode()
    return found


def _text(name: str, value: bytes | None) -> str | None:
    """The value as a header of Headrace; None if it cannot be one."""
    if value is None or name in OURS:
        return None
    try:
        text = value.decode()
        check_headers({name: text})
    except (UnicodeDecodeError, HeadraceError) as error:
        if isinstance(error, HeadraceError) and error.code == "headers_too_large":
            raise
        return None
    return text


def to_record(
    value: bytes | None, key: bytes | None, headers: Headers, timestamp: int
) -> KafkaRecord:
    if not headers:
        return KafkaRecord(key, value, (), timestamp)
    used = set()
    if value is None or is_tombstone(value, headers):
        value = None
        used.add(TOMBSTONE_HEADER)
    own = headers.get(TIME_HEADER, "")
    if own.isascii() and own.isdigit() and len(own) < 17:
        used.add(TIME_HEADER)
        timestamp = int(own)
    stored = _stored(headers.get(HEADERS_HEADER))
    if stored is None:
        stored = [(name, text.encode()) for name, text in headers.items() if name not in used]
    return KafkaRecord(key, value, stored, timestamp)


def _stored(text: str | None) -> KafkaHeaders | None:
    """The headers that a record had; None if there are none, or if somebody else has made them."""
    try:
        return [
            (str(name), None if value is None else b64decode(value, validate=True))
            for name, value in orjson.loads(text or "null")
        ]
    except (TypeError, ValueError):
        return None
