"""What a message may be made of: a value, a key, headers. All front ends refuse the same with the same words.

A null value (a *tombstone*: what the key stood for is gone) is stored and sent as an empty value with the header
``kafka-tombstone: true``. So it passes through every protocol, log and copy, old ones too. Only where a
message is made for a user, or by one, is it ``None``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace import limits
from headrace.errors import InvalidArgument, TooLarge

Value = bytes | str | dict[str, Any] | list[Any]
"""Text is stored as UTF-8, a dict or a list as JSON."""
TOMBSTONE_HEADER = "kafka-tombstone"
TOMBSTONE_TEXT = "true"
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def is_text(content: bytes) -> bool:
    """Whether it is UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_headers(headers: object) -> Mapping[str, str]:
    """Headers are str to str, without NUL, CR or LF, so that every protocol can carry them."""
    if not isinstance(headers, Mapping):
        raise InvalidArgument(
            f"headers are a mapping of str to str, not {type(headers).__name__}",
            code="invalid_headers",
        )
    if len(headers) > limits.HEADERS_PER_MESSAGE_MAX:
        raise TooLarge(
            f"a message has at most {limits.HEADERS_PER_MESSAGE_MAX} headers, this one "
            f"{len(headers)}",
            code="headers_too_large",
        )
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(
                f"header {name!r}: {value!r} is not str to str", code="invalid_headers"
            )
        if not name or not name.isprintable() or "=" in name:
            raise InvalidArgument(
                f"header name {name!r} is empty, or has '=' or characters that cannot be printed",
                code="invalid_headers",
            )
        if "\0" in value or "\r" in value or "\n" in value:
            raise InvalidArgument(
                f"header {name!r} has a NUL or a line end in its value; put such data in the body",
                code="invalid_headers",
            )
        try:
            size += len(name.encode()) + len(value.encode())
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"header {name!r} is not valid Unicode", code="invalid_headers"
            ) from None
    if size > limits.HEADER_BYTES_MAX:
        raise TooLarge(
            f"the headers have {size} bytes, the limit is {limits.HEADER_BYTES_MAX}",
            code="headers_too_large",
        )
    return headers


def check_values(values: object) -> Sequence[object]:
    """The values of many messages; each is checked on its own."""
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument(
            "publish_many takes a list of messages; publish takes a single one",
            code="invalid_value",
        )
    if not isinstance(values, Sequence):
        raise InvalidArgument(
            f"publish_many takes a list of messages, not {type(values).__name__}",
            code="invalid_value",
        )
    return values


def check_key(key: object) -> bytes:
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"key {key!r} is not valid Unicode", code="invalid_key") from None
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise InvalidArgument(
            f"a key is bytes or str, not {type(key).__name__}", code="invalid_key"
        )
    key = bytes(key)
    if len(key) > limits.KEY_BYTES_MAX:
        raise TooLarge(
            f"a key has at most {limits.KEY_BYTES_MAX} bytes, this one {len(key)}",
            code="key_too_large",
        )
    return key


def is_tombstone(value: bytes, headers: Mapping[str, str]) -> bool:
    return not value and headers.get(TOMBSTONE_HEADER) == TOMBSTONE_TEXT


def null_headers(headers: Mapping[str, str] | None, key: object) -> Mapping[str, str]:
    """The headers of a message whose value is null. Without a key it is more likely a mistake."""
    if key is None:
        raise InvalidArgument(
            "a value of None is a tombstone, which needs a key; publish b'' for an empty message",
            code="invalid_value",
        )
    return {**(headers or {}), TOMBSTONE_HEADER: TOMBSTONE_TEXT}


def _as_json(value: object) -> str:
    try:
        return _to_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the {type(value).__name__} cannot be published as JSON: {error}", code="invalid_value"
        ) from None


def check_value(value: object, bytes_max: int) -> bytes:
    if isinstance(value, (dict, list)):
        value = _as_json(value)
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument("the text is not valid Unicode", code="invalid_value") from None
    if value is None:
        null_headers(None, None)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidArgument(
            f"a message's value is bytes, str, or a dict or list that JSON can hold, "
            f"not {type(value).__name__}",
            code="invalid_value",
        )
    value = bytes(value)
    if len(value) > bytes_max:
        raise TooLarge(
            f"the message has {len(value)} bytes, the limit is {bytes_max} (max_message_size)",
            code="message_too_large",
        )
    return value
