"""A pipeline becomes queries, checked as far as Spark can without starting them.

::

    inputs ──▶ good rows ──▶ sql or function ──▶ messages ──┐
         └───▶ bad rows ───▶ dead letters ─────────────────┴─▶ one query, one commit

    inputs ──▶ good rows ──▶ sql or function ──▶ rows ──▶ a table
         └───▶ bad rows ───▶ dead letters ──▶ a second query

It is built twice. The first time is a rehearsal: topics are streams without rows, and Spark starts and stops
each query, so that an operation that streams do not support is found before anything runs. So a pipeline's
function is called twice; it describes the work, it does not do it.

A query that continues from a checkpoint is compared with the query that wrote it (``identity``).

Columns of a record that the SQL does not mention are not read (``mentioned_columns``).

Each pipeline has a Spark session of its own (views and settings of one do not meet those of
another) within the one application.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace import limits
from headrace.spark.lake import Options, schemas
from headrace.spark.lake.sink import table_schema
from headrace.spark.mentioned_columns import mentioned_columns
from headrace.spark.pipelines import identity, inputs, outputs
from headrace.spark.pipelines.dead_letters import letters_of_input
from headrace.spark.pipelines.declaration import (
    Pipeline,
    TableOutput,
    TopicInput,
    TopicOutput,
)
from headrace.spark.pipelines.files import importing_from
from headrace.spark.pipelines.identity import QueryIdentity
from headrace.spark.pipelines.outputs import DEAD
from headrace.spark.pipelines.sections import InvalidPipeline, analysed, gathered, raise_all
from headrace.spark.sessions.active_session import start_query
from headrace.spark.sink.writers import SinkOptions
from headrace.spark.source.rows import RECORD

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OBSERVED = "headrace"
"""Under this name a query counts, and its progress tells."""
FAILED_SUFFIX = ".failed"
PLAN_FIELDS_MAX = 10_000
"""The most columns of an operator in the text of a plan; Spark leaves out those after the 25th."""


@dataclass(frozen=True)
class PipelineSetting:
    """The settings that all pipelines of a run share."""

    connection: Mapping[str, str] = field(default_factory=dict)
    """The options of the source and the sink: servers, token, ca."""
    max_message_size: int = limits.MESSAGE_BYTES_DEFAULT


@dataclass(frozen=True)
class PlannedQuery:
    """One query that could be started."""

    name: str
    rows: DataFrame
    to: TopicOutput | TableOutput
    mode: str
    checkpoint: str
    options: Mapping[str, str]
    parts: Mapping[str, str] = field(default_factory=dict)
    """What it writes, in words: the parts of a message, or the columns of a table."""
    identity: QueryIdentity | None = None

    def start(self, trigger: Mapping[str, Any]) -> StreamingQuery:
        if self.identity is not None:
            identity.store(self.rows.sparkSession, self.checkpoint, self.identity)
        if isinstance(self.to, TableOutput):
            from headrace.spark import lake

            return lake.start(
                self.rows,
                name=self.name,
                path=self.to.path,
                kind=self.to.format,
                partition_by=list(self.to.partition_by),
                checkpoint=self.checkpoint,
                trigger=trigger,
                mode=self.mode,
                options=table_options(self.to),
            )
        where = self.options, self.checkpoint
        return start_query(
            self.rows, "headrace", *where, name=self.name, trigger=trigger, mode=self.mode
        )


def table_options(to: TableOutput) -> dict[str, str]:
    """The options of a table, as :mod:`headrace.spark.lake` takes them."""
    found = {"merge_on": ",".join(to.merge_on), "order_by": to.order_by or ""}
    return {**to.options, **{name: value for name, value in found.items() if value}}


@dataclass(frozen=True)
class PipelinePlan:
    pipeline: Pipeline
    queries: tuple[PlannedQuery, ...]
    changed: tuple[str, ...] = ()
    """The keys that have changed since the checkpoint was written, if the query continues from it."""


def plan(
    pipeline: Pipeline,
    spark: SparkSession,
    checkpoint: str,
    setting: PipelineSetting | None = None,
    *,
    begins_anew: bool = False,
) -> PipelinePlan:
    """Plan a pipeline; :class:`InvalidPipeline` says what is wrong, and where.

    A query that cannot continue from its checkpoint is refused, unless it ``begins_anew``.
    """
    setting = setting or PipelineSetting()
    session = spark.newSession()
    session.conf.set("spark.sql.debug.maxToStringFields", PLAN_FIELDS_MAX)
    with analysed(pipeline.section, "spark"):
        for name, value in pipeline.spark.items():
            session.conf.set(name, value)
    for query in _built(pipeline, session, checkpoint, setting, rehearses=True):
        _rehearse(pipeline, query)
    queries: list[PlannedQuery] = []
    changed: dict[str, None] = {}
    for query in _built(pipeline, session, checkpoint, setting):
        new = identity.identify(pipeline, query.rows)
        queries.append(replace(query, identity=new))
        old = None if begins_anew else identity.stored(session, query.checkpoint)
        if old is not None:
            found = identity.check_continues(pipeline, query.checkpoint, old, new)
            changed |= dict.fromkeys(found)
    return PipelinePlan(pipeline, tuple(queries), tuple(changed))


def _rehearse(pipeline: Pipeline, query: PlannedQuery) -> None:
    """Start a query without rows and stop it: Spark checks then which operations a stream allows."""
    with analysed(pipeline.section, "sql" if pipeline.sql is not None else "function"):
        writer = query.rows.writeStream.format("noop").outputMode(query.mode)
        writer.trigger(processingTime="1 day").start().stop()


def _built(
    pipeline: Pipeline,
    spark: SparkSession,
    checkpoint: str,
    setting: PipelineSetting,
    *,
    rehearses: bool = False,
) -> list[PlannedQuery]:
    """The queries. In a rehearsal, topics are streams without rows, and no broker is asked."""
    bad: list[DataFrame] = []
    frames: dict[str, DataFrame] = {}
    mistakes: list[InvalidPipeline] = []
    for each in pipeline.inputs:
        with gathered(mistakes):
            if not isinstance(each, TopicInput):
                frames[each.name] = inputs.read_table(spark, each)
                continue
            read = inputs.read_topic(
                spark,
                each,
                setting.connection,
                sets_apart=pipeline.failed is not None,
                columns=_used(pipeline, each),
                merge_on=pipeline.merge_on if len(pipeline.topics) == 1 else (),
                is_empty=rehearses,
            )
            frames[each.name] = read.good
            if read.bad is not None and pipeline.failed is not None:
                group = each.group or pipeline.name
                bad.append(letters_of_input(read.bad, group, pipeline.failed))
    with gathered(mistakes):
        _check_options(pipeline, setting)
    raise_all(mistakes)
    rows = outputs.with_deletions(pipeline, _transformed(pipeline, spark, frames))
    rows = outputs.with_reasons(pipeline, rows)
    return _queries(pipeline, rows, bad, checkpoint, setting)


def _check_options(pipeline: Pipeline, setting: PipelineSetting) -> None:
    """Of the output; Spark would only ask when the query starts."""
    with analysed(pipeline.to.section, "options"):
        if isinstance(pipeline.to, TableOutput):
            Options.of({**table_options(pipeline.to), "path": pipeline.to.path})
        else:
            SinkOptions.of({**setting.connection, **pipeline.to.options})


def _used(pipeline: Pipeline, given: TopicInput) -> set[str] | None:
    """The columns of the record that the pipeline can use. None: all of them."""
    if pipeline.failed is not None or pipeline.function is not None:
        return None  # dead letters are whole records; a function may use any column
    before = inputs.prefix_of(given)
    texts = [*given.expect, *given.deduplicate]
    if pipeline.merge_on:  # of tombstones
        texts.append(f"SELECT {before}key, {before}value")
    if given.watermark is not None:
        texts.append(given.watermark.column)
    if pipeline.sql is None:
        if not isinstance(pipeline.to, TopicOutput) or pipeline.to.columns:
            return None
        texts.append(f"SELECT {before}key, {before}value, {before}headers")
    else:
        texts += [pipeline.sql, *pipeline.ensure]
    return mentioned_columns(" ".join(texts), [before + name for name in RECORD])


# --- the transformation -----------------------------------------------------------------------------
def _transformed(
    pipeline: Pipeline, spark: SparkSession, frames: Mapping[str, DataFrame]
) -> DataFrame:
    if pipeline.sql is not None:
        for each in pipeline.inputs:
            for view in each.views:
                frames[each.name].createOrReplaceTempView(f"`{view}`")
        with analysed(pipeline.section, "sql"):
            rows = spark.sql(pipeline.sql)
            if not rows.isStreaming:
                raise pipeline.section.wrong("sql", "it reads none of the topics")
            return rows
    if pipeline.function is None:
        rows = next(iter(frames.values()))
        if isinstance(pipeline.to, TopicOutput) and not pipeline.to.columns:
            return inputs.as_messages(pipeline.topics[0], rows)
        return rows
    function = _function(pipeline)
    with analysed(pipeline.section, f"function {pipeline.way}"), importing_from(pipeline.folder):
        made = _called(function, spark, frames)
    if not isinstance(made, DataFrame):
        raise pipeline.section.wrong(
            "function", f"{pipeline.way} returned {type(made).__name__}, not a DataFrame"
        )
    if not made.isStreaming:
        raise pipeline.section.wrong("function", f"what {pipeline.way} returned is not a stream")
    return made


def _function(pipeline: Pipeline) -> Callable[..., Any]:
    if not isinstance(pipeline.function, str):
        assert pipeline.function is not None
        return pipeline.function
    module_name, _, name = pipeline.function.partition(":")
    with analysed(pipeline.section, "function"), importing_from(pipeline.folder):
        found = getattr(importlib.import_module(module_name), name)
    if not callable(found):
        raise pipeline.section.wrong("function", f"{pipeline.function} is no function")
    return found  # type: ignore[no-any-return]


def _called(function: Callable[..., Any], spark: SparkSession, frames: Mapping[str, Any]) -> Any:
    """One input is the first argument; several go by their names. ``spark`` is passed if it is a parameter."""
    more: dict[str, Any] = {}
    if "spark" in inspect.signature(function).parameters and "spark" not in frames:
        more["spark"] = spark
    if len(frames) == 1:
        return function(next(iter(frames.values())), **more)
    return function(**frames, **more)


# --- where it goes ----------------------------------------------------------------------------------
def _queries(
    pipeline: Pipeline,
    rows: DataFrame,
    bad: list[DataFrame],
    checkpoint: str,
    setting: PipelineSetting,
) -> list[PlannedQuery]:
    options = dict(setting.connection)
    if isinstance(pipeline.to, TableOutput):
        if outputs.can_fail(pipeline, rows):
            assert pipeline.failed is not None
            bad = [*bad, outputs.failed_rows(pipeline, rows, pipeline.failed)]
        main = outputs.table_rows(pipeline, rows)
        chosen = Options.of({**table_options(pipeline.to), "path": pipeline.to.path})
        if chosen.merge_on:
            with analysed(pipeline.to.section, "merge_on"):
                chosen.rule.check(schemas.to_arrow(table_schema(chosen, main.schema)))
    else:
        options |= pipeline.to.options
        main = outputs.messages(pipeline, rows, setting.max_message_size)
    letters = [each.withColumn(DEAD, F.lit(True)) for each in bad]
    if isinstance(pipeline.to, TopicOutput) and pipeline.mode == "append":  # in one commit
        main, letters = reduce(_union, letters, main), []
    if isinstance(pipeline.to, TopicOutput):
        parts = outputs.message_parts(pipeline, rows)
    else:
        parts = {"columns": ", ".join(each.simpleString() for each in main.schema.fields)}
    mode = pipeline.mode
    found = [
        PlannedQuery(
            pipeline.name, _counted(main), pipeline.to, mode, checkpoint, options, parts=parts
        )
    ]
    if letters:
        found.append(
            PlannedQuery(
                pipeline.name + FAILED_SUFFIX,
                _counted(reduce(_union, letters)),
                TopicOutput(pipeline.failed, pipeline.section),
                "append",
                checkpoint + FAILED_SUFFIX,
                dict(setting.connection),
            )
        )
    return found


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other, allowMissingColumns=True)


def _counted(rows: DataFrame) -> DataFrame:
    """Dead letters are counted on their way, and the mark by which they are is taken off."""
    if DEAD not in rows.columns:
        return rows
    counted = rows.observe(OBSERVED, F.count_if(F.col(DEAD)).alias("dead_letters"))
    return counted.drop(DEAD)
