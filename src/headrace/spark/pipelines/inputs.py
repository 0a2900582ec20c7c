"""Topics and tables become DataFrames; rows that fail are set apart.

A topic is read whole first (:class:`Read`): its rows with the record's own columns, and, where the
pipeline says where rows go that fail, a column with the reason. ``good`` are those without a reason, with
watermark and deduplication; ``bad`` are the others, as they came. Both come from the same source of the
same query, so one batch holds the good and the bad rows of the same offsets.

A record without a value (a tombstone) deletes a row of a table with ``merge_on``. It has no fields, so the columns
of the key are read from the record's key: its text, or for several columns its JSON. No condition of ``expect``
applies to it.

A table is read as it is when the query starts. Spark keeps the list of its files from then on, so
what is added later is seen by the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from headrace.spark.lake.table import KINDS
from headrace.spark.notation import parse_schema
from headrace.spark.pipelines.declaration import TableInput, TopicInput
from headrace.spark.pipelines.sections import (
    InvalidPipeline,
    Section,
    analysed,
    gathered,
    raise_all,
)
from headrace.spark.source.options import SourceOptions, parse_place
from headrace.spark.source.rows import CORRUPT, PREFIX, RECORD

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

REASON = "_reason"
MERGED_BYTES = "256MB"
"""Of the log, in one batch that is merged into a table: the driver holds the keys of a batch."""
NO_JSON = "the value is not JSON of the schema"


@dataclass(frozen=True)
class Read:
    """The rows of a topic."""

    good: DataFrame
    bad: DataFrame | None
    """With the record's columns by their plain names, and :data:`REASON`. None: nothing can fail."""


def read_topic(
    spark: SparkSession,
    given: TopicInput,
    connection: Mapping[str, str],
    *,
    sets_apart: bool,
    columns: set[str] | None = None,
    merge_on: tuple[str, ...] = (),
    is_empty: bool = False,
) -> Read:
    """The rows of topics, with these columns of the record (None: all). ``is_empty``: without rows."""
    limits = {"maxBytesPerTrigger": MERGED_BYTES} if merge_on else {}
    rows = _stream(spark, given, connection, columns, is_empty, limits)
    if merge_on and given.format == "json":
        rows = _with_keys_of_tombstones(rows, merge_on)
    reasons = _reasons(given, skips_tombstones=bool(merge_on)) if sets_apart else []
    bad = None
    if reasons:
        mistakes: list[InvalidPipeline] = []
        for reason in reasons:
            with gathered(mistakes), analysed(given.section, "expect"):
                rows.select(reason)
        raise_all(mistakes)
        rows = rows.withColumn(REASON, F.coalesce(*reasons))
        before = prefix_of(given)
        own = [F.col(before + name).alias(name) for name in RECORD if before + name in rows.columns]
        bad = rows.where(F.col(REASON).isNotNull()).select(*own, REASON)
        rows = rows.where(F.col(REASON).isNull()).drop(REASON, CORRUPT)
    if given.watermark is not None:
        with analysed(given.section, "watermark"):
            rows = rows.withWatermark(given.watermark.column, given.watermark.delay)
    if given.deduplicate:
        with analysed(given.section, "deduplicate"):
            rows = rows.dropDuplicatesWithinWatermark(list(given.deduplicate))
    return Read(rows, bad)


def _with_keys_of_tombstones(rows: DataFrame, merge_on: tuple[str, ...]) -> DataFrame:
    names = [name for name in merge_on if name in rows.columns]
    if len(names) < len(merge_on):
        return rows  # the key is made by the transformation
    text = F.col(PREFIX + "key").cast("string")
    types = {name: rows.schema[name].dataType for name in names}
    if len(names) > 1:
        parsed = F.from_json(text, StructType([StructField(n, types[n]) for n in names]))
        keys = {name: parsed[name] for name in names}
    else:
        keys = {name: text.try_cast(types[name]) for name in names}
    is_tombstone = F.col(PREFIX + "value").isNull()
    return rows.withColumns(
        {
            name: F.when(is_tombstone, key).otherwise(F.col(f"`{name}`"))
            for name, key in keys.items()
        }
    )


def as_messages(given: TopicInput, rows: DataFrame) -> DataFrame:
    """The records as they came, whatever was read out of them."""
    before = prefix_of(given)
    return rows.select(*[F.col(before + name).alias(name) for name in ("key", "value", "headers")])


def prefix_of(given: TopicInput) -> str:
    return PREFIX if given.format == "json" else ""


def _stream(
    spark: SparkSession,
    given: TopicInput,
    connection: Mapping[str, str],
    columns: set[str] | None,
    is_empty: bool,
    limits: Mapping[str, str],
) -> DataFrame:
    options = {
        **connection,
        "topic": ",".join(given.topics),
        "startingOffsets": _starting(given.starting),
        "valueFormat": given.format,
        **limits,
        **given.options,
    }
    if given.group is not None:
        options["group"] = given.group
    mistakes: list[InvalidPipeline] = []
    schema = StructType()
    with gathered(mistakes), analysed(given.section, "starting"):
        parse_place("startingOffsets", options["startingOffsets"])
    with gathered(mistakes), analysed(given.section, "options"):
        # Spark would only ask when the query starts.
        SourceOptions.of({**options, "startingOffsets": "earliest"})
    with gathered(mistakes), analysed(given.section, "schema"):
        schema = schema_of(given, columns)
    raise_all(mistakes)
    if is_empty:
        nothing = spark.readStream.format("rate").load().where("false")
        return nothing.select(*[_null(field) for field in schema_of(given).fields])
    with analysed(given.section, "from"):
        rows = spark.readStream.format("headrace").options(**options).schema(schema).load()
    if columns is None:
        return rows
    # A column that is not read can be named all the same.
    whole = schema_of(given)
    return rows.select(
        *[field.name if field.name in schema.names else _null(field) for field in whole.fields]
    )


def _null(field: StructField) -> Column:
    return F.lit(None).cast(field.dataType).alias(field.name)


def schema_of(given: TopicInput, columns: set[str] | None = None) -> StructType:
    """The columns that are asked of the source: the fields of JSON, and those of the record."""
    before = prefix_of(given)
    types = RECORD | ({"value": StringType()} if given.format == "text" else {})
    wanted = [name for name in types if columns is None or before + name in columns]
    if given.format != "json":
        wanted = wanted or ["offset"]  # where rows are only counted, there are columns all the same
    own = StructType([StructField(before + name, types[name]) for name in wanted])
    if given.format != "json":
        return own
    assert given.schema is not None
    fields = parse_schema(given.schema)
    _check_names(given.section, fields)
    return StructType([*fields.fields, *own.fields]).add(CORRUPT, StringType())


def _check_names(section: Section, fields: StructType) -> None:
    for name in fields.names:
        if name == CORRUPT or (name.startswith("_") and name[1:] in RECORD):
            raise section.wrong("schema", f"{name} is a column of the record itself")


def _starting(text: str) -> str:
    """A time may be written as it is."""
    is_time = text[:1].isdigit()
    return f"@{text}" if is_time else text


def _reasons(given: TopicInput, *, skips_tombstones: bool) -> list[Column]:
    """Why a row fails, the first that holds; null if it does not."""
    found = []
    if given.format == "json":
        found.append(F.when(F.col(CORRUPT).isNotNull(), F.lit(NO_JSON)))
    found += [unless(each, "expected") for each in given.expect]
    if skips_tombstones:
        has_value = F.col(prefix_of(given) + "value").isNotNull()
        found = [F.when(has_value, reason) for reason in found]
    return found


def unless(condition: str, word: str) -> Column:
    """A reason for rows of which the condition is not true: null counts as not true."""
    reason = F.lit(f"{word} {' '.join(condition.split())}")
    return F.when(~F.coalesce(F.expr(f"({condition})"), F.lit(False)), reason)


def read_table(spark: SparkSession, given: TableInput) -> DataFrame:
    """A table as it is now."""
    with analysed(given.section, "table"):
        if given.format in KINDS:
            from headrace.spark import lake

            return lake.read(spark, given.path, given.format, **given.options)
        reader = spark.read.format(given.format).options(**given.options)
        if given.schema is not None:
            reader = reader.schema(given.schema)
        return reader.load(given.path)
