"""Filters: which records are still read, and what Spark has to look at again."""

from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.spark.versions import HAS_FILTERS

if not HAS_FILTERS:
    pytest.skip("filters are pushed to Python sources since Spark 4.1", allow_module_level=True)

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from headrace.spark.source.filters import Narrowing
from headrace.spark.source.positions import TaskSpan

SPANS = [TaskSpan("a", 0, 0, 100, 1), TaskSpan("a", 1, 50, 200, 1), TaskSpan("b", 0, 0, 10, 2)]


def times(ms: int) -> dict[tuple[str, int], int]:
    """A record each ten milliseconds, from 1000 on."""
    return {(span.topic, span.partition): max(0, -(-(ms - 1000) // 10)) for span in SPANS}


def narrowed(*filters: Filter, prefix: str = "") -> tuple[list[tuple[Any, ...]], list[bool]]:
    narrowing = Narrowing(prefix)
    taken = [narrowing.take(each) for each in filters]
    return [(s.topic, s.partition, s.start, s.end) for s in narrowing.narrow(SPANS, times)], taken


def moment(ms: float) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


OFFSET, TIME = ("offset",), ("timestamp",)


@pytest.mark.parametrize(
    ("filters", "spans"),
    [
        ([EqualTo(("topic",), "b")], [("b", 0, 0, 10)]),
        ([In(("topic",), ("b", "c"))], [("b", 0, 0, 10)]),
        ([EqualTo(("topic",), "b"), EqualTo(("topic",), "a")], []),
        ([EqualNullSafe(("partition",), 1)], [("a", 1, 50, 200)]),
        ([In(("partition",), (1, 7))], [("a", 1, 50, 200)]),
        ([EqualTo(OFFSET, 60)], [("a", 0, 60, 61), ("a", 1, 60, 61)]),
        ([GreaterThan(OFFSET, 98)], [("a", 0, 99, 100), ("a", 1, 99, 200)]),
        ([GreaterThanOrEqual(OFFSET, 98)], [("a", 0, 98, 100), ("a", 1, 98, 200)]),
        ([LessThan(OFFSET, 51)], [("a", 0, 0, 51), ("a", 1, 50, 51), ("b", 0, 0, 10)]),
        ([LessThanOrEqual(OFFSET, 5)], [("a", 0, 0, 6), ("b", 0, 0, 6)]),
        ([GreaterThan(OFFSET, 5), LessThan(OFFSET, 8)], [("a", 0, 6, 8), ("b", 0, 6, 8)]),
        ([GreaterThan(OFFSET, 5), LessThan(OFFSET, 3)], []),
        ([IsNotNull(OFFSET)], [("a", 0, 0, 100), ("a", 1, 50, 200), ("b", 0, 0, 10)]),
    ],
)
def test_what_is_done_exactly(filters: list[Filter], spans: list[tuple[Any, ...]]) -> None:
    """Spark need not look again."""
    assert narrowed(*filters) == (spans, [True] * len(filters))


@pytest.mark.parametrize(
    ("filters", "spans"),
    [
        ([GreaterThanOrEqual(TIME, moment(1900))], [("a", 0, 90, 100), ("a", 1, 90, 200)]),
        ([GreaterThan(TIME, moment(1900))], [("a", 0, 91, 100), ("a", 1, 91, 200)]),
        ([LessThan(TIME, moment(1020))], [("a", 0, 0, 2), ("b", 0, 0, 2)]),
        ([LessThanOrEqual(TIME, moment(1020))], [("a", 0, 0, 3), ("b", 0, 0, 3)]),
        ([GreaterThan(TIME, moment(1010.5)), LessThan(TIME, moment(1030.5))], [("a", 0, 2, 4), ("b", 0, 2, 4)]),
        ([LessThan(TIME, moment(1060)), LessThan(TIME, moment(1020))], [("a", 0, 0, 2), ("b", 0, 0, 2)]),
        ([In(OFFSET, (3, 5))], [("a", 0, 3, 6), ("b", 0, 3, 6)]),
    ],
)  # fmt: skip
def test_what_is_narrowed_and_looked_at_again(
    filters: list[Filter], spans: list[tuple[Any, ...]]
) -> None:
    """Less is read, and Spark decides."""
    assert narrowed(*filters) == (spans, [False] * len(filters))


@pytest.mark.parametrize(
    "each",
    [
        Not(EqualTo(OFFSET, 5)),
        IsNull(OFFSET),
        IsNotNull(("key",)),
        EqualTo(("value",), b"x"),
        EqualTo(("offset", "x"), 5),
        EqualTo(OFFSET, None),
        EqualTo(OFFSET, True),
        GreaterThan(OFFSET, 2.5),
        GreaterThan(TIME, datetime(2026, 1, 1)),
        StringStartsWith(("topic",), "a"),
    ],
)
def test_everything_else_is_left_to_spark(each: Filter) -> None:
    """And nothing is left out."""
    found, taken = narrowed(each)
    assert taken == [False]
    assert len(found) == 3


def test_names_with_an_underscore_in_front() -> None:
    """A field of a JSON value that is called offset is not the record's."""
    assert narrowed(EqualTo(OFFSET, 5), prefix="_")[1] == [False]
    assert narrowed(EqualTo(("_offset",), 5), prefix="_") == (
        [("a", 0, 5, 6), ("b", 0, 5, 6)],
        [True],
    )
