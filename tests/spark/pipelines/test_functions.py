"""``each_row``: what a function makes of each row, and what becomes of a row for which it raises."""

from typing import Any

import pyarrow as pa

from headrace.spark.pipelines.functions import _called, original, pipeline, reason_of

FIELDS = pa.schema([("id", pa.int64()), ("word", pa.string())])
OUTPUT = pa.schema([*FIELDS, ("_failed", pa.string()), ("_failed_value", pa.binary())])


def called(function: Any, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    made = _called(pa.array(rows), function, FIELDS, OUTPUT)
    assert len(made) == len(rows)
    found: list[dict[str, Any]] = made.flatten().to_pylist()
    return found


def good(number: int | None, word: str | None = None) -> dict[str, Any]:
    return {"id": number, "word": word, "_failed": None, "_failed_value": None}


def test_one_several_or_none() -> None:
    """A dictionary is a row, a list is rows, None is none."""
    results = {1: {"id": 1, "word": "one"}, 2: [{"id": 2}, {"id": 22}], 3: None}
    made = called(lambda row: results[row["n"]], {"n": 1}, {"n": 2}, {"n": 3})
    assert made == [good(1, "one"), good(2), good(22)]


def test_a_function_that_raises() -> None:
    """The reason, and what the row was made of; the others are not touched."""

    def careful(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": 10 // row["n"]}

    first, failed, last = called(careful, {"n": 5}, {"n": 0}, {"n": 2})
    assert (first, last) == (good(2), good(5))
    assert failed["_failed"] == "ZeroDivisionError: integer division or modulo by zero"
    assert failed["_failed_value"] == b'{"n": 0}'


def test_a_result_that_does_not_fit() -> None:
    """A wrong type, or a column that is not in the schema, is a failure of that row."""
    made = called(lambda row: row, {"id": "x", "word": None}, {"id": "y", "word": "w"})
    assert ["ArrowInvalid" in row["_failed"] for row in made] == [True, True]
    (made_too,) = called(lambda row: {"id": 1, "wrod": "x"}, {"n": 1})
    assert made_too["_failed"] == "ValueError: the schema has no column 'wrod'"


def test_what_a_row_was_made_of() -> None:
    """The message itself where it is there."""
    assert original({"id": 1, "_value": b"\xff raw"}) == b"\xff raw"
    assert original({"value": b"raw", "offset": 3}) == b"raw"
    assert original({"value": "text", "n": None}) == b'{"value": "text", "n": null}'
    assert original({"blob": b"\xff"}) == '{"blob": "�"}'.encode()


def test_a_reason_always_says_something() -> None:
    assert reason_of(ValueError("no")) == "ValueError: no"
    assert reason_of(RuntimeError()) == "RuntimeError"


def test_a_declared_function_stays_what_it_was() -> None:
    """So that it can be tested by itself."""

    @pipeline(from_="a", to="b")
    def double(rows: int) -> int:
        return 2 * rows

    assert double(4) == 8
