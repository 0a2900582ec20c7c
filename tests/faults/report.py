"""The table of docs/reliability.md, from the results of the last runs (``results/latest.json``).

    python -m tests.faults.report

writes it anew. A test compares the two, so the page shows what was measured and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results" / "latest.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def rows(results: dict[str, Any]) -> str:
    lines = [
        "| what | how much | anomalies | time | measured besides | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, scenario in SCENARIOS.items():
        found = results.get(name)
        if found is None:
            lines.append(f"| {name} | not run yet | | | | `make faults ARGS={name}` |")
            continue
        figures = "; ".join(
            f"{what}: {figure:,}" if isinstance(figure, int) else f"{what}: {figure}"
            for what, figure in found["figures"].items()
            if figure
        )
        anomalies = str(len(found["anomalies"]))
        if found["absent"]:
            anomalies += f" ({found['absent']})"
        lines.append(
            f"| {name} | {found['amount']:,} {scenario.unit} | {anomalies} | {found['seconds']:.0f} s "
            f"| {figures} | `make faults ARGS={name}` |"
        )
    dates = sorted({found["date"] for found in results.values()})
    machines = sorted({found["machine"] for found in results.values()})
    if dates:
        lines.append("")
        lines.append(f"Run on {' and '.join(dates)}: {'; '.join(machines)}.")
    return "\n".join(lines) + "\n"


def write() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    PAGE.write_text(before + BEGIN + rows(results) + END + after)


if __name__ == "__main__":
    write()
