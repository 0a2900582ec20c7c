"""The benchmark of a node over Kafka: its names, and the parts that need no Kafka."""

import subprocess
import sys

from benchmarks.cluster.__main__ import BENCHMARKS, NAMES
from tests.docs.blocks import ROOT


def test_every_name_has_a_benchmark() -> None:
    """What the command offers exists, in the order in which it runs."""
    assert tuple(BENCHMARKS) == NAMES


def test_an_unknown_name_is_refused_before_anything_starts() -> None:
    """A misspelt name is told at once, with the names that exist."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", "latencies"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "publish, consume, latency" in ran.stderr
