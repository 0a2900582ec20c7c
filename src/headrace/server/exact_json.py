"""JSON that keeps all its digits when it is decoded and encoded again.

``orjson`` is fast, but turns a whole number of more than 64 bits into a float. Some ids are such numbers,
and a broker must not change what it carries. So the standard library decodes any JSON with a run of
digits that is long enough to be one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from headrace.errors import InvalidArgument

_LONG = re.compile(rb"[0-9]{19}")


def loads(content: bytes, hint: str = "") -> Any:
    """The value, or :class:`InvalidArgument`; ``hint`` is added to its sentence."""
    try:
        value = orjson.loads(content)
        return json.loads(content) if _LONG.search(content) else value
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise InvalidArgument(f"this is not JSON: {error}{hint}", code="invalid_json") from None


def dumps(value: Any) -> bytes:
    """Encode a value that ``loads`` returned, or a part of it."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
