"""Schemas: from Spark to Arrow, and whether rows of one can be added to a table of another."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DateType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from headrace.errors import InvalidArgument
from headrace.spark.lake.table import Options
from headrace.spark.versions import to_utc_schema

PARTITION_TYPES = (
    StringType, DateType, BooleanType, ByteType, ShortType, IntegerType, LongType,
)  # fmt: skip
"""Types whose values have one plain text form, so that they can name a directory."""


def to_arrow(schema: StructType) -> pa.Schema:
    """Times are UTC, and everything may be null: a table outlives the query that made it."""
    return to_utc_schema(all_nullable(schema))


def to_spark(schema: pa.Schema) -> StructType:
    return all_nullable(from_arrow_schema(schema, prefer_timestamp_ntz=True))


def all_nullable(schema: StructType) -> StructType:
    """Without metadata too: two schemas are then equal when their rows fit the same table."""
    nullable = schema.toNullable()
    return StructType([StructField(each.name, each.dataType) for each in nullable.fields])


def invalid(sentence: str) -> InvalidArgument:
    return InvalidArgument(sentence, code="invalid_schema")


def check_columns(schema: StructType, partition_by: Sequence[str], *, offsets: bool) -> None:
    """The checks that need no table."""
    names = schema.fieldNames()
    lower = [name.lower() for name in names]
    twice = {name for name in names if lower.count(name.lower()) > 1}
    if twice:
        raise invalid(
            f"columns {', '.join(sorted(twice))} have the same name but for case; rename them"
        )
    for name in partition_by:
        if name not in names:
            raise invalid(
                f"partition_by names {name!r}, which is no column; there are {', '.join(names)}"
            )
        kind = schema[name].dataType
        if not isinstance(kind, PARTITION_TYPES):
            raise invalid(
                f"column {name!r} of type {kind.simpleString()} cannot name directories; "
                "partition by strings, dates, whole numbers or booleans"
            )
    if partition_by and len(partition_by) == len(names):
        raise invalid("all columns are in partition_by: at least one must be left for the files")
    if offsets:
        for name, kinds in (
            ("topic", StringType),
            ("partition", IntegerType),
            ("offset", LongType),
        ):
            if name not in names or not isinstance(schema[name].dataType, kinds):
                raise invalid(
                    "offset ranges need the columns topic (string), partition (int) and offset "
                    "(bigint) of the source"
                )


def new_columns(
    table: StructType, table_partition_by: tuple[str, ...], new: StructType, options: Options
) -> list[str]:
    """The columns that rows of ``new`` add to a table; or an error says why the rows cannot be added."""
    path, partition_by = options.place, options.partition_by
    if table_partition_by != partition_by:
        raise InvalidArgument(
            f"{path} is partitioned by {', '.join(table_partition_by) or 'nothing'}, not by "
            f"{', '.join(partition_by) or 'nothing'}: give the same partition_by, or another path",
            code="schema_changed",
        )
    fields = {each.name: each for each in table.fields}
    added = []
    for each in all_nullable(new).fields:
        have = fields.get(each.name)
        if have is None:
            added.append(each)
        elif have.dataType != each.dataType:
            raise InvalidArgument(
                f"column {each.name!r} of {path} is {have.dataType.simpleString()}, and would "
                f"become {each.dataType.simpleString()}: cast it, give it another name, or write "
                "to another path",
                code="schema_changed",
            )
    if added and not options.merge_schema:
        names = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in added)
        raise InvalidArgument(
            f"{path} has no column {names}: select the columns it has, or set merge_schema to add "
            "them to the table",
            code="schema_changed",
        )
    return [each.name for each in added]
