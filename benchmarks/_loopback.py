"""Shared by the benchmarks over the network: a server process and the native load generator.

The generator is ``native/load.c``, compiled here with gcc; it reads the requests from files. Everything
runs over the loopback interface, with the broker and its clients in processes of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from benchmarks.harness import console, data_directory
from headrace import limits
from headrace.testing import Address, ServerProcess, server_process

SOURCE = Path(__file__).parent / "native" / "load.c"
TOPIC = "t"
VALUE = b"x" * 100
JSON_VALUE = (
    b'{"userId": 123, "action": "login", "at": "2023-01-01T00:00:00Z", "note": "'
    + b"x" * 24
    + b'"}'
)
assert len(JSON_VALUE) == 100


def missing(*commands: str) -> list[str]:
    """The commands that this machine lacks; each is reported."""
    absent = [command for command in commands if shutil.which(command) is None]
    for command in absent:
        console.print(f"[yellow]{command} is not installed: what needs it is not measured[/yellow]")
    return absent


@contextmanager
def broker(**settings: Any) -> Iterator[ServerProcess]:
    """A broker with its data on the real disk and a topic that syncs before each receipt."""
    with (
        data_directory() as directory,
        server_process(directory / "data", retention_hours="none", **settings) as process,
    ):
        with process.client() as client:
            client.create_topic(TOPIC)
        yield process


def http_of(process: ServerProcess) -> Address:
    return process.addresses["http"]


class Load:
    """The generator. Each method runs it once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._program = directory / "load"
        subprocess.run(["gcc", "-O2", "-o", str(self._program), str(SOURCE)], check=True)

    def _file(self, name: str, content: bytes) -> str:
        path = self._directory / name
        path.write_bytes(content)
        return str(path)

    def _command(self, mode: str, address: Address, unit: str, *arguments: object) -> list[str]:
        words = (self._program, mode, address.host, address.port, unit, *arguments)
        return [str(word) for word in words]

    def publish(
        self,
        address: Address,
        unit: str,
        requests: bytes,
        *,
        each: int,
        rounds: int,
        connections: int,
        greeting: bytes = b"",
    ) -> float:
        """Answers a second: each connection sends ``requests`` (which hold ``each``) in rounds."""
        command = self._command(
            "publish", address, unit, connections, rounds, each,
            self._file("greeting", greeting), self._file("requests", requests),
        )  # fmt: skip
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        assert found["answers"] == each * rounds * connections, found
        assert not found["errors"], found
        return float(found["answers"] / found["seconds"])

    def latencies(
        self,
        address: Address,
        unit: str,
        *,
        per_second: int,
        count: int,
        listen: bytes,
        request: bytes,
        greeting: bytes = b"",
    ) -> list[float]:
        """Microseconds from when each message was sent to its delivery, sorted."""
        command = self._command(
            "latency", address, unit, per_second, count,
            self._file("listen", listen), 1,
            self._file("greeting", greeting), self._file("request", request),
        )  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return sorted(int(line) / 1000 for line in done.stdout.split())

    @contextmanager
    def listening(
        self, address: Address, unit: str, connections: int, greeting: bytes, answers: int = 1
    ) -> Iterator[Listeners]:
        """Connections that have sent ``greeting`` and got its answer; then they count what comes.

        The first ``####`` of the greeting becomes the number of the connection.
        """
        command = self._command(
            "listen", address, unit, connections, answers, self._file("listen", greeting)
        )
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            yield Listeners(process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(30)
            process.stdout.close()


class Listeners:
    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        line = self._line()
        assert line == "ready", line

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def counts(self) -> dict[str, float]:
        """The counts since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        found: dict[str, float] = json.loads(self._line())
        return found


@contextmanager
def loading() -> Iterator[Load | None]:
    """The compiled generator; None without a compiler."""
    if missing("gcc"):
        yield None
        return
    directory = Path(tempfile.mkdtemp(prefix="headrace-load-"))
    try:
        yield Load(directory)
    finally:
        shutil.rmtree(directory)


@contextmanager
def bare(what: str) -> Iterator[Address]:
    """A server of ``benchmarks._bare`` in a process of its own, to show what the machine allows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._bare", what], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield Address("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


# --- WebSocket ------------------------------------------------------------------------------------
def handshake(address: Address) -> bytes:
    protocol = ClientProtocol(parse_uri(f"ws://{address.host}:{address.port}/ws"))
    return protocol.connect().serialize()


def ws_publish(value: bytes = JSON_VALUE) -> bytes:
    """A publish that is acknowledged, as a frame."""
    return _frame(b'{"type":"publish","topic":"%b","messageId":1,"data":%b}' % (_TOPIC, value))


def ws_subscribe() -> bytes:
    return _frame(b'{"type":"subscribe","topic":"%b","messageId":1}' % _TOPIC)


def _frame(content: bytes) -> bytes:
    return Frame(Opcode.TEXT, content).serialize(mask=True)


_TOPIC = TOPIC.encode()


class Latest:
    """One measurement with two targets: ``take`` measures, ``again`` returns the same value."""

    def __init__(self, measure: Callable[[], float]):
        self._measure = measure
        self._value = 0.0

    def take(self) -> float:
        self._value = self._measure()
        return self._value

    def again(self) -> float:
        return self._value


def kilobytes_each(before: int, after: int, connections: int) -> float:
    return (after - before) / connections / 1024


def allow_open_files() -> int:
    """Raise the limit of open files for this process and its children; returns the limit."""
    return limits.allow_open_files(100_000)
