"""Rows, tables and disks for the tests of lake tables."""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.spark.lake import Options, schemas, sink
from headrace.spark.lake.disk import Disk
from headrace.spark.lake.table import DataFile, Table
from headrace.spark.lake.tables import open_table
from headrace.testing import SimulatedFiles

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


def table_at(path: Path, kind: str = "parquet", **options: Any) -> Table:
    given = {"partition_by": "topic,date", "offsets": True, "compact_every": 0, **options}
    return open_table(Options.of({"path": str(path), "kind": kind, **given}))


def add(table: Table, number: int, *batches: pa.RecordBatch, app: str = "query") -> bool:
    """One commit of these rows, as the sink makes it."""
    return table.commit(app, number, written(table, *batches))


def written(table: Table, *batches: pa.RecordBatch) -> list[DataFile]:
    """Files of a task, not committed."""
    return sink.write_files(table, SCHEMA, iter(batches), "part")


def offsets_in(paths: Sequence[str | Path]) -> list[int]:
    """The offsets in some files, sorted; twice what is there twice."""
    found: list[int] = []
    for path in paths:
        found += pq.read_table(path, columns=["offset"], partitioning=None)["offset"].to_pylist()
    return sorted(found)


def offsets_of(table: Table) -> list[int]:
    return offsets_in(table.paths())


def plainly_visible(path: Path) -> list[Path]:
    """The files that somebody sees who knows nothing of Headrace."""
    return [
        each
        for each in sorted(path.rglob("*.parquet"))
        if not any(part.startswith(("_", ".")) for part in each.relative_to(path).parts)
    ]


class SimulatedDisk(SimulatedFiles, Disk):
    """A lake's disk that can lose power."""

    def link(self, source: Path, target: Path) -> None:
        if self.exists(target):
            raise FileExistsError(str(target))
        self._directory(target.parent).change({target.name: self._file(source)})

    def touch(self, path: Path) -> None:
        self._file(path)

    def modified(self, path: Path) -> float:
        self._file(path)
        return 0.0

    def walk(self, path: Path) -> Iterator[Path]:
        for name in self.names(path):
            if self.is_directory(path / name):
                yield from self.walk(path / name)
            else:
                yield path / name
