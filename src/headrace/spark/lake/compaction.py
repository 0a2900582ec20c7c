"""Small files joined into large ones: which, and how.

A query that commits every ten seconds makes thousands of files a day. Files of one partition are
joined until they have the target size. When the writer does it by itself, every so many commits, a
group must be *tiered*: its largest file is no larger than twice the others together, so that a file
is rewritten about log(n) times while it grows, not every time. By command all small files are joined.

The same code joins the files of all kinds of tables: rows stay in the order of their offsets, which
Delta's own ``optimize`` does not keep, and the footer says which offsets a file holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import DataFile
from headrace.spark.lake.writing import FileWriter, conform

GROUP_FILES_MAX = 500
READ_ROWS = 100_000


def plan_groups(
    files: Sequence[DataFile], target_bytes: int, *, tiered: bool
) -> list[list[DataFile]]:
    """The groups to be joined, each of one partition."""

    def partition(file: DataFile) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, repr(value)) for name, value in file.partition.items()))

    groups = []
    for _, some in groupby(sorted(files, key=partition), key=partition):
        small = sorted(
            (file for file in some if file.bytes < target_bytes * 3 // 4),
            key=lambda file: (file.bytes, file.path),
        )
        group: list[DataFile] = []
        size = 0
        for file in small:
            full = size + file.bytes > target_bytes or len(group) >= GROUP_FILES_MAX
            too_large = tiered and file.bytes > 2 * size
            if group and (full or too_large):
                groups.append(group)  # the larger one is left alone until it has its like
                group, size = [], 0
            group.append(file)
            size += file.bytes
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def join_files(
    root: Path,
    files: Sequence[DataFile],
    schema: pa.Schema,
    partition_by: Sequence[str],
    *,
    suffix: str,
    keep_partition_columns: bool,
    compression: str,
) -> DataFile:
    """One file with all the rows of these; they are of one partition."""
    names = [name for name in schema.names if keep_partition_columns or name not in partition_by]
    held = pa.schema([schema.field(name) for name in names])
    home = Path(files[0].path).parent
    offsets = Offsets()
    with ExitStack() as stack:
        opened = [stack.enter_context(pq.ParquetFile(root / file.path)) for file in files]
        ordered = sorted(zip(map(_offsets_of, opened), files, opened, strict=True), key=_order)
        for some, _, _ in ordered:
            offsets.add_all(some)

        def batches() -> Iterator[pa.RecordBatch]:
            for _, _, parquet in ordered:
                for batch in parquet.iter_batches(READ_ROWS):
                    yield conform(batch, held)

        writer = FileWriter(
            root / home,
            held,
            label="joined",
            suffix=suffix,
            offsets=offsets,
            target_file_bytes=sys.maxsize,
            compression=compression,
        )
        [joined] = writer.write_all(batches())
        rows = sum(parquet.metadata.num_rows for parquet in opened)
    assert joined.rows == rows, "rows were lost in a compaction"
    return replace(joined, path=(home / joined.path).as_posix(), partition=files[0].partition)


def _order(item: tuple[Offsets, DataFile, pq.ParquetFile]) -> tuple[object, ...]:
    first = next(iter(item[0]), None)
    return (tuple(first) if first else (), item[1].path)


def _offsets_of(parquet: pq.ParquetFile) -> Offsets:
    """As the footer has them."""
    noted = (parquet.metadata.metadata or {}).get(b"headrace.offsets")
    return Offsets.of_text(noted) if noted else Offsets()
