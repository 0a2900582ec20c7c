"""The bounds that are asked of the system."""

import json
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace import limits
from headrace.server.server import allow_connections
from headrace.testing import server_process

PROGRAM = """
import json, resource, sys
from headrace import limits
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allowed = limits.allow_open_files(wanted)
print(json.dumps([allowed, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "now"),
    [(100, 400, 300, 300), (100, 400, 500, 400), (200, 400, 150, 200)],
)
def test_open_files_are_raised_as_far_as_needed_and_possible(
    soft: int, hard: int, wanted: int, now: int
) -> None:
    """Never lowered, never above what the system allows."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, wanted))],
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(done.stdout) == [now, now, hard]


def test_a_server_has_room_for_its_connections_or_says_so() -> None:
    """The limit of the shell does not decide how many may connect; that of the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with server_process(memory=True, max_connections=hard // 2) as server:
        soft, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(hard // 2 + limits.OPEN_FILES_SPARE, hard)
        assert "ulimit" not in server.errors
    if hard != resource.RLIM_INFINITY:
        with server_process(memory=True, max_connections=hard + 1) as server:
            assert "ulimit -n" in server.errors


@pytest.mark.parametrize(
    ("wanted", "files", "allowed"),
    [(15_000, 17_000, 15_000), (15_000, 10_000, 8_000), (90, 100, 50)],
)
def test_connections_do_not_take_the_files_that_the_log_needs(
    wanted: int, files: int, allowed: int
) -> None:
    """A client too many is refused; a publish must not fail for want of a file."""
    assert allow_connections(wanted, files) == allowed


def test_a_server_with_few_files_goes_on_publishing() -> None:
    """As many come as may; a topic that would need a file too many is refused, and all others work."""
    program = Path(sys.executable).with_name("headrace")
    with tempfile.TemporaryDirectory() as folder:
        serve = f"ulimit -n 100; exec {program} serve --port 0 --http-port 0 --data-dir {folder}"
        process = subprocess.Popen(
            ["sh", "-c", serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            found = re.search(r"tcp://127\.0\.0\.1:(\d+)", ready)
            assert found, ready
            address = ("127.0.0.1", int(found[1]))
            with ExitStack() as stack:
                sockets = [
                    stack.enter_context(socket.create_connection(address, 10)) for _ in range(80)
                ]
                answers = [_ask(each, f"PUB topic-{n} 1\r\nx") for n, each in enumerate(sockets)]
                last = _ask(sockets[0], "PUB topic-0 1\r\nx")
            assert answers[:20] == ["OK 0"] * 20
            assert all(each == "OK 0" or "Too many open files" in each for each in answers[:50])
            assert answers[50:] == [""] * 30
            assert last == "OK 1"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _ask(place: socket.socket, text: str) -> str:
    """The answer; nothing from who does not want to talk."""
    try:
        place.sendall(text.encode())
        return place.recv(1000).decode().strip()
    except OSError:
        return ""


FAULTS = """
import resource, sys
from headrace import limits
if sys.argv[1] == "keep":
    limits.keep_freed_memory()
def work():
    for _ in range(50):
        blocks = [bytes(2 << 20) for _ in range(4)]
        del blocks
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc is what is tuned")
def test_freed_memory_is_used_again() -> None:
    """Blocks of megabytes that come and go do not cost a page fault for every page, each time."""

    def faults(what: str) -> int:
        command = [sys.executable, "-c", FAULTS, what]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("keep") < faults("leave") / 10
