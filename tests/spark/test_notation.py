"""Durations and ranges as users of Spark write them."""

import orjson
import pytest

from headrace.errors import InvalidArgument
from headrace.notation import duration_ms
from headrace.spark.notation import RecordRange, spark_duration
from headrace.spark.source.positions import Extent, TopicExtents

NOW = 1_800_000_000_000
KNOWN = {"orders": TopicExtents(1, {0: Extent(10, 100), 1: Extent(0, 5)})}


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "millis", "for_spark"),
        [
            ("500 ms", 500, "500 milliseconds"),
            ("7 seconds", 7_000, "7 seconds"),
            ("1m", 60_000, "1 minute"),
            ("2 Hours", 7_200_000, "2 hours"),
            ("1.5h", 5_400_000, "5400000 milliseconds"),
            ("1 week", 604_800_000, "1 week"),
            ("1h30m", 5_400_000, "5400000 milliseconds"),
        ],
    )
    def test_a_number_and_a_unit(self, text: str, millis: int, for_spark: str) -> None:
        """Spark takes whole numbers and whole words."""
        assert duration_ms(text) == millis
        assert spark_duration(text) == for_spark


class TestRecordRange:
    def test_times_are_those_of_the_query(self) -> None:
        """An hour ago is another hour later on."""
        bounds = RecordRange(since="1h", until="@1799999999999")
        assert bounds.options(KNOWN, NOW) == {
            "startingTimestamp": str(NOW - 3_600_000),
            "endingTimestamp": "1799999999999",
        }

    def test_offsets_are_cut_to_what_is_there(self) -> None:
        """A partition that begins later, or ends before, is no mistake."""
        options = RecordRange(from_offset=7, to_offset=50).options(KNOWN, NOW)
        assert orjson.loads(options["startingOffsets"]) == {"orders": {"0": 10, "1": 5}}
        assert orjson.loads(options["endingOffsets"]) == {"orders": {"0": 50, "1": 5}}

    def test_no_bounds(self) -> None:
        assert RecordRange().options(KNOWN, NOW) == {}

    def test_not_both(self) -> None:
        """A time and an offset for the same end contradict each other."""
        with pytest.raises(InvalidArgument, match="--since or --from-offset"):
            RecordRange(since="1h", from_offset=3)
        with pytest.raises(InvalidArgument, match="--until or --to-offset"):
            RecordRange(until="1h", to_offset=3)

    def test_a_bad_time_is_found_at_once(self) -> None:
        """Not when Spark has started."""
        with pytest.raises(InvalidArgument, match="--until"):
            RecordRange(until="soon")
