"""WebSockets: publishing, subscribing and settling. What there is no command for is done over HTTP."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import UUID

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headrace.errors import Closed, RequestTimeout
from headrace.testing import RunningServer
from tests.contract.clients import ServerFrontEnd
from tests.contract.front_end import (
    CLASSES,
    DEAD_LETTERS,
    JOBS,
    SCHEDULE,
    SEEK,
    STAY,
    WAIT_S,
    Got,
    Inbox,
    Session,
    Stored,
)
from tests.contract.over_http import HttpSession, error_in, got_of, stored_of


class WebSocket:
    """A connection on which answers are told from messages."""

    def __init__(self, server: RunningServer):
        host, port = server.http_address
        self._stack = contextlib.ExitStack()
        self.connection = self._stack.enter_context(
            connect(f"ws://{host}:{port}/ws", open_timeout=WAIT_S, close_timeout=1, max_size=None)
        )
        self._numbers = itertools.count(1)
        self._messages: deque[dict[str, Any]] = deque()

    def _read(self, timeout: float) -> dict[str, Any]:
        try:
            read = self.connection.recv(timeout)
        except TimeoutError:
            raise RequestTimeout("nothing came in time") from None
        except ConnectionClosed as error:
            raise Closed(f"the connection is closed: {error}") from None
        assert isinstance(read, str)
        found: dict[str, Any] = json.loads(read)
        return found

    def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        """The answer to one command; an error is raised."""
        number = f"m-{next(self._numbers)}"
        self.connection.send(json.dumps({"type": type_, "messageId": number, **fields}))
        while True:
            found = self._read(WAIT_S)
            if found.get("messageId") == number:
                if found["type"] == "error":
                    raise error_in(found)
                return found
            self._messages.append(found)

    def message(self, timeout: float = WAIT_S) -> dict[str, Any]:
        found = self._messages.popleft() if self._messages else self._read(timeout)
        if found["type"] == "error":
            raise error_in(found)
        assert found["type"] == "message"
        return found

    def close(self) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            self._stack.close()


class WebSocketInbox(Inbox):
    def __init__(self, server: RunningServer, topic: str, **fields: Any):
        self._socket = WebSocket(server)
        self._leave = {"topic": topic, **({"group": fields["group"]} if "group" in fields else {})}
        try:
            answer = self._socket.ask("subscribe", topic=topic, **fields)
            assert (answer["type"], answer["topic"]) == ("subscribed", topic)
        except BaseException:
            self._socket.close()
            raise

    def get(self, timeout: float = WAIT_S) -> Got:
        return got_of(self._socket.message(timeout))

    def ack(self, got: Got) -> None:
        assert self._socket.ask("ack", delivery=got.handle)["type"] == "acked"

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        answer = self._socket.ask("nack", delivery=got.handle, delay=delay, reason=reason)
        assert answer["type"] == "nacked"

    def extend(self, got: Got, seconds: float | None = None) -> None:
        answer = self._socket.ask("extend", delivery=got.handle, seconds=seconds)
        assert answer["type"] == "extended"

    def close(self) -> None:
        assert self._socket.ask("unsubscribe", **self._leave)["type"] == "unsubscribed"
        self._socket.close()


class WebSocketSession(HttpSession):
    def __init__(self, server: RunningServer):
        super().__init__(server)
        self._socket = WebSocket(server)
        self._sockets: list[WebSocketInbox] = []

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        if isinstance(options.get("key"), bytes):
            options["key64"] = base64.b64encode(options.pop("key")).decode()
        data = base64.b64encode(value).decode()
        answer = self._socket.ask(
            "publish", topic=topic, data=data, encoding="base64", headers=headers, **options
        )
        assert answer["type"] == "published"
        return stored_of(answer)

    def subscribe(self, topic: str) -> Inbox:
        return self._inbox(topic)

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        return self._inbox(topic, group=name, prefetch=prefetch, ack="manual")

    def _inbox(self, topic: str, **fields: Any) -> Inbox:
        inbox = WebSocketInbox(self._server, topic, **fields)
        self._sockets.append(inbox)
        return inbox

    def seek(self, name: str, topic: str, to: Any) -> None:
        raise NotImplementedError

    def cancel(self, id: UUID) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for inbox in self._sockets:
            inbox._socket.close()
        self._socket.close()
        super().close()


class WebSocketInterface(ServerFrontEnd):
    name = "WebSocket"
    cannot: ClassVar = {
        CLASSES: "an error carries its code and a sentence",
        DEAD_LETTERS: "no command; it is done over HTTP",
        SCHEDULE: "delayed messages are published; listing and cancelling is done over HTTP",
        SEEK: "no command; it is done over HTTP",
        STAY: "who uses a bare socket connects again",
        JOBS: "jobs use the binary protocol",
    }

    def make_session(self) -> Session:
        return WebSocketSession(self.server)
