"""The fenced blocks of a text, and what stands around them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".github", "benchmarks", "deploy", "docs", "examples")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.md"),
        *[page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")],
    ]
)
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    info: str
    """What stands behind the backticks: the language, then words for the test."""
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def words(self) -> list[str]:
        return self.info.split()[1:]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [
        Block(found[1].strip(), found[2], text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found, f"there is no heading {title!r}"
    rest = text[found.end() :]
    level = len(found[1])
    end = re.search(rf"^#{{1,{level}}} ", _without_fences(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def _without_fences(text: str) -> str:
    """The same length, but what is fenced off is blank: a comment in it is no heading."""
    return _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def table(text: str, *titles: str) -> list[list[str]]:
    """The rows of the table with these titles, cell by cell."""
    head = "| " + " | ".join(titles) + " |"
    assert head in text, f"there is no table {head}"
    rows = []
    for line in text[text.index(head) :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows
