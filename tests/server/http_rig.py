"""HTTP for tests, read with nothing of Headrace's own: requests, raw bytes, and event streams."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from headrace.testing import RunningServer, ServerProcess

WAIT_S = 15.0
JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
BYTES = {"Content-Type": "application/octet-stream"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""
    lines: list[str] = field(default_factory=list)
    """The head as it came."""

    @property
    def json(self) -> Any:
        assert self.headers.get("content-type") == "application/json", (self.headers, self.body)
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error, whose other parts are there, too."""
        error = self.json["error"]
        assert set(error) == {"code", "message", "retryable"}
        assert len(error["message"]) > 10
        assert isinstance(error["retryable"], bool)
        return str(error["code"])


def target(*words: str, **query: object) -> str:
    """``/publish/a%2Fb?key=x`` of its parts."""
    path = "/" + "/".join(quote(word, safe="") for word in words)
    return path + ("?" + urlencode(query) if query else "")


class Http:
    """One kept connection; what is asked is answered."""

    def __init__(self, address: tuple[str, int], token: str | None = None):
        self._connection = http.client.HTTPConnection(*address, timeout=WAIT_S)
        self._token = token

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | str | object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """A body that is no text and no bytes is sent as JSON."""
        given = dict(headers or {})
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            given = {**JSON, **given}
        if self._token is not None:
            given.setdefault("Authorization", f"Bearer {self._token}")
        raw = body.encode() if isinstance(body, str) else body
        encoded = {name: text.encode() for name, text in given.items()}
        self._connection.request(method, path, raw, encoded)  # type: ignore[arg-type]
        response = self._connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("GET", path, None, headers)

    def ok(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """The JSON of an answer that must be a success."""
        answer = self.ask(method, path, body, headers)
        assert answer.status in (200, 201, 202), (answer.status, answer.body)
        return answer.json

    def publish(self, topic: str, data: object, **query: object) -> Any:
        """Any JSON; the receipt."""
        return self.ok("POST", target("publish", topic, **query), json.dumps(data), **JSON)

    def consume(self, topic: str, **query: object) -> Any:
        """The next message, or None."""
        answer = self.get(target("consume", topic, **query))
        if answer.status == 204:
            assert answer.body == b""
            return None
        assert answer.status == 200, (answer.status, answer.body)
        return answer.json

    def consume_batch(self, topic: str, **query: object) -> Any:
        answer = self.get(target("consume", topic, "batch", **query))
        assert answer.status == 200, (answer.status, answer.body)
        return answer.json

    def close(self) -> None:
        self._connection.close()


class RawHttp:
    """A socket, and answers read from it one by one."""

    def __init__(self, address: tuple[str, int], *, receive_bytes: int | None = None):
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def send(self, *parts: bytes | str) -> None:
        self.socket.sendall(b"".join(p.encode() if isinstance(p, str) else p for p in parts))

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        self.send(raw_request(method, path, body, **headers))

    def _more(self) -> bool:
        data = self.socket.recv(1 << 16)
        self.buffer += data
        return bool(data)

    def until(self, end: bytes) -> bytes:
        """All up to and with ``end``."""
        while end not in self.buffer:
            assert self._more(), f"the server ended the connection behind {self.buffer!r}"
        found, _, self.buffer = self.buffer.partition(end)
        return found + end

    def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            assert self._more(), f"the server ended the connection behind {self.buffer!r}"
        found, self.buffer = self.buffer[:size], self.buffer[size:]
        return found

    def head(self) -> Answer:
        lines = self.until(b"\r\n\r\n").decode().split("\r\n")[:-2]
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        pairs = (line.split(": ", 1) for line in lines[1:])
        return Answer(int(status), {name.lower(): value for name, value in pairs}, b"", lines)

    def answer(self, *, to_head: bool = False) -> Answer:
        answer = self.head()
        if not to_head:
            answer.body = self.exactly(int(answer.headers.get("content-length", "0")))
        return answer

    def is_ended(self) -> bool:
        """Whether the server has ended the connection, with nothing more before that."""
        while self._more():
            pass
        return not self.buffer

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raw_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request as bytes; ``content_type="..."`` becomes ``Content-Type``."""
    given = {"Host": "localhost"}
    if body:
        given |= {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    given |= {name.replace("_", "-").title(): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Event:
    id: str
    name: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Events:
    """An event stream, read as the standard says."""

    def __init__(
        self,
        address: tuple[str, int],
        path: str,
        *,
        last_event_id: str | None = None,
        receive_bytes: int | None = None,
        **headers: str,
    ):
        self.raw = RawHttp(address, receive_bytes=receive_bytes)
        if last_event_id is not None:
            headers["last_event_id"] = last_event_id
        self.raw.request("GET", path, **headers)
        self.head = self.raw.head()
        self.last_event_id = last_event_id or ""
        self._carriage_return = False
        if self.head.status == 200:
            assert self.head.headers["content-type"] == "text/event-stream"

    def _line(self) -> str:
        """Up to CR LF, LF or CR: all three end a line."""
        while True:
            if self._carriage_return and self.raw.buffer[:1] == b"\n":
                self.raw.buffer = self.raw.buffer[1:]
            places = [
                at for at in (self.raw.buffer.find(b"\n"), self.raw.buffer.find(b"\r")) if at >= 0
            ]
            if places:
                at = min(places)
                line, self._carriage_return = (
                    self.raw.buffer[:at],
                    self.raw.buffer[at : at + 1] == b"\r",
                )
                self.raw.buffer = self.raw.buffer[at + 1 :]
                return line.decode()
            if not self.raw._more():
                raise EOFError("the stream has ended")

    def next(self, timeout: float = WAIT_S) -> Event:
        """The next event that has data."""
        deadline = time.monotonic() + timeout
        name, data = "message", []
        while True:
            self.raw.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            line = self._line()
            field_name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    return Event(self.last_event_id, name, "\n".join(data))
                name = "message"
                if self.on_empty():
                    return Event(self.last_event_id, "", "")
            elif field_name == "id":
                self.last_event_id = value
            elif field_name == "event":
                name = value
            elif field_name == "data":
                data.append(value)

    _stop_at_empty = False

    def on_empty(self) -> bool:
        return self._stop_at_empty

    def begin(self) -> str:
        """Read what comes before the first event; the id to go on from."""
        self._stop_at_empty = True
        self.next()
        self._stop_at_empty = False
        return self.last_event_id

    def take(self, count: int) -> list[Event]:
        return [self.next() for _ in range(count)]

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def http_of(server: RunningServer | ServerProcess, token: str | None = None) -> Http:
    return Http(server.http_address, token)


def each_byte(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        yield data[at : at + 1]
