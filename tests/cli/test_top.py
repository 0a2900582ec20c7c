"""``headrace top``, ``clients``, ``groups --watch``: printed once, and on a real terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from headrace.cli.top import _document, _rows
from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, running_server
from tests.cli.rig import SCRIPT, Command, clean_environment

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command on a terminal of some size, and what it has drawn."""

    def __init__(self, *arguments: str, columns: int = 100, lines: int = 20, **environment: str):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._fd = ours
        self._drawn = ""
        self.process = subprocess.Popen(
            [SCRIPT, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=clean_environment() | {"TERM": "xterm-256color"} | environment,
        )
        os.close(theirs)

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """Read until the text is drawn; returns everything that was drawn since the last call."""
        until = time.monotonic() + seconds
        while text not in CODES.sub("", self._drawn):
            assert time.monotonic() < until, self._drawn[-2000:]
            if select.select([self._fd], [], [], 0.1)[0]:
                self._drawn += os.read(self._fd, 65536).decode(errors="replace")
        drawn, self._drawn = self._drawn, ""
        return drawn

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self, seconds: float = 30.0) -> tuple[int, str]:
        """Its exit code, and what it said last."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            self._read()
        self._read()
        return self.process.wait(1), self._drawn

    def _read(self) -> None:
        try:
            while select.select([self._fd], [], [], 0.05)[0]:
                self._drawn += os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            pass

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(server: RunningServer) -> Iterator[Callable[..., Terminal]]:
    """Start a command on a terminal, with the server's address."""
    opened: list[Terminal] = []

    def start(*arguments: str, **options: object) -> Terminal:
        address = f"{server.host}:{server.port}"
        opened.append(Terminal(*arguments, HEADRACE_SERVER=address, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@contextmanager
def lagging(client: BrokerClient, name: str) -> Iterator[None]:
    client.create_subscription(name, f"{name}-topic")
    client.publish_many(f"{name}-topic", [b"1", b"2", b"3"])
    yield


# --- printed once -----------------------------------------------------------------------------------
def test_in_a_pipe_it_prints_once(headrace: Command, client: BrokerClient) -> None:
    """Plain lines: totals, and a row for each subscription."""
    with lagging(client, "piped"):
        ran = headrace("top", "--interval", "100ms")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert ran.lines[0].startswith("published 0/s")
    [row] = [row for row in ran.rows if row and row[0] == "piped"]
    assert row[:2] == ["piped", "piped-topic"]
    assert "3" in row
    assert row[-2:] == ["no", "members"]


def test_as_json(headrace: Command, client: BrokerClient) -> None:
    """The broker's answer, with rates."""
    found = headrace("top", "--once", "--json", "-i", "0.1").json
    assert set(found["rates"]) == {"published", "delivered", "acked", "redelivered"}
    assert all(set(row["rates"]) == {"in", "out", "acked", "again"} for row in found["rows"])
    assert found["load"]["connections"] >= 1


def test_rates_are_differences(client: BrokerClient) -> None:
    """By the clock of the broker; a counter that has become smaller is that of a new broker."""
    with lagging(client, "rated"):
        before = client.overview()
        client.publish_many("rated-topic", [b"4", b"5"])
        now = client.overview()
    now["time"] = before["time"] + 2_000
    [row] = [row for row in _rows(now, before) if row["subscription"] == "rated"]
    assert (row["in"], row["out"]) == (1.0, 0.0)
    assert _document(now, before)["rates"]["published"] == 1.0
    assert _document(before, now)["rates"]["published"] is None


def test_who_is_connected(headrace: Command, server: RunningServer) -> None:
    """One row for each connection: its id, its login, what it holds."""
    with server.client(client_id="worker-9") as worker:
        worker.create_subscription("held", "held-topic")
        worker.publish_text("held-topic", "one")
        with worker.subscription("held") as consumer:
            consumer.get(timeout=10)
            ran = headrace("clients")
            [row] = [row for row in ran.rows if row[0] == "worker-9"]
            assert row[1] == "anyone"
            assert "held@held-topic" in row
            found = headrace("clients", "--json", "--limit", "1").json
            assert (len(found), found[0]["client_id"]) == (1, "worker-9")


# --- on a terminal ----------------------------------------------------------------------------------
def test_a_live_screen(terminal: Callable[..., Terminal], client: BrokerClient) -> None:
    """Lag stands out in colour, + and q are heard, and the screen is given back."""
    with lagging(client, "watched"):
        screen = terminal("top", "-i", "0.2", columns=80)
        drawn = screen.wait_for("no members")
    assert "\x1b[?1049h" in drawn
    assert re.search(r"\x1b\[1;33m *3", drawn)
    assert all(len(line) <= 80 for line in CODES.sub("", drawn).split("\r\n"))
    screen.type("+")
    screen.wait_for("every 0.4s")
    screen.type("q")
    code, rest = screen.end()
    assert (code, "Traceback" in rest) == (0, False)
    assert "\x1b[?1049l" in rest


def test_subscriptions_on_a_narrow_terminal(
    terminal: Callable[..., Terminal], client: BrokerClient
) -> None:
    """Shorter titles leave room for the names, and a state is whole."""
    with lagging(client, "a-rather-long-name"):
        drawn = terminal("groups", columns=80).wait_for("no members")
    assert re.search(r"flight +retry +members", CODES.sub("", drawn))


def test_no_color(terminal: Callable[..., Terminal], client: BrokerClient) -> None:
    """NO_COLOR is heard."""
    with lagging(client, "pale"):
        drawn = terminal("groups", NO_COLOR="1").wait_for("pale")
    assert "33m" not in drawn


def test_ctrl_c_is_quiet(terminal: Callable[..., Terminal]) -> None:
    """No traceback, and exit code 130."""
    screen = terminal("groups", "--watch", "-i", "0.2")
    screen.wait_for("headrace groups")
    os.killpg(screen.process.pid, signal.SIGINT)
    code, rest = screen.end()
    assert code == 130
    assert "Traceback" not in rest


def test_a_broker_that_goes_away_and_comes_back() -> None:
    """The screen says so, keeps its numbers, and goes on."""
    with running_server() as server:
        with server.client() as client, lagging(client, "kept"):
            pass
        screen = Terminal(
            "top", "-i", "0.2", HEADRACE_SERVER=f"{server.host}:{server.port}",
            HEADRACE_REQUEST_TIMEOUT="0.5s",
        )  # fmt: skip
        try:
            screen.wait_for("kept-topic")
            server.kill()
            assert "kept-topic" in screen.wait_for("Trying again") + screen.wait_for("kept-topic")
            server.start()
            screen.wait_for("published 0/s")
            screen.type("q")
            assert screen.end()[0] == 0
        finally:
            screen.close()


def test_a_missing_right_ends_it(command: Command) -> None:
    """Another try would not help."""
    with running_server(memory=True, token="a-token-of-the-test") as server:
        ran = command("top", "--server", f"{server.host}:{server.port}", "--token", "wrong")
    assert ran.code == 2
    assert "[unauthenticated]" in ran.err
