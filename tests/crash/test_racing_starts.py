"""Many processes open one data directory at once: one wins, the others say who did and write nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from headrace import Broker
from tests.crash.runner import ROOT

RACERS = 20


def race(directory: Path, ending: str = "close") -> tuple[list[dict[str, Any]], list[int]]:
    """What each racer said, and how each ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.racers", str(directory), str(RACERS), ending],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    answers = [orjson.loads(process.stdout.readline()) for _ in range(RACERS)]
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return answers, orjson.loads(rest)["codes"]


def everything_in(directory: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and its content."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(directory.rglob("*"))
    }


def test_racing_starts(tmp_path: Path) -> None:
    """Five races for one directory, which begins as nothing and is left in good order or not."""
    for number in range(5):
        answers, codes = race(tmp_path / "data", "close" if number % 2 else "vanish")
        winners = [answer["pid"] for answer in answers if answer["code"] == "won"]
        losers = [answer for answer in answers if answer["code"] != "won"]
        assert len(winners) == 1
        assert {answer["code"] for answer in losers} == {"directory_locked"}
        for answer in losers:
            assert f"process {winners[0]} " in answer["text"]
        assert sorted(codes) == [0] + [1] * (RACERS - 1)
    with Broker.open(tmp_path / "data") as broker:
        assert len(broker.fetch("orders", 0)) == 5


def test_losers_write_nothing(tmp_path: Path) -> None:
    """While somebody holds the directory, nothing in it changes, whoever tries to open it."""
    with Broker.open(tmp_path) as broker:
        broker.publish("orders", b"1")
        broker.create_subscription("workers", "orders")
        broker.flush()
        before = everything_in(tmp_path)
        answers, codes = race(tmp_path)
        assert {answer["code"] for answer in answers} == {"directory_locked"}
        assert codes == [1] * RACERS
        assert everything_in(tmp_path) == before
