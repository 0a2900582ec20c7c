"""A report as one page of HTML: see ``__init__.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version

from headrace.spark.report.collecting import SIZES, BrokerReport, Values
from headrace.spark.report.plots import (
    Series,
    bars,
    duration,
    lines,
    moment,
    others,
    short,
    size,
)

REASONS_MAX = 30
ROWS_MAX = 100
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --soft: #59636e; --rule: #d9dee3; --card: #f6f8fa;
  --s0: #0969da; --s1: #bc4c00; --s2: #1a7f37; --s3: #8250df; --s4: #bf3989; --s5: #0f7b87; --s6: #9a6700; --s7: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --soft: #9198a1; --rule: #2d333b; --card: #151b23;
    --s0: #58a6ff; --s1: #f0883e; --s2: #56d364; --s3: #bc8cff; --s4: #f778ba; --s5: #39c5cf; --s6: #e3b341; --s7: #9198a1; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 24px 20px 60px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; } h3 { font-size: 15px; margin: 20px 0 4px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0 0; padding: 0; list-style: none; }
.facts li { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 8px 14px; min-width: 130px; }
.facts b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.plot { width: 100%; height: auto; display: block; }
.plot text { font: 12px system-ui, sans-serif; fill: var(--soft); } .plot .label { fill: var(--text); }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: transparent; } .dot:hover { fill: var(--soft); fill-opacity: .35; } .bar { fill: var(--s0); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 4px 0 2px 64px; padding: 0; font-size: 13px; }
.swatch { display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle; background: currentColor; }
details { margin: 2px 0 0 64px; font-size: 13px; } summary { cursor: pointer; color: var(--soft); }
.scroll { overflow: auto; max-height: 360px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
@media print { details { display: none; } }
"""
_COLOURS = "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} .point.s{n} {{ fill: var(--s{n}); }} .swatch.s{n} {{ color: var(--s{n}); }}\n"
    for n in range(8)
)


def html_of(report: BrokerReport, *, made_ms: int) -> str:
    """The whole page."""
    period = report.period
    times = f"{moment(period.start_ms)} to {moment(period.end_ms)} UTC"
    body = "".join(
        (
            f"<h1>Headrace report</h1><p class='soft'>{escape(report.place)} · {times} · intervals of "
            f"{duration(period.step_ms)}</p>",
            _facts(report),
            _traffic(report),
            _sizes(report),
            _subscriptions(report),
            _dead_letters(report),
            _pipelines(report),
            f"<p class='soft'>Made at {moment(made_ms)} UTC by headrace {escape(version('headrace'))}.</p>",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Headrace report, {times}</title><style>{_STYLE}{_COLOURS}</style></head><body>{body}</body></html>\n"
    )


def _total(values: Values) -> float:
    return sum(value or 0 for value in values)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _nothing(why: str) -> str:
    return f"<p class='soft'>{escape(why)}</p>"


def _plot(title: str, drawing: str) -> str:
    return f"<h3>{escape(title)}</h3>{drawing}"


def _facts(report: BrokerReport) -> str:
    facts = [
        ("messages published", short(sum(_total(each.messages) for each in report.topics))),
        ("bytes published", size(sum(_total(each.bytes) for each in report.topics))),
        ("deliveries", short(sum(_total(each.delivered) for each in report.subscriptions))),
        ("redeliveries", short(sum(_total(each.redelivered) for each in report.subscriptions))),
        ("dead letters", short(sum(each.letters for each in report.reasons))),
        ("batches of pipelines", short(sum(_total(each.batches) for each in report.pipelines))),
    ]
    items = "".join(f"<li><b>{escape(text)}</b>{name}</li>" for name, text in facts)
    return f'<ul class="facts">{items}</ul>'


def _traffic(report: BrokerReport) -> str:
    if not report.topics:
        return _section(
            "Traffic", _nothing("The broker has no events of this time about its topics.")
        )
    period = report.period
    per = f"per {duration(period.step_ms)}"
    found = list(enumerate(report.topics))
    messages = others([Series(each.topic, each.messages, n) for n, each in found], period)
    found.sort(key=lambda each: -_total(each[1].bytes))
    volume = others([Series(each.topic, each.bytes, n) for n, each in found], period)
    return _section(
        "Traffic",
        _plot(f"Messages by topic, {per}", lines("Messages by topic", messages, period, short)),
        _plot(f"Bytes by topic, {per}", lines("Bytes by topic", volume, period, size, base=2)),
    )


def _sizes(report: BrokerReport) -> str:
    if report.sizes is None:
        return ""
    if not report.sizes:
        return _section("Message sizes", _nothing("The log holds no messages of this time."))
    largest = [(each.topic, float(each.bytes)) for each in report.sizes[:REASONS_MAX]]
    head = [
        "topic",
        "messages",
        "bytes",
        "mean",
        *(f"p{level * 100:g}" for level in SIZES),
        "largest",
    ]
    rows = [
        [each.topic, f"{each.messages:,}", size(each.bytes), size(each.bytes / max(each.messages, 1)),
         *map(size, each.percentiles), size(each.largest)]
        for each in report.sizes
    ]  # fmt: skip
    return _section(
        "Message sizes",
        "<p class='soft'>Of the messages of this time that the log still holds: their values, without keys and headers.</p>",
        _plot("Bytes in the log", bars("Bytes in the log by topic", largest, size)),
        _table(head, rows),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:ROWS_MAX]
    )
    left = len(rows) - ROWS_MAX
    more = f"<p class='soft'>and {left} more</p>" if left > 0 else ""
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>{more}'


def _subscriptions(report: BrokerReport) -> str:
    found = report.subscriptions
    if not found:
        return _section(
            "Subscriptions", _nothing("No subscription delivered anything in this time.")
        )
    period = report.period
    twice = {each.name for each in found if [other.name for other in found].count(each.name) > 1}

    def named(which: str) -> list[Series]:
        return [
            Series(
                f"{each.name} on {each.topic}" if each.name in twice else each.name,
                getattr(each, which),
                number,
            )
            for number, each in enumerate(found)
        ]

    def worst(which: str) -> list[Series]:
        """Those with the greatest numbers: these cannot be summed up."""
        return sorted(named(which), key=lambda each: -_highest(each.values))[:8]

    per = f"per {duration(period.step_ms)}"
    return _section(
        "Subscriptions",
        _plot(f"Deliveries, {per}", lines("Deliveries", others(named("delivered"), period), period, short)),
        _plot("Lag: unread messages", lines("Lag", worst("lag"), period, short)),
        _plot(
            "Latency: from publish to first delivery, 99th percentile",
            lines("Latency, 99th percentile", worst("p99_ms"), period, duration),
        ),
        _plot("Latency, median", lines("Latency, median", worst("p50_ms"), period, duration)),
    )  # fmt: skip


def _highest(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=0)


def _dead_letters(report: BrokerReport) -> str:
    if not report.reasons:
        return _section("Dead letters", _nothing("No message was given up in this time."))
    shown = [
        (f"{each.subscription}: {each.reason}", float(each.letters)) for each in report.reasons
    ]
    left = len(shown) - REASONS_MAX
    return _section(
        "Dead letters",
        _plot(
            "By subscription and reason", bars("Dead letters by reason", shown[:REASONS_MAX], short)
        ),
        _nothing(f"and {left} more reasons") if left > 0 else "",
    )


def _pipelines(report: BrokerReport) -> str:
    found = report.pipelines
    if not found:
        return _section("Pipelines", _nothing("No pipeline reported in this time."))
    period = report.period

    def named(which: str) -> list[Series]:
        return [
            Series(
                each.pipeline if each.query in ("", each.pipeline) else f"{each.pipeline} ({each.query})",
                getattr(each, which),
                number,
            )
            for number, each in enumerate(found)
        ]  # fmt: skip

    per = f"per {duration(period.step_ms)}"
    slowest = sorted(named("batch_ms"), key=lambda each: -_highest(each.values))[:8]
    behind = sorted(named("lag"), key=lambda each: -_highest(each.values))[:8]
    return _section(
        "Pipelines",
        _plot(f"Batches, {per}", lines("Batches", others(named("batches"), period), period, short)),
        _plot(f"Rows, {per}", lines("Rows", others(named("rows"), period), period, short)),
        _plot("Time of a batch, longest", lines("Time of a batch", slowest, period, duration)),
        _plot("Lag: unread records", lines("Lag of pipelines", behind, period, short)),
    )
