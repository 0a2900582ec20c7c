"""Topics and tables become DataFrames; rows that fail are set apart.

A topic is read whole first (:class:`Read`): its rows with the record's own columns, and, where the
pipeline says where rows go that fail, a column with the reason. ``good`` are those without a reason, with
watermark and deduplication; ``bad`` are the others, as they came. Both come from the same source of the
same query, so one batch holds the good and the bad rows of the same offsets.

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
from headrace.spark.pipelines.sections import Section, analysed
from headrace.spark.source.options import SourceOptions, parse_place
from headrace.spark.source.rows import CORRUPT, PREFIX, RECORD

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

REASON = "_reason"
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
    is_empty: bool = False,
) -> Read:
    """The rows of topics, with these columns of the record (None: all). ``is_empty``: without rows."""
    rows = _stream(spark, given, connection, columns, is_empty)
    reasons = _reasons(given) if sets_apart else []
    bad = None
    if reasons:
        with analysed(given.section, "expect"):
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
) -> DataFrame:
    options = {
        **connection,
        "topic": ",".join(given.topics),
        "startingOffsets": _starting(given.starting),
        "valueFormat": given.format,
        **given.options,
    }
    if given.group is not None:
        options["group"] = given.group
    with analysed(given.section, "starting"):
        parse_place("startingOffsets", options["startingOffsets"])
    with analysed(given.section, "options"):
        SourceOptions.of(options)  # Spark would only ask when the query starts
    with analysed(given.section, "schema"):
        schema = schema_of(given, columns)
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


def _reasons(given: TopicInput) -> list[Column]:
    """Why a row fails, the first that holds; null if it does not."""
    found = []
    if given.format == "json":
        found.append(F.when(F.col(CORRUPT).isNotNull(), F.lit(NO_JSON)))
    return found + [unless(each, "expected") for each in given.expect]


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
