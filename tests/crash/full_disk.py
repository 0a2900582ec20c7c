"""A disk that is really full: a small tmpfs, and a file that takes what is left of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.runner import Victim

DISK_BYTES = 64 << 20


class NoDisk(Exception):
    """A file system of its own cannot be mounted here."""


@contextmanager
def small_disk(mount: Path, size: int = DISK_BYTES) -> Iterator[Path]:
    """A tmpfs at ``mount``; :class:`NoDisk` without the right to mount one."""
    mount.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoDisk(f"needs a file system of its own: {' '.join(command)}: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


class Ballast:
    """A file that takes all the room but for what it is told to leave."""

    def __init__(self, disk: Path):
        self._disk = disk
        self._path = disk / "ballast"

    def fill(self, leave: int = 0) -> None:
        with self._path.open("ab") as file:
            info = os.statvfs(self._disk)
            take = info.f_bavail * info.f_frsize - leave
            while take >= 4096:  # the broker takes some of it, too
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, take)
                except OSError:
                    take //= 2
                else:
                    take = 0 if leave else take // 2

    def remove(self) -> None:
        self._path.unlink()


def wait_for(what: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def told(victim: Victim, event: str, since: int, **fields: object) -> bool:
    """Whether the victim told of such an event after a moment."""
    return any(
        e["event"] == event
        and e["at"] > since
        and all(e.get(name) == value for name, value in fields.items())
        for e in reversed(list(victim.events))
    )
