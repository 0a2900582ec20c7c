"""The ports of a node that still reads Kafka: they are open, and say that it is not ready.

Health is answered, with how far it is. Every other request gets a definite, retryable error (``starting``) in the words of its own protocol, and
the connection is closed: so a client turns to another node, or comes again. A client is never left without an answer.

Nothing here knows the engine, whose rules of access are not read yet. A connection that came before the end of the start therefore stays
what it is, and never becomes one that may do something. It counts as a connection (``max_connections``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import orjson

from headrace.errors import HeadraceError, StorageFailed, kind_of
from headrace.server.binary import failure
from headrace.server.hub import Hub
from headrace.wire import http, text
from headrace.wire.binary import BinaryParser

FIRST_REQUEST_S = 10.0
"""How long a client may take to send its first request."""
LINGER_S = 2.0
"""How long it may take to read the answer: what it still sends is read meanwhile, because a reset would overtake the answer."""
REQUEST_BYTES_MAX = 64 << 10
HEALTH = ("/health", "/health/ready")


def is_text(first: int) -> bool:
    """On the TCP port: a text command begins with a letter, or with blanks before it. A frame begins with its length, whose
    first byte is never that high."""
    return 0x41 <= first <= 0x5A or 0x61 <= first <= 0x7A or first in b"\r\n \t"


class StartingConnection(asyncio.Protocol):
    """``progress`` says what the node does."""

    def __init__(self, hub: Hub, port: str, progress: Callable[[], str]):
        self._hub, self._port, self._progress = hub, port, progress
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._begun = b""
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._hub.early.add(self)
        self._close_after(FIRST_REQUEST_S)

    def _close_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.early.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._begun += data
        answer = self._answer(self._begun)
        if answer is None and len(self._begun) <= REQUEST_BYTES_MAX:
            return  # it is not complete yet
        self._answered, self._begun = True, b""
        self._transport.write(answer or b"")
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._close_after(LINGER_S)
        else:  # TLS
            self._transport.close()

    def _answer(self, data: bytes) -> bytes | None:
        error = StorageFailed(
            f"the node is not ready: {self._progress()}; try again, or at another node",
            code="starting",
        )
        if self._port == "http":
            return self._http(data, error)
        if is_text(data[0]):
            return text.error(error) if b"\n" in data else None
        parser = BinaryParser(REQUEST_BYTES_MAX)
        frames = parser.feed(data)
        if frames:
            return failure(frames[0].sequence, error)
        return b"" if parser.error is not None else None

    def _http(self, data: bytes, error: HeadraceError) -> bytes | None:
        head, complete, _ = data.partition(b"\r\n\r\n")
        if not complete:
            return None
        words = head.partition(b"\r\n")[0].split(b" ")
        path = words[1].partition(b"?")[0].decode("latin-1") if len(words) > 1 else ""
        if path == "/health/live":
            answer = http.Answer(200, orjson.dumps({"status": "ok"}))
        elif path in HEALTH:
            document = {"status": "not ready", "reasons": [self._progress()]}
            answer = http.Answer(503, orjson.dumps(document))
        else:
            answer = http.error_answer(error, kind_of(error))
        return answer.encode(keep_alive=False, head_only=words[0] == b"HEAD")
