"""Repeat, interleave, compare, print, write down."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import AsyncBroker, AsyncClient
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
PIPELINED = 500
RESULTS = Path(__file__).resolve().parent / "results"
console = Console(width=max(Console().width, 132))


async def publish_singly(
    broker: AsyncBroker | AsyncClient, topic: str, values: list[bytes], total: int, partitions: int
) -> None:
    """Store messages, each as a batch of its own, as publishes that wait for each other would."""
    for start in range(0, total, PIPELINED):
        await asyncio.gather(
            *[
                broker.publish_batch(
                    topic, encode(Columns([values[at % len(values)]])), partition=at % partitions
                )
                for at in range(start, min(start + PIPELINED, total))
            ]
        )


def store_singly(directory: Path, topic: str, values: list[bytes], total: int) -> None:
    """Fill a topic of a broker's directory, and wait until its closed segments are rewritten."""

    async def fill() -> None:
        async with AsyncBroker.open(directory, retention_hours=None) as broker:
            await publish_singly(broker, topic, values, total, 1)
            rewriter = broker.engine.rewriter
            while rewriter is not None and rewriter.pending:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    asyncio.run(fill())


def send_singly(
    process: ServerProcess, topic: str, values: list[bytes], total: int, partitions: int = 1
) -> None:
    """The same over a connection."""

    async def fill() -> None:
        async with AsyncClient(*process.address) as client:
            await publish_singly(client, topic, values, total, partitions)

    asyncio.run(fill())
    host, port = process.http_address
    pending = re.compile(rb"^message_broker_rewrite_pending_segments 0", re.MULTILINE)
    while True:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
            if pending.search(answer.read()):
                return
        time.sleep(0.1)


def bytes_each(directory: Path, topic: str, total: int) -> float:
    """Bytes of files for each message."""
    return sum(path.stat().st_size for path in (directory / topic).rglob("*.*")) / total


@dataclass
class Case:
    """One number. ``run`` gives a value per repetition; larger is better unless ``smaller``."""

    name: str
    run: Callable[[], float]
    unit: str
    target: float | None = None
    smaller: bool = False
    reference: str = ""
    """Another case of the same benchmark: the ratio to it is printed, and is what ``target`` means
    when ``relative`` is set."""
    relative: bool = False
    is_repeated: bool = False
    """It measures nothing, and returns the value of another case of this round."""
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


class Benchmark:
    """A named list of cases."""

    def __init__(
        self,
        name: str,
        text: str,
        cases: list[Case],
        repeat: int = 5,
        is_shuffled: bool = False,
        facts: dict[str, Any] | None = None,
    ):
        self.name = name
        self.text = text
        self.cases = cases
        self.repeat = repeat
        self.is_shuffled = is_shuffled
        """Whether each round has another order: for cases that affect the next one (a heap, a
        compiled method), so that it is not always the same next one."""
        self.facts = facts or {}
        """Additional facts for the written result; they override those about the machine."""

    def run(self, *, quick: bool) -> None:
        repeat = min(self.repeat, 3) if quick else self.repeat
        with console.status(self.name) as status:
            for number in range(repeat):
                for case in self._order(number):  # interleaved: a slow minute hits all of them
                    status.update(f"{self.name}: {case.name} ({number + 1}/{repeat})")
                    case.samples.append(case.run())

    def _order(self, number: int) -> list[Case]:
        measured = [case for case in self.cases if not case.is_repeated]
        if self.is_shuffled:
            random.Random(number).shuffle(measured)
        return measured + [case for case in self.cases if case.is_repeated]

    def judge(self, case: Case) -> tuple[float | None, bool | None]:
        """(ratio to the reference, whether the target is met)."""
        ratio = None
        if case.reference:
            other = next(c for c in self.cases if c.name == case.reference)
            ratio = case.median / other.median
        if case.target is None:
            return ratio, None
        value = ratio if case.relative and ratio is not None else case.median
        return ratio, value <= case.target if case.smaller else value >= case.target

    def print(self) -> None:
        table = Table(title=f"{self.name}: {self.text}", title_justify="left", box=None)
        for column in ("", "median", "min", "max", "", "ratio", "target", "met"):
            table.add_column(column, justify="left" if column in ("", "met") else "right")
        for case in self.cases:
            ratio, met = self.judge(case)
            sign = "≤" if case.smaller else "≥"
            target = (
                ""
                if case.target is None
                else f"{sign} {case.target:,.4g}"
                if case.target < 1000
                else f"{sign} {case.target:,.0f}"
            )
            if case.relative and target:
                target += " ×"
            table.add_row(
                case.name,
                number(case.median),
                number(min(case.samples)),
                number(max(case.samples)),
                case.unit,
                "" if ratio is None else f"{ratio:.2f} × {case.reference}",
                target,
                "" if met is None else "[green]yes[/green]" if met else "[red]no[/red]",
            )
        console.print(table)
        console.print()

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for case in self.cases:
            ratio, met = self.judge(case)
            rows.append(
                {
                    "name": case.name,
                    "unit": case.unit,
                    "median": case.median,
                    "samples": case.samples,
                    "target": case.target,
                    "smaller_is_better": case.smaller,
                    "reference": case.reference or None,
                    "ratio": ratio,
                    "met": met,
                }
            )
        return {"benchmark": self.name, "text": self.text, "cases": rows, **machine(), **self.facts}


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def commit_of(tree: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    names = ("uvloop", "google-crc32c", "orjson", "httptools", "websockets", "zstandard")
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "commit": commit_of(ROOT),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _line("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal"),
        "file system": _file_system(ROOT),
        "load": os.getloadavg(),
        "versions": {name: version(name) for name in names},
    }


def _line(path: str, name: str) -> str:
    """The text after the colon of the first line that begins with ``name``."""
    with suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return "unknown"


def _file_system(path: Path) -> str:
    """Its type: that of the longest mount point above the path."""
    best, kind = "", "unknown"
    with suppress(OSError), open("/proc/mounts") as file:
        for line in file:
            _, mount, type_, *_ = line.split()
            if (mount == "/" or f"{path}/".startswith(f"{mount}/")) and len(mount) >= len(best):
                best, kind = mount, type_
    return kind


def write(benchmark: Benchmark, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{benchmark.name}.json"
    path.write_text(json.dumps(benchmark.as_dict(), indent=2) + "\n")


@contextmanager
def data_directory(base: Path = ROOT / "bench-data") -> Iterator[Path]:
    """A folder on the real disk, removed afterwards."""
    base.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if not any(base.iterdir()):
            base.rmdir()


def rate(count: int, work: Callable[[], object]) -> float:
    """How many a second."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def messages(count: int, size: int = 100) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]
