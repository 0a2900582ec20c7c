"""The plots, as SVG that can be read on a light and on a dark page."""

from __future__ import annotations

import math
import statistics
from html import escape

from benchmarks.harness import number
from benchmarks.peers.targets import NAMES, OTHERS, ratios
from benchmarks.peers.works import Work

Rows = list[tuple[Work, dict[str, list[float]]]]
COLOURS = {
    "headrace": "#2f81f7",
    "redis": "#e5534b",
    "nats": "#2da44e",
    "rabbitmq": "#e3872d",
    "kafka": "#a371f7",
}
WIDTH, LEFT = 920, 350
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.faint{fill:#59636e}.line{stroke:#d1d9e0}"
    ".one{stroke:#1f2328}.win{fill:#2da44e18}.mark{stroke:#fff}"
    "@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.faint{fill:#9198a1}.line{stroke:#3d444d}"
    ".one{stroke:#f0f6fc}.win{fill:#2da44e22}.mark{stroke:#0d1117}}"
)


def _svg(parts: list[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )  # fmt: skip


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _mark(peer: str, x: float, y: float) -> str:
    """A shape for each peer: colours alone do not tell all readers apart."""
    colour, r = COLOURS[peer], 5.5
    if peer == "redis":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}" class="mark"/>'
    corners = {
        "nats": [(-r, r), (r, r), (0, -r)],
        "rabbitmq": [(-r + 0.8, -r + 0.8), (r - 0.8, -r + 0.8), (r - 0.8, r - 0.8), (-r + 0.8, r - 0.8)],
        "kafka": [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)],
    }[peer]  # fmt: skip
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{colour}" class="mark"/>'


def ratio_plot(rows: Rows, quick: bool) -> str:
    """Headrace to each peer on a logarithmic scale: right of the line it is better."""
    found = [(work, ratios(work, samples)) for work, samples in rows]
    found = [(work, each) for work, each in found if each]
    every = [value for _, each in found for value in each.values() if 0 < value < math.inf] or [1.0]
    low = min(math.floor(math.log10(min(every)) - 0.05), -1)
    high = max(math.ceil(math.log10(max(every)) + 0.05), 1)
    right, top, step = WIDTH - 30, 62, 24
    bottom = top + step * len(found)

    def at(value: float) -> float:
        power = math.log10(min(max(value, 10.0**low), 10.0**high))
        return LEFT + (power - low) / (high - low) * (right - LEFT)

    parts = [
        f'<rect class="win" x="{at(1):.1f}" y="{top}" width="{right - at(1):.1f}" height="{bottom - top}"/>',
        _text(LEFT, 20, "Headrace to:", "end"),
        _text(at(1) + 8, top - 8, "Headrace is better →", kind="faint"),
        _text(at(1) - 8, top - 8, "← the peer is better", "end", "faint"),
    ]  # fmt: skip
    for column, peer in enumerate(OTHERS):
        parts += [_mark(peer, LEFT + 20 + column * 115, 16)]
        parts += [_text(LEFT + 32 + column * 115, 20, NAMES[peer])]
    for power in range(low, high + 1):
        kind, x = "one" if power == 0 else "line", at(10.0**power)
        parts.append(f'<path class="{kind}" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 18, f"{10.0**power:g} ×", "middle", "faint"))
    for line, (work, each) in enumerate(found):
        y = top + step * (line + 0.5)
        parts.append(_text(LEFT - 14, y + 4, work.title(quick), "end"))
        parts.append(f'<path class="line" d="M{LEFT} {y + step / 2}H{right}" opacity=".5"/>')
        parts += [_mark(peer, at(value), y) for peer, value in each.items()]
    return _svg(parts, bottom + 30)


def bar_plot(rows: Rows, quick: bool) -> str:
    """Bars for each work, as shares of the longest, in two columns."""
    bar, head, gap, column_width = 14, 20, 16, WIDTH / 2
    peers = [peer for peer in NAMES if any(peer in samples for _, samples in rows)]
    parts = []
    for column, peer in enumerate(peers):
        x = 10 + column * 112
        parts.append(f'<rect x="{x}" y="9" width="12" height="12" rx="2" fill="{COLOURS[peer]}"/>')
        parts.append(_text(x + 18, 19, NAMES[peer]))
    parts.append(_text(WIDTH - 10, 19, "↑ more is better, ↓ less is better", "end", "faint"))
    block = head + bar * len(peers) + gap
    lines = math.ceil(len(rows) / 2)
    for place, (work, samples) in enumerate(rows):
        x = 10 + column_width * (place // lines)
        y = 52.0 + block * (place % lines)
        middles = {peer: statistics.median(samples[peer]) for peer in peers if peer in samples}
        longest = max(middles.values()) or 1
        direction = "↓" if work.smaller else "↑"
        parts.append(
            f'<text x="{x}" y="{y}">{escape(work.title(quick))} '
            f'<tspan class="faint">· {escape(work.unit)} {direction}</tspan></text>'
        )
        y += 7
        for peer, value in middles.items():
            size = max(value / longest * (column_width - 100), 1.5)
            parts.append(
                f'<rect x="{x}" y="{y:.0f}" width="{size:.1f}" height="{bar - 3}" rx="1.5" fill="{COLOURS[peer]}"/>'
            )
            parts.append(_text(x + size + 6, y + bar - 4.5, number(value)))
            y += bar
    return _svg(parts, 46 + block * lines)
