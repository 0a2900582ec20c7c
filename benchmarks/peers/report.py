"""``REPORT.md`` and its plots, made from the samples of one run."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness import number
from benchmarks.peers.works import WORKS, Work

COLOURS = {
    "headrace": "#1f77b4",
    "redis": "#d62728",
    "nats": "#2ca02c",
    "rabbitmq": "#ff7f0e",
    "kafka": "#7f7f7f",
}
NAMES = {
    "headrace": "Headrace",
    "redis": "Redis",
    "nats": "NATS",
    "rabbitmq": "RabbitMQ",
    "kafka": "Kafka",
}
MODES = {
    "fsync": "Synced before each answer",
    "default": "Each peer at its default (Headrace: `durability=interval`)",
}


def _rows(result: dict[str, Any], mode: str) -> list[tuple[Work, dict[str, list[float]]]]:
    rows = []
    for work in WORKS:
        samples = {
            label.split()[0]: values
            for label, values in result["samples"].get(work.name, {}).items()
            if label.endswith(f" {mode}")
        }
        if samples:
            rows.append((work, samples))
    return rows


def ratio(work: Work, samples: dict[str, list[float]]) -> tuple[float, str] | None:
    """How many times as good Headrace is as the best peer, and which peer that is."""
    peers = {
        name: statistics.median(values) for name, values in samples.items() if name != "headrace"
    }
    if "headrace" not in samples or not peers:
        return None
    best = (min if work.smaller else max)(peers, key=lambda name: peers[name])
    ours = statistics.median(samples["headrace"])
    return (peers[best] / ours if work.smaller else ours / peers[best]), best


def write_report(result: dict[str, Any], directory: Path) -> Path:
    plots = directory / "results"
    plots.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Headrace beside other brokers",
        "",
        f"One run of `{result['command']}` on {result['when'][:10]}: {result['cpus']} cores ({result['processor']}), "
        f"{result['system']}, Python {result['python']}, commit {result['commit']}. {result['rounds']} rounds; peers take "
        "turns; each number is a median. `make bench-peers` repeats it; the samples are in `results/peers.json`.",
        "",
    ]
    if result["quick"]:
        lines += [
            "**This was a quick run: small amounts, few rounds. Its numbers show that it works, not how fast.**",
            "",
        ]
    for name, why in result["missing"].items():
        lines += [f"**{name} is missing:** {why}", ""]
    for mode, title in MODES.items():
        rows = _rows(result, mode)
        if not rows:
            continue
        peers = [name for name in NAMES if any(name in samples for _, samples in rows)]
        lines += [f"## {title}", "", f"![{title}](results/peers-{mode}.svg)", ""]
        lines += [
            f"| | {' | '.join(NAMES[name] for name in peers)} | to the best peer |",
            "|---|" + "---:|" * (len(peers) + 1),
        ]
        for work, samples in rows:
            cells = [_cell(samples.get(name)) for name in peers]
            found = ratio(work, samples)
            verdict = "" if found is None else f"**{found[0]:.2f} ×** {NAMES[found[1]]}"
            lines.append(f"| {work.title} ({work.unit}) | {' | '.join(cells)} | {verdict} |")
        lines.append("")
        (plots / f"peers-{mode}.svg").write_text(plot(rows, peers))
    lines += _losses(result)
    lines += ["## How each was configured", "", "| peer | mode | configuration |", "|---|---|---|"]
    for name, modes in result["configured"].items():
        lines += [f"| {name} | {mode} | {text} |" for mode, text in modes.items()]
    lines += ["", "| peer | load tool |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in result["tools"].items()]
    if result["failures"]:
        lines += ["", "## Not measured", "", *[f"- {failure}" for failure in result["failures"]]]
    path = directory / "REPORT.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(values: list[float] | None) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    wide = (max(values) - min(values)) / middle / 2 if middle else 0.0
    return f"{number(middle)}" + (f" ±{wide:.0%}" if len(values) > 1 else "")


def _losses(result: dict[str, Any]) -> list[str]:
    lines = ["## Where Headrace loses", ""]
    for mode, title in MODES.items():
        for work, samples in _rows(result, mode):
            found = ratio(work, samples)
            if found is not None and found[0] < 1:
                lines.append(
                    f"- {work.title} ({title.split(' (')[0].lower()}): {found[0]:.2f} × {NAMES[found[1]]}"
                )
    return [*lines, ""] if len(lines) > 2 else [*lines, "In no row of this run.", ""]


def plot(rows: list[tuple[Work, dict[str, list[float]]]], peers: list[str]) -> str:
    """Bars for each work, as shares of the longest; text in the reader's own colour."""
    bar, gap, left, width = 14, 18, 330, 900
    y, parts = 40, []
    for column, name in enumerate(peers):
        x = left + column * 110
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="22">{NAMES[name]}</text>')
    for work, samples in rows:
        middles = {name: statistics.median(samples[name]) for name in peers if samples.get(name)}
        longest = max(middles.values()) or 1
        hint = "less is better" if work.smaller else "more is better"
        parts.append(
            f'<text x="{left - 10}" y="{y + bar * len(middles) / 2 + 4}" text-anchor="end">{escape(work.title)}'
            f"<title>{hint}</title></text>"
        )
        for name, middle in middles.items():
            size = max(middle / longest * (width - left - 130), 1)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{size:.0f}" height="{bar - 2}" fill="{COLOURS[name]}"/>'
            )
            parts.append(
                f'<text x="{left + size + 6:.0f}" y="{y + bar - 4}">{number(middle)} {escape(work.unit)}</text>'
            )
            y += bar
        y += gap
    style = "text{font:11px sans-serif;fill:#24292f}@media (prefers-color-scheme:dark){text{fill:#e6edf3}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )
