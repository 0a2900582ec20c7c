"""How commands print: sentences, JSON, tables, messages and progress bars.

What others wrote (messages, names, reasons, errors) must not control the reader's terminal: an escape
sequence can rewrite what is on the screen, and a bidirectional mark can turn a name around. So everything
that is printed passes ``visible`` or ``json_text``, which escape control, C1, bidirectional and other
characters that cannot be printed. ``console`` and ``errors`` do that themselves, and no other module of
this room makes a console or calls ``print`` with text from elsewhere.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, BinaryIO, NamedTuple

import orjson
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from headrace.errors import HeadraceError
from headrace.model import Message
from headrace.operations import documents, views

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_PIPE_CHARS = 10_000
NARROW_CHARS = 100


# --- what others wrote ----------------------------------------------------------------------------
def visible(text: str, *, kept: str = "\t\n") -> str:
    """The text with all characters escaped that cannot be printed, except the ``kept`` ones."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text])


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON in which the same characters are escaped, as JSON escapes them: it means the same."""
    option = documents.OPTIONS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        text = orjson.dumps(value, default=_view, option=option).decode()
    except TypeError:  # a whole number of more than 64 bits, or a file name that is not text
        text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    # JSON as somebody published it may have tabs and line ends, but only between its tokens.
    text = text.translate(_BLANKS if indent else _LINE_BLANKS)
    lines = text.split("\n")
    return "\n".join([line if line.isprintable() else _json_escaped(line) for line in lines])


def _view(value: Any) -> Any:
    try:
        return views.view(value)
    except TypeError:
        return str(value)


_BLANKS = {9: " ", 13: " "}
_LINE_BLANKS = {**_BLANKS, 10: " "}


def _json_escaped(line: str) -> str:
    return "".join([c if c.isprintable() else json.dumps(c)[1:-1] for c in line])


class SafeConsole(Console):
    """A console whose text cannot control the terminal; its own colours and cursor can."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or text.isprintable():
                yield segment
            else:
                yield Segment(visible(text), style)


class SafeStream:
    """Standard output as bytes, for text that others wrote."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(visible(data.decode(errors="backslashreplace"), kept="\t\r\n").encode())
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


console = SafeConsole()
errors = SafeConsole(stderr=True)


def say(text: str) -> None:
    """Print one line, however narrow the terminal: a program may read it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print one line to standard error."""
    print(visible(text), file=sys.stderr)


def print_error(error: HeadraceError) -> None:
    complain(f"headrace: {error.message} [{error.code}]")


def print_json(value: Any) -> None:
    print(json_text(value, indent=2))


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


def print_each(
    as_json: bool, found: Sequence[Any], row: Callable[[Any], Mapping[str, Any]], empty: str
) -> None:
    """Print what was found as JSON, or as a table: ``row`` makes the row of each, with its columns."""
    rows = [] if as_json else list(map(row, found))
    print_listing(as_json, found, rows, list(rows[0]) if rows else (), empty)


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
    numbers = {key for key in titles if _are_numbers([row.get(key) for row in rows])}
    whole = {titles[key] for key in titles if key == "state" or _are_whole(rows, key)}
    table = new_table([(title, key in numbers) for key, title in titles.items()], whole)
    for row in rows:
        # As Text: users wrote these values, and rich must not take them for markup.
        table.add_row(
            *[
                Text(
                    _cell(row.get(key)),
                    _style(key, row.get(key)),
                    no_wrap=True,
                    overflow="ellipsis",
                )
                for key in titles
            ]
        )
    return table


STYLES = {
    **dict.fromkeys(("lag", "paused"), "bold yellow"),
    **dict.fromkeys(("dead_lettered", "dead_letters", "letters", "read_only"), "bold red"),
    "state": "bold yellow",
}
"""Columns whose values stand out, if there is something: a number above 0, a text."""


def _style(key: str, value: Any) -> str:
    return STYLES.get(key, "") if value else ""


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, int) for value in values)


_TIME_OR_SIZE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d.]+ (B|[KMGT]iB)")


def _are_whole(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Times and sizes, as ``when`` and ``size`` write them: a part of one says nothing."""
    return all(_TIME_OR_SIZE.fullmatch(str(row[key])) for row in rows if row.get(key) is not None)


def new_table(columns: Iterable[tuple[str, bool]], whole: Container[str] = ()) -> Table:
    """An empty table with these titles. With true, a column holds numbers: aligned to the right.

    Of columns that are too wide together, numbers and the ``whole`` ones are not cut.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, is_number in columns:
        table.add_column(
            Text(title, no_wrap=True, overflow="ellipsis"),
            justify="right" if is_number else "left",
            no_wrap=is_number or title in whole,
            overflow="fold",
        )
    return table


def is_narrow() -> bool:
    """Whether this is a terminal on which a wide table should do with less."""
    return console.is_terminal and console.width < NARROW_CHARS


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; into a pipe, each row is one line."""
    (console if console.is_terminal else SafeConsole(width=_PIPE_CHARS)).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))


# --- values ---------------------------------------------------------------------------------------
def when(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(min(timestamp_ms, views.YEAR_9999_MS) / 1000, UTC).strftime(
        "%Y-%m-%d %H:%M:%S"
    )


def ago(milliseconds: int) -> str:
    """A long time in two units: ``3d 4h``, ``5m 20s``."""
    seconds = max(milliseconds, 0) // 1000
    parts: list[str] = []
    for unit, each in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, each)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of(value: bytes | None, *, lines: bool = False) -> str:
    """A value for people: text as it is, other bytes as Python shows them.

    Characters that cannot be printed are escaped: a message must not control the reader's terminal,
    and it stays on one line unless ``lines`` is true.
    """
    if value is None:
        return "(null)"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return repr(value)
    return visible(text, kept="\t\n" if lines else "\t")


def place_of(message: Message) -> str:
    return f"{message.topic}/{message.partition}@{message.offset}"


class MessageStyle(NamedTuple):
    """How a command prints messages; the options of :data:`MESSAGE_OPTIONS`."""

    as_json: bool | None = None
    time: bool | None = None
    keys: bool | None = None
    headers: bool | None = None


MESSAGE_OPTIONS: dict[str, Any] = {
    "as_json": AsJson,
    "time": Annotated[bool, typer.Option("--time", help="Show when each was published (UTC).")],
    "keys": Annotated[bool, typer.Option("--keys", help="Show the keys.")],
    "headers": Annotated[bool, typer.Option("--headers", help="Show the headers.")],
}


def print_message(message: Message, style: MessageStyle) -> None:
    """Print a message on one line, and flush: the reader may be a pipe."""
    if style.as_json:
        line = json_text(message)
    else:
        parts = [place_of(message)]
        if style.time:
            at = when(message.timestamp).replace(" ", "T")
            parts.insert(0, f"{at}.{message.timestamp % 1000:03}Z")
        if style.keys:
            parts.append("key=" + ("-" if message.key is None else _quoted(text_of(message.key))))
        if style.headers:
            parts += [f"{name}={_quoted(value)}" for name, value in message.headers.items()]
        line = "  ".join([*map(visible, parts), text_of(message.value)])
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _quoted(text: str) -> str:
    """With quotes where it would be mistaken for several words, or for no key."""
    return json_text(text) if not text or text == "-" or " " in text else text


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

    def show_step(self, step: str, done: int, total: int, noun: str) -> None:
        """One of several steps, such as copying and verifying."""
        self._text = step
        self.show(done, total, noun)

    def show_count(self, done: int, noun: str) -> None:
        """The same where the total is unknown."""
        self._progress.update(self._task, description=f"{self._text}: {count_of(done, noun)}")


@contextmanager
def progress_bar(text: str, *, hidden: bool = False) -> Iterator[Bar]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    is_hidden = hidden or not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=is_hidden) as progress:
        yield Bar(progress, text)
