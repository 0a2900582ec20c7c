"""Times and durations as users give them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.model import TopicSettings
from headrace.operations.catalog import OPERATIONS
from headrace.times import check_seconds, check_time, seconds


def test_a_timedelta_is_a_duration() -> None:
    """Wherever seconds are taken."""
    assert check_seconds("delay", timedelta(minutes=2), 1000) == 120.0
    assert check_seconds("delay", 2, 1000) == 2.0
    assert (seconds(timedelta(milliseconds=5)), seconds(3)) == (0.005, 3)


@pytest.mark.parametrize(
    ("name", "number"),
    [("retention_hours", 36.0), ("message_ttl_ms", 129_600_000), ("segment_hours", 36)],
)
def test_a_setting_gets_its_own_unit(name: str, number: float) -> None:
    """The broker's own options and those of operations take a timedelta."""
    given: Any = {name: timedelta(hours=36)}
    assert getattr(TopicSettings.of(given), name) == number
    declared = OPERATIONS["create_topic"]
    assert declared.bind(("orders",), given)["settings"] == {name: number}
    assert OPERATIONS["wait_for"].bind(({},), {"timeout": timedelta(seconds=5)})["wait"] == 5


def test_a_datetime_is_a_time() -> None:
    """Wherever milliseconds since 1970 are taken."""
    assert check_time("deliver_at", datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000
    assert check_time("deliver_at", 5) == 5


@pytest.mark.parametrize("bad", [timedelta(seconds=-1), timedelta(days=1), "1", True, None])
def test_a_bad_duration_is_refused(bad: object) -> None:
    """The sentence says what is taken."""
    with pytest.raises(InvalidArgument, match="between 0 and 60 or a timedelta") as caught:
        check_seconds("delay", bad, 60)
    assert caught.value.code == "invalid_delay"


@pytest.mark.parametrize("bad", [datetime(1960, 1, 1), datetime.min, timedelta(1), 1.5, -1])
def test_a_bad_time_is_refused(bad: object) -> None:
    """Also one before 1970."""
    with pytest.raises(InvalidArgument) as caught:
        check_time("timestamp", bad)
    assert caught.value.code == "invalid_time"
