"""JSON from outside: it keeps all its digits, and what it may cost is bounded.

``orjson`` is fast, but turns a whole number of more than 64 bits into a float. Some ids are such numbers,
and a broker must not change what it carries. So the standard library decodes any JSON with a run of
digits that is long enough to be one.

Decoding makes an object of each value, which takes far longer than reading its bytes: a few megabytes of
``[[],[],[]…`` would keep everybody else waiting for seconds. So

- JSON that is only carried is not decoded: ``check`` looks whether it is valid, ``split`` cuts an array into
  its items (msgspec's ``Raw``; 20 to 50 times as fast);
- JSON that must be decoded may not have too many values. To count commas and brackets takes a thousandth of
  the time. If there are many, those inside of strings, such as a table of numbers, are left out;
- JSON may not be nested too deep. Each decoder has a limit of its own, which depends on the version of Python, and
  what one of them accepts, others must be able to read.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any

import msgspec
import orjson

from headrace.errors import InvalidArgument, TooLarge

VALUES_MAX = 150_000
"""Of one document that is decoded, which takes about 30 ms."""
EXACT_VALUES_MAX = 30_000
"""Of one that the standard library decodes, which takes as long."""
CARRIED_VALUES_MAX = 500_000
"""Of an array that is cut into its items, which takes about as long."""
DECODED_BYTES_MAX = 64 << 10
"""``check`` decodes smaller documents, which takes less than a millisecond whatever is in them."""
NESTED_MAX = 500
"""Arrays and objects inside of each other. The strictest decoder has a limit of about 900."""
_DIGITS = bytes.maketrans(b"123456789E-", b"000000000e+")
"""For finding long numbers: all digits are alike. A regular expression would look at some digits many times."""
_OVERFLOW = (b"0" * 300, b"e000", b"e+000")
"""In a number that may be too large for any reader. Text may have that, too."""
_LONG = b"0" * 19
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("]"): -1}
_SHALLOW = 4
"""Most documents are not nested deeper."""
_PIECE_BYTES = 256 << 10
_STRINGS_BYTES_MAX = 4 << 20
_QUOTES_MAX = 20_000
_one = msgspec.json.Decoder(msgspec.Raw)
_many = msgspec.json.Decoder(list[msgspec.Raw])


def check_cost(content: bytes, most: int = VALUES_MAX) -> None:
    """Refuse what would take too long to decode, before it is decoded."""
    if len(content) <= most:
        return  # a value has at least one byte
    if _exceeds(content, most) and _exceeds(_without_strings(content), most):
        raise TooLarge(
            f"this JSON has more than {most} values: send several smaller documents",
            code="json_too_large",
        )


def _exceeds(content: bytes, most: int) -> bool:
    """Whether it has more commas and brackets. It is read in pieces: only the beginning of a hostile text."""
    found = 0
    for start in range(0, len(content), _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        found += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if found > most:
            return True
    return False


def _without_strings(content: bytes) -> bytes:
    """The rest of a document in which a few long strings may have all the commas; else all of it."""
    if len(content) > _STRINGS_BYTES_MAX or content.count(b'"') > _QUOTES_MAX:
        return content
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def check_nesting(content: bytes) -> None:
    """Refuse JSON that is nested too deep. What is not JSON may pass."""
    if len(content) <= 2 * NESTED_MAX or content.count(b"[") + content.count(b"{") <= NESTED_MAX:
        return
    brackets = _STRING.sub(b"", content).translate(_SQUARE, _NO_BRACKETS)
    for _ in range(_SHALLOW):
        brackets = brackets.replace(b"[]", b"")
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > NESTED_MAX - _SHALLOW:
        raise InvalidArgument(
            f"this JSON has more than {NESTED_MAX} arrays and objects inside of each other",
            code="invalid_json",
        )


def loads(content: bytes, hint: str = "") -> Any:
    """The value, or :class:`InvalidArgument`; ``hint`` is added to its sentence."""
    check_cost(content)
    check_nesting(content)
    try:
        is_exact = _LONG in content.translate(_DIGITS)
        if is_exact:
            check_cost(content, EXACT_VALUES_MAX)
        value = orjson.loads(content)
        return json.loads(content) if is_exact else value
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise _not_json(error, hint) from None


def check(content: bytes, hint: str = "") -> None:
    """Raise :class:`InvalidArgument` unless it is JSON."""
    check_nesting(content)
    try:
        if len(content) <= DECODED_BYTES_MAX:
            orjson.loads(content)
        else:
            _check_text(content)
            _one.decode(content)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, hint) from None


def split(content: bytes, items_max: int) -> list[bytes]:
    """The items of an array, as they are."""
    check_cost(content, CARRIED_VALUES_MAX)
    try:
        _check_text(content)
        items = _many.decode(content)
    except msgspec.ValidationError:
        raise InvalidArgument("this is not a JSON array", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    if len(items) > items_max:
        raise too_many(items_max)
    found = list(map(bytes, items))
    for item in found:
        if len(item) > 2 * NESTED_MAX:
            check_nesting(item)
    digits = content.translate(_DIGITS)
    if any(each in digits for each in _OVERFLOW):
        for item in found:
            check(item)
    return found


def too_many(most: int) -> TooLarge:
    return TooLarge(
        f"a request has at most {most} messages; publish fewer at once", code="batch_too_large"
    )


def _check_text(content: bytes) -> None:
    """msgspec does not look into strings that it does not decode."""
    if not content.isascii():
        content.decode()


def _not_json(error: Exception, hint: str = "") -> InvalidArgument:
    return InvalidArgument(f"this is not JSON: {error}{hint}", code="invalid_json")


def dumps(value: Any) -> bytes:
    """Encode a value that ``loads`` returned, or a part of it."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
