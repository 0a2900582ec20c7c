"""The lines of a file on which its keys stand, for errors.

Neither tomllib nor a decorator says where a value came from. A TOML file is cut into statements here: a statement is
the fewest lines that tomllib can parse. A key inside of an inline table has the line of that table, unless the
table has several lines.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Lines = dict[tuple[str, ...], int]


def toml_lines(content: str) -> Lines:
    """The lines of a valid TOML file's keys, by all names that lead to them."""
    found: Lines = {}
    table: tuple[str, ...] = ()
    for number, document, is_header in _statements(content):
        if is_header:
            table = next(iter(_paths(document)), ())
            found.setdefault(table, number)
        for path in _paths(document) if not is_header else ():
            for end in range(1, len(path) + 1):
                found.setdefault((*table, *path[:end]), number)
    return found


def _statements(content: str) -> Iterator[tuple[int, Mapping[str, Any], bool]]:
    gathered: list[str] = []
    first = 0
    for number, line in enumerate(content.splitlines(), 1):
        if not gathered and not line.partition("#")[0].strip():
            continue
        first = first if gathered else number
        gathered.append(line)
        try:
            document = tomllib.loads("\n".join(gathered))
        except tomllib.TOMLDecodeError:
            continue  # it goes on
        yield first, document, gathered[0].lstrip().startswith("[")
        gathered = []


def _paths(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The names that lead to each value; those of a header lead to an empty table."""
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            value = value[0]  # [[a list of tables]]
        if isinstance(value, Mapping) and value:
            for path in _paths(value):
                yield (name, *path)
        else:
            yield (name,)


def python_lines(content: str) -> Lines:
    """The lines of the keywords of each ``@pipeline(…)``, by ``pipeline``, its name and the keyword."""
    found: Lines = {}
    for node in ast.walk(ast.parse(content)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call):
                continue
            given = {word.arg: word.value for word in call.keywords if word.arg}
            name = given.get("name")
            own = name.value if isinstance(name, ast.Constant) else node.name
            prefix = ("pipeline", str(own))
            found[prefix] = call.lineno
            for key, value in given.items():
                found[(*prefix, key.removesuffix("_"))] = value.lineno
                found |= dict(_inner(value, (*prefix, key.removesuffix("_"))))
    return found


def _inner(value: ast.expr, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The keys of a dictionary that stands there as such."""
    for key, inner in (
        zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
    ):
        if isinstance(key, ast.Constant):
            path = (*prefix, str(key.value))
            yield path, key.lineno
            yield from _inner(inner, path)
