"""The schema: what there is by default, what may be asked for, and what JSON adds."""

import pickle

import pytest
from pyspark.sql.types import (
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from headrace.errors import InvalidArgument
from headrace.log import batch as batches
from headrace.log.columns import Columns
from headrace.spark.source.arrow import Part
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.rows import BatchMaker, default_schema


def schema_of(**options: str) -> str:
    return default_schema(SourceOptions.of({"topic": "orders", **options}))


def test_columns_as_kafkas_source_has_them() -> None:
    """In its order, and the id after them."""
    assert schema_of() == (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
        "headers array<struct<key:string,value:binary>>, id string"
    )
    assert "value string" in schema_of(valueFormat="text")
    assert "headers" not in schema_of(includeHeaders="false")
    assert schema_of(columns="offset, value") == "offset bigint, value binary"
    with pytest.raises(InvalidArgument, match="option columns: there is no 'x'; there are key"):
        schema_of(columns="offset,x")


def test_json_fields_and_what_is_added() -> None:
    """Bad records always have a column; a record's own columns are there when they are named."""
    assert schema_of(valueFormat="json", schema="a INT, b STRING") == (
        "a INT, b STRING, _corrupt STRING"
    )
    assert (
        schema_of(valueFormat="json", schema="_corrupt STRING, a INT") == "_corrupt STRING, a INT"
    )
    ddl = "a DECIMAL(10, 2), `b,c` MAP<STRING, STRUCT<x: INT, y: STRING COMMENT 'p, q'>>, d: DATE"
    assert schema_of(valueFormat="json", schema=ddl) == f"{ddl}, _corrupt STRING"
    chosen = schema_of(valueFormat="json", schema=ddl, columns="d,_offset,_corrupt")
    assert chosen == "d: DATE, _offset bigint, _corrupt STRING"


def test_json_needs_a_schema() -> None:
    """And the error says how to give one."""
    with pytest.raises(InvalidArgument, match=r"option schema: .*\.schema"):
        schema_of(valueFormat="json")
    with pytest.raises(InvalidArgument, match="option schema: 'a' is not a name and a type"):
        schema_of(valueFormat="json", schema="a")


def rows_of(schema: StructType, *values: bytes, **options: str) -> list[dict[str, object]]:
    rows = BatchMaker(schema, SourceOptions.of({"topic": "orders", **options}).value_format)
    rows = pickle.loads(pickle.dumps(rows))
    batch = batches.encode(Columns(list(values)))
    batch.base_offset = 100
    found = rows.batches([Part(batch, 0, len(values))], "orders", 2)
    return [row for each in found for row in each.to_pylist()]


def test_fields_and_own_columns_together() -> None:
    """In the order of the schema; a field may be called as a column of Kafka's is."""
    schema = StructType(
        [
            StructField("_offset", LongType()),
            StructField("offset", IntegerType()),
            StructField("_corrupt", StringType()),
            StructField("name", StringType()),
            StructField("_value", StringType()),
            StructField("_other", StringType()),
        ]
    )
    good = b'{"offset": 5, "name": "x", "_other": "y"}'
    assert rows_of(schema, good, b"bad", valueFormat="json") == [
        {"_offset": 100, "offset": 5, "_corrupt": None, "name": "x", "_value": good.decode(), "_other": "y"},
        {"_offset": 101, "offset": None, "_corrupt": "bad", "name": None, "_value": "bad", "_other": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value_format", "complaint"),
    [
        (StructType([]), "binary", "at least one column"),
        (StructType([StructField("name", StringType())]), "binary", "there is no column 'name'"),
        (StructType([StructField("value", LongType())]), "text", "column 'value' can be"),
        (StructType([StructField("_corrupt", LongType())]), "json", "_corrupt is a string"),
        (StructType([StructField("_offset", StringType())]), "json", "column 'offset' can be"),
        (StructType([StructField("a", StringType(), False)]), "json", "leave NOT NULL out"),
        (StructType([StructField("a", VariantType())]), "json", "field 'a' cannot be"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(
    schema: StructType, value_format: str, complaint: str
) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidArgument, match=complaint):
        rows_of(schema, b"x", valueFormat=value_format)
