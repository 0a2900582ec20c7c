"""What a request may cost, and what a hostile one is answered: bounded, with a code, without a traceback."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace import limits
from headrace.errors import DataCorrupt, HeadraceError, InvalidArgument, TooLarge
from headrace.log.admission import check
from headrace.log.batch import Batch, crc32c, encode
from headrace.log.columns import Columns
from headrace.server.routing import JSON_BYTES_MAX, NO_BODY_BYTES_MAX
from headrace.testing import RunningServer, running_server
from headrace.wire import binary
from tests.contract.raw_binary import ADMIN, CREATE_TOPIC, HEARTBEAT, FrameSocket
from tests.server.http_rig import Http, RawHttp, http_of
from tests.server.http_websocket import TEXT, WebSocket, frame

PUBLISH_BATCH, SETTLE, STAGE = 16, 24, 27
TOKEN = "correct horse battery staple"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is a bug of ours."""
    yield
    assert "Traceback" not in caplog.text


def announce(raw: RawHttp, method: str, path: str, size: int, **headers: str) -> Any:
    """The answer to a head with a body of this size, of which nothing is sent."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}"]
    lines += [f"{name.title()}: {value}" for name, value in headers.items()]
    raw.send("\r\n".join(lines) + "\r\n\r\n")
    return raw.answer()


# --- bodies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("OPTIONS", "/publish/orders", 413),
        ("OPTIONS", "/nowhere", 404),
        ("POST", "/health", 405),
        ("GET", "/health/live", 413),
        ("GET", "/metrics", 401),
        ("POST", "/publish/orders", 401),
        ("POST", "/nowhere", 401),
    ],
)
def test_a_stranger_holds_no_memory(method: str, path: str, status: int) -> None:
    """The body of a request without a token is refused before it comes."""
    with (
        running_server(memory=True, token=TOKEN) as server,
        RawHttp(server.http_address) as raw,
    ):
        assert announce(raw, method, path, 60 << 20).status == status
        assert raw.is_ended()


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("GET", "/topics", NO_BODY_BYTES_MAX),
        ("DELETE", "/topics/orders", NO_BODY_BYTES_MAX),
        ("PUT", "/topics/orders", JSON_BYTES_MAX),
        ("POST", "/ack/orders", JSON_BYTES_MAX),
        ("POST", "/publish/orders", (1 << 20) + (64 << 10)),
        ("POST", "/publish/batch/orders", 4 << 20),
    ],
)
def test_a_body_is_as_large_as_its_request_needs(
    server: RunningServer, method: str, path: str, most: int
) -> None:
    """One byte more is refused before it is read; chunks are counted as they come."""
    with RawHttp(server.http_address) as raw:
        answer = announce(raw, method, path, most + 1)
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert str(most) in answer.json["error"]["message"]
    with RawHttp(server.http_address) as raw:
        raw.send(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        raw.send(f"{most + 1:x}\r\n", b"x" * (most + 1))
        assert raw.answer().code == "body_too_large"


def test_the_limit_of_a_publish_is_that_of_a_message() -> None:
    """A body that is a little too large is read, so that the connection goes on."""
    with running_server(memory=True, max_message_size=1000) as server:
        http = http_of(server)
        answer = http.ask("POST", "/publish/orders", b"x" * 2000, {"Content-Type": "text/plain"})
        assert (answer.status, answer.code) == (413, "message_too_large")
        assert "connection" not in answer.headers
        http.close()
        with RawHttp(server.http_address) as raw:
            assert announce(raw, "POST", "/publish/orders", 1 << 20).code == "body_too_large"


def test_a_batch_over_http_has_a_number_of_items(http: Http) -> None:
    """As an array and as lines."""
    answer = http.ask(
        "POST", "/publish/batch/orders", "[" + "1," * limits.CLIENT_BATCH_RECORDS_MAX + "1]"
    )
    assert (answer.status, answer.code) == (413, "batch_too_large")
    lines = {"Content-Type": "application/x-ndjson"}
    answer = http.ask(
        "POST", "/publish/batch/orders", "1\n" * (limits.CLIENT_BATCH_RECORDS_MAX + 1), lines
    )
    assert (answer.status, answer.code) == (413, "batch_too_large")
    assert http.ask("PUT", "/topics/many", {"max_queue_size": 100_000}).status == 201
    most = http.ask(
        "POST",
        "/publish/batch/many?key=k",
        "[" + "1," * (limits.CLIENT_BATCH_RECORDS_MAX - 1) + "1]",
    )
    assert (most.status, most.json["published"]) == (200, limits.CLIENT_BATCH_RECORDS_MAX)
    spaced = ' [ {"a" : 1} , 12345678901234567890123 ] '
    assert http.ask("POST", "/publish/batch/orders", spaced).status == 200
    values = [m["data"] for m in http.get("/topics/orders/messages").json]
    assert values == [{"a": 1}, 12345678901234567890123]


def test_json_with_too_many_values_is_not_decoded(frames: FrameSocket, http: Http) -> None:
    """Arguments in frames and over HTTP."""
    many = b'{"op": "topics", "x": [' + b"[]," * 200_000 + b"1]}"
    with pytest.raises(HeadraceError) as caught:
        frames.ask(ADMIN, None, many)
    assert caught.value.code == "json_too_large"
    frames.ask(HEARTBEAT)
    answer = http.ask("PUT", "/topics/orders", many, {"Content-Type": "application/json"})
    assert (answer.status, answer.code) == (413, "json_too_large")
    carried = b"[" + b"[]," * 340_000 + b"1]"  # what is not decoded may have more
    answer = http.ask("POST", "/publish/orders", carried, {"Content-Type": "application/json"})
    assert answer.status == 200
    assert len(http.consume("orders")["data"]) == 340_001


def test_deliveries_that_one_request_settles_have_a_number(http: Http) -> None:
    """As many as one request can take."""
    body = {"deliveries": ["1.1"] * (limits.LISTED_MAX + 1)}
    answer = http.ask("POST", "/ack/orders", body)
    assert (answer.status, answer.code) == (400, "too_many_deliveries")


# --- frames ---------------------------------------------------------------------------------------
def test_a_settle_has_a_number_of_runs(frames: FrameSocket) -> None:
    """The most is looked up; one more is refused as a whole."""
    runs = [(1, 1, 1)] * binary.RUNS_MAX
    answer = frames.ask(SETTLE, None, binary.encode_runs(runs))
    assert answer.properties["stale"] == str(binary.RUNS_MAX)
    with pytest.raises(TooLarge) as caught:
        frames.ask(SETTLE, None, binary.encode_runs([*runs, (1, 1, 1)]))
    assert caught.value.code == "frame_too_large"
    frames.ask(HEARTBEAT)


def test_a_frame_that_is_too_large_is_refused_by_its_head(server: RunningServer) -> None:
    """Before any of it is kept. The answer arrives although the client goes on sending."""
    most = binary.FRAME_BYTES_MAX
    with closing(FrameSocket(server.address)) as large:
        frame = binary.encode_start(SETTLE, 1, None, most - binary.FRAME_BYTES_MIN)
        large.send(frame + bytes(1 << 20))
        assert large.read().properties["code"] == "frame_too_large"


def test_the_broker_spreads_batches_of_a_bounded_size(frames: FrameSocket) -> None:
    """Larger ones with keys need a partition, or a topic that has only one."""
    count = limits.SPREAD_RECORDS_MAX
    for topic, partitions in (("wide", 8), ("narrow", 1)):
        settings = {"partitions": partitions, "max_queue_size": 100_000}
        frames.ask(CREATE_TOPIC, {"topic": topic}, json.dumps(settings).encode())
    keys = [b"%d" % number for number in range(count + 1)]
    most = encode(Columns([b"x"] * count, keys=keys[:-1])).raw()
    assert len(json.loads(frames.ask(PUBLISH_BATCH, {"topic": "wide"}, most).body)) == 8
    more = encode(Columns([b"x"] * (count + 1), keys=keys)).raw()
    named = [{"name": "text"} | {f"h{n}": "" for n in range(15)}] * 1_000
    for batch in (more, encode(Columns([b"x"] * 1_000, keys=keys[:1_000], headers=named)).raw()):
        with pytest.raises(TooLarge) as caught:
            frames.ask(PUBLISH_BATCH, {"topic": "wide"}, batch)
        assert caught.value.code == "batch_too_large"
        frames.ask(PUBLISH_BATCH, {"topic": "wide", "partition": 3}, batch)
        frames.ask(PUBLISH_BATCH, {"topic": "narrow"}, batch)


def headers_of(count: int, per_message: int) -> bytes:
    headers = {f"h{n}": "x" for n in range(per_message)}
    return encode(Columns([b""] * count, None, [headers] * count)).raw()


def test_a_batch_has_a_number_of_headers(
    frames: FrameSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages together; it is read from one number, before any header is looked at."""
    raw = headers_of(1001, 250)
    monkeypatch.setattr("headrace.log.admission.check_texts", None)
    with pytest.raises(TooLarge) as caught:
        frames.ask(PUBLISH_BATCH, {"topic": "orders"}, raw)
    assert caught.value.code == "headers_too_large"
    assert "fewer messages" in caught.value.message


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"": "x"}, "invalid_headers"),
        ({"a=b": "x"}, "invalid_headers"),
        ({"a\x1b": "x"}, "invalid_headers"),
        ({"a": "x\r"}, "invalid_headers"),
        ({"a": "x\n"}, "invalid_headers"),
        ({"a": "x\0"}, "invalid_headers"),
        ({"a": "x" * (64 << 10)}, "headers_too_large"),
    ],
)
def test_headers_are_checked_as_columns(headers: dict[str, str], code: str) -> None:
    """With the same rules and codes as those of a single message, wherever the wrong one is."""
    good = {"kind": "größe", "id": "1"}
    columns = Columns([b""] * 4, None, [good, None, {**good, **headers}, {}])
    with pytest.raises(InvalidArgument) as caught:
        check(encode(columns).raw(), message_bytes_max=100)
    assert caught.value.code == code
    check(encode(Columns([b""] * 3, None, [good, {}, None])).raw(), message_bytes_max=100)


def test_headers_that_are_not_text_are_refused() -> None:
    """Also where two halves of a character, in two headers, would make a whole one."""
    whole = encode(Columns([b""] * 2, None, [{"a": "12"}, {"b": "34"}]))
    for text in (b"1234", "1é4".encode()):
        body = whole.body.replace(b"1234", text)
        batch = Batch(body, crc32c(body), 2, whole.flags)
        if text == b"1234":
            check(batch.raw(), message_bytes_max=100)
            continue
        with pytest.raises(DataCorrupt, match="UTF-8"):
            check(batch.raw(), message_bytes_max=100)


def test_a_target_that_is_not_text_is_refused(frames: FrameSocket, quiet: None) -> None:
    """In a STAGE, delayed or not, and in a batch: no traceback, and the connection goes on."""
    columns = Columns([b"x"])
    columns.targets = [b"\xff\xfe"]
    raw = encode(columns).raw()
    for kind, more in ((STAGE, {"delayed": "true"}), (STAGE, {}), (PUBLISH_BATCH, {})):
        with pytest.raises(DataCorrupt) as caught:
            frames.ask(kind, {"topic": "orders", "partition": "0", **more}, raw)
        assert caught.value.code == "invalid_batch"
    frames.ask(HEARTBEAT)


def test_a_bug_in_staging_is_an_answer(
    frames: FrameSocket, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place among the answers is filled, so that the later ones come."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server.engine.staging, "stage", broken)
    with pytest.raises(HeadraceError) as caught:
        frames.ask(STAGE, {"topic": "orders"}, encode(Columns([b"x"])).raw())
    assert caught.value.code == "bug"
    frames.ask(HEARTBEAT)


# --- nested and odd JSON --------------------------------------------------------------------------
DEEP = "[" * 1000 + "]" * 1000
NESTED = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    "command",
    [
        f'{{"type": "publish", "topic": "orders", "data": {DEEP}, "messageId": 1}}',
        f'{{"type": "publish", "topic": "orders", "data": 1, "messageId": {DEEP}}}',
        f'{{"type": {DEEP}, "messageId": 1}}',
        f'{{"type": "publish", "topic": "orders", "data": 1, "key": {DEEP}, "messageId": 1}}',
        f'{{"type": "publish", "topic": "orders", "data": 1, "ttl": {DEEP}, "messageId": 1}}',
        f'{{"type": "publish", "topic": {DEEP}, "data": 1, "messageId": 1}}',
        f'{{"type": "subscribe", "topic": "orders", "group": "g", "start": {DEEP}}}',
        '{"type": "unsubscribe", "topic": "orders", "group": ["x"], "messageId": 1}',
        '{"type": "unsubscribe", "topic": "orders", "group": {"a": 1}, "messageId": 1}',
        f'{{"type": "ping", "messageId": "{"x" * 5000}"}}',
        f'{{"type": "ack", "deliveries": {DEEP}}}',
        DEEP,
        f'[{NESTED}, {{"type": "nonsense"}}]',
    ],
)
def test_nested_and_odd_commands_are_refused(
    server: RunningServer, command: str, quiet: None
) -> None:
    """Each with an error, and the connection goes on."""
    socket = WebSocket(server.http_address)
    socket.raw.send(_frame(command))
    answer = socket.read()
    assert answer["type"] == "error"
    assert answer["code"] not in ("bug", None)
    if command.startswith("["):
        while answer["type"] == "error" and "nonsense" in command and "nonsense" not in str(answer):
            answer = socket.read()
    assert socket.ask("ping")["type"] == "pong"
    socket.raw.close()


def _frame(text: str) -> bytes:
    return frame(TEXT, text.encode())


def test_nested_arguments_are_refused(http: Http, frames: FrameSocket, quiet: None) -> None:
    """Over HTTP and in frames, wherever they stand."""
    for body in (f'{{"partitions": {DEEP}}}', f'{{"colour": {DEEP}}}'):
        answer = http.ask("PUT", "/topics/orders", body, {"Content-Type": "application/json"})
        assert answer.status == 400
        assert answer.code != "bug"
    for name in ("topic", "settings", "op"):
        document = {"op": '"create_topic"', "topic": '"orders"', name: DEEP}
        body = "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in document.items()) + "}"
        with pytest.raises(HeadraceError) as caught:
            frames.ask(ADMIN, None, body.encode())
        assert caught.value.code != "bug"
    answer = http.ask("POST", "/publish/batch/orders", f"[{DEEP}]")
    assert (answer.status, answer.code) == (400, "invalid_json")
