"""The data directory as a whole: its lock, and the mark of a failed sync.

The broker holds ``@lock`` with ``flock`` as long as it lives, and writes its name into it. The lock ends
with the process, so it is never stale. A broker whose sync failed leaves ``@suspect``.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import orjson

from headrace.clock import Clock
from headrace.errors import DirectoryLocked, StorageFailed
from headrace.files import Files, Handle
from headrace.forking import watch

logger = logging.getLogger("headrace.log")
LOCK = "@lock"
SUSPECT = "@suspect"
DELETED = "@deleted"
JOURNAL = "@subscriptions.journal"
TOPIC_SETTINGS = "topic.json"
HOLDER_WAIT_S = 1.0
"""How long to wait for the holder's name: it takes the lock first and then writes its name."""


class DataDirectory:
    def __init__(self, path: Path, files: Files, clock: Clock):
        self.path = path
        self._files, self._clock = files, clock
        self._lock: Handle | None = None

    def acquire(self, *, to_read: bool = False) -> None:
        """Take the lock, or raise an error that names its holder. Nothing else is touched before that.

        ``to_read``: also accept a read-only medium.
        """
        path = self.path / LOCK
        writable = True
        try:
            try:
                self._files.make_directory(self.path)
                handle = self._files.open(path, write=True, create=True)
            except OSError:
                if not to_read or not self._files.exists(path):
                    raise
                handle, writable = self._files.open(path), False
        except OSError as error:
            raise StorageFailed(
                f"the data directory {self.path} cannot be used: {error.strerror or error}",
                code="directory_unusable",
                retryable=False,
            ) from error
        if not self._files.lock(handle):
            holder = self._holder(handle)
            handle.close()
            raise DirectoryLocked(
                f"the data directory {self.path} is in use by {holder}; stop it first, or use "
                "another directory"
            )
        self._lock = handle
        watch(self)
        if writable:
            self._name_holder(handle)
        if writable and not to_read:
            self._make_private()

    def _make_private(self) -> None:
        """Earlier versions made directories that every user of the machine could read."""
        try:
            changed = self._files.make_private(self.path)
        except OSError as error:
            logger.warning(
                "other users may be able to read the data directory %s: %s", self.path, error
            )
            return
        if changed:
            logger.warning(
                "other users could read the data directory %s; now only its owner can (%d files and "
                "directories changed)",
                self.path,
                changed,
            )

    def _name_holder(self, handle: Handle) -> None:
        content = orjson.dumps(
            {
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "started_ms": self._clock.now_ms(),
            }
        )
        try:
            # Do not empty the file first: on a full disk its space would be lost.
            self._files.write_at(handle, 0, [content])
            self._files.truncate(handle, len(content))
        except OSError as error:
            logger.warning("%s does not name its holder: %s", self.path / LOCK, error)

    def _holder(self, handle: Handle) -> str:
        """The process that holds the lock; waits a moment if it has only just taken it."""
        deadline = time.monotonic() + HOLDER_WAIT_S
        while True:
            try:
                content = orjson.loads(self._files.read_at(handle, 0, 4096))
                name = f"process {content['pid']} on {content['host']}"
                if content["host"] != os.uname().nodename or _is_alive(content["pid"]):
                    return name
            except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
                name = "another process"
            if time.monotonic() >= deadline:
                return name
            time.sleep(0.01)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def forked(self) -> None:
        """The lock belongs to the parent alone: it must end with the parent, even if children live on."""
        self.release()

    @property
    def is_suspect(self) -> bool:
        return self._files.exists(self.path / SUSPECT)

    def mark_suspect(self, why: str) -> None:
        """Leave a mark for the next start. On a failing disk this may fail too; that is logged."""
        try:
            self._files.replace(self.path / SUSPECT, [why.encode()])
        except OSError as error:
            logger.critical("the data directory could not be marked as suspect: %s", error)

    def clear_suspect(self) -> None:
        if self.is_suspect:
            self._files.remove(self.path / SUSPECT)
            self._files.sync_directory(self.path)


def _is_alive(pid: int) -> bool:
    """Whether the process exists. The lock file of a killed broker names a process that does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
