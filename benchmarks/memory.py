"""Resident memory of 100,000 queued messages of 100 bytes, over that of an empty broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Benchmark, Case, data_directory

COUNT = 100_000
TARGET_MB = 60

_SCRIPT = """
import os, sys
from pathlib import Path
from headrace import Broker

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

directory, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = how.startswith("memory")
with Broker.open(None if memory else directory, max_queue_size=10**9) as broker:
    broker.create_topic("t", durability="never") if not memory else broker.create_topic("t")
    broker.create_subscription("g", "t")
    broker.publish("t", b"first")
    before = resident()
    value = bytes(100)
    if how.endswith("bulk"):
        for start in range(0, count, 1000):
            broker.publish_many("t", [os.urandom(100) for _ in range(1000)])
    else:
        for _ in range(count):
            broker.publish("t", os.urandom(100))
    print((resident() - before) / 1e6)
"""


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    count = COUNT // 10 if quick else COUNT
    with data_directory() as directory:

        def run(how: str) -> float:
            path = directory / how.replace(" ", "-")
            command = [sys.executable, "-c", _SCRIPT, str(path), how, str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            _clear(path)
            return float(done.stdout)

        yield Benchmark(
            "memory",
            f"{count:,} queued messages of 100 bytes, resident memory over the empty broker's",
            [
                Case(how, lambda how=how: run(how), "MB", TARGET_MB, smaller=True)
                for how in ("durable bulk", "durable singly", "memory bulk", "memory singly")
            ],
            repeat=3,
        )


def _clear(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
