"""Rows as JSON: every type as Spark's ``to_json`` writes it, whatever the slice."""

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from headrace.errors import InvalidArgument
from headrace.spark import json_texts

NAN, INFINITY = float("nan"), float("inf")


def texts(**columns: pa.Array) -> list[str]:
    return json_texts.LIKE_SPARK.rows(pa.record_batch(columns)).to_pylist()


def column(kind: Any, *items: Any) -> list[str]:
    """The texts of one column's items, without the object around them."""
    return [text.removeprefix('{"x":').removesuffix("}") for text in texts(x=pa.array(items, kind))]


def test_a_row_is_an_object_of_its_columns_in_order() -> None:
    """Names are keys, in the order of the columns."""
    assert texts(b=pa.array([1, 2]), a=pa.array(["x", "y"])) == [
        '{"b":1,"a":"x"}',
        '{"b":2,"a":"y"}',
    ]


def test_a_null_field_is_left_out() -> None:
    """Also the first, the last, and all of them."""
    found = texts(
        a=pa.array([1, None, None, 4]),
        b=pa.array(["x", "y", None, "{,"]),
        c=pa.array([None, True, None, None]),
    )
    assert found == ['{"a":1,"b":"x"}', '{"b":"y","c":true}', "{}", '{"a":4,"b":"{,"}']


@pytest.mark.parametrize(
    ("kind", "item", "text"),
    [
        (pa.int8(), -5, "-5"),
        (pa.int64(), 2**62, "4611686018427387904"),
        (pa.bool_(), False, "false"),
        (pa.float32(), 0.1, "0.1"),
        (pa.float64(), 0.1, "0.1"),
        (pa.float64(), NAN, '"NaN"'),
        (pa.float32(), INFINITY, '"Infinity"'),
        (pa.float64(), -INFINITY, '"-Infinity"'),
        (pa.decimal128(10, 2), Decimal("-3.10"), "-3.10"),
        (pa.binary(), b"\x00\xffa", '"AP9h"'),
        (pa.date32(), date(2024, 1, 31), '"2024-01-31"'),
        (pa.timestamp("us", "UTC"), datetime(2024, 1, 31, 12, 0, 0, 123999), '"2024-01-31T12:00:00.123Z"'),
        (pa.timestamp("us", "UTC"), datetime(1969, 12, 31, 23, 59, 59, 999999), '"1969-12-31T23:59:59.999Z"'),
        (pa.timestamp("us", "Europe/Vienna"), datetime(2024, 7, 1), '"2024-07-01T02:00:00.000+02:00"'),
        (pa.timestamp("us", "Europe/London"), datetime(2024, 1, 1), '"2024-01-01T00:00:00.000Z"'),
        (pa.timestamp("us", "America/St_Johns"), datetime(2024, 1, 1, 3), '"2023-12-31T23:30:00.000-03:30"'),
        (pa.timestamp("us", "UTC"), datetime(1, 1, 1), '"0001-01-01T00:00:00.000Z"'),
        (pa.timestamp("us", "UTC"), 300_000_000_000_000_000, '"11476-08-15T05:20:00.000Z"'),
        (pa.timestamp("us"), datetime(2024, 7, 1, 1, 2, 3), '"2024-07-01T01:02:03.000"'),
        (pa.string(), 'say "no"\\\n\x01ü', '"say \\"no\\"\\\\\\n\\u0001ü"'),
        (pa.large_string(), "ü", '"ü"'),
        (pa.large_binary(), b"a", '"YQ=="'),
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": None, "b": "c"}, '{"b":"c"}'),
        (pa.struct([("a", pa.int32())]), {"a": None}, "{}"),
        (pa.list_(pa.int32()), [1, None, 3], "[1,null,3]"),
        (pa.list_(pa.int32()), [], "[]"),
        (pa.list_(pa.list_(pa.string())), [["a"], [], None], '[["a"],[],null]'),
        (pa.map_(pa.string(), pa.int32()), [("a", 1), ('"', None)], '{"a":1,"\\"":null}'),
        (pa.map_(pa.int32(), pa.bool_()), [(7, True)], '{"7":true}'),
    ],
)  # fmt: skip
def test_each_type_has_its_text(kind: Any, item: Any, text: str) -> None:
    """Alone, beside a null, and in a slice."""
    assert column(kind, item) == [text]
    batch = pa.record_batch({"x": pa.array([None, item, None, item], kind)})
    assert json_texts.LIKE_SPARK.rows(batch.slice(2)).to_pylist() == ["{}", '{"x":' + text + "}"]
    json.loads(text)


def test_a_string_that_is_no_utf8_is_mended() -> None:
    """Spark casts any binary to a string; JSON is UTF-8."""
    broken = pa.array([b"a\xff", b"ok", None]).view(pa.string())
    assert texts(x=broken) == ['{"x":"a\ufffd"}', '{"x":"ok"}', "{}"]


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1)
SHAPE = pa.struct(
    [
        ("text", pa.string()),
        ("list", pa.list_(pa.int64())),
        ("map", pa.map_(pa.string(), pa.string())),
    ]
)
shaped = st.none() | st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=5),
        "list": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
        "map": st.none()
        | st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=3),
    }
)


@given(st.lists(shaped, min_size=1, max_size=20), st.data())
def test_what_is_written_reads_back_the_same(items: list[Any], data: st.DataObject) -> None:
    """Nested values of all shapes, any slice: the JSON says what the rows said, but for null fields."""
    start = data.draw(st.integers(0, len(items) - 1))
    pairs = [
        None if i is None else {**i, "map": i["map"] and list(i["map"].items())} for i in items
    ]
    batch = pa.record_batch({"x": pa.array(pairs, SHAPE)}).slice(start)
    found = [json.loads(text) for text in json_texts.LIKE_SPARK.rows(batch).to_pylist()]
    assert found == [
        {} if item is None else {"x": {n: v for n, v in item.items() if v is not None}}
        for item in items[start:]
    ]


@pytest.mark.parametrize(
    ("data_type", "name"),
    [
        (T.DayTimeIntervalType(), "x"),
        (T.StructType([T.StructField("inner", T.VariantType())]), "x.inner"),
        (T.ArrayType(T.YearMonthIntervalType()), "x[]"),
        (T.MapType(T.DoubleType(), T.StringType()), "x"),
        (T.MapType(T.StringType(), T.DayTimeIntervalType()), "x{}"),
    ],
)
def test_what_json_has_no_word_for_is_refused_when_it_is_planned(data_type: Any, name: str) -> None:
    """With the name of the column, however deep it lies."""
    with pytest.raises(InvalidArgument, match="column") as refused:
        json_texts.check("x", data_type)
    assert refused.value.code == "unsupported_column"
    assert f"'{name}'" in refused.value.message


def test_everything_else_can_be_planned() -> None:
    """Each type that Spark has and JSON can say."""
    for data_type in (
        T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(),
        T.DoubleType(), T.DecimalType(10, 2), T.StringType(), T.CharType(3), T.VarcharType(3),
        T.BinaryType(), T.DateType(), T.TimestampType(), T.TimestampNTZType(), T.NullType(),
        T.ArrayType(T.MapType(T.IntegerType(), T.StructType([T.StructField("a", T.DateType())]))),
    ):  # fmt: skip
        json_texts.check("x", data_type)


@pytest.mark.parametrize(
    ("kind", "item", "text"),
    [
        (pa.timestamp("us"), datetime(2026, 1, 31), "2026-01-31T00:00:00"),
        (pa.timestamp("us", "UTC"), datetime(2026, 1, 31), "2026-01-31T00:00:00Z"),
        (pa.timestamp("us", "Europe/Vienna"), datetime(2026, 1, 31), "2026-01-31T00:00:00Z"),
        (pa.timestamp("us"), datetime(2026, 1, 31, 1, 2, 3, 4000), "2026-01-31T01:02:03.004"),
        (pa.timestamp("us"), datetime(2026, 1, 31, 1, 2, 3, 4), "2026-01-31T01:02:03.000004"),
        (pa.timestamp("us"), datetime(1, 1, 1, 1, 2, 3, 4000), "0001-01-01T01:02:03.004"),
        (pa.string(), 'say "no"', 'say "no"'),
        (pa.float64(), NAN, "NaN"),
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": None, "b": "c"}, '{"a":null,"b":"c"}'),
        (pa.map_(pa.date32(), pa.bool_()), [(date(2026, 1, 31), None)], '{"2026-01-31":null}'),
    ],
)  # fmt: skip
def test_cells_of_a_result(kind: Any, item: Any, text: str) -> None:
    """Times with as much of a second as they have, nulls as nulls, and no quotes around a text."""
    assert json_texts.EXACT.cells(pa.array([item, None], kind)).to_pylist() == [text, None]
