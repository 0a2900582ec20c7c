"""``python -m tests.faults [scenario …] [--quick] [--seed N] [--amount N] [--minutes N]``"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.faults.scenario import Outcome, RunOptions, Scenario
from tests.faults.scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results" / "latest.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    lines = "\n".join(f"  {each.name:<15} {each.what}" for each in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Break a broker on purpose and look for what it lost.",
        epilog=f"scenarios:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="*", help="which ones; all of them if none is named")
    parser.add_argument("--quick", action="store_true", help="a small part of each")
    parser.add_argument("--seed", type=int, help="repeats an earlier run")
    parser.add_argument("--amount", type=int, help="how many kills, lives, sockets …")
    parser.add_argument("--minutes", type=float, help="how long the sockets are held")
    parser.add_argument("--json", type=Path, help="where the results go", default=RESULTS)
    given = parser.parse_args(arguments)
    unknown = [name for name in given.scenario if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return given


def table(rows: list[tuple[Scenario, Outcome]]) -> str:
    head = ("scenario", "amount", "anomalies", "seconds", "repeat with")
    cells = [head]
    for scenario, outcome in rows:
        amount = f"{outcome.amount:,} {scenario.unit}"
        anomalies = str(len(outcome.anomalies))
        if outcome.absent:
            anomalies = "not run" if not outcome.amount else f"{anomalies} (partly)"
        cells.append((scenario.name, amount, anomalies, f"{outcome.seconds:.0f}", outcome.replay))
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def main() -> int:
    given = parse()
    chosen = [SCENARIOS[name] for name in given.scenario] or list(SCENARIOS.values())
    seed = secrets.randbits(31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    rows: list[tuple[Scenario, Outcome]] = []
    for scenario in chosen:
        amount = given.amount or (scenario.quick if given.quick else scenario.amount)
        seconds = scenario.seconds_quick if given.quick else scenario.seconds
        if given.minutes is not None:
            seconds = given.minutes * 60
        print(f"\n{scenario.name}: {scenario.what} ({amount:,} {scenario.unit})", flush=True)
        outcome = scenario.go(
            RunOptions(seed, amount, seconds, lambda line: print(f"  {line}", flush=True))
        )
        rows.append((scenario, outcome))
        for name, figure in outcome.figures.items():
            print(
                f"  {figure:>12,}  {name}"
                if isinstance(figure, int)
                else f"  {figure!s:>12}  {name}"
            )
        if outcome.absent:
            print(f"  NOT RUN: {outcome.absent}")
        for anomaly in outcome.anomalies[:20]:
            print(f"  ANOMALY {anomaly}")
    print(f"\n{table(rows)}")
    write(given.json, rows)
    return 1 if any(outcome.anomalies for _, outcome in rows) else 0


def write(path: Path, rows: list[tuple[Scenario, Outcome]]) -> None:
    """Results of scenarios that were not run now stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    for scenario, outcome in rows:
        known[scenario.name] = {
            "unit": scenario.unit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            **asdict(outcome),
        }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
