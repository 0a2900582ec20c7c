"""Rows as people read them: a table, or where it would be too wide, a line for each value.

Into a pipe a table is as wide as it needs to be, a row a line, as everywhere. On a terminal columns of
the record that are null in every row (``_key``, ``_headers``, ``_corrupt``) are left out, unless the query
asked for them by name: they are for those who use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.connecting import console, print_table, text_of

if TYPE_CHECKING:
    from headrace.spark.sql.output import ResultRows

CELL_CHARS_MAX = 1_000
"""On a terminal a longer value is cut."""
_COLUMN_CHARS_MIN = 16
"""A column narrower than this, where its values need more, is no pleasure to read."""
_QUIET = ("_key", "_headers", "_corrupt")


def print_table_of(rows: ResultRows, asked_for: set[str]) -> list[str]:
    """Prints them; returns the columns that were left out."""
    from headrace.spark.sql.output import texts

    if rows.names == ["plan"] and rows.height == 1 and str(rows.columns[0][0]).startswith("== "):
        # The result of EXPLAIN has lines of its own.
        print(text_of(str(rows.columns[0][0]).encode(errors="replace"), lines=True).strip())
        return []
    cells = [
        [_cell(text) for text in texts(column, type_)]
        for column, type_ in zip(rows.columns, rows.types, strict=True)
    ]
    left_out: list[str] = []
    shown = list(range(len(rows.names)))
    if console.is_terminal and rows.height:
        left_out = [
            name
            for name, column in zip(rows.names, cells, strict=True)
            if name in _QUIET and name not in asked_for and all(each is None for each in column)
        ]
        shown = [number for number in shown if rows.names[number] not in left_out]
    names = [rows.names[number] for number in shown]
    columns = [cells[number] for number in shown]
    if console.is_terminal and _is_too_wide(names, columns, console.width):
        _print_records(names, columns, rows.height)
        return left_out
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number in shown:
        table.add_column(
            Text(text_of(rows.names[number].encode())),
            justify="right" if _is_number(rows, number) else "left",
            overflow="fold",
        )
    for row in zip(*columns, strict=True):
        table.add_row(*map(_text, row))
    print_table(table)
    return left_out


def _cell(text: str | None) -> str | None:
    if text is None:
        return None
    text = text_of(text.encode(errors="replace"))
    if console.is_terminal and len(text) > CELL_CHARS_MAX:
        return text[:CELL_CHARS_MAX] + " …"
    return text


def _text(cell: str | None) -> Text:
    # As Text: what users have written is never taken for markup.
    return Text("NULL", style="dim") if cell is None else Text(cell)


def _is_number(rows: ResultRows, number: int) -> bool:
    name = str(rows.types[number])
    return name.startswith(("int", "float", "double", "decimal", "halffloat"))


def _is_too_wide(names: list[str], columns: list[list[str | None]], width: int) -> bool:
    widths = [
        max(len(name), *(len(cell or "NULL") for cell in column))
        for name, column in zip(names, columns, strict=True)
        if column
    ]
    needed = sum(min(each, _COLUMN_CHARS_MIN) for each in widths) + 2 * (len(widths) - 1)
    return needed > width


def _print_records(names: list[str], columns: list[list[str | None]], count: int) -> None:
    """A row is a block: the names on the left, what they are on the right."""
    out: Console = console
    for number in range(count):
        out.rule(Text(f"row {number + 1}"), align="left", style="dim")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for name, column in zip(names, columns, strict=True):
            grid.add_row(Text(text_of(name.encode())), _text(column[number]))
        out.print(grid)
