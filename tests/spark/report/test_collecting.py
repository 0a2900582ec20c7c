"""A report of a real broker: its numbers, and the page that shows them."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import BrokerClient
from headrace.errors import InvalidArgument, TopicNotFound
from headrace.spark.report.collecting import BrokerReport, Period, collect
from headrace.spark.report.page import html_of
from headrace.testing import RunningServer, running_server, wait_until
from tests.cli.conftest import command, headrace
from tests.cli.rig import Command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

__all__ = ["command", "headrace"]
HOUR_MS = 3_600_000


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A broker that writes its events at once."""
    with running_server(events_interval=0.05) as running:
        yield running


class Page(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data")]


def test_intervals() -> None:
    """About a hundred of a round length, whatever the time is; a time that ends before it begins is refused."""
    day = Period.of(24 * HOUR_MS + 1, 48 * HOUR_MS)
    assert (day.step_ms, day.start_ms, day.intervals) == (900_000, 24 * HOUR_MS, 96)
    assert Period.of(0, 10_000).step_ms == 1000
    years = Period.of(0, 20 * 365 * 24 * HOUR_MS)
    assert years.intervals <= 121
    assert day.values({0: 5, 95: 1}, 0)[::95] == [5, 1]
    with pytest.raises(InvalidArgument, match="before it begins"):
        Period.of(5, 5)


@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_what_a_broker_did(
    spark: SparkSession,
    server: RunningServer,
    client: BrokerClient,
    headrace: Command,
    tmp_path: Path,
) -> None:
    """Traffic, sizes, deliveries, dead letters and pipelines are counted, and are on the page."""
    client.publish_many("orders", [b"x" * 100] * 50)
    client.publish_many("payments", [b"y" * 10] * 5)
    consumer = client.subscription("email", "orders", max_deliveries=1)
    for number in range(10):
        message = consumer.get(10)
        if number < 3:
            message.nack(reason="<script>no stock</script>")
        else:
            message.ack()
    consumer.close()
    started = time.time_ns() // 1_000_000
    for batch in (1, 2, 4):
        query = {
            "name": "totals", "batches_total": batch, "input_rows_total": 10 * batch, "lag": 5 - batch,
            "trigger_ms": 100.0 * batch, "batch_id": batch,
        }  # fmt: skip
        run = {"state": "running", "run_id": "r", "started_at": started, "queries": [query]}
        client.report_pipeline("totals", run)  # type: ignore[arg-type]

    period = Period.of(started - HOUR_MS, started + HOUR_MS)
    source = {"servers": f"{server.host}:{server.port}", "timeout": "10"}
    wait_until(lambda: _dead(client) == 3)
    report = collect(spark, source, period)
    traffic = {each.topic: (sum(each.messages), sum(each.bytes) > 0) for each in report.topics}  # type: ignore[arg-type]
    assert traffic["orders"] == (50, True)
    assert traffic["payments"] == (5, True)
    assert report.sizes is not None
    sizes = {each.topic: each for each in report.sizes}
    assert (sizes["orders"].messages, sizes["orders"].largest) == (50, 100)
    assert sizes["payments"].percentiles == (10, 10, 10)
    [email] = [each for each in report.subscriptions if each.name == "email"]
    assert sum(value or 0 for value in email.delivered) >= 10
    assert any(value is not None for value in email.p99_ms)
    assert [(each.subscription, each.letters) for each in report.reasons] == [("email", 3)]
    [totals] = report.pipelines
    assert sum(value or 0 for value in totals.batches) == 4
    assert sum(value or 0 for value in totals.rows) == 40
    assert max(value or 0 for value in totals.batch_ms) == 400
    assert totals.lag[-1] == 1

    page = tmp_path / "page.html"
    ran = headrace("report", "--since", "1h", "--output", page)
    assert (ran.code, ran.out.strip()) == (0, f"wrote {page}"), ran.err
    text = page.read_text()
    seen = Page(text)
    assert (seen.links, "script" in seen.tags, seen.tags.count("svg") >= 9) == ([], False, True)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "&lt;script&gt;no stock&lt;/script&gt;" in text
    for word in ("orders", "payments", "email", "totals", "prefers-color-scheme: dark"):
        assert word in text
    assert headrace("report", "nothing").code == 2
    assert headrace("report", "--since", "1h", "--until", "2h").code == 2


def _dead(client: BrokerClient) -> int:
    """Dead letters that the events have counted."""
    try:
        found = client.fetch("__events", limit=1000)
    except TopicNotFound:
        return 0
    return sum(message.json().get("dead_lettered", 0) for message in found)


def test_a_young_broker_has_an_empty_page() -> None:
    """Each section says that there is nothing; nothing is divided by it."""
    text = html_of(BrokerReport(Period.of(0, HOUR_MS), "127.0.0.1:9999", sizes=[]), made_ms=0)
    for said in (
        "no events of this time",
        "holds no messages",
        "No message was given up",
        "No pipeline",
    ):
        assert said in text
