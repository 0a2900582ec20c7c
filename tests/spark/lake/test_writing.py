"""Arrow batches become Parquet files: split, rolled, described truly, and gone after a failure."""

import errno
import json
import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import StorageFull
from headrace.spark.lake import writing
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.writing import FileWriter
from tests.spark.lake.rig import ARROW, NOON, offsets_in, rows


def writer_at(path: Path, *partition_by: str, **options: object) -> FileWriter:
    given = {"label": "part", "target_file_bytes": 1 << 27, "offsets": True, **options}
    return FileWriter(path, ARROW, partition_by, **given)  # type: ignore[arg-type]


def test_rows_come_back(tmp_path: Path) -> None:
    """Everything that was written is read, in order, with the types it had."""
    [file] = writer_at(tmp_path).write_all([rows(0, 10), rows(10, 25)]).files
    assert file.rows == 25
    assert file.bytes == (tmp_path / file.path).stat().st_size
    read = pq.read_table(tmp_path / file.path)
    assert read.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert read.to_pylist() == pa.Table.from_batches([rows(0, 25)]).to_pylist()


def test_a_file_for_each_partition(tmp_path: Path) -> None:
    """Directories as Hive has them, without those columns in the files."""
    mixed = pa.concat_batches([rows(0, 3), rows(0, 2, topic="a b:c"), rows(3, 5)])
    files = writer_at(tmp_path, "topic", "date").write_all([mixed]).files
    assert {file.path.rsplit("/", 1)[0]: file.rows for file in files} == {
        "topic=orders/date=2026-01-31": 5,
        "topic=a%20b%3Ac/date=2026-01-31": 2,
    }
    assert {file.partition["topic"] for file in files} == {"orders", "a b:c"}
    assert "topic" not in pq.ParquetFile(tmp_path / files[0].path).schema_arrow.names


def test_partition_columns_that_are_kept(tmp_path: Path) -> None:
    """Directories have names of their own then, and the files have all columns."""
    writer = writer_at(tmp_path, "topic", "date", keep_partition_columns=True)
    [file] = writer.write_all([rows(0, 3)]).files
    assert file.path.startswith("by_topic=orders/by_date=2026-01-31/")
    assert file.partition == {"topic": "orders", "date": "2026-01-31"}
    assert pq.ParquetFile(tmp_path / file.path).schema_arrow.names == ARROW.names


def test_a_column_named_like_a_directory(tmp_path: Path) -> None:
    """It is written as any other."""
    schema = pa.schema([("name", pa.string()), ("by_name", pa.string())])
    writer = FileWriter(
        tmp_path,
        schema,
        ["name"],
        label="x",
        keep_partition_columns=True,
        target_file_bytes=1 << 27,
    )
    batch = pa.RecordBatch.from_pydict({"name": ["a"], "by_name": ["b"]}, schema=schema)
    [file] = writer.write_all([batch]).files
    assert file.path.startswith("by_by_name=a/")
    assert pq.ParquetFile(tmp_path / file.path).read().to_pylist() == batch.to_pylist()


def test_null_partitions(tmp_path: Path) -> None:
    """A null and an empty text both lie where Hive has nulls."""
    schema = pa.schema([("name", pa.string()), ("n", pa.int64())])
    writer = FileWriter(tmp_path, schema, ["name"], label="x", target_file_bytes=1 << 27)
    batch = pa.RecordBatch.from_pydict({"name": [None, "", "a"], "n": [1, 2, 3]}, schema=schema)
    files = writer.write_all([batch]).files
    assert len(files) == 2
    [nowhere] = [file for file in files if file.partition["name"] is None]
    assert nowhere.rows == 2
    assert nowhere.path.startswith("name=__HIVE_DEFAULT_PARTITION__/")


def test_offsets_are_read_off_the_rows(tmp_path: Path) -> None:
    """Gaps, several partitions and disorder are seen, and offsets that come twice."""
    parts = [rows(0, 4), rows(6, 8), rows(2, 3, partition=1)]
    mixed = pa.concat_batches([*parts, rows(0, 2, partition=1)])
    written = writer_at(tmp_path).write_all([mixed, rows(8, 10), rows(7, 9)])
    assert list(written.offsets) == [
        Span("orders", 0, 0, 4),
        Span("orders", 0, 6, 10),
        Span("orders", 1, 0, 3),
    ]
    assert list(written.doubled) == [Span("orders", 0, 7, 9)]


def test_a_swapped_pair_is_no_range(tmp_path: Path) -> None:
    """First and last fit, the middle does not: it is looked at."""
    batch = rows(0, 5)
    doubled = batch.take(pa.array([0, 2, 2, 3, 4]))
    written = writer_at(tmp_path).write_all([doubled])
    assert list(written.offsets) == [Span("orders", 0, 0, 1), Span("orders", 0, 2, 5)]


def test_large_files_are_rolled(tmp_path: Path) -> None:
    """A new file is begun once one has its size; together they hold everything."""
    batches = [rows(start, start + 100) for start in range(0, 1000, 100)]
    written = writer_at(tmp_path, "topic", target_file_bytes=2000).write_all(batches)
    assert len(written.files) > 2
    assert sum(file.rows for file in written.files) == 1000
    assert written.offsets == Offsets([Span("orders", 0, 0, 1000)])


def test_many_partitions_in_disorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more of them than files are open at once; no row is lost."""
    monkeypatch.setattr(writing, "OPEN_FILES_MAX", 2)
    days = [date(2026, 1, 1 + day % 7) for day in range(30)]
    batches = [rows(at, at + 1, day=day) for at, day in enumerate(days)]
    written = writer_at(tmp_path, "date").write_all(batches)
    assert {file.partition["date"] for file in written.files} == {str(day) for day in days}
    assert sum(file.rows for file in written.files) == 30
    assert offsets_in([tmp_path / file.path for file in written.files]) == list(range(30))


def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When enough rows are gathered they are written, and the next file begins."""
    monkeypatch.setattr(writing, "GATHERED_BYTES_MAX", 1)
    written = writer_at(tmp_path).write_all([rows(0, 5), rows(5, 9)])
    assert [file.rows for file in written.files] == [5, 4]


def test_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are joined into one, and a large one is cut."""
    [file] = writer_at(tmp_path).write_all([rows(0, 5), rows(5, 9)]).files
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == 1
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 1000)
    [file] = writer_at(tmp_path).write_all([rows(0, 100)]).files
    assert pq.read_metadata(tmp_path / file.path).num_row_groups > 3


def test_statistics(tmp_path: Path) -> None:
    """Of plain columns, times rounded outwards, long texts cut so that they still bound."""
    [file] = writer_at(tmp_path, "date").write_all([rows(0, 5, topic="t" * 40)]).files
    assert file.stats["numRecords"] == 5
    assert file.stats["minValues"]["offset"] == 0
    assert file.stats["maxValues"]["offset"] == 4
    assert file.stats["minValues"]["timestamp"] == "2026-01-31T12:00:00.000Z"
    assert file.stats["maxValues"]["timestamp"] == "2026-01-31T12:00:00.005Z"
    assert file.stats["minValues"]["topic"] == "t" * 32 < "t" * 40
    assert file.stats["maxValues"]["topic"] > "t" * 40
    assert "value" not in file.stats["minValues"]
    json.dumps(file.stats)


def test_other_types_are_cast(tmp_path: Path) -> None:
    """Spark may hand over large strings or another zone."""
    batch = rows(0, 2)
    zone = pa.timestamp("us", tz="Europe/Berlin")
    strange = batch.set_column(
        batch.schema.get_field_index("timestamp"), "timestamp", batch.column("timestamp").cast(zone)
    )
    strange = strange.set_column(0, "topic", batch.column("topic").cast(pa.large_string()))
    [file] = writer_at(tmp_path).write_all([strange]).files
    [first, _] = pq.read_table(tmp_path / file.path).to_pylist()
    assert first["timestamp"] == NOON


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """The rows' own error comes out, and no file stays."""

    def failing() -> Iterator[pa.RecordBatch]:
        yield rows(0, 5)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        writer_at(tmp_path, "topic").write_all(failing())
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of ours that may be retried."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull):
        writer_at(tmp_path).write_all([rows(0, 5)])
    assert list(tmp_path.rglob("*.parquet")) == []
