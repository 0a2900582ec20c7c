"""Two checkouts compared: every case runs in both, one after the other, round by round.

Each checkout has a process of its own that imports its own code and its own benchmarks. A slow moment of
the machine hits both sides, so the ratio means more than either number.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import ROOT, commit_of, console, machine, number

ROUNDS_QUICK = 5
SLOWER = 0.95
"""Below this speed, relative to the other checkout, a case is reported as slower."""
STOP_S = 60.0
WORKER = Path(__file__).with_name("_worker.py")


class Worker:
    """A benchmark that is prepared in one checkout and runs a case when asked."""

    def __init__(self, tree: Path, name: str, quick: bool):
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER.read_text(), name, str(quick)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.facts: dict[str, Any] | None = None

    def __enter__(self) -> Worker:
        self.facts = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=STOP_S)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a benchmark failed; its error is above")
        return json.loads(line)

    def indexes(self) -> dict[str, int]:
        """The cases by name, in the order in which they must run."""
        assert self.facts is not None
        return {case["name"]: index for index, case in enumerate(self.facts["cases"])}

    def run(self, index: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        return float(self._answer())


def compare(
    name: str, old_tree: Path, new_tree: Path, *, quick: bool, rounds: int | None
) -> dict[str, Any] | None:
    """The cases of one benchmark with the samples of both checkouts; None if it cannot run here."""
    began = time.monotonic()
    with ExitStack() as stack, console.status(name) as status:
        old = stack.enter_context(Worker(old_tree, name, quick))
        new = stack.enter_context(Worker(new_tree, name, quick))
        if old.facts is None or new.facts is None:
            return None
        olds, news = old.indexes(), new.indexes()
        cases = [
            {**case, "old": [], "new": []} for case in new.facts["cases"] if case["name"] in olds
        ]
        rounds = rounds or (ROUNDS_QUICK if quick else new.facts["repeat"])
        for turn in range(rounds):
            for case in cases:
                status.update(f"{name}: {case['name']} ({turn + 1}/{rounds})")
                sides = [("old", old, olds), ("new", new, news)]
                for key, worker, index in sides if turn % 2 == 0 else reversed(sides):
                    case[key].append(worker.run(index[case["name"]]))
        for case in cases:
            case["speed"] = speed(case)
        return {
            "benchmark": name,
            "seconds": round(time.monotonic() - began, 1),
            "only_old": sorted(set(olds) - set(news)),
            "only_new": sorted(set(news) - set(olds)),
            "cases": cases,
        }


def speed(case: dict[str, Any]) -> float | None:
    """New to old: the median of the rounds' ratios. Above 1 the new one is better, whatever the unit."""
    each = ratios(case)
    return round(statistics.median(each), 4) if each else None


def ratios(case: dict[str, Any]) -> list[float]:
    """The ratio of each round. Its two runs are neighbours, so a slow minute of the machine hits both."""
    pairs = zip(case["old"], case["new"], strict=True)
    if case["smaller"]:
        return [old / new for old, new in pairs if old and new]
    return [new / old for old, new in pairs if old and new]


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['benchmark']} ({result['seconds']:.0f} s)", title_justify="left", box=None)  # fmt: skip
    for column in ("", "old", "new", " ", "speed new/old", "rounds"):
        table.add_column(column, justify="right" if column.strip() else "left")
    for case in result["cases"]:
        each = ratios(case)
        slow = case["speed"] is not None and case["speed"] < SLOWER
        ratio = "" if case["speed"] is None else f"{case['speed']:.2f} ×"
        table.add_row(
            case["name"],
            number(statistics.median(case["old"])),
            number(statistics.median(case["new"])),
            case["unit"],
            f"[red]{ratio}[/red]" if slow else ratio,
            f"{min(each):.2f} – {max(each):.2f}" if each else "",
        )
    console.print(table)
    for side in ("old", "new"):
        if result[f"only_{side}"]:
            console.print(f"only in the {side} checkout: {'; '.join(result[f'only_{side}'])}")
    console.print()


def against(
    other: Path, names: list[str], *, quick: bool, rounds: int | None, directory: Path
) -> list[str]:
    """Compare, print, and write ``against.json``; returns the cases that are slower."""
    results = []
    for name in names:
        if not (other / "benchmarks" / f"{name}.py").is_file():
            console.print(f"{name}: only in the new checkout, not measured")
            continue
        result = compare(name, other, ROOT, quick=quick, rounds=rounds)
        if result is None:
            console.print(f"{name}: not measured")
            continue
        show(result)
        results.append(result)
        facts = {"old": commit_of(other), "new": commit_of(ROOT), "quick": quick, **machine()}
        directory.mkdir(parents=True, exist_ok=True)
        document = {**facts, "benchmarks": results}
        (directory / "against.json").write_text(json.dumps(document, indent=2) + "\n")
    return [
        f"{result['benchmark']}: {case['name']} ({case['speed']:.2f} ×)"
        for result in results
        for case in result["cases"]
        if case["speed"] is not None and case["speed"] < SLOWER
    ]
