"""Rows in every format, value for value."""

import csv
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import InvalidArgument
from headrace.spark.sql.output import (
    ResultRows,
    cells,
    check_names,
    format_of,
    replacing,
    write,
)

MOMENT = datetime(2026, 1, 31, 12, 0, 0, 250_000, UTC)
BATCH = pa.RecordBatch.from_arrays(
    [
        pa.array(["a", None]),
        pa.array([1, None]),
        pa.array([1.5, float("nan")]),
        pa.array([True, False]),
        pa.array([MOMENT, None], pa.timestamp("us", tz="UTC")),
        pa.array([date(2026, 1, 31), None]),
        pa.array([Decimal("1.50"), None], pa.decimal128(30, 2)),
        pa.array([b"\xff\x00", None]),
        pa.array([{"x": 1, "at": MOMENT}, None], pa.struct({"x": pa.int64(), "at": pa.timestamp("us", "UTC")})),
        pa.array([["p", None], None], pa.list_(pa.string())),
        pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float64())),
    ],
    names=["text", "n", "x", "yes", "at", "day", "sum", "raw", "inner", "list", "map"],
)  # fmt: skip


def written(format_: str, *batches: pa.RecordBatch) -> bytes:
    stream = io.BytesIO()
    count = write(iter(batches), stream, format_)  # type: ignore[arg-type]
    assert count == sum(batch.num_rows for batch in batches)
    return stream.getvalue()


def test_csv() -> None:
    """A title line once, and what is null is nothing."""
    rows = list(csv.reader(io.StringIO(written("csv", BATCH, BATCH).decode())))
    assert len(rows) == 5
    assert rows[0] == BATCH.schema.names
    assert rows[1] == [
        *("a", "1", "1.5", "true", "2026-01-31T12:00:00.250Z", "2026-01-31", "1.50", "/wA="),
        '{"x":1,"at":"2026-01-31T12:00:00.250Z"}',
        '["p",null]',
        '{"k":1.0}',
    ]
    assert rows[2] == ["", "", "NaN", "false", *[""] * 7]


def test_json() -> None:
    """An object a line, with every column, and decimals with every digit."""
    text = written("json", BATCH).decode()
    first, second = map(json.loads, text.splitlines())
    assert '"sum":1.50,' in text
    assert first == {
        "text": "a",
        "n": 1,
        "x": 1.5,
        "yes": True,
        "at": "2026-01-31T12:00:00.250Z",
        "day": "2026-01-31",
        "sum": 1.5,
        "raw": "/wA=",
        "inner": {"x": 1, "at": "2026-01-31T12:00:00.250Z"},
        "list": ["p", None],
        "map": {"k": 1.0},
    }
    assert second == {**dict.fromkeys(first), "x": "NaN", "yes": False}


def test_parquet() -> None:
    """The columns as they are."""
    table = pq.read_table(io.BytesIO(written("parquet", BATCH, BATCH)))
    assert table.num_rows == 4
    assert table.schema.equals(BATCH.schema)
    assert (
        table.slice(0, 1)
        .drop_columns("x")
        .equals(pa.Table.from_batches([BATCH.slice(0, 1)]).drop_columns("x"))
    )


def test_many_rows_of_parquet() -> None:
    """They are written a hundred thousand at a time, and a last one may be left over or not."""
    batch = pa.RecordBatch.from_pydict({"n": list(range(50_000))})
    for count in (2, 4, 5):
        data = written("parquet", *[batch] * count)
        assert pq.ParquetFile(io.BytesIO(data)).metadata.num_row_groups == (count + 1) // 2


def test_no_rows() -> None:
    """There are titles, and a Parquet file with columns; a command has not even those."""
    empty = BATCH.slice(0, 0)
    assert written("csv", empty).decode().splitlines() == [",".join(BATCH.schema.names)]
    assert written("json", empty) == b""
    assert pq.read_table(io.BytesIO(written("parquet", empty))).schema.equals(BATCH.schema)
    for format_ in ("csv", "json", "parquet"):
        assert written(format_) == b""


def test_keys_that_are_no_texts() -> None:
    """In JSON they are."""
    column = pa.array([[(1, 2)], [(3, None)]], pa.map_(pa.int64(), pa.int64()))
    assert cells(pa.record_batch({"x": column})) == [['{"1":2}', '{"3":null}']]


def test_two_columns_of_one_name() -> None:
    """A CSV may have them."""
    check_names(["a", "a"], "csv")
    for format_ in ("json", "parquet"):
        with pytest.raises(InvalidArgument, match=r"'a'.* AS"):
            check_names(["a", "b", "a"], format_)  # type: ignore[arg-type]


def test_the_format_by_the_name_of_the_file() -> None:
    """Unless it is said."""
    assert format_of(None, None) == "table"
    assert format_of(None, Path("x.CSV")) == "csv"
    assert format_of(None, Path("x.jsonl")) == "json"
    assert format_of("csv", Path("x.parquet")) == "csv"
    with pytest.raises(InvalidArgument, match="--format"):
        format_of(None, Path("x.txt"))
    with pytest.raises(InvalidArgument, match="not 'xml'"):
        format_of("xml", None)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """What fails half way leaves nothing behind."""
    path = tmp_path / "out.csv"
    with replacing(path) as stream:
        stream.write(b"one")
    with pytest.raises(TypeError), replacing(path) as stream:
        stream.writelines([b"two", "three"])  # type: ignore[list-item]
    assert path.read_bytes() == b"one"
    assert [each.name for each in tmp_path.iterdir()] == ["out.csv"]
    with (
        pytest.raises(InvalidArgument, match="cannot be written"),
        replacing(tmp_path / "no" / "x"),
    ):
        pass


def test_rows_that_are_not_sparks() -> None:
    """A list of topics goes the same way."""
    rows = ResultRows.of({"topic": ["a", "b"], "records": [1, 2]})
    assert rows.batch.num_rows == 2
    assert written("csv", rows.batch) == b"topic,records\na,1\nb,2\n"
