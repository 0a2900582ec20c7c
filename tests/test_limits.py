"""The bounds that are asked of the system."""

import json
import platform
import resource
import subprocess
import sys

import pytest

from headrace import limits
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
