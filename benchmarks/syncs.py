"""Many files, a small commit to each: what a sync for each file costs, and what one sync for all would.

The first case is how partitions commit: the kernel's ring writes and syncs each file. The others are not built; their
numbers say what one could gain. None of them has the work that Python does for a commit, which ``net_topics`` has.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Benchmark, Case, console, data_directory, rate
from headrace.log import uring
from headrace.log.uring import COMMITS_MAX, KernelRing

FILES = 500
VALUE = os.urandom(200)
FILE_BYTES, JOURNAL_BYTES = 256 << 10, 256 << 20
RING = "a sync for each file, by io_uring"


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    rounds = 2 if quick else 10
    try:
        ring = KernelRing()
    except OSError as error:
        console.print(f"syncs: io_uring is not available ({error.strerror})")
        yield None
        return
    with data_directory() as directory, ExitStack() as stack:
        stack.callback(ring.close)
        files = [_open(stack, directory / str(number), FILE_BYTES) for number in range(FILES)]
        journal = _open(stack, directory / "journal", JOURNAL_BYTES)
        folder = os.open(directory, os.O_RDONLY)
        stack.callback(os.close, folder)
        os.sync()
        places = _Places()

        def case(commit: Callable[[], None]) -> Callable[[], float]:
            return lambda: rate(FILES * rounds, lambda: [commit() for _ in range(rounds)])

        def write_all() -> None:
            place = places.next(len(VALUE), FILE_BYTES)
            for file in files:
                os.pwrite(file, VALUE, place)

        def by_syncfs() -> None:
            write_all()
            if ctypes.CDLL(None, use_errno=True).syncfs(folder):
                raise OSError(ctypes.get_errno(), "syncfs")

        def by_journal() -> None:
            os.pwrite(journal, VALUE * FILES, places.next_journal(len(VALUE) * FILES))
            os.fdatasync(journal)
            write_all()

        yield Benchmark(
            "syncs",
            f"{FILES} files, a commit of {len(VALUE)} bytes to each",
            [
                Case(RING, case(lambda: _by_ring(ring, files, places)), "commits/s"),
                Case("all written, one syncfs", case(by_syncfs), "commits/s", reference=RING),
                Case("one journal with one sync, files written after it", case(by_journal), "commits/s",
                     reference=RING),
            ],
        )  # fmt: skip


class _Places:
    """Where the next commit goes; files are written over from the beginning."""

    def __init__(self) -> None:
        self._file = self._journal = 0

    def next(self, size: int, end: int) -> int:
        self._file = 0 if self._file + 2 * size > end else self._file + size
        return self._file

    def next_journal(self, size: int) -> int:
        self._journal = 0 if self._journal + 2 * size > JOURNAL_BYTES else self._journal + size
        return self._journal


def _open(stack: ExitStack, path: Path, size: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    stack.callback(os.close, file)
    os.posix_fallocate(file, 0, size)
    return file


def _by_ring(ring: KernelRing, files: list[int], places: _Places) -> None:
    """As ``RingWorkers`` does it: a submission for each commit, at most ``COMMITS_MAX`` at a time."""
    vector = (uring._Vector * 1)(uring._Vector(VALUE, len(VALUE)))
    place, begun, answered = places.next(len(VALUE), FILE_BYTES), 0, 0
    while answered < len(files):
        while begun < len(files) and begun - answered < COMMITS_MAX:
            file = files[begun]
            write = (
                uring._WRITEV, uring._ASYNC | uring._LINK, file, place, ctypes.addressof(vector), 1, 0, 0,
            )  # fmt: skip
            taken = ring.submit(write, (uring._FSYNC, 0, file, 0, 0, 0, uring._DATASYNC, 1))
            assert taken == 2
            begun += 1
        ring.wait()
        for number, result in ring.answers():
            assert result == (0 if number else len(VALUE)), os.strerror(-result)
            answered += number
