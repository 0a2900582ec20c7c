"""How users of Spark write durations, ranges of records and schemas; times as everywhere (``headrace.notation``).

::

    a duration    10 seconds, 5 minutes, 90s, 1.5h, 2d, 1w
    a schema      the fields of a table, as in CREATE TABLE: id STRING, amount DOUBLE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.notation import duration_ms, duration_parts, parse_moment

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from headrace.spark.source.positions import Known


# --- durations ----------------------------------------------------------------------------------------
def spark_duration(text: str) -> str:
    """As Spark takes it: whole numbers and whole words."""
    [(number, unit), *more] = duration_parts(text) or [("", "")]
    if more or not number.isdigit():
        return f"{duration_ms(text)} milliseconds"
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


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
