"""Filters that Spark pushes down, as a narrower range of offsets.

A filter on topic, partition or offset is applied exactly by reading less, so Spark need not apply it
again. A filter on timestamp narrows the range too, because times never run backwards in a partition, but
Spark applies it again: a record that a repair gave up has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from headrace.limits import OFFSET_MAX
from headrace.spark.source.positions import TaskSpan
from headrace.spark.versions import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

Times = Callable[[int], Mapping[tuple[str, int], int]]
"""The first offset at or after a time, by topic and partition."""
_NEVER_NULL = ("topic", "partition", "offset", "timestamp", "id")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Narrowing:
    """All filters together. ``prefix`` stands before the names of columns."""

    def __init__(self, prefix: str = ""):
        self._prefix = prefix
        self.topics: set[str] | None = None
        self.partitions: set[int] | None = None
        self.first_offset, self.end_offset = 0, OFFSET_MAX
        self.first_ms: int | None = None
        self.end_ms: int | None = None

    def take(self, each: Filter) -> bool:
        """Take a filter into account; True when Spark need not apply it again."""
        path: tuple[str, ...] = getattr(each, "attribute", ())
        if len(path) != 1 or not path[0].startswith(self._prefix):
            return False
        name, value = path[0].removeprefix(self._prefix), cast(Any, getattr(each, "value", None))
        if isinstance(each, IsNotNull):
            return name in _NEVER_NULL
        if isinstance(each, EqualTo | EqualNullSafe | In):
            values = value if isinstance(each, In) else (value,)
            if name == "topic" and _all(values, str):
                self.topics = _both(self.topics, values)
                return True
            if name == "partition" and _all(values, int):
                self.partitions = _both(self.partitions, values)
                return True
            if name == "offset" and _all(values, int):
                self._offsets(min(values, default=0), max(values, default=-1) + 1)
                return len(values) == 1
            return False
        is_first = isinstance(each, GreaterThan | GreaterThanOrEqual)
        if not is_first and not isinstance(each, LessThan | LessThanOrEqual):
            return False
        is_after = isinstance(each, GreaterThan | LessThanOrEqual)  # the bound is after the value
        if name == "offset" and _all((value,), int):
            bound = value + is_after
            self._offsets(*((bound, OFFSET_MAX) if is_first else (0, bound)))
            return True
        if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            micros = (value - _EPOCH) // datetime.resolution
            bound = max(micros // 1000 + 1 if is_after else -(-micros // 1000), 0)
            if is_first:
                self.first_ms = max(self.first_ms or 0, bound)
            else:
                self.end_ms = bound if self.end_ms is None else min(self.end_ms, bound)
        return False

    def _offsets(self, first: int, end: int) -> None:
        self.first_offset = max(self.first_offset, first)
        self.end_offset = min(self.end_offset, end)

    def narrow(self, spans: list[TaskSpan], times: Times) -> list[TaskSpan]:
        """The parts of the spans that can hold records which pass the filters."""
        firsts = {} if self.first_ms is None else times(self.first_ms)
        ends = {} if self.end_ms is None else times(self.end_ms)
        found = []
        for span in spans:
            if self.topics is not None and span.topic not in self.topics:
                continue
            if self.partitions is not None and span.partition not in self.partitions:
                continue
            where = (span.topic, span.partition)
            start = max(span.start, self.first_offset, firsts.get(where, 0))
            end = min(span.end, self.end_offset, ends.get(where, OFFSET_MAX))
            if start < end:
                found.append(span._replace(start=start, end=end))
        return found


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(type(value) is kind for value in values)


def _both(before: set[Any] | None, values: Iterable[Any]) -> set[Any]:
    return set(values) if before is None else before & set(values)
