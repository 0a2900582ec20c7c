"""What every lake table is, whatever its format: options, files, a description, the lock.

A :class:`Table` is a directory to which whole commits are added. Each commit carries the name and the
number of its writer (a query's id and its batch). A commit that exists is not added again, so a writer
that does not know whether it succeeded simply repeats itself.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import orjson
from msgspec import Meta

from headrace.errors import Conflict, InvalidArgument
from headrace.notation import BYTES
from headrace.spark.durable import locked
from headrace.spark.lake.offsets import Offsets
from headrace.spark.lake.stores import FileStore, TablePlace, explained, place_of
from headrace.spark.options import Given, option_name, wrong

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from headrace.spark.lake.merging import MergeRule
    from headrace.spark.lake.writing import FileWriter

KINDS = ("delta", "iceberg")
TARGET_FILE_BYTES = 128 * 1024 * 1024
COMPACT_EVERY = 20
"""Commits between two compactions by the writer itself: with a commit every ten seconds, three
minutes of small files."""
KEEP_S = 24 * 3600.0
"""How long a file that no reader should want any more is kept for one that still reads it."""

LOCK_WAIT_S = 60.0
ATTEMPTS = 20
"""Of a commit that another writer is faster than. In an object store there is no lock to wait for."""
ATTEMPT_PAUSE_S = 0.1
SECRETS = "lakeSecrets"
"""One option for all of ``storage.*`` and ``catalog.*`` on their way through Spark, which hides the values of
options whose names say "secret" wherever it shows a plan."""


OPTIONS = (
    "path", "kind", "partitionBy", "appId", "offsets", "mergeSchema", "targetFileBytes",
    "compactEvery", "compression", "mergeOn", "orderBy", "table", "catalog", "catalog.*", "storage.*",
    "checkpointLocation", "queryName",
)  # fmt: skip
"""The last two are Spark's own."""
_PREFIXES = {"catalog.": "catalog_properties", "storage.": "storage"}


# --- options --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Options:
    """All that can be chosen about a table and how it is written."""

    path: str
    kind: str = KINDS[0]
    partition_by: tuple[str, ...] = ()
    app_id: str | None = None
    """The writer's name. Default: the streaming query's id, which lives in its checkpoint."""
    offsets: bool = False
    """Keep the ranges of the columns topic, partition and offset, and refuse an offset twice."""
    merge_schema: bool = False
    """New columns are added to the table; without this they are an error."""
    target_file_bytes: Annotated[int, Meta(ge=64 * 1024), BYTES] = TARGET_FILE_BYTES
    compact_every: Annotated[int, Meta(ge=0, le=1_000_000)] = COMPACT_EVERY
    """How many commits there are from one compaction to the next; 0: never compact."""
    compression: Literal["zstd", "snappy", "lz4", "gzip", "none"] = "zstd"
    merge_on: tuple[str, ...] = ()
    """The key: a row replaces the row of the table with the same values of these columns."""
    order_by: str | None = None
    """With ``merge_on``: of two rows with the same key, the one with the greater value stays."""
    checkpoint_location: str | None = None
    """Of the query that writes: what it planned is synced before it is committed here."""
    table: str | None = None
    """Iceberg: the table's name in its catalog, as ``namespace.name``."""
    catalog: str | None = None
    """Iceberg: the name of a catalog in pyiceberg's configuration (.pyiceberg.yaml, the environment)."""
    catalog_properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Iceberg: ``catalog.*``, properties of pyiceberg, which win over those of the configuration."""
    storage: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Delta: ``storage.*``, the storage options of deltalake, which win over the environment."""

    @property
    def place(self) -> TablePlace:
        return place_of(self.path)

    @property
    def has_catalog(self) -> bool:
        """Whether the options name a catalog other than the SQLite file beside the table."""
        return self.catalog is not None or bool(self.catalog_properties)

    @property
    def rule(self) -> MergeRule:
        from headrace.spark.lake.merging import MergeRule

        return MergeRule(self.merge_on, self.order_by)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From a mapping: ``partition_by``, ``partitionBy`` and ``partitionby`` are the same."""
        grouped: dict[str, dict[str, str]] = {each: {} for each in _PREFIXES.values()}
        others: dict[str, Any] = {}
        for name, value in given.items():
            prefix = next((each for each in _PREFIXES if name.lower().startswith(each)), None)
            if name.lower() == SECRETS.lower():
                for group, values in orjson.loads(value).items():
                    grouped[group] |= values
            elif prefix is not None:
                grouped[_PREFIXES[prefix]][name[len(prefix) :]] = str(value)
            elif value is not None:
                others[name.replace("_", "")] = value
        found = Given(others)
        found.check_names(OPTIONS)
        values = found.read(cls)
        if "path" not in values:
            raise wrong("path", "a lake table needs one")
        values["kind"] = check_kind(values.get("kind", KINDS[0]))
        columns, app_id = values.get("partition_by", ()), values.get("app_id", "-")
        if len(set(columns)) < len(columns):
            raise wrong("partitionBy", "it names a column twice")
        if values.get("merge_on") and values.get("offsets"):
            raise wrong(
                "mergeOn", "a table that keeps offset ranges holds every row: it is not merged"
            )
        if values.get("order_by") and not values.get("merge_on"):
            raise wrong(
                "orderBy", "it says which row with the same key stays: give mergeOn as well"
            )
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", app_id):
            raise wrong("appId", f"{app_id!r} is not valid: use letters, digits, '.', '_' and '-'")
        if values["kind"] == "iceberg" and grouped["storage"]:
            raise wrong(
                f"storage.{min(grouped['storage'])}",
                "the files of an Iceberg table are reached as its catalog says: use catalog.s3.endpoint "
                "and the other properties of pyiceberg",
            )
        values |= {name: tuple(sorted(each.items())) for name, each in grouped.items()}
        return cls(**values)

    def as_options(self) -> dict[str, str]:
        """The same as texts, as they travel through Spark."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"path": self.place}
        values |= {name: ",".join(values[name]) for name in ("partition_by", "merge_on")}
        secrets = {name: dict(values.pop(name)) for name in _PREFIXES.values()}
        texts = {
            option_name(name): str(value) for name, value in values.items() if value is not None
        }
        if any(secrets.values()):
            texts[SECRETS] = orjson.dumps(secrets).decode()
        return texts


def check_kind(value: object) -> str:
    """The format of a table, as a user names it."""
    if str(value).lower() == "parquet":
        raise InvalidArgument(
            "Headrace does not write bare Parquet files, because they have no atomic commits: use "
            "delta, or iceberg. Both keep their rows in Parquet files",
            code="unsupported_format",
        )
    text = str(value).lower()
    if text not in KINDS:
        raise InvalidArgument(
            f"the format of a table is one of {', '.join(KINDS)}, not {value!r}",
            code="invalid_option",
        )
    return text


# --- files ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DataFile:
    """A Parquet file of a table. ``path`` is relative to where the table keeps its files."""

    path: str
    rows: int
    bytes: int
    partition: dict[str, str | None] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    """Least and greatest values and counts of nulls, as Delta writes them."""


@dataclass(frozen=True)
class WrittenFiles:
    """What a task wrote. Nothing of it is in the table before the commit."""

    files: list[DataFile] = field(default_factory=list)
    offsets: Offsets = field(default_factory=Offsets)
    doubled: Offsets = field(default_factory=Offsets)
    """Offsets that the task was given more than once."""
    deleted: str | None = None
    """Of an upsert: a file with the keys of rows that are deleted."""

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files] + ([self.deleted] if self.deleted else [])


@dataclass(frozen=True)
class Description:
    """A table as it is now."""

    path: str
    kind: str
    version: int
    files: int
    rows: int
    bytes: int
    partition_by: tuple[str, ...]
    offsets: Offsets
    schema: StructType

    def as_document(self) -> dict[str, Any]:
        return {
            **vars(self),
            "partition_by": list(self.partition_by),
            "schema": self.schema.simpleString(),
            "offsets": self.offsets.as_document(),
        }


@dataclass(frozen=True)
class StoredFile:
    """A file of a table, as its metadata describes it; of columns without statistics it says nothing."""

    name: str
    """As the table's :meth:`~Table.store` names it."""
    rows: int
    bytes: int
    partition: Mapping[str, Any] = field(default_factory=dict)
    """The values of columns that are not in the file."""
    least: Mapping[str, Any] = field(default_factory=dict)
    greatest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableSnapshot:
    """The files of a table at one moment, and the offsets that they hold."""

    files: list[StoredFile]
    offsets: Offsets


@dataclass(frozen=True)
class Compacted:
    """How many files a compaction replaced, and by how many."""

    removed: int = 0
    added: int = 0


class MergeBase(Protocol):
    """A version of a table, of which files can be exchanged for others."""

    def last_number(self, app_id: str) -> int:
        """The last number of this writer; -1 if it has none."""

    def names(self) -> list[str]:
        """Of its files, relative to ``files_root``."""

    def replace(
        self, app_id: str, number: int, removed: Sequence[str], added: Sequence[DataFile]
    ) -> None:
        """In one commit; :class:`Overtaken` if the table has changed since."""


# --- tables ---------------------------------------------------------------------------------------
class Table(ABC):
    """A table that exists, or that :meth:`prepare` creates."""

    kind: str
    keeps_partition_columns = False
    """Whether the files themselves hold the columns by which their directories are named."""

    def __init__(self, options: Options):
        self.options = options
        self.path = options.place

    @property
    def is_local(self) -> bool:
        return isinstance(self.path, Path)

    @property
    @abstractmethod
    def files_root(self) -> TablePlace:
        """Where executors write their files. Nothing there is in the table before its commit."""

    @abstractmethod
    def _store_at(self, place: TablePlace) -> FileStore:
        """The files below a place of the table, with the table's credentials."""

    def store(self) -> FileStore:
        """The files at ``files_root``."""
        return self._store_at(self.files_root)

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        """The columns, and those by which directories are named."""

    @abstractmethod
    def _create(self, schema: pa.Schema) -> None: ...

    @abstractmethod
    def _add_columns(self, schema: pa.Schema, names: Sequence[str]) -> None:
        """``names``: the columns of the schema that the table does not have."""

    @abstractmethod
    def _commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        """Add all files in one step, or raise :class:`Overtaken`."""

    @abstractmethod
    def _merge_base(self) -> AbstractContextManager[MergeBase]:
        """The table as it is when it is merged into."""

    @abstractmethod
    def paths(self) -> list[str]:
        """Every file of the table, absolute (an address in a store). Partition columns are read off the directories."""

    @abstractmethod
    def sizes(self) -> list[tuple[str, int]]:
        """The name of every file, as :meth:`store` knows it, and its bytes; in the order of names."""

    @abstractmethod
    def describe(self) -> Description: ...

    @abstractmethod
    def snapshot(self) -> TableSnapshot:
        """Files and offsets of one commit."""

    @abstractmethod
    def _compact(self, target_bytes: int) -> Compacted: ...

    @abstractmethod
    def vacuum(self, keep_s: float) -> int:
        """Delete files older than ``keep_s`` that belong to no commit; returns how many."""

    def prepare(self, schema: StructType) -> None:
        """Create the table, or check that rows of this schema can be added to it."""
        from headrace.spark.lake import schemas

        options = self.options
        schemas.check_columns(schema, options.partition_by, offsets=options.offsets)
        wanted = schemas.to_arrow(schema)
        if options.merge_on:
            options.rule.check(wanted)
        with self.locked(), explained(self.path):
            if not self.exists():
                self._refuse_foreign_files()
                self._create(wanted)
                return
            new = schemas.new_columns(*self.shape(), schema, options)
            if new:
                self._add_columns(wanted, new)

    def commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        """Add all files in one step; False when this number was committed before.

        On a disk the lock keeps other writers out. In a store, a commit fails if there was another one since
        the look at the last number and at the offsets; then both are looked at again. So two drivers of one query
        commit each number once there, too.
        """
        with self.locked(), explained(self.path):
            return self._repeated(partial(self._commit, app_id, number, written))

    @staticmethod
    def _repeated(commit: Callable[[], bool]) -> bool:
        """A commit that begins again when another writer was faster."""
        for attempt in range(1, ATTEMPTS):
            try:
                return commit()
            except Overtaken:
                time.sleep(ATTEMPT_PAUSE_S * attempt * random.random())
        return commit()

    def _refuse_foreign_files(self) -> None:
        """A directory with other files is not taken over: ``vacuum`` would delete them."""
        found = self._store_at(self.path).names()
        foreign = [name for name in sorted(found) if not name.startswith(("_", ".", "catalog.db"))]
        if foreign:
            raise InvalidArgument(
                f"{self.path} is not empty ({foreign[0]}) and no {self.kind} table: give another path",
                code="not_a_table",
            )

    def compact(self, target_bytes: int) -> Compacted:
        """Join files that are smaller. Readers see the old files or the new ones, never both.

        Writers may commit meanwhile. Another compaction may not: deltalake 1.6 accepts two that join
        the same files, and then the table holds their rows twice.
        """
        with self.locked("compaction.lock", wait_s=0.0), explained(self.path):
            return self._compact(target_bytes)

    def merge(self, app_id: str, number: int, changes: Sequence[WrittenFiles]) -> bool:
        """Replace and delete rows by their keys, in one commit; False when it was made before.

        No compaction may run meanwhile: it would bring back rows that were replaced. Another engine that
        commits meanwhile makes the merge begin again.
        """
        with self.locked("compaction.lock"), self.locked(), explained(self.path):
            return self._repeated(partial(self._merge, app_id, number, changes))

    def _merge(self, app_id: str, number: int, changes: Sequence[WrittenFiles]) -> bool:
        from headrace.spark.lake import schemas
        from headrace.spark.lake.merging import Merge

        store = self.store()
        with self._merge_base() as base:
            if base.last_number(app_id) >= number:
                return False
            schema, partition_by = self.shape()
            merge = Merge(
                self.options.rule,
                schemas.to_arrow(schema),
                store,
                () if self.keeps_partition_columns else partition_by,
            )
            writer = self.file_writer(schemas.to_arrow(schema), f"{number:09d}-merged")
            found = merge.exchange(base.names(), changes, writer.write_all)
            base.replace(app_id, number, found.removed, found.added)
        kept = {file.path for file in found.added}
        for name in {path for each in changes for path in each.paths} - kept:
            store.delete(name)  # it was rewritten, or held deleted keys
        return True

    def write_keys(self, keys: pa.Table, label: str) -> str:
        """Write the keys of deleted rows to a file that no commit names; returns its name."""
        import pyarrow.parquet as pq

        name, store = f"{label}-deleted-{uuid.uuid4().hex}.parquet", self.store()
        store.make_root()
        with explained(store.place):
            pq.write_table(keys, store.path(name), filesystem=store.filesystem)
        return name

    def file_writer(self, schema: pa.Schema, label: str) -> FileWriter:
        """A writer of Parquet files into the table's directory."""
        from headrace.spark.lake.writing import FileWriter

        options = self.options
        return FileWriter(
            self.store(),
            schema,
            options.partition_by,
            label=label,
            keep_partition_columns=self.keeps_partition_columns,
            offsets=options.offsets,
            target_file_bytes=options.target_file_bytes,
            compression=options.compression,
        )

    def forget(self, written: Sequence[WrittenFiles]) -> None:
        """Delete the files of a commit that failed, but none that is in the table after all."""
        store = self.store()
        kept = {store.name(path) for path in self.paths()} if self.exists() else set()
        for name in {path for each in written for path in each.paths} - kept:
            store.delete(name)

    @contextmanager
    def locked(self, name: str = "lock", *, wait_s: float | None = None) -> Iterator[None]:
        """One writer at a time, of whatever process; the lock goes with the process.

        The formats have their own ways with two writers at once. This is for the same writer twice:
        a driver that was replaced and still commits. It must not get between the look at the last
        number and the commit of the next. A store has no locks: see :meth:`commit`.
        """
        if not isinstance(self.path, Path):
            yield
            return
        doing = "writing to" if name == "lock" else "joining files of"
        busy = Conflict(
            f"another process is {doing} {self.path}: wait for it, or stop it",
            code="table_locked",
            retryable=True,
        )
        with locked(
            self.path / "_headrace" / name, busy, LOCK_WAIT_S if wait_s is None else wait_s
        ):
            yield


class Overtaken(Conflict, code="conflict", retryable=True):
    """Another writer committed between the look at a table and the commit. Nothing was written."""


def check_offsets(had: Offsets, written: Sequence[WrittenFiles], path: TablePlace) -> Offsets:
    """The ranges of a table after a commit; an offset that it would hold twice is refused."""
    new, twice = Offsets(), Offsets()
    for each in written:
        for found in (each.doubled, had.common(each.offsets), new.common(each.offsets)):
            twice.add_all(found)
        new.add_all(each.offsets)
    if twice:
        raise Conflict(
            f"{path} holds {', '.join(map(str, list(twice)[:5]))} already, and would hold it twice. "
            "Was the checkpoint lost? 'headrace archive run' continues where the table ends; any "
            "other query needs startingOffsets that are not in the table",
            code="offsets_overlap",
        )
    return new.add_all(had)
