"""A pipeline becomes queries, checked as far as Spark can without starting them.

::

    inputs ──▶ good rows ──▶ sql or function ──▶ messages ──┐
         └───▶ bad rows ───▶ dead letters ─────────────────┴─▶ one query, one commit

    inputs ──▶ good rows ──▶ sql or function ──▶ rows ──▶ a table
         └───▶ bad rows ───▶ dead letters ──▶ a second query

It is built twice. The first time is a rehearsal: topics are streams without rows, and Spark starts and stops
each query, so that an operation that streams do not support is found before anything runs. So a pipeline's
function is called twice; it describes the work, it does not do it.

Columns of a record that the SQL does not mention are not read (``mentioned_columns``).

Each pipeline has a Spark session of its own (views and settings of one do not meet those of
another) within the one application.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace import limits
from headrace.spark.lake import Options
from headrace.spark.mentioned_columns import mentioned_columns
from headrace.spark.pipelines import inputs, outputs
from headrace.spark.pipelines.dead_letters import letters_of_input
from headrace.spark.pipelines.declaration import (
    Pipeline,
    TableOutput,
    TopicInput,
    TopicOutput,
)
from headrace.spark.pipelines.files import importing_from
from headrace.spark.pipelines.outputs import DEAD
from headrace.spark.pipelines.sections import analysed
from headrace.spark.sessions.active_session import start_query
from headrace.spark.sink.writers import SinkOptions
from headrace.spark.source.rows import RECORD

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OBSERVED = "headrace"
"""Under this name a query counts, and its progress tells."""
FAILED_SUFFIX = ".failed"


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

    def start(self, trigger: Mapping[str, Any]) -> StreamingQuery:
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
                options=dict(self.to.options),
            )
        where = self.options, self.checkpoint
        return start_query(
            self.rows, "headrace", *where, name=self.name, trigger=trigger, mode=self.mode
        )


@dataclass(frozen=True)
class PipelinePlan:
    pipeline: Pipeline
    queries: tuple[PlannedQuery, ...]


def plan(
    pipeline: Pipeline, spark: SparkSession, checkpoint: str, setting: PipelineSetting | None = None
) -> PipelinePlan:
    """Plan a pipeline; :class:`InvalidPipeline` says what is wrong, and where."""
    setting = setting or PipelineSetting()
    session = spark.newSession()
    with analysed(pipeline.section, "spark"):
        for name, value in pipeline.spark.items():
            session.conf.set(name, value)
    for query in _built(pipeline, session, checkpoint, setting, rehearses=True):
        _rehearse(pipeline, query)
    return PipelinePlan(pipeline, tuple(_built(pipeline, session, checkpoint, setting)))


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
    for each in pipeline.inputs:
        if not isinstance(each, TopicInput):
            frames[each.name] = inputs.read_table(spark, each)
            continue
        read = inputs.read_topic(
            spark,
            each,
            setting.connection,
            sets_apart=pipeline.failed is not None,
            columns=_used(pipeline, each),
            is_empty=rehearses,
        )
        frames[each.name] = read.good
        if read.bad is not None and pipeline.failed is not None:
            bad.append(letters_of_input(read.bad, each.group or pipeline.name, pipeline.failed))
    rows = outputs.with_reasons(pipeline, _transformed(pipeline, spark, frames))
    return _queries(pipeline, rows, bad, checkpoint, setting)


def _used(pipeline: Pipeline, given: TopicInput) -> set[str] | None:
    """The columns of the record that the pipeline can use. None: all of them."""
    if pipeline.failed is not None or pipeline.function is not None:
        return None  # dead letters are whole records; a function may use any column
    before = inputs.prefix_of(given)
    texts = [*given.expect, *given.deduplicate]
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
        with analysed(pipeline.to.section, "options"):
            Options.of({**pipeline.to.options, "path": pipeline.to.path})
    else:
        options |= pipeline.to.options
        with analysed(pipeline.to.section, "options"):
            SinkOptions.of(options)
        main = outputs.messages(pipeline, rows, setting.max_message_size)
    letters = [each.withColumn(DEAD, F.lit(True)) for each in bad]
    if isinstance(pipeline.to, TopicOutput) and pipeline.mode == "append":  # in one commit
        main, letters = reduce(_union, letters, main), []
    found = [
        PlannedQuery(pipeline.name, _counted(main), pipeline.to, pipeline.mode, checkpoint, options)
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
