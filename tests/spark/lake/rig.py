"""Rows and tables for the tests of lake tables."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.spark.lake import Options, schemas, sink
from headrace.spark.lake.table import Table, WrittenFiles
from headrace.spark.lake.tables import open_table

ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("date", pa.date32()),
    ]
)
SCHEMA = schemas.to_spark(ARROW)
DAY = date(2026, 1, 31)
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def rows(
    start: int, end: int, *, topic: str = "orders", partition: int = 0, day: date = DAY
) -> pa.RecordBatch:
    """Records as an archive has them."""
    offsets = range(start, end)
    return pa.RecordBatch.from_pydict(
        {
            "topic": [topic] * len(offsets),
            "partition": [partition] * len(offsets),
            "offset": list(offsets),
            "timestamp": [NOON + timedelta(milliseconds=each) for each in offsets],
            "key": [None if each % 3 else b"k%d" % each for each in offsets],
            "value": [b"value %d" % each for each in offsets],
            "headers": [[{"key": "n", "value": b"%d" % each}] for each in offsets],
            "date": [day] * len(offsets),
        },
        schema=ARROW,
    )


def table_at(path: Path, kind: str = "delta", **options: Any) -> Table:
    given = {"partition_by": "topic,date", "offsets": True, "compact_every": 0, **options}
    return open_table(Options.of({"path": str(path), "kind": kind, **given}))


def add(table: Table, number: int, *batches: pa.RecordBatch, app: str = "query") -> bool:
    """One commit of these rows, as the sink makes it."""
    return table.commit(app, number, [written(table, *batches)])


def append(
    added: pa.Table, *, path: str, kind: str = "delta", app_id: str, number: int, **options: Any
) -> bool:
    """Create the table if it does not exist, and commit a few rows without Spark."""
    table = open_table(Options.of({"path": path, "kind": kind, **options}))
    schema = schemas.to_spark(added.schema)
    table.prepare(schema)
    files = sink.write_files(table, schema, iter(added.to_batches()), f"{number:09d}")
    if is_new := sink.commit_files(table, app_id, number, files):
        sink.upkeep(table, number)
    else:
        table.forget(files)
    return is_new


def written(table: Table, *batches: pa.RecordBatch) -> WrittenFiles:
    """Files of a task, not committed."""
    [found] = sink.write_files(table, SCHEMA, iter(batches), "part")
    return found


def offsets_in(paths: Sequence[str | Path]) -> list[int]:
    """The offsets in some files, sorted; twice what is there twice."""
    found: list[int] = []
    for path in paths:
        found += pq.read_table(path, columns=["offset"], partitioning=None)["offset"].to_pylist()
    return sorted(found)


def offsets_of(table: Table) -> list[int]:
    return offsets_in(table.paths())
