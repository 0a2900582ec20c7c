"""The parent: starts victims, kills them, keeps the history, asks the checker.

What survives a kill is here and nowhere else: the events that came through the pipe, and from them
what an idempotent producer has to remember. Every process that is started is stopped, by its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, Any

import orjson

from tests.crash.checker import Checker
from tests.crash.history import Event
from tests.crash.load import GROUPS, PUBLISHERS, TOPICS

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0
"""How long a victim may take until its broker is open."""
CLOSE_S = 30.0
DRAIN_S = 60.0
REREAD = 500
"""Offsets before the last known end that each restart shows again."""


class Victim:
    """One life of the victim, and what it told."""

    def __init__(self, orders: dict[str, Any], log: IO[bytes], prefix: list[str]):
        self.orders = orders
        self.events: list[Event] = []
        self.opened = threading.Event()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.crash.victim"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(orjson.dumps(orders) + b"\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith(b"\n"):
                break  # the kill came in the middle of a line
            event = orjson.loads(line)
            self.events.append(event)
            if event["event"] == "opened":
                self.opened.set()
        self.opened.set()

    def kill(self) -> None:
        """It, and what it was started through: they are a process group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask_to_close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, timeout: float) -> int:
        """Wait for its end, or kill it; the exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        return code


class Run:
    """So many kills of a broker on one data directory, a drain, and a verdict."""

    def __init__(
        self,
        directory: Path,
        *,
        kills: int,
        seed: int,
        mode: str = "mixed",
        life_s: float = 1.2,
        options: dict[str, Any] | None = None,
        data: Path | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ):
        self.directory = directory
        self.data = data or directory / "data"
        self.kills, self.seed, self.mode, self.life_s = kills, seed, mode, life_s
        self.options = options or {}
        self.without: set[str] = set()
        """Kinds of publishers that are left out."""
        self.topic_changes: dict[str, Any] = {}
        """Settings that all topics of the load get: where the page cache is lost, ``durability``."""
        self.checker = Checker()
        self._progress = progress
        self._random = Random(seed)
        self._memory: dict[str, dict[str, Any]] = {}
        self._in_doubt: set[str] = set()
        """Calls of which one had no answer, so that a refusal of the next one is no refusal."""
        self._ends: dict[str, int] = {}
        self._life = 0
        self._began = time.monotonic()
        self.slowest_open_s = 0.0

    # --- the history ------------------------------------------------------------------------
    def take(self, events: list[Event]) -> None:
        """Into the file, the checker, and what is to be remembered."""
        with (self.directory / "history.jsonl").open("ab") as file:
            for event in events:
                file.write(orjson.dumps(event) + b"\n")
                self.checker.add(event)
                self._remember(event)

    def _remember(self, event: Event) -> None:
        kind = event["event"]
        if kind == "invoke" and "producer" in event:
            memory = self._memory.setdefault(event["producer"], {"pending": None})
            memory["pending"] = (event["op"], event["sequence"], event["count"])
        elif kind == "ok" and "producer" in event:
            self._memory[event["producer"]] = {
                "id": event["id"],
                "epoch": event["epoch"],
                "next": 0,
                "pending": None,
            }
        elif kind in ("ok", "fail", "unknown"):
            for memory in self._memory.values():
                pending = memory["pending"]
                if not pending or pending[0] != event["op"]:
                    continue
                if kind == "unknown":
                    self._in_doubt.add(event["op"])
                elif kind == "ok":
                    memory["pending"] = None
                    memory["next"] = pending[1] + pending[2]
                elif event["op"] not in self._in_doubt:
                    memory["pending"] = None
        elif kind == "bounds":
            self._ends[f"{event['topic']}/{event['partition']}"] = event["end"]
        elif kind == "opened":
            self.slowest_open_s = max(self.slowest_open_s, event["seconds"])

    # --- lives ------------------------------------------------------------------------------
    @contextlib.contextmanager
    def victim(self, phase: str, prefix: list[str] | None = None) -> Iterator[Victim]:
        self._life += 1
        self._in_doubt.update(m["pending"][0] for m in self._memory.values() if m["pending"])
        kinds = {"mixed": list(PUBLISHERS), "consume": ["publish"]}.get(self.mode, [self.mode])
        orders = {
            "data": str(self.data),
            "life": self._life,
            "phase": phase,
            "seed": self.seed,
            "options": self.options,
            "topic_changes": self.topic_changes,
            "publishers": [
                name for kind in kinds if kind not in self.without for name in PUBLISHERS[kind]
            ],
            "consume": self.mode in ("mixed", "consume"),
            "memory": self._memory,
            "begin": {place: max(0, end - REREAD) for place, end in self._ends.items()},
            "window": DRAIN_S,
        }
        with (self.directory / "victim.log").open("ab") as log:
            victim = Victim(orders, log, prefix or [])
            try:
                yield victim
            finally:
                if victim.process.poll() is None:
                    victim.kill()
                victim.end(CLOSE_S)
                self.take(victim.events)

    def _live_and_die(self) -> None:
        """Start one, let it work for a while, kill it: or, now and then, let it close."""
        chance = self._random.random()
        with self.victim("load") as victim:
            if chance < 0.2:
                time.sleep(self._random.random() * 0.8)  # while it starts, or has just started
            else:
                victim.opened.wait(START_S)
                time.sleep(self._random.random() * 2 * self.life_s)
            if victim.process.poll() is not None:
                self.problem(f"life {self._life} ended by itself, code {victim.process.returncode}")
                return
            if chance > 0.92:
                victim.ask_to_close()
                code = victim.end(CLOSE_S)
                if code != 0:
                    self.problem(f"life {self._life} was to close and ended with code {code}")
                return
            self.kill(victim)

    def kill(self, victim: Victim, *, uncounted: bool = False) -> None:
        """``uncounted``: the journal had no room for the deliveries of this life."""
        victim.kill()
        victim.end(CLOSE_S)
        victim.events.append(
            {
                "event": "killed",
                "life": self._life,
                "uncounted": uncounted,
                "at": time.monotonic_ns(),
                "at_ms": time.time_ns() // 1_000_000,
            }
        )

    def _finish_phase(self, phase: str) -> None:
        with self.victim(phase) as victim:
            code = victim.end(START_S + DRAIN_S + CLOSE_S)
        if code != 0:
            self.problem(f"the {phase} ended with code {code}")

    def problem(self, what: str) -> None:
        self.take([{"event": "problem", "what": f"{what}; see victim.log"}])

    def set_the_stage(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        events: list[Event] = [
            {
                "event": "topic",
                "name": name,
                "partitions": settings.get("partitions", 1),
                "retention": "retention_bytes" in settings,
            }
            for name, settings in TOPICS.items()
        ]
        events += [
            {
                "event": "group",
                "name": name,
                "topic": topic,
                "ordering": settings.get("ordering", "none"),
                "max_deliveries": settings["max_deliveries"],
            }
            for name, (topic, settings) in GROUPS.items()
        ]
        self.take(events)

    def status(self) -> str:
        counts = self.checker.counts
        return (
            f"kill {counts['kills']}/{self.kills}  {time.monotonic() - self._began:.0f} s  "
            f"{counts['messages acknowledged']:,} acknowledged  {counts['deliveries']:,} delivered  "
            f"{counts['anomalies']} anomalies"
        )

    def go(self) -> Checker:
        """The whole run. It stops early at an anomaly, and does not clean up after one."""
        self.set_the_stage()
        while self.checker.counts["kills"] < self.kills and not self.checker.anomalies:
            self._live_and_die()
            self._progress(self.status())
        if not self.checker.anomalies:
            self.finish()
            self._progress(self.status())
        return self.checker

    def finish(self) -> None:
        """Consume what is left, read everything, and check it all."""
        self._finish_phase("drain")
        self._finish_phase("final")
        self.checker.finish()
