"""Every script in examples/ runs, and prints what it is there to show."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import RunningServer, running_server, wait_until
from tests.docs.blocks import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def run(name: str, *arguments: object, server: RunningServer | None = None) -> list[str]:
    """The lines that an example prints."""
    ended = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def environment(server: RunningServer | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return clean if server is None else clean | {"HEADRACE_SERVER": f"{server.host}:{server.port}"}


def test_every_example_has_a_test() -> None:
    """And each says at its head how it is run."""
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tested
        assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")


def test_embedded(tmp_path: Path) -> None:
    """In memory, and twice with a directory: the second time there are two messages."""
    assert run("embedded.py")[1:] == [
        'seen: {"order": 101} from shop',
        'mailed: {"order": 101}, attempt 1',
        "1 published so far",
    ]
    assert run("embedded.py", tmp_path / "data")[-1] == "1 published so far"
    assert run("embedded.py", tmp_path / "data")[-1] == "2 published so far"


def test_worker(server: RunningServer) -> None:
    """It handles what comes, again what failed, and ends with Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "worker.py"],
        env=environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where the failure of the handler is logged
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting for orders\n"
        with server.client() as client:
            client.publish_many("orders", [b"plain", b"flaky"])
            lines = {process.stdout.readline() for _ in range(2)}
            assert lines == {"done: plain (attempt 1)\n", "done: flaky (attempt 2)\n"}
            wait_until(lambda: client.subscription_stats("email")["lag"] == 0)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_asyncio_worker(server: RunningServer) -> None:
    """All that was published is handled and acknowledged."""
    assert run("asyncio_worker.py", server=server) == [
        "published 1000, the last at offset 999",
        "handled 1000, 0 left",
    ]


def test_delayed(server: RunningServer) -> None:
    """What was cancelled does not come; what was not delayed comes first."""
    lines = run("delayed.py", 0.2, server=server)
    assert [line.split(":")[0] for line in lines[:2]] == ["waits", "waits"]
    assert lines[2:] == [
        "one of them is cancelled",
        "here it is: the bus leaves now",
        "here it is: call the dentist",
    ]


def test_dead_letters(server: RunningServer) -> None:
    """The one with the slip of the pen is given up, corrected and handled."""
    assert run("dead_letters.py", server=server) == [
        "paid: 42",
        "given up after 2 deliveries: no 'amount'",
        "redriven: 1",
        "paid: 43",
    ]
