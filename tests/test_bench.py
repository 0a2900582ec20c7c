"""The load test without a broker: payloads, percentiles and histograms."""

import json

import pytest

from headrace.bench import (
    PAYLOAD_BYTES_MIN,
    Figures,
    histogram,
    number_of,
    payload_maker,
    percentile,
    summary,
)


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MIN, 100, 5000])
def test_a_payload_has_its_size_and_its_number(size: int) -> None:
    """Payloads are JSON of the size asked for, and the receiver reads their numbers."""
    payload = payload_maker(size)(123)
    assert len(payload) == size
    assert json.loads(payload)["bench"] == "0000000123"
    assert number_of(payload) == 123


@pytest.mark.parametrize("payload", [b"", b"precious", b'{"bench":"x', b'{"bench":"00000000-1"'])
def test_other_messages_have_no_number(payload: bytes) -> None:
    """A topic in use may hold any messages; the test does not count them."""
    assert number_of(payload) is None


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


def test_the_histogram_has_no_gaps() -> None:
    """Steps without a value are listed between those with one."""
    steps = histogram([0.001, 0.0015, 0.03])
    assert [step["from_ms"] for step in steps] == [1, 2, 5, 10, 20]
    assert [step["count"] for step in steps] == [2, 0, 0, 0, 1]


def test_nothing_was_measured() -> None:
    """No latency and no rate when nothing was published."""
    assert summary([]) is None
    document = Figures().as_dict(100, consume=False)
    assert document["messages_per_second"] == 0
    assert document["latency_ms"] is None
    assert document["delivered"] is None


def test_latencies_in_milliseconds() -> None:
    """Latencies are measured in seconds and reported in milliseconds."""
    found = summary([0.001, 0.003, 0.002])
    assert found is not None
    points = {name: found[name] for name in ("p50", "p99", "min", "max", "mean")}
    assert points == {"p50": 2.0, "p99": 3.0, "min": 1.0, "max": 3.0, "mean": 2.0}
