"""An Iceberg table, through ``pyiceberg`` (no jar).

Executors write Parquet files under ``data/``; the driver adds all files of a batch in one Iceberg
commit. That commit also sets the table properties ``headrace.writer.<name>`` (the last number of that
writer) and ``headrace.offsets`` (the ranges that the table holds), so idempotence and manifest are
atomic with the files and outlive expired snapshots. The snapshot's own summary says them too, for
people.

The catalog is a SQLite file beside the data (``catalog.db``), so that a table needs no service; any
other is taken with ``catalog.*`` options and ``table``. Manifests and metadata are synced before the
catalog points to them (:class:`DurableFileIO`); SQLite syncs by itself.

Joined files are exchanged in one overwrite commit, which fails, and is given up, if somebody else has
changed those files meanwhile.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationException
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO, parquet_file_to_data_file
from pyiceberg.table import Table as IcebergTable
from pyspark.sql.types import StructType

from headrace.errors import Conflict, InvalidArgument, NotFound
from headrace.files import Files
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.table import (
    DataFile,
    Description,
    Options,
    Table,
    check_offsets,
)

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
        name = options.table or f"{NAMESPACE}.{_plain_name(self.path)}"
        if name.count(".") < 1:
            name = f"{NAMESPACE}.{name}"
        self._name = name
        self._catalog: Catalog | None = None

    @property
    def files_root(self) -> Path:
        return self.path / "data"

    @property
    def catalog(self) -> Catalog:
        if self._catalog is None:
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
                self._catalog = load_catalog("headrace", **properties)
            except Exception as error:
                raise InvalidArgument(
                    f"the Iceberg catalog cannot be opened: {error}", code="invalid_option"
                ) from error
        return self._catalog

    def exists(self) -> bool:
        if not self.options.catalog and not (self.path / "catalog.db").exists():
            return False
        return self.catalog.table_exists(self._name)

    def _load(self) -> IcebergTable:
        if not self.options.catalog and not (self.path / "catalog.db").exists():
            raise self._not_there()
        try:
            return self.catalog.load_table(self._name)
        except NoSuchTableError:
            raise self._not_there() from None

    def _not_there(self) -> NotFound:
        return NotFound(
            f"there is no Iceberg table {self._name} at {self.path}", code="table_not_found"
        )

    # --- writing --------------------------------------------------------------------------------
    def prepare(self, schema: StructType) -> None:
        options = self.options
        schemas.check_columns(schema, options.partition_by, offsets=options.offsets)
        wanted = schemas.to_arrow(schema)
        with self.locked():
            if not self.exists():
                self._create(wanted)
                return
            table = self._load()
            have = schemas.to_spark(table.schema().as_arrow())
            merged = schemas.merged(
                have,
                self._partition_by(table),
                schema,
                options.partition_by,
                merge=options.merge_schema,
                path=self.path,
            )
            if merged != have:
                with table.transaction() as transaction:
                    with transaction.update_schema() as update:
                        update.union_by_name(wanted)
                    names = transaction.table_metadata.schema().name_mapping.model_dump_json()
                    transaction.set_properties({"schema.name-mapping.default": names})

    def _create(self, schema: pa.Schema) -> None:
        # Payloads have no statistics in our files, and none are to be missed.
        unmeasured = {
            f"write.metadata.metrics.column.{field.name}": "none"
            for field in schema
            if pa.types.is_binary(field.type) or pa.types.is_nested(field.type)
        }
        try:
            self.catalog.create_namespace_if_not_exists(self._name.rsplit(".", 1)[0])
            with (
                self.catalog.create_table_transaction(
                    self._name,
                    schema=schema,
                    location=f"file://{self.path}",
                    properties={
                        "write.parquet.compression-codec": "zstd",
                        "write.metadata.delete-after-commit.enabled": "true",
                        "write.metadata.previous-versions-max": "20",
                        **unmeasured,
                    },
                ) as transaction,
                transaction.update_spec() as spec,
            ):
                for name in self.options.partition_by:
                    spec.add_identity(name)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(
                f"Iceberg cannot hold these columns: {error}", code="invalid_schema"
            ) from error

    @staticmethod
    def _partition_by(table: IcebergTable) -> list[str]:
        schema = table.schema()
        return [schema.find_column_name(each.source_id) or "" for each in table.spec().fields]

    def commit(self, app_id: str, number: int, files: Sequence[DataFile]) -> bool:
        with self.locked():
            table = self._load()
            if int(table.properties.get(WRITER + app_id, -1)) >= number:
                return False
            summary = {"headrace.app": app_id, "headrace.number": str(number)}
            properties = {WRITER + app_id: str(number)}
            if self.options.offsets:
                merged = check_offsets(_offsets(table), files, self.path)
                properties[OFFSETS] = merged.as_text()
                new = Offsets()
                for file in files:
                    new.add_all(file.offsets)
                summary[OFFSETS] = new.as_text()
            with _quiet(), self._conflicts(), table.transaction() as transaction:
                transaction.set_properties(properties)
                transaction.add_files(
                    [self._uri(file.path) for file in files],
                    snapshot_properties=summary,
                    check_duplicate_files=False,
                )
        return True

    def _uri(self, path: str) -> str:
        return f"file://{self.files_root / path}"  # pyiceberg takes it as it is, unescaped

    def _relative(self, uri: str) -> str:
        return Path(uri.removeprefix("file://")).relative_to(self.files_root).as_posix()

    @contextmanager
    def _conflicts(self) -> Iterator[None]:
        try:
            yield
        except (CommitFailedException, ValidationException) as error:
            raise Conflict(
                f"somebody else changed {self.path} at the same time: {error}", retryable=True
            ) from error

    def last_number(self, app_id: str) -> int | None:
        number = self._load().properties.get(WRITER + app_id)
        return None if number is None else int(number)

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

    def data_files(self) -> list[DataFile]:
        table = self._load()
        partition_by = self._partition_by(table)
        return [
            DataFile(
                self._relative(each.file_path),
                each.record_count,
                each.file_size_in_bytes,
                {name: repr(each.partition[at]) for at, name in enumerate(partition_by)},
            )
            for each in self._data_files(table)
        ]

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        table = self._load()
        schema = schemas.to_spark(table.schema().as_arrow())
        return schema, tuple(self._partition_by(table))

    def describe(self) -> Description:
        table = self._load()
        files = self._data_files(table)
        return Description(
            str(self.path),
            self.kind,
            len(table.metadata.snapshots),
            len(files),
            sum(each.record_count for each in files),
            sum(each.file_size_in_bytes for each in files),
            tuple(self._partition_by(table)),
            _offsets(table),
            schemas.to_spark(table.schema().as_arrow()),
        )

    # --- upkeep ---------------------------------------------------------------------------------
    def exchange(self, old: Sequence[DataFile], new: DataFile) -> bool:
        with self.locked():
            table = self._load()
            there = {self._relative(each.file_path): each for each in self._data_files(table)}
            if not all(file.path in there for file in old):
                return False
            properties = {"headrace.compaction": "true"}
            with (
                _quiet(),
                self._conflicts(),
                table.transaction() as transaction,
                transaction.update_snapshot(snapshot_properties=properties).overwrite() as update,
            ):
                for file in old:
                    update.delete_data_file(there[file.path])
                uri = self._uri(new.path)
                update.append_data_file(parquet_file_to_data_file(table.io, table.metadata, uri))
        return True

    def vacuum(self, keep_s: float) -> int:
        """Expires old snapshots, then deletes the data files that no snapshot names."""
        oldest = time.time() - keep_s
        with self.locked():
            table = self._load()
            moment = datetime.fromtimestamp(oldest, UTC)
            table.maintenance.expire_snapshots().older_than(moment).commit()
            table = self._load()
            named = set()
            for snapshot in table.snapshots():
                for manifest in snapshot.manifests(table.io):
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                        named.add(self._relative(entry.data_file.file_path))
            deleted = 0
            for path in self._disk.walk(self.files_root):
                relative = path.relative_to(self.files_root).as_posix()
                if relative not in named and self._disk.modified(path) < oldest:
                    self._disk.remove(path)
                    deleted += 1
        return deleted


def _offsets(table: IcebergTable) -> Offsets:
    return Offsets.of_text(table.properties.get(OFFSETS, "{}"))


def _plain_name(path: Path) -> str:
    return re.sub(r"[^a-z0-9_]", "_", path.name.lower()) or "table"


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


# --- files that are on disk before anybody is told of them ----------------------------------------
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
        files = Files()
        handle = files.open(self._path, write=True)
        try:
            files.sync(handle)
        finally:
            handle.close()
        files.sync_directory(self._path.parent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _DurableStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
