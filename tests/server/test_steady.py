"""Nobody waits for what another client does: deliveries, hostile batches, wildcards, memory.

``steady`` fails a test in which something kept the loop for too long. What counts as held must be given back
when the clients are gone.
"""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from threading import Thread

import pytest

from headrace import limits
from headrace.broker.dead_letters import KEEPER
from headrace.errors import HeadraceError, MemoryFull, TooLarge
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.testing import RunningServer, running_server
from tests.contract.over_websocket import WebSocket
from tests.contract.raw_binary import CREATE_TOPIC, FETCH, STAGE, FrameSocket, frame
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Http, target

PUBLISH_BATCH = 16
Steady = Callable[[RunningServer], None]
LIMIT = 32 << 20


@pytest.fixture
def server(steady: Steady) -> Iterator[RunningServer]:
    with running_server(memory=True, max_queue_size=10_000_000, memory_limit=LIMIT) as running:
        steady(running)
        yield running


def store(server: RunningServer, topic: str, batch: Batch) -> None:
    """As an earlier version, which had other limits, may have stored it."""
    done: list[Append] = []
    engine = server.engine

    def append() -> None:
        engine.append(engine.topic_for_publish(topic), 0, Append(None, batch, done.append))

    server.call(append)
    server.wait_until(lambda: bool(done))
    assert done[0].error is None


def used(server: RunningServer) -> int:
    return server.call(lambda: server.engine.budget.used)


# --- deliveries -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "batch",
    [
        lambda: encode(Columns([b""] * 1_000_000)),
        lambda: encode(
            Columns([b"1"] * 20_000, headers=[{f"n{n}": "some text" for n in range(5)}] * 20_000)
        ),
    ],
    ids=["a million empty records", "headers"],
)
@pytest.mark.parametrize("kind", ["websocket", "group", "text", "event stream", "pull"])
def test_a_large_batch_is_delivered_in_turns(
    server: RunningServer, kind: str, batch: Callable[[], Batch]
) -> None:
    """Whoever reads it, in whatever way: others are answered in between."""
    large = batch()
    large.pack()
    with closing(WebSocket(server)) as websocket, closing(TextSocket(server.address)) as text:
        if kind == "websocket":
            websocket.ask("subscribe", topic="orders")
        store(server, "orders", large)
        if kind == "websocket":
            offsets = [websocket.message()["offset"] for _ in range(3_000)]
        elif kind == "group":
            websocket.ask("subscribe", topic="orders", group="g", prefetch=1_000)
            offsets = [websocket.message()["offset"] for _ in range(3_000)]
        elif kind == "text":
            text.ask("SUB orders group=g ack=auto prefetch=5000")
            offsets = [text.delivery(10).offset for _ in range(3_000)]
        elif kind == "event stream":
            offsets = events(server, "/stream/orders?from=earliest", 2_000)
        else:
            with closing(Http(server.http_address)) as http:
                offsets = []
                while len(offsets) < 10_000:  # a request gets what one turn had time for
                    answer = http.ask("GET", target("consume", "orders", "batch", limit=10_000))
                    assert answer.json
                    offsets += [message["offset"] for message in answer.json]
        assert offsets == list(range(len(offsets)))


def events(server: RunningServer, path: str, count: int) -> list[int]:
    with socket.create_connection(server.http_address, 10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        found: list[int] = []
        with connection.makefile("rb") as lines:
            while len(found) < count:
                line = lines.readline()
                assert line, "the stream has ended"
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:])["offset"])
        return found


def test_a_member_that_vanishes_with_many_messages_gives_them_back_in_turns(
    server: RunningServer,
) -> None:
    """Each of them is delivered again, with its attempt counted."""
    store(server, "orders", encode(Columns([b"x"] * 90_000)))
    with server.client() as client:
        client.create_subscription("g", "orders", ack_timeout=60.0)
    with closing(FrameSocket(server.address)) as member:
        member.ask(5, {"topic": "orders", "subscription": "g", "prefetch": 90_000, "ack": "manual",
                       "mode": "batch"})  # fmt: skip
        subscription = server.engine.subscription("g", "orders")
        server.wait_until(lambda: subscription.in_flight() == 90_000)
    server.wait_until(lambda: subscription.in_flight() == 0)
    assert server.call(subscription.lag) == 90_000
    assert server.call(lambda: subscription.statistics()["waiting_for_retry"]) == 90_000


# --- hostile requests -----------------------------------------------------------------------------
def test_a_million_empty_records_in_776_bytes_are_refused(server: RunningServer) -> None:
    batch = encode(Columns([b""] * 1_000_000))
    batch.pack()
    with closing(FrameSocket(server.address)) as frames:
        with pytest.raises(TooLarge) as caught:
            frames.ask(PUBLISH_BATCH, {"topic": "orders"}, batch.raw())
        assert caught.value.code == "batch_too_large"


def test_thousands_of_wildcards_do_not_hold_up_others(server: RunningServer) -> None:
    """One connection follows a hundred of them; the rest is refused, and all are answered."""
    server.call(lambda: [server.engine.create_topic(f"a.b{n}") for n in range(300)])
    count = 5_000
    with closing(TextSocket(server.address)) as text:
        text.send(b"".join(b"SUB a.*.%d\r\nSUB *.b%d\r\n" % (n, n) for n in range(count // 2)))
        answers = [text.line() for _ in range(count)]
    assert sum(words[0] == "OK" for words in answers) == 100
    refusals = {words[1] for words in answers if words[0] == "ERR"}
    assert refusals == {"too_many_on_connection"}


def test_a_wildcard_over_too_many_partitions_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.members.PLACES_PER_CONNECTION_MAX", 5)
    server.call(lambda: [server.engine.create_topic(f"a.b{n}") for n in range(3)])
    with closing(TextSocket(server.address)) as text:
        assert text.ask("SUB a.*")[0] == "OK"
        with pytest.raises(HeadraceError) as caught:
            text.ask("SUB a.>")
        assert caught.value.code == "too_many_on_connection"
        assert text.ask("SUB other")[0] == "OK"


@pytest.mark.parametrize("partitions", [1, 16])
def test_the_largest_publishes_do_not_hold_up_others(steady: Steady, partitions: int) -> None:
    """As batches and as JSON: many records, many bytes, keys, headers, times that must be corrected."""
    with running_server() as server:
        steady(server)
        publish_much(server, partitions)


def publish_much(server: RunningServer, partitions: int) -> None:
    most = limits.CLIENT_BATCH_RECORDS_MAX
    keys = [b"%d" % number for number in range(most)]
    headers = [{"name": "text"}] * most
    with server.client() as client:
        client.create_topic("large", partitions=partitions)
    with closing(FrameSocket(server.address)) as frames, closing(Http(server.http_address)) as http:
        for columns in (
            Columns([b"x" * 100] * most, keys=keys, times=[1] * most),
            Columns([b"x"] * most, keys=keys, headers=headers),
            Columns([bytes(1 << 20)] * 15),
        ):
            raw = encode(columns).raw()
            frames.ask(PUBLISH_BATCH, {"topic": "large", "partition": 0}, raw)
        some = encode(Columns([b"x"] * 10_000, keys=keys[:10_000], headers=headers[:10_000])).raw()
        frames.ask(PUBLISH_BATCH, {"topic": "large"}, some)
        text = b"[" + b",".join([b'"' + "é".encode() * 18 + b'"'] * most) + b"]"
        assert http.ask("POST", "/publish/batch/large?key=k", text).status == 200


def test_thousands_of_commands_in_a_frame_do_not_hold_up_others(server: RunningServer) -> None:
    server.call(lambda: [server.engine.create_topic(f"a.b{n}") for n in range(300)])
    with closing(WebSocket(server)) as websocket:
        commands = [
            {"type": "subscribe", "topic": f"a.*.x{n}", "messageId": n} for n in range(2_000)
        ]
        websocket.connection.send(json.dumps([*commands, {"type": "ping", "messageId": "end"}]))
        answers = [json.loads(websocket.connection.recv(20)) for _ in range(2_001)]
    assert [answer["messageId"] for answer in answers] == [*range(2_000), "end"]
    assert sum(answer["type"] == "subscribed" for answer in answers) == 100


def test_wildcards_of_many_connections_come_and_go_in_turns(server: RunningServer) -> None:
    """What they follow counts in the memory, and is given back."""
    with server.client() as client:
        client.create_topic("t.0", partitions=2_500)
    server.wait_until(lambda: server.engine.budget.used == 0)
    with ExitStack() as stack:
        texts = [stack.enter_context(closing(TextSocket(server.address))) for _ in range(60)]
        for each in texts:
            each.send(b"SUB t.*\r\nSUB *.*\r\nSUB >\r\n")
        answers = [each.line(60) for each in texts for _ in range(3)]
        followed = answers.count(["OK"])
        assert 40 <= followed < 60  # in 32 MiB
        assert {words[1] for words in answers if words != ["OK"]} == {"memory_full"}
        assert used(server) >= followed * 2_500 * limits.FOLLOWED_PARTITION_BYTES
    server.wait_until(lambda: server.engine.budget.used == 0)
    assert server.call(lambda: len(server.engine.topics.find("t.0").partitions[0].watchers)) == 0


@pytest.mark.parametrize("connections", [1, 20])
def test_a_flood_of_small_frames_is_run_in_turns(server: RunningServer, connections: int) -> None:
    """All of it, in order, also what comes just before the close."""
    count = 40_000 // connections
    frames = [{"type": "publish", "topic": f"flood-{n}", "data": 7} for n in range(connections)]
    with ExitStack() as stack:
        raws = [stack.enter_context(closing(WebSocket(server))).connection.socket for _ in frames]
        floods = [masked(json.dumps(frame).encode()) * count for frame in frames]
        senders = [Thread(target=r.sendall, args=(f,)) for r, f in zip(raws, floods, strict=True)]
        for sender in senders:
            sender.start()
        for sender, raw in zip(senders, raws, strict=True):
            sender.join()
            raw.sendall(b"\x88\x80\0\0\0\0")
        for number in range(connections):
            name = f"flood-{number}"
            server.wait_until(
                lambda name=name: (
                    (topic := server.engine.topics.get(name)) is not None
                    and topic.end_offsets() == [count]
                ),
                60,
            )


def masked(content: bytes) -> bytes:
    """A text frame of a client, with a mask of zeros."""
    return bytes((0x81, 0x80 | len(content))) + bytes(4) + content


def test_delayed_messages_are_staged_and_taken_in_in_turns(steady: Steady) -> None:
    """The broker answers others while it prepares them, and gives the memory back."""
    with (
        running_server(durability="never") as server,
        closing(FrameSocket(server.address)) as frames,
        server.client() as client,
    ):
        steady(server)
        far = server.call(server.engine.now_ms) + 3_600_000
        batch = encode(Columns([b"x"] * 20_000, times=[far] * 20_000))
        frames.ask(CREATE_TOPIC, {"topic": "orders"})
        properties = {"topic": "orders", "delayed": "true", "name": "job", "number": "1"}
        piece = frames.ask(STAGE, properties, batch.raw()).properties["piece"]
        client.commit_staged("job", 1, [piece])
        server.wait_until(lambda: len(server.engine.schedule) == 20_000)
        client.delete_topic("orders")
        assert server.call(lambda: len(server.engine.schedule)) == 0


def test_a_large_batch_of_json_keeps_its_place_among_publishes(server: RunningServer) -> None:
    """Publishes that were sent after it on the same connection come after it."""
    items = json.dumps(["x" * 20] * 40_000).encode()
    assert len(items) > 512 << 10
    requests = b"".join(
        b"POST /publish/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path, len(body), body)
        for path, body in ((b"orders", b"1"), (b"batch/orders", items), (b"orders", b"2"))
    )
    with socket.create_connection(server.http_address, 20) as connection:
        connection.sendall(requests)
        read = b""
        while read.count(b"HTTP/1.1 200") < 3 or not read.endswith(b"}"):
            data = connection.recv(1 << 16)
            assert data, read
            read += data
    assert b'"published":40000' in read
    with server.client() as client:
        assert client.fetch("orders", 40_001)[0].value == b"2"


# --- operations -----------------------------------------------------------------------------------
def test_thousands_of_partitions_are_made_by_a_worker(steady: Steady) -> None:
    with running_server() as server, server.client() as client:
        steady(server)
        client.create_topic("orders", partitions=1_500)
        client.change_topic("orders", partitions=3_000)
        assert len(client.topic_stats("orders")["partitions"]) == 3_000
        client.delete_topic("orders")


def test_long_lists_are_made_in_turns(server: RunningServer) -> None:
    """All subscriptions, over each protocol."""
    server.call(lambda: server.engine.create_topic("orders"))
    for start in range(0, 10_000, 20):
        server.call(lambda start=start: subscribe(server, range(start, start + 20)))
    with server.client() as client, closing(Http(server.http_address)) as http:
        assert len(client.subscriptions()) == 10_000
        assert len(http.ask("GET", "/subscriptions").json) == 10_000
        assert len(client.list_topics()[0]["subscriptions"]) == 10_000
        client.delete_topic("orders")
        assert client.subscriptions() == []


def subscribe(server: RunningServer, numbers: range) -> None:
    for number in numbers:
        server.engine.subscribe(f"group-{number}", "orders")


def test_dead_letters_are_looked_through_in_turns(server: RunningServer) -> None:
    """Whether one wants to see them or looks for one among all of them."""
    engine = server.engine
    server.call(lambda: engine.create_topic("email.dlq"))
    server.call(lambda: engine.keeper(KEEPER, "email.dlq"))
    headers = {"headrace-dlq-reason": "odd", "color": "blue"}
    store(server, "email.dlq", encode(Columns([b"x"] * 10_000, headers=[headers] * 10_000)))
    with server.client() as client, closing(Http(server.http_address)) as http:
        assert len(client.dead_letters("email", limit=10_000)) == 10_000
        assert len(http.ask("GET", "/dead-letters/email?limit=10000").json) == 10_000
        assert client.redrive("email", reason="nowhere")["redriven"] == 0
        assert client.purge_dead_letters("email") == 10_000


# --- memory ---------------------------------------------------------------------------------------
def large_frame(size: int) -> bytes:
    return frame(PUBLISH_BATCH, 1, {"topic": "orders"}, bytes(size))


@pytest.mark.parametrize("protocol", ["binary", "http", "websocket"])
def test_requests_that_are_not_complete_count_and_are_given_back(
    server: RunningServer, protocol: str
) -> None:
    """Beyond the limit the newest one is refused; when the clients are gone, nothing is held."""
    before = used(server)
    size, holders = (LIMIT * 15 // 128, 8) if protocol == "http" else (LIMIT * 7 // 16, 2)
    starts = {
        "binary": (server.address, large_frame(size)[:-1]),
        "http": (
            server.http_address,
            b"POST /publish/batch/orders HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % size
            + bytes(size - 1),
        ),
        "websocket": (server.http_address, b""),
    }
    address, data = starts[protocol]
    if protocol == "websocket":
        with closing(WebSocket(server)) as one:
            one.connection.socket.sendall(b"\x81\xfe\xff\xff" + bytes(4) + bytes(60_000))
            server.wait_until(lambda: server.engine.budget.used >= before)
        server.wait_until(lambda: server.engine.budget.used == before)
        return
    with ExitStack() as stack:
        for _ in range(holders):
            stack.enter_context(socket.create_connection(address, 20)).sendall(data)
        held = holders * size - (1 << 20)
        server.wait_until(lambda: server.engine.budget.used > before + held)
        with socket.create_connection(address, 20) as other:
            other.sendall(data)
            assert b"memory_full" in other.recv(1 << 16)
        server.wait_until(lambda: server.engine.budget.used > before + held)
    server.wait_until(lambda: server.engine.budget.used == before)


def test_a_client_that_does_not_read_is_counted_and_given_back(server: RunningServer) -> None:
    """Fetches that wait are answered one after the other, as far as the client reads."""
    with closing(FrameSocket(server.address)) as frames:
        frames.ask(CREATE_TOPIC, {"topic": "orders"})
        before = used(server)
        wanted = {"topic": "orders", "offset": 0, "wait": 60_000, "max_bytes": 1 << 20}
        for number in range(300):
            frames.send(frame(FETCH, 100 + number, wanted))
        partition = server.engine.partition("orders")
        server.wait_until(lambda: len(partition.watchers) == 300)
        store(server, "orders", encode(Columns([bytes(1000)] * 1_000)))
        cached = used(server) - before
        server.wait_until(lambda: not partition.watchers)
        assert used(server) - before < cached + (8 << 20)
    server.wait_until(lambda: server.engine.budget.used <= before + cached)


def test_a_publish_beyond_the_limit_is_refused_and_nothing_is_lost(server: RunningServer) -> None:
    with closing(FrameSocket(server.address)) as frames:
        frames.ask(CREATE_TOPIC, {"topic": "orders"})
        before = used(server)
        server.call(lambda: server.engine.budget.take(LIMIT - before))
        with pytest.raises(MemoryFull):
            frames.ask(PUBLISH_BATCH, {"topic": "orders"}, encode(Columns([bytes(1000)])).raw())
        with closing(Http(server.http_address)) as http:
            answer = http.ask("POST", "/publish/orders", b'"x"')
            assert (answer.status, answer.code) == (503, "memory_full")
            assert answer.headers["retry-after"] == "1"
        server.call(lambda: server.engine.budget.give(LIMIT - before))
        frames.ask(PUBLISH_BATCH, {"topic": "orders"}, encode(Columns([b"x"])).raw())
    with server.client() as client:
        assert [message.value for message in client.fetch("orders")] == [b"x"]


def test_deliveries_pause_while_the_memory_is_full() -> None:
    """And go on when it is not."""
    with (
        running_server(durability="never", memory_limit=LIMIT) as server,
        closing(TextSocket(server.address)) as text,
    ):
        text.ask("SUB orders")
        budget = server.engine.budget
        server.call(lambda: setattr(budget, "used", budget.used + LIMIT))
        store(server, "orders", encode(Columns([b"x"])))
        assert text.ask("PING")[0] == "PONG"
        server.call(lambda: setattr(budget, "used", budget.used - LIMIT))
        assert text.delivery(10).value == b"x"
