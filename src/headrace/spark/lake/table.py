"""What every kind of lake table is, and what is said about one: options, files, descriptions.

A :class:`Table` is a directory to which whole commits are added. Each commit carries the name and the
number of whoever writes (a query's id and its batch), and a commit that is there already is not
added again: so a writer that does not know whether it succeeded simply repeats itself.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace.errors import Conflict, InvalidArgument, refused_by_disk
from headrace.spark.lake.disk import Disk
from headrace.spark.lake.offsets import Offsets

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

KINDS = ("parquet", "delta", "iceberg")
COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")
TARGET_FILE_BYTES = 128 * 1024 * 1024
COMPACT_EVERY = 20
"""Commits between two compactions by the writer itself: with a commit every ten seconds, three
minutes of small files."""
KEEP_S = 24 * 3600.0
"""How long a file that no reader should want any more is kept for one that still reads it."""

LOCK_WAIT_S = 60.0
LOCK_POLL_S = 0.02


# --- options --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Options:
    """All that can be chosen about a table and how it is written."""

    path: str
    kind: str = "parquet"
    partition_by: tuple[str, ...] = ()
    app_id: str | None = None
    """Who writes. Default: the streaming query's id, which lives in its checkpoint."""
    offsets: bool = False
    """Keep the ranges of the columns topic, partition and offset, and refuse an offset twice."""
    merge_schema: bool = False
    """New columns are added to the table; without this they are an error."""
    target_file_bytes: int = TARGET_FILE_BYTES
    compact_every: int = COMPACT_EVERY
    """Compact after every so many commits; 0: never."""
    compression: str = "zstd"
    checkpoint: str | None = None
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
        """From a mapping: ``partition_by``, ``partitionBy`` and ``partitionby`` are the same.

        ``checkpointLocation`` and ``queryName`` are Spark's own.
        """
        values: dict[str, Any] = {}
        catalog: dict[str, str] = {}
        checkpoint = None
        for name, value in given.items():
            if name.lower().startswith("catalog."):
                catalog[name[len("catalog.") :]] = str(value)
                continue
            plain = name.replace("_", "").lower()
            if plain == "checkpointlocation":
                checkpoint = value
                continue
            if plain == "queryname":
                continue
            if plain not in _BY_NAME:
                known = ", ".join(sorted(_BY_NAME.values()))
                raise InvalidArgument(
                    f"a lake table has no option {name!r}; it has {known} and catalog.*",
                    code="unknown_option",
                )
            values[_BY_NAME[plain]] = value
        if not values.get("path"):
            raise InvalidArgument("a lake table needs a path", code="invalid_option")
        return cls(
            path=str(values["path"]),
            kind=_choice("kind", values.get("kind", "parquet"), KINDS),
            partition_by=_names("partition_by", values.get("partition_by") or ()),
            app_id=_app_id(values.get("app_id")),
            offsets=_flag("offsets", values.get("offsets", False)),
            merge_schema=_flag("merge_schema", values.get("merge_schema", False)),
            target_file_bytes=_number(
                "target_file_bytes", values.get("target_file_bytes", TARGET_FILE_BYTES), 64 * 1024
            ),
            compact_every=_number("compact_every", values.get("compact_every", COMPACT_EVERY), 0),
            compression=_choice("compression", values.get("compression", "zstd"), COMPRESSIONS),
            checkpoint=None if checkpoint is None else str(checkpoint),
            table=None if values.get("table") is None else str(values["table"]),
            catalog=tuple(sorted(catalog.items())),
        )

    def as_options(self) -> dict[str, str]:
        """The same as texts, as they travel through Spark."""
        texts = {
            "path": str(self.directory),
            "kind": self.kind,
            "partitionBy": ",".join(self.partition_by),
            "offsets": str(self.offsets).lower(),
            "mergeSchema": str(self.merge_schema).lower(),
            "targetFileBytes": str(self.target_file_bytes),
            "compactEvery": str(self.compact_every),
            "compression": self.compression,
        }
        if self.checkpoint is not None:
            texts["checkpointLocation"] = self.checkpoint
        if self.app_id is not None:
            texts["appId"] = self.app_id
        if self.table is not None:
            texts["table"] = self.table
        return texts | {f"catalog.{name}": value for name, value in self.catalog}


_BY_NAME = {
    name.replace("_", ""): name
    for name in (
        "path",
        "kind",
        "partition_by",
        "app_id",
        "offsets",
        "merge_schema",
        "target_file_bytes",
        "compact_every",
        "compression",
        "table",
    )
}


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The absolute directory a user means; only file systems that rename and link are taken."""
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


def _choice(name: str, value: object, choices: Sequence[str]) -> str:
    text = str(value).lower()
    if text not in choices:
        raise InvalidArgument(
            f"{name} is one of {', '.join(choices)}, not {value!r}", code="invalid_option"
        )
    return text


def _names(name: str, value: object) -> tuple[str, ...]:
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else value  # type: ignore[assignment]
    names = tuple(text for text in (str(part).strip() for part in parts) if text)
    if len(set(names)) < len(names):
        raise InvalidArgument(f"{name} names a column twice", code="invalid_option")
    return names


def _flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"{name} is true or false, not {value!r}", code="invalid_option")
    return text == "true"


def _number(name: str, value: object, low: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = low - 1
    if number < low:
        raise InvalidArgument(
            f"{name} is a whole number of at least {low}, not {value!r}", code="invalid_option"
        )
    return number


def _app_id(value: object) -> str | None:
    if value is None:
        return None
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", text):
        raise InvalidArgument(
            f"app_id {text!r} is not valid: use letters, digits, '.', '_' and '-'",
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
    offsets: Offsets = field(default_factory=Offsets)
    stats: dict[str, Any] = field(default_factory=dict)
    """Least and greatest values and counts of nulls, as Delta writes them."""


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
            "path": self.path,
            "kind": self.kind,
            "version": self.version,
            "files": self.files,
            "rows": self.rows,
            "bytes": self.bytes,
            "partition_by": list(self.partition_by),
            "schema": self.schema.simpleString(),
            "offsets": self.offsets.as_document(),
        }


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    removed: int = 0
    added: int = 0
    rows: int = 0
    bytes: int = 0

    def and_joined(self, old: Sequence[DataFile], new: DataFile) -> Compacted:
        return Compacted(
            self.removed + len(old), self.added + 1, self.rows + new.rows, self.bytes + new.bytes
        )


# --- tables ---------------------------------------------------------------------------------------
class Table(ABC):
    """A table that exists, or is to be made by :meth:`prepare`."""

    kind: str
    suffix = ".parquet"
    keeps_partition_columns = False
    """Whether the files themselves hold the columns that their directories are named by."""

    def __init__(self, options: Options, disk: Disk | None = None):
        self.options = options
        self.path = options.directory
        self._home = self.path / "_headrace"
        self._disk = disk or Disk()

    @property
    @abstractmethod
    def files_root(self) -> Path:
        """Where executors write their files. Nothing there is in the table before its commit."""

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def prepare(self, schema: StructType) -> None:
        """Make the table, or check that rows of this schema can be added to it."""

    @abstractmethod
    def commit(self, app_id: str, number: int, files: Sequence[DataFile]) -> bool:
        """Add all files in one step; False when this number had been committed before."""

    @abstractmethod
    def last_number(self, app_id: str) -> int | None:
        """The number of the last commit by this writer."""

    @abstractmethod
    def data_files(self) -> list[DataFile]:
        """All files that are in the table."""

    @abstractmethod
    def exchange(self, old: Sequence[DataFile], new: DataFile) -> bool:
        """In one commit; False when somebody else has changed some of the old ones meanwhile."""

    @abstractmethod
    def shape(self) -> tuple[StructType, tuple[str, ...]]:
        """The columns, and those that directories are named by."""

    @abstractmethod
    def describe(self) -> Description: ...

    @abstractmethod
    def vacuum(self, keep_s: float) -> int:
        """Delete files that belong to no commit, older than so many seconds. Returns how many."""

    def unseen(self) -> list[str]:
        """Files of the table that those do not see who read the directory and not the log."""
        return []

    def paths(self) -> list[str]:
        """Every file of the table, absolute; partition columns are read off below files_root."""
        return [str(self.files_root / file.path) for file in self.data_files()]

    def compact(self, target_bytes: int, *, tiered: bool = False) -> Compacted:
        """Join small files. Whoever reads by the table's log sees the old ones or the new one."""
        from headrace.spark.lake import schemas
        from headrace.spark.lake.compaction import join_files, plan_groups

        schema, partition_by = self.shape()
        done = Compacted()
        for group in plan_groups(self.data_files(), target_bytes, tiered=tiered):
            try:
                joined = join_files(
                    self.files_root,
                    group,
                    schemas.to_arrow(schema),
                    partition_by,
                    suffix=self.suffix,
                    keep_partition_columns=self.keeps_partition_columns,
                    compression=self.options.compression,
                )
            except OSError as error:
                raise refused_by_disk(error) from error
            if not self.exchange(group, joined):
                (self.files_root / joined.path).unlink(missing_ok=True)
                break
            done = done.and_joined(group, joined)
        return done

    def forget(self, files: Sequence[DataFile]) -> None:
        """Delete files of a commit that failed, but none that is in the table after all."""
        kept = {file.path for file in self.data_files()} if self.exists() else set()
        for file in files:
            if file.path not in kept:
                (self.files_root / file.path).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One writer at a time, of whatever process; the lock goes with the process.

        The formats have their own ways with two writers at once. This is for the same writer twice:
        a driver that was replaced and still commits, which must not get between a look at the last
        number and the commit of the next.
        """
        self._disk.make_directory(self._home)
        handle = self._disk.open(self._home / "lock", write=True, create=True)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not self._disk.lock(handle):
                if time.monotonic() > deadline:
                    raise Conflict(
                        f"another process has been writing to {self.path} for {LOCK_WAIT_S:.0f} "
                        "seconds: wait for it, or stop it",
                        code="table_locked",
                        retryable=True,
                    )
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            handle.close()


def check_offsets(had: Offsets, files: Sequence[DataFile], path: Path) -> Offsets:
    """The ranges of a table after a commit; an offset that is there already is refused."""
    new, twice = Offsets(), Offsets()
    for file in files:
        twice.add_all(had.common(file.offsets)).add_all(new.common(file.offsets))
        new.add_all(file.offsets)
    if twice:
        raise Conflict(
            f"{path} holds {', '.join(map(str, list(twice)[:5]))} already, and would hold it twice. "
            "Was the checkpoint lost? 'headrace archive run' goes on where the table ends; any "
            "other query needs startingOffsets of what is not in the table",
            code="offsets_overlap",
        )
    return new.add_all(had)
