"""Quotas on a running server: what counts, on every protocol, and for whom."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace import BrokerClient
from headrace.access.quotas import Meter
from headrace.errors import HeadraceError, StaleDelivery
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, running_server
from tests.contract.raw_binary import AUTH, FETCH, PUBLISH, STAGE, FrameSocket, error_of, frame
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Events, Http
from tests.server.http_websocket import WebSocket

ROOT = "root-token"
PLENTY = 1e12


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(memory=True, token=ROOT) as running:
        yield running


@pytest.fixture
def root(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client(token=ROOT) as client:
        yield client


def token(root: BrokerClient, name: str, *grants: str, **quotas: float) -> str:
    return root.create_token(name, grants=list(grants), quotas=quotas)["secret"]


def publish(
    server: RunningServer, secret: str, topic: str, size: int = 1, options: str = ""
) -> None:
    """Once: a client would try again what was refused."""
    with closing(TextSocket(server.address)) as text:
        text.ask(f"AUTH {secret}")
        text.ask(f"PUB {topic} {size} {options}".strip(), b"x" * size + b"\r\n")


def meter_of(server: RunningServer, secret: str) -> Meter:
    caller = server.call(lambda: server.engine.access.by_token(secret))
    assert caller is not None
    assert caller.meter is not None
    return caller.meter


class Counts:
    """What the meters were told."""

    def __init__(self, server: RunningServer) -> None:
        self.requests = self.bytes = 0
        self._server = server

    def _do(self, work: Callable[[], object]) -> None:
        """Until the loop has ended its turn: an answer may leave before its request is counted."""
        work()
        self._server.call(lambda: None)

    def requests_of(self, work: Callable[[], object]) -> int:
        before = self.requests
        self._do(work)
        return self.requests - before

    def bytes_of(self, work: Callable[[], object]) -> int:
        before = self.bytes
        self._do(work)
        return self.bytes - before


@pytest.fixture
def counts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts(server)
    requested, moved = Meter.requested, Meter.moved

    def count_requests(self: Meter, count: int = 1) -> float:
        counts.requests += count
        return requested(self, count)

    def count_bytes(self: Meter, size: int) -> float:
        counts.bytes += size
        return moved(self, size)

    monkeypatch.setattr(Meter, "requested", count_requests)
    monkeypatch.setattr(Meter, "moved", count_bytes)
    return counts


def stale(work: Callable[[], object]) -> None:
    with pytest.raises(StaleDelivery):
        work()


# --- requests -----------------------------------------------------------------------------------
def test_every_request_counts_once(
    server: RunningServer, root: BrokerClient, counts: Counts
) -> None:
    """Reading, subscribing and settling as well as publishing; a batch is one request."""
    secret = token(root, "ci", "publish,consume,browse:t", requests_per_second=PLENTY)
    for number in range(3):
        root.publish("t", f"{number}")
    text = TextSocket(server.address)
    text.ask(f"AUTH {secret}")

    def fetch() -> None:
        text.payload(int(text.ask("FETCH t 0")[2]))

    assert counts.requests_of(fetch) == 1
    assert counts.requests_of(lambda: text.ask("PING")) == 1
    assert counts.requests_of(lambda: stale(lambda: text.ask("ACK 1.1"))) == 1

    def pipelined() -> None:
        text.send(b"PUB t 1\r\nx\r\n" * 5)
        for _ in range(5):
            text.line()
        text.ask("PING")

    assert counts.requests_of(pipelined) == 6
    assert counts.requests_of(lambda: text.ask("SUB t")) == 1
    text.close()
    with closing(Http(server.http_address, secret)) as http:
        http.get("/access/whoami")
        for path in ("/topics/t/messages", "/consume/t?group=g&wait=0"):
            assert counts.requests_of(lambda path=path: http.get(path)) == 1, path
        batch = [{"data": number} for number in range(10)]
        assert counts.requests_of(lambda: http.ask("POST", "/publish/batch/t", batch)) == 1
        ended = {"delivery": "1.1"}
        assert counts.requests_of(lambda: http.ask("POST", "/ack/t?group=g", ended)) == 1
    with WebSocket(server.http_address, f"/ws?token={secret}") as websocket:
        websocket.ask("ping")
        assert counts.requests_of(lambda: websocket.ask("publish", topic="t", data=1)) == 1
        assert counts.requests_of(lambda: websocket.ask("ack", delivery="1.1")) == 1
    with server.client(token=secret) as client:
        client.whoami()
        assert counts.requests_of(lambda: client.publish_many("t", [b"x"] * 50)) <= 2
        assert counts.requests_of(lambda: client.fetch("t")) >= 1


def test_without_quotas_nothing_is_counted(
    server: RunningServer, root: BrokerClient, counts: Counts
) -> None:
    """The hot path has one test of an attribute."""
    secret = root.create_token("ci", grants=["publish,browse:t"])["secret"]
    with server.client(token=secret) as client:
        client.publish("t", b"x")
        client.fetch("t")
    assert (counts.requests, counts.bytes) == (0, 0)


# --- bytes --------------------------------------------------------------------------------------
def test_bytes_that_are_sent_count(
    server: RunningServer, root: BrokerClient, counts: Counts
) -> None:
    """Answers and deliveries, on every protocol."""
    secret = token(root, "ci", "consume,browse:t", bytes_per_second=PLENTY)
    root.publish("t", b"x" * 50_000)
    text = TextSocket(server.address)
    text.ask(f"AUTH {secret}")
    assert counts.bytes_of(lambda: text.ask("FETCH t 0")) > 50_000
    text.close()
    with closing(Http(server.http_address, secret)) as http:
        assert counts.bytes_of(lambda: http.get("/topics/t/messages")) > 50_000
    with server.client(token=secret) as client:
        assert counts.bytes_of(lambda: client.fetch("t")) > 50_000
        with client.subscribe("t") as follower:

            def deliver() -> None:
                root.publish("t", b"y" * 40_000)
                follower.get(timeout=10)

            assert counts.bytes_of(deliver) > 40_000


def connection_of(server: RunningServer, name: str, protocol: str) -> Any:
    return server.call(
        lambda: next(
            each
            for each in server.server.hub.connections
            if each.caller.name == f"token:{name}" and each.protocol == protocol
        )
    )


@pytest.mark.parametrize("protocol", ["text", "websocket", "sse"])
def test_deliveries_are_slowed(server: RunningServer, root: BrokerClient, protocol: str) -> None:
    """A consumer past its bytes per second gets nothing more until the debt is paid; then it goes on."""
    secret = token(root, "ci", "consume:t", bytes_per_second=PLENTY)
    root.create_topic("t")
    opened: Any
    if protocol == "text":
        opened = TextSocket(server.address)
        opened.ask(f"AUTH {secret}")
        opened.ask("SUB t")
    elif protocol == "websocket":
        opened = WebSocket(server.http_address, f"/ws?token={secret}")
        opened.ok("subscribe", topic="t")
    else:
        opened = Events(server.http_address, f"/stream/t?token={secret}")
    connection = connection_of(server, "ci", protocol)
    assert server.call(lambda: connection.outbox.may_deliver)
    server.call(lambda: connection.charge(int(PLENTY * 3)))
    assert not server.call(lambda: connection.outbox.may_deliver)
    root.publish("t", b"late")

    meter = meter_of(server, secret)

    def pay() -> None:  # as if the time had passed
        meter._bytes = None
        connection._resume.cancel()
        connection._go_on()

    server.call(pay)
    assert server.call(lambda: connection.outbox.may_deliver)
    if protocol == "text":
        assert opened._line(time.monotonic() + 10)[0] == "MSG"
    elif protocol == "websocket":
        assert opened.message()["data"] == "late"
    else:
        assert opened.next().json["data"] == "late"
    opened.close()


# --- memory -------------------------------------------------------------------------------------
def refused(work: Callable[[], object]) -> None:
    with pytest.raises(HeadraceError) as caught:
        work()
    assert caught.value.code == "quota_exceeded"


def test_memory_refuses_the_newest_request(server: RunningServer, root: BrokerClient) -> None:
    """On every protocol, with a code; what the broker holds otherwise is not its business."""
    secret = token(root, "ci", "publish,browse:t", memory=100_000)
    root.publish("t", b"small")
    root.publish("t", b"x" * 500_000)
    memory = meter_of(server, secret).memory
    with server.client(token=secret) as client:
        client.publish("t", b"x" * 50_000)
        assert client.fetch("t", limit=1)[0].value == b"small"  # less than was asked for
    refused(lambda: publish(server, secret, "t", 200_000))
    refused(lambda: publish(server, secret, "t", 200_000, "key=k"))
    batch = encode(Columns([b"x" * 200_000])).raw()
    for type_, body in ((PUBLISH, b"x" * 200_000), (STAGE, batch)):
        with closing(FrameSocket(server.address)) as frames:
            frames.ask(AUTH, {"token": secret})
            frames.send(frame(type_, 7, {"topic": "t"}, body))
            assert error_of(frames.read()).code == "quota_exceeded"
    with closing(Http(server.http_address, secret)) as http:
        answer = http.ask("POST", "/publish/t", b"x" * 200_000, {"Content-Type": "text/plain"})
        assert (answer.status, answer.code) == (429, "quota_exceeded")
    with WebSocket(server.http_address, f"/ws?token={secret}") as websocket:
        websocket.send({"type": "publish", "topic": "t", "data": "x" * 200_000})
        assert websocket.read()["code"] == "quota_exceeded"
    server.wait_until(lambda: memory.used == 0)


def test_incomplete_requests_count_together(server: RunningServer, root: BrokerClient) -> None:
    """Of all connections of a principal; they are given back when a connection goes."""
    secret = token(root, "ci", "publish:t", memory=100_000)
    root.create_topic("t")
    memory = meter_of(server, secret).memory
    first, second = TextSocket(server.address), TextSocket(server.address)
    for each in (first, second):
        each.ask(f"AUTH {secret}")
    first.send(b"PUB t 90000\r\n" + b"x" * 80_000)
    server.wait_until(lambda: memory.used >= 80_000)
    second.send(b"PUB t 90000\r\n" + b"x" * 60_000)
    assert second.line()[:2] == ["ERR", "quota_exceeded"]
    second.close()
    server.wait_until(lambda: memory.used < 100_000)
    first.send(b"x" * 10_000 + b"\r\n")
    assert first.line()[0] == "OK"
    server.wait_until(lambda: memory.used == 0)
    first.send(b"PUB t 90000\r\n" + b"x" * 80_000)
    server.wait_until(lambda: memory.used >= 80_000)
    first.close()
    server.wait_until(lambda: memory.used == 0)


def test_a_body_counts_for_its_sender(server: RunningServer, root: BrokerClient) -> None:
    """HTTP: while it comes, though the request has not begun."""
    secret = token(root, "ci", "publish:t", memory=100_000)
    root.create_topic("t")
    memory = meter_of(server, secret).memory
    http = TextSocket(server.http_address)
    head = f"POST /publish/t HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
    http.send(f"{head}Content-Type: text/plain\r\nContent-Length: 90000\r\n\r\n".encode())
    http.send(b"x" * 60_000)
    server.wait_until(lambda: memory.used >= 60_000)
    http.close()
    server.wait_until(lambda: memory.used == 0)


# --- topics -------------------------------------------------------------------------------------
def test_topics_count_for_whoever_created_them(server: RunningServer, root: BrokerClient) -> None:
    """Not for those who may see them; in whatever way a topic is created."""
    grant = "publish,consume,browse,manage:t.>"
    root.create_topic("t.root", partitions=4)
    one, two = (token(root, name, grant, topics=3, partitions=5) for name in ("one", "two"))
    with server.client(token=one) as client, server.client(token=two) as other:
        client.publish("t.published", b"x")
        client.create_subscription("s", "t.subscribed")
        client.create_topic("t.created", partitions=3)
        for refusal in (
            lambda: publish(server, one, "t.more"),
            lambda: publish(server, one, "t.later", options="delay=3600"),
            lambda: client.create_topic("t.more"),
            lambda: client.subscribe("t.more"),
            lambda: client.create_subscription("r", "t.more"),
            lambda: client.change_topic("t.created", partitions=4),
        ):
            refused(refusal)
        with closing(Http(server.http_address, one)) as http:
            assert http.get("/stream/t.more").code == "quota_exceeded"
        owners = {topic.name: topic.record.owner for topic in server.engine.topics}
        assert owners["t.root"] is None
        assert {owners[name] for name in ("t.published", "t.subscribed", "t.created")} == {
            "token:one"
        }
        other.publish("t.other", b"x")
        client.delete_topic("t.published")
        client.publish("t.more", b"x")
        refused(lambda: publish(server, one, "t.published"))  # a remembered decision is forgotten


def test_a_delayed_message_creates_its_topic_at_once(
    server: RunningServer, root: BrokerClient
) -> None:
    """Else a hundred of them would create a hundred topics later, and none would count."""
    secret = token(root, "ci", "publish:t.>", topics=1)
    publish(server, secret, "t.a", options="delay=3600")
    refused(lambda: publish(server, secret, "t.b", options="delay=3600"))


def test_a_chosen_dead_letter_topic_counts(server: RunningServer, root: BrokerClient) -> None:
    """Else each other choice would be another topic."""
    secret = token(root, "ci", "publish,consume:t.>", topics=2)
    with server.client(token=secret) as client:
        client.publish("t.a", b"x")
        client.create_subscription("s", "t.a", max_deliveries=1, dead_letter_topic="t.dead")
        with client.subscription("s") as consumer:
            consumer.nack(consumer.get(timeout=10))
            server.wait_until(lambda: server.engine.topics.get("t.dead") is not None)
        refused(lambda: publish(server, secret, "t.b"))
        refused(lambda: client.create_subscription("s", "t.a", dead_letter_topic="t.other"))


def test_the_owner_is_kept_on_disk(tmp_path: Path) -> None:
    """It counts after a restart; a topic of an older version belongs to nobody."""
    with running_server(tmp_path, token=ROOT) as server, server.client(token=ROOT) as root:
        secret = token(root, "ci", "publish,manage:t.>", topics=1)
        with server.client(token=secret) as client:
            client.publish("t.a", b"x")
            client.change_topic("t.a", retention_hours=5)
        root.create_topic("t.old")
    stored = {
        name: json.loads((tmp_path / name / "topic.json").read_text()) for name in ("t.a", "t.old")
    }
    assert stored["t.a"]["owner"] == "token:ci"
    assert "owner" not in stored["t.old"]
    with running_server(tmp_path, token=ROOT) as server:
        assert server.engine.topics.find("t.a").record.owner == "token:ci"
        refused(lambda: publish(server, secret, "t.b"))
        publish(server, secret, "t.old")


# --- the connection -----------------------------------------------------------------------------
def test_a_quota_that_comes_later_holds_for_open_connections(
    server: RunningServer, root: BrokerClient
) -> None:
    """Also where there are more of them than it allows: they stay, and are measured."""
    root.create_user("alice", grants=["publish:t"])
    secret = root.create_token("a", user="alice")["secret"]
    sockets = [FrameSocket(server.address) for _ in range(3)]
    for each in sockets:
        each.ask(AUTH, {"token": secret})
    root.change_user("alice", quotas={"connections": 1, "requests_per_second": PLENTY})

    def metered() -> int:
        return sum(each.is_metered for each in server.server.hub.connections)

    server.wait_until(lambda: metered() == 3)
    late = FrameSocket(server.address)
    refused(lambda: late.ask(AUTH, {"token": secret}))
    late.close()
    for each in sockets:
        with pytest.raises(HeadraceError):
            each.ask(FETCH, {"topic": "t"})
        each.close()
