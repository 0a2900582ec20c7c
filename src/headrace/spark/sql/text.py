"""The text around a query: several statements in one text, names, declared schemas.

Spark parses the statements. This module only finds where a statement ends, and the names in it, so it knows
just enough of Spark's lexer to leave strings, comments and quoted names alone. It does not know scripts
(``BEGIN … END``): their semicolons end statements here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from headrace.errors import InvalidArgument
from headrace.model import check_pattern, check_topic_name, is_pattern, pattern_matches

_TOKEN = re.compile(
    r"""
      (?P<blank>\s+|--[^\n]*)
    | (?P<comment>/\*)
    | (?P<string>[rR]'[^']*'|[rR]"[^"]*"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<quoted>`(?:[^`]|``)*`)
    | (?P<word>\w+)
    | (?P<open>['"`])
    | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")


class Token(NamedTuple):
    kind: str
    """string, quoted, word or sign; open: what is never closed."""
    text: str
    start: int
    end: int


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text, without blanks and comments."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None
        kind, end = str(found.lastgroup), found.end()
        if kind == "comment":
            end = _comment_end(text, end)
            if end < 0:
                yield Token("open", text[at:], at, len(text))
                return
        elif kind == "open":
            yield Token("open", text[at:], at, len(text))
            return
        elif kind != "blank":
            yield Token(kind, text[at:end], at, end)
        at = end


def _comment_end(text: str, at: int) -> int:
    """The position after a comment, which may hold others; -1 if it has no end."""
    depth = 1
    for edge in _COMMENT_EDGE.finditer(text, at):
        depth += 1 if edge[0] == "/*" else -1
        if depth == 0:
            return edge.end()
    return -1


def split(text: str) -> tuple[list[str], str]:
    """The statements that are ended by a semicolon, and the text after the last one.

    The rest is empty when it says nothing.
    """
    found: list[str] = []
    start, empty = 0, True
    for token in tokens(text):
        if token.text == ";" and token.kind == "sign":
            if not empty:
                found.append(text[start : token.start].strip())
            start, empty = token.end, True
        else:
            empty = False
    return found, "" if empty else text[start:].strip()


def statements(text: str) -> list[str]:
    """All statements of a text; the last one needs no semicolon."""
    found, rest = split(text)
    return [*found, rest] if rest else found


# --- names ------------------------------------------------------------------------------------------
def unquoted(name: str) -> tuple[str, ...]:
    """The parts of a name as Spark writes it: ```orders`.`eu``` is ``("orders", "eu")``."""
    return tuple(part.replace("``", "`") for part in re.findall(r"`((?:[^`]|``)*)`", name))


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def names(text: str) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Every name in a text, with its parts and its place: words and quoted words with dots between."""
    parts: list[str] = []
    start = end = 0
    dotted = False
    for token in tokens(text):
        if token.kind in ("word", "quoted"):
            word = token.text if token.kind == "word" else unquoted(token.text)[0]
            if dotted:
                parts.append(word)
            else:
                if parts:
                    yield tuple(parts), start, end
                parts, start = [word], token.start
            end, dotted = token.end, False
        elif token.text == "." and parts and not dotted:
            dotted = True
        else:
            if parts:
                yield tuple(parts), start, end
            parts, dotted = [], False
    if parts:
        yield tuple(parts), start, end


def quote_name(text: str, parts: tuple[str, ...]) -> str:
    """The text, with a name of several parts turned into one quoted name: a topic has no parts."""
    found = [(start, end) for name, start, end in names(text) if name == parts]
    for start, end in reversed(found):
        text = text[:start] + quoted(".".join(parts)) + text[end:]
    return text


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Similar names, the likeliest first."""
    wanted = name.lower()
    lower: dict[str, list[str]] = {}
    for each in known:
        lower.setdefault(each.lower(), []).append(each)
    close = difflib.get_close_matches(wanted, lower, 5, 0.5)
    parts = [each for each in lower if wanted in each or each in wanted]
    found = dict.fromkeys((*close, *sorted(parts)))
    return [each for spelt in found for each in lower[spelt]][:5]


# --- schemas ------------------------------------------------------------------------------------------
class Schemas:
    """Declared schemas of topics and wildcards; the first that matches counts."""

    def __init__(self, declared: Mapping[str, str] | None = None):
        self._declared: dict[str, str] = {}
        for topic, ddl in (declared or {}).items():
            self.declare(topic, ddl)

    def declare(self, topic: str, ddl: str) -> None:
        topic, ddl = topic.strip(), ddl.strip()
        check_pattern(topic) if is_pattern(topic) else check_topic_name(topic, internal=True)
        if not ddl:
            raise InvalidArgument(f"the schema of {topic} is empty", code="invalid_schema")
        self._declared[topic] = ddl

    def add(self, text: str) -> None:
        """As ``--schema`` takes it: ``orders: id STRING, amount DOUBLE``, or ``@`` and a file."""
        if text.startswith("@"):
            self._add_file(Path(text[1:]))
            return
        topic, colon, ddl = text.partition(":")
        if not colon:
            raise InvalidArgument(
                f"--schema takes 'TOPIC: FIELDS', such as 'orders: id STRING, amount DOUBLE', "
                f"'TOPIC: text', or @FILE, not {text!r}"
            )
        self.declare(topic, ddl)

    def _add_file(self, path: Path) -> None:
        try:
            document = orjson.loads(path.read_bytes())
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from None
        except orjson.JSONDecodeError as error:
            raise InvalidArgument(f"{path} is not JSON: {error}") from None
        if not isinstance(document, dict) or not all(isinstance(v, str) for v in document.values()):
            raise InvalidArgument(
                f'{path} must be a JSON object of schemas by topic: {{"orders": "id STRING"}}'
            )
        for topic, ddl in document.items():
            self.declare(topic, ddl)

    def of(self, topic: str) -> str | None:
        """By its own name, else by the first wildcard that fits."""
        if topic in self._declared:
            return self._declared[topic]
        for pattern, ddl in self._declared.items():
            if is_pattern(pattern) and pattern_matches(pattern, topic):
                return ddl
        return None
