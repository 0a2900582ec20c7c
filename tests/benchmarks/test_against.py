"""``python -m benchmarks --against``: two checkouts, case by case in turn."""

from pathlib import Path

import pytest

from benchmarks._against import compare, speed

TOY = """
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

def case(name, value, smaller):
    def run():
        with open({journal!r}, "a") as journal:
            journal.write(f"{{Path.cwd().name}} {{name}}\\n")
        return value
    return SimpleNamespace(name=name, unit="s", smaller=smaller, is_repeated=False, run=run)

@contextmanager
def prepared(*, quick):
    print("a remark that is not an answer")
    yield SimpleNamespace(repeat=2, cases=[case(*facts) for facts in {cases!r}])
"""


def checkout(tmp_path: Path, name: str, cases: list[tuple[str, float, bool]]) -> Path:
    tree = tmp_path / name
    package = tree / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    journal = str(tmp_path / "journal")
    (package / "toy.py").write_text(TOY.format(journal=journal, cases=cases))
    return tree


def test_each_case_runs_in_both_checkouts_in_turn(tmp_path: Path) -> None:
    """Each checkout runs its own benchmarks, and each round begins with the other side."""
    old = checkout(
        tmp_path, "old", [("rate", 100.0, False), ("time", 8.0, True), ("gone", 1, True)]
    )
    new = checkout(tmp_path, "new", [("rate", 150.0, False), ("time", 10.0, True)])
    result = compare("toy", old, new, quick=False, rounds=None)
    assert result is not None
    assert [case["speed"] for case in result["cases"]] == [1.5, 0.8]
    assert result["cases"][0]["old"] == [100.0, 100.0]
    assert (result["only_old"], result["only_new"]) == (["gone"], [])
    assert (tmp_path / "journal").read_text().split("\n") == [
        "old rate", "new rate", "old time", "new time",
        "new rate", "old rate", "new time", "old time", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "smaller", "expected"),
    [
        ([1, 10, 2], [2, 30, 1], False, 2.0),  # a slow round slows both sides
        ([4], [2], True, 2.0),
        ([0], [5], False, None),
    ],
)
def test_speed_above_one_is_better(
    old: list[float], new: list[float], smaller: bool, expected: float | None
) -> None:
    """The median of the rounds' ratios, turned round where a smaller value is better."""
    assert speed({"old": old, "new": new, "smaller": smaller}) == expected
