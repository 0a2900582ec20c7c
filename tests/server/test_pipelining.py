"""Many commands at once: all are answered, in order, and each sees what came before it."""

import contextlib
import json
import socket
import struct
from types import SimpleNamespace

from headrace.server.text import TextSession
from headrace.server.websocket import WebSocketSession
from headrace.testing import RunningServer, running_server, wait_until
from headrace.wire.text import Command
from tests.contract.raw_binary import (
    ADMIN,
    BATCHES,
    CREATE_TOPIC,
    FETCH,
    HEARTBEAT,
    PUBLISH,
    FrameSocket,
    frame,
)
from tests.contract.raw_text import TextSocket
from tests.server.http_websocket import WebSocket

DEPTH = 10_000


def test_ten_thousand_publishes_in_one_write() -> None:
    """Each is answered with its own offset, in order, and each is stored."""
    with running_server() as server:
        text = TextSocket(server.address)
        text.send(b"".join(b"PUB orders 4\r\n%04d" % number for number in range(DEPTH)))
        answers = [text.line() for _ in range(DEPTH)]
        assert answers == [["OK", str(offset)] for offset in range(DEPTH)]
        text.close()
        with server.client() as client:
            values = client.fetch_values("orders", max_bytes=16 << 20)
        assert values == [b"%04d" % number for number in range(DEPTH)]


def test_ten_thousand_commands_of_every_kind_in_one_write(
    server: RunningServer, text: TextSocket
) -> None:
    """Publishes with and without options, fetches, mistakes and pings: the answers line up."""
    commands, expected, offset = [], [], 0
    for number in range(DEPTH // 5):
        value = b"%d" % number
        commands += [
            b"PUB orders %d\r\n%b" % (len(value), value),
            b"FETCH orders %d\r\n" % offset,
            b"PUB orders %d key=k\r\n%b\r\n" % (len(value), value),
            b"NOSUCH thing\r\n",
            b"PING\r\n",
        ]
        expected += [
            f"OK {offset}",
            f"MSG {offset}",
            f"OK {offset + 1}",
            "ERR unknown_command",
            "PONG",
        ]
        offset += 2
        if number % 1000 == 999:  # in memory a topic holds 10,000 unread messages
            commands += [b"DELETE orders\r\n"]
            expected += ["OK"]
            offset = 0
    text.send(b"".join(commands))
    for wanted in expected:
        words = text.line()
        assert " ".join(words[: len(wanted.split())]) == wanted
        if words[0] == "MSG":
            text.payload(int(words[2]))


def test_a_fetch_right_behind_a_publish_sees_it() -> None:
    """Although the publish is not on disk yet when the fetch arrives."""
    with running_server() as server:
        text = TextSocket(server.address)
        for offset in range(50):
            text.send(b"PUB orders 2\r\nhiFETCH orders %d\r\n" % offset)
            assert text.line() == ["OK", str(offset)]
            assert text.line() == ["MSG", str(offset), "2"]
            assert text.payload(2) == b"hi"
        text.close()


def test_a_fetch_right_behind_a_publish_sees_it_in_frames() -> None:
    """The same in binary: topic, publish and fetch in one write."""
    with running_server() as server:
        frames = FrameSocket(server.address)
        frames.send(
            frame(CREATE_TOPIC, 1, {"topic": "orders"})
            + frame(PUBLISH, 2, {"topic": "orders"}, b"hi")
            + frame(FETCH, 3, {"topic": "orders", "offset": 0})
            + frame(ADMIN, 4, {}, json.dumps({"op": "topic", "topic": "orders"}).encode())
        )
        created, published, fetched, described = (frames.read() for _ in range(4))
        assert [answer.sequence for answer in (created, published, fetched, described)] == [
            1,
            2,
            3,
            4,
        ]
        assert published.properties["offset"] == "0"
        assert fetched.type == BATCHES
        assert fetched.properties["end_offset"] == "1"
        assert json.loads(described.body)["messages"] == 1
        frames.close()


def test_thousands_of_frames_in_one_write(frames: FrameSocket) -> None:
    """Answers carry the number of their request and come in the order of the requests."""
    count = 5000
    frames.send(
        b"".join(frame(PUBLISH, n, {"topic": "orders"}, b"%d" % n) for n in range(1, count + 1))
    )
    answers = [frames.read() for _ in range(count)]
    assert [answer.sequence for answer in answers] == list(range(1, count + 1))
    assert [int(answer.properties["offset"]) for answer in answers] == list(range(count))


def test_a_fetch_that_waits_does_not_hold_up_the_others(frames: FrameSocket) -> None:
    """In binary: answers carry numbers, so a long poll may come late."""
    frames.ask(CREATE_TOPIC, {"topic": "orders"})
    frames.send(frame(FETCH, 100, {"topic": "orders", "offset": 0, "wait": 20_000}))
    for _ in range(3):
        assert frames.ask(ADMIN, None, b'{"op": "info"}').properties["status"] == "success"
    frames.send(frame(PUBLISH, 101, {"topic": "orders"}, b"hi"))
    answers = {answer.sequence: answer for answer in (frames.read(), frames.read())}
    assert answers[101].properties["offset"] == "0"
    assert answers[100].properties["end_offset"] == "1"


def test_a_fetch_that_waits_holds_its_place_in_text(
    text: TextSocket, server: RunningServer
) -> None:
    """In text the order is all there is: what is behind it waits too."""
    assert text.ask("CREATE orders") == ["OK"]
    text.send(b"FETCH orders 0 wait=20000\r\nPING\r\n")
    other = TextSocket(server.address)
    assert other.ask("PUB orders 2", b"hi") == ["OK", "0"]
    other.close()
    assert text.line() == ["MSG", "0", "2"]
    assert text.payload(2) == b"hi"
    assert text.line() == ["PONG"]


def test_a_fetch_that_waits_gives_up_in_time(text: TextSocket, frames: FrameSocket) -> None:
    """With nothing new it says so: an error in text, an empty answer in binary."""
    text.ask("CREATE orders")
    text.send(b"FETCH orders 0 wait=50\r\n")
    assert text.line()[:2] == ["ERR", "offset_out_of_range"]
    assert frames.ask(FETCH, {"topic": "orders", "offset": 0, "wait": 50}).body == b""


def test_only_so_many_fetches_may_wait(frames: FrameSocket) -> None:
    """A connection cannot pile up waiting requests without end."""
    frames.ask(CREATE_TOPIC, {"topic": "orders"})
    wait = {"topic": "orders", "offset": 0, "wait": 60_000}
    frames.send(b"".join(frame(FETCH, number, wait) for number in range(1, 1102)))
    refused = [frames.read() for _ in range(101)]
    assert {answer.properties["code"] for answer in refused} == {"too_many_waiting"}
    assert {answer.properties["retryable"] for answer in refused} == {"true"}
    frames.send(frame(PUBLISH, 5000, {"topic": "orders"}, b"hi"))
    answers = [frames.read() for _ in range(1001)]
    assert sorted(answer.sequence for answer in answers) == [*range(1, 1001), 5000]


def test_a_heartbeat_overtakes(frames: FrameSocket) -> None:
    """It says that the connection lives, not that what is before it is done."""
    frames.ask(CREATE_TOPIC, {"topic": "orders"})
    frames.send(frame(FETCH, 7, {"topic": "orders", "offset": 0, "wait": 30_000}))
    frames.send(frame(HEARTBEAT, 8))
    answer = frames.read()
    assert (answer.type, answer.sequence) == (HEARTBEAT, 8)


def test_who_half_closes_gets_its_answers() -> None:
    """As with netcat: everything is said, the sending side is closed, the answers come."""
    with running_server() as server, socket.create_connection(server.address, 10) as plain:
        plain.sendall(b"PUB orders 2\r\nhi\r\nPUB orders 3\r\nyouFETCH orders 0\r\nPING\r\n")
        plain.shutdown(socket.SHUT_WR)
        heard = b""
        while data := plain.recv(4096):
            heard += data
        assert heard == b"OK 0\r\nOK 1\r\nMSG 0 2\r\nhiPONG\r\n"


def test_who_half_closes_in_frames_gets_its_answers() -> None:
    """The same in binary."""
    with running_server() as server:
        with socket.create_connection(server.address, 10) as plain:
            plain.sendall(b"".join(frame(PUBLISH, n, {"topic": "a"}, b"x") for n in (1, 2, 3)))
            plain.shutdown(socket.SHUT_WR)
            heard = b""
            while data := plain.recv(4096):
                heard += data
        sequences = []
        while heard:
            total, _, sequence = struct.unpack_from(">IIQ", heard)
            sequences.append(sequence)
            heard = heard[total:]
        assert sequences == [1, 2, 3]


def test_commands_cut_at_every_byte(server: RunningServer) -> None:
    """However the network cuts it, the answers are the same."""
    stream = b"PUB orders 2\r\nhi\r\nPUB orders 2 key=k\r\nhoFETCH orders 1\r\nPING\r\n"
    plain = socket.create_connection(server.address, 10)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(stream)):
        plain.sendall(stream[at : at + 1])
        wait_until(lambda: not _unsent(plain), what="the byte to leave")
    heard = b""
    while not heard.endswith(b"PONG\r\n"):
        heard += plain.recv(4096)
    assert heard == b"OK 0\r\nOK 1\r\nMSG 1 2\r\nhoPONG\r\n"
    plain.close()


def _unsent(plain: socket.socket) -> int:
    import fcntl
    import termios

    size = fcntl.ioctl(plain.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    (count,) = struct.unpack("i", size)
    return int(count)


async def broken() -> None:
    raise ZeroDivisionError


def test_a_mistake_while_a_request_waits_is_answered(server: RunningServer) -> None:
    """With several nodes, requests wait for what others have answered. Whatever goes wrong there, each gets its answer."""

    def ask() -> None:
        (connection,) = server.server.hub.connections
        session = connection.session
        assert isinstance(session, TextSession)
        session._begin_later(Command("PING", [], {}), broken())
        connection.data_received(b"PING\r\n")

    with contextlib.closing(TextSocket(server.address)) as text:
        assert text.ask("PING") == ["PONG"]
        server.call(ask)
        assert text.line()[:2] == ["ERR", "bug"]
        assert text.line() == ["PONG"]


def test_a_mistake_while_a_topic_is_created_is_answered_over_a_websocket(
    server: RunningServer,
) -> None:
    """With several nodes, a command may have to wait for a topic that all of them have to know."""

    def ask() -> None:
        (connection,) = server.server.hub.connections
        session = connection.session
        assert isinstance(session, WebSocketSession)
        cluster = SimpleNamespace(ensure=lambda topic: broken())
        session.engine = SimpleNamespace(cluster=cluster)  # type: ignore[assignment]
        connection.start(session._create_first("orders", {"type": "ping"}, 7))

    with WebSocket(server.http_address) as ws:
        assert ws.ask("ping")["type"] == "pong"
        server.call(ask)
        answer = ws.read()
        assert (answer["type"], answer["code"], answer["messageId"]) == ("error", "bug", 7)
