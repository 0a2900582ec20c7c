"""Times and durations as users give them: a datetime or milliseconds since 1970; a timedelta or seconds."""

from __future__ import annotations

from datetime import datetime, timedelta

from headrace import limits
from headrace.errors import InvalidArgument

Duration = float | timedelta
"""Seconds, or a timedelta."""
Moment = int | datetime
"""Milliseconds since 1970, or a datetime. A datetime without a time zone is local time."""


def seconds(duration: Duration) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def check_seconds(name: str, value: object, high: float) -> float:
    """A number of seconds from 0 to ``high``."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
        raise InvalidArgument(
            f"{name} is a number of seconds between 0 and {high:.0f} or a timedelta, not {value!r}",
            code=f"invalid_{name}",
        )
    return float(value)


def to_ms(time: datetime, code: str = "invalid_offset") -> int:
    try:
        return round(time.timestamp() * 1000)
    except (OverflowError, OSError, ValueError):  # the first and the last days of the calendar
        raise InvalidArgument(f"{time} is not a time that a message can have", code=code) from None


def check_time(name: str, value: object) -> int:
    """Milliseconds since 1970."""
    if isinstance(value, datetime):
        value = to_ms(value, "invalid_time")
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(
            f"{name} is a datetime, or milliseconds since 1970 as a whole number, not {value!r}",
            code="invalid_time",
        )
    if not 0 <= value <= limits.TIMESTAMP_MS_MAX:
        raise InvalidArgument(
            f"{name} is milliseconds since 1970, not {value}", code="invalid_time"
        )
    return value
