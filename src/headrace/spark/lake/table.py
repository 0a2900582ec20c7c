"""What every lake table is, whatever its format: options, files, a description, the lock.

A :class:`Table` is a directory to which whole commits are added. Each commit carries the name and the
number of its writer (a query's id and its batch). A commit that exists is not added again, so a writer
that does not know whether it succeeded simply repeats itself.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from msgspec import Meta

from headrace.errors import Conflict, InvalidArgument
from headrace.files import SharedFiles
from headrace.notation import BYTES
from headrace.spark.durable import locked
from headrace.spark.lake.offsets import Offsets
from headrace.spark.options import Given, option_name, wrong

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

KINDS = ("delta", "iceberg")
TARGET_FILE_BYTES = 128 * 1024 * 1024
COMPACT_EVERY = 20
"""Commits between two compactions by the writer itself: with a commit every ten seconds, three
minutes of small files."""
KEEP_S = 24 * 3600.0
"""How long a file that no reader should want any more is kept for one that still reads it."""

LOCK_WAIT_S = 60.0


OPTIONS = (
    "path", "kind", "partitionBy", "appId", "offsets", "mergeSchema", "targetFileBytes",
    "compactEvery", "compression", "table", "catalog.*",
    "checkpointLocation", "queryName",
)  # fmt: skip
"""The last two are Spark's own."""


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
    checkpoint_location: str | None = None
    """Of the query that writes: what it planned is synced before it is committed here."""
    table: str | None = None
    """Iceberg: the table's name in its catalog, as ``namespace.name``."""
    catalog: tuple[tuple[str, str], ...] = ()
    """Iceberg: the properties of a catalog other than the SQLite file beside the table."""

    @property
    def directory(self) -> Path:
        return directory_of(self.path)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From a mapping: ``partition_by``, ``partitionBy`` and ``partitionby`` are the same."""
        catalog: dict[str, str] = {}
        others: dict[str, Any] = {}
        for name, value in given.items():
            if name.lower().startswith("catalog."):
                catalog[name[len("catalog.") :]] = str(value)
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
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", app_id):
            raise wrong("appId", f"{app_id!r} is not valid: use letters, digits, '.', '_' and '-'")
        return cls(catalog=tuple(sorted(catalog.items())), **values)

    def as_options(self) -> dict[str, str]:
        """The same as texts, as they travel through Spark."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"path": self.directory, "partition_by": ",".join(self.partition_by)}
        del values["catalog"]
        texts = {
            option_name(name): str(value) for name, value in values.items() if value is not None
        }
        return texts | {f"catalog.{name}": value for name, value in self.catalog}


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The absolute directory that a user means. A table lies on a file system, not in a bucket."""
    text = os.fspath(path)
    if "://" in text or text.startswith("file:"):
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise InvalidArgument(
                f"{text!r} is not a directory: lake tables lie on a file system that the driver "
                "and all executors share (mount the bucket, or give a path)",
                code="invalid_path",
            )
        text = unquote(parts.path)
    return Path(os.path.abspath(os.path.expanduser(text)))


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
class Compacted:
    """How many files a compaction replaced, and by how many."""

    removed: int = 0
    added: int = 0


# --- tables ---------------------------------------------------------------------------------------
class Table(ABC):
    """A table that exists, or that :meth:`prepare` creates."""

    kind: str
    keeps_partition_columns = False
    """Whether the files themselves hold the columns by which their directories are named."""

    def __init__(self, options: Options):
        self.options = options
        self.path = options.directory
        self._home = self.path / "_headrace"
        self._disk = SharedFiles()

    @property
    @abstractmethod
    def files_root(self) -> Path:
        """Where executors write their files. Nothing there is in the table before its commit."""

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
    def commit(self, app_id: str, number: int, written: Sequence[WrittenFiles]) -> bool:
        """Add all files in one step; False when this number was committed before."""

    @abstractmethod
    def paths(self) -> list[str]:
        """Every file of the table, absolute. Partition columns are read off the directories."""

    @abstractmethod
    def describe(self) -> Description: ...

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
        with self.locked():
            if not self.exists():
                self._refuse_foreign_files()
                self._create(wanted)
                return
            new = schemas.new_columns(*self.shape(), schema, options)
            if new:
                self._add_columns(wanted, new)

    def _refuse_foreign_files(self) -> None:
        """A directory with other files is not taken over: ``vacuum`` would delete them."""
        found = self._disk.names(self.path) if self._disk.is_directory(self.path) else []
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
        with self.locked("compaction.lock", wait_s=0.0):
            return self._compact(target_bytes)

    def forget(self, written: Sequence[WrittenFiles]) -> None:
        """Delete the files of a commit that failed, but none that is in the table after all."""
        kept = set(self.paths()) if self.exists() else set()
        for path in [self.files_root / file.path for each in written for file in each.files]:
            if str(path) not in kept:
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, name: str = "lock", *, wait_s: float | None = None) -> Iterator[None]:
        """One writer at a time, of whatever process; the lock goes with the process.

        The formats have their own ways with two writers at once. This is for the same writer twice:
        a driver that was replaced and still commits. It must not get between the look at the last
        number and the commit of the next.
        """
        doing = "writing to" if name == "lock" else "joining files of"
        busy = Conflict(
            f"another process is {doing} {self.path}: wait for it, or stop it",
            code="table_locked",
            retryable=True,
        )
        with locked(self._home / name, busy, LOCK_WAIT_S if wait_s is None else wait_s):
            yield


def check_offsets(had: Offsets, written: Sequence[WrittenFiles], path: Path) -> Offsets:
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
