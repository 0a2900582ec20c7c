"""``REPORT.md`` and its plots, made from the samples of one run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import number
from benchmarks.peers.native import TOOLS
from benchmarks.peers.plots import Rows, bar_plot, ratio_plot
from benchmarks.peers.targets import MODES, NAMES, TARGETS, judge, samples_of, to_the_best
from benchmarks.peers.works import NAMED, WORKS

NOTES = Path(__file__).parent / "notes.md"
"""What the numbers alone do not say; it stands at the end of the report."""
SHARED = 0.1
"""From this share of the processors on, the machine was not ours alone."""
HEADINGS = {
    "fsync": "Synced before each answer",
    "default": "Each peer at its default durability (Headrace: `durability=interval`)",
}


def write_report(result: dict[str, Any], directory: Path) -> Path:
    plots = directory / "results"
    plots.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Headrace beside other brokers",
        "",
        *_head(result),
        *_losses(result),
        *_targets(result),
    ]
    for mode, heading in HEADINGS.items():
        rows = _rows(result, mode)
        if rows:
            lines += [f"## {heading}", ""]
            for name, draw in (("ratios", ratio_plot), ("bars", bar_plot)):
                file = f"peers-{mode}-{name}.svg"
                (plots / file).write_text(draw(rows, result["quick"]))
                lines += [f"![{heading}: {name}](results/{file})", ""]
            lines += _table(rows, result["quick"])
    lines += [*_configured(result), *_measured(result)]
    if result["failures"]:
        lines += ["## Not measured", "", *[f"- {failure}" for failure in result["failures"]], ""]
    if NOTES.exists():
        lines += [NOTES.read_text().strip(), ""]
    path = directory / "REPORT.md"
    path.write_text("\n".join(lines))
    return path


def _rows(result: dict[str, Any], mode: str) -> Rows:
    found = [(work, samples_of(result, work, mode)) for work in WORKS if work.call != "echo"]
    return [(work, samples) for work, samples in found if samples]


def _head(result: dict[str, Any]) -> list[str]:
    rounds = result["rounds"]
    lines = [
        f"One run of `{result['command']}` on {result['when'][:10]}: {result['cpus']} cores ({result['processor']}), "
        f"{_gigabytes(result['memory'])} of memory, {result['system']}, {result['file system']}, Python {result['python']}, commit "
        f"{result['commit']}. {rounds} round{'s' if rounds > 1 else ''} in {result['seconds'] / 60:.0f} minutes. Each "
        "number is a median, ± half the distance between its extremes. The samples are in "
        "[`results/peers.json`](results/peers.json).",
        "",
    ]
    for command in result.get("added", []):
        lines += [f"Some works were measured again, by `{command}`.", ""]
    busy = max([result["busy before"], *result["busy between rounds"][:1]])
    if busy > SHARED:
        lines += [
            f"**The machine was shared:** other programs used {busy:.0%} of its processors when the run began. So the rates "
            "are too low, the times are too long, and the ratios are not exact.",
            "",
        ]
    if result.get("is cut"):
        lines += ["**The time limit ended the run** before the last round was complete.", ""]
    if result["quick"]:
        lines += [
            "**This was a quick run:** small amounts, one round. It shows that everything works. Its numbers are only "
            "rough.",
            "",
        ]
    for peer, why in result["missing"].items():
        lines += [f"**{NAMES[peer]} is missing:** {why}", ""]
    return lines


def _gigabytes(text: str) -> str:
    """The kernel gives kilobytes: "24682416 kB"."""
    amount, _, unit = text.partition(" ")
    return f"{int(amount) * 1024 / 1e9:.0f} GB" if unit == "kB" else text


def _losses(result: dict[str, Any]) -> list[str]:
    """Worst first."""
    quick, found = result["quick"], []
    for mode in HEADINGS:
        for work, samples in _rows(result, mode):
            best = to_the_best(work, samples)
            if best is not None and best[0] < 1 and not (work.call == "store" and mode == "fsync"):
                ours, theirs = (statistics.median(samples[peer]) for peer in ("headrace", best[1]))
                cells = (
                    work.title(quick), "–" if work.call == "store" else MODES[mode],
                    f"{number(ours)} {work.unit}", f"{NAMES[best[1]]}: {number(theirs)} {work.unit}",
                    f"**{best[0]:.2f} ×**",
                )  # fmt: skip
                found.append((best[0], f"| {' | '.join(cells)} |"))
    lines = ["## Where Headrace loses", ""]
    if not found:
        return [*lines, "In no row of this run.", ""]
    lines += [
        "The table has every row in which a peer is better. A ratio below 1 means that Headrace is worse, also in rows "
        "in which less is better.",
        "",
        "| work | durability | Headrace | the best peer | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    return [*lines, *[line for _, line in sorted(found)], ""]


def _targets(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Targets", "",
        "The ratios are those of this run. Headrace and a peer have the same durability, unless the target says otherwise.", "",
        "| work | durability | target | measured | |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for verdict in (judge(result, target) for target in TARGETS):
        work = NAMED[verdict.target.work]
        sign = {True: "met", False: "**missed**", None: "–"}[verdict.met]
        durability = "–" if work.call == "store" else MODES[verdict.target.mode]
        title = work.title(result["quick"])
        lines.append(
            f"| {title} | {durability} | {verdict.target.text} | {verdict.measured} | {sign} |"
        )
    return [*lines, ""]


def _table(rows: Rows, quick: bool) -> list[str]:
    peers = [peer for peer in NAMES if any(peer in samples for _, samples in rows)]
    lines = [
        f"| | {' | '.join(NAMES[peer] for peer in peers)} | Headrace to the best peer |",
        "|---|" + "---:|" * (len(peers) + 1),
    ]
    for work, samples in rows:
        cells = [_cell(samples.get(peer)) for peer in peers]
        best = to_the_best(work, samples)
        verdict = "" if best is None else f"{best[0]:.2f} × {NAMES[best[1]]}"
        lines.append(f"| {work.title(quick)} ({work.unit}) | {' | '.join(cells)} | {verdict} |")
    return [*lines, ""]


def _cell(values: list[float] | None) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    wide = (max(values) - min(values)) / middle / 2 if middle else 0.0
    return number(middle) + (f" ±{wide:.0%}" if len(values) > 1 else "")


def _configured(result: dict[str, Any]) -> list[str]:
    lines = [
        "## How each was configured", "",
        "| | version | Python client | synced before each answer | default durability | load tool |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for peer, about in result["about"].items():
        modes = about["modes"]
        cells = (
            about["name"], about["version"], about["client"], modes["fsync"], modes["default"], TOOLS[peer],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _measured(result: dict[str, Any]) -> list[str]:
    fetching = result["fetching seconds"]
    return [
        "## How it is measured", "",
        "- All servers run at the same time, on loopback, with their data on the disk of the checkout. Only one of them is "
        "measured at a time. Each work runs in a new process with a new topic, which is deleted afterwards. The peers take "
        "turns, and each round begins with another peer.",
        "- Each client is used as its documentation advises. Redis gets pipelines of 1,000. NATS has up to 10,000 unanswered "
        "publishes. RabbitMQ has up to 2,000 unconfirmed publishes, with pika's callbacks. Kafka uses `produce` and "
        "`produce_batch` with the client's own batches. Clients for asyncio run on uvloop.",
        "- The consumer of a queue acknowledges each message. Redis gets all acks of a read in one `XACK`. Kafka's groups "
        "have no ack for a single message: the consumer commits after each 1,000 messages, and in the background (the "
        "default) while the latency is measured.",
        "- \"Published one at a time\" means that the server got and stored each message alone: Headrace as a batch of one, "
        "Kafka with `batch.num.messages=1`. The other peers always store each message alone.",
        "- Latency is measured open loop: it begins at the time at which a message was due, so the delay of a late "
        "publisher counts, too. The publisher and the consumer are two processes.",
        "- A slow peer does a smaller amount of a work; its rate is that of this amount. A dash means that a peer cannot do "
        "the work: RabbitMQ's streams are never synced, and only Headrace and RabbitMQ accept messages over HTTP.",
        "- Memory is the resident memory of all processes of a server that holds nothing else. Kafka's includes the heap of "
        "1 GB that its start script gives it. Memory and restarts are measured once for peers whose files do not depend on "
        "the durability.",
        "", "## How to repeat it", "",
        "```sh",
        "make bench-peers                                      # at most 40 minutes",
        'make bench-peers ARGS="--quick"                       # about five minutes',
        'make bench-peers ARGS="--peers redis,headrace queue"  # some peers, some works; this report stays as it is',
        "```", "",
        f"The first run also downloads the peers, which takes some minutes ({fetching:.0f} s in this run): Redis, RabbitMQ and wrk from "
        "Debian (needs root), NATS through the Go module proxy (needs Go), Kafka and PerfTest from Maven Central (needs "
        "Java). If a peer cannot be installed, the report lists it as missing. Ctrl-C stops every server and removes all data.", "",
    ]  # fmt: skip
