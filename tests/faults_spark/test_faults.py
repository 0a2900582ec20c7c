"""A few kills, as an ordinary test. ``make faults-spark`` does thirty, of every pipeline."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path

import pytest

from tests.faults_spark.runner import Run, Verdict, judge, table

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


def test_three_kills(tmp_path: Path) -> None:
    """A Python worker, the driver's JVM and the broker die at work: the output is the input, once."""
    seed = secrets.randbits(32)
    run = Run(tmp_path, seed=seed, kinds=("worker", "jvm", "broker"), spread_s=1.0)
    verdict = run.go(3)
    told = "\n".join(table(run.kills))
    assert verdict.is_good, (
        f"seed {seed}: {verdict.lost=} {verdict.doubled=} {verdict.foreign=}\n{told}"
    )
    assert verdict.rows == run.published
    assert run.lives >= 2, f"the JVM was killed, and so there was another driver\n{told}"


def test_the_verdict_sees_every_kind_of_mistake() -> None:
    """A judge that acquits everybody is no judge."""
    wanted = Counter(["a", "b", "c"])
    assert judge(wanted, Counter(["c", "b", "a"])) == Verdict(3)
    assert judge(wanted, Counter(["a", "b", "b", "x"])) == Verdict(3, ["c"], ["b"], ["x"])
    assert judge(wanted, wanted).is_good
    assert not judge(wanted, Counter()).is_good
    assert not judge(Counter(), Counter()).is_good
