"""The disk, as an argument of constructors: only this module touches files of a data directory.

All durable data goes through one :class:`Files`, so that tests can make the Nth call fail
(``tests.fakes.FaultyFiles``) or keep only the bytes that were synced (``tests.fakes.SimulatedFiles``).

Rules:
- ``write_at`` writes everything or raises; only ``write_at`` continues a short write.
- A rename is durable only after ``sync_directory`` of its directory; ``replace`` does both.
- A :class:`Handle` closes its descriptor with its last reference, so a reader that still has a handle
  never reads from a recycled descriptor.
- Files and directories are for their owner alone: they hold messages, and whoever can open the lock can keep
  a broker from starting.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

IOV_MAX = 1024
DiskMethod = Literal["auto", "threads", "io_uring"]
"""How commits are written (``log/uring.py``)."""
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
_AT_ONCE: int = getattr(os, "RWF_NOWAIT", 0)


def _sync_all(fd: int) -> None:
    """For systems without ``fdatasync``. On macOS ``fsync`` alone leaves data in the drive's memory."""
    if _FULL_SYNC is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, _FULL_SYNC)


_sync: Callable[[int], None] = getattr(os, "fdatasync", _sync_all)


@cache
def machine() -> str | None:
    """An id of the running system, shared by all its containers and by no other system; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


class Handle:
    """An open file. It is closed by ``close`` or with its last reference."""

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, fd: int, path: Path):
        self.fd = fd
        self.path = path

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class NotAtHand(Exception):
    """To read this may take a disk's time. ``unknown``: the file system does not tell whether it does."""

    def __init__(self, *, unknown: bool = False):
        super().__init__("this is not in memory")
        self.unknown = unknown


class Files:
    """The real file system."""

    file_mode = 0o600
    directory_mode = 0o700

    # --- files -----------------------------------------------------------------------------
    def open(self, path: Path, *, write: bool = False, create: bool = False) -> Handle:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        return Handle(os.open(path, flags, self.file_mode), path)

    def size(self, handle: Handle) -> int:
        return os.fstat(handle.fd).st_size

    def identity(self, handle: Handle) -> str:
        """An id of the file that does not depend on its path."""
        status = os.fstat(handle.fd)
        return f"{status.st_dev}:{status.st_ino}"

    def read_at(self, handle: Handle, position: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        data = os.pread(handle.fd, length, position)
        if len(data) == length or not data:
            return data
        parts = [data]
        got = len(data)
        while got < length:
            data = os.pread(handle.fd, length - got, position + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def read_at_once(self, handle: Handle, position: int, length: int) -> bytes:
        """``read_at`` from the system's page cache; :class:`NotAtHand` if the bytes are not there. Some file
        systems (tmpfs) and macOS do not tell."""
        buffer = bytearray(length)
        try:
            if _AT_ONCE:
                got = os.preadv(handle.fd, [buffer], position, _AT_ONCE)
                if got == length:
                    return bytes(buffer)
                if position + got >= self.size(
                    handle
                ):  # somebody has cut the file: there is no more to wait for
                    return bytes(buffer[:got])
        except OSError as error:  # any other error is that of the read that waits, too
            raise NotAtHand(unknown=error.errno == errno.EOPNOTSUPP) from None
        raise NotAtHand(unknown=not _AT_ONCE)

    def write_at(self, handle: Handle, position: int, buffers: Sequence[bytes]) -> int:
        """Write all buffers one after the other, starting at ``position``."""
        total = 0
        for start in range(0, len(buffers), IOV_MAX):
            part = buffers[start : start + IOV_MAX]
            size = sum(map(len, part))
            written = os.pwritev(handle.fd, part, position + total)
            if written < size:
                rest = b"".join(part)
                while written < size:
                    more = os.pwrite(handle.fd, rest[written:], position + total + written)
                    if more == 0:
                        raise OSError(errno.EIO, "write made no progress", str(handle.path))
                    written += more
            total += size
        return total

    def sync(self, handle: Handle) -> None:
        _sync(handle.fd)

    def allocate(self, handle: Handle, position: int, length: int) -> None:
        """Reserve space, so that writes in it do not fail on a full disk and do not grow the file.

        If the system cannot do that (macOS), a write may fail on a full disk. It is then undone like any
        other failed write.
        """
        if _allocate is not None:
            _allocate(handle.fd, position, length)

    def truncate(self, handle: Handle, size: int) -> None:
        os.ftruncate(handle.fd, size)

    def lock(self, handle: Handle) -> bool:
        """Take the exclusive lock for as long as the handle is open; False if another process holds it."""
        try:
            fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # --- directories -----------------------------------------------------------------------
    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def make_directory(self, path: Path) -> None:
        """Create the directory and its parents, durably."""
        missing = []
        probe = path
        while not probe.exists():
            missing.append(probe)
            probe = probe.parent
        for directory in reversed(missing):
            directory.mkdir(self.directory_mode, exist_ok=True)
            self.sync_directory(directory.parent)

    def make_directories(self, parent: Path, names: Iterable[str]) -> set[str]:
        """Create directories in one that exists, durably, with one sync. Returns those that are new."""
        made = set()
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(parent / name, self.directory_mode)
                made.add(name)
        self.sync_directory(parent)
        return made

    def make_private(self, path: Path) -> int:
        """Take the rights of other users from a directory and all that is in it; returns how many had any.

        Nobody gets past a directory that is private already, so nothing in it is looked at.
        """
        path = path.resolve()
        if not _take_rights(path):
            return 0
        changed = 1
        for folder, directories, names in os.walk(path):
            for name in (*directories, *names):
                changed += _take_rights(Path(folder, name))
        return changed

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def file_size(self, path: Path) -> int:
        return path.stat().st_size

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    # --- made of the above -----------------------------------------------------------------
    def read_file(self, path: Path) -> bytes:
        handle = self.open(path)
        try:
            return self.read_at(handle, 0, self.size(handle))
        finally:
            handle.close()

    def replace(self, path: Path, content: Iterable[bytes]) -> None:
        """Replace the file at ``path``. A crash leaves the whole old file or the whole new one."""
        self.rename(self.write_temporary(path, content), path)
        self.sync_directory(path.parent)

    def write_temporary(self, path: Path, content: Iterable[bytes]) -> Path:
        """The first half of ``replace``: write and sync a file next to ``path``. Returns its path.

        A list is written at once; an iterator is written item by item, so it need not fit in memory.
        """
        temporary = path.with_name(path.name + ".tmp")
        handle = self.open(temporary, write=True, create=True)
        try:
            self.truncate(handle, 0)
            position = 0
            for buffers in [content] if isinstance(content, Sequence) else ([c] for c in content):
                position += self.write_at(handle, position, buffers)
            self.sync(handle)
        except OSError:
            # Half a file is useless, and on a full disk it takes the last space.
            with suppress(OSError):
                self.remove(temporary)
            raise
        finally:
            handle.close()
        return temporary


class SharedFiles(Files):
    """For tables, which other users and programs read: the rights are those of the umask."""

    file_mode = 0o666
    directory_mode = 0o777


def _take_rights(path: Path) -> bool:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode) or not mode & 0o077:
        return False
    path.chmod(stat.S_IMODE(mode) & 0o700)
    return True


def resident_bytes() -> int:
    """The memory of this process that is in RAM; -1 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return -1
