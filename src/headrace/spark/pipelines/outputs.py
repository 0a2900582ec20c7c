"""A DataFrame becomes messages or the rows of a table.

Messages always have the same shape here: ``key, value, headers, topic``, and ``partition, timestamp,
deliver_at`` where the rows have them. The topic stands in every row, because good rows and dead letters
are written together. Values are made by Spark's own ``to_json``, or are the column ``value``.

If the pipeline has a topic for rows that fail, a message that the broker would refuse goes there: a value
that is null or too large, an invalid topic. Its dead letter holds the beginning of the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    NumericType,
    StringType,
    StructType,
)

from headrace import limits
from headrace.spark.lake.merging import DELETED
from headrace.spark.pipelines.dead_letters import letter_headers
from headrace.spark.pipelines.declaration import Pipeline, TableOutput, TopicOutput
from headrace.spark.pipelines.functions import FAILED, FAILED_VALUE
from headrace.spark.pipelines.inputs import prefix_of, unless
from headrace.spark.pipelines.sections import analysed
from headrace.spark.record_headers import HEADERS
from headrace.spark.source.rows import RECORD

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MESSAGE = ("key", "value", "headers", "topic", "partition", "timestamp", "deliver_at")
"""The columns that the sink knows."""
BY_NAME = ("key", "value", "headers", "deliver_at")
"""Those that are taken by their name, where all columns are such as a message has."""
DEAD = "_dead"
"""Whether a message is a dead letter: counted, and dropped before the sink."""
LETTER_ROOM_BYTES = 16 << 10
"""The columns for a dead letter's headers."""
_TOPIC_NAME = r"^(?!__)[A-Za-z0-9._-]{1,249}$"


# --- for both -------------------------------------------------------------------------------------
def with_reasons(pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """Add the conditions of ``ensure``, and that a key is not null, to the reasons in ``_failed``."""
    keys = pipeline.merge_on if pipeline.failed is not None else ()
    if not pipeline.ensure and not keys:
        return rows
    own = [F.col(FAILED).cast("string")] if FAILED in rows.columns else []
    own += [
        F.when(F.col(f"`{name}`").isNull(), F.lit(f"the key {name} is null"))
        for name in keys
        if name in rows.columns
    ]
    with analysed(pipeline.section, "ensure"):
        reasons = [unless(each, "not ensured:") for each in pipeline.ensure]
        if DELETED in rows.columns:  # a row that deletes need not hold values
            is_kept = ~F.coalesce(F.col(DELETED), F.lit(False))
            reasons = [F.when(is_kept, reason) for reason in reasons]
        return rows.withColumn(FAILED, F.coalesce(*own, *reasons))


def with_deletions(pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """Of a pipeline that merges: mark the rows that delete, in the column ``_deleted``."""
    output = pipeline.to
    if not isinstance(output, TableOutput) or not output.merge_on or output.delete is False:
        return rows.drop(DELETED) if pipeline.merge_on else rows
    condition = output.delete
    if condition is None and DELETED not in rows.columns:
        if pipeline.sql is not None or pipeline.function is not None:
            raise output.section.wrong(
                "delete",
                "say which rows delete: a column _deleted of the result (for tombstones: _value IS NULL "
                "AS _deleted), a condition here, or false if no row does",
            )
        condition = f"{prefix_of(pipeline.topics[0])}value IS NULL"
    with analysed(output.section, "delete"):
        found = F.col(DELETED) if condition is None else F.expr(f"({condition})")
        return rows.withColumn(DELETED, found.cast("boolean"))


def can_fail(pipeline: Pipeline, rows: DataFrame) -> bool:
    """Whether rows can have a reason; the pipeline then says where those go."""
    if FAILED in rows.columns and pipeline.failed is None:
        raise pipeline.section.wrong(
            "failed", f"the rows have a column {FAILED}: say where those go that failed"
        )
    return FAILED in rows.columns


def kept(rows: DataFrame) -> list[str]:
    """The columns that leave: not those with an underscore in front."""
    return [name for name in rows.columns if not name.startswith("_")]


# --- a table --------------------------------------------------------------------------------------
def table_rows(pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """The rows that are added to a table, or merged into it."""
    output = pipeline.to
    assert isinstance(output, TableOutput)
    columns = kept(rows)
    if not columns:
        raise pipeline.section.wrong("to", "no column is left that could be written")
    named = {"partition_by": output.partition_by, "merge_on": output.merge_on}
    if output.order_by is not None:
        named["order_by"] = (output.order_by,)
    for key, names in named.items():
        for name in names:
            if name not in columns:
                raise output.section.wrong(
                    key, f"there is no column {name!r}; there are {', '.join(columns)}"
                )
    if output.merge_on and DELETED in rows.columns:
        columns = [*columns, DELETED]
    if can_fail(pipeline, rows):
        rows = rows.where(F.col(FAILED).isNull())
    return rows.select(*[f"`{name}`" for name in columns])


def failed_rows(pipeline: Pipeline, rows: DataFrame, topic: str) -> DataFrame:
    """Of a pipeline that writes a table: its rows that failed, as messages."""
    value = _failed_value(rows, _json(kept(rows)))
    return rows.where(F.col(FAILED).isNotNull()).select(
        F.lit(None).cast("binary").alias("key"),
        value.alias("value"),
        letter_headers(None, F.col(FAILED), pipeline.name).alias("headers"),
        F.lit(topic).alias("topic"),
    )


# --- a topic --------------------------------------------------------------------------------------
def messages(pipeline: Pipeline, rows: DataFrame, max_message_size: int) -> DataFrame:
    """The rows as messages; those that failed are addressed to the topic for them."""
    output = pipeline.to
    assert isinstance(output, TopicOutput)
    shaped = _shaped(pipeline, output, rows)
    if pipeline.failed is None:
        return shaped.select(*[name for name in MESSAGE if name in shaped.columns])
    reason = F.coalesce(F.col(FAILED), *_refusals(output, max_message_size))
    shaped = shaped.withColumn(FAILED, reason)
    is_dead = F.col(FAILED).isNotNull()
    room = max(max_message_size - LETTER_ROOM_BYTES, max_message_size // 2)
    letter = F.coalesce(F.substring(F.col(FAILED_VALUE), 1, room), F.lit(b""))
    columns = {
        "key": F.when(~is_dead | (F.octet_length("key") <= limits.KEY_BYTES_MAX), F.col("key")),
        "value": F.when(is_dead, letter).otherwise(F.col("value")),
        "headers": F.when(
            is_dead, letter_headers(F.col("headers"), F.col(FAILED), pipeline.name)
        ).otherwise(F.col("headers")),
        "topic": F.when(is_dead, F.lit(pipeline.failed)).otherwise(F.col("topic")),
        DEAD: is_dead,
    }
    for name in ("partition", "timestamp", "deliver_at"):
        if name in shaped.columns:
            columns[name] = F.when(~is_dead, F.col(name))
    return shaped.select(*[column.alias(name) for name, column in columns.items()])


def message_parts(pipeline: Pipeline, rows: DataFrame) -> dict[str, str]:
    """The parts of a message and what they will hold, in words: the fields of JSON, or a column."""
    output = pipeline.to
    assert isinstance(output, TopicOutput)
    meanings = _meanings(pipeline, output, rows)
    found = {
        meaning: f"column {name} ({rows.schema[name].dataType.simpleString()})"
        for meaning, name in meanings.items()
    }
    if "value" not in found:
        fields = [rows.schema[name] for name in _json_columns(rows, meanings)]
        found["value"] = f"JSON {json_type(StructType(fields))}"
    return found


def json_type(kind: DataType) -> str:
    """How Spark's ``to_json`` writes a type: ``{"id": string, "at": string (timestamp)}``."""
    if isinstance(kind, StructType):
        return "{" + ", ".join(f'"{f.name}": {json_type(f.dataType)}' for f in kind.fields) + "}"
    if isinstance(kind, ArrayType):
        return f"[{json_type(kind.elementType)}, …]"
    if isinstance(kind, MapType):
        return f"{{string: {json_type(kind.valueType)}, …}}"
    name = kind.simpleString()
    if isinstance(kind, (StringType, BooleanType)):
        return name
    written = "number" if isinstance(kind, NumericType) else "string"
    return f"{written} ({'base64' if isinstance(kind, BinaryType) else name})"


def _json_columns(rows: DataFrame, meanings: Mapping[str, str]) -> list[str]:
    """The columns that become fields: all that leave, but for those that say where to."""
    hidden = {name for meaning, name in meanings.items() if meaning != "key"}
    return [name for name in kept(rows) if name not in hidden]


def _refusals(output: TopicOutput, max_message_size: int) -> list[Column]:
    """The first reason for which the broker would refuse a message."""
    size = F.octet_length("value")
    too_large = F.concat(
        F.lit("the message has "), size, F.lit(f" bytes, the broker takes {max_message_size}")
    )
    found = [
        F.when(F.col("value").isNull(), F.lit("the value is null")),
        F.when(size > max_message_size, too_large),
        F.when(
            F.octet_length("key") > limits.KEY_BYTES_MAX,
            F.lit(f"the key has more than {limits.KEY_BYTES_MAX} bytes"),
        ),
    ]
    if output.topic is None:
        is_name = F.coalesce(F.col("topic").rlike(_TOPIC_NAME), F.lit(False))
        reason = F.concat(F.lit("no topic can have the name "), F.coalesce("topic", F.lit("null")))
        found.append(F.when(~is_name, reason))
    return found


def _shaped(pipeline: Pipeline, output: TopicOutput, rows: DataFrame) -> DataFrame:
    """The rows with the columns of a message, and the value of its dead letter."""
    meanings = _meanings(pipeline, output, rows)
    columns: dict[str, Column] = {}
    for meaning, name in meanings.items():
        if meaning in ("key", "value"):
            columns[meaning] = _bytes(rows, name)
        else:
            columns[meaning] = F.col(f"`{name}`")
    if "value" not in columns:
        columns["value"] = _json(_json_columns(rows, meanings))
    columns.setdefault("key", F.lit(None).cast("binary"))
    columns["headers"] = columns.get("headers", F.lit(None)).cast(HEADERS)
    if output.topic is not None:
        columns["topic"] = F.lit(output.topic)
    reason = F.col(FAILED) if can_fail(pipeline, rows) else F.lit(None)
    if pipeline.failed is not None:
        columns[FAILED] = reason.cast("string")
        columns[FAILED_VALUE] = _failed_value(rows, columns["value"])
    with analysed(output.section, "to"):
        return rows.select(*[column.alias(name) for name, column in columns.items()])


def _meanings(pipeline: Pipeline, output: TopicOutput, rows: DataFrame) -> dict[str, str]:
    """The column of each part of a message. Without a value, the message is JSON of the others."""
    left = kept(rows)
    if not left:
        raise pipeline.section.wrong("to", "no column is left that could be written")
    found = dict(output.columns)
    if output.topic_from is not None:
        found["topic"] = output.topic_from
    for meaning, name in found.items():
        if name not in rows.columns:
            raise output.section.wrong(
                "topic_from" if meaning == "topic" else meaning,
                f"there is no column {name!r}; there are {', '.join(left)}",
            )
    if "value" in left and set(left) <= {*RECORD, *MESSAGE}:
        found = {name: name for name in BY_NAME if name in left} | found
    return found


def _bytes(rows: DataFrame, name: str) -> Column:
    """A column as bytes; a column that is not binary as its text."""
    column = F.col(f"`{name}`")
    is_binary = isinstance(rows.schema[name].dataType, BinaryType)
    return column if is_binary else column.cast("string").cast("binary")


def _failed_value(rows: DataFrame, otherwise: Column) -> Column:
    if FAILED_VALUE not in rows.columns:
        return otherwise
    return F.coalesce(F.col(FAILED_VALUE).cast("binary"), otherwise)


def _json(names: list[str]) -> Column:
    return F.to_json(F.struct(*[F.col(f"`{name}`") for name in names])).cast("binary")
