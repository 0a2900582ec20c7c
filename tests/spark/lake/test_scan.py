"""Files of a table as Spark gets them where it cannot read them itself."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.spark import lake
from headrace.spark.lake import scan
from headrace.spark.lake.scan import FilesPartition, LakeReader, read_file
from headrace.spark.lake.table import Options
from tests.spark.lake.rig import SCHEMA, add, rows, table_at


@pytest.mark.parametrize("kind", lake.KINDS)
def test_rows_come_back(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the columns that are only in the names of directories, and the types that Spark asks for."""
    table = table_at(tmp_path, kind)
    table.prepare(SCHEMA)
    odd = "other topic:x"
    add(table, 0, rows(0, 10), rows(0, 5, topic=odd))
    add(table, 1, rows(10, 15))
    monkeypatch.setattr(scan, "TASK_BYTES", 1)
    reader = LakeReader(Options.of(table.options.as_options()), SCHEMA)
    parts = reader.partitions()
    assert len(parts) == 3, "a task for each file, as each is larger than a task reads"
    batches = [batch for part in parts for batch in reader.read(part)]
    assert {batch.schema for batch in batches} == {to_arrow_schema(SCHEMA, timezone="UTC")}
    found = sorted(
        pa.Table.from_batches(batches).to_pylist(), key=lambda row: (row["topic"], row["offset"])
    )
    wanted = [*rows(0, 15).to_pylist(), *rows(0, 5, topic=odd).to_pylist()]
    assert found == wanted


def test_a_column_that_is_newer_than_a_file(tmp_path: Path) -> None:
    """It is null there."""
    table = table_at(tmp_path)
    table.prepare(SCHEMA)
    add(table, 0, rows(0, 2))
    [(name, _)] = table.sizes()
    wanted = pa.schema([("new", pa.int32()), ("offset", pa.int64()), ("topic", pa.string())])
    [batch] = read_file(table.store(), name, wanted, pa.schema([("topic", pa.string())]))
    assert batch.to_pylist() == [
        {"new": None, "offset": 0, "topic": "orders"},
        {"new": None, "offset": 1, "topic": "orders"},
    ]


def test_an_empty_table(tmp_path: Path) -> None:
    """It is one task without rows: Spark asks for at least one."""
    table = table_at(tmp_path)
    table.prepare(SCHEMA)
    reader = LakeReader(Options.of(table.options.as_options()), SCHEMA)
    [part] = reader.partitions()
    assert isinstance(part, FilesPartition)
    assert list(reader.read(part)) == []
