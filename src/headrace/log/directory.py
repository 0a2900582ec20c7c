"""The data directory as a whole: its lock, how the last broker ended, and the mark of a failed sync.

The broker holds ``@lock`` with ``flock`` as long as it lives, and writes its name into it. The lock ends
with the process, so it is never stale.

``@run`` says how the last broker ended. It says *running* from before the first write of a start until the
end of a clean stop, which replaces it with *stopped* and the end offset of each partition. So a broker that
was killed, or whose sync failed, leaves *running* behind, even if its disk takes no more writes by then. The
next start then does not trust what the page cache shows of unsynced writes, unless the machine was started
again since: then the cache was read from the disk. A missing or damaged ``@run`` is as good as *running*.

A broker whose sync failed also tries to leave ``@suspect``, with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import orjson

from headrace.clock import Clock
from headrace.errors import DataCorrupt, DirectoryLocked, StorageFailed
from headrace.files import Files, Handle, machine
from headrace.forking import watch
from headrace.log.sealed import seal, unseal
from headrace.log.witness import Ends

logger = logging.getLogger("headrace.log")
LOCK = "@lock"
RUN = "@run"
SUSPECT = "@suspect"
RESTORING = "@restoring"
"""Only while a backup is restored (``backup/restoring.py``): nothing starts on half of it."""
DELETED = "@deleted"
JOURNAL = "@subscriptions.journal"
TOPIC_SETTINGS = "topic.json"
HOLDER_WAIT_S = 1.0
"""How long to wait for the holder's name: it takes the lock first and then writes its name."""


class LastRun(NamedTuple):
    """What ``@run`` says about the last broker."""

    clean: bool = False
    """It stopped, and everything is on disk."""
    machine: str | None = None
    """The boot of the system that it ran on."""
    ends: Ends = {}  # noqa: RUF012 - nobody changes it
    """How far each partition had reached at the last clean stop, of this broker or an earlier one."""

    @property
    def may_have_failed(self) -> bool:
        """Whether the page cache may show bytes that are not on disk."""
        return not self.clean and self.machine in (None, machine())


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
        if self._files.exists(self.path / RESTORING):
            handle.close()
            raise StorageFailed(
                f"the data directory {self.path} holds a restore that was interrupted; remove it, and "
                "restore the backup again",
                code="restore_unfinished",
                retryable=False,
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

    # --- how it ended -----------------------------------------------------------------------
    def last_run(self) -> LastRun | None:
        """None if there is no ``@run``: no broker was here, or one of an earlier version."""
        try:
            return parse_run(self._files.read_file(self.path / RUN))
        except FileNotFoundError:
            return None
        except DataCorrupt as error:
            logger.error("%s is not used: %s", self.path / RUN, error)
            return LastRun()

    def begin_run(self, ends: Ends) -> None:
        """From now on the end is not clean until ``end_run`` says so."""
        try:
            self._write_run(False, ends)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # No room. Without the file the end counts as not clean, too.
            if self._files.exists(self.path / RUN):
                self._files.remove(self.path / RUN)
                self._files.sync_directory(self.path)

    def end_run(self, ends: Ends, *, clean: bool = True) -> None:
        """All that was accepted is on disk, and these are the ends of the partitions."""
        try:
            self._write_run(clean, ends)
        except OSError as error:  # the next start checks more than it had to
            logger.warning("the clean stop could not be recorded in %s: %s", self.path / RUN, error)

    def _write_run(self, clean: bool, ends: Ends) -> None:
        document = {
            "state": "stopped" if clean else "running",
            "machine": machine(),
            "ends": {
                topic: {"incarnation": incarnation, "offsets": offsets}
                for topic, (incarnation, offsets) in ends.items()
            },
        }
        self._files.replace(self.path / RUN, [seal(document)])

    @property
    def is_suspect(self) -> bool:
        return self._files.exists(self.path / SUSPECT)

    def mark_suspect(self, why: str) -> None:
        """Leave a mark for the next start.

        On a failing disk its sync may fail too; ``@run`` then has to do. But the mark is left unsynced: it
        is there for as long as the page cache is, which is as long as it is needed.
        """
        path = self.path / SUSPECT
        try:
            self._files.replace(path, [why.encode()])
        except OSError as error:
            logger.critical("the data directory could not be marked as suspect: %s", error)
            with contextlib.suppress(OSError):
                self._files.open(path, write=True, create=True).close()

    def clear_suspect(self) -> None:
        if self.is_suspect:
            self._files.remove(self.path / SUSPECT)
            self._files.sync_directory(self.path)


def parse_run(raw: bytes) -> LastRun:
    """The content of ``@run``; :class:`DataCorrupt` if it is damaged."""
    document = unseal(raw)
    try:
        ends = {
            str(topic): (int(item["incarnation"]), [int(offset) for offset in item["offsets"]])
            for topic, item in document["ends"].items()
        }
        return LastRun(document["state"] == "stopped", document["machine"], ends)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataCorrupt(f"it makes no sense ({error!r})") from None


def _is_alive(pid: int) -> bool:
    """Whether the process exists. The lock file of a killed broker names a process that does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
