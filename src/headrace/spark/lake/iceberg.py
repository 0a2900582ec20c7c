"""An Iceberg table, through ``pyiceberg`` (no jar).

Executors write Parquet files under ``data/``; the driver adds all files of a batch in one Iceberg
commit. That commit also sets the table properties ``headrace.writer.<name>`` (the last number of that
writer) and ``headrace.offsets`` (the ranges that the table holds), so idempotence and manifest are
atomic with the files and outlive expired snapshots. The snapshot's own summary says them too, for
people.

The catalog is a SQLite file beside the data (``catalog.db``), so that a table needs no service; any
other is taken with ``catalog.*`` options and ``table``. It is open only while it is used
(:meth:`IcebergLakeTable._opened`), so no connection to its database is ever left over. Manifests and
metadata are synced before the catalog points to them (:class:`DurableFileIO`); SQLite syncs by itself.

pyiceberg cannot join files yet, so it is done here: small files of a partition become one, in one
overwrite commit. The commit fails, and is given up, if another writer changed those files meanwhile.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationException
from pyiceberg.io.pyarrow import (
    PyArrowFile,
    PyArrowFileIO,
    parquet_file_to_data_file,
)
from pyiceberg.table import Table as IcebergTable
from pyspark.sql.types import StructType

from headrace.errors import Conflict, InvalidArgument, NotFound, refused_by_disk
from headrace.spark.durable import sync
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import (
    Compacted,
    Description,
    Options,
    Table,
    WrittenFiles,
    check_offsets,
)
from headrace.spark.lake.writing import encodings

OFFSETS = "headrace.offsets"
WRITER = "headrace.writer."
NAMESPACE = "headrace"


class IcebergLakeTable(Table):
    """See the head of this file."""

    kind = "iceberg"
    keeps_partition_columns = True  # Iceberg reads partition values off the files' statistics

    def __init__(self, options: Options):
        super().__init__(options)
        if set("?#%") & set(str(self.path)):
            raise InvalidArgument(
                f"an Iceberg table cannot lie at {self.path}: its path has '?', '#' or '%'",
                code="invalid_path",
            )
        name = options.table or re.sub(r"[^a-z0-9_]", "_", self.path.name.lower()) or "table"
        self._name = name if "." in name else f"{NAMESPACE}.{name}"

    @property
    def files_root(self) -> Path:
        return self.path / "data"

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        """The only place that opens a catalog; its database connections end with the block."""
        properties = dict(self.options.catalog)
        if not properties:
            self._disk.make_directory(self.path)
            properties = {
                "type": "sql",
                "uri": f"sqlite:///{self.path / 'catalog.db'}",
                "warehouse": f"file://{self.path}",
                "py-io-impl": f"{__name__}.DurableFileIO",
            }
        try:
            catalog = load_catalog("headrace", **properties)
        except Exception as error:
            raise InvalidArgument(
                f"the Iceberg catalog cannot be opened: {error}", code="invalid_option"
            ) from error
        with catalog:
            yield catalog

    @contextmanager
    def _opened(self) -> Iterator[IcebergTable]:
        """The table as it is now."""
        missing = NotFound(
            f"there is no Iceberg table {self._name} at {self.path}", code="table_not_found"
        )
        if not self._has_catalog():
            raise missing
        with self._catalog() as catalog:
            try:
                table = catalog.load_table(self._name)
            except NoSuchTableError:
                raise missing from None
            yield table

    def _has_catalog(self) -> bool:
        return bool(self.options.catalog) or (self.path / "catalog.db").exists()

    def exists(self) -> bool:
        if not self._has_catalog():
            return False
        with self._catalog() as catalog:
            return catalog.table_exists(self._name)

    # --- writing --------------------------------------------------------------------------------
    def _add_columns(self, schema: pa.Schema, names: Sequence[str]) -> None:
        with self._opened() as table, table.transaction() as transaction:
            with transaction.update_schema() as update:
                update.union_by_name(schema)
            mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
            transaction.set_properties({"schema.name-mapping.default": mapping})

    def _create(self, schema: pa.Schema) -> None:
        # Payloads have no statistics in our files, and none are to be missed.
        unmeasured = {
            f"write.metadata.metrics.column.{field.name}": "none"
            for field in schema
            if pa.types.is_binary(field.type) or pa.types.is_nested(field.type)
        }
        properties = {
            "write.parquet.compression-codec": "zstd",
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "20",
            **unmeasured,
        }
        location = f"file://{self.path}"
        try:
            with self._catalog() as catalog:
                catalog.create_namespace_if_not_exists(self._name.rsplit(".", 1)[0])
                with (
                    catalog.create_table_transaction(
                        self._name, schema=schema, location=location, properties=properties
                    ) as transaction,
                    transaction.update_spec() as spec,
                ):
                    for name in self.options.partition_by:
                        spec.add_identity(name)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(
                f"Iceberg cannot hold these columns: {error}", code="invalid_schema"
            ) from error

    def commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        with self.locked(), self._opened() as table:
            if int(table.properties.get(WRITER + app_id, -1)) >= number:
                return False
            summary = {"headrace.app": app_id, "headrace.number": str(number)}
            properties = {WRITER + app_id: str(number)}
            if self.options.offsets:
                merged = check_offsets(_offsets(table), written, self.path)
                properties[OFFSETS] = merged.as_text()
                new = Offsets(span for each in written for span in each.offsets)
                summary[OFFSETS] = new.as_text()
            with _quiet(), self._conflicts(), table.transaction() as transaction:
                transaction.set_properties(properties)
                transaction.add_files(
                    [self._uri(file.path) for each in written for file in each.files],
                    snapshot_properties=summary,
                    check_duplicate_files=False,
                )
        return True

    def _uri(self, path: str) -> str:
        return f"file://{self.files_root / path}"  # pyiceberg takes it as it is, unescaped

    @contextmanager
    def _conflicts(self) -> Iterator[None]:
        try:
            yield
        except (CommitFailedException, ValidationException) as error:
            raise Conflict(
                f"another writer changed {self.path} at the same time: {error}", retryable=True
            ) from error

    # --- reading --------------------------------------------------------------------------------
    def _data_files(self, table: IcebergTable) -> list[Any]:
        found = []
        for task in table.scan().plan_files():
            if task.delete_files:
                raise InvalidArgument(
                    f"rows of {self.path} were deleted by another engine; read it with one that "
                    "knows Iceberg's delete files",
                    code="table_unreadable",
                )
            found.append(task.file)
        return found

    def paths(self) -> list[str]:
        with self._opened() as table:
            return [str(_path_of(each)) for each in self._data_files(table)]

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        with self._opened() as table:
            return _shape(table)

    def describe(self) -> Description:
        with self._opened() as table:
            files = self._data_files(table)
            schema, partition_by = _shape(table)
            return Description(
                str(self.path),
                self.kind,
                len(table.metadata.snapshots),
                len(files),
                sum(each.record_count for each in files),
                sum(each.file_size_in_bytes for each in files),
                partition_by,
                _offsets(table),
                schema,
            )

    # --- upkeep ---------------------------------------------------------------------------------
    def _compact(self, target_bytes: int) -> Compacted:
        removed = added = 0
        with self._opened() as table:
            groups = small_files(self._data_files(table), target_bytes)
            schema = schemas.to_arrow(schemas.to_spark(table.schema().as_arrow()))
        for group in groups:
            try:
                joined = self._join(group, schema)
            except OSError as error:
                raise refused_by_disk(error) from error
            if not self._exchange(group, joined):
                joined.unlink(missing_ok=True)
                break
            removed, added = removed + len(group), added + 1
        return Compacted(removed, added)

    def _join(self, files: Sequence[Any], schema: pa.Schema) -> Path:
        """One file with all rows of these, which are of one partition."""
        paths = sorted(map(_path_of, files))  # about the order in which they were written
        target = paths[0].with_name(f"{paths[0].name[:9]}-joined-{uuid.uuid4().hex}.parquet")
        rows = ds.dataset([str(path) for path in paths], schema, format="parquet")
        with pq.ParquetWriter(
            target, schema, compression=self.options.compression, **encodings(schema)
        ) as writer:
            for batch in rows.to_batches():
                writer.write_batch(batch)
        sync(target)
        sync(target.parent)
        return target

    def _exchange(self, old: Sequence[Any], new: Path) -> bool:
        """In one commit; False when another writer changed some of the old files meanwhile."""
        with self.locked(), self._opened() as table:
            current = {each.file_path: each for each in self._data_files(table)}
            if not all(each.file_path in current for each in old):
                return False
            properties = {"headrace.compaction": "true"}
            with (
                _quiet(),
                self._conflicts(),
                table.transaction() as transaction,
                transaction.update_snapshot(snapshot_properties=properties).overwrite() as update,
            ):
                for each in old:
                    update.delete_data_file(current[each.file_path])
                uri = self._uri(new.relative_to(self.files_root).as_posix())
                update.append_data_file(parquet_file_to_data_file(table.io, table.metadata, uri))
        return True

    def vacuum(self, keep_s: float) -> int:
        """Expires old snapshots, then deletes the data files that no snapshot names."""
        oldest = time.time() - keep_s
        with self.locked():
            with self._opened() as table:
                moment = datetime.fromtimestamp(oldest, UTC)
                table.maintenance.expire_snapshots().older_than(moment).commit()
            with self._opened() as table:
                named = {
                    _path_of(entry.data_file)
                    for snapshot in table.snapshots()
                    for manifest in snapshot.manifests(table.io)
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                }
            deleted = 0
            for path in self.files_root.rglob("*.parquet"):
                if path not in named and path.stat().st_mtime < oldest:
                    path.unlink()
                    deleted += 1
        return deleted


def small_files(files: Sequence[Any], target_bytes: int) -> list[list[Any]]:
    """Groups of files that are worth joining, each of one partition, smallest files first."""
    groups: list[list[Any]] = []
    latest: dict[str, list[Any]] = {}
    for file in sorted(files, key=lambda each: (each.file_size_in_bytes, each.file_path)):
        if file.file_size_in_bytes >= target_bytes * 3 // 4:
            continue
        partition = repr(file.partition)
        group = latest.get(partition)
        size = sum(each.file_size_in_bytes for each in group or ())
        if group is None or size + file.file_size_in_bytes > target_bytes:
            group = latest[partition] = []
            groups.append(group)
        group.append(file)
    return [group for group in groups if len(group) > 1]


def _path_of(file: Any) -> Path:
    return Path(file.file_path.removeprefix("file://"))


def _shape(table: IcebergTable) -> tuple[StructType, tuple[str, ...]]:
    schema = table.schema()
    by = [schema.find_column_name(each.source_id) or "" for each in table.spec().fields]
    return schemas.to_spark(schema.as_arrow()), tuple(by)


def _offsets(table: IcebergTable) -> Offsets:
    return Offsets.of_text(table.properties.get(OFFSETS, "{}"))


@contextmanager
def _quiet() -> Iterator[None]:
    """pyiceberg warns of every column without statistics; ours are without them on purpose."""
    chatty = logging.getLogger("pyiceberg.io.pyarrow")
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatty.setLevel(level)


# --- files that are on disk before the catalog names them ------------------------------------------
class DurableFileIO(PyArrowFileIO):
    """Syncs what it writes on the local file system."""

    def new_output(self, location: str) -> PyArrowFile:
        output = super().new_output(location)
        if urlsplit(location).scheme not in ("", "file"):
            return output
        return _DurableOutput(
            location=location,
            path=output._path,
            fs=output._filesystem,
            buffer_size=output._buffer_size,
        )


class _DurableOutput(PyArrowFile):
    def create(self, overwrite: bool = False) -> Any:
        return _DurableStream(super().create(overwrite=overwrite), Path(self._path))


class _DurableStream:
    """A stream that is synced with its directory when it is closed."""

    def __init__(self, stream: Any, path: Path):
        self._stream = stream
        self._path = path

    def close(self) -> None:
        if self._stream.closed:
            return
        self._stream.close()
        sync(self._path)
        sync(self._path.parent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _DurableStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
