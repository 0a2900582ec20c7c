"""A pipeline: inputs, a transformation, an output. Small values, checked without Spark.

Everything that can be wrong with a declaration by itself is found here. What only Spark can tell (a
column that does not exist, invalid SQL) is found by ``planning``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from headrace.model import (
    DEAD_LETTER_SUFFIX,
    check_pattern,
    check_subscription_name,
    check_topic_name,
    is_pattern,
    pattern_matches,
)
from headrace.spark.lake.table import KINDS, check_kind
from headrace.spark.options import ValueFormat
from headrace.spark.pipelines.sections import Section, Settings, Text, Texts

INPUT = "input"
"""The view of a pipeline that has one input only."""
RESTARTS = 3
ONCE = ("once", "available-now")
MESSAGE_KEYS = ("key", "value", "headers", "partition", "timestamp", "deliver_at")
"""What of a message a column can be."""
_VIEW = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_INPUT_KEYS = (
    "from", "format", "schema", "starting", "watermark", "deduplicate", "expect", "group", "options",
)  # fmt: skip


# --- inputs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Watermark:
    column: str
    delay: str


@dataclass(frozen=True)
class TopicInput:
    """Topics that are read as they grow."""

    name: str
    topics: Texts
    section: Section = field(repr=False, compare=False)
    format: ValueFormat = "binary"
    schema: Text | None = None
    starting: Text = "earliest"
    watermark: Watermark | None = None
    deduplicate: Texts = ()
    expect: Texts = ()
    group: str | None = None
    """The subscription that shows in the broker how far this has come."""
    options: Settings = field(default_factory=dict)

    @property
    def views(self) -> tuple[str, ...]:
        """The names under which SQL knows it."""
        topic = self.topics[0]
        if self.name != INPUT or len(self.topics) > 1 or is_pattern(topic) or "." in topic:
            return (self.name,)
        return (self.name, topic)

    def __str__(self) -> str:
        return ", ".join(self.topics)


@dataclass(frozen=True)
class TableInput:
    """Files or a lake table, read when the query starts."""

    name: str
    path: str
    section: Section = field(repr=False, compare=False)
    format: Literal["parquet", "csv", "json", "orc", "delta", "iceberg"] = "parquet"
    schema: Text | None = None
    options: Settings = field(default_factory=dict)

    @property
    def views(self) -> tuple[str, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return self.path


# --- outputs --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TopicOutput:
    topic: str | None
    """None: the column ``topic_from`` says it."""
    section: Section = field(repr=False, compare=False)
    topic_from: Text | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """key, value, headers, … -> the column that holds it, where the file says so."""
    options: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return self.topic or f"by {self.topic_from}"


@dataclass(frozen=True)
class TableOutput:
    path: str
    section: Section = field(repr=False, compare=False)
    format: str = KINDS[0]
    partition_by: Texts = ()
    merge_on: Texts = ()
    """The key: a row replaces the row of the table with the same values of these columns."""
    order_by: Text | None = None
    """Of rows with the same key, the one with the greatest value of this column stays."""
    delete: Text | bool | None = None
    """Which rows delete: a condition; False: none. None: as a column ``_deleted`` says, or tombstones."""
    options: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} ({self.format})"


# --- the whole ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pipeline:
    name: str
    inputs: tuple[TopicInput | TableInput, ...]
    to: TopicOutput | TableOutput
    section: Section = field(repr=False, compare=False)
    folder: Path = field(repr=False)
    """Where its file lies: modules and paths are looked for from there."""
    sql: Text | None = None
    function: str | Callable[..., Any] | None = None
    mode: Literal["append", "complete"] = "append"
    trigger: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of ``DataStreamWriter.trigger``; empty: a batch begins as soon as records exist."""
    checkpoint: Text | None = None
    failed: str | None = None
    """The topic for rows that failed."""
    ensure: Texts = ()
    restarts: Annotated[int, Meta(ge=0)] = RESTARTS
    """How often in a row it is started again after an error."""
    spark: Settings = field(default_factory=dict)

    @property
    def topics(self) -> tuple[TopicInput, ...]:
        return tuple(each for each in self.inputs if isinstance(each, TopicInput))

    @property
    def merge_on(self) -> tuple[str, ...]:
        """The key of the table's rows; empty if rows are only added."""
        return self.to.merge_on if isinstance(self.to, TableOutput) else ()

    @property
    def is_once(self) -> bool:
        return "availableNow" in self.trigger

    @property
    def way(self) -> str:
        """The transformation in a word or two."""
        if self.sql is not None:
            return "sql"
        if self.function is None:
            return "as it is"
        if isinstance(self.function, str):
            return self.function
        return f"{self.function.__name__}()"

    @property
    def trigger_text(self) -> str:
        if self.is_once:
            return "once"
        return str(self.trigger.get("processingTime", "at once"))


def read_pipeline(
    name: str, section: Section, folder: Path, function: Callable[..., Any] | None = None
) -> Pipeline:
    """A pipeline from its table in a file; :class:`InvalidPipeline` names a mistake."""
    section.checked("name", check_subscription_name, name)
    named = section.text("function")
    pipeline = section.read(
        Pipeline,
        name=name,
        inputs=_inputs(name, section, folder),
        to=_output(section, folder),
        folder=folder,
        function=function or named,
        trigger=_trigger(section),
        failed=_failed(name, section),
        spark=section.options("spark", "spark."),
    )
    section.end()
    _check_transformation(pipeline, [pipeline.sql, named, function])
    _check_failing(pipeline)
    _check_loops(pipeline)
    if (
        pipeline.mode == "complete"
        and isinstance(pipeline.to, TableOutput)
        and not pipeline.to.merge_on
    ):
        section.note(
            "mode", "a table is only ever appended to; complete is for topics, or with to.merge_on"
        )
    section.finish()
    return pipeline


def _check_transformation(pipeline: Pipeline, ways: list[object]) -> None:
    section = pipeline.section
    if sum(way is not None for way in ways) > 1:
        section.note("sql", "give sql or a function, not both")
    if pipeline.inputs and not pipeline.topics:
        section.note("inputs", "at least one of them reads a topic ('from')")
    if pipeline.sql is None and pipeline.function is None and len(pipeline.inputs) > 1:
        section.note("sql", "several inputs need sql or a function that joins them")
    if isinstance(pipeline.function, str) and not re.fullmatch(
        r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", pipeline.function
    ):
        section.note("function", f"it is 'module:function', not {pipeline.function!r}")


def _check_failing(pipeline: Pipeline) -> None:
    if pipeline.failed is not None:
        return
    section = pipeline.section
    if pipeline.ensure:
        section.note("ensure", "say where rows go that fail it: failed = true, or a topic")
    for each in pipeline.topics:
        if each.expect:
            each.section.note("expect", "say where rows go that fail it: failed = true, or a topic")


def _check_loops(pipeline: Pipeline) -> None:
    """A pipeline must not read the topic that it writes."""
    written = {"failed": pipeline.failed}
    if isinstance(pipeline.to, TopicOutput):
        written["to"] = pipeline.to.topic
        if pipeline.failed is not None and pipeline.failed == pipeline.to.topic:
            pipeline.section.note("failed", "rows that failed need a topic of their own")
    for key, topic in written.items():
        for each in pipeline.topics:
            for pattern in each.topics:
                if topic is not None and pattern_matches(pattern, topic):
                    pipeline.section.note(
                        key, f"{topic!r} is read by this pipeline ({pattern}): it would never end"
                    )


# --- its parts ------------------------------------------------------------------------------------
def _inputs(pipeline: str, section: Section, folder: Path) -> tuple[TopicInput | TableInput, ...]:
    named = section.sections("inputs")
    if not named:
        if "from" not in section:
            section.note("from", "say which topics are read (or several 'inputs')")
            for key in _INPUT_KEYS:
                section.take(key)
            return ()
        return (_topic_input(INPUT, section, pipeline),)
    for key in _INPUT_KEYS:
        if key in section:
            section.note(key, "with 'inputs', this stands in each of them")
            section.take(key)
    found: list[TopicInput | TableInput] = []
    for name, inner in named.items():
        if not _VIEW.match(name):
            section.note(
                f"inputs.{name}", f"{name!r} becomes the name of a view: letters, digits and '_'"
            )
        if ("from" in inner) == ("table" in inner):
            inner.note("from", "an input reads topics ('from') or a 'table'")
            continue
        if "from" in inner:
            found.append(_topic_input(name, inner, f"{pipeline}.{name}"))
        else:
            path = path_from(folder, inner.text("table", "."))
            found.append(inner.read(TableInput, name=name, path=path))
        inner.end()
    return tuple(found)


def _topic_input(name: str, section: Section, group: str) -> TopicInput:
    topics = section.texts("from")
    for topic in topics:
        check = check_pattern if is_pattern(topic) else _topic_name
        section.checked("from", check, topic)
    found = section.read(
        TopicInput,
        name=name,
        topics=topics,
        watermark=_watermark(section),
        group=_group(section, group),
    )
    if (found.format == "json") != (found.schema is not None):
        section.note(
            "schema",
            "JSON needs one, such as 'id STRING, amount DOUBLE'"
            if found.schema is None
            else f"it is for format = 'json', and this is {found.format}",
        )
    if found.deduplicate and found.watermark is None:
        time = "_timestamp" if found.format == "json" else "timestamp"
        section.note(
            "deduplicate",
            "without a watermark every id would be kept for ever; add, for example, "
            f"watermark = '{time} 1 hour'",
        )
    return found


def _topic_name(topic: str) -> str:
    return check_topic_name(topic, internal=True)


def _group(section: Section, default: str) -> str | None:
    given = section.take("group", True)
    if isinstance(given, bool):
        return default if given else None
    return str(section.checked("group", check_subscription_name, given))


def _watermark(section: Section) -> Watermark | None:
    if isinstance(section.take("watermark"), Mapping):
        inner = section.section("watermark")
        assert inner is not None
        column, delay = inner.text("column"), inner.text("delay")
        if column is None or delay is None:
            section.note("watermark", "it has a column and a delay")
            return None
        found = Watermark(column, inner.duration("delay", delay))
        inner.end()
        return found
    given = section.text("watermark")
    if given is None:
        return None
    column, _, delay = given.partition(" ")
    if not delay.strip():
        section.note(
            "watermark", f"it is a column and a duration, as 'at 10 minutes', not {given!r}"
        )
        return None
    return Watermark(column, section.duration("watermark", delay.strip()))


def _output(section: Section, folder: Path) -> TopicOutput | TableOutput:
    given = section.take("to")
    if given is None:
        section.note("to", "say where the rows go: a topic, or { table = 'path' }")
        return TopicOutput(None, section)
    if isinstance(given, str):
        return TopicOutput(section.checked("to", check_topic_name, given), section)
    inner = section.section("to")
    if inner is None:
        return TopicOutput(None, section)
    if sum(key in inner for key in ("topic", "topic_from", "table")) != 1:
        section.note("to", "it has a topic, a topic_from (a column), or a table")
        return TopicOutput(None, section)
    found: TopicOutput | TableOutput
    if "table" in inner:
        path = path_from(folder, inner.text("table", "."))
        kind = inner.checked("format", check_kind, inner.text("format", KINDS[0]))
        found = inner.read(TableOutput, path=path, format=kind)
        for key in ("order_by", "delete"):
            if key in inner and not found.merge_on:
                inner.note(key, "it is for upserts: give merge_on, the columns of the key")
        if found.delete is True:
            inner.note("delete", "it is a condition, such as \"op = 'd'\", or false")
    else:
        columns = {key: inner.text(key) for key in MESSAGE_KEYS}
        topic = inner.text("topic")
        found = inner.read(
            TopicOutput,
            topic=None if topic is None else inner.checked("topic", check_topic_name, topic),
            columns={key: column for key, column in columns.items() if column is not None},
        )
    inner.end()
    return found


def _failed(pipeline: str, section: Section) -> str | None:
    given = section.take("failed")
    if given is None or given is False:
        return None
    if given is True:
        return pipeline + DEAD_LETTER_SUFFIX
    return str(section.checked("failed", check_topic_name, given))


def _trigger(section: Section) -> dict[str, Any]:
    given = section.text("trigger")
    if given is None:
        return {}
    if given in ONCE:
        return {"availableNow": True}
    return {"processingTime": section.duration("trigger", given)}


def path_from(folder: Path, path: str) -> str:
    """A path in a file is meant from where the file lies; an address stays what it is."""
    return path if "://" in path else str(folder / Path(path).expanduser())
