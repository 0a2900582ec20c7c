"""The Python of the seed "Message Broker", word for word, against a Headrace server.

The examples import ``BrokerClient`` from a module ``client`` and talk to port 9999. Here that module holds
Headrace's own client, and port 9999 is wherever the test's server listens. Nothing else is changed.
"""

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

import headrace
from headrace.testing import RunningServer, running_server, wait_until

PUBLISHING = """
from client import BrokerClient

# Create client
client = BrokerClient(host='localhost', port=9999, client_id='publisher-1')
client.connect()

# Create a topic
client.create_topic('events')

# Publish messages
client.publish_text('events', 'Hello, World!')
client.publish_text('events', 'Another message', custom_property='value')

client.disconnect()
"""

SUBSCRIBING = """
from client import BrokerClient

def message_handler(message):
    print(f"Received: {message.body.decode('utf-8')}")

# Create client
client = BrokerClient(host='localhost', port=9999, client_id='subscriber-1')
client.connect()

# Create a subscription for the topic
client.create_subscription('my-consumer-group', 'events', start_offset=0)

# Join the subscription
client.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Keep running to receive messages
try:
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    client.unsubscribe_from_subscription('my-consumer-group')
    client.disconnect()
"""

ROUND_ROBIN = """
# Subscriber 1
client1 = BrokerClient(client_id='subscriber-1')
client1.connect()
client1.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Subscriber 2 (joins same subscription)
client2 = BrokerClient(client_id='subscriber-2')
client2.connect()
client2.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Messages will be distributed round-robin between subscriber-1 and subscriber-2
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server, and the seed's module ``client`` that leads to it."""
    with running_server() as running:

        class BrokerClient(headrace.BrokerClient):
            def __init__(self, host: str = "localhost", port: int = 9999, **options: Any):
                assert port == 9999
                super().__init__(host, running.port, **options)

        module = types.ModuleType("client")
        module.BrokerClient = BrokerClient  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "client", module)
        yield running


class Clock:
    """The seed's program sleeps until somebody presses Ctrl-C: here, until it has heard enough."""

    def __init__(self, printed: Any, lines: int):
        self._printed, self._lines = printed, lines

    def sleep(self, seconds: float) -> None:
        assert seconds == 1
        wait_until(lambda: len(self._printed) >= self._lines)
        raise KeyboardInterrupt


def test_publishing_messages(server: RunningServer) -> None:
    """Both messages are stored; the further keyword argument is a header."""
    exec(PUBLISHING, {})
    with server.client() as client:
        first, second = client.fetch("events")
        assert first.body == b"Hello, World!"
        assert second.text() == "Another message"
        assert second.headers == {"custom_property": "value"}


def test_subscribing_to_messages(server: RunningServer) -> None:
    """The handler hears every message from offset 0 on; what it handled is acknowledged."""
    exec(PUBLISHING, {})
    printed: list[str] = []
    exec(SUBSCRIBING, {"time": Clock(printed, 2), "print": printed.append})
    assert printed == ["Received: Hello, World!", "Received: Another message"]
    with server.client() as client:
        stats = client.subscription_stats("my-consumer-group", "events")
        assert (stats["lag"], stats["members"]) == (0, 0)


def test_several_subscribers_share_in_turn(server: RunningServer) -> None:
    """Round-robin: each of two gets every other message, and each message goes to one."""
    from client import BrokerClient  # type: ignore[import-not-found]

    by_thread: dict[int, list[str]] = {}
    lock = threading.Lock()

    def message_handler(message: headrace.Message) -> None:
        with lock:
            by_thread.setdefault(threading.get_ident(), []).append(message.text())

    with server.client() as client:
        client.create_topic("events")
        client.create_subscription("my-consumer-group", "events")
        names: dict[str, Any] = {"BrokerClient": BrokerClient, "message_handler": message_handler}
        exec(ROUND_ROBIN, names)
        stats = client.subscription_stats
        wait_until(lambda: stats("my-consumer-group", "events")["members"] == 2)
        for number in range(10):
            client.publish_text("events", f"{number}")
        wait_until(lambda: sum(map(len, by_thread.values())) == 10)
        first, second = by_thread.values()
        assert {tuple(first), tuple(second)} == {
            ("0", "2", "4", "6", "8"),
            ("1", "3", "5", "7", "9"),
        }
        names["client1"].disconnect()
        names["client2"].disconnect()


def test_a_message_survives_the_server(server: RunningServer) -> None:
    """Immediate persistence: written to disk upon arrival, with fsync."""
    exec(PUBLISHING, {})
    server.kill()
    server.start()
    printed: list[str] = []
    exec(SUBSCRIBING, {"time": Clock(printed, 2), "print": printed.append})
    assert len(printed) == 2


def test_a_subscription_keeps_its_place(server: RunningServer) -> None:
    """Subscription offsets: who joins later goes on where the group stood."""
    printed: list[str] = []
    exec(PUBLISHING, {})
    exec(SUBSCRIBING, {"time": Clock(printed, 2), "print": printed.append})
    exec(PUBLISHING, {})
    exec(SUBSCRIBING, {"time": Clock(printed, 4), "print": printed.append})
    assert len(printed) == 4
