"""A Delta table, through ``deltalake`` (Rust, no jar).

Executors write Parquet files into the table's directory, where no reader looks for them before the
Delta log names them. The driver adds all files of a batch in one Delta transaction that carries
``txn(appId, version)``: Delta's own idempotence, which every Delta engine understands.

The offset ranges of the whole table stand in the ``commitInfo`` of each commit that Headrace makes
(``headrace.offsets``), so the newest one that has them is the manifest: atomic with the files, and no
file beside the log can disagree with it.

Small files are joined by Delta's own ``optimize``. A query may commit meanwhile: Delta orders the two
by itself.

In an object store, a commit is a conditional put of the next log entry, which fails if there is one: two writers
cannot both make version 7 (deltalake's default; a store that lacks conditional puts needs its DynamoDB option). There
is no lock there, so a commit is not rebased by deltalake either: if the table has moved on, ours begins anew, with
another look at the numbers and offsets.

On a disk, deltalake does not sync the files that it writes. They are synced here after the commit, before Spark
gets an answer. A power cut between the two (not a crash of the process) may lose the log entry, and then
the batch is repeated; it may also leave an empty entry, or one whose joined files are incomplete, which
Delta reports as damage. The files that were joined are kept for a day, so ``restore`` to the version
before brings all rows back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import PyFileSystem
from pyspark.sql.types import StructType

from headrace.errors import Conflict, HeadraceError, NotFound
from headrace.spark.durable import sync
from headrace.spark.lake import schemas
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.stores import FileStore, StoreAddress, TablePlace, explained, store_error
from headrace.spark.lake.table import (
    Compacted,
    DataFile,
    Description,
    Overtaken,
    StoredFile,
    Table,
    TableSnapshot,
    WrittenFiles,
    check_offsets,
)
from headrace.spark.lake.writing import partition_text

NOTE = "headrace.offsets"


class DeltaLakeTable(Table):
    """See the head of this file."""

    kind = "delta"

    @property
    def files_root(self) -> TablePlace:
        return self.path

    @property
    def _settings(self) -> dict[str, str] | None:
        return dict(self.options.storage) or None

    def _store_at(self, place: TablePlace) -> FileStore:
        if isinstance(place, Path):
            return FileStore(place)
        with explained(place):
            handler = DeltaStorageHandler(str(place), self._settings)
            return FileStore(place, PyFileSystem(handler))

    def exists(self) -> bool:
        if self.is_local:
            return DeltaTable.is_deltatable(str(self.path))
        try:
            self._load()  # is_deltatable would keep all threads of Python from running while it waits
        except NotFound as error:
            if error.code != "table_not_found":  # BucketNotFound
                raise
            return False
        return True

    def _load(self) -> DeltaTable:
        with explained(self.path):
            try:
                return DeltaTable(str(self.path), storage_options=self._settings)
            except TableNotFoundError:
                raise NotFound(f"{self.path} is no Delta table", code="table_not_found") from None
            except DeltaError as error:
                if isinstance(self.path, StoreAddress) and store_error(self.path, error):
                    raise
                raise HeadraceError(f"{self.path}: {error}", code="table_unreadable") from error

    # --- writing --------------------------------------------------------------------------------
    def _create(self, schema: pa.Schema) -> None:
        try:
            DeltaTable.create(
                str(self.path),
                schema=Schema.from_arrow(schema),
                partition_by=list(self.options.partition_by),
                mode="error",
                storage_options=self._settings,
            )
        except DeltaError as error:
            if isinstance(self.path, StoreAddress) and store_error(self.path, error):
                raise
            raise schemas.invalid(f"Delta cannot hold these columns: {error}") from error
        self._sync(0)

    def _add_columns(self, schema: pa.Schema, names: Sequence[str]) -> None:
        table = self._load()
        fields: list[Field] = [
            each for each in Schema.from_arrow(schema).fields if each.name in names
        ]
        table.alter.add_columns(fields)
        self._sync(table.version())

    def _commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        table = self._load()
        if DeltaMergeBase(self, table).last_number(app_id) >= number:
            return False
        offsets = Offsets()
        if self.options.offsets:
            try:
                offsets = check_offsets(_offsets(table), written, self.path)
            except Conflict:  # the history may be newer than the version that was loaded
                if DeltaMergeBase(self, self._load()).last_number(app_id) < number:
                    raise
                return False
        with self.refusals("the commit to"):
            _commit(
                table,
                [_added(file) for each in written for file in each.files],
                self._commit_as(_note(offsets), app_transactions=[Transaction(app_id, number)]),
            )
        self._sync(table.version())
        return True

    @contextmanager
    def _merge_base(self) -> Iterator[DeltaMergeBase]:
        table = self._load()
        yield DeltaMergeBase(self, table)
        self._sync(table.version())

    def _commit_as(self, note: dict[str, Any], **more: Any) -> CommitProperties:
        """Without a lock, a commit must follow the version that was looked at."""
        retries = None if self.is_local else 0
        return CommitProperties(custom_metadata=note, max_commit_retries=retries, **more)

    @contextmanager
    def refusals(self, what: str, *, overtaken: bool = False) -> Iterator[None]:
        """``overtaken``: also on a disk, another commit since this version is one to begin again after."""
        try:
            yield
        except CommitFailedError as error:
            if self.is_local and not overtaken:
                raise Conflict(f"Delta refused {what} {self.path}: {error}") from error
            raise Overtaken(
                f"another writer changed {self.path} at the same time: try again"
            ) from error
        except DeltaError as error:
            if isinstance(self.path, StoreAddress) and store_error(self.path, error):
                raise
            raise Conflict(f"Delta refused {what} {self.path}: {error}") from error

    def _sync(self, version: int) -> None:
        if isinstance(self.path, Path):
            log = self.path / "_delta_log"
            sync(log / f"{version:020d}.json")
            sync(log)

    # --- reading --------------------------------------------------------------------------------
    def paths(self) -> list[str]:
        return list(self._load().file_uris())

    def sizes(self) -> list[tuple[str, int]]:
        actions = pa.table(self._load().get_add_actions())
        names = map(unquote, actions["path"].to_pylist())
        return sorted(zip(names, actions["size_bytes"].to_pylist(), strict=True))

    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        table = self._load()
        schema = schemas.to_spark(pa.schema(table.schema()))
        return schema, tuple(table.metadata().partition_columns)

    def describe(self) -> Description:
        table = self._load()
        actions = pa.table(table.get_add_actions())
        schema, partition_by = self.shape()
        return Description(
            str(self.path),
            self.kind,
            table.version(),
            actions.num_rows,
            sum(count or 0 for count in actions["num_records"].to_pylist()),
            sum(actions["size_bytes"].to_pylist()),
            partition_by,
            _offsets(table),
            schema,
        )

    def snapshot(self) -> TableSnapshot:
        table = self._load()
        files = []
        for each in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            described: dict[str, dict[str, Any]] = {"partition": {}, "min": {}, "max": {}}
            for name, value in each.items():
                kind, _, column = name.partition(".")
                if column and kind in described and (value is not None or kind == "partition"):
                    described[kind][column] = value
            size = (each["num_records"] or 0, each["size_bytes"])
            files.append(StoredFile(unquote(each["path"]), *size, *described.values()))
        return TableSnapshot(files, _offsets(table))

    # --- upkeep ---------------------------------------------------------------------------------
    def _compact(self, target_bytes: int) -> Compacted:
        table = self._load()
        before, version = set(table.file_uris()), table.version()
        note = self._commit_as(_note(_offsets(table)))
        with self.refusals("to join files of"):
            done = table.optimize.compact(target_size=target_bytes, commit_properties=note)
        if not done["numFilesRemoved"]:
            return Compacted()
        store = self.store()
        store.settle([store.name(path) for path in {*table.file_uris()} - before])
        for number in range(version + 1, table.version() + 1):
            self._sync(number)
        return Compacted(done["numFilesRemoved"], done["numFilesAdded"])

    def vacuum(self, keep_s: float) -> int:
        table = self._load()
        with explained(self.path):
            deleted = table.vacuum(
                retention_hours=int(keep_s // 3600),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
        return len(deleted)


class DeltaMergeBase:
    """A version of the table."""

    def __init__(self, home: DeltaLakeTable, table: DeltaTable):
        self._home = home
        self._table = table

    def last_number(self, app_id: str) -> int:
        found = self._table.transaction_version(app_id)
        return -1 if found is None else found

    def names(self) -> list[str]:
        return list(self._actions())

    def _actions(self) -> dict[str, dict[str, Any]]:
        """The entries of the log by relative path. deltalake lists paths escaped, and takes them as they are."""
        rows = pa.table(self._table.get_add_actions()).to_pylist()
        return {unquote(row["path"]): row for row in rows}

    def replace(
        self, app_id: str, number: int, removed: Sequence[str], added: Sequence[DataFile]
    ) -> None:
        gone = set(removed)
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(
                path,
                True,
                _now_ms(),
                row["size_bytes"],
                {
                    name: partition_text(value)
                    for name, value in (row.get("partition") or {}).items()
                },
            )
            for path, row in self._actions().items()
            if path in gone
        ]
        assert len(actions) == len(gone), "files that the version does not have"
        note = {"headrace.merge": f"{len(removed)} files replaced by {len(added)}"}
        # Not even one retry by Delta itself: a commit of another engine may have brought rows with a
        # key that is merged here, and Delta would not see that.
        properties = CommitProperties(note, 0, [Transaction(app_id, number)])
        with self._home.refusals("the commit to", overtaken=True):
            _commit(self._table, [*actions, *map(_added, added)], properties)


def _commit(
    table: DeltaTable, actions: list[AddAction | RemoveAction], properties: CommitProperties
) -> None:
    table.create_write_transaction(
        actions,
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=properties,
    )


def _added(file: DataFile) -> AddAction:
    stats = json.dumps(file.stats)
    return AddAction(file.path, file.bytes, file.partition, _now_ms(), True, stats)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _note(offsets: Offsets) -> dict[str, Any]:
    return {NOTE: offsets.as_text()} if offsets else {}


def _offsets(table: DeltaTable) -> Offsets:
    """The ranges that the newest commit of a writer notes; commits of others may lie between.

    A compaction notes the ranges of the version that it read, and a writer may have committed since.
    A table never loses an offset, so what a compaction notes is only ever too little.
    """
    found = Offsets()
    for limit in (1, 20, None):
        for commit in table.history(limit):
            if NOTE in commit:
                found.add_all(Offsets.of_text(commit[NOTE]))
                if commit["operation"] != "OPTIMIZE":
                    return found
    return found
