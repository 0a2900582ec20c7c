"""Where the files of a table lie: a directory of this machine, or a prefix in a bucket.

::

    /lake/orders, file:///lake/orders      a directory: a :class:`~pathlib.Path`
    s3://bucket/lake/orders                an :class:`StoreAddress`, as are abfss:// and gs://

A :class:`FileStore` is the files under one place, whatever it is: written, read, listed and deleted through
``pyarrow``. Its file system comes from the library that also commits: ``deltalake`` for a Delta table,
``pyiceberg`` for an Iceberg table. So a table has one set of credentials and settings, under the names of that
library, and both libraries also take the usual ones of the environment (``AWS_ACCESS_KEY_ID``, …).

What differs between the two kinds of place:

- A file on a disk is synced with its directories before a commit names it. A store answers when an object is
  durable, and shows an object whole or not at all, so a write that is cut off leaves nothing that can be seen.
- A disk has locks. A store has none: there, writers are told apart by the formats' own conditional commits
  (:meth:`headrace.spark.lake.table.Table.commit`).

Errors of a store become errors of ours, which say what to do next. Their sentences hold no text of the store but
its code: an answer to a wrong signature repeats the key's id, and an address may have a token in its query.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from headrace.errors import Forbidden, HeadraceError, InvalidArgument, NotFound, StorageFailed
from headrace.files import SharedFiles
from headrace.spark.durable import sync

SCHEMES = ("s3", "s3a", "abfss", "abfs", "gs")
_DENIED = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|ExpiredToken|InvalidToken|AuthenticationFailed"
    r"|UserNotFound|AuthorizationFailure|InvalidClientTokenId|TokenRefreshRequired|invalid_grant"
    r"|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|INVALID_SIGNATURE"
    r"|status(?: code)?:? 40[13]|40[13] (?:Unauthorized|Forbidden)|[Pp]ermission ?[Dd]enied"
)
_NO_CREDENTIALS = re.compile(
    r"credential provider was not enabled|no providers in chain|[Nn]o credentials|NoCredentials"
    r"|169\.254\.\d+\.\d+|Failed to (?:find|load|fetch) .*(?:credential|token)|IMDS"
)
_NO_BUCKET = re.compile(r"NoSuchBucket|NO_SUCH_BUCKET|ContainerNotFound|FilesystemNotFound")
_NO_FILE = re.compile(
    r"NoSuchKey|NO_SUCH_KEY|BlobNotFound|Path does not exist|Object at location .* not found"
)
_BUSY = re.compile(
    r"SlowDown|SLOW_DOWN|ServiceUnavailable|SERVICE_UNAVAILABLE|status(?: code)?:? (?:429|50\d)"
)


class StoreForbidden(Forbidden, code="store_forbidden"):
    """The object store refuses these credentials, or there are none."""


class BucketNotFound(NotFound, code="bucket_not_found"):
    """The bucket or container does not exist."""


class StoreUnavailable(StorageFailed, code="store_unavailable", retryable=True):
    """The object store does not answer, or asks to come back later."""


# --- places ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoreAddress:
    """A prefix in a bucket. It is used like a directory's ``Path``: ``address / "data"``."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> StoreAddress:
        return StoreAddress(f"{self.uri}/{name}")

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[1]

    @property
    def bucket(self) -> str:
        return urlsplit(self.uri).netloc

    @property
    def key(self) -> str:
        """With the bucket in front, as pyarrow's file systems name it."""
        return self.uri.split("://", 1)[1]


TablePlace = Path | StoreAddress


def place_of(path: str | os.PathLike[str]) -> TablePlace:
    """The place that a user means: an absolute directory, or an address in an object store."""
    text = os.fspath(path)
    scheme = text.split("://", 1)[0] if "://" in text else ""
    if scheme in SCHEMES:
        parts = urlsplit(text)
        if parts.query or parts.fragment or not parts.netloc or not parts.path.strip("/"):
            raise InvalidArgument(
                f"{scheme}://{parts.netloc}{parts.path} is not an address of a table: write "
                f"{scheme}://BUCKET/PATH, and put keys and tokens into the environment",
                code="invalid_path",
            )
        return StoreAddress(f"{scheme}://{parts.netloc}/{parts.path.strip('/')}")
    return directory_of(text)


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The absolute directory that a user means."""
    text = os.fspath(path)
    if "://" in text or text.startswith("file:"):
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise InvalidArgument(
                f"{text!r} is not a directory, and not in an object store that Headrace knows "
                f"({', '.join(f'{each}://' for each in SCHEMES)})",
                code="invalid_path",
            )
        text = unquote(parts.path)
    return Path(os.path.abspath(os.path.expanduser(text)))


# --- files ----------------------------------------------------------------------------------------
class FileStore:
    """The files under one place. Names are relative to it, with slashes."""

    def __init__(self, place: TablePlace, filesystem: Any = None, root: str = ""):
        """``filesystem`` and ``root``, the place's path in it, are those of an address."""
        from pyarrow import fs

        self.place = place
        self.filesystem = fs.LocalFileSystem() if isinstance(place, Path) else filesystem
        self.root = str(place) if isinstance(place, Path) else root

    @property
    def is_local(self) -> bool:
        return isinstance(self.place, Path)

    def path(self, name: str) -> str:
        """The path of a file in the file system."""
        return f"{self.root}/{name}" if self.root and name else self.root or name

    def name(self, path: str) -> str:
        """The name of a file, from its path in the file system or its whole address."""
        for before in (str(self.place), f"file://{self.place}", self.root):
            if before and path.startswith(before + "/"):
                return path[len(before) + 1 :]
        return path

    def make_root(self) -> None:
        if isinstance(self.place, Path):
            SharedFiles().make_directory(self.place)

    def settle(self, names: Sequence[str]) -> None:
        """Returns when these files, and the directories that hold them, are durable."""
        if not isinstance(self.place, Path):
            return
        paths = [self.place / name for name in names]
        for path in paths:
            sync(path)
        for parent in {each for path in paths for each in path.parents}:
            if parent.is_relative_to(self.place):
                sync(parent)

    def delete(self, name: str) -> None:
        """A file that does not exist is none that must be deleted."""
        with explained(self.place):
            try:
                self.filesystem.delete_file(self.path(name))
            except FileNotFoundError:
                return
            except OSError as error:
                if not is_missing(error):
                    raise

    def names(self) -> list[str]:
        """Of the files and directories right here."""
        return [self.name(each.path) for each in self._infos(recursive=False)]

    def files(self) -> Iterator[tuple[str, float]]:
        """All files, also of directories: their names, and when they were written."""
        for each in self._infos(recursive=True):
            if each.is_file:
                yield self.name(each.path), (each.mtime_ns or 0) / 1e9

    def _infos(self, *, recursive: bool) -> list[Any]:
        from pyarrow import fs

        selector = fs.FileSelector(self.root, recursive=recursive, allow_not_found=True)
        with explained(self.place):
            found: list[Any] = self.filesystem.get_file_info(selector)
        return found


# --- errors ---------------------------------------------------------------------------------------
@contextmanager
def explained(place: TablePlace) -> Iterator[None]:
    """Errors of an object store that are raised inside become sentences; those of a disk stay as they are."""
    if isinstance(place, Path):
        yield
        return
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        found = store_error(place, error)
        if found is None:
            raise
        raise found from None  # its text may hold more than it should


def is_missing(error: BaseException) -> bool:
    """Whether a store says that a file does not exist."""
    return _NO_FILE.search(str(error)) is not None


def store_error(place: StoreAddress, error: BaseException) -> HeadraceError | None:
    """An error of a store as one of ours; None if it is not about the store."""
    text = _chain(error)
    if _NO_BUCKET.search(text):
        return BucketNotFound(
            f"the bucket of {place} does not exist: create it, or correct the address"
        )
    if _NO_CREDENTIALS.search(text) and not _BUSY.search(text):
        return StoreForbidden(
            f"there are no credentials for {place}: {_advice(place)}",
        )
    if (denied := _DENIED.search(text)) is not None:
        return StoreForbidden(
            f"{place}: the store refuses the credentials ({denied[0]}): {_advice(place)}"
        )
    if (busy := _BUSY.search(text)) is not None:
        return StoreUnavailable(
            f"{place}: the store asks to come back later ({busy[0]}); try again"
        )
    if isinstance(error, (OSError, TimeoutError)) or _is_about_transport(text):
        return StoreUnavailable(
            f"{place}: the store does not answer; see whether its address (AWS_ENDPOINT_URL, …) "
            "is right and whether it runs, and try again"
        )
    return None


def _advice(place: StoreAddress) -> str:
    scheme = place.uri[:2]
    names = {
        "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        "ab": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    }[scheme]
    return (
        f"set {names} in the environment of the driver and of the executors, and check their rights"
    )


def _is_about_transport(text: str) -> bool:
    words = (
        "error sending request",
        "tcp connect",
        "connection",
        "timed out",
        "timeout",
        "Generic",
    )
    return any(word.lower() in text.lower() for word in words)


def _chain(error: BaseException | None) -> str:
    """The text of an error and of those that caused it."""
    found: list[str] = []
    while error is not None and len(found) < 8:
        found.append(str(error))
        error = error.__cause__ or error.__context__
    return " | ".join(found)
