"""The last ten minutes: rates that add up, rings that are bounded, and rounds that cost little."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.broker import history
from headrace.broker.history import ITEM_SAMPLES, HistoryRing, Recording
from headrace.broker.publishers import Publisher
from headrace.broker.publishing import Publish
from headrace.errors import Forbidden
from headrace.testing import RunningServer, running_server, wait_until


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(memory=True) as running:
        running.call(running.engine.history.close)  # the tests say when a round is
        yield running


def rounds(server: RunningServer, count: int = history.EVERY) -> None:
    """By default so many that topics and subscriptions are among them."""

    def run() -> None:
        for _ in range(count):
            for _ in server.engine.history._round():
                pass

    server.call(run)


# --- rings ------------------------------------------------------------------------------------------
def test_a_ring_writes_quiet_rounds_when_somebody_looks() -> None:
    """A gauge stays, a rate is zero, and what is older than the ring is gone."""
    ring = HistoryRing(2, (), (0, 0), -1)
    ring.add(0, (), (10, 100), 10.0)
    assert ring.of(0, 0)[-2:] == [0.0, 1.0]
    assert ring.of(1, 3)[-4:] == [10.0, 0.0, 0.0, 0.0]
    ring.add(5, (), (40, 100), 10.0)
    assert ring.of(0, 5)[-6:] == [1.0, 0.0, 0.0, 0.0, 0.0, 3.0]
    assert ring.of(0, 5 + 2 * ITEM_SAMPLES) == [0.0] * ITEM_SAMPLES
    lag = HistoryRing(1, (7,), (), -1)
    assert lag.of(0, 2)[-3:] == [7.0, 7.0, 7.0]


def test_a_ring_is_small() -> None:
    """5,000 topics and as many subscriptions are a few megabytes."""
    assert len(HistoryRing(3, (0,), (0, 0), 0).values.tobytes()) == 720


# --- recording --------------------------------------------------------------------------------------
def test_rates_are_those_of_the_time_between_two_samples(server: RunningServer) -> None:
    """Of the broker, of a topic and of a subscription; the lag is what it is."""
    with server.client() as client:
        client.create_subscription("email", "orders")
        rounds(server)
        client.publish_many("orders", [b"x" * 100] * 500)
        rounds(server)
        found = client.history()
        assert len(found["times"]) == 2 * history.EVERY
        assert {len(series) for series in found["series"].values()} == {2 * history.EVERY}
        assert max(found["series"]["published_per_second"]) > 0
        assert found["series"]["lag"][-1] == 500
        topic = client.topic_history("orders")
        assert [rate > 0 for rate in topic["series"]["published_per_second"]] == [False, True]
        assert client.subscription_history("email")["series"]["lag"] == [0, 500]
        [row] = client.topic_table()["rows"]
        assert row["rate"] == pytest.approx(topic["series"]["published_per_second"][-1])


def test_five_thousand_topics_take_a_few_megabytes(server: RunningServer) -> None:
    """Topics and subscriptions that are all active: rings, publishers and everything, in bounded memory."""
    count = 5_000
    engine = server.engine

    def fill() -> None:
        for number in range(count):
            topic = engine.create_topic(f"t{number}")
            engine.publish(Publish(topic.name, b"x", by=clients[number % 7]), lambda *_: None)

    clients = [Publisher(f"c{number}", "anyone", "127.0.0.1", "text") for number in range(7)]
    server.call(fill)
    with server.client() as client:
        client.create_subscription("all", "t0")
        tracemalloc.start()
        try:
            rounds(server, 3 * history.EVERY)
            recorded = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert server.call(lambda: sum(topic.ring is not None for topic in engine.topics)) == count
        assert recorded < 1_200 * count
        assert len(client.topic_publishers("t4999")) == 1


def test_the_number_of_rings_is_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it, topics have no history, and everything else goes on."""
    monkeypatch.setattr(history, "ITEMS_MAX", 10)
    with server.client() as client:
        for number in range(30):
            client.publish(f"t{number}", b"x")
        rounds(server)
        rounds(server)
        assert server.call(lambda: sum(t.ring is not None for t in server.engine.topics)) == 10
        assert len(client.topic_table(limit=100)["rows"]) == 30


def test_a_lag_that_grows_is_noticed(server: RunningServer) -> None:
    """After a minute, if the subscription has members; the words say by how much."""
    with server.client() as client, client.subscription("slow", "orders", prefetch=1):
        for _ in range(7):
            client.publish_many("orders", [b"x"] * 100)
            rounds(server)
        [row] = client.subscription_table()["rows"]
        assert row["growth"] == 600
        assert row["verdict"] == client.subscription_stats("slow")["verdict"] == "stalled"
        codes = [finding["code"] for finding in client.explain_subscription("slow")["findings"]]
        assert "growing" in codes
        client.pause_subscription("slow")  # then more members would not help
        codes = [finding["code"] for finding in client.explain_subscription("slow")["findings"]]
        assert "paused" in codes
        assert "growing" not in codes


def test_whether_a_subscription_keeps_up(server: RunningServer) -> None:
    """Over a minute: it stands, it falls behind, it keeps up; a paused one is as it should be."""

    def verdict() -> str:
        [stats] = client.subscriptions("orders")
        assert client.explain_subscription("email")["verdict"] == stats["verdict"]
        return stats["verdict"]

    with server.client() as client:
        client.create_subscription("email", "orders")
        client.publish_many("orders", [b"x"] * 1000)
        rounds(server)
        assert verdict() == "ok"  # nobody knows yet
        for _ in range(7):
            rounds(server)
        assert verdict() == "stalled"
        client.pause_subscription("email")
        assert verdict() == "ok"
        client.resume_subscription("email")
        for number in range(8):
            client.publish_many("orders", [b"x"] * 100)
            client.advance("email", {"orders": {0: 10 * (number + 1)}})
            rounds(server)
        assert verdict() == "falling behind"
        for number in range(8):
            client.advance("email", {"orders": {0: 100 * (number + 1)}})
            rounds(server)
        assert verdict() == "ok"
        client.advance("email", {"orders": {0: 1800}})
        assert verdict() == "ok"


def test_idle_topics_have_no_ring(server: RunningServer) -> None:
    """Only what was active is remembered."""
    server.call(lambda: [server.engine.create_topic(f"t{number}") for number in range(10)])
    with server.client() as client:
        client.publish("t3", b"x")
        rounds(server)
    assert [topic.name for topic in server.engine.topics if topic.ring is not None] == ["t3"]


def test_many_topics_are_looked_at_less_often(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rounds between, the last numbers are repeated."""
    monkeypatch.setattr(history, "MANY", 5)
    server.call(lambda: [server.engine.create_topic(f"t{number}") for number in range(10)])
    rounds(server)
    seen: list[Any] = []
    monkeypatch.setattr(Recording, "_take", lambda self, item, *rest: seen.append(item))
    rounds(server, 1)
    assert seen == []
    rounds(server, 1)
    assert len(seen) == 10


def test_a_round_over_many_topics_takes_little_time(server: RunningServer) -> None:
    """10,000 idle ones cost far less than a hundredth of the time between two rounds."""
    server.call(lambda: [server.engine.create_topic(f"t{number}") for number in range(10_000)])
    rounds(server)

    def measured() -> float:
        begun = time.thread_time()
        for _ in range(history.EVERY):
            for _ in server.engine.history._round():
                pass
        return time.thread_time() - begun

    assert min(server.call(measured) for _ in range(3)) < 0.01 * history.EVERY * history.INTERVAL_S


def test_the_history_of_the_broker_needs_the_right_metrics() -> None:
    """As /metrics does: it tells of everybody's topics."""
    with running_server(memory=True, token="x" * 20) as server:
        with server.client() as root:
            secret = root.create_token("half", grants=["metrics:orders"])["secret"]
            assert root.history()["interval_ms"] == 5000
        with server.client(token=secret) as half, pytest.raises(Forbidden):
            half.history()


def test_failures_are_remembered_up_to_a_bound(server: RunningServer) -> None:
    """The newest, with who failed and why."""
    with server.client(client_id="worker") as client:
        client.create_subscription("keeper", "orders")  # what all have finished is gone
        client.create_subscription("email", "orders", max_deliveries=2, backoff=0)
        receipt = client.publish("orders", b"x")
        with closing(client.subscription("email", "orders")) as messages:
            for _ in range(2):
                messages.get(timeout=10).nack(reason="no stock")
            wait_until(lambda: client.dead_letters("email"))
        states = client.message_life(receipt.id)["subscriptions"]
        [state] = [each for each in states if each["subscription"] == "email"]
        assert (state["state"], state["dead_letter"]) == ("dead letter", 0)
        assert [(f["attempt"], f["reason"]) for f in state["failures"]] == [
            (1, "no stock"),
            (2, "no stock"),
        ]
        assert server.engine.history.failures.maxlen == history.FAILURES_MAX
