"""The binary protocol over a raw socket, with frames made and read by hand.

Only a batch that FETCH answers with is taken apart by Headrace: its bytes are the log's, not the wire's.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from headrace.errors import Closed, HeadraceError, RequestTimeout, by_kind
from headrace.log.batch import Batch, parse
from headrace.model import DeadLetter, Message, Scheduled, derive_id, topic_hash
from headrace.operations import documents
from tests.contract.clients import ServerFrontEnd
from tests.contract.front_end import STAY, WAIT_S, Got, Inbox, Session, Stored

CREATE_TOPIC, PUBLISH, CREATE_SUBSCRIPTION, DELETE_SUBSCRIPTION, SUBSCRIBE, UNSUBSCRIBE = range(
    1, 7
)
HEARTBEAT, ACK, DATA = 7, 8, 9
FETCH, BATCHES, NACK, EXTEND, AUTH, ADMIN = 17, 18, 19, 20, 21, 22
CLOSED, STAGE = 25, 27


class RawFrame(NamedTuple):
    type: int
    sequence: int
    timestamp: int
    properties: dict[str, str]
    body: bytes


def frame(
    type_: int, sequence: int, properties: Mapping[str, object] | None = None, body: bytes = b""
) -> bytes:
    """[total][type][sequence][timestamp][properties length][properties][body length][body]"""
    packed = "".join(f"{name}={value}\0" for name, value in (properties or {}).items()).encode()
    return (
        struct.pack(">IIQQI", 32 + len(packed) + len(body), type_, sequence, 0, len(packed))
        + packed
        + struct.pack(">I", len(body))
        + body
    )


class FrameSocket:
    """A socket that sends and reads frames."""

    def __init__(self, address: tuple[str, int]):
        self._socket = socket.create_connection(address, WAIT_S)
        self._buffer = b""
        self._sequence = 0
        self.arrived: list[RawFrame] = []
        """Frames that nobody asked for: deliveries, and the end of subscriptions."""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self, timeout: float = WAIT_S) -> RawFrame:
        deadline = time.monotonic() + timeout
        while len(self._buffer) < 4 or len(self._buffer) < self._total():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RequestTimeout("no frame in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise RequestTimeout("no frame in time") from None
            if not data:
                raise Closed("the server closed the connection")
            self._buffer += data
        raw, self._buffer = self._buffer[: self._total()], self._buffer[self._total() :]
        _, type_, sequence, timestamp, size = struct.unpack_from(">IIQQI", raw)
        packed, rest = raw[28 : 28 + size], raw[28 + size :]
        assert struct.unpack_from(">I", rest)[0] == len(rest) - 4
        pairs = [item.split("=", 1) for item in packed.decode().split("\0") if item]
        return RawFrame(type_, sequence, timestamp, dict(pairs), rest[4:])

    def _total(self) -> int:
        total: int = struct.unpack_from(">I", self._buffer)[0]
        return total

    def ask(
        self, type_: int, properties: Mapping[str, object] | None = None, body: bytes = b""
    ) -> RawFrame:
        """The answer, which has the same number; an error is raised as the class it says it is."""
        self._sequence += 1
        self.send(frame(type_, self._sequence, properties, body))
        while True:
            answer = self.read()
            if answer.type in (DATA, CLOSED):
                self.arrived.append(answer)
                continue
            assert answer.sequence == self._sequence
            if answer.properties.get("status") == "error":
                raise error_of(answer)
            return answer

    def next_arrival(self, timeout: float = WAIT_S) -> RawFrame:
        if self.arrived:
            return self.arrived.pop(0)
        return self.read(timeout)

    def close(self) -> None:
        self._socket.close()


def error_of(answer: RawFrame) -> HeadraceError:
    properties = answer.properties
    return by_kind(properties.get("kind", ""))(
        properties["error"],
        code=properties["code"],
        retryable=properties.get("retryable") == "true",
    )


class FrameInbox(Inbox):
    def __init__(self, address: tuple[str, int], properties: dict[str, object]):
        self._socket = FrameSocket(address)
        self._properties = properties
        try:
            self._socket.ask(SUBSCRIBE, properties)
        except BaseException:
            self._socket.close()
            raise

    def get(self, timeout: float = WAIT_S) -> Got:
        arrived = self._socket.next_arrival(timeout)
        properties = arrived.properties
        if arrived.type == CLOSED:
            raise error_of(arrived)
        assert arrived.type == DATA
        topic, partition = properties["topic"], int(properties["partition"])
        key = properties["key"].encode() if "key" in properties else None
        if "key64" in properties:
            key = base64.b64decode(properties["key64"])
        id = properties.get("id")
        return Got(
            arrived.body,
            arrived.sequence,
            topic,
            partition,
            int(properties.get("attempt", "1")),
            key,
            {name[2:]: text for name, text in properties.items() if name.startswith("h.")},
            UUID(id) if id else derive_id(topic_hash(topic), partition, arrived.sequence),
            arrived.timestamp,
            properties.get("lease"),
        )

    def _settle(self, type_: int, got: Got, properties: dict[str, object]) -> None:
        self._socket.ask(type_, {"lease": got.handle, "offset": got.offset, **properties})

    def ack(self, got: Got) -> None:
        self._settle(ACK, got, {})

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        options: dict[str, object] = {} if delay is None else {"delay": delay}
        self._settle(NACK, got, {"reason": reason, **options})

    def extend(self, got: Got, seconds: float | None = None) -> None:
        self._settle(EXTEND, got, {} if seconds is None else {"seconds": seconds})

    def close(self) -> None:
        names = ("topic", "subscription")
        self._socket.ask(
            UNSUBSCRIBE, {n: self._properties[n] for n in names if n in self._properties}
        )
        self._socket.close()


class FrameSession(Session):
    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._socket = FrameSocket(address)
        self._inboxes: list[FrameInbox] = []

    def _admin(self, operation: str, **arguments: Any) -> Any:
        body = json.dumps({"op": operation, **arguments}).encode()
        return json.loads(self._socket.ask(ADMIN, None, body).body)

    def create_topic(self, name: str, **settings: Any) -> None:
        self._socket.ask(CREATE_TOPIC, {"topic": name}, json.dumps(settings).encode())

    def delete_topic(self, name: str) -> None:
        self._admin("delete_topic", topic=name)

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        names = {f"h.{name}": text for name, text in (headers or {}).items()}
        key = options.pop("key", None)
        if isinstance(key, bytes):
            options["key64"] = base64.b64encode(key).decode()
        elif key is not None:
            options["key"] = key
        answer = self._socket.ask(PUBLISH, {"topic": topic, **names, **options}, value).properties
        assert answer["status"] == "success"
        offset = int(answer["offset"]) if "offset" in answer else None
        return Stored(offset, UUID(answer["id"]), answer.get("duplicate") == "true")

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        if isinstance(where, datetime):
            where = f"@{int(where.timestamp() * 1000)}"
        answer = self._socket.ask(FETCH, {"topic": topic, "offset": where})
        assert answer.type == BATCHES
        messages: list[Message] = []
        at = 0
        while at < len(answer.body):
            batch = parse(answer.body, at)
            assert batch is not None
            messages += batch.messages(topic, 0)
            at += batch.stored_bytes
        first = int(answer.properties["offset"])
        return [Got.of(message) for message in messages if message.offset >= first][:limit]

    def subscribe(self, topic: str) -> Inbox:
        return self._inbox({"topic": topic, "client_id": "raw"})

    def _inbox(self, properties: dict[str, object]) -> Inbox:
        inbox = FrameInbox(self._address, properties)
        self._inboxes.append(inbox)
        return inbox

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        properties = {"subscription": name, "topic": topic}
        if "start" in settings:
            properties["start_offset"] = settings.pop("start")
        self._socket.ask(CREATE_SUBSCRIPTION, properties, json.dumps(settings).encode())

    def delete_subscription(self, name: str, topic: str) -> None:
        self._socket.ask(DELETE_SUBSCRIPTION, {"subscription": name, "topic": topic})

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        self._socket.ask(CREATE_SUBSCRIPTION, {"subscription": name, "topic": topic})
        return self._inbox(
            {"subscription": name, "topic": topic, "prefetch": prefetch, "ack": "manual"}
        )

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        found: dict[str, Any] = self._admin("subscription", subscription=name, topic=topic)
        return found

    def seek(self, name: str, topic: str, to: Any) -> None:
        self._admin("seek", subscription=name, topic=topic, to=to)

    def dead_letters(self, name: str) -> list[DeadLetter]:
        return [
            documents.to_letter(item) for item in self._admin("dead_letters", subscription=name)
        ]

    def redrive(self, name: str) -> int:
        count: int = self._admin("redrive", subscription=name)["redriven"]
        return count

    def scheduled(self, topic: str) -> list[Scheduled]:
        return [documents.to_scheduled(item) for item in self._admin("scheduled", topic=topic)]

    def cancel(self, id: UUID) -> None:
        self._admin("cancel", id=str(id))

    def job(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self, f"_{verb}")(*arguments, **options)

    def _stage(self, topic: str, batch: Batch, **options: Any) -> str:
        return self._socket.ask(STAGE, {"topic": topic, **options}, batch.raw()).properties["piece"]

    def _commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        answer = self._admin("commit_staged", name=name, number=number, pieces=pieces)
        committed: bool = answer["committed"]
        return committed

    def _abort_staged(self, pieces: list[str]) -> None:
        self._admin("abort_staged", pieces=pieces)

    def _positions(self, topics: Any, at: Any = None) -> Any:
        return self._admin("positions", topics=topics, **({} if at is None else {"at": at}))

    def _wait_for(self, positions: Any, *, topics: Any = None, timeout: float) -> bool:
        more = {} if topics is None else {"topics": topics}
        answer = self._admin("wait_for", positions=positions, wait=timeout, **more)
        news: bool = answer["news"]
        return news

    def _advance(self, name: str, positions: Any, topic: str | None = None) -> None:
        more = {} if topic is None else {"topic": topic}
        self._admin("advance", subscription=name, positions=positions, **more)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox._socket.close()
        self._socket.close()


class BinaryProtocol(ServerFrontEnd):
    name = "binary"
    cannot: ClassVar = {STAY: "who uses a bare socket connects again"}

    def make_session(self) -> Session:
        return FrameSession(self.server.address)
