"""JSON as typed columns: what each type takes, and what becomes of a record that it does not."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidArgument
from headrace.spark.source.json_values import JsonValues

TIMESTAMP = pa.timestamp("us", tz="UTC")


def decode(records: list[bytes], **types: pa.DataType) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows and the texts of bad records."""
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    columns, corrupt = JsonValues(fields).decode(pa.array(records, pa.binary()))
    for column, field in zip(columns, fields, strict=True):
        column.validate(full=True)
        assert column.type == field.type
    rows = [dict(zip(types, values, strict=True)) for values in zip(*columns, strict=True)]
    return [{k: v.as_py() for k, v in row.items()} for row in rows], corrupt.to_pylist()


def one(text: str, type_: pa.DataType) -> Any:
    """The value of a field, or Bad."""
    # A good record before and behind it, so that the column has both.
    rows, corrupt = decode([b"{}", f'{{"a": {text}}}'.encode(), b'{"a": null}'], a=type_)
    assert rows[0] == rows[2] == {"a": None}
    assert corrupt[0] is corrupt[2] is None
    if corrupt[1] is not None:
        assert corrupt[1] == f'{{"a": {text}}}'
        assert rows[1] == {"a": None}
        return BAD
    return rows[1]["a"]


BAD = object()


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (pa.string(), '"hé"', "hé"),
        (pa.string(), "5", "5"),
        (pa.string(), "1.50", "1.5"),
        (pa.string(), "true", "true"),
        (pa.string(), '{"x": [1, null]}', '{"x":[1,null]}'),
        (pa.string(), r'"\ud800"', BAD),
        (pa.int8(), "-128", -128),
        (pa.int8(), "128", BAD),
        (pa.int32(), "2147483647", 2147483647),
        (pa.int32(), "2147483648", BAD),
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "9223372036854775808", BAD),
        (pa.int64(), "99999999999999999999999", BAD),
        (pa.int64(), "5.0", BAD),
        (pa.int64(), '"5"', BAD),
        (pa.int64(), "true", BAD),
        (pa.float64(), "5", 5.0),
        (pa.float64(), "-2.5e-3", -0.0025),
        (pa.float64(), '"Infinity"', float("inf")),
        (pa.float64(), '"-Infinity"', float("-inf")),
        (pa.float64(), '"5"', BAD),
        (pa.float64(), "false", BAD),
        (pa.float32(), "0.5", 0.5),
        (pa.bool_(), "true", True),
        (pa.bool_(), "1", BAD),
        (pa.bool_(), '"true"', BAD),
        (pa.decimal128(10, 2), "1.25", Decimal("1.25")),
        (pa.decimal128(10, 2), "1.255", Decimal("1.26")),
        (pa.decimal128(10, 2), "-1.255", Decimal("-1.26")),
        (pa.decimal128(10, 2), '"12.3"', Decimal("12.30")),
        (pa.decimal128(10, 2), "12345678.99", Decimal("12345678.99")),
        (pa.decimal128(10, 2), "123456789.99", BAD),
        (pa.decimal128(10, 2), '"NaN"', BAD),
        (pa.decimal128(10, 2), '"ten"', BAD),
        (pa.decimal128(10, 2), "1e1000000000", BAD),
        (pa.decimal128(38, 18), "12345678901234567890.123456789012345678", Decimal("12345678901234567890.123456789012345678")),
        (pa.decimal128(38, 0), "99999999999999999999999999999999999999", Decimal("9" * 38)),
        (TIMESTAMP, '"2026-01-31T12:00:00Z"', datetime(2026, 1, 31, 12, tzinfo=UTC)),
        (TIMESTAMP, '"2026-01-31 12:00:00"', datetime(2026, 1, 31, 12, tzinfo=UTC)),
        (TIMESTAMP, '"2026-01-31T12:00:00.123456+02:00"', datetime(2026, 1, 31, 10, 0, 0, 123456, tzinfo=UTC)),
        (TIMESTAMP, '"2026-01-31T12:00:00.123456789Z"', datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)),
        (TIMESTAMP, '"2026-01-31"', datetime(2026, 1, 31, tzinfo=UTC)),
        (TIMESTAMP, "1769860800", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        (TIMESTAMP, "1.5", BAD),
        (TIMESTAMP, '"yesterday"', BAD),
        (TIMESTAMP, "99999999999999", BAD),
        (pa.timestamp("us"), '"2026-01-31T12:00:00"', datetime(2026, 1, 31, 12)),
        (pa.timestamp("us"), '"2026-01-31T12:00:00Z"', BAD),
        (pa.date32(), '"2026-01-31"', date(2026, 1, 31)),
        (pa.date32(), '"2026-02-31"', BAD),
        (pa.date32(), '"20260131"', BAD),
        (pa.date32(), "5", BAD),
        (pa.binary(), '"aGk="', b"hi"),
        (pa.binary(), '"a"', BAD),
        (pa.binary(), "5", BAD),
        (pa.list_(pa.int32()), "[1, null, 3]", [1, None, 3]),
        (pa.list_(pa.int32()), "[]", []),
        (pa.list_(pa.int32()), '[1, "x"]', BAD),
        (pa.list_(pa.int32()), "5", BAD),
        (pa.list_(pa.list_(pa.string())), '[["a"], null, []]', [["a"], None, []]),
        (pa.map_(pa.string(), pa.int32()), '{"x": 1, "y": null}', [("x", 1), ("y", None)]),
        (pa.map_(pa.string(), pa.int32()), '{"x": "1"}', BAD),
        (pa.map_(pa.string(), pa.int32()), "[]", BAD),
        (pa.struct([("x", pa.int32()), ("y", pa.string())]), '{"x": 1, "z": 2}', {"x": 1, "y": None}),
        (pa.struct([("x", pa.int32())]), '{"x": "1"}', BAD),
        (pa.struct([("x", pa.int32())]), "7", BAD),
        (pa.struct([("x", pa.list_(pa.struct([("y", TIMESTAMP)])))]), '{"x": [{"y": 0}, {}]}', {"x": [{"y": datetime(1970, 1, 1, tzinfo=UTC)}, {"y": None}]}),
    ],
)  # fmt: skip
def test_what_a_type_takes(type_: pa.DataType, text: str, value: Any) -> None:
    """And that everything else makes the record bad, and no other."""
    assert one(text, type_) is BAD if value is BAD else one(text, type_) == value


def test_not_a_number_is_one() -> None:
    """As a text; not as the word alone, which is not JSON."""
    assert one('"NaN"', pa.float64()) != one('"NaN"', pa.float64())
    assert one("NaN", pa.float64()) is BAD
    assert one("NaN", pa.decimal128(5, 2)) is BAD


@pytest.mark.parametrize(
    "record",
    [b"", b" ", b"null", b"5", b'"text"', b"[]", b'[{"a": 1}]', b"{", b'{"a": 1', b'{"a": 1,}',
     b"{'a': 1}", b'{"a": 01}', b'{"a": 1} null', b'{"a": 1}{"a": 2}', b'{"a": 1}\n{"a": 2}', b"\xff\xfe",
     b'{"a": "\xff"}', b'{"a": "\n"}', b"[" * 100_000, b'{"a":' * 100_000, b"\x00", b"\xef\xbb\xbf{}"],
)  # fmt: skip
@pytest.mark.parametrize("type_", [pa.int64(), pa.decimal128(10, 2)], ids=["fast", "exact"])
def test_what_is_not_one_object_is_bad(record: bytes, type_: pa.DataType) -> None:
    """Its text is kept, its neighbours are read, and nothing fails."""
    good = b'{"a": 1}'
    rows, corrupt = decode([good, record, good], a=type_)
    assert [row["a"] for row in rows] == [1, None, 1]
    assert corrupt == [None, record.decode(errors="replace"), None]


def test_a_bad_field_takes_the_whole_record_with_it() -> None:
    """Half a record is worse than none."""
    records = [b'{"a": 1, "b": "x"}', b'{"a": "1", "b": "y"}', b'{"b": "z"}']
    rows, corrupt = decode(records, a=pa.int64(), b=pa.string())
    assert rows == [{"a": 1, "b": "x"}, {"a": None, "b": None}, {"a": None, "b": "z"}]
    assert corrupt == [None, '{"a": "1", "b": "y"}', None]


def test_inner_values_are_of_their_records() -> None:
    """A bad value deep inside is found to be the right record's."""
    type_ = pa.list_(pa.struct([("x", pa.map_(pa.string(), pa.list_(pa.int8())))]))
    records = [
        b'{"a": [{"x": {"k": [1]}}, null, {"x": null}]}',
        b'{"a": null}',
        b'{"a": [{"x": {"k": [1], "l": [2, 300]}}]}',
        b'{"a": [{"x": {"k": []}}]}',
    ]
    rows, corrupt = decode(records, a=type_)
    assert [text is None for text in corrupt] == [True, True, False, True]
    assert rows[0]["a"] == [{"x": [("k", [1])]}, None, {"x": None}]
    assert rows[3]["a"] == [{"x": [("k", [])]}]


def test_fields_are_few_or_none() -> None:
    """A schema of nothing but a record's own columns still says which records are bad."""
    rows, corrupt = decode([b"{}", b"x"])
    assert rows == []
    assert corrupt == [None, "x"]
    assert decode([], a=pa.int64()) == ([], [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TYPES = [
    pa.string(), pa.int32(), pa.float64(), pa.bool_(), pa.decimal128(12, 3), TIMESTAMP, pa.date32(),
    pa.binary(), pa.list_(pa.int64()), pa.map_(pa.string(), pa.string()),
    pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float64()))]),
]  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2), max_size=6), st.data())
def test_nothing_fails(documents: list[dict[str, Any]], data: st.DataObject) -> None:
    """Whatever is in a record and in a schema: a record's columns do not depend on its neighbours."""
    types = {name: data.draw(st.sampled_from(TYPES)) for name in "ab"}
    records = [json.dumps(document).encode() for document in documents]
    rows, corrupt = decode(records, **types)
    alone = [decode([record], **types) for record in records]
    assert rows == [found[0][0] for found in alone]
    assert corrupt == [found[1][0] for found in alone]


@pytest.mark.parametrize(
    "field",
    [
        pa.field("a", pa.duration("us")),
        pa.field("a", pa.map_(pa.int32(), pa.string())),
        pa.field("a", pa.struct([("x", pa.duration("us"))])),
        pa.field("a", pa.int32(), nullable=False),
    ],
)
def test_a_schema_that_json_cannot_have_is_refused(field: pa.Field) -> None:
    """Before anything runs, and by name."""
    with pytest.raises(InvalidArgument, match="'a") as failed:
        JsonValues([field])
    assert failed.value.code == "invalid_schema"


@pytest.mark.parametrize("type_", [pa.int64(), pa.decimal128(5, 2)])
def test_a_null_value_is_not_bad(type_: pa.DataType) -> None:
    """Its fields are null, and so is its text."""
    fields = JsonValues([pa.field("a", type_)])
    [column], corrupt = fields.decode(pa.array([b'{"a": 1}', None, b"{"], pa.binary()))
    assert [None if each is None else int(each) for each in column.to_pylist()] == [1, None, None]
    assert corrupt.to_pylist() == [None, None, "{"]
