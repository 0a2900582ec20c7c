"""Every scenario in small, where it is fast, and the command around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.files import Handle
from tests.crash.runner import ROOT
from tests.fakes import SimulatedFiles
from tests.faults import crash_states
from tests.faults.__main__ import table
from tests.faults.scenario import Outcome, RunOptions, Scenario
from tests.faults.scenarios import SCENARIOS


def outcome_of(name: str, amount: int, seconds: float = 0.0) -> Outcome:
    outcome = SCENARIOS[name].go(RunOptions(seed=7, amount=amount, seconds=seconds))
    if outcome.absent:
        pytest.skip(outcome.absent)
    return outcome


@pytest.mark.parametrize(
    ("name", "amount"), [("crash-states", 200), ("clock-jumps", 60), ("fuzz", 500)]
)
def test_in_small(name: str, amount: int) -> None:
    outcome = outcome_of(name, amount)
    assert outcome.anomalies == []
    assert outcome.amount >= amount


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in ("simulation", "fuzz")])
def test_with_real_processes(name: str) -> None:
    """What ``make faults ARGS=--quick`` does."""
    scenario = SCENARIOS[name]
    assert outcome_of(name, scenario.quick, scenario.seconds_quick).anomalies == []


def test_crash_states_notice_a_disk_that_does_not_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is honest: what is planted is found."""
    sync = SimulatedFiles.sync

    def lazy(self: SimulatedFiles, handle: Handle) -> None:
        if handle.path.suffix != ".log":
            sync(self, handle)

    monkeypatch.setattr(SimulatedFiles, "sync", lazy)
    outcome = crash_states.run(RunOptions(seed=7, amount=400, seconds=0.0))
    assert any("lost" in anomaly for anomaly in outcome.anomalies), outcome.anomalies


def test_a_scenario_that_falls_over_is_an_anomaly() -> None:
    def fall(options: RunOptions) -> Outcome:
        raise OSError("no such disk")

    scenario = Scenario("falls", "it falls over", "falls", 1, 1, fall)
    outcome = scenario.go(RunOptions(seed=3, amount=1, seconds=0.0))
    assert outcome.anomalies == ["OSError: no such disk"]
    assert outcome.replay == "python -m tests.faults falls --seed 3 --amount 1"


def test_what_was_not_run_does_not_look_like_a_success() -> None:
    scenario = Scenario("syncs", "syncs fail", "syncs", 1, 1, lambda options: Outcome())
    assert "not run" in table([(scenario, Outcome(absent="strace is not installed"))])
    assert "partly" in table([(scenario, Outcome(amount=3, absent="needs root"))])


def test_the_command(tmp_path: Path) -> None:
    """It prints the seed first and a table last, and writes JSON."""
    results = tmp_path / "results.json"
    words = ["simulation", "--seed", "11", "--amount", "2", "--json", str(results)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 11\n")
    assert "python -m tests.faults simulation --seed 11 --amount 2" in done.stdout
    assert json.loads(results.read_text())["simulation"]["amount"] == 2
