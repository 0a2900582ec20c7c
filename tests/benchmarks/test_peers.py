"""The comparison with other brokers: its arithmetic, its report, and the smallest work against real servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.peers.__main__ import added
from benchmarks.peers.drive import spread
from benchmarks.peers.driver import paced
from benchmarks.peers.report import write_report
from benchmarks.peers.targets import TARGETS, Target, judge, to_the_best
from benchmarks.peers.works import NAMED, WORKS

ROOT = Path(__file__).parents[2]
RUN_S = 100
Samples = dict[str, dict[str, list[float]]]


def result(samples: Samples, **more: Any) -> dict[str, Any]:
    about = {
        "name": "Headrace",
        "version": "1",
        "client": "headrace 1",
        "modes": {"fsync": "always", "default": "x"},
    }
    return {
        "command": "python -m benchmarks.peers", "when": "2026-01-01T00:00:00Z", "cpus": 2, "processor": "x",
        "system": "Linux", "python": "3.11", "commit": "abc", "memory": "8 GB", "file system": "ext4", "rounds": 3,
        "quick": False, "is cut": False, "seconds": 60.0, "fetching seconds": 1.0, "busy before": 0.0, "busy between rounds": [0.0],
        "missing": {"kafka": "no network"}, "failures": ["queue, nats fsync: it failed"],
        "about": {"headrace": about}, "samples": samples, **more,
    }  # fmt: skip


def target(work: str, mode: str = "fsync") -> Target:
    return next(each for each in TARGETS if (each.work, each.mode) == (work, mode))


# --- arithmetic -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "expected"), [("loop", 0.5), ("one-p50", 2.0)])
def test_a_ratio_above_one_is_better(name: str, expected: float) -> None:
    """Whether more is better, or less; the median of the rounds counts, and the best peer."""
    nats = 300.0 if name == "one-p50" else 100.0
    samples = {"headrace": [1.0, 100.0, 900.0], "redis": [200.0], "nats": [nats]}
    assert to_the_best(NAMED[name], samples) == (expected, "redis")


def test_the_best_peer_needs_a_peer() -> None:
    """Headrace alone, or peers alone, have no ratio."""
    assert to_the_best(NAMED["loop"], {"headrace": [1.0]}) is None
    assert to_the_best(NAMED["loop"], {"redis": [1.0]}) is None


def test_each_peer_has_its_own_bound() -> None:
    """The plain loop: twice Redis, five times NATS, once a Kafka that does not sync."""
    samples = {
        "loop": {
            "headrace fsync": [100.0],
            "redis fsync": [49.0],
            "nats fsync": [21.0],
            "kafka fsync": [1.0],
            "kafka default": [90.0],
        }
    }
    verdict = judge(result(samples), target("loop"))
    assert verdict.met is False
    assert verdict.measured == "1.11 × Kafka, 2.04 × Redis, 4.76 × NATS (missed)"
    samples["loop"]["nats fsync"] = [20.0]
    assert judge(result(samples), target("loop")).met is True


def test_a_bound_without_peers_is_not_met_by_accident() -> None:
    """A target whose peers or whose own number are missing is neither met nor missed."""
    assert judge(result({}), target("queue")).met is None
    assert judge(result({"queue": {"headrace fsync": [9.0]}}), target("queue")).met is None


def test_targets_without_a_peer() -> None:
    """A number of its own, a ratio to its own batches, a ratio to a bare echo."""
    samples = {
        "subscriptions": {"headrace fsync": [99_999.0]},
        "queue": {"headrace fsync": [100.0]},
        "queue-singly": {"headrace fsync": [70.0]},
        "http": {"headrace fsync": [59.0]},
        "echo": {"headrace fsync": [100.0]},
    }
    found = {name: judge(result(samples), target(name)) for name in ("subscriptions", "queue-singly", "http")}  # fmt: skip
    assert {name: verdict.met for name, verdict in found.items()} == {
        "subscriptions": False,
        "queue-singly": True,
        "http": False,
    }
    assert found["http"].measured == "0.59 ×"


def test_one_store_serves_both_modes() -> None:
    """Memory that was measured at the default durability is that of the other mode, too."""
    samples = {"memory-many": {"headrace default": [50.0], "redis default": [100.0]}}
    assert judge(result(samples), target("memory-many", "default")).met is True
    samples["memory-many"]["redis default"] = [99.0]
    assert judge(result(samples), target("memory-many", "default")).met is False


def test_every_target_names_a_work() -> None:
    """Of the works that exist, each with a title that its amounts complete."""
    assert all(each.work in NAMED for each in TARGETS)
    assert all("{" not in work.title(quick) for work in WORKS for quick in (True, False))


def test_a_late_publisher_is_not_forgiven() -> None:
    """The time in a value is when it was due, at a fixed rate, not when it was sent."""
    values = chain.from_iterable(paced(5, 10_000, 16))
    due = [int.from_bytes(value[:8], "little") for value in values]
    assert {later - earlier for earlier, later in pairwise(due)} == {100_000}


def test_percentiles() -> None:
    """In microseconds."""
    assert spread([number / 1e6 for number in range(1000)]) == pytest.approx(
        {"p50": 500.0, "p99": 990.0, "p99.9": 999.0}
    )


# --- the report -------------------------------------------------------------------------------------
def test_the_report_says_where_headrace_loses_and_who_is_missing(tmp_path: Path) -> None:
    """Losses come first, the worst at the top; a missing peer, a failure and a shared machine are named."""
    samples = {
        "loop": {"headrace fsync": [90.0, 100.0, 110.0], "redis fsync": [200.0, 200.0, 210.0]},
        "queue": {"headrace fsync": [10.0], "redis fsync": [100.0]},
        "one-p50": {"headrace fsync": [50.0, 60.0, 70.0], "redis fsync": [120.0, 120.0, 120.0]},
    }
    busy = {"busy before": 0.6}
    text = write_report(result(samples, **busy), tmp_path).read_text()
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[:2] == ["Where Headrace loses", "Targets"]
    losses = text.partition("## Where Headrace loses")[2].partition("##")[0]
    assert re.findall(r"\*\*([\d.]+) ×", losses) == ["0.10", "0.50"]
    assert "one at a time" not in losses
    assert "2.00 × Redis" in text
    assert "100 ±10%" in text
    assert "Kafka is missing:** no network" in text
    assert "queue, nats fsync: it failed" in text
    assert "other programs used 60% of its processors" in text
    assert "shared" not in write_report(result(samples), tmp_path).read_text()
    for name in ("ratios", "bars"):
        ElementTree.parse(tmp_path / "results" / f"peers-fsync-{name}.svg")


def test_works_that_are_measured_again_replace_their_row() -> None:
    """All peers of a row come from the later run; other rows and their failures stay."""
    first = result(
        {"loop": {"headrace fsync": [1.0], "redis fsync": [1.0]}, "queue": {"redis fsync": [5.0]}},
        failures=[f"{NAMED['loop'].title(False)}, nats fsync: slow", "another: failed"],
    )
    later = result({"loop": {"headrace fsync": [2.0]}}, failures=["it failed again"])
    both = added(first, later)
    assert both["samples"] == {"loop": {"headrace fsync": [2.0]}, "queue": {"redis fsync": [5.0]}}
    assert both["failures"] == ["another: failed", "it failed again"]
    assert both["added"] == [later["command"]]


# --- real servers -----------------------------------------------------------------------------------
def run(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "benchmarks.peers", "--quick", "--modes", "fsync", "one-p50", "one-p99", *words,
        "--json", str(tmp_path / "peers.json"), "--data", str(tmp_path / "data"),
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def left_behind(tmp_path: Path) -> list[str]:
    """Processes that have something to do with this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(tmp_path) in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def test_the_smallest_work_against_headrace_and_redis(tmp_path: Path) -> None:
    """Real servers are started, driven and stopped; samples and report are written, and no data remains."""
    if not shutil.which("redis-server"):
        pytest.skip(
            "redis-server is not installed: nothing was compared (apt-get install redis-server)"
        )
    with run(tmp_path, "--peers", "headrace,redis") as process:
        printed, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, printed
    samples = json.loads((tmp_path / "peers.json").read_text())["samples"]
    for name in ("one-p50", "one-p99"):
        assert set(samples[name]) == {"headrace fsync", "redis fsync"}
        assert all(value > 0 for values in samples[name].values() for value in values)
    assert "publish one at a time, p50" in (tmp_path / "REPORT.md").read_text()
    assert not (tmp_path / "data").exists()
    assert not left_behind(tmp_path)


def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM in the middle of a round stops the servers and removes their data."""
    with run(tmp_path, "--peers", "headrace") as process:
        assert process.stdout is not None
        printed = ""
        while "round 1" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        assert left_behind(tmp_path)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=RUN_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "data").exists()
    assert not left_behind(tmp_path)
