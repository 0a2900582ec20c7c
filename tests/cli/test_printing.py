"""What is printed cannot control the reader's terminal, whoever wrote it."""

import ast
import io
import json
import re
from pathlib import Path

import pytest
from rich.live import Live
from rich.text import Text

from headrace.cli import printing
from headrace.cli.printing import SafeConsole, SafeStream, json_text, visible
from headrace.client.threads import BrokerClient
from headrace.errors import InvalidArgument
from tests.cli.rig import Command

HOSTILE = "\x1b[2J\x9b31m\u202egnp.exe\u2066\u200f\x07\x7f\x85\u2028\ufeff\r\udc9b"
"""Escapes, C1 controls, marks that turn text around, and half a character."""
CONSTANT = {
    "typer.echo(_DUMP_ROW.format(*_DUMP_HEAD))",
    ast.unparse(ast.parse("typer.echo(f\"headrace {version('headrace')}\")")),
}
ROOM = Path(printing.__file__).parent


def is_safe(text: str) -> bool:
    return all(line.replace("\t", "").isprintable() for line in text.split("\n"))


def test_text_is_made_visible() -> None:
    """Nothing is lost: what cannot be printed is escaped."""
    assert is_safe(visible(HOSTILE))
    assert visible(HOSTILE).startswith("\\x1b[2J\\x9b31m\\u202egnp.exe")
    assert visible("größe 🐎\tx\n") == "größe 🐎\tx\n"


@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_the_same_json(indent: int | None) -> None:
    """Escaped as JSON escapes, so that a program reads what was written; other letters stay."""
    value = {"größe": [HOSTILE, "\U000e0041 🐎"], HOSTILE: 1}
    text = json_text(value, indent)
    assert is_safe(text)
    assert json.loads(text) == value
    assert "größe" in text
    assert "🐎" in text


def test_a_console_escapes_all_it_is_given() -> None:
    """Sentences, tables, styled text and a live display; its own colours stay."""
    for terminal in (False, True):
        out = io.StringIO()
        console = SafeConsole(
            file=out,
            force_terminal=terminal,
            width=400,
            color_system="standard" if terminal else None,
        )
        console.print(HOSTILE[:-1], markup=False)
        console.print(Text(HOSTILE[:-1], style="red"))
        table = printing.table_of([{"name": HOSTILE[:-1]}], ["name"])
        console.print(table)
        with Live(console=console, auto_refresh=False) as live:
            live.update(table, refresh=True)
        text = out.getvalue()
        assert "\x1b[2J" not in text
        assert not set(HOSTILE[:-1]) & set(text) - set(HOSTILE[1:4]) - set("\x1b\r31mgnp.exe")
        assert text.count("\\u202egnp.exe") >= 4
        assert ("\x1b[31m" in text) == terminal


def test_a_stream_of_bytes_escapes_too() -> None:
    """For rows of JSON and CSV on a terminal."""
    out = io.BytesIO()
    assert SafeStream(out).write("a,\x9b2J\r\n".encode() + b"\xff") == 9
    assert out.getvalue() == b"a,\\x9b2J\r\n\\xff"


def test_an_error_that_quotes_somebody_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error as well."""
    printing.print_error(InvalidArgument(f"no topic {HOSTILE}"))
    assert is_safe(capsys.readouterr().err)


def test_commands_that_show_what_others_wrote(headrace: Command, client: BrokerClient) -> None:
    """Messages, headers, reasons and pipelines, for people and as JSON."""
    text = HOSTILE[:-1].replace("\r", "")
    client.publish("hostile", text.encode(), headers={"h": text})
    query = {"name": text[:20], "sink": text, "error": text, "batch_id": 1}
    client.report_pipeline(
        "hostile", {"run_id": "1", "state": "failed", "started_at": 0, "queries": [query]}
    )
    for arguments in (
        ("fetch", "hostile"),
        ("pipeline", "status"),
        ("pipeline", "status", "hostile"),
    ):
        for more in ((), ("--json",)):
            ran = headrace(*arguments, *more)
            assert ran.code == 0
            assert is_safe(ran.out), ran.out
            assert "gnp.exe" in ran.out


def test_nothing_in_this_room_prints_by_itself() -> None:
    """Only ``printing`` makes consoles; ``print`` elsewhere has a constant, nothing, or a call of ours."""
    safe = {"visible", "json_text", "text_of"}
    for path in ROOM.glob("*.py"):
        if path.name == "printing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name != "Console", f"{path.name}:{node.lineno}"
            if name in ("print", "typer.echo", "sys.stdout.write", "sys.stderr.write"):
                source = ast.unparse(node)
                constant = all(
                    isinstance(a, ast.Constant) or ast.unparse(a).isupper() for a in node.args
                )
                assert (
                    constant or any(f"{each}(" in source for each in safe) or source in CONSTANT
                ), f"{path.name}:{node.lineno}: {source}"


@pytest.mark.parametrize("width", [40, 80])
def test_a_row_is_one_line_and_numbers_are_whole(width: int) -> None:
    """However narrow the terminal is: names are cut, not wrapped."""
    rows = [{"name": "subscription-" * 9, "topic": "orders." * 9, "lag": 1_234_567, "dead": 0}]
    output = io.StringIO()
    table = printing.table_of(rows, ("name", "topic", "lag", "dead"))
    printing.SafeConsole(file=output, width=width).print(table)
    lines = output.getvalue().splitlines()
    assert len(lines) == 2
    assert "1,234,567" in lines[1]
    assert "…" in lines[1]


def test_times_sizes_and_states_are_whole() -> None:
    """A time without its hours says nothing, so the other columns are cut."""
    row = {"when": "2026-01-31 12:00:00", "size": "12.5 MiB", "reason": "r" * 90, "value": "v" * 90}
    rows = [{**row, "state": "no members"}, {"reason": "no time", "state": ""}]
    output = io.StringIO()
    table = printing.table_of(rows, ("when", "size", "reason", "value", "state"))
    printing.SafeConsole(file=output, width=60).print(table)
    line = output.getvalue().splitlines()[1]
    assert line.startswith("2026-01-31 12:00:00  12.5 MiB  rrr")
    assert line.endswith("…  no members")


@pytest.mark.parametrize(
    ("key", "value", "is_styled"),
    [("lag", 3, True), ("lag", 0, False), ("dead_lettered", 1, True), ("acked", 9, False)],
)
def test_lag_and_dead_letters_stand_out(key: str, value: int, is_styled: bool) -> None:
    """In colour on a terminal, if there are any; never in a pipe."""
    for forced, expected in ((True, is_styled), (False, False)):
        output = io.StringIO()
        system = "standard" if forced else "auto"
        console = printing.SafeConsole(file=output, force_terminal=forced, color_system=system)
        console.print(printing.table_of([{key: value}], (key,)))
        assert bool(re.search("\x1b\\[1;3[13]m", output.getvalue())) == expected


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (59_999, "59s"), (3_600_000, "1h"), (90_061_000, "1d 1h"), (-5, "0s")],
)
def test_how_long_ago(ms: int, text: str) -> None:
    """In two units at most."""
    assert printing.ago(ms) == text
