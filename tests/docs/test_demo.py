"""`make demo`: it tells its story, loses nothing, and leaves nothing running."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import wait_until
from tests.docs.blocks import ROOT

DEMO = ROOT / "examples" / "demo"
QUICK = ("--speed", "8", "--stay", "0")


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, DEMO, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def http_of(text: str) -> tuple[str, int]:
    found = re.search(r"http://([\d.]+):(\d+)/", text)
    assert found, text
    return found[1], int(found[2])


def assert_nothing_is_left(text: str) -> None:
    """The broker does not listen any more, and no service or Spark uses it."""
    with socket.socket() as probe:
        assert probe.connect_ex(http_of(text)) != 0
    ours = [b"examples/demo/services.py", b"headrace-demo-"]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line, parent = path.read_bytes(), path.parent
            stat = (parent / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if any(each in line for each in ours):
            assert stat[1] != "1", f"{line!r} has lost its parent"  # another demo's have theirs


def test_it_tells_its_story_and_ends(start) -> None:  # type: ignore[no-untyped-def]
    """Without Spark, at eight times the speed: every order is paid, reserved and confirmed once."""
    process = start("--no-spark", *QUICK)
    text, _ = process.communicate(timeout=110)
    assert process.returncode == 0, text
    assert [line for line in text.splitlines() if "✗" in line] == []
    assert text.count("none is missing, none is there twice") == 3
    for part in ("kill -9", "email has no members", "no such address: 'cleo'", "redrive it"):
        assert part in text
    assert_nothing_is_left(text)


def test_ctrl_c_ends_everything(start) -> None:  # type: ignore[no-untyped-def]
    """At once, in the middle of the story, also if it is pressed twice."""
    process = start("--no-spark", *QUICK)
    text = ""
    while "Four services start" not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    wait_until(lambda: b"services.py" in children_of(process.pid), 30)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    text += process.communicate(timeout=60)[0]
    assert (process.returncode, text.splitlines()[-1]) == (
        130,
        "Interrupted. Everything has ended.",
    ), text
    assert_nothing_is_left(text)


def children_of(pid: int) -> bytes:
    """The command lines of the processes that a process has started."""
    found = b""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += Path(f"/proc/{child}/cmdline").read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_with_spark_the_table_and_the_topic_hold_what_the_orders_say(start) -> None:  # type: ignore[no-untyped-def]
    """Spark gets the time that it needs on a busy machine."""
    process = start("--stay", "0", "--patience", "500")
    text, _ = process.communicate(timeout=690)
    assert process.returncode == 0, text
    assert "rows in the table lake/orders: each order once" in text
    assert "of revenue in the topic revenue: as much as the orders say" in text
    assert "Done. Nothing is left running." in text
    assert_nothing_is_left(text)


@pytest.mark.slow
def test_without_time_for_spark_the_demo_says_so(start) -> None:  # type: ignore[no-untyped-def]
    """And shows the rest; its exit code says that something was missing."""
    process = start(*QUICK, "--patience", "1")
    text, _ = process.communicate(timeout=110)
    assert process.returncode == 1, text
    assert "Spark has not started in time" in text
    assert text.count("none is missing, none is there twice") == 3
    assert_nothing_is_left(text)
