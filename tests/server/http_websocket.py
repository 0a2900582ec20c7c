"""A WebSocket for tests, frame by frame: it can also do what no library lets its users do."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from tests.server.http_rig import WAIT_S, RawHttp

TEXT, BINARY, CLOSE, PING, PONG, CONT = 0x1, 0x2, 0x8, 0x9, 0xA, 0x0
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = base64.b64encode(
    hashlib.sha1((KEY + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
).decode()


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = True, reserved: int = 0
) -> bytes:
    """As a client sends it."""
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += bytes([bit | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([bit | 127]) + size.to_bytes(8, "big")
    if not masked:
        return head + payload
    mask = b"\x37\xfa\x21\x3d"
    whole = (mask * (size // 4 + 1))[:size]
    hidden = (int.from_bytes(payload, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")
    return head + mask + hidden


def text(document: object) -> bytes:
    return frame(TEXT, json.dumps(document).encode())


class WebSocket:
    def __init__(
        self,
        address: tuple[str, int],
        path: str = "/ws",
        *,
        receive_bytes: int | None = None,
        **headers: str,
    ):
        self.raw = RawHttp(address, receive_bytes=receive_bytes)
        given = {
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec_websocket_key": KEY,
            "sec_websocket_version": "13",
            **headers,
        }
        self.raw.request("GET", path, **given)
        self.head = self.raw.head()
        assert self.head.status == 101, self.head
        assert self.head.headers["sec-websocket-accept"] == ACCEPT
        self._numbers = 0
        self._kept: list[dict[str, Any]] = []

    def send(self, document: object) -> None:
        self.raw.send(text(document))

    def frame(self, timeout: float = WAIT_S) -> tuple[int, bytes]:
        """The next frame: whole and not masked, as a server sends it."""
        self.raw.socket.settimeout(timeout)
        first, second = self.raw.exactly(2)
        assert first & 0xF0 == 0x80, "it is whole, and no extension is in use"
        assert second & 0x80 == 0
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(self.raw.exactly(2), "big")
        elif size == 127:
            size = int.from_bytes(self.raw.exactly(8), "big")
        return first & 0x0F, self.raw.exactly(size)

    def read(self, timeout: float = WAIT_S) -> dict[str, Any]:
        """The next document; pings are answered on the way."""
        if self._kept:
            return self._kept.pop(0)
        while True:
            opcode, payload = self.frame(timeout)
            if opcode == PING:
                self.raw.send(frame(PONG, payload))
                continue
            assert opcode == TEXT, (opcode, payload)
            found: dict[str, Any] = json.loads(payload)
            return found

    def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        """The answer to a command, be it a success or an error."""
        self._numbers += 1
        number = f"m-{self._numbers}"
        self.send({"type": type_, "messageId": number, **fields})
        kept: list[dict[str, Any]] = []
        while True:
            found = self.read()
            if found.get("messageId") == number:
                self._kept = kept + self._kept
                return found
            kept.append(found)

    def ok(self, type_: str, **fields: Any) -> dict[str, Any]:
        answer = self.ask(type_, **fields)
        assert answer["type"] != "error", answer
        return answer

    def message(self, timeout: float = WAIT_S) -> dict[str, Any]:
        found = self.read(timeout)
        assert found["type"] == "message", found
        return found

    def messages(self, count: int) -> list[Any]:
        return [self.message()["data"] for _ in range(count)]

    def closed(self) -> tuple[int, str]:
        """The code and reason of the server's close frame, and nothing behind it."""
        while True:
            opcode, payload = self.frame()
            if opcode == CLOSE:
                break
        return int.from_bytes(payload[:2], "big"), payload[2:].decode()

    def is_quiet(self) -> bool:
        """Whether nothing was on its way before the answer to a ping."""
        self.ok("ping")
        return not self._kept

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
