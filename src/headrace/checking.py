"""Check values from outside against an annotation; refuse bad ones with a sentence and a code.

A bound is written once, as an annotation (``Annotated[int, Meta(ge=1, le=4096)]``). msgspec converts
and checks values against it and makes the JSON schema from it. The error sentence is made from the
same schema, so the three cannot differ.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any

import msgspec

from headrace import notation
from headrace.errors import InvalidArgument

SHOWN_CHARS_MAX = 60


def check(
    name: str,
    value: object,
    annotation: Any,
    *,
    code: str = "invalid_argument",
    strict: bool = True,
) -> Any:
    """Convert ``value`` to the type of ``annotation``, or raise :class:`InvalidArgument`.

    ``strict=False`` also accepts numbers and flags as text, for query strings and paths. A size or a
    duration, which has a unit in its annotation, may always be text with a unit (``notation.py``).
    """
    unit = notation.unit_of(annotation)
    if unit is not None and isinstance(value, (str, timedelta)):
        number = notation.read(value, unit)
        if number is None:
            strict = strict or not unit.ms  # a size is read above, or not at all
        else:
            value = number
    try:
        return msgspec.convert(value, annotation, strict=strict, str_keys=True)
    except RecursionError:
        raise InvalidArgument(f"{name} is nested too deeply", code=code) from None
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        if place:  # inside of a list or an object
            sentence = f"{name}{place.rstrip('`')}: {problem[0].lower()}{problem[1:]}"
        else:
            sentence = f"{name} must be {describe(schema_of(annotation))}, not {shown(value)}"
            if unit is not None and isinstance(value, str):
                sentence += f"; {unit.hint}"
        raise InvalidArgument(sentence, code=code) from None


def shown(value: object) -> str:
    """A value from outside, short and escaped, for an error message."""
    if isinstance(value, (list, dict)) and len(value) > SHOWN_CHARS_MAX:
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value[:SHOWN_CHARS_MAX] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 2 * SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


@lru_cache(maxsize=1024)
def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON schema of an annotation."""
    return msgspec.json.schema(annotation)


def given_schema(annotation: Any) -> dict[str, Any]:
    """The same for a value from outside: a size and a duration may also be text with a unit."""
    schema, unit = schema_of(annotation), notation.unit_of(annotation)
    if unit is None:
        return schema
    default = {"default": schema["default"]} if "default" in schema else {}
    text = {"type": "string", "pattern": unit.pattern}
    either = [*schema.get("anyOf", [schema]), text]
    return {"description": f"{unit.hint[0].upper()}{unit.hint[1:]}.", "anyOf": either, **default}


def describe(schema: dict[str, Any]) -> str:
    """A schema in words: ``a whole number from 1 to 4096``."""
    if "anyOf" in schema:
        parts = [part for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(describe(part) for part in parts)
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(schema)
    if kind == "string":
        return "a string" + _lengths(schema, "characters")
    if kind == "array":
        return f"a list in which each item is {describe(schema.get('items', {}))}" + _lengths(
            schema, "items"
        )
    return {"boolean": "true or false", "object": "an object"}.get(str(kind), "valid")


def _bounds(schema: dict[str, Any]) -> str:
    low = _plain(schema.get("minimum", schema.get("exclusiveMinimum")))
    high = _plain(schema.get("maximum", schema.get("exclusiveMaximum")))
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f", at least {low}" if "minimum" in schema else f" above {low}"
    return "" if high is None else f", at most {high}"


def _plain(bound: float | None) -> float | None:
    """3600, not 3600.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _lengths(schema: dict[str, Any], unit: str) -> str:
    low = schema.get("minLength", schema.get("minItems"))
    high = schema.get("maxLength", schema.get("maxItems"))
    if low is not None and high is not None:
        return f" of {low} to {high} {unit}"
    return "" if high is None else f" of at most {high} {unit}"
