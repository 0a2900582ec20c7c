"""How commands print: sentences, JSON, tables, messages and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace.errors import HeadraceError
from headrace.model import Message
from headrace.operations import documents

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
console = Console()
errors = Console(stderr=True)
_PIPE_CHARS = 10_000


def say(text: str) -> None:
    """Print one line, however narrow the terminal: a program may read it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(error: HeadraceError) -> None:
    print(f"headrace: {error.message} [{error.code}]", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


# --- tables ---------------------------------------------------------------------------------------
def print_listing(
    as_json: bool,
    document: Any,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str] | Sequence[str],
    empty: str,
) -> None:
    """Print a document as JSON, or its rows as a table."""
    if as_json:
        print_json(document)
    else:
        print_rows(rows, columns, empty)


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str], empty: str
) -> None:
    """Print a table: a row for each mapping, a column for each key; ``empty`` if there are no rows.

    ``columns`` maps keys to titles, or names keys that are their own titles.
    """
    rows = list(rows)
    if rows:
        print_table(table_of(rows, columns))
    else:
        say(empty)


def table_of(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str]
) -> Table:
    titles = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    numbers = {key for key in titles if all(isinstance(row.get(key), int) for row in rows)}
    table = new_table([(title, key in numbers) for key, title in titles.items()])
    for row in rows:
        # As Text: users wrote these values, and rich must not take them for markup.
        table.add_row(*[Text(_cell(row.get(key))) for key in titles])
    return table


def new_table(columns: Iterable[tuple[str, bool]]) -> Table:
    """An empty table with these titles. With true, a column holds numbers: aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, is_number in columns:
        table.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; into a pipe, each row is one line."""
    (console if console.is_terminal else Console(width=_PIPE_CHARS)).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- values ---------------------------------------------------------------------------------------
def when(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of(value: bytes, *, lines: bool = False) -> str:
    """A value for people: text as it is, other bytes as Python shows them.

    Characters that cannot be printed are escaped: a message must not control the reader's terminal,
    and it stays on one line unless ``lines`` is true.
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return repr(value)
    if text.isprintable():
        return text
    kept = "\t\n" if lines else "\t"
    return "".join([c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text])


def place_of(message: Message) -> str:
    return f"{message.topic}/{message.partition}@{message.offset}"


def print_message(message: Message, as_json: bool) -> None:
    """Print a message on one line, and flush: the reader may be a pipe."""
    if as_json:
        line = json.dumps(documents.message(message), ensure_ascii=False)
    else:
        line = f"{place_of(message)}  {text_of(message.value)}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --- progress -------------------------------------------------------------------------------------
class Bar:
    """A progress bar on a terminal; hidden elsewhere."""

    def __init__(self, progress: Progress, text: str):
        self._progress, self._text = progress, text
        self._task = progress.add_task(text, total=None)
        self.is_hidden = progress.disable

    def show(self, done: int, total: int, noun: str) -> None:
        if total:
            text = f"{self._text}: {done:,} of {count_of(total, noun)}"
            self._progress.update(self._task, description=text, total=total, completed=done)

    def show_count(self, done: int, noun: str) -> None:
        """The same where the total is unknown."""
        self._progress.update(self._task, description=f"{self._text}: {count_of(done, noun)}")


@contextmanager
def progress_bar(text: str, *, hidden: bool = False) -> Iterator[Bar]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    is_hidden = hidden or not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=is_hidden) as progress:
        yield Bar(progress, text)
