"""The options of ``spark.read.format("headrace")``, read once and checked.

:class:`SourceOptions` is a small value that is pickled to executors. docs/spark.md
describes each option.
"""

from __future__ import annotations

import re
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
    *CONNECTION, "path", "topic", "subscribePattern", "assign", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "minOffsetsPerTrigger",
    "maxTriggerDelay", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minPartitions", "failOnDataLoss", "group", "valueFormat", "schema", "columns", "includeHeaders",
    "directReads", "history", "deadLetters",
)  # fmt: skip
MAX_TRIGGER_DELAY_S_DEFAULT = 900.0
"""As long as with Kafka's source."""


# --- where to begin and to end --------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A position as a user says it, not yet offsets."""

    kind: Literal["earliest", "latest", "group", "offsets", "time", "times"]
    option: str
    """The option that said so, for errors."""
    offsets: Mapping[str, Mapping[int, int]] | None = None
    time_ms: int | None = None
    times: Mapping[str, Mapping[int, int]] | None = None
    """In milliseconds, by partition."""

    def time_of(self, topic: str, partition: int) -> int | None:
        """The time that stands for an offset, if one does."""
        if self.times is None:
            return self.time_ms
        return self.times.get(topic, {}).get(partition)


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
        return Place("offsets", option, offsets=_parse_offsets(option, text, "offset"))
    raise wrong(
        option,
        f"it is earliest, latest, a time (@2026-01-31T12:00:00Z) or JSON such as "
        f'{{"orders": {{"0": 23}}}}, not {text!r}',
    )


_RANGES = {
    "offset": (EARLIEST_OFFSET, limits.OFFSET_MAX, "an offset (-2 is earliest, -1 latest)"),
    "time": (0, limits.TIMESTAMP_MS_MAX, "a time in milliseconds since 1970"),
}


def _parse_offsets(option: str, text: str, what: str) -> dict[str, dict[int, int]]:
    """A number for each partition: ``{"orders": {"0": 23}}``."""
    lowest, highest, meaning = _RANGES[what]
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in _parse_object(option, text).items():
        if not isinstance(partitions, dict):
            raise wrong(option, f'{topic!r} needs {what}s by partition, such as {{"0": 23}}')
        found[topic] = {}
        for number, value in partitions.items():
            if not number.isascii() or not number.isdigit():
                raise wrong(option, f"{number!r} of {topic!r} is not the number of a partition")
            if type(value) is not int or not lowest <= value <= highest:
                raise wrong(option, f"{value!r} for {topic}/{number} is not {meaning}")
            found[topic][int(number)] = value
    return found


def _parse_object(option: str, text: str) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise wrong(option, f"this is not JSON ({error}): {text[:80]}") from None
    if not isinstance(document, dict):
        raise wrong(option, f"it is a JSON object with the names of topics, not {text[:80]}")
    return document


# --- all options of reading -------------------------------------------------------------------------
@dataclass(frozen=True)
class SourceOptions:
    topics: tuple[str, ...]
    """Names and wildcards; empty with a pattern."""
    subscribe_pattern: str | None = None
    assigned: Mapping[str, frozenset[int]] | None = None
    """Only these partitions (option ``assign``)."""
    connection: ConnectionOptions | None = None
    path: str | None = None
    starting: Place | None = None
    """None: earliest for a batch, latest for a stream, as Kafka's source has it."""
    ending: Place | None = None
    starting_offsets_by_timestamp_strategy: Literal["latest", "error"] = "latest"
    min_offsets_per_trigger: Count | None = None
    max_trigger_delay: Seconds = MAX_TRIGGER_DELAY_S_DEFAULT
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
    kafka_columns: bool = False
    """Whether the columns are Kafka's: ``timestampType``, too."""
    history: str | None = None
    """The archive whose records are read, too: its name, or its table's path."""

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
        if "/" in values.get("history", "") and "://" not in values["history"]:
            values["history"] = str(Path(values["history"]).absolute())
        if "group" in values:
            check_subscription_name(values["group"])
        if "schema" in values and values.get("value_format") != "json":
            raise wrong("schema", "it is for valueFormat=json; use .schema(…) to choose columns")
        values |= {"starting": _place(given, "starting"), "ending": _place(given, "ending")}
        values |= _choice(given)
        values["kafka_columns"] = any(str(name).lower() in _KAFKA_CHOICES for name in options)
        return cls(**values)


_KAFKA_CHOICES = ("subscribe", "subscribepattern", "assign")


def _choice(given: Given) -> dict[str, Any]:
    """What is read: topics, topics that match a regular expression, or partitions."""
    topics, pattern, assign = map(given.text, ("topic", "subscribePattern", "assign"))
    if (topics is not None) + (pattern is not None) + (assign is not None) > 1:
        raise wrong("topic", "give this, subscribePattern or assign, only one of them")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise wrong(
                "subscribePattern", f"{pattern[:80]!r} is no regular expression: {error}"
            ) from None
        return {"topics": ()}
    if assign is None:
        return {"topics": _topics(given)}
    assigned = {}
    for topic, numbers in _parse_object("assign", assign).items():
        check_topic_name(topic, internal=True)
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise wrong("assign", f"{topic!r} needs a list of partitions, such as [0, 1]")
        assigned[topic] = frozenset(numbers)
    if not any(assigned.values()):
        raise wrong("assign", 'it names no partition; write {"orders": [0, 1]}')
    if given.text("group") is not None:
        raise wrong("group", "a subscription is of whole topics, so it cannot go with assign")
    return {"topics": tuple(assigned), "assigned": assigned}


def _topics(given: Given) -> tuple[str, ...]:
    if given.text("deadLetters") is not None:
        raise wrong("deadLetters", "it is for a batch (spark.read); a stream reads topics")
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
    names = [f"{which}Timestamp", f"{which}OffsetsByTimestamp", f"{which}Offsets"]
    found = {name: text for name in names if (text := given.text(name)) is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise wrong(first, f"give this or {second}, not both")
    for name, text in found.items():
        if name == f"{which}Timestamp":
            return Place("time", name, time_ms=parse_time(name, text))
        if name == f"{which}OffsetsByTimestamp":
            return Place("times", name, times=_parse_offsets(name, text, "time"))
        return parse_place(name, text)
    return None
