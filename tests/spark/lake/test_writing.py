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
from tests.spark.lake.rig import ARROW, NOON, rows


def writer_at(path: Path, *partition_by: str, **options: object) -> FileWriter:
    given = {"label": "part", "target_file_bytes": 1 << 27, "offsets": True, **options}
    return FileWriter(path, ARROW, partition_by, **given)  # type: ignore[arg-type]


def test_rows_come_back(tmp_path: Path) -> None:
    """Everything that was written is read, in order, with the types it had."""
    [file] = writer_at(tmp_path).write_all([rows(0, 10), rows(10, 25)])
    assert file.rows == 25
    assert file.bytes == (tmp_path / file.path).stat().st_size
    read = pq.read_table(tmp_path / file.path)
    assert read.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert read.to_pylist() == pa.Table.from_batches([rows(0, 25)]).to_pylist()


def test_a_file_for_each_partition(tmp_path: Path) -> None:
    """Directories as Hive has them, without those columns in the files."""
    mixed = pa.concat_batches([rows(0, 3), rows(0, 2, topic="a b:c"), rows(3, 5)])
    files = writer_at(tmp_path, "topic", "date").write_all([mixed])
    assert {file.path.rsplit("/", 1)[0]: file.rows for file in files} == {
        "topic=orders/date=2026-01-31": 5,
        "topic=a b%3Ac/date=2026-01-31": 2,
    }
    assert [file.partition["topic"] for file in files] == ["orders", "a b:c"]
    assert "topic" not in pq.read_schema(tmp_path / files[0].path).names


def test_null_partitions(tmp_path: Path) -> None:
    """A null and an empty text both lie where Hive has nulls, in files of their own."""
    schema = pa.schema([("name", pa.string()), ("n", pa.int64())])
    writer = FileWriter(tmp_path, schema, ["name"], label="x", target_file_bytes=1 << 27)
    batch = pa.RecordBatch.from_pydict({"name": [None, "", "a"], "n": [1, 2, 3]}, schema=schema)
    files = writer.write_all([batch])
    assert len(files) == 3
    nowhere = [file for file in files if file.partition["name"] is None]
    assert len(nowhere) == 2
    assert all("name=__HIVE_DEFAULT_PARTITION__/" in file.path for file in nowhere)


def test_offsets_are_read_off_the_rows(tmp_path: Path) -> None:
    """Gaps, several partitions and disorder are seen; the footer says the same."""
    parts = [rows(0, 4), rows(6, 8), rows(2, 3, partition=1)]
    mixed = pa.concat_batches([*parts, rows(0, 2, partition=1)])
    [file] = writer_at(tmp_path).write_all([mixed, rows(8, 10)])
    assert list(file.offsets) == [
        Span("orders", 0, 0, 4),
        Span("orders", 0, 6, 10),
        Span("orders", 1, 0, 3),
    ]
    footer = pq.read_metadata(tmp_path / file.path).metadata
    assert Offsets.of_text(footer[b"headrace.offsets"]) == file.offsets


def test_a_swapped_pair_is_no_range(tmp_path: Path) -> None:
    """First and last fit, the middle does not: it is looked at."""
    batch = rows(0, 5)
    doubled = batch.take(pa.array([0, 2, 2, 3, 4]))
    [file] = writer_at(tmp_path).write_all([doubled])
    assert list(file.offsets) == [Span("orders", 0, 0, 1), Span("orders", 0, 2, 5)]


def test_large_files_are_rolled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file is begun once one has its size; together they hold everything."""
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 100)
    batches = [rows(start, start + 100) for start in range(0, 1000, 100)]
    files = writer_at(tmp_path, "topic", target_file_bytes=2000).write_all(batches)
    assert len(files) > 2
    assert sum(file.rows for file in files) == 1000
    assert Offsets(span for file in files for span in file.offsets) == Offsets(
        [Span("orders", 0, 0, 1000)]
    )


def test_many_partitions_keep_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is closed for a new one; one that comes back gets a second file."""
    monkeypatch.setattr(writing, "OPEN_FILES_MAX", 2)
    days = [date(2026, 1, day) for day in (1, 2, 3, 1)]
    batches = [rows(at, at + 1, day=day) for at, day in enumerate(days)]
    files = writer_at(tmp_path, "date").write_all(batches)
    assert [file.partition["date"][-1] for file in files] == ["1", "2", "3", "1"]  # type: ignore[index]


def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all partitions together hold too much, the largest is written early."""
    monkeypatch.setattr(writing, "GATHERED_BYTES_MAX", 1)
    [file] = writer_at(tmp_path).write_all([rows(0, 5), rows(5, 9)])
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == 2


def test_statistics(tmp_path: Path) -> None:
    """Of plain columns, times rounded outwards, long texts cut so that they still bound."""
    [file] = writer_at(tmp_path, "date").write_all([rows(0, 5, topic="t" * 40)])
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
    """Spark may hand over large strings or another zone; a column that is missing is null."""
    batch = rows(0, 2)
    strange = pa.RecordBatch.from_pydict(
        {
            "timestamp": batch.column("timestamp").cast(pa.timestamp("us", tz="Europe/Berlin")),
            "topic": batch.column("topic").cast(pa.large_string()),
            "partition": batch.column("partition"),
            "offset": batch.column("offset"),
        }
    )
    [file] = writer_at(tmp_path).write_all([strange])
    [first, _] = pq.read_table(tmp_path / file.path).to_pylist()
    assert first["timestamp"] == NOON
    assert first["value"] is None


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
