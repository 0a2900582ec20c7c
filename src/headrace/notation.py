"""Sizes, durations and times as people write them, read in one place for all who take them.

::

    a size        1000000, 512KB, 1.5GB, 1GiB (K, M, G and T are powers of 1024, with B, iB or neither)
    a duration    90s, 1.5h, 1h30m, 2d, 1w, 10 seconds
    a time        2026-01-31T12:00:00Z (without a zone: UTC)
    a moment      a time, @milliseconds since 1970, or a duration: that long ago

A bounded number says its unit in its annotation: ``Annotated[float, Meta(ge=0), SECONDS]``. Then
``checking.check`` also takes it as text with a unit, or as a timedelta: ``90s`` is 90 seconds, and 0.025 hours.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from headrace import limits
from headrace.errors import InvalidArgument

TEXT_CHARS_MAX = 100
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE)
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
DURATIONS_MS = {
    "milliseconds": 1,
    "seconds": 1_000,
    "minutes": 60_000,
    "hours": 3_600_000,
    "days": 86_400_000,
    "weeks": 604_800_000,
}
_WORDS = {
    "milliseconds": ("ms", "millisecond"),
    "seconds": ("s", "sec", "secs", "second"),
    "minutes": ("m", "min", "mins", "minute"),
    "hours": ("h", "hour"),
    "days": ("d", "day"),
    "weeks": ("w", "week"),
}
_UNIT_OF = {word: unit for unit, words in _WORDS.items() for word in (unit, *words)}


class Unit(NamedTuple):
    """What a number counts; part of its annotation."""

    name: str
    ms: int
    """Of a duration; 0 for bytes."""

    @property
    def hint(self) -> str:
        if not self.ms:
            return "a size is a number of bytes, or such as 512KB or 1GB"
        return f"a duration is a number of {self.name}, or such as 90s, 30m or 1h"

    @property
    def pattern(self) -> str:
        """The common texts that :func:`read` takes, for a JSON schema."""
        number = r"[0-9]{1,12}(\.[0-9]{1,6})?"
        return f"^{number}[KMGT]?(i?B)?$" if not self.ms else f"^({number}(ms|s|m|h|d|w))+$"


BYTES = Unit("bytes", 0)
MILLISECONDS = Unit("milliseconds", 1)
SECONDS = Unit("seconds", 1_000)
HOURS = Unit("hours", 3_600_000)


@lru_cache(maxsize=1024)
def unit_of(annotation: Any) -> Unit | None:
    """The unit that an annotation names; ``| None`` does not matter."""
    if get_origin(annotation) is Annotated:
        return next((each for each in annotation.__metadata__ if isinstance(each, Unit)), None)
    found = (unit_of(part) for part in get_args(annotation))
    return next((unit for unit in found if unit is not None), None)


def read(given: str | timedelta, unit: Unit) -> int | float | None:
    """The number that a timedelta, or a text with a unit, stands for; None if it is none. A size needs no unit."""
    if isinstance(given, timedelta):
        if not unit.ms:
            return None
        number = given / timedelta(milliseconds=unit.ms)
    elif not unit.ms:
        return size_of(given)
    else:
        parts = duration_parts(given)
        if parts is None:
            return None
        number = sum(float(count) * DURATIONS_MS[word] for count, word in parts) / unit.ms
    return int(number) if number == int(number) else number


# --- sizes --------------------------------------------------------------------------------------
def size_of(text: str) -> int | None:
    """A number of bytes, with or without a unit; None if it is none."""
    found = _SIZE.match(text.strip()) if len(text) <= TEXT_CHARS_MAX else None
    if found is None:
        return None
    size = float(found[1]) * _SIZES[found[2].lower()]
    return int(size) if size < limits.OFFSET_MAX else None


# --- durations ----------------------------------------------------------------------------------
def duration_parts(text: str) -> list[tuple[str, str]] | None:
    """The numbers and their units; None if it is not a duration."""
    parts: list[tuple[str, str]] = []
    place, text = 0, text.strip()
    while place < len(text) <= TEXT_CHARS_MAX:
        found = _PART.match(text, place)
        unit = _UNIT_OF.get(found[2].lower()) if found else None
        if found is None or unit is None:
            return None
        parts.append((found[1], unit))
        place = found.end()
    return parts or None


def duration_ms(text: str) -> int:
    parts = duration_parts(text)
    if parts is None:
        raise InvalidArgument(
            f"{text[:TEXT_CHARS_MAX]!r} is not a duration; write it as 90s, 30m, 1h, or '10 seconds'"
        )
    return round(sum(float(number) * DURATIONS_MS[unit] for number, unit in parts))


# --- times --------------------------------------------------------------------------------------
def time_of(text: str) -> datetime:
    """An ISO time, with a zone; :class:`ValueError` if it is none."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def parse_time(name: str, text: str, *, code: str = "invalid_argument") -> int:
    """Milliseconds since 1970, of a time or of these milliseconds; a fraction of one is rounded up."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= TEXT_CHARS_MAX:
        number = int(text)
    else:
        try:
            micros = (time_of(text) - datetime(1970, 1, 1, tzinfo=UTC)) // datetime.resolution
        except (ValueError, OverflowError):
            raise InvalidArgument(
                f"{name}: {text[:TEXT_CHARS_MAX]!r} is not a time; write 2026-01-31T12:00:00Z, or "
                "milliseconds since 1970",
                code=code,
            ) from None
        number = -(-micros // 1000)
    if not 0 <= number <= limits.TIMESTAMP_MS_MAX:
        raise InvalidArgument(f"{name}: {text} is before 1970 or too far ahead", code=code)
    return number


def position_of(text: str) -> int | datetime:
    """An offset, or a moment as a datetime."""
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    try:
        if text.startswith("@") and len(text) <= 20:
            return datetime.fromtimestamp(int(text[1:]) / 1000, UTC)
        if duration_parts(text) is not None:
            return datetime.now(UTC) - timedelta(milliseconds=duration_ms(text))
        return time_of(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidArgument(
            f"{text[:60]!r} is not a position: it is 'earliest', 'latest', an offset, a time such as "
            "2026-01-31T12:00:00Z, a duration ago such as 1h, or @ and milliseconds since 1970",
            code="invalid_offset",
        ) from None


def parse_moment(name: str, text: str, now_ms: int) -> int:
    """Milliseconds since 1970, of a time or of a duration before now."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        raise InvalidArgument(
            f"{name}: {text[:TEXT_CHARS_MAX]} has no unit. Write 30m, 1h, 2d, a time, or @milliseconds"
        )
    if duration_parts(text) is not None:
        return max(0, now_ms - duration_ms(text))
    try:
        return parse_time(name, text.removeprefix("@"))
    except InvalidArgument:
        raise InvalidArgument(
            f"{name}: {text[:TEXT_CHARS_MAX]!r} is neither a time (2026-01-31T12:00:00Z, "
            "@milliseconds) nor a duration (90s, 30m, 1h, 2d, 1w)"
        ) from None
