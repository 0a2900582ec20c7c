"""An Iceberg table, through ``pyiceberg`` (no jar).

Executors write Parquet files under ``data/``; the driver adds all files of a batch in one Iceberg
commit. That commit also sets the table properties ``headrace.writer.<name>`` (the last number of that
writer) and ``headrace.offsets`` (the ranges that the table holds), so idempotence and manifest are
atomic with the files and outlive expired snapshots. The snapshot's own summary says them too, for
people.

The catalog of a table on a disk is a SQLite file beside the data (``catalog.db``), so that a table needs no
service. Any other (REST, SQL, Glue, Unity, …) is chosen by pyiceberg's own configuration: the option ``catalog``
names it, ``catalog.*`` are its properties, and ``table`` is the table's name there. A table in an object store needs
one. A catalog is open only while it is used (:meth:`IcebergLakeTable._opened`), so no connection to its database
is ever left over. Manifests and metadata on a disk are synced before the catalog points to them
(:class:`DurableFileIO`); SQLite syncs by itself.

pyiceberg repeats a commit that lost against another one, without a look at our numbers and offsets. So that is
switched off (:data:`NO_RETRIES`), and the whole commit begins anew, here.

pyiceberg cannot join files yet, so it is done here: small files of a partition become one, in one
overwrite commit. The commit fails, and is given up, if another writer changed those files meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FSSpecHandler, PyFileSystem
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NotInstalledError,
    OAuthError,
    RESTError,
    UnauthorizedError,
    ValidationException,
)
from pyiceberg.io.pyarrow import (
    PyArrowFile,
    PyArrowFileIO,
    parquet_file_to_data_file,
)
from pyiceberg.table import Table as IcebergTable
from pyiceberg.types import TimestamptzType
from pyiceberg.utils.config import Config
from pyspark.sql.types import StructType
from requests import RequestException
from sqlalchemy.exc import ArgumentError, OperationalError

from headrace.errors import (
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotFound,
    StorageFailed,
    refused_by_disk,
)
from headrace.files import SharedFiles
from headrace.spark.durable import sync
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.stores import FileStore, TablePlace, explained
from headrace.spark.lake.table import (
    Compacted,
    DataFile,
    Description,
    Options,
    Overtaken,
    StoredFile,
    Table,
    TableSnapshot,
    WrittenFiles,
    check_offsets,
)
from headrace.spark.lake.writing import encodings

OFFSETS = "headrace.offsets"
WRITER = "headrace.writer."
NAMESPACE = "headrace"
NO_RETRIES = {"commit.retry.num-retries": "0"}
PATIENCE = {"s3.connect-timeout": "10", "s3.request-timeout": "60"}
"""Seconds, unless the catalog's properties say more. A slow store is not a failure: pyarrow's own are 1 and 3."""


class CatalogUnavailable(StorageFailed, code="catalog_unavailable", retryable=True):
    """The Iceberg catalog does not answer."""


class CatalogForbidden(Forbidden, code="catalog_forbidden"):
    """The Iceberg catalog refuses the credentials."""


class IcebergLakeTable(Table):
    """See the head of this file."""

    kind = "iceberg"
    keeps_partition_columns = True  # Iceberg reads partition values off the files' statistics

    def __init__(self, options: Options):
        super().__init__(options)
        if not self.is_local and not options.has_catalog:
            raise InvalidArgument(
                f"an Iceberg table in an object store ({self.path}) needs a catalog: configure one for "
                "pyiceberg (.pyiceberg.yaml, or PYICEBERG_CATALOG__NAME__URI), and name it with the option "
                "catalog",
                code="catalog_missing",
            )
        if set("?#%") & set(str(self.path)):
            raise InvalidArgument(
                f"an Iceberg table cannot lie at {self.path}: its path has '?', '#' or '%'",
                code="invalid_path",
            )
        name = options.table or re.sub(r"[^a-z0-9_]", "_", self.path.name.lower()) or "table"
        self._name = name if "." in name else f"{NAMESPACE}.{name}"

    @property
    def files_root(self) -> TablePlace:
        return self.path / "data"

    def _store_at(self, place: TablePlace) -> FileStore:
        """With the file system of the table's own FileIO: a catalog may hand out credentials for a table."""
        if isinstance(place, Path):
            return FileStore(place)
        with self._catalog() as catalog:
            try:
                io = catalog.load_table(self._name).io
            except (NoSuchTableError, NoSuchNamespaceError):
                io = catalog._load_file_io(location=str(place))
            filesystem: Any
            if isinstance(io, PyArrowFileIO):
                scheme, bucket, _ = io.parse_location(str(place), io.properties)
                filesystem = io.fs_by_scheme(scheme, bucket)
            else:  # pyiceberg takes fsspec for Azure where adlfs is installed
                filesystem = PyFileSystem(
                    FSSpecHandler(cast(Any, io).get_fs(urlsplit(str(place)).scheme))
                )
            return FileStore(place, filesystem, place.key)

    @property
    def _has_own_catalog(self) -> bool:
        """Whether the catalog is the file beside the table."""
        return self.is_local and not self.options.has_catalog

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        """The only place that opens a catalog; its database connections end with the block."""
        name = self.options.catalog or NAMESPACE
        if self._has_own_catalog:
            assert isinstance(self.path, Path)
            SharedFiles().make_directory(self.path)
            properties: dict[str, Any] = {
                "type": "sql",
                "uri": f"sqlite:///{self.path / 'catalog.db'}",
                "warehouse": f"file://{self.path}",
                "py-io-impl": f"{__name__}.DurableFileIO",
            }
        else:
            configured = Config().get_catalog_config(name) or {}
            given = dict(self.options.catalog_properties)
            properties = {**PATIENCE, **_from_environment(), **configured, **given}
        with explained(self.path), self._explained(name):
            with self._opening(name):
                catalog = load_catalog(name, **properties)
            with catalog:
                yield catalog

    @contextmanager
    def _opening(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, ImportError, NotInstalledError, ArgumentError) as error:
            raise InvalidArgument(
                f"the Iceberg catalog {name} cannot be opened ({type(error).__name__}): check its type, uri "
                "and other properties (pyiceberg's configuration, or the options catalog.*)",
                code="invalid_option",
            ) from None

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Errors of a catalog as sentences, without its properties: they may hold a password."""
        try:
            yield
        except (
            UnauthorizedError,
            ForbiddenError,
            OAuthError,
            AuthorizationExpiredError,
        ) as error:
            raise CatalogForbidden(
                f"the Iceberg catalog {name} refuses the credentials ({type(error).__name__}): check its "
                "token or credential in pyiceberg's configuration"
            ) from None
        except (RESTError, RequestException, OperationalError) as error:
            raise CatalogUnavailable(
                f"the Iceberg catalog {name} does not answer ({type(error).__name__}): see whether its uri "
                "is right and whether it runs, and try again"
            ) from None

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
            except (NoSuchTableError, NoSuchNamespaceError):
                raise missing from None
            except (OSError, ValueError) as error:
                raise self._unreadable(error) from error
            kept = {**table.metadata.properties, **NO_RETRIES}  # in this process, not in the table
            table.metadata = table.metadata.model_copy(update={"properties": kept})
            yield table

    def _unreadable(self, error: Exception) -> HeadraceError:
        """Its metadata is damaged or gone; or the table was moved: metadata names files by their full paths."""
        return HeadraceError(
            f"the metadata of {self.path} cannot be read ({str(error).splitlines()[0]}). If the table was moved, "
            "put a symbolic link at its old path",
            code="table_unreadable",
        )

    def _has_catalog(self) -> bool:
        if not self._has_own_catalog:
            return True
        assert isinstance(self.path, Path)
        return (self.path / "catalog.db").exists()

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
        location = self._uri_of(self.path)
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
            raise schemas.invalid(f"Iceberg cannot hold these columns: {error}") from error

    def _commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        with self._opened() as table:
            if _last_number(table, app_id) >= number:
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

    @contextmanager
    def _merge_base(self) -> Iterator[IcebergMergeBase]:
        with self._opened() as table:
            yield IcebergMergeBase(self, table)

    def _uri(self, path: str) -> str:
        return f"{self._uri_of(self.files_root)}/{path}"  # pyiceberg takes it as it is, unescaped

    def _uri_of(self, place: TablePlace) -> str:
        return f"file://{place}" if isinstance(place, Path) else str(place)

    @contextmanager
    def _conflicts(self) -> Iterator[None]:
        try:
            yield
        except (CommitFailedException, ValidationException) as error:
            raise Overtaken(
                f"another writer changed {self.path} at the same time: try again"
            ) from error

    # --- reading --------------------------------------------------------------------------------
    def _data_files(self, table: IcebergTable) -> list[Any]:
        found = []
        try:
            tasks = list(table.scan().plan_files())
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        for task in tasks:
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
            return [each.file_path.removeprefix("file://") for each in self._data_files(table)]

    def sizes(self) -> list[tuple[str, int]]:
        root = f"{self._uri_of(self.files_root)}/"
        with self._opened() as table:
            found = self._data_files(table)
        return sorted(
            (each.file_path.removeprefix(root), each.file_size_in_bytes) for each in found
        )

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

    def snapshot(self) -> TableSnapshot:
        with self._opened() as table:
            columns = {each.field_id: each for each in table.schema().fields}

            def values(bounds: Mapping[int, bytes] | None) -> dict[str, Any]:
                return {
                    columns[number].name: _value(columns[number].field_type, bound)
                    for number, bound in (bounds or {}).items()
                    if number in columns
                }

            root = f"{self._uri_of(self.files_root)}/"
            files = [
                StoredFile(
                    each.file_path.removeprefix(root),
                    each.record_count,
                    each.file_size_in_bytes,
                    {},
                    values(each.lower_bounds),
                    values(each.upper_bounds),
                )
                for each in self._data_files(table)
            ]
            return TableSnapshot(files, _offsets(table))

    # --- upkeep ---------------------------------------------------------------------------------
    def _compact(self, target_bytes: int) -> Compacted:
        removed = added = 0
        with self._opened() as table:
            groups = small_files(self._data_files(table), target_bytes)
            schema = schemas.to_arrow(schemas.to_spark(table.schema().as_arrow()))
        store = self.store()
        for group in groups:
            try:
                joined = self._join(store, group, schema)
            except OSError as error:
                if self.is_local:
                    raise refused_by_disk(error) from error
                raise
            if not self._exchange(group, joined):
                store.delete(joined)
                break
            removed, added = removed + len(group), added + 1
        return Compacted(removed, added)

    def _join(self, store: FileStore, files: Sequence[Any], schema: pa.Schema) -> str:
        """One file with all rows of these, which are of one partition; its name."""
        names = sorted(store.name(each.file_path) for each in files)  # about as they were written
        folder, _, first = names[0].rpartition("/")
        target = f"{folder}/{first[:9]}-joined-{uuid.uuid4().hex}.parquet".lstrip("/")
        paths = [store.path(name) for name in names]
        rows = ds.dataset(paths, schema, format="parquet", filesystem=store.filesystem)
        with pq.ParquetWriter(
            store.path(target),
            schema,
            filesystem=store.filesystem,
            compression=self.options.compression,
            **encodings(schema),
        ) as writer:
            for batch in rows.to_batches():
                writer.write_batch(batch)
        store.settle([target])
        return target

    def _exchange(self, old: Sequence[Any], new: str) -> bool:
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
                added = parquet_file_to_data_file(table.io, table.metadata, self._uri(new))
                update.append_data_file(added)
        return True

    def vacuum(self, keep_s: float) -> int:
        """Expires old snapshots, then deletes the data files that no snapshot names.

        The snapshot that was current at that moment is kept, whatever its age: a reader may use it.
        """
        oldest = time.time() - keep_s
        with self.locked():
            with self._opened() as table:
                made_ms = [each.timestamp_ms for each in table.snapshots()]
                current_ms = max((each for each in made_ms if each <= oldest * 1000), default=0)
                moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=current_ms)
                with self._conflicts():
                    table.maintenance.expire_snapshots().older_than(moment).commit()
            store = self.store()
            with self._opened() as table:
                named = {
                    store.name(entry.data_file.file_path)
                    for snapshot in table.snapshots()
                    for manifest in snapshot.manifests(table.io)
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                }
            deleted = 0
            for name, written in store.files():
                if name.endswith(".parquet") and name not in named and written < oldest:
                    store.delete(name)
                    deleted += 1
        return deleted


class IcebergMergeBase:
    """The table as it was when it was opened; a commit fails if it has changed since."""

    def __init__(self, home: IcebergLakeTable, table: IcebergTable):
        self._home = home
        self._table = table
        root = home._uri("x").removesuffix("x")
        self._files = {each.file_path.removeprefix(root): each for each in home._data_files(table)}

    def last_number(self, app_id: str) -> int:
        return _last_number(self._table, app_id)

    def names(self) -> list[str]:
        return list(self._files)

    def replace(
        self, app_id: str, number: int, removed: Sequence[str], added: Sequence[DataFile]
    ) -> None:
        table = self._table
        summary = {"headrace.app": app_id, "headrace.number": str(number)}
        with _quiet(), self._home._conflicts(), table.transaction() as transaction:
            transaction.set_properties({WRITER + app_id: str(number)})
            with transaction.update_snapshot(snapshot_properties=summary).overwrite() as update:
                for name in removed:
                    update.delete_data_file(self._files[name])
                for file in added:
                    uri = self._home._uri(file.path)
                    update.append_data_file(
                        parquet_file_to_data_file(table.io, table.metadata, uri)
                    )


def _last_number(table: IcebergTable, app_id: str) -> int:
    return int(table.properties.get(WRITER + app_id, -1))


def _from_environment() -> dict[str, str]:
    """Of the usual variables, those that pyiceberg does not read. Without a region it would ask Amazon for one."""
    names = {
        "s3.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        "s3.endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    }
    found = {
        name: next(filter(None, map(os.environ.get, tried)), None) for name, tried in names.items()
    }
    return {name: value for name, value in found.items() if value}


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


def _value(kind: Any, bound: bytes) -> Any:
    """A bound as Python has it; times as Delta's statistics have them."""
    value: Any = from_bytes(kind, bound)
    if isinstance(kind, TimestamptzType):
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)
    return value


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
