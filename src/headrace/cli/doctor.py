"""``headrace doctor``: examine a data directory, repair it on demand, look into one file."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from headrace.cli.printing import (
    AsJson,
    SafeConsole,
    count_of,
    json_text,
    new_table,
    print_json,
    progress_bar,
    size,
    visible,
)
from headrace.cli.values import Yes, confirm
from headrace.doctor.commands import examine, repair
from headrace.doctor.dump import DumpedBatch, dump
from headrace.doctor.findings import PartitionState, Report, Severity
from headrace.errors import InvalidArgument, StorageFailed

_COLOURS: dict[Severity, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "damage": "bold red",
}
_ROWS_MAX = 50
"""With more partitions than this, the healthy ones are counted, not listed."""
_FINDINGS_MAX = 20
"""More findings of one code than this are counted, not listed."""


def doctor(
    data_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA_DIR",
            envvar=["HEADRACE_DATA_DIR", "QB_DATA_DIR"],
            help="The data directory. No broker may be running on it.",
        ),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Ask, then repair the damage.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dump: Annotated[
        Path | None,
        typer.Option("--dump", metavar="FILE", help="List the batches of one segment file."),
    ] = None,
) -> None:
    """Examine or repair a data directory.

    The command checks every checksum, every offset and every file. Without --repair, it changes
    nothing. A repair never changes an offset and never deletes data: it marks destroyed records as
    lost, so consumers continue after them, and keeps a copy of each damaged file.

    \b
    Examples:
      headrace doctor data              list partitions and problems
      headrace doctor data --repair     mark destroyed records as lost
      headrace doctor data --json       the same, as JSON
      headrace doctor --dump data/orders/0/00000000000000000000.log

    \b
    Exit codes:
      0  healthy: every confirmed record can be read, or a repair has marked it as lost
      1  damage was found
      2  not examined: a broker is running on it, or it is not a data directory
    """
    try:
        if dump is not None:
            if repair or yes:
                raise InvalidArgument("--dump only reads a file; leave out --repair and --yes")
            whole = _dump(dump, as_json)
        elif data_dir is None:
            raise InvalidArgument("name the data directory, for example: headrace doctor ./data")
        elif repair:
            if as_json and not yes:
                raise InvalidArgument("--repair --json cannot ask for confirmation; add --yes")
            whole = _repair(data_dir, yes, as_json)
        elif yes:
            raise InvalidArgument("--yes is for --repair: add --repair, or leave out --yes")
        else:
            whole = _examine(data_dir, as_json)
    except BrokenPipeError:
        raise  # the reader (`| head`) closed the pipe; that is no error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageFailed(f"{where}{error.strerror or error}", retryable=False) from error
    if not whole:
        raise typer.Exit(1)


# --- examine, repair, dump -----------------------------------------------------------------------
def _examine(data_dir: Path, as_json: bool) -> bool:
    report = _watched_examination(data_dir)
    if as_json:
        print_json(report.as_dict())
    else:
        console = _console()
        _print_report(console, report)
        _print_verdict(console, report, repaired=False)
    return report.healthy


def _repair(data_dir: Path, yes: bool, as_json: bool) -> bool:
    before = _watched_examination(data_dir)
    console = _console()
    if not as_json:
        _print_report(console, before)
        if not before.repairable:
            _print_verdict(console, before, repaired=True)
            return before.healthy
        confirm(_question(before), yes)
    actions = repair(data_dir, before)
    after = _watched_examination(data_dir)
    if as_json:
        print_json(
            {
                "before": before.as_dict(),
                "actions": [asdict(action) for action in actions],
                "after": after.as_dict(),
            }
        )
    else:
        for action in actions:
            _print_item("done", "green", action.file, f"\n        {action.sentence}.")
        console.print()
        _print_verdict(console, after, repaired=True)
    return after.healthy


def _dump(path: Path, as_json: bool) -> bool:
    whole = True
    for number, piece in enumerate(dump(path)):
        whole = whole and piece.state in ("whole", "zeros")
        if number == 0 and not as_json:
            typer.echo(_DUMP_ROW.format(*_DUMP_HEAD))
        typer.echo(json_text(asdict(piece)) if as_json else visible(_dump_row(piece)))
    return whole


def _question(report: Report) -> str:
    lost = sum(finding.records for finding in report.repairable if finding.severity == "damage")
    question = f"Repair {count_of(len(report.repairable), 'finding')}"
    if lost:
        question += f" and give up {count_of(lost, 'record')} for good"
    return f"{question}?"


# --- printing -----------------------------------------------------------------------------------
def _console() -> Console:
    return SafeConsole(highlight=False, soft_wrap=True)


def _watched_examination(data_dir: Path) -> Report:
    with progress_bar("examining") as bar:
        return examine(data_dir, progress=lambda _file, done, total: bar.show(done, total, "byte"))


def _print_report(console: Console, report: Report) -> None:
    shown = report.partitions
    if len(shown) > _ROWS_MAX:
        shown = [state for state in shown if state.severity != "ok"]
    if shown:
        numbers = ("records", "batches", "segments", "size")
        titles = ("partition", "offsets", *numbers, "state")
        table = new_table([(title, title in numbers) for title in titles])
        for state in shown:
            table.add_row(*_partition_row(state))
        console.print(table, soft_wrap=False)
    if len(shown) < len(report.partitions):
        rest = len(report.partitions) - len(shown)
        console.print(f"{'and ' if shown else ''}{count_of(rest, 'partition')} without problems")
    if report.partitions:
        console.print()
    seen: Counter[str] = Counter()
    for finding in report.findings:
        seen[finding.code] += 1
        if seen[finding.code] <= _FINDINGS_MAX:
            text = f" [{finding.code}]\n        {finding.sentence}."
            _print_item(finding.severity, _COLOURS[finding.severity], finding.file, text)
    for code, number in seen.items():
        if number > _FINDINGS_MAX:
            console.print(f"and {number - _FINDINGS_MAX:,} more {code}; --json lists them all")
    if report.findings:
        console.print()


def _partition_row(state: PartitionState) -> list[Text]:
    empty = state.end_offset == state.start_offset
    cells = [
        f"{state.topic}/{state.partition}",
        "none" if empty else f"{state.start_offset} to {state.end_offset - 1}",
        f"{state.records:,}",
        f"{state.batches:,}",
        f"{state.segments:,}",
        size(state.bytes),
    ]
    return [*map(Text, cells), Text(state.severity, style=_COLOURS[state.severity])]


def _print_item(word: str, colour: str, file: str, text: str) -> None:
    _console().print(Text.assemble((f"{word:<8}", colour), (file, "bold"), text))


def _print_verdict(console: Console, report: Report, *, repaired: bool) -> None:
    totals = report.totals
    place = (
        f"in {count_of(totals.partitions, 'partition')} of {count_of(totals.topics, 'topic')}, "
        f"{size(totals.bytes)}"
    )
    records = count_of(totals.records, "record")
    if report.healthy:
        text = Text.assemble(("Healthy", "bold green"), f": {records} {place}; all can be read.")
        warnings = sum(finding.severity == "warning" for finding in report.findings)
        if warnings:
            text.append(f" {count_of(warnings, 'warning')}{'' if repaired else ', see above'}.")
        if totals.lost_records:
            text.append(f" {count_of(totals.lost_records, 'record')} given up as lost.")
        console.print(text)
        return
    damage = [finding for finding in report.findings if finding.severity == "damage"]
    text = Text.assemble(("Damage", "bold red"), f" in {count_of(len(damage), 'place')}: ")
    if totals.damaged_records:
        lost = count_of(totals.damaged_records, "record")
        text.append(f"{lost} cannot be read, {totals.records:,} can ({place}).")
    else:
        text.append(f"{records} can be read ({place}), but something else is wrong.")
    left = sum(not finding.repairable for finding in damage)
    if len(damage) > left and not repaired:
        text.append(" Run it again with --repair to give up the destroyed records and continue.")
    if left:
        text.append(f" {count_of(left, 'place')} must be fixed by hand.")
    console.print(text)


_DUMP_HEAD = ("position", "bytes", "offsets", "records", "time (UTC)", "what")
_DUMP_ROW = "{:>12} {:>10}  {:<23} {:>9}  {:<25} {}"


def _dump_row(piece: DumpedBatch) -> str:
    if piece.first is None or piece.end is None or piece.base_timestamp is None:
        offsets = records = time = "-"
        words = [piece.state]
    else:
        offsets = f"{piece.first} to {piece.end - 1}"
        records = str(piece.count)
        time = _time(piece.base_timestamp)
        words = list(piece.flags) if piece.state == "whole" else [piece.state, *piece.flags]
    if piece.producer_id:
        words.append(
            f"producer {piece.producer_id} epoch {piece.producer_epoch} "
            f"sequence {piece.first_sequence}"
        )
    return _DUMP_ROW.format(
        piece.position, piece.bytes, offsets, records, time, " ".join(words)
    ).rstrip()


def _time(milliseconds: int) -> str:
    try:
        when = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{milliseconds % 1000:03d}"
