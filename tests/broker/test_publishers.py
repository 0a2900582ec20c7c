"""Who has published lately: known for each topic and message, in bounded memory, to those who may know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.broker import publishers
from headrace.broker.publishers import Publisher, RecentPublishers
from headrace.broker.publishing import Publish
from headrace.testing import RunningServer, running_server
from tests.server.http_rig import http_of

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def recent(server: RunningServer) -> RecentPublishers:
    return server.engine.publishing.recent


def author(client: Any, offset: int, topic: str = "orders", partition: int = 0) -> Any:
    [message] = client.fetch(topic, offset, 1, partition=partition)
    found = client.message_life(message.id)["publisher"]
    return None if found is None else found["client_id"]


def test_a_topic_and_a_message_know_their_publishers(server: RunningServer) -> None:
    """Over the client and over HTTP, each by the name that it gave itself."""
    with server.client(client_id="shop") as shop, server.client(client_id="till") as till:
        shop.publish("orders", b"one")
        shop.publish_many("orders", [b"x"] * 5)
        till.publish("orders", b"two")
        with closing(http_of(server)) as http:
            http.ok("POST", "/publish/orders", b"{}", **{"X-Client-Id": "web"})
        assert [author(till, offset) for offset in (0, 5, 6, 7)] == ["shop", "shop", "till", "web"]
        found = till.topic_publishers("orders")
        assert {each["client_id"]: each["protocol"] for each in found} == {
            "shop": "binary",
            "till": "binary",
            "web": "http",
        }
        assert found[0]["address"] == "127.0.0.1"
        assert [each["client_id"] for each in till.topic_publishers("orders", limit=1)] == ["web"]


def test_a_publisher_that_goes_on_is_one_run(server: RunningServer) -> None:
    """However much it publishes; it takes no more memory, and the time of the last one is known."""
    with server.client(client_id="shop") as shop:
        for _ in range(50):
            shop.publish_many("orders", [b"x"] * 100)
        assert server.call(lambda: recent(server)._at) == 0
        assert author(shop, 4999) == "shop"


def test_messages_that_were_stored_together_have_publishers_of_their_own(
    server: RunningServer,
) -> None:
    """Single plain messages of several connections become one entry of the log."""
    server.call(server.engine.create_topic, "orders")

    def publish() -> None:
        for number in range(6):
            by = Publisher(f"c{number % 3}", "anyone", "127.0.0.1", "http")
            one = Publish("orders", b"x", by=by if number != 4 else None)
            server.engine.publish(one, lambda receipts, error: None)

    server.call(publish)
    with server.client() as client:
        server.wait_until(lambda: server.engine.topics.find("orders").end_offsets() == [6])
        found = [author(client, offset) for offset in range(6)]
        assert found == ["c0", "c1", "c2", "c0", None, "c2"]
        assert {each["client_id"] for each in client.topic_publishers("orders")} == {
            "c0",
            "c1",
            "c2",
        }


def test_the_memory_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest runs and the clients that published longest ago make room."""
    few = RecentPublishers(runs_max=10)
    server.call(setattr, server.engine.publishing, "recent", few)
    monkeypatch.setattr(publishers, "LATELY_MAX", 4)
    with server.client(client_id="a") as one, server.client(client_id="b") as other:
        for number in range(20):
            (one if number % 2 else other).publish("orders", b"x")
        for number in range(6):
            one.publish(f"topic.{number}", b"x")
        assert len(few._lately) == 4
        assert len(few._by) == 10
        assert author(one, 0) is None
        assert author(one, 19) == "a"
        assert author(one, 17) == "a"
        assert author(one, 16) == "b"
        assert one.topic_publishers("topic.5")


def test_a_topic_that_is_created_again_is_another_one(server: RunningServer) -> None:
    """Nobody has published to it yet."""
    with server.client(client_id="shop") as shop:
        shop.publish("orders", b"x")
        shop.delete_topic("orders")
        shop.create_topic("orders")
        assert shop.topic_publishers("orders") == []


def test_a_repetition_is_the_first_ones(server: RunningServer) -> None:
    """An idempotent publish that comes again was published by whoever came first."""
    with server.client(client_id="a") as one, server.client(client_id="b") as other:
        one.publish("orders", b"x", idempotency_key="k")
        other.publish("orders", b"x", idempotency_key="k")
        assert author(one, 0) == "a"
        assert [each["client_id"] for each in one.topic_publishers("orders")] == ["a"]


def test_only_those_who_manage_a_topic_learn_addresses() -> None:
    """Everybody who sees the topic learns the names."""
    with running_server(token=TOKEN) as server, server.client(client_id="shop") as root:
        root.publish("orders", b"x")
        secret = root.create_token("reader", grants=["browse:orders"])["secret"]
        with server.client(token=secret) as reader:
            [seen] = reader.topic_publishers("orders")
            assert (seen["client_id"], seen["address"], seen["name"]) == ("shop", "", "")
        [seen] = root.topic_publishers("orders")
        assert seen["address"] == "127.0.0.1"
