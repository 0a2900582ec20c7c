"""The protocols as a load test speaks them, without I/O: requests out, outcomes in.

Only what the test needs, and as little work per message as can be: what is measured is the broker. A
payload carries its number in a mark that no protocol changes, so whoever listens finds it in the bytes
as they come, whatever stands around them.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable

import orjson

from headrace.errors import HeadraceError
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Type

Outcome = str | None
"""How a request ended: None when it was acknowledged, else the code of the error."""
NUMBER_DIGITS = 10
_HEAD, _MIDDLE, _TAIL = b'{"bench":"', b'","fill":"', b'"}'
PAYLOAD_BYTES_MIN = len(_HEAD) + NUMBER_DIGITS + len(_MIDDLE) + len(_TAIL)
_MARK = re.compile(_HEAD[1:] + rb"(\d{%d})\"" % NUMBER_DIGITS)
_MARK_BYTES = len(_HEAD) + NUMBER_DIGITS


def payload_maker(size: int) -> Callable[[int], bytes]:
    """Payloads of ``size`` bytes by number: JSON, so that every protocol takes them as they are."""
    tail = _MIDDLE + b"x" * (size - PAYLOAD_BYTES_MIN) + _TAIL
    template = _HEAD + b"%%0%dd" % NUMBER_DIGITS + tail

    def payload(number: int) -> bytes:
        return template % number

    return payload


class Marks:
    """Finds the numbers in a stream, however it is cut."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[int]:
        data = self._held + data
        numbers = []
        end = 0
        for found in _MARK.finditer(data):
            numbers.append(int(found[1]))
            end = found.end()
        self._held = data[max(end, len(data) - _MARK_BYTES) :]
        return numbers


class Dialect:
    """One connection's words. ``feed`` gives an outcome for each request, in order."""

    def __init__(self, topic: str, token: str | None, host: str):
        self.topic = topic
        self.token = token
        self.host = host
        self.reply = b""
        """What the other side wants to hear back at once (a pong)."""

    def greeting(self) -> bytes:
        """What must be said, and answered, before anything else; often nothing."""
        return b""

    def publish(self, payload: bytes) -> bytes:
        raise NotImplementedError

    def subscribe(self) -> bytes:
        """From now on, everything that is published."""
        raise NotImplementedError

    def feed(self, data: bytes) -> list[Outcome]:
        raise NotImplementedError


class TextDialect(Dialect):
    def __init__(self, topic: str, token: str | None, host: str):
        super().__init__(topic, token, host)
        self._held = b""

    def greeting(self) -> bytes:
        return b"" if self.token is None else f"AUTH {self.token}\r\n".encode()

    def publish(self, payload: bytes) -> bytes:
        return b"PUB %b %d\r\n%b" % (self.topic.encode(), len(payload), payload)

    def subscribe(self) -> bytes:
        return f"SUB {self.topic}\r\n".encode()

    def feed(self, data: bytes) -> list[Outcome]:
        *lines, self._held = (self._held + data).split(b"\r\n")
        outcomes: list[Outcome] = []
        for line in lines:
            if line[:2] == b"OK":
                outcomes.append(None)
            elif line[:4] == b"ERR ":
                outcomes.append(line.split(b" ", 2)[1].decode())
        return outcomes


class BinaryDialect(Dialect):
    def __init__(self, topic: str, token: str | None, host: str):
        super().__init__(topic, token, host)
        self._parser = BinaryParser()
        self._properties = {"topic": topic}

    def greeting(self) -> bytes:
        return b"" if self.token is None else binary.encode(Type.AUTH, 1, {"token": self.token})

    def publish(self, payload: bytes) -> bytes:
        return binary.encode(Type.PUBLISH, 1, self._properties, payload)

    def subscribe(self) -> bytes:
        return binary.encode(Type.SUBSCRIBE, 1, self._properties)

    def feed(self, data: bytes) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for frame in self._parser.feed(data):
            if frame.type == Type.ACK:
                good = frame.properties.get("status") == "success"
                outcomes.append(None if good else frame.properties.get("code", "error"))
        return outcomes


class HttpDialect(Dialect):
    def __init__(self, topic: str, token: str | None, host: str):
        super().__init__(topic, token, host)
        self._held = b""
        self._streams = False
        self._lines = f"Host: {host}\r\n"
        if token is not None:
            self._lines += f"Authorization: Bearer {token}\r\n"
        self._publish = (
            f"POST /publish/{topic} HTTP/1.1\r\n{self._lines}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    def publish(self, payload: bytes) -> bytes:
        return b"%b%d\r\n\r\n%b" % (self._publish, len(payload), payload)

    def subscribe(self) -> bytes:
        return f"GET /stream/{self.topic} HTTP/1.1\r\n{self._lines}\r\n".encode()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\n{self._lines}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def feed(self, data: bytes) -> list[Outcome]:
        return [
            None if 200 <= status < 300 else error_code(status, body)
            for status, body in self.answers(data)
        ]

    def answers(self, data: bytes) -> list[tuple[int, bytes]]:
        """Complete answers: (status, body). Of one without end, the head is all there is."""
        if self._streams:
            return []
        found = []
        buffer, at = self._held + data, 0
        while True:
            head_end = buffer.find(b"\r\n\r\n", at)
            if head_end < 0:
                break
            head = buffer[at:head_end].lower()
            status, start = int(head[9:12]), head_end + 4
            where = head.find(b"\r\ncontent-length:")
            if where < 0 and status != 204:
                self._streams = True
                found.append((status, b""))
                return found
            size = int(head[where + 17 :].split(b"\r\n", 1)[0]) if where >= 0 else 0
            if len(buffer) - start < size:
                break
            found.append((status, buffer[start : start + size]))
            at = start + size
        self._held = buffer[at:]
        return found


def error_code(status: int, body: bytes) -> str:
    return error_of(status, body).code


def error_of(status: int, body: bytes) -> HeadraceError:
    """What an answer over HTTP says went wrong."""
    try:
        error = orjson.loads(body)["error"]
        return HeadraceError(str(error["message"]), code=str(error["code"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return HeadraceError(f"this is no broker's answer: HTTP {status}", code=f"http_{status}")


class WebSocketDialect(Dialect):
    """Frames by hand. The mask is all zeros, so that masking costs this side nothing."""

    def __init__(self, topic: str, token: str | None, host: str):
        super().__init__(topic, token, host)
        self._held = b""
        self._is_open = False
        self._before = f'{{"type":"publish","topic":"{topic}","messageId":1,"data":'.encode()

    def greeting(self) -> bytes:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            "GET /ws HTTP/1.1",
            f"Host: {self.host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        if self.token is not None:
            lines.append(f"Authorization: Bearer {self.token}")
        return "\r\n".join([*lines, "", ""]).encode()

    def publish(self, payload: bytes) -> bytes:
        return masked_frame(_TEXT, b"%b%b}" % (self._before, payload))

    def subscribe(self) -> bytes:
        command = {"type": "subscribe", "topic": self.topic, "messageId": 1}
        return masked_frame(_TEXT, orjson.dumps(command))

    def feed(self, data: bytes) -> list[Outcome]:
        buffer = self._held + data
        at = 0
        outcomes: list[Outcome] = []
        if not self._is_open:
            head_end = buffer.find(b"\r\n\r\n")
            if head_end < 0:
                self._held = buffer
                return []
            status, at = int(buffer[9:12]), head_end + 4
            if status != 101:
                return [error_code(status, buffer[at:])]
            self._is_open = True
            outcomes.append(None)
        while (frame := _frame_at(buffer, at)) is not None:
            opcode, content, at = frame
            if opcode == _TEXT:
                kind = _TYPE.match(content)
                if kind is None or kind[1] == b"error":
                    outcomes.append(str(orjson.loads(content).get("code", "error")))
                elif kind[1] != b"message":
                    outcomes.append(None)
            elif opcode == _PING:
                self.reply += masked_frame(_PONG, content)
        self._held = buffer[at:]
        return outcomes


_TEXT, _PING, _PONG = 1, 9, 10
_TYPE = re.compile(rb'\{"type":"(\w+)"')


def masked_frame(opcode: int, content: bytes) -> bytes:
    size = len(content)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 65536:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    return b"%b\0\0\0\0%b" % (head, content)


def _frame_at(buffer: bytes, at: int) -> tuple[int, bytes, int] | None:
    """(opcode, content, where the next one begins), or None when it is not all there."""
    if len(buffer) < at + 2:
        return None
    opcode, size, start = buffer[at] & 0x0F, buffer[at + 1] & 0x7F, at + 2
    if size == 126:
        size, start = int.from_bytes(buffer[start : start + 2], "big"), start + 2
    elif size == 127:
        size, start = int.from_bytes(buffer[start : start + 8], "big"), start + 8
    if len(buffer) < start + size:
        return None
    return opcode, buffer[start : start + size], start + size


DIALECTS: dict[str, type[Dialect]] = {
    "text": TextDialect,
    "binary": BinaryDialect,
    "http": HttpDialect,
    "ws": WebSocketDialect,
}
OVER_HTTP = ("http", "ws")
"""Those that are spoken on the HTTP port."""
