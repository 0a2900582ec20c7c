"""Rows of a query for people: a table, or, if that is too wide, a line for each value.

In a pipe each row is one line, as with every command. On a terminal, ``_key``, ``_headers`` and
``_corrupt`` are left out if they are null in every row, unless the query names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.printing import console, new_table, print_table, text_of

if TYPE_CHECKING:
    from headrace.spark.sql.output import ResultRows

CELL_CHARS_MAX = 1_000
"""On a terminal, a longer value is cut."""
_COLUMN_CHARS_MIN = 16
"""A column narrower than its values and narrower than this is hard to read."""
_QUIET = ("_key", "_headers", "_corrupt")


def print_table_of(rows: ResultRows, asked_for: set[str]) -> list[str]:
    """Print rows, and return the names of the columns that were left out."""
    from headrace.spark.sql.output import cells as texts_of

    texts, height = texts_of(rows.batch), rows.batch.num_rows
    if rows.names == ["plan"] and height == 1 and str(texts[0][0]).startswith("== "):
        # EXPLAIN prints lines of its own.
        print(text_of(str(texts[0][0]).encode(errors="replace"), lines=True).strip())
        return []
    cells = [[_cell(text) for text in column] for column in texts]
    left_out: list[str] = []
    shown = list(range(len(rows.names)))
    if console.is_terminal and height:
        left_out = [
            name
            for name, column in zip(rows.names, cells, strict=True)
            if name in _QUIET and name not in asked_for and all(each is None for each in column)
        ]
        shown = [number for number in shown if rows.names[number] not in left_out]
    names = [rows.names[number] for number in shown]
    columns = [cells[number] for number in shown]
    if console.is_terminal and _is_too_wide(names, columns, console.width):
        _print_records(names, columns, height)
        return left_out
    table = new_table(
        [(text_of(rows.names[number].encode()), _is_number(rows, number)) for number in shown]
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
    # As Text: users wrote these values, and rich must not take them for markup.
    return Text("NULL", style="dim") if cell is None else Text(cell)


def _is_number(rows: ResultRows, number: int) -> bool:
    name = str(rows.batch.schema.types[number])
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
    """Print each row as a block: names on the left, values on the right."""
    out: Console = console
    for number in range(count):
        out.rule(Text(f"row {number + 1}"), align="left", style="dim")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for name, column in zip(names, columns, strict=True):
            grid.add_row(Text(text_of(name.encode())), _text(column[number]))
        out.print(grid)
