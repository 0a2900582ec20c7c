"""The options of ``spark.read.format("headrace")``, read once and checked.

:class:`SourceOptions` is a small value that is pickled to executors. docs/spark.md
describes each option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta

from headrace import limits
from headrace.model import check_pattern, check_subscription_name, check_topic_name, is_pattern
from headrace.spark.connection import CONNECTION, TIMEOUT_S_DEFAULT, ConnectionOptions
from headrace.spark.options import ByteCount, Count, Given, Seconds, ValueFormat, parse_time, wrong

READING = (
    *CONNECTION, "path", "topic", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minPartitions",
    "failOnDataLoss", "group", "valueFormat", "schema", "columns", "includeHeaders",
    "directReads",
)  # fmt: skip


# --- where to begin and to end --------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A position as a user says it, not yet offsets."""

    kind: Literal["earliest", "latest", "group", "offsets", "time"]
    option: str
    """The option that said so, for errors."""
    offsets: Mapping[str, Mapping[int, int]] | None = None
    time_ms: int | None = None


EARLIEST_OFFSET = -2
LATEST_OFFSET = -1


def parse_place(option: str, text: str) -> Place:
    """``startingOffsets`` or ``endingOffsets``."""
    lower = text.lower()
    if lower in ("earliest", "latest"):
        return Place(lower, option)  # type: ignore[arg-type]
    if lower == "group" and option == "startingOffsets":
        return Place("group", option)
    if text.startswith("@"):
        return Place("time", option, time_ms=parse_time(option, text[1:]))
    if text.startswith("{"):
        return Place("offsets", option, offsets=_parse_offsets(option, text))
    raise wrong(
        option,
        f"it is earliest, latest, a time (@2026-01-31T12:00:00Z) or JSON such as "
        f'{{"orders": {{"0": 23}}}}, not {text!r}',
    )


def _parse_offsets(option: str, text: str) -> dict[str, dict[int, int]]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise wrong(option, f"this is not JSON ({error}): {text[:80]}") from None
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, dict):
            raise wrong(option, f'{topic!r} needs offsets by partition, such as {{"0": 23}}')
        found[topic] = {}
        for number, offset in partitions.items():
            if not number.isascii() or not number.isdigit():
                raise wrong(option, f"{number!r} of {topic!r} is not the number of a partition")
            if type(offset) is not int or not EARLIEST_OFFSET <= offset <= limits.OFFSET_MAX:
                raise wrong(
                    option,
                    f"{offset!r} for {topic}/{number} is not an offset (-2 is earliest, -1 latest)",
                )
            found[topic][int(number)] = offset
    return found


# --- all options of reading -------------------------------------------------------------------------
@dataclass(frozen=True)
class SourceOptions:
    topics: tuple[str, ...]
    connection: ConnectionOptions | None = None
    path: str | None = None
    starting: Place | None = None
    """None: earliest for a batch, latest for a stream, as Kafka's source has it."""
    ending: Place | None = None
    max_offsets_per_trigger: Count | None = None
    max_bytes_per_trigger: ByteCount | None = None
    min_partitions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    fail_on_data_loss: bool = True
    group: str | None = None
    value_format: ValueFormat = "binary"
    schema: str | None = None
    columns: tuple[str, ...] | None = None
    include_headers: bool = True
    direct_reads: bool = True
    timeout: Seconds = TIMEOUT_S_DEFAULT

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SourceOptions:
        given = Given(options)
        given.check_names(READING)
        values = given.read(cls)
        if "path" in values:
            for name in ("servers", "token", "user", "password", "ca", "tls", "group"):
                if given.text(name) is not None:
                    raise wrong(name, "it is for a broker, and path reads without one; give one")
            values["path"] = str(Path(values["path"].removeprefix("file://")).absolute())
        else:
            values["connection"] = ConnectionOptions.of(given)
        if "group" in values:
            check_subscription_name(values["group"])
        if "schema" in values and values.get("value_format") != "json":
            raise wrong("schema", "it is for valueFormat=json; use .schema(…) to choose columns")
        values |= {"starting": _place(given, "starting"), "ending": _place(given, "ending")}
        return cls(topics=_topics(given), **values)


def _topics(given: Given) -> tuple[str, ...]:
    topics = given.names("topic")
    if topics is None:
        raise wrong("topic", "say what to read: a name, several with commas, or orders.*")
    for topic in topics:
        if is_pattern(topic):
            check_pattern(topic)
        else:
            check_topic_name(topic, internal=True)
    return tuple(dict.fromkeys(topics))


def _place(given: Given, which: str) -> Place | None:
    by_offset, by_time = f"{which}Offsets", f"{which}Timestamp"
    offsets, time = given.text(by_offset), given.text(by_time)
    if offsets is not None and time is not None:
        raise wrong(by_time, f"give this or {by_offset}, not both")
    if time is not None:
        return Place("time", by_time, time_ms=parse_time(by_time, time))
    return None if offsets is None else parse_place(by_offset, offsets)
