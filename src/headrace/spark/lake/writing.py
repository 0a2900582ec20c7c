"""Arrow batches to Parquet files, on an executor: split by partition, gathered, rolled, synced.

Rules:
- A file's name is unique to the attempt that wrote it, so a repeated or speculative task never
  touches the file of another. Which files count is decided by the driver's commit, nowhere else.
- A file is synced with its directory before it is reported: a commit never names what a power cut
  can take away.
- Memory is bounded: rows are gathered until a row group is worth writing, and if all partitions
  together hold more than ``GATHERED_BYTES_MAX`` the largest is written early.
- Offset ranges are read off the rows that were written, not off what was planned, and stand in the
  file's footer too (``headrace.offsets``), so that a manifest can be checked against the files.

Encodings: dictionaries are left out for binary columns (payloads hardly repeat; trying costs a
fifth of the time), and 64-bit integers and times are stored as differences, which for offsets is
next to nothing.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.errors import refused_by_disk
from headrace.files import Files
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import DataFile

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""Of Arrow data: with zstd some 8 MB on disk, small enough to be read in parallel and to be skipped
by its statistics, large enough that its footer entry does not count."""
ROW_GROUP_ROWS = 1_000_000
GATHERED_BYTES_MAX = 256 * 1024 * 1024
OPEN_FILES_MAX = 64
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f" + "".join(map(chr, range(32))))


class FileWriter:
    """Writes batches of one task. ``close`` gives the files; ``discard`` deletes them."""

    def __init__(
        self,
        root: Path,
        schema: pa.Schema,
        partition_by: Sequence[str] = (),
        *,
        label: str,
        suffix: str = ".parquet",
        keep_partition_columns: bool = False,
        offsets: bool | Offsets = False,
        target_file_bytes: int,
        compression: str = "zstd",
    ):
        self._root = root
        self._partition_by = tuple(partition_by)
        self._schema = schema
        names = schema.names if keep_partition_columns else [
            name for name in schema.names if name not in self._partition_by
        ]  # fmt: skip
        self._file_schema = pa.schema([schema.field(name) for name in names])
        self._label = label
        self._suffix = suffix
        self._offsets = offsets
        self._target_file_bytes = target_file_bytes
        self._compression = compression
        self._open: OrderedDict[tuple[Any, ...], _OpenFile] = OrderedDict()
        self._done: list[DataFile] = []
        self._made: list[Path] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        try:
            for values, part in split(conform(batch, self._schema), self._partition_by):
                self._file(values).gather(part)
            gathered = sum(file.gathered_bytes for file in self._open.values())
            if gathered > GATHERED_BYTES_MAX:
                max(self._open.values(), key=lambda file: file.gathered_bytes).write_group()
        except OSError as error:
            raise refused_by_disk(error) from error

    def write_all(self, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
        """All of them, and the files; after a failure nothing is left."""
        try:
            for batch in batches:
                self.write(batch)
            return self.close()
        except BaseException:
            self.discard()
            raise

    def close(self) -> list[DataFile]:
        try:
            for values in list(self._open):
                self._end(values)
        except OSError as error:
            raise refused_by_disk(error) from error
        return self._done

    def discard(self) -> None:
        for file in self._open.values():
            file.abandon()
        self._open.clear()
        for path in self._made:
            path.unlink(missing_ok=True)

    def _file(self, values: tuple[Any, ...]) -> _OpenFile:
        file = self._open.get(values)
        if file is not None and file.stored_bytes >= self._target_file_bytes:
            self._end(values)
            file = None
        if file is None:
            while len(self._open) >= OPEN_FILES_MAX:
                self._end(next(iter(self._open)))
            file = self._open[values] = self._begin(values)
        self._open.move_to_end(values)
        return file

    def _begin(self, values: tuple[Any, ...]) -> _OpenFile:
        texts = [partition_text(value) for value in values]
        directory = partition_directory(self._partition_by, texts)
        name = f"{self._label}-{uuid.uuid4().hex}{self._suffix}"
        path = f"{directory}/{name}" if directory else name
        Files().make_directory((self._root / path).parent)
        self._made.append(self._root / path)
        partition = dict(zip(self._partition_by, texts, strict=True))
        return _OpenFile(
            self._root, path, self._file_schema, partition, self._compression, self._offsets
        )

    def _end(self, values: tuple[Any, ...]) -> None:
        self._done.append(self._open[values].close())
        del self._open[values]


class _OpenFile:
    """One Parquet file in the making."""

    def __init__(
        self,
        root: Path,
        path: str,
        schema: pa.Schema,
        partition: dict[str, str | None],
        compression: str,
        offsets: bool | Offsets,
    ):
        self._root, self._path, self._schema, self._partition = root, path, schema, partition
        self._file = open(root / path, "xb")  # noqa: SIM115
        self._footer: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression=compression,
            metadata_collector=self._footer,
            **encodings(schema),
        )
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self.gathered_bytes = 0
        self._rows = 0
        self._reads_offsets = offsets is True
        self._offsets = offsets if isinstance(offsets, Offsets) else Offsets()

    @property
    def stored_bytes(self) -> int:
        return self._file.tell()

    def gather(self, batch: pa.RecordBatch) -> None:
        if self._reads_offsets:
            add_offsets(self._offsets, batch)
        self._gathered.append(batch.select(self._schema.names))
        self._gathered_rows += batch.num_rows
        self.gathered_bytes += batch.nbytes
        if self.gathered_bytes >= ROW_GROUP_BYTES or self._gathered_rows >= ROW_GROUP_ROWS:
            self.write_group()

    def write_group(self) -> None:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, self._schema)
            self._gathered.clear()
            self.gathered_bytes = self._gathered_rows = 0
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self._rows += table.num_rows

    def close(self) -> DataFile:
        self.write_group()
        if self._offsets:
            self._writer.add_key_value_metadata({"headrace.offsets": self._offsets.as_text()})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        Files().sync_directory((self._root / self._path).parent)
        return DataFile(
            self._path,
            self._rows,
            size,
            self._partition,
            self._offsets,
            statistics(self._footer[0], self._schema),
        )

    def abandon(self) -> None:
        self._gathered.clear()
        with suppress(OSError, pa.ArrowException):  # it is deleted anyway
            self._writer.close()
        self._file.close()


# --- batches --------------------------------------------------------------------------------------
def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows with exactly these columns and types; a column that is missing is null."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def split(
    batch: pa.RecordBatch, partition_by: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The rows of each partition. A batch is nearly always of one: then nothing is copied."""
    if not partition_by:
        yield (), batch
        return
    codes = [batch.column(name).dictionary_encode(null_encoding="encode") for name in partition_by]
    if all(len(code.dictionary) == 1 for code in codes):
        yield tuple(code.dictionary[0].as_py() for code in codes), batch
        return
    combined = codes[0].indices.cast(pa.int64())
    for code in codes[1:]:
        combined = pc.add(pc.multiply(combined, len(code.dictionary)), code.indices)
    for number in combined.unique():
        rest, values = number.as_py(), []
        for code in reversed(codes):
            rest, index = divmod(rest, len(code.dictionary))
            values.append(code.dictionary[index].as_py())
        yield tuple(reversed(values)), batch.filter(pc.equal(combined, number))


def add_offsets(offsets: Offsets, batch: pa.RecordBatch) -> None:
    """Put the offsets of a batch in. As the source gives them they are one range."""
    topics, partitions = batch.column("topic"), batch.column("partition")
    numbers = batch.column("offset")
    count = batch.num_rows
    one_topic = len(topics.unique()) == 1 and len(partitions.unique()) == 1
    if one_topic and numbers[count - 1].as_py() - numbers[0].as_py() == count - 1:
        steps = pc.subtract(numbers.slice(1), numbers.slice(0, count - 1))
        if pc.all(pc.equal(steps, 1)).as_py() is not False:
            first = numbers[0].as_py()
            offsets.add(topics[0].as_py(), partitions[0].as_py(), first, first + count)
            return
    for topic, partition, number in zip(
        topics.to_pylist(), partitions.to_pylist(), numbers.to_pylist(), strict=True
    ):
        offsets.add(topic, partition, number, number + 1)


# --- names of directories -------------------------------------------------------------------------
def partition_text(value: Any) -> str | None:
    if value is None or value == "":
        return None  # as Hive has it: an empty name is no name
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)  # a date is 2026-01-31


def partition_directory(names: Sequence[str], values: Sequence[str | None]) -> str:
    """``topic=orders/date=2026-01-31``, escaped as Spark and Hive do it."""
    return "/".join(
        f"{_escape(name)}={NULL_PARTITION if value is None else _escape(value)}"
        for name, value in zip(names, values, strict=True)
    )


def _escape(text: str) -> str:
    return "".join([f"%{ord(c):02X}" if c in _ESCAPED else c for c in text])


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
    """Least, greatest and nulls of the plain columns, in Delta's form."""
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
        from datetime import UTC, timedelta

        moment = value.astimezone(UTC)
        moment -= timedelta(microseconds=moment.microsecond % 1000)
        if up:
            moment += timedelta(milliseconds=1)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
    return value.isoformat()  # a date
