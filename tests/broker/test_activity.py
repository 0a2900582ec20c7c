"""What a subscription did in a while: latencies, attempts, reasons, all within bounds."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.activity import ATTEMPTS_APART, OTHER, REASON_CHARS, REASONS_APART, Activity


def test_nothing_happened() -> None:
    """Everything is there, and empty."""
    assert Activity().take() == {
        "attempts": {},
        "latency_ms": {"count": 0, "sum": 0, "max": 0, "p50": 0, "p99": 0},
        "dead_letters": {},
    }


def test_what_was_taken_is_not_told_again() -> None:
    """An event is about the time since the last one."""
    activity = Activity()
    activity.first(7, 3)
    activity.mixed(5, [1, 2])
    activity.buried("broken")
    assert activity.take()["latency_ms"]["sum"] == 7 * 3 + 5
    assert activity.take() == Activity().take()


def test_deliveries_are_counted_by_their_attempt() -> None:
    """Those that were tried very often are one row."""
    activity = Activity()
    activity.first(1, 10)
    activity.mixed(1, [1, 2, 2, 3, ATTEMPTS_APART, 1_000_000])
    assert activity.take()["attempts"] == {"1": 11, "2": 2, "3": 1, f"{ATTEMPTS_APART}+": 2}


def test_only_first_deliveries_have_a_latency() -> None:
    """What waited for a retry did so on purpose."""
    activity = Activity()
    activity.mixed(100_000, [2, 3])
    assert activity.take()["latency_ms"]["count"] == 0


def test_a_time_that_is_to_come_is_no_time() -> None:
    """A clock that was set back does not make it negative."""
    activity = Activity()
    activity.first(-5_000, 2)
    assert activity.take()["latency_ms"] == {"count": 2, "sum": 0, "max": 0, "p50": 0, "p99": 0}


def test_there_are_as_many_reasons_as_one_can_read() -> None:
    """The rest are counted together, and a long one is cut."""
    activity = Activity()
    for number in range(REASONS_APART + 5):
        activity.buried(f"reason {number}")
    activity.buried("reason 0")
    reasons = activity.take()["dead_letters"]
    assert len(reasons) == REASONS_APART + 1
    assert (reasons["reason 0"], reasons[OTHER]) == (2, 5)
    activity.buried("two\n lines " + "x" * 10_000)
    [reason] = activity.take()["dead_letters"]
    assert reason.startswith("two lines xxx")
    assert len(reason) == REASON_CHARS


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1000)), min_size=1))
def test_quantiles_are_right_within_a_power_of_two(given: list[tuple[int, int]]) -> None:
    """As is said; and the sum, the count and the maximum are exact."""
    activity = Activity()
    for late, count in given:
        activity.first(late, count)
    told = activity.take()["latency_ms"]
    assert told["count"] == sum(count for _, count in given)
    assert told["sum"] == sum(late * count for late, count in given)
    assert told["max"] == max(late for late, _ in given)
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        rank = math.ceil(part * told["count"])
        for late, count in sorted(given):  # noqa: B007 - the one at the rank is looked for
            rank -= count
            if rank <= 0:
                break
        assert told[name].bit_length() == late.bit_length()
        assert told[name] <= told["max"]
