"""A few kills, as an ordinary test. ``make crash`` does a hundred."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.crash import fsync_fault
from tests.crash.runner import Run


def test_kills(tmp_path: Path) -> None:
    """Nothing acknowledged is lost, doubled, moved or skipped when the broker is killed at work."""
    seed = secrets.randbits(32)
    checker = Run(tmp_path, kills=3, seed=seed, life_s=0.6).go()
    assert not checker.anomalies, f"seed {seed}: {[str(each) for each in checker.anomalies[:5]]}"
    assert checker.counts["messages acknowledged"] > 0
    assert checker.counts["deliveries"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_kills(tmp_path: Path) -> None:
    """The same, thirty times over."""
    seed = secrets.randbits(32)
    checker = Run(tmp_path, kills=30, seed=seed, life_s=1.0).go()
    assert not checker.anomalies, f"seed {seed}: {[str(each) for each in checker.anomalies[:5]]}"


@pytest.mark.slow
@pytest.mark.skipif(fsync_fault.absence() is not None, reason=str(fsync_fault.absence()))
def test_failed_syncs(tmp_path: Path) -> None:
    """The kernel says that a sync failed: the broker stops, and nothing that it promised is lost."""
    seed = secrets.randbits(32)
    checker = fsync_fault.go(Run(tmp_path, kills=0, seed=seed), rounds=4)
    assert not checker.anomalies, f"seed {seed}: {[str(each) for each in checker.anomalies[:5]]}"
