"""How users write times, durations and schemas: each is read here, for options, SQL and pipelines alike.

::

    a time        2026-01-31T12:00:00Z (without a zone: UTC), or milliseconds since 1970
    a duration    10 seconds, 5 minutes, 90s, 1.5h, 2d, 1w
    a moment      a time, @milliseconds, or a duration: that long ago
    a schema      the fields of a table, as in CREATE TABLE: id STRING, amount DOUBLE
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from headrace import limits
from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from headrace.spark.source.positions import Known

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\Z", re.IGNORECASE)
_UNITS = {
    "milliseconds": (1, ("ms", "millisecond")),
    "seconds": (1_000, ("s", "sec", "secs", "second")),
    "minutes": (60_000, ("m", "min", "mins", "minute")),
    "hours": (3_600_000, ("h", "hour")),
    "days": (86_400_000, ("d", "day")),
    "weeks": (604_800_000, ("w", "week")),
}
_UNIT_OF = {word: unit for unit, (_, words) in _UNITS.items() for word in (unit, *words)}


# --- times --------------------------------------------------------------------------------------------
def parse_time(option: str, text: str) -> int:
    """Milliseconds since 1970; a fraction of a millisecond is rounded up."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        number = int(text)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                f"option {option}: {text!r} is not a time; write 2026-01-31T12:00:00Z, or "
                "milliseconds since 1970",
                code="invalid_option",
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // datetime.resolution
        number = -(-micros // 1000)
    if not 0 <= number <= limits.TIMESTAMP_MS_MAX:
        raise InvalidArgument(
            f"option {option}: {text} is before 1970 or too far ahead", code="invalid_option"
        )
    return number


def _duration(text: str) -> tuple[str, str]:
    """The number and the unit."""
    found = _DURATION.match(text.strip())
    unit = _UNIT_OF.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise InvalidArgument(
            f"{text!r} is not a duration; write it as '10 seconds' or '5 minutes'"
        )
    return found[1], unit


def duration_ms(text: str) -> int:
    number, unit = _duration(text)
    return round(float(number) * _UNITS[unit][0])


def spark_duration(text: str) -> str:
    """As Spark takes it: whole numbers and whole words."""
    number, unit = _duration(text)
    if not number.isdigit():
        return f"{duration_ms(text)} milliseconds"
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


def parse_moment(option: str, text: str, now_ms: int) -> int:
    """Milliseconds since 1970, of a time or of a duration before now."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        raise InvalidArgument(
            f"{option}: {text} has no unit. Write 30m, 1h, 2d, a time, or @milliseconds"
        )
    try:
        return max(0, now_ms - duration_ms(text))
    except InvalidArgument:
        pass
    try:
        return parse_time(option, text.removeprefix("@"))
    except InvalidArgument:
        raise InvalidArgument(
            f"{option}: {text!r} is neither a time (2026-01-31T12:00:00Z, @milliseconds) nor a "
            "duration (90s, 30m, 1h, 2d, 1w)"
        ) from None


# --- ranges -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RecordRange:
    """Which records of a topic are read: from and to a moment, or from and to an offset."""

    since: str | None = None
    until: str | None = None
    from_offset: int | None = None
    to_offset: int | None = None

    def __post_init__(self) -> None:
        self.times_ms(0)
        for one, other, names in (
            (self.since, self.from_offset, "--since or --from-offset"),
            (self.until, self.to_offset, "--until or --to-offset"),
        ):
            if one is not None and other is not None:
                raise InvalidArgument(f"give {names}, not both")
        for offset in (self.from_offset, self.to_offset):
            if offset is not None and not 0 <= offset <= limits.OFFSET_MAX:
                raise InvalidArgument(f"{offset} is not an offset")

    def times_ms(self, now_ms: int) -> tuple[int | None, int | None]:
        since = None if self.since is None else parse_moment("--since", self.since, now_ms)
        until = None if self.until is None else parse_moment("--until", self.until, now_ms)
        return since, until

    def options(self, known: Known, now_ms: int) -> dict[str, str]:
        """Options of the source. Offsets are cut to those that exist."""
        since, until = self.times_ms(now_ms)
        found = {}
        if since is not None:
            found["startingTimestamp"] = str(since)
        if until is not None:
            found["endingTimestamp"] = str(until)
        if self.from_offset is not None:
            found["startingOffsets"] = self._offsets(known, self.from_offset)
        if self.to_offset is not None:
            found["endingOffsets"] = self._offsets(known, self.to_offset)
        return found

    @staticmethod
    def _offsets(known: Known, offset: int) -> str:
        document: dict[str, Any] = {
            topic: {
                str(number): min(max(offset, extent.start), extent.end)
                for number, extent in state.partitions.items()
            }
            for topic, state in known.items()
        }
        return orjson.dumps(document).decode()


# --- schemas ------------------------------------------------------------------------------------------
def parse_schema(ddl: str) -> StructType:
    """The fields of a schema. Spark reads it, so it needs a session."""
    from pyspark.sql.types import StructType

    found = StructType.fromDDL(ddl)
    if not isinstance(found, StructType):
        raise InvalidArgument(
            f"{ddl!r} is a single type: a schema has fields with a name and a type each"
        )
    return found
