"""The access file: ``@access.json`` in the data directory, for its owner alone (0600).

::

    {"format": 1, "sha256": "…", "rules": {"version": 7, "users": […], "tokens": […], …}}

The checksum is over the bytes of ``rules`` as they stand in the file: a flipped bit never changes a right
silently. Use the commands to change it (``headrace users``, ``headrace tokens``); they also work on
a data directory, with or without a broker that runs on it.

A change is written to a new file, synced, and renamed over the old one. Whoever changes it holds a lock
(``@access.lock``) from reading to writing, so a broker and a command never undo each other's change.

Rejected: rules in the journal of subscriptions (they must exist before the broker is opened, and a damaged
journal must not change who may do what); a file that people edit (a slip of the finger would be a right).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.access.rules import AccessRules
from headrace.errors import DataCorrupt, HeadraceError, InvalidArgument, StorageFailed
from headrace.files import Files, Handle

NAME = "@access.json"
LOCK = "@access.lock"
LOCK_WAIT_S = 5.0
FILE_BYTES_MAX = 256 << 20
FORMAT = 1
Stamp = tuple[int, int, int]
"""(inode, size, time of change): differs when the file was replaced."""
Change = Callable[[AccessRules], AccessRules]
InThread = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread."""


class RuleStore(Protocol):
    """Where the rules of a broker are kept: in a file, or in a cluster (``cluster/access.py``)."""

    def stamp(self) -> object:
        """Differs when the rules have changed; None if there are none."""

    def read(self) -> AccessRules | None:
        """:class:`DataCorrupt` if they cannot be trusted."""

    def content(self) -> bytes:
        """As an access file; empty if there are none."""

    async def change_in(self, in_thread: InThread, change: Change) -> AccessRules:
        """Change the rules; what takes long is done in threads."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    sha256: str
    rules: msgspec.Raw


class AccessFile:
    """``path`` None: the rules of a broker in memory, which end with it."""

    def __init__(self, data_dir: Path | None, files: Files | None = None):
        self._files = files or Files()
        self.path = None if data_dir is None else data_dir / NAME
        self._memory: AccessRules | None = None

    def stamp(self) -> Stamp | None:
        """None if there is no file."""
        if self.path is None:
            return None if self._memory is None else (0, 0, self._memory.version)
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self) -> AccessRules | None:
        """The rules; None if there is no file. :class:`DataCorrupt` if they cannot be trusted."""
        if self.path is None:
            return self._memory
        if self.stamp() is None:
            return None
        try:
            if self._files.file_size(self.path) > FILE_BYTES_MAX:
                raise _unreadable(self.path, "it is too large")
            return _decode(self._files.read_file(self.path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        except (msgspec.MsgspecError, HeadraceError, ValueError, RecursionError) as error:
            raise _unreadable(self.path, str(error)) from error

    def content(self) -> bytes:
        """The file as it is, for a backup; empty if there is none."""
        return (
            b"" if self.stamp() is None or self.path is None else self._files.read_file(self.path)
        )

    async def change_in(self, in_thread: InThread, change: Change) -> AccessRules:
        rules: AccessRules = await in_thread(self.change, change)
        return rules

    def change(self, change: Change) -> AccessRules:
        """Read, change and write the rules; nobody else can in between. Blocks: call it in a thread."""
        if self.path is None:
            self._memory = change(self._memory or AccessRules())
            return self._memory
        lock = self._lock()
        try:
            rules = change(self.read() or AccessRules())
            try:
                self._write(rules)
            except OSError as error:
                raise StorageFailed(
                    f"{self.path} cannot be written: {error.strerror or error}"
                ) from error
            return rules
        finally:
            lock.close()

    def _lock(self) -> Handle:
        assert self.path is not None
        deadline = time.monotonic() + LOCK_WAIT_S
        try:
            self._files.make_directory(self.path.parent)
            handle = self._files.open(self.path.with_name(LOCK), write=True, create=True)
            os.fchmod(handle.fd, 0o600)
            _give_to_owner(handle)
        except OSError as error:
            raise StorageFailed(
                f"{self.path.parent} cannot be written: {error.strerror or error}", retryable=False
            ) from error
        while not self._files.lock(handle):
            if time.monotonic() > deadline:
                handle.close()
                raise StorageFailed(f"another process is changing {self.path}", code="access_busy")
            time.sleep(0.01)
        return handle

    def _write(self, rules: AccessRules) -> None:
        assert self.path is not None
        temporary = self.path.with_name(NAME + ".tmp")
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        # It is private before anything is in it.
        handle = Handle(
            os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600),
            temporary,
        )
        _give_to_owner(handle)
        handle.close()
        self._files.replace(self.path, [encode_file(rules)])


def _give_to_owner(handle: Handle) -> None:
    """A file that root makes belongs to the owner of the directory, as whom the broker runs."""
    if os.geteuid() == 0:
        owner = os.stat(handle.path.parent)
        os.fchown(handle.fd, owner.st_uid, owner.st_gid)


def encode_file(rules: AccessRules) -> bytes:
    """The content of an access file."""
    content = msgspec.json.format(msgspec.json.encode(rules), indent=1)
    envelope = _Envelope(FORMAT, hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
    return msgspec.json.encode(envelope) + b"\n"


def _decode(data: bytes) -> AccessRules:
    envelope = msgspec.json.decode(data, type=_Envelope)
    if envelope.format != FORMAT:
        raise InvalidArgument(f"its format is {envelope.format}, and this version reads {FORMAT}")
    content = bytes(envelope.rules)
    if hashlib.sha256(content).hexdigest() != envelope.sha256:
        raise InvalidArgument("its checksum is wrong")
    return msgspec.json.decode(content, type=AccessRules).check()


def _unreadable(path: Path, why: str) -> DataCorrupt:
    return DataCorrupt(
        f"the access file {path} cannot be used: {why}; restore it from a backup, or remove it and "
        "make the users again ('headrace users add … --data DIR')",
        code="access_unreadable",
    )
