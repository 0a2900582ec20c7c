"""The API of the seed "Broker Package" (PulsyFlux), in Python: embedded, and over the network.

``publish(topic, payload, headers)``, ``ch = subscribe(topic)``, ``unsubscribe(topic)``, ``close()``; a message
has a topic, a payload and headers; a channel holds 100 and ends when it is closed.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Broker, BrokerClient
from headrace.errors import Closed, RequestTimeout
from headrace.testing import running_server


@pytest.fixture(params=["Broker", "BrokerClient"])
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same API twice: in this process, and over a connection."""
    if request.param == "Broker":
        with Broker.open() as embedded:
            yield embedded
    else:
        with running_server(memory=True) as server, server.client() as client:
            yield client


def test_the_usage_example(broker: Any) -> None:
    """Two messages to a reader in another thread, one of them with headers."""
    ch = broker.subscribe("events")
    received: list[tuple[str, str, dict[str, str]]] = []

    def read() -> None:
        for msg in ch:
            received.append((msg.topic, msg.payload.decode(), dict(msg.headers)))

    reader = threading.Thread(target=read)
    reader.start()
    broker.publish("events", b"Hello World", None)
    broker.publish("events", b"Another message", {"priority": "high", "source": "api"})
    if isinstance(broker, BrokerClient):
        broker.flush()
    while len(received) < 2:
        reader.join(0.01)
    broker.unsubscribe("events")
    reader.join(10)
    assert not reader.is_alive()
    assert received == [
        ("events", "Hello World", {}),
        ("events", "Another message", {"priority": "high", "source": "api"}),
    ]


def test_multiple_subscribers(broker: Any) -> None:
    """All three receive the same message."""
    ch1 = broker.subscribe("orders")
    ch2 = broker.subscribe("orders")
    ch3 = broker.subscribe("orders")
    broker.publish("orders", b"New order", None)
    for ch in (ch1, ch2, ch3):
        assert ch.get(10).payload == b"New order"


def test_multiple_topics(broker: Any) -> None:
    """Each subscriber only receives its topic."""
    orders, users, events = (broker.subscribe(topic) for topic in ("orders", "users", "events"))
    broker.publish("orders", b"Order #123", None)
    broker.publish("users", b"User login", None)
    assert orders.get(10).payload == b"Order #123"
    assert users.get(10).payload == b"User login"
    assert events.get_nowait() is None
    assert orders.get_nowait() is None


def test_unsubscribe_closes_the_channel(broker: Any) -> None:
    """Who ranges over it comes to the end; a new subscription is a new channel."""
    ch = broker.subscribe("events")
    broker.unsubscribe("events")
    assert list(ch) == []
    with pytest.raises(Closed):
        ch.get(1)
    again = broker.subscribe("events")
    broker.publish("events", b"x", None)
    assert again.get(10).payload == b"x"


def test_close_closes_every_channel(broker: Any) -> None:
    """And the broker itself takes no more."""
    channels = [broker.subscribe(topic) for topic in ("orders", "users")]
    broker.close()
    assert [list(ch) for ch in channels] == [[], []]
    with pytest.raises(Closed):
        broker.publish("orders", b"x", None)


def test_a_channel_holds_a_hundred_and_a_burst_does_not_block_the_publisher(broker: Any) -> None:
    """Buffered (100) by default; here what does not fit is not lost either."""
    ch = broker.subscribe("events")
    assert ch.capacity == 100
    for number in range(500):
        broker.publish("events", b"%d" % number, None)
    assert [int(ch.get(10).payload) for _ in range(500)] == list(range(500))


def test_receiving_with_a_timeout(broker: Any) -> None:
    """Instead of blocking for ever when there is nothing."""
    ch = broker.subscribe("events")
    with pytest.raises(RequestTimeout):
        ch.get(0.05)


def test_every_method_is_safe_from_many_threads(broker: Any) -> None:
    """Publish, subscribe and unsubscribe at the same time."""
    errors: list[BaseException] = []

    def busy(number: int) -> None:
        try:
            for _ in range(20):
                with broker.subscribe(f"topic-{number}") as ch:
                    broker.publish(f"topic-{number}", b"x", None)
                    assert ch.get(20).topic == f"topic-{number}"
                broker.unsubscribe(f"topic-{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_what_was_a_limitation_is_none(tmp_path: Any) -> None:
    """Persistence, and wildcards: a message waits for its subscriber on disk, and '*' is a word."""
    with Broker.open(tmp_path) as first:
        first.publish("orders.eu", b"early", None)
    with Broker.open(tmp_path) as second:
        member = second.subscription("mail", "orders.*")
        assert member.get(10).payload == b"early"
        ch = second.subscribe("orders.*")
        second.publish("orders.us", b"late", None)
        assert ch.get(10).topic == "orders.us"
