"""Files that survive a power cut, and locks that do not survive their process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.files import SharedFiles

LOCK_POLL_S = 0.02


def sync(path: Path) -> None:
    """Returns when the bytes of a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, busy: HeadraceError, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of this file; raise ``busy`` if another process holds it for longer than ``wait_s``."""
    files = SharedFiles()
    files.make_directory(path.parent)
    handle = files.open(path, write=True, create=True)
    try:
        deadline = time.monotonic() + wait_s
        while not files.lock(handle):
            if time.monotonic() > deadline:
                raise busy
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        handle.close()
