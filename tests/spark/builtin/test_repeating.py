"""Rounds are done again, tried again, reported and stopped."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.errors import InvalidArgument, RequestTimeout
from headrace.spark.builtin import repeating
from headrace.spark.builtin.repeating import Rounds


class Spark:
    """What of a session is needed to break a round off."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    @property
    def sparkContext(self) -> Any:
        return self

    def cancelAllJobs(self) -> None:
        self.cancelled.set()


def rounds_of(work: Any, **options: Any) -> Rounds:
    spark: Any = Spark()
    return Rounds(spark, "job", work, lambda: 0.0, sink="topic x", **options)


def test_until_it_is_stopped() -> None:
    """Round after round; what it has done is in its report."""
    seen: list[int] = []

    def work() -> int:
        seen.append(1)
        if len(seen) == 3:
            rounds.wish_to_stop()
        return 2

    rounds = rounds_of(work)
    rounds.run()
    assert (rounds.state, rounds.rounds, rounds.rows) == ("stopped", 3, 6)
    [query] = rounds.document()["queries"]
    assert (query["batch_id"], query["input_rows_total"], query["error"]) == (2, 6, None)


def test_once() -> None:
    rounds = rounds_of(lambda: 5, once=True)
    rounds.run()
    assert (rounds.state, rounds.rows) == ("finished", 5)


def test_what_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that was away; as often as it may, in a row."""
    results = [RequestTimeout("no answer"), 1, RequestTimeout("no answer"), 2]
    waited: list[float] = []

    def work() -> int:
        if not results:
            rounds.stop()
            return 0
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    rounds = rounds_of(work)
    stopping = rounds._stopping
    monkeypatch.setattr(
        stopping, "wait", lambda seconds: waited.append(seconds) or stopping.is_set()
    )
    rounds.run()
    assert (rounds.state, rounds.rows, rounds.error) == ("stopped", 3, None)
    assert waited == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many failures, or at once where trying again cannot help."""
    monkeypatch.setattr(repeating, "RESTARTS", 0)
    for error in (RequestTimeout("no answer"), InvalidArgument("no such topic")):

        def work(error: Exception = error) -> int:
            raise error

        rounds = rounds_of(work)
        rounds.run()
        assert (rounds.state, rounds.error) == ("failed", str(error))


def test_a_second_stop_breaks_off() -> None:
    rounds = rounds_of(lambda: 0)
    spark: Any = rounds._spark
    rounds.stop(now=True)
    assert spark.cancelled.wait(10)
    rounds.run()
    assert rounds.state == "stopped"
