"""Commits without a thread: the loop hands a write and its sync to the kernel (io_uring, Linux 5.6 and later).

::

    the loop                                         the kernel
      │  CommitJob.request(): file, position, bytes     │
      │── write ──linked──▶ fdatasync ────────────────▶ │  the sync begins only if all bytes were written
      │  other work; nobody hands the GIL over          │
      │◀───────────── the ring's descriptor is readable │
      │  CommitJob.stored(), done()                     │

A disk thread costs a commit two hand-overs of the GIL, each of which may wait for 5 ms of other Python code.

Rules:
- Only a plain commit goes through the ring: its file is open and has room. All other work (a new segment, more
  room, compression, a sync alone) is done in a thread, as without a ring.
- A write that fails or is short cancels its sync. Then a thread does the whole commit again, at the same position:
  it continues, undoes and reports as always. So a failed write is handled in one place.
- A *sync* that fails is :class:`SyncFailed` and is never tried again.
- The bytes of a commit are kept until the kernel has answered.
- Rejected: a compiled extension (the users of a wheel for all machines have no compiler); machines other than x86-64
  (Python cannot ask for the order of two reads of memory, which x86 keeps by itself).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from headrace.clock import Loop
from headrace.errors import InvalidArgument
from headrace.files import Files
from headrace.log.workers import CommitJob, Done, SyncFailed, Workers

logger = logging.getLogger("headrace.log")
COMMITS_MAX = 128
"""Commits that the ring has at a time; further ones go to the threads. Each takes two entries."""
_SETUP, _ENTER = 425, 426
_NOP, _WRITEV, _FSYNC = 0, 2, 3
_LINK, _ASYNC = 1 << 2, 1 << 4
_DATASYNC = 1
_GETEVENTS = 1
_FEATURES = 0b1111
"""One mapping for both queues, no dropped answers, stable submission; the last came with Linux 5.6."""
_AT_SQES = 0x1000_0000
_SQE = struct.Struct("<BBHiQQIIQQQQ")
_CQE = struct.Struct("<QiI")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_char_p), ("length", ctypes.c_size_t))


class KernelRing:
    """The two queues that are shared with the kernel. One thread at a time uses them."""

    def __init__(self, entries: int = 2 * COMMITS_MAX):
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, "io_uring is used on Linux with x86-64 only")
        # With the GIL: a submission takes microseconds, and to get the GIL back may take milliseconds.
        library = ctypes.PyDLL(None, use_errno=True)
        self._syscall: Any = library.syscall
        self._syscall.restype = ctypes.c_long
        parameters = (ctypes.c_uint32 * 30)()
        self.fd = self._call(_SETUP, entries, parameters)
        try:
            if parameters[5] & _FEATURES != _FEATURES:
                raise OSError(errno.ENOSYS, "io_uring of Linux 5.6 or later is needed")
            submit, complete = parameters[10:17], parameters[20:26]
            size = max(submit[6] + 4 * parameters[0], complete[5] + _CQE.size * parameters[1])
            self._ring = mmap.mmap(self.fd, size)
            self._sqes = mmap.mmap(self.fd, _SQE.size * parameters[0], offset=_AT_SQES)
        except BaseException:
            os.close(self.fd)
            raise
        for mapping in (self._ring, self._sqes):
            mapping.madvise(mmap.MADV_DONTFORK)
        self._words = memoryview(self._ring)[: size // 4 * 4].cast("I")
        self._head, self._tail, self._mask = (
            submit[0] // 4,
            submit[1] // 4,
            self._words[submit[2] // 4],
        )
        for number in range(parameters[0]):
            self._words[submit[6] // 4 + number] = number
        self._answered, self._answers = complete[0] // 4, complete[1] // 4
        self._answers_mask, self._cqes = self._words[complete[2] // 4], complete[5]

    def _call(self, *arguments: Any) -> int:
        result: int = self._syscall(*arguments)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def submit(self, *entries: tuple[int, int, int, int, int, int, int, int]) -> int:
        """Hand (operation, flags, fd, position, address, length, options, number) over. Returns how many of them
        the kernel took; it does not see the others."""
        words, tail = self._words, self._words[self._tail]
        for entry in entries:
            operation, flags, fd, position, address, length, options, number = entry
            _SQE.pack_into(
                self._sqes, (tail & self._mask) * _SQE.size,
                operation, flags, 0, fd, position, address, length, options, number, 0, 0, 0,
            )  # fmt: skip
            tail = (tail + 1) & 0xFFFF_FFFF
        words[self._tail] = tail
        try:
            taken = self._call(_ENTER, self.fd, len(entries), 0, 0, None, 0)
        except OSError:
            taken = 0
        if taken < len(entries):
            words[self._tail] = words[self._head]
        return taken

    def answers(self) -> list[tuple[int, int]]:
        """(number, result) of what is finished."""
        words = self._words
        head, tail = words[self._answered], words[self._answers]
        found = []
        while head != tail:
            at = self._cqes + (head & self._answers_mask) * _CQE.size
            found.append(_CQE.unpack_from(self._ring, at)[:2])
            head = (head + 1) & 0xFFFF_FFFF
        words[self._answered] = head
        return found

    def wait(self) -> None:
        """Until something is finished."""
        with suppress(InterruptedError):
            self._call(_ENTER, self.fd, 0, 1, _GETEVENTS, None, 0)

    def close(self) -> None:
        self._words.release()
        self._ring.close()
        self._sqes.close()
        os.close(self.fd)


class _RingCommit(NamedTuple):
    job: CommitJob
    done: Done
    path: object
    kept: object
    """What the kernel reads from."""
    bytes: int
    sync: bool
    started: float


class RingWorkers(Workers):
    """Threads and a ring. ``OSError`` where the system does not permit one."""

    method = "io_uring"

    def __init__(self, loop: Loop, count: int = 8):
        super().__init__(loop, count)
        self._ring = KernelRing()
        try:
            self._ring.submit((_NOP, 0, -1, 0, 0, 0, 0, 0))
            if self._ring.answers() != [(0, 0)]:
                raise OSError(errno.ENOSYS, "io_uring does not answer")
            loop.add_reader(self._ring.fd, self._answered)  # type: ignore[attr-defined]
        except BaseException:
            self._ring.close()
            raise
        self._commits: dict[int, _RingCommit] = {}
        self._failed: set[int] = set()
        """Of those, the commits whose writes failed."""
        self._next = self._owed = 0
        """The number of the next commit, and how many answers the kernel owes."""
        self._is_usable, self._is_closed = True, False

    def commit(self, job: CommitJob, done: Done) -> None:
        write = job.request() if self._is_usable and len(self._commits) < COMMITS_MAX else None
        if write is None:
            self.submit(job.run, done)
            return
        buffers: Sequence[bytes] = write.buffers
        vectors = (_Vector * len(buffers))(*[_Vector(each, len(each)) for each in buffers])
        number, fd = self._next, write.handle.fd
        self._next += 2
        link = _LINK if write.sync else 0
        first = (
            _WRITEV, _ASYNC | link, fd, write.position, ctypes.addressof(vectors), len(buffers), 0, number
        )  # fmt: skip
        entries = (
            (first, (_FSYNC, 0, fd, 0, 0, 0, _DATASYNC, number + 1)) if write.sync else (first,)
        )
        started = perf_counter()
        taken = self._ring.submit(*entries)
        if taken == 0:
            self.submit(job.run, done)
            return
        self._owed += taken
        size = sum(map(len, buffers))
        kept = (vectors, buffers, write.handle)
        if taken < len(entries):  # no memory for the sync: a thread does both again
            self._failed.add(number)
        self._commits[number] = _RingCommit(
            job, done, write.handle.path, kept, size, taken == 2, started
        )

    def _answered(self) -> None:
        # ``done`` runs in a call of its own, as after a job in a thread: an error in one concerns no other.
        for number, result in self._ring.answers():
            self._owed -= 1
            is_sync, number = number & 1, number & ~1
            commit = self._commits[number]
            if not is_sync and result != commit.bytes:
                self._failed.add(number)
                if result in (-errno.EINVAL, -errno.EOPNOTSUPP, -errno.EPERM):
                    logger.warning("%s: io_uring cannot write here; threads do it", commit.path)
                    self._is_usable = False
            if commit.sync and not is_sync:
                continue
            del self._commits[number]
            if number in self._failed:
                self._failed.discard(number)
                self.submit(commit.job.run, commit.done)
            elif is_sync and result != 0:
                error = SyncFailed(f"{commit.path}: {OSError(-result, os.strerror(-result))}")
                self._loop.call_soon(commit.done, None, error)
            else:
                commit.job.stored(perf_counter() - commit.started)
                self._loop.call_soon(commit.done, None, None)

    def close(self) -> None:
        super().close()
        if self._is_closed:
            return
        self._is_closed, self._is_usable = True, False
        with suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._ring.fd)  # type: ignore[attr-defined]
        # Nobody waits for commits that are left, but the kernel still reads their bytes.
        while self._owed:
            self._ring.wait()
            self._owed -= len(self._ring.answers())
        self._ring.close()


def open_workers(loop: Loop, files: Files | None, disk: str = "auto") -> Workers:
    """What carries out the commits: a ring where the system permits it, or threads alone."""
    # Another disk (of a test) has calls of its own; another loop has no descriptors.
    if disk == "threads" or type(files) is not Files or not hasattr(loop, "add_reader"):
        return Workers(loop)
    try:
        workers = RingWorkers(loop)
        logger.info("commits are written by io_uring")
        return workers
    except OSError as error:
        if disk == "io_uring":
            raise InvalidArgument(
                f"disk=io_uring: the system does not permit it ({error.strerror}); use disk=auto or disk=threads",
                code="invalid_setting",
            ) from error
        logger.info(
            "io_uring is not available (%s): commits are written by threads", error.strerror
        )
        return Workers(loop)
