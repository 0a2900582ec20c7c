"""Opening a data directory: how long until it serves, whatever lies in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Benchmark, Case, console, data_directory, messages
from headrace import Broker

SEGMENT = 128 << 20


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    wanted = (1 if quick else 10) << 30
    with data_directory() as directory:
        free = shutil.disk_usage(directory).free
        if free < wanted * 1.2:
            console.print(f"recovery: needs {wanted >> 30} GiB of disk, {free >> 30} GiB are free")
            yield None
            return
        part = messages(10_000, 1000)
        with Broker.open(
            directory / "closed", retention_hours=None, durability="never", segment_bytes=SEGMENT
        ) as broker:
            for _ in range(wanted // 10_000_000 + 1):
                broker.publish_many("t", part)
        small = messages(1, 100)[0]
        with Broker.open(directory / "tiny", retention_hours=None, durability="never") as broker:
            for _ in range(2_000 if quick else 100_000):
                broker.publish("t", small)

        def opened(name: str) -> float:
            started = time.perf_counter()
            broker = Broker.open(directory / name, retention_hours=None)
            taken = time.perf_counter() - started
            broker.close()
            return taken

        def after_a_kill() -> float:
            """Its last segment was never cut to its size, and is read from end to end."""
            subprocess.run([sys.executable, "-c", _KILLED, str(directory / "killed")], check=True)
            return opened("killed")

        def cold() -> float:
            _forget(directory / "closed")
            return opened("closed")

        size = _size(directory / "closed") / 1e9
        yield Benchmark(
            "recovery",
            "time to open",
            [
                Case("an empty directory", lambda: opened(f"empty-{os.urandom(4).hex()}"), "s",
                     smaller=True),
                Case(f"{size:.1f} GB of closed segments", lambda: opened("closed"), "s", 1.0,
                     smaller=True),
                Case(f"{size:.1f} GB, nothing cached", cold, "s", 1.0, smaller=True),
                Case("one segment of single messages", lambda: opened("tiny"), "s", smaller=True),
                Case("100 MB of an unclosed segment, after a kill", after_a_kill, "s",
                     smaller=True),
            ],
        )  # fmt: skip


_KILLED = """
import os, sys
from headrace import Broker

broker = Broker.open(sys.argv[1], retention_hours=None, durability="never", segment_bytes=1 << 30)
if "t" not in broker.topics():
    for _ in range(100):
        broker.publish_many("t", [os.urandom(1000) for _ in range(1000)])
broker.publish("t", b"the last word")
os._exit(0)
"""


def _forget(directory: Path) -> None:
    """Have the kernel drop what it has cached of these files, and of no others."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
