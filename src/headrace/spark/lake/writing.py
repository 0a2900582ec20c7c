"""Arrow batches to Parquet files, on an executor: split by partition, described, synced.

``pyarrow.dataset.write_dataset`` writes the files and names the directories as Hive does. Rules:

- A file's name is unique to the attempt that wrote it, so a repeated or speculative task never
  touches the file of another. Which files count is decided by the driver's commit, nowhere else.
- A file is synced with its directories before it is reported: a commit never names a file that a
  power cut can take away.
- Memory is bounded: rows are gathered until they are worth a file, and then written. (Handed a stream
  of batches, ``write_dataset`` reads ahead of the disk by eight million rows, whatever their size.)
- Offset ranges are read off the rows that are written, not off what was planned.

Encodings: dictionaries are left out for binary columns (payloads hardly repeat; trying costs a
fifth of the time), and 64-bit integers and times are stored as differences, which for offsets is
next to nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, timedelta
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from headrace.errors import HeadraceError, refused_by_disk
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.stores import FileStore, explained
from headrace.spark.lake.table import DataFile, WrittenFiles

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""Of Arrow data: with zstd some 8 MB on disk, small enough to be read in parallel and to be skipped
by its statistics, large enough that its footer entry does not count."""
BATCH_ROWS_ENOUGH = 10_000
"""Smaller batches are joined for a row group, which copies them. Those of an archive are larger."""
GATHERED_BYTES_MAX = 256 * 1024 * 1024
OPEN_FILES_MAX = 64
PARTITIONS_MAX = 1_000_000
"""Of one write; the default of ``write_dataset`` is 1,024."""


class FileWriter:
    """Writes the rows of one task."""

    def __init__(
        self,
        store: FileStore | Path,
        schema: pa.Schema,
        partition_by: Sequence[str] = (),
        *,
        label: str,
        keep_partition_columns: bool = False,
        offsets: bool = False,
        target_file_bytes: int,
        compression: str = "zstd",
    ):
        self._store = FileStore(store) if isinstance(store, Path) else store
        self._schema = schema
        self._partition_by = tuple(partition_by)
        # write_dataset takes the columns that it names directories by out of the files. Where the
        # files are to have them, directories are named by copies of them.
        prefix = "by_" if keep_partition_columns else ""
        while prefix and any(prefix + name in schema.names for name in self._partition_by):
            prefix += "by_"
        self._directories = {prefix + name: name for name in self._partition_by}
        self._partitioning = ds.partitioning(
            pa.schema(
                [(each, schema.field(name).type) for each, name in self._directories.items()]
            ),
            flavor="hive",
        )
        kept = [schema.field(name) for name in schema.names if name not in self._directories]
        self._format = ds.ParquetFileFormat()
        self._file_schema = pa.schema(kept)
        self._encodings = self._format.make_write_options(
            compression=compression, **encodings(self._file_schema)
        )
        self._name = f"{label}-{uuid.uuid4().hex}"
        self._gathered_bytes_max = min(target_file_bytes, GATHERED_BYTES_MAX)
        self._reads_offsets = offsets
        self._written = WrittenFiles()
        self._pieces = 0

    def write_all(self, batches: Iterable[pa.RecordBatch]) -> WrittenFiles:
        """Write all rows; a failure leaves no file."""
        try:
            gathered: list[pa.RecordBatch] = []
            size = 0
            for batch in batches:
                gathered.append(batch.cast(self._schema))
                size += batch.nbytes
                if size >= self._gathered_bytes_max:
                    self._write(gathered)
                    gathered, size = [], 0
            self._write(gathered)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError) and not isinstance(error, HeadraceError):
                raise refused_by_disk(error) from error
            raise
        return self._written

    def _write(self, batches: list[pa.RecordBatch]) -> None:
        rows = pa.Table.from_batches(batches, self._schema)
        if not rows.num_rows:
            return
        if self._reads_offsets:
            for batch in batches:
                found = offsets_of(batch)
                self._written.doubled.add_all(self._written.offsets.common(found))
                self._written.offsets.add_all(found)
        values = {
            directory: _without_empty_texts(rows[name])
            for directory, name in self._directories.items()
        }
        rows = rows.select(self._file_schema.names)
        home, partitioning = self._only_directory(values), None
        if not home:
            for directory, column in values.items():
                rows = rows.append_column(directory, column)
            partitioning = self._partitioning
        group_rows = max(1, rows.num_rows * ROW_GROUP_BYTES // max(rows.nbytes, ROW_GROUP_BYTES))
        are_small = rows.num_rows < BATCH_ROWS_ENOUGH * len(batches)
        self._store.make_root()
        done: list[ds.WrittenFile] = []
        with explained(self._store.place):
            ds.write_dataset(
                rows,
                self._store.path(home),
                filesystem=self._store.filesystem,
                create_dir=self._store.is_local,
                basename_template=f"{self._name}-{self._pieces}-{{i}}.parquet",
                format=self._format,
                file_options=self._encodings,
                partitioning=partitioning,
                use_threads=False,  # rows stay in their order, and a task has one core
                max_partitions=PARTITIONS_MAX,
                max_open_files=OPEN_FILES_MAX,
                min_rows_per_group=group_rows if are_small else 0,
                max_rows_per_group=group_rows,
                file_visitor=done.append,
                existing_data_behavior="overwrite_or_ignore",
            )
        self._pieces += 1
        self._store.settle([self._store.name(file.path) for file in done])
        self._written.files.extend(map(self._described, done))

    def _only_directory(self, values: dict[str, pa.ChunkedArray]) -> str:
        """The directory of all rows if they are of one partition, as they nearly always are; or "".

        Then the rows need not be split, which would copy them.
        """
        terms = []
        for directory, column in values.items():
            ends = pc.min_max(column).as_py()
            if column.null_count or ends["min"] != ends["max"]:
                return ""
            terms.append(ds.field(directory) == pa.scalar(ends["min"], column.type))
        return str(self._partitioning.format(reduce(and_, terms))[0]) if terms else ""

    def _described(self, file: ds.WrittenFile) -> DataFile:
        relative = self._store.name(file.path)
        values = ds.get_partition_keys(self._partitioning.parse(relative))
        partition = {
            name: partition_text(values.get(each)) for each, name in self._directories.items()
        }
        stats = statistics(file.metadata, self._file_schema)
        return DataFile(relative, file.metadata.num_rows, file.size, partition, stats)

    def _discard(self) -> None:
        """What is not found here (a store does not list a file that was not finished) is left to ``vacuum``."""
        if isinstance(self._store.place, Path):
            for path in self._store.place.rglob(f"{self._name}-*"):
                path.unlink(missing_ok=True)
            return
        with suppress(HeadraceError):  # the error that brought us here is the one to tell
            for file in self._written.files:
                self._store.delete(file.path)


# --- rows -----------------------------------------------------------------------------------------
def offsets_of(batch: pa.RecordBatch) -> Offsets:
    """The offsets of a batch. As the source gives them they are one range."""
    found = Offsets()
    topics, partitions = batch.column("topic"), batch.column("partition")
    numbers = batch.column("offset")
    count = batch.num_rows
    if not count:
        return found
    one_topic = len(topics.unique()) == 1 and len(partitions.unique()) == 1
    if one_topic and numbers[count - 1].as_py() - numbers[0].as_py() == count - 1:
        steps = pc.subtract(numbers.slice(1), numbers.slice(0, count - 1))
        if pc.all(pc.equal(steps, 1)).as_py() is not False:
            first = numbers[0].as_py()
            found.add(topics[0].as_py(), partitions[0].as_py(), first, first + count)
            return found
    for topic, partition, number in zip(
        topics.to_pylist(), partitions.to_pylist(), numbers.to_pylist(), strict=True
    ):
        found.add(topic, partition, number, number + 1)
    return found


def partition_text(value: Any) -> str | None:
    """A partition's value as the table formats write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)  # a date is 2026-01-31


def _without_empty_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """An empty text names no directory: it is null there, as Hive and Delta have it."""
    if not pa.types.is_string(column.type):
        return column
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)


# --- Parquet --------------------------------------------------------------------------------------
def encodings(schema: pa.Schema) -> dict[str, Any]:
    """The arguments of a Parquet writer that suit these columns."""
    leaves = dict(leaf for field in schema for leaf in _leaves(field.name, field.type))
    differences = [
        path
        for path, kind in leaves.items()
        if pa.types.is_int64(kind) or pa.types.is_timestamp(kind)
    ]
    texts = [path for path, kind in leaves.items() if not pa.types.is_binary(kind)]
    return {
        "use_dictionary": [path for path in texts if path not in differences],
        "column_encoding": dict.fromkeys(differences, "DELTA_BINARY_PACKED"),
        "write_statistics": texts,
        "store_schema": False,
    }


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The columns that Parquet stores, by their paths there."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path, kind


def statistics(footer: pq.FileMetaData, schema: pa.Schema) -> dict[str, Any]:
    """Least and greatest values and counts of nulls of the plain columns, in Delta's form."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    plain = {field.name for field in schema if _is_plain(field.type)}
    unknown: set[str] = set()
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            name = column.path_in_schema
            found = column.statistics
            if name not in plain or found is None or not found.has_null_count:
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max:
                least[name] = min(least.get(name, found.min), found.min)
                greatest[name] = max(greatest.get(name, found.max), found.max)
            elif found.null_count < row_group.num_rows:
                unknown.add(name)
    for name in unknown:
        least.pop(name, None)
        greatest.pop(name, None)
    return {
        "numRecords": footer.num_rows,
        "minValues": {name: _delta_text(value, up=False) for name, value in least.items()},
        "maxValues": {name: _delta_text(value, up=True) for name, value in greatest.items()},
        "nullCount": nulls,
    }


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_date(kind)
        or (pa.types.is_timestamp(kind) and kind.tz is not None)
        or pa.types.is_string(kind)
    )


_TEXT_CHARS_MAX = 32


def _delta_text(value: Any, *, up: bool) -> Any:
    """Whole numbers as they are; times in milliseconds, rounded outwards; long texts cut."""
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        if len(value) <= _TEXT_CHARS_MAX:
            return value
        return value[:_TEXT_CHARS_MAX] + ("\U0010ffff" if up else "")
    if hasattr(value, "tzinfo"):
        moment = value.astimezone(UTC)
        moment -= timedelta(microseconds=moment.microsecond % 1000)
        if up:
            moment += timedelta(milliseconds=1)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
    return value.isoformat()  # a date
