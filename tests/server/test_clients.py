"""Who is connected, and what each connection holds; and the broker at a glance."""

import os
import socket
from contextlib import closing
from typing import Any

import pytest

from headrace.broker.overview import Connected
from headrace.client.aio import default_client_id
from headrace.errors import InvalidArgument
from headrace.limits import CLIENT_ID_CHARS_MAX, HELD_SHOWN_MAX
from headrace.testing import RunningServer, running_server, wait_until
from tests.contract.raw_binary import HEARTBEAT, FrameSocket
from tests.contract.raw_text import TextSocket
from tests.server.access_rig import ROOT
from tests.server.http_rig import Http, http_of
from tests.server.http_websocket import WebSocket


def by_id(found: list[Any]) -> dict[str | None, Any]:
    return {each["client_id"]: each for each in found}


def test_what_a_client_holds(server: RunningServer) -> None:
    """Its subscriptions, the messages in flight, the bytes it has not read, and since when it is there."""
    began = server.call(server.engine.now_ms)
    with server.client(client_id="worker-7") as client:
        client.create_subscription("email", "orders")
        client.publish_many("orders", [b"1", b"2", b"3"])
        channel = client.subscribe("news.*")
        with client.subscription("email", prefetch=2) as consumer:
            consumer.get(timeout=10)
            wait_until(lambda: client.clients()[0]["in_flight"] == 2)
            [found] = client.clients()
        channel.close()
    assert found["client_id"] == "worker-7"
    assert (found["protocol"], found["name"]) == ("binary", "anyone")
    assert found["address"].startswith("127.0.0.1:")
    assert found["connected"] >= began
    assert (found["unsent_bytes"], found["subscriptions_total"]) == (0, 2)
    assert sorted(found["subscriptions"], key=lambda each: each["topic"]) == [
        {"topic": "news.*", "subscription": None, "in_flight": 0},
        {"topic": "orders", "subscription": "email", "in_flight": 2},
    ]


def test_every_protocol_has_a_way_to_say_it(server: RunningServer, text: TextSocket) -> None:
    """HELLO, a heartbeat, a header, the User-Agent, and the query of a WebSocket."""
    assert text.ask("HELLO netcat-1") == ["OK"]
    with closing(FrameSocket(server.address)) as frames, closing(http_of(server)) as http:
        frames.ask(HEARTBEAT, {"client_id": "frames-1"})
        http.ask("GET", "/topics", headers={"X-Client-Id": "http-1", "User-Agent": "curl"})
        with (
            closing(http_of(server)) as other,
            closing(WebSocket(server.http_address, "/ws?client_id=ws-1")),
        ):
            other.ask("GET", "/topics", headers={"User-Agent": "curl/8"})
            with server.client(client_id="asking") as client:
                found = by_id(client.clients())
    protocols = {name: each["protocol"] for name, each in found.items()}
    assert protocols == {
        "netcat-1": "text",
        "frames-1": "binary",
        "http-1": "http",
        "curl/8": "http",
        "ws-1": "websocket",
        "asking": "binary",
    }


def test_an_id_is_short_and_on_one_line(server: RunningServer) -> None:
    """Others print it."""
    with closing(FrameSocket(server.address)) as frames, server.client() as client:
        frames.ask(HEARTBEAT, {"client_id": "a\nb\x1b[2J" + "x" * 1000})
        name = client.clients()[0]["client_id"]
    assert name is not None
    assert name.startswith("a b [2J")
    assert len(name) <= CLIENT_ID_CHARS_MAX


def test_the_default_says_where_to_look() -> None:
    """The host, the process and the program; and two clients of one program differ."""
    one, other = default_client_id(), default_client_id()
    assert one.startswith(f"{socket.gethostname()}-{os.getpid()}-")
    assert one != other


def test_pages(server: RunningServer) -> None:
    """In the order of their arrival, each connection once."""
    clients = [server.client(client_id=f"c{number}") for number in range(5)]
    try:
        for client in clients:
            client.connect()
        asking = clients[0]
        first = asking.clients(limit=2)
        rest = asking.clients(after=first[-1]["connection"])
        assert [each["client_id"] for each in first + rest] == [f"c{n}" for n in range(5)]
        with pytest.raises(InvalidArgument):
            asking.clients(limit=0)
    finally:
        for client in clients:
            client.close()


def test_many_subscriptions_are_counted_and_not_listed(server: RunningServer) -> None:
    """One connection may have ten thousand."""
    with server.client() as client:
        for number in range(HELD_SHOWN_MAX + 5):
            client.subscribe(f"topic-{number}")
        [found] = client.clients()
    assert (len(found["subscriptions"]), found["subscriptions_total"]) == (
        HELD_SHOWN_MAX,
        HELD_SHOWN_MAX + 5,
    )


def test_who_sees_whom() -> None:
    """An administrator sees all, one of a namespace its own people, everybody else its own login."""
    with running_server(memory=True, token=ROOT) as server, server.client(token=ROOT) as root:
        grants = {
            "team.ci": ["publish:team.>:team.>"],
            "team.lead": ["admin:team.>:team.>"],
            "other": ["publish:other.>"],
        }
        secrets = {name: root.create_token(name, grants=g)["secret"] for name, g in grants.items()}
        clients = {name: server.client(token=secret) for name, secret in secrets.items()}
        try:
            for client in clients.values():
                client.connect()
            seen = {
                name: {each["name"] for each in client.clients()}
                for name, client in {**clients, "root": root}.items()
            }
        finally:
            for client in clients.values():
                client.close()
    names = {f"token:{name}" for name in grants}
    assert names < seen["root"]
    assert seen["other"] == {"token:other"}
    assert seen["team.ci"] == {"token:team.ci"}
    assert seen["team.lead"] == {"token:team.ci", "token:team.lead"}


# --- the overview -----------------------------------------------------------------------------------
def test_what_needs_attention_comes_first(server: RunningServer) -> None:
    """Dead letters, then lag that nobody works on, then the rest; the totals count everything."""
    with server.client() as client:
        client.publish_many("orders", [b"%d" % n for n in range(10)])
        client.publish_text("alone", "x")
        client.create_subscription("lagging", "orders")
        client.create_subscription("done", "orders", "latest")
        client.create_subscription("buried", "orders", 9, max_deliveries=1)
        with client.subscription("buried") as consumer:
            consumer.get(timeout=10).nack()
            wait_until(lambda: client.overview()["dead_letters"] == 1)
        found = client.overview()
        assert [row["subscription"] for row in found["rows"]] == ["buried", "lagging", "done", None]
        assert found["rows"][-1]["topic"] == "alone"
        assert (found["published"], found["lag"], found["subscriptions"]) == (12, 10, 3)
        assert found["rows"][0]["dead_letters"] == 1
        assert found["load"]["connections"] == 1
        assert len(client.overview(limit=1)["rows"]) == 1


def test_only_what_a_caller_may_see() -> None:
    """Topics, subscriptions, and how full the machine is."""
    with running_server(memory=True, token=ROOT) as server, server.client(token=ROOT) as root:
        for team in ("mine", "secret"):
            root.publish_text(f"{team}.a", "x")
            root.create_subscription(f"{team}.s", f"{team}.a")
        secret = root.create_token("ci", grants=["consume,metrics:mine.>:mine.>"])["secret"]
        with server.client(token=secret) as client:
            found = client.overview()
    assert [row["subscription"] for row in found["rows"]] == ["mine.s"]
    assert (found["topics"], found["published"], found["lag"]) == (1, 1, 1)
    assert "load" not in found


def test_a_connection_is_what_the_broker_asks_for(server: RunningServer, http: Http) -> None:
    """The engine knows connections by three names, and an embedded broker has none."""
    http.ask("GET", "/topics")

    def first() -> Connected:
        return next(iter(server.engine.connections()))

    assert server.call(lambda: first().describe()["connection"]) == server.call(first).number
