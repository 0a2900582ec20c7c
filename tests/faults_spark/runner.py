"""The parent: a broker, a producer, a driver; it kills them, starts them again, and judges.

Kills:

- ``jvm``     the driver's JVM, in which queries, scheduler and tasks run
- ``driver``  the Python process that has started it; the JVM notices and ends by itself
- ``worker``  one of the JVM's Python processes: a task's, or one that plans or commits for the query
- ``broker``  ``headrace serve``, started again on the same port and directory after a moment

A driver that has ended, for whatever reason, is started again with the same checkpoint; never before
every process of the old one is gone, because Spark's checkpoints do not survive two drivers at once.
Every process that is killed is found among the children of those that were started here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import orjson

from headrace.errors import HeadraceError
from headrace.testing import ServerProcess, server_process
from tests.faults_spark.pipelines import INPUT, OUTPUT, PARTITIONS, PIPELINES, expected

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("jvm", "worker", "broker", "driver")
RECOVER_S = 300.0
"""How long a pipeline may take until it gets on after a kill: a session, a query, a batch."""
FINISH_S = 300.0
START_S = 10.0
"""About how long a driver takes until its first batch."""
END_S = 30.0
ROWS_PER_BATCH = 10_000
LOOK_AGAIN_S = 0.1
PRODUCER_PAUSE_S = 0.02
PRODUCER_ROWS = 20


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def wait_until(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Looks seldom, because looking means asking for all processes."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} seconds: {what}")
        pause(LOOK_AGAIN_S)


# --- processes --------------------------------------------------------------------------------------
def children() -> dict[int, list[int]]:
    """Parent -> its children, of all processes of this machine (Linux)."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    found.setdefault(int(fields[1]), []).append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    """All below it, parents before children."""
    tree = children()
    found: list[int] = []
    todo = [pid]
    while todo:
        below = tree.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Driver:
    """One life of the driver, and what it has told."""

    def __init__(self, orders: dict[str, Any], log: Path):
        self.batches = 0
        self.rows = 0
        self.started = threading.Event()
        self.finished = False
        self.error = ""
        self._family: set[int] = set()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults_spark.driver"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self._say(orjson.dumps(orders))

    def _say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith(b"\n"):
                break
            event = orjson.loads(line)
            if event["event"] == "batch":
                self.batches += 1
                self.rows += event["rows"]
            elif event["event"] == "failed":
                self.error = event["error"]
            elif event["event"] == "finished":
                self.finished = True
            self.started.set()
        self.started.set()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def victims(self, kind: str) -> list[int]:
        """The processes that a kill of this kind may choose from."""
        if kind == "driver":
            return [self.process.pid] if self.is_running else []
        found = {pid: command(pid) for pid in descendants(self.process.pid)}
        if kind == "jvm":
            return [pid for pid, line in found.items() if " org.apache.spark" in line]
        daemons = {pid for pid, line in found.items() if "pyspark.daemon" in line}
        tree = children()
        return [pid for pid in daemons if not tree.get(pid)]  # the others are their parents

    def remember(self) -> None:
        """Note its processes: once it is dead, nobody knows whose children they were."""
        self._family.update(descendants(self.process.pid))

    def finish(self) -> None:
        self._say(b"finish")

    def end(self) -> None:
        """Wait until all its processes are gone; those that stay are killed."""
        deadline = time.monotonic() + END_S
        while any(map(is_alive, self._family)) or self.is_running:
            self.remember()
            if time.monotonic() > deadline or (not self.is_running and not self._is_leaving()):
                for pid in [self.process.pid, *self._family]:
                    kill(pid)
            if time.monotonic() > deadline + END_S:
                raise AssertionError(f"processes of the driver stay: {self._family}")
            pause(LOOK_AGAIN_S)
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _is_leaving(self) -> bool:
        """Whether its JVM is still there, which ends by itself and takes its workers along."""
        return any(" org.apache.spark" in command(pid) for pid in self._family if is_alive(pid))


# --- the producer -----------------------------------------------------------------------------------
class Producer:
    """Publishes numbers, as fast as a small service does, until it is told to stop."""

    def __init__(self, server: ServerProcess, seed: int):
        self._server, self._random = server, Random(seed)
        self._stop = threading.Event()
        self.sent = 0
        self.error: HeadraceError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._server.client(request_timeout=60, delivery_timeout=120) as client:
                while not self._stop.wait(PRODUCER_PAUSE_S):
                    for _ in range(self._random.randrange(1, 2 * PRODUCER_ROWS)):
                        key = f"user-{self._random.randrange(100)}"
                        client.publish_nowait(INPUT, f"number {self.sent}", key=key)
                        self.sent += 1
                client.flush()
        except HeadraceError as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)


# --- the run ----------------------------------------------------------------------------------------
@dataclass
class Kill:
    """A row of the table."""

    number: int
    kind: str
    second: float
    batches: int
    """Of this life of the driver, before it."""
    recovery_s: float = 0.0
    restarted: bool = False
    """The driver had to be started again."""


@dataclass
class Verdict:
    rows: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.rows > 0 and not (self.lost or self.doubled or self.foreign)


def judge(wanted: Counter[str], found: Counter[str]) -> Verdict:
    return Verdict(
        sum(wanted.values()),
        sorted((wanted - found).elements()),
        sorted(text for text in (found - wanted).elements() if text in wanted),
        sorted(text for text in (found - wanted).elements() if text not in wanted),
    )


class Run:
    """So many kills of one pipeline, its end, and a verdict."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        pipeline: str = "topic",
        kinds: Sequence[str] = KINDS,
        spread_s: float = 2.0,
        early: float = 0.0,
        progress: Callable[[Kill], None] = lambda kill: None,
    ):
        self.directory, self.seed, self.pipeline = directory, seed, pipeline
        self.kinds = kinds
        """Killed in this order, over and over."""
        self.spread_s = spread_s
        """A kill comes so many seconds after the pipeline has got on, at most."""
        self.early = early
        """How likely it is that a driver is killed while it starts, before it has got on."""
        self.kills: list[Kill] = []
        self.lives = 0
        self.published = 0
        self._progress = progress
        self._random = Random(seed)
        self._began = time.monotonic()
        self._driver: Driver | None = None

    @property
    def _orders(self) -> dict[str, Any]:
        return {
            "servers": f"127.0.0.1:{self._server.port}",
            "pipeline": self.pipeline,
            "checkpoint": str(self.directory / "checkpoint"),
            "directory": str(self.directory),
            "log": str(self.directory / "spark.log"),
            "rows_per_batch": ROWS_PER_BATCH,
        }

    def go(self, kills: int) -> Verdict:
        with server_process(self.directory / "data") as self._server:
            with self._server.client() as client:
                for topic in (INPUT, OUTPUT):
                    client.create_topic(topic, partitions=PARTITIONS)
            producer = Producer(self._server, self.seed)
            try:
                for number in range(kills):
                    self._kill(number, self.kinds[number % len(self.kinds)])
                producer.stop()
                assert producer.error is None, producer.error
                self.published = producer.sent
                self._finish()
            finally:
                producer.stop()
                if self._driver is not None:
                    kill(self._driver.process.pid)
                    self._driver.end()
                (self.directory / "broker.log").write_text(self._server.errors)
            with self._server.client() as client:
                wanted = expected(client)
                assert sum(wanted.values()) == producer.sent, "the producer published once"
                return judge(wanted, PIPELINES[self.pipeline].result(self._orders, client))

    # --- the driver's lives -----------------------------------------------------------------
    def _running(self) -> Driver:
        """The driver; another one if it has ended."""
        if self._driver is not None and not self._driver.is_running:
            self._driver.end()
            self._driver = None
        if self._driver is None:
            self.lives += 1
            self._driver = Driver(self._orders, self.directory / "driver.log")
        self._driver.remember()
        return self._driver

    def _wait_for_batches(self, count: int) -> bool:
        """Until the pipeline has got on; returns whether a driver had to be started for it."""
        lives = self.lives
        seen: dict[int, int] = {}

        def got_on() -> bool:
            driver = self._running()
            before = seen.setdefault(self.lives, driver.batches)
            return driver.batches >= before + count

        wait_until(got_on, RECOVER_S, f"the pipeline gets on; see {self.directory}")
        return self.lives > lives

    def _kill(self, number: int, kind: str) -> None:
        if kind in ("jvm", "driver") and self._random.random() < self.early:
            self._running()
            pause(self._random.uniform(0, START_S))
        else:
            self._wait_for_batches(1)
            pause(self._random.uniform(0, self.spread_s))
        driver = self._running()
        row = Kill(number + 1, kind, time.monotonic() - self._began, driver.batches)
        began = time.monotonic()
        if kind == "broker":
            self._server.kill()
            pause(self._random.uniform(0, 1))
            self._server.start()
        else:
            victims: list[int] = []

            def is_there() -> bool:
                victims[:] = self._running().victims(kind)
                return bool(victims)

            wait_until(is_there, RECOVER_S, f"a {kind} to kill")
            kill(self._random.choice(victims))
        row.restarted = self._wait_for_batches(1)
        row.recovery_s = time.monotonic() - began
        self.kills.append(row)
        self._progress(row)

    def _finish(self) -> None:
        """Have everything read that there is; a driver that fails at it is followed by another."""
        deadline = time.monotonic() + FINISH_S
        while True:
            driver = self._running()
            driver.finish()
            while driver.is_running and time.monotonic() < deadline:
                driver.remember()
                pause(LOOK_AGAIN_S)
            if time.monotonic() >= deadline:
                raise AssertionError(f"not finished within {FINISH_S} s; see {self.directory}")
            driver.end()
            self._driver = None
            if driver.finished:
                return


def table(kills: Sequence[Kill]) -> Iterator[str]:
    """The kills as lines of text."""
    yield "  kill  what    at [s]  batches  recovered in [s]  driver"
    for row in kills:
        yield (
            f"  {row.number:4d}  {row.kind:6s}  {row.second:6.1f}  {row.batches:7d}  "
            f"{row.recovery_s:16.1f}  {'started again' if row.restarted else 'went on'}"
        )
