"""The report of the comparison with other brokers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.drive import spread
from benchmarks.peers.driver import paced
from benchmarks.peers.report import ratio, write_report
from benchmarks.peers.works import WORKS


def result(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.peers", "when": "2026-01-01T00:00:00Z", "cpus": 2, "processor": "x",
        "system": "Linux", "python": "3.11", "commit": "abc", "rounds": 3, "quick": False,
        "missing": {"Kafka": "no network"}, "failures": ["queue, nats fsync: it failed"],
        "configured": {"Headrace": {"fsync": "always"}}, "tools": {"Headrace": "load.c"}, "samples": samples,
    }  # fmt: skip


def test_the_report_says_where_headrace_loses_and_who_is_missing(tmp_path: Path) -> None:
    """Rates and times both count as losses when a peer is better; a missing peer and a failure are named."""
    samples = {
        "loop": {"headrace fsync": [90.0, 100.0, 110.0], "redis fsync": [200.0, 200.0, 210.0]},
        "one": {"headrace fsync": [50.0, 60.0, 70.0], "redis fsync": [120.0, 120.0, 120.0]},
    }
    text = write_report(result(samples), tmp_path).read_text()
    losses = text.partition("## Where Headrace loses")[2].partition("##")[0]
    assert "plain loop, not waiting (synced before each answer): 0.50 × Redis" in losses
    assert "one at a time" not in losses
    assert "**2.00 ×** Redis" in text
    assert "Kafka is missing:** no network" in text
    assert "queue, nats fsync: it failed" in text
    assert (tmp_path / "results" / "peers-fsync.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(("name", "expected"), [("loop", 0.5), ("one", 2.0)])
def test_a_ratio_above_one_is_better(name: str, expected: float) -> None:
    """Whether more is better, or less."""
    work = next(work for work in WORKS if work.name == name)
    found = ratio(
        work, {"headrace": [100.0], "redis": [200.0], "nats": [300.0 if name == "one" else 100.0]}
    )
    assert found == (expected, "redis")


def test_a_late_publisher_is_not_forgiven() -> None:
    """The time in a value is when it was due, at a fixed rate, not when it was sent."""
    due = [int.from_bytes(value[:8], "little") for value in paced(5, 10_000, 16)]
    assert {later - earlier for earlier, later in pairwise(due)} == {100_000}


def test_percentiles() -> None:
    """In microseconds."""
    assert spread([number / 1e6 for number in range(1000)]) == pytest.approx(
        {"p50": 500.0, "p99": 990.0, "p99.9": 999.0}
    )
