"""The text protocol over a raw socket, read with nothing of Headrace's own.

One connection for commands, and one for each inbox: a ``MSG`` does not say which subscription it is from.
Where the protocol has no verb (settings of a subscription, its statistics) a client does the preparing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from headrace.errors import Closed, HeadraceError, RequestTimeout, StaleDelivery
from headrace.testing import RunningServer
from tests.contract.clients import ClientSession, ServerFrontEnd
from tests.contract.front_end import (
    CLASSES,
    DEAD_LETTERS,
    DUPLICATE,
    HEADERS,
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


class TextSocket:
    """A socket that reads lines and payloads."""

    def __init__(self, address: tuple[str, int]):
        self._socket = socket.create_connection(address, WAIT_S)
        self._buffer = b""
        self.deliveries: list[Got] = []

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _more(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RequestTimeout("no answer in time")
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise RequestTimeout("no answer in time") from None
        if not data:
            raise Closed("the server closed the connection")
        self._buffer += data

    def line(self, timeout: float = WAIT_S) -> list[str]:
        """The words of the next line that is not a delivery; those are put aside."""
        deadline = time.monotonic() + timeout
        while True:
            words = self._line(deadline)
            if words[0] == "MSG" and len(words) == 7:
                self.deliveries.append(self._delivery(words, deadline))
            else:
                return words

    def _line(self, deadline: float) -> list[str]:
        while b"\r\n" not in self._buffer:
            self._more(deadline)
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line.decode().split(" ")

    def payload(self, size: int, timeout: float = WAIT_S) -> bytes:
        return self._payload(size, time.monotonic() + timeout)

    def _payload(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            self._more(deadline)
        payload, self._buffer = self._buffer[:size], self._buffer[size:]
        return payload

    def _delivery(self, words: list[str], deadline: float) -> Got:
        _, offset, size, topic, partition, token, attempt = words
        value = self._payload(int(size), deadline)
        return Got(value, int(offset), topic, int(partition), int(attempt), handle=token)

    def delivery(self, timeout: float) -> Got:
        """The next message of a SUB."""
        deadline = time.monotonic() + timeout
        while not self.deliveries:
            words = self._line(deadline)
            if words[0] == "ERR":
                raise error_of(words)
            assert words[0] == "MSG", words
            self.deliveries.append(self._delivery(words, deadline))
        return self.deliveries.pop(0)

    def ask(self, command: str, payload: bytes = b"") -> list[str]:
        """The words of the answer; an ERR is raised."""
        self.send(command.encode() + b"\r\n" + payload)
        words = self.line()
        if words[0] == "ERR":
            raise error_of(words)
        return words

    def close(self) -> None:
        self._socket.close()


def error_of(words: list[str]) -> HeadraceError:
    cls = StaleDelivery if words[1] == "stale_delivery" else HeadraceError
    return cls(" ".join(words[2:]), code=words[1])


class TextInbox(Inbox):
    def __init__(self, address: tuple[str, int], command: str, leave: str):
        self._socket = TextSocket(address)
        self._leave = leave
        try:
            assert self._socket.ask(command)[0] == "OK"
        except BaseException:
            self._socket.close()
            raise

    def get(self, timeout: float = WAIT_S) -> Got:
        return self._socket.delivery(timeout)

    def ack(self, got: Got) -> None:
        assert self._socket.ask(f"ACK {got.handle}") == ["OK"]

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        options = f" reason={reason}" + ("" if delay is None else f" delay={delay}")
        assert self._socket.ask(f"NACK {got.handle}{options}") == ["OK"]

    def extend(self, got: Got, seconds: float | None = None) -> None:
        options = "" if seconds is None else f" seconds={seconds}"
        assert self._socket.ask(f"EXTEND {got.handle}{options}")[0] == "OK"

    def close(self) -> None:
        assert self._socket.ask(self._leave) == ["OK"]
        assert self._socket.ask("QUIT")[0] == "OK"
        try:
            self._socket.line()
            raise AssertionError("there was something behind the goodbye")
        except Closed:
            self._socket.close()


class TextSession(Session):
    def __init__(self, server: RunningServer):
        self._server = server
        self._socket = TextSocket(server.address)
        self._helper = ClientSession(server.client())
        self._inboxes: list[TextInbox] = []

    def create_topic(self, name: str, **settings: Any) -> None:
        options = "".join(f" {key}={_word(value)}" for key, value in settings.items())
        assert self._socket.ask(f"CREATE {name}{options}") == ["OK"]

    def delete_topic(self, name: str) -> None:
        assert self._socket.ask(f"DELETE {name}") == ["OK"]

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        names = {**{f"h.{name}": text for name, text in (headers or {}).items()}, **options}
        words = "".join(f" {name}={_word(text)}" for name, text in names.items())
        answer = self._socket.ask(f"PUB {topic} {len(value)}{words}", value)
        if answer[1] == "scheduled":
            return Stored(None, UUID(answer[2]))
        assert (answer[0], len(answer)) == ("OK", 2)
        return Stored(int(answer[1]))

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        if isinstance(where, datetime):
            where = f"@{int(where.timestamp() * 1000)}"
        words = self._socket.ask(f"FETCH {topic} {where} count={limit}")
        found: list[Got] = []
        while words[0] == "MSG":
            value = self._socket.payload(int(words[2]))
            found.append(Got(value, int(words[1]), topic))
            words = self._socket.line()
        assert words[0] == "END", words
        return found

    def subscribe(self, topic: str) -> Inbox:
        return self._inbox(f"SUB {topic}", f"UNSUB {topic}")

    def _inbox(self, command: str, leave: str) -> Inbox:
        inbox = TextInbox(self._server.address, command, leave)
        self._inboxes.append(inbox)
        return inbox

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        self._helper.create_subscription(name, topic, **settings)

    def delete_subscription(self, name: str, topic: str) -> None:
        self._helper.delete_subscription(name, topic)

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        return self._inbox(
            f"SUB {topic} group={name} prefetch={prefetch}", f"UNSUB {topic} group={name}"
        )

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        return self._helper.stats(name, topic)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox._socket.close()
        self._socket.close()
        self._helper.close()


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class TextProtocol(ServerFrontEnd):
    name = "text"
    cannot: ClassVar = {
        HEADERS: "MSG carries the value, its place and its attempt",
        DEAD_LETTERS: "no verb",
        SCHEDULE: "delayed messages are published, but there is no verb to list or cancel them",
        SEEK: "no verb",
        DUPLICATE: "OK carries the offset and nothing else",
        CLASSES: "ERR carries the code and a sentence",
        STAY: "who uses a bare socket connects again",
        JOBS: "jobs use the binary protocol",
    }

    def make_session(self) -> Session:
        return TextSession(self.server)
