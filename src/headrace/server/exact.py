"""JSON that is taken apart and put together again, with all its digits.

``orjson`` is fast and makes a float of a whole number beyond 64 bits. Ids that are such numbers exist,
and a broker does not change what it carries; so where a run of digits is long enough to be one, the
standard library does the work.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from headrace.errors import InvalidArgument

_LONG = re.compile(rb"[0-9]{19}")


def loads(content: bytes, hint: str = "") -> Any:
    """The value, or :class:`InvalidArgument`; ``hint`` stands behind the complaint."""
    try:
        value = orjson.loads(content)
        return json.loads(content) if _LONG.search(content) else value
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise InvalidArgument(f"this is not JSON: {error}{hint}", code="invalid_json") from None


def dumps(value: Any) -> bytes:
    """Any value that ``loads`` gave, or a part of it."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
