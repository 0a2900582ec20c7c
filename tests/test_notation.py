"""Sizes, durations and times as people write them, the same for everybody who takes them."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from msgspec import Meta

from headrace.checking import check
from headrace.errors import InvalidArgument
from headrace.model import SubscriptionSettings, TopicSettings, parse_position
from headrace.notation import (
    BYTES,
    HOURS,
    MILLISECONDS,
    SECONDS,
    duration_ms,
    parse_moment,
    parse_time,
    size_of,
    unit_of,
)

NOW = 1_800_000_000_000


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("0", 0), ("512", 512), ("1kb", 1 << 10), ("1 KiB", 1 << 10), ("1.5M", 3 << 19),
         ("1GB", 1 << 30), ("1GiB", 1 << 30), ("2t", 2 << 40)],
    )  # fmt: skip
    def test_powers_of_1024(self, text: str, size: int) -> None:
        """With B, iB or neither."""
        assert size_of(text) == size

    @pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "1XB", "1h", "9" * 99, "9" * 10_000])
    def test_what_is_no_size(self, text: str) -> None:
        assert size_of(text) is None


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "ms"), [("90s", 90_000), ("1h30m", 5_400_000), ("1.5 h", 5_400_000), ("2 days", 172_800_000)]
    )  # fmt: skip
    def test_numbers_and_units(self, text: str, ms: int) -> None:
        assert duration_ms(text) == ms

    @pytest.mark.parametrize(
        "text", ["", "5", "soon", "5 x", "-1 s", "1 month", "1h x", "1h" * 5_000]
    )
    def test_no_duration(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="is not a duration"):
            duration_ms(text)


class TestUnitsOfAnnotations:
    @pytest.mark.parametrize(
        ("annotation", "text", "value"),
        [
            (Annotated[float, Meta(ge=0), SECONDS], "2m", 120),
            (Annotated[float, Meta(ge=0), HOURS], "3d", 72),
            (Annotated[int, Meta(ge=0), MILLISECONDS] | None, "5s", 5_000),
            (Annotated[int, Meta(ge=0), BYTES] | None, "1GB", 1 << 30),
        ],
    )
    def test_a_text_becomes_a_number_of_the_unit(
        self, annotation: Any, text: str, value: int
    ) -> None:
        """Also where text is not taken for numbers otherwise."""
        assert check("it", text, annotation) == value

    @pytest.mark.parametrize(
        ("unit", "text", "hint"), [(SECONDS, "soon", "90s"), (BYTES, "much", "512KB"), (BYTES, "1e3", "512KB")]
    )  # fmt: skip
    def test_the_refusal_says_how_to_write_it(self, unit: Any, text: str, hint: str) -> None:
        with pytest.raises(InvalidArgument, match=hint):
            check("it", text, Annotated[int, Meta(ge=0), unit], strict=False)

    def test_bounds_hold_for_texts(self) -> None:
        with pytest.raises(InvalidArgument, match="from 1 to 10"):
            check("it", "1h", Annotated[int, Meta(ge=1, le=10), SECONDS])

    def test_a_number_without_a_unit_is_no_size(self) -> None:
        """max_queue_size counts messages."""
        assert unit_of(TopicSettings.__annotations__["max_queue_size"]) is None

    def test_settings_of_topics_and_subscriptions(self) -> None:
        """Over every protocol, as all pass here."""
        topic = TopicSettings().but({"retention_hours": "3d", "segment_bytes": "64MB"})
        assert (topic.retention_hours, topic.segment_bytes) == (72, 64 << 20)
        assert SubscriptionSettings.of({"ack_timeout": "2m"}).ack_timeout == 120


class TestPositions:
    def test_a_time_without_a_zone_is_utc(self) -> None:
        """Wherever the broker and its user are."""
        assert parse_position("2026-01-31T12:00:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)

    def test_a_duration_is_that_long_ago(self) -> None:
        place = parse_position("1h30m")
        ago = datetime.now(UTC) - place
        assert timedelta(minutes=90) <= ago < timedelta(minutes=91)


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "millis"),
        [
            ("0s", NOW),
            ("90s", NOW - 90_000),
            ("1.5h", NOW - 5_400_000),
            ("2d", NOW - 172_800_000),
            ("1w", NOW - 604_800_000),
            ("100000w", 0),
            ("@1700000000000", 1_700_000_000_000),
            ("2026-01-31T12:00:00Z", 1_769_860_800_000),
            ("2026-01-31", 1_769_817_600_000),
        ],
    )
    def test_a_time_or_a_duration_ago(self, text: str, millis: int) -> None:
        assert parse_moment("--since", text, NOW) == millis

    @pytest.mark.parametrize("text", ["5", "yesterday", "", "1x", "@soon"])
    def test_what_is_neither(self, text: str) -> None:
        """The option is named, and what it takes."""
        with pytest.raises(InvalidArgument, match=r"--since.*(30m|2026)"):
            parse_moment("--since", text, NOW)

    def test_a_time_is_milliseconds_or_iso(self) -> None:
        """As messages carry it."""
        assert parse_time("at", "1700000000000") == 1_700_000_000_000
        assert parse_time("at", "2026-01-31T12:00:00+01:00") == 1_769_857_200_000
