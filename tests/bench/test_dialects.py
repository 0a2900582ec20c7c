"""The protocols as a load test speaks them: whatever the cut, each request gets its outcome."""

from collections.abc import Callable

import orjson
import pytest

from headrace.bench.dialects import (
    DIALECTS,
    PAYLOAD_BYTES_MIN,
    Dialect,
    HttpDialect,
    Marks,
    Outcome,
    masked_frame,
    payload_maker,
)
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Type

UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
SWITCHED: dict[str, bytes] = {"ws": UPGRADED}


def http_answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def text_frame(content: bytes) -> bytes:
    size = len(content)
    return (bytes((0x81, size)) if size < 126 else b"\x81\x7e" + size.to_bytes(2, "big")) + content


GOOD: dict[str, bytes] = {
    "text": b"OK 17\r\n",
    "binary": binary.encode(Type.ACK, 1, {"status": "success", "offset": "17"}),
    "http": http_answer(200, b'{"offset":17}'),
    "ws": text_frame(b'{"type":"published","offset":17,"messageId":1}'),
}
BAD: dict[str, bytes] = {
    "text": b"ERR queue_full there is no room\r\n",
    "binary": binary.encode(Type.ACK, 1, {"status": "error", "code": "queue_full"}),
    "http": http_answer(429, b'{"error":{"code":"queue_full","message":"no room"}}'),
    "ws": text_frame(b'{"type":"error","code":"queue_full","message":"' + b"no room " * 20 + b'"}'),
}


def make(protocol: str, token: str | None = None) -> Dialect:
    return DIALECTS[protocol]("orders", token, "127.0.0.1:1")


def whole(dialect: Dialect, stream: bytes) -> list[Outcome]:
    return dialect.feed(stream)


def byte_by_byte(dialect: Dialect, stream: bytes) -> list[Outcome]:
    return [outcome for byte in stream for outcome in dialect.feed(bytes((byte,)))]


@pytest.mark.parametrize("feed", [whole, byte_by_byte])
@pytest.mark.parametrize("protocol", DIALECTS)
def test_each_answer_is_an_outcome(
    protocol: str, feed: Callable[[Dialect, bytes], list[Outcome]]
) -> None:
    """Successes and errors in order, in one piece or byte by byte."""
    switched = SWITCHED.get(protocol, b"")
    stream = switched + GOOD[protocol] + BAD[protocol] + GOOD[protocol]
    expected: list[Outcome] = [None, "queue_full", None]
    assert feed(make(protocol), stream) == [None] * bool(switched) + expected


@pytest.mark.parametrize("protocol", ["text", "binary"])
def test_a_token_is_said_first(protocol: str) -> None:
    """Over TCP the greeting is the token, and without one there is none."""
    assert make(protocol).greeting() == b""
    assert b"secret" in make(protocol, "secret").greeting()


def test_a_token_goes_with_every_request_over_http() -> None:
    """HTTP has no greeting; a WebSocket's is its handshake."""
    assert make("http", "secret").greeting() == b""
    assert b"Authorization: Bearer secret\r\n" in make("http", "secret").publish(b"{}")
    assert b"Authorization: Bearer secret\r\n" in make("ws", "secret").greeting()


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MIN, 100, 5000])
@pytest.mark.parametrize("protocol", DIALECTS)
def test_a_payload_has_its_size_and_is_found_again(protocol: str, size: int) -> None:
    """Payloads are JSON of the size asked for, and their numbers are found in any stream."""
    payload = payload_maker(size)
    assert len(payload(123)) == size
    assert orjson.loads(payload(123))["bench"] == "0000000123"
    dialect = make(protocol)
    stream = b"".join(dialect.publish(payload(number)) for number in range(20))
    assert Marks().feed(stream) == list(range(20))
    marks = Marks()
    pieces = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    assert [number for piece in pieces for number in marks.feed(piece)] == list(range(20))


def test_what_is_not_an_answer_is_no_outcome() -> None:
    """Deliveries go by: they are counted by their marks."""
    payload = payload_maker(100)(1)
    text = make("text")
    delivery = b"MSG 1 100 orders 0 - 1\r\n" + payload
    assert text.feed(b"OK\r\n" + delivery + delivery) == [None]
    frames = make("binary")
    assert frames.feed(binary.encode(Type.DATA, 1, {"topic": "orders"}, payload)) == []
    socket = make("ws")
    message = text_frame(b'{"type":"message","data":' + payload + b"}")
    assert socket.feed(UPGRADED + message) == [None]


def test_an_answer_without_end_is_one_outcome() -> None:
    """Of an event stream the head is the answer, and what follows is not parsed."""
    http = make("http")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert http.feed(head + b"data: HTTP/1.1\r\n\r\n") == [None]
    assert http.feed(b"HTTP/1.1 500 X\r\n\r\n") == []


def test_an_answer_without_a_body() -> None:
    """204 has neither a length nor a body, and the next answer follows it."""
    http = HttpDialect("orders", None, "h")
    stream = b"HTTP/1.1 204 No Content\r\n\r\n" + http_answer(404, b"<html>")
    assert http.answers(stream) == [(204, b""), (404, b"<html>")]
    assert http.feed(http_answer(404, b"<html>")) == ["http_404"]


def test_a_ping_is_answered_and_a_refused_handshake_is_an_error() -> None:
    """The server's pings want pongs; a 401 instead of an upgrade is the outcome."""
    socket = make("ws")
    assert socket.feed(UPGRADED + b"\x89\x02hi") == [None]
    assert socket.reply == masked_frame(10, b"hi")
    refused = http_answer(401, b'{"error":{"code":"unauthenticated","message":"token"}}')
    assert make("ws").feed(refused) == ["unauthenticated"]


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_a_masked_frame_has_the_right_length(size: int) -> None:
    """All three ways of writing a length."""
    content = b"x" * size
    frame = masked_frame(1, content)
    assert frame[0] == 0x81
    assert frame[1] & 0x80
    assert frame.endswith(b"\0\0\0\0" + content)
    short = frame[1] & 0x7F
    length = {126: frame[2:4], 127: frame[2:10]}.get(short)
    assert (short if length is None else int.from_bytes(length, "big")) == size


def test_a_binary_publish_is_a_frame() -> None:
    """What goes out is what the broker's own parser takes."""
    [frame] = BinaryParser().feed(make("binary").publish(b"value"))
    assert (frame.type, frame.body) == (Type.PUBLISH, b"value")
