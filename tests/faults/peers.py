"""Client processes for the scenarios (``peer.py``), and what they have told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

from headrace.testing import Address, ServerProcess

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """One process of ``peer.py``; its lines are collected as they come."""

    def __init__(self, what: str, address: Address, argument: object, *before: str):
        self.lines: list[str] = []
        given = (what, address.host, str(address.port), str(argument))
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.faults.peer", *given],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            self._ready.set()
        self._ready.set()

    def wait_ready(self, seconds: float = 60.0) -> None:
        self._ready.wait(seconds)
        assert self.lines[:1] == ["ready"], f"a client did not start: {self.lines[:3]}"

    def told(self, word: str) -> list[str]:
        """The first argument of each line that begins with the word."""
        return [line.split()[1] for line in list(self.lines) if line.startswith(word + " ")]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Ask it to end, or kill it."""
        with contextlib.suppress(ProcessLookupError):
            self.thaw()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def open_sockets(pid: int) -> int:
    """How many sockets the process has open; its log files come and go with segments."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(link).startswith("socket:")
    return found


def wait_for_rest(server: ServerProcess, seconds: float = 60.0) -> list[str]:
    """Wait until the group has done everything; what is still left over after that."""
    deadline = time.monotonic() + seconds
    while True:
        with server.client() as client:
            found = client.subscription_stats("workers", "orders")
        left = {name: found[name] for name in ("lag", "in_flight", "waiting_for_retry")}  # type: ignore[literal-required]
        if not any(left.values()):
            return []
        if time.monotonic() > deadline:
            return [f"stuck: {left} after {seconds:.0f} seconds"]
        time.sleep(0.2)


def check(server: ServerProcess, publishers: list[Peer], consumers: list[Peer]) -> list[str]:
    """Every message that was answered is there once, in order, and was consumed; none was given up."""
    wrong: list[str] = []
    with server.client() as client:
        stored: list[str] = []
        while True:
            values = client.fetch_values("orders", len(stored))
            if not values:
                break
            stored += [value.decode() for value in values]
        letters = {each["topic"]: each["letters"] for each in client.dead_letter_topics()}
    counts = Counter(stored)
    got = {value for consumer in consumers for value in consumer.told("got")}
    for publisher in publishers:
        for value in publisher.told("ok"):
            if not counts[value]:
                wrong.append(f"lost: {value}")
    sent = {value for publisher in publishers for value in publisher.told("sent")}
    wrong += [f"duplicate: {value} is there {n} times" for value, n in counts.items() if n > 1]
    wrong += [f"invented: {value}" for value in counts if value not in sent]
    wrong += [f"skipped: {value} was never delivered" for value in counts if value not in got]
    for publisher in publishers:
        name = (publisher.told("sent") or ["-"])[0].rsplit("-", 1)[0]
        mine = [int(value.rsplit("-", 1)[1]) for value in stored if value.startswith(f"{name}-")]
        if mine != sorted(mine):
            wrong.append(f"reordered: messages of {name}")
    if sum(letters.values()):
        wrong.append(f"healthy messages became dead letters: {letters}")
    return wrong[:20]
