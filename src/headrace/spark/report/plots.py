"""Numbers as drawings: lines over time, and bars. SVG that takes its colours from the page.

Colours are classes (``s0`` to ``s7``), so a drawing follows the theme of the page. No more than :data:`SERIES_MAX` lines share a
drawing; the others are one line, *others*. A gap in the numbers is a gap in the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from headrace.spark.report.collecting import STEPS_MS, Period, Values

WIDTH, HEIGHT = 900, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 26
SERIES_MAX = 8
BAR_HEIGHT = 22
_TICKS = 4
Text = Callable[[float], str]


class Series(NamedTuple):
    name: str
    values: Values
    colour: int = 0
    """Its number: a topic or a subscription has the same colour in all drawings of a section."""


# --- numbers as text ----------------------------------------------------------------------------------
def short(value: float) -> str:
    """1,234 is ``1.2k``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{_digits(value / size)}{unit}"
    return _digits(value)


def size(value: float) -> str:
    """Bytes."""
    for unit, each in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= each:
            return f"{_digits(value / each)} {unit}"
    return f"{_digits(value)} B"


def duration(value: float) -> str:
    """Milliseconds."""
    for unit, each in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if abs(value) >= each:
            return f"{_digits(value / each)} {unit}"
    return f"{_digits(value)} ms"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def moment(time_ms: float, form: str = "%Y-%m-%d %H:%M") -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(form)


# --- scales -------------------------------------------------------------------------------------------
def ceiling(highest: float, base: int = 10) -> float:
    """A round number that is not lower; ``base`` 2: for bytes."""
    if highest <= 0:
        return 1.0
    power = 1.0
    while power * base <= highest:
        power *= base
    while power > highest:
        power /= base
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if base == 10 else (1, 1.25, 1.5, 2)
    return next((step * power for step in steps if step * power >= highest), base * power)


def others(found: Sequence[Series], period: Period) -> list[Series]:
    """The first ones, and the sum of the rest."""
    if len(found) <= SERIES_MAX:
        return list(found)
    rest = found[SERIES_MAX - 1 :]
    total: Values = []
    for number in range(period.intervals):
        some = [v for each in rest if (v := each.values[number]) is not None]
        total.append(sum(some) if some else None)
    return [*found[: SERIES_MAX - 1], Series(f"others ({len(rest)})", total, SERIES_MAX - 1)]


# --- drawings -----------------------------------------------------------------------------------------
def lines(
    title: str, found: Sequence[Series], period: Period, text: Text, *, base: int = 10
) -> str:
    """Lines over time, with a legend and the numbers."""
    values = [value for each in found for value in each.values if value is not None]
    top = ceiling(max(values, default=0), base)
    span = WIDTH - LEFT - RIGHT
    depth = HEIGHT - TOP - BOTTOM

    def x(number: float) -> float:
        return LEFT + span * number / max(period.intervals, 1)

    def y(value: float) -> float:
        return TOP + depth * (1 - value / top)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="plot">'
    ]
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        at = y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text(value))}</text>')  # fmt: skip
    parts += _times(period, x)
    for each in found:
        parts.append(_line(each, x, y, period, text))
    parts.append("</svg>")
    return "".join(parts) + _legend(found) + _numbers(found, period, text)


def _times(period: Period, x: Callable[[float], float]) -> list[str]:
    """Round times below the drawing."""
    length = period.end_ms - period.start_ms
    steps = [*STEPS_MS, STEPS_MS[-1] * -(-length // (8 * STEPS_MS[-1]))]
    step = next(each for each in steps if length / each <= 8)
    form = "%m-%d" if step >= 24 * 3_600_000 else "%H:%M:%S" if step < 60_000 else "%H:%M"
    first = -(-period.start_ms // step) * step
    parts = []
    for time_ms in range(first, period.end_ms + 1, step):
        at = x((time_ms - period.start_ms) / period.step_ms)
        if at < WIDTH - RIGHT - 15:
            parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{moment(time_ms, form)}</text>')  # fmt: skip
    return parts


def _line(
    series: Series,
    x: Callable[[float], float],
    y: Callable[[float], float],
    period: Period,
    text: Text,
) -> str:
    runs: list[list[str]] = [[]]
    dots = []
    for index, value in enumerate(series.values):
        if value is None:
            runs.append([])
            continue
        at = (x(index + 0.5), y(value))
        runs[-1].append(f"{at[0]:.1f},{at[1]:.1f}")
        when = moment(period.start_ms + index * period.step_ms, "%m-%d %H:%M:%S")
        label = f"{series.name}: {text(value)} at {when}"
        dots.append(f'<circle class="dot" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="6"><title>{escape(label)}</title></circle>')  # fmt: skip
    drawn = "".join(
        f'<polyline class="line s{series.colour % SERIES_MAX}" points="{" ".join(run)}"/>'
        if len(run) > 1
        else f'<circle class="point s{series.colour % SERIES_MAX}" cx="{run[0].split(",")[0]}" cy="{run[0].split(",")[1]}" r="2.5"/>'
        for run in runs
        if run
    )
    return drawn + "".join(dots)


def _legend(found: Sequence[Series]) -> str:
    items = "".join(
        f'<li><span class="swatch s{each.colour % SERIES_MAX}"></span>{escape(each.name)}</li>'
        for each in found
    )
    return f'<ul class="legend">{items}</ul>'


def _numbers(found: Sequence[Series], period: Period, text: Text) -> str:
    """The same as a table: for who cannot see the drawing, or wants to copy it."""
    head = "".join(f"<th>{escape(each.name)}</th>" for each in found)
    rows = []
    for number in range(period.intervals):
        values = [each.values[number] for each in found]
        if not any(values):
            continue
        when = moment(period.start_ms + number * period.step_ms, "%Y-%m-%d %H:%M:%S")
        cells = "".join(f"<td>{'' if v is None else escape(text(v))}</td>" for v in values)
        rows.append(f"<tr><th>{when}</th>{cells}</tr>")
    return (
        f'<details><summary>numbers</summary><div class="scroll"><table><thead><tr><th>time (UTC)</th>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def bars(title: str, found: Sequence[tuple[str, float]], text: Text) -> str:
    """A bar for each, the longest first."""
    top = max((value for _, value in found), default=0) or 1
    height = BAR_HEIGHT * len(found) + 4
    left, right = 380, 70
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" class="plot">'
    ]
    for number, (name, value) in enumerate(found):
        at = BAR_HEIGHT * number
        width = max((WIDTH - left - right) * value / top, 1)
        shown = name if len(name) <= 52 else name[:51] + "…"
        parts.append(
            f'<text class="label" x="{left - 8}" y="{at + 15}" text-anchor="end">{escape(shown)}<title>{escape(name)}'
            f'</title></text><rect class="bar" x="{left}" y="{at + 3}" width="{width:.1f}" height="{BAR_HEIGHT - 6}" '
            f'rx="2"/><text class="tick" x="{left + width + 6:.1f}" y="{at + 15}">{escape(text(value))}</text>'
        )
    return "".join(parts) + "</svg>"
