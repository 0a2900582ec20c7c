"""Percentiles and histograms of a load test."""

import pytest

from headrace.bench.figures import Figures, Latencies, histogram, percentile


def test_percentiles_are_values_that_were_measured() -> None:
    """Nearest rank: no value is made up between two."""
    ordered = [float(n) for n in range(1, 101)]
    assert [percentile(ordered, p) for p in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 50) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0


@pytest.mark.parametrize(
    ("ms", "low", "high"),
    [
        (0.0009, 0.001, 0.002),
        (0.1, 0.1, 0.2),
        (0.3, 0.2, 0.5),
        (1, 1, 2),
        (1.99, 1, 2),
        (2, 2, 5),
        (5, 5, 10),
        (9.9, 5, 10),
        (10, 10, 20),
        (999, 500, 1000),
        (1000, 1000, 2000),
    ],
)
def test_a_value_falls_into_its_step(ms: float, low: float, high: float) -> None:
    """Steps are 1, 2, 5 times a power of ten, the lower bound included."""
    assert histogram([ms / 1000]) == [{"from_ms": low, "to_ms": high, "count": 1}]


def test_steps_without_a_value_are_there_between_others() -> None:
    """From the smallest value to the largest nothing is left out."""
    steps = histogram([0.001, 0.0015, 0.03])
    assert [step["from_ms"] for step in steps] == [1, 2, 5, 10, 20]
    assert [step["count"] for step in steps] == [2, 0, 0, 0, 1]


def test_nothing_measured_is_said_so() -> None:
    """No latency and no rate when nothing was published."""
    assert Latencies().as_dict() is None
    document = Figures().as_dict(100, consume=False)
    assert document["messages_per_second"] == 0
    assert document["latency_ms"] is None
    assert document["delivered"] is None


def test_latencies_in_milliseconds() -> None:
    """What was added in seconds is told in milliseconds."""
    latencies = Latencies()
    for seconds in (0.001, 0.002, 0.003):
        latencies.add(seconds)
    found = latencies.as_dict()
    assert found is not None
    assert (found["p50"], found["p99"], found["min"], found["max"], found["mean"]) == (
        2.0,
        3.0,
        1.0,
        3.0,
        2.0,
    )
