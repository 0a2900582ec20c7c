"""docs/guarantees.md names the tests that show what it promises, so these have to exist."""

import ast
import re

from headrace.broker import state
from headrace.limits import (
    COMMIT_NAMES_KEPT_S,
    COMMIT_NAMES_MAX,
    PRODUCER_BATCHES_KEPT,
    PRODUCER_NAMES_MAX,
    PRODUCERS_PER_PARTITION_MAX,
    STAGED_KEPT_S,
)
from headrace.model import TopicSettings
from tests.docs.blocks import ROOT, read

TEXT = read("docs/guarantees.md")


def test_every_test_that_is_named_exists() -> None:
    """A promise whose test was renamed or removed is noticed."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 50
    missing = []
    for path, name in named:
        file = ROOT / path
        if not file.is_file() or (name and name not in names_in(file.read_text(encoding="utf-8"))):
            missing.append(f"{path}::{name}")
    assert missing == [], "name another test in docs/guarantees.md for what these showed"


def names_in(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


def test_every_promise_is_shown() -> None:
    """Each bold sentence of the promises is followed by where it is shown."""
    promises = TEXT[: TEXT.index("## What is not promised")]
    for part in re.split(r"\n\n(?=\*\*)", promises)[1:]:
        assert "`tests/" in part, part


def test_the_numbers_are_those_of_the_source() -> None:
    """What the text says in digits is what is in force."""
    assert f"{state.FLUSH_S * 1000:.0f} milliseconds later" in TEXT
    assert f"`sync_interval_ms` ({TopicSettings().sync_interval_ms})" in TEXT
    assert f"the last {PRODUCER_BATCHES_KEPT} batches" in TEXT
    assert f"the {PRODUCERS_PER_PARTITION_MAX:,} producers" in TEXT
    assert f"remembered for {COMMIT_NAMES_KEPT_S // 86_400} days" in TEXT
    assert f"the {COMMIT_NAMES_MAX:,} names" in TEXT
    assert f"\n{PRODUCER_NAMES_MAX:,} names that were taken last" in TEXT
    assert STAGED_KEPT_S == 86_400
