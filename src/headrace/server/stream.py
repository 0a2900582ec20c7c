"""Server-Sent Events: ``GET /stream/{topic}``, for clients that do not use a WebSocket.

Each message is an event. Its id holds the position in every partition, so a browser that reconnects (it
sends ``Last-Event-ID`` by itself) continues exactly after the last event: no message is lost or repeated,
as far as the log reaches back. The stream begins with an id without an event, so this holds before the
first message, too. A partition that the id does not name is new, and is read from its beginning. A
comment every 15 seconds keeps proxies from closing the connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import orjson

from headrace.broker.attaching import refollow
from headrace.broker.delivery import Delivery
from headrace.broker.follower import Follower
from headrace.broker.topic import Partition
from headrace.errors import HeadraceError, InvalidArgument
from headrace.model import (
    check_pattern,
    is_pattern,
    parse_position,
    pattern_matches,
    split_position,
)
from headrace.operations.arguments import PLACE
from headrace.operations.results import HeldSubscription
from headrace.operations.views import message_view
from headrace.server import schemas
from headrace.server.connection import Connection
from headrace.server.http import HttpSession
from headrace.server.members import MEMORY_FULL_S
from headrace.server.routes import CREATED, check_query
from headrace.server.routing import Parameter, Route
from headrace.server.session import Session
from headrace.server.writing import DeliveryWriter
from headrace.wire import http
from headrace.wire.http import Answer, Request

COMMENT_S = 15.0
AT_ONCE = 500
EVENT_ID_BYTES_MAX = 16 << 10
"""The id is sent with every event, and comes back in a header."""
NO_PARTITION = "-"
"""The id when there is no partition: a browser does not send an empty one."""
_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventStream(Session):
    """A follower that writes events. It has taken the connection over from HTTP."""

    protocol = "sse"

    def __init__(self, connection: Connection, topic: str):
        super().__init__(connection)
        self._positions: dict[str, int] = {}
        self._topic = topic
        self.follower: Follower | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writer: DeliveryWriter | None = None
        self._is_waiting = False
        """For memory."""

    def start(self, known: dict[str, int] | None, start: Any) -> None:
        """Begin at the positions of the last event, else at ``start``, else now."""
        engine = self.engine
        check_pattern(self._topic)
        self.connection.permissions.need_to_follow(self._topic)
        if not is_pattern(self._topic):
            with self.connection.permissions.owning():
                engine.topic_for_publish(self._topic)
        places = [
            (partition, self._place(partition, known, start))
            for topic in engine.topics
            if pattern_matches(self._topic, topic.name) and self._may_follow(topic.name)
            for partition in topic.partitions
        ]
        self._positions = {_key(partition): offset for partition, offset in places}
        if len(self._id()) > EVENT_ID_BYTES_MAX:
            raise _too_many()
        self.follower = engine.follow(self._topic, self, self._may_follow)
        for partition, offset in places:
            self.follower.move(partition, offset)
        self.outbox.on_writable = self.follower.wake
        self._writer = DeliveryWriter(self.outbox, engine.pace, self.follower.wake)
        self._timer = asyncio.get_running_loop().call_later(COMMENT_S, self._comment)

    def _may_follow(self, topic: str) -> bool:
        return self.connection.permissions.may("consume", topic)

    def held(self) -> Iterable[HeldSubscription]:
        return ({"topic": self._topic, "subscription": None, "in_flight": 0},)

    def access_changed(self) -> None:
        if self.follower is None:
            return
        if not is_pattern(self._topic) and not self._may_follow(self._topic):
            self.expel(self.connection.permissions.refusal("consume", self._topic))
        else:
            refollow(self.engine, self.follower)

    def expel(self, error: HeadraceError) -> None:
        if self.follower is not None:
            self.engine.unfollow(self.follower, error)

    def _place(self, partition: Partition, known: dict[str, int] | None, start: Any) -> int:
        log = partition.log
        if known is not None:
            offset = known.get(_key(partition), log.start_offset)
            # Beyond the end: the topic was created again, or it was in memory before a restart.
            return log.start_offset if offset > log.end_offset else offset
        if start is None:
            return log.end_offset
        position, time_ms = split_position(start)
        return self.engine.resolve(partition, position, time_ms=time_ms)

    def head(self) -> bytes:
        return b"retry: 1000\nid: %b\n\n" % self._id()

    # --- Sink -------------------------------------------------------------------------------
    def room(self) -> int:
        is_ready = self.outbox.may_deliver and not self.connection.closing
        if not is_ready or (self._writer is not None and self._writer.is_busy):
            return 0
        if not self.outbox.requests.has_room():
            if not self._is_waiting:
                self._is_waiting = True
                self.engine.call_later(MEMORY_FULL_S, self._look_again)
            return 0
        return AT_ONCE

    def _look_again(self) -> None:
        self._is_waiting = False
        if self.follower is not None:
            self.follower.wake()

    def deliver(self, delivery: Delivery) -> None:
        key = f"{delivery.topic}/{delivery.partition}"
        if key not in self._positions and len(self._id()) > EVENT_ID_BYTES_MAX:
            self.closed(_too_many())
            return
        assert self._writer is not None, "a follower delivers in a later turn than it was made"
        self._writer.write(delivery, self._encode)

    def _encode(self, delivery: Delivery) -> bytes:
        parts = []
        key = f"{delivery.topic}/{delivery.partition}"
        for message in delivery.messages():
            self._positions[key] = message.offset + 1
            data = orjson.dumps(message_view(message))
            if b"\n" in data or b"\r" in data:
                # JSON has line ends only between its tokens; in an event each line needs a prefix.
                data = _LINE_END.sub(b"\ndata: ", data)
            parts.append(b"id: %b\ndata: %b\n\n" % (self._id(), data))
        return b"".join(parts)

    def _id(self) -> bytes:
        parts = [f"{key}:{offset}" for key, offset in self._positions.items()]
        return (",".join(parts) or NO_PARTITION).encode()

    def closed(self, error: HeadraceError | None) -> None:
        if self._writer is not None:
            self._writer.flush()
        if error is not None:
            data = orjson.dumps(http.error_document(error))
            self.outbox.write(b"event: error\ndata: %b\n\n" % data)
            self.connection.close()

    # --- Session ------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        """The client has nothing to send here."""

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.follower is not None:
            self.engine.unfollow(self.follower)

    def _comment(self) -> None:
        if self.outbox.writable:
            self.outbox.write(b": alive\n\n")
        self._timer = asyncio.get_running_loop().call_later(COMMENT_S, self._comment)


def _key(partition: Partition) -> str:
    return f"{partition.topic}/{partition.number}"


def _too_many() -> InvalidArgument:
    return InvalidArgument(
        "there are more partitions than the id of an event can hold; follow fewer topics, or use "
        "a WebSocket",
        code="too_many_partitions",
    )


def parse_event_id(text: str | None) -> dict[str, int] | None:
    """The position in every partition after the last event; None without an id."""
    if text is None:
        return None
    positions: dict[str, int] = {}
    for part in text.split(",") if text != NO_PARTITION else ():
        key, colon, offset = part.rpartition(":")
        is_number = offset.isascii() and offset.isdigit() and len(offset) <= 19
        if not colon or not is_number or "/" not in key:
            raise InvalidArgument(f"{text[:80]!r} is not an id of this stream", code="bad_event_id")
        positions[key] = int(offset)
    return positions


def on_stream(session: HttpSession, request: Request, topic: str) -> Answer:
    query = check_query(request, "from", "client_id")
    known = parse_event_id(request.headers.get("last-event-id"))
    start = parse_position(query["from"]) if "from" in query else None
    if is_pattern(topic) and isinstance(start, int):
        raise InvalidArgument("from is 'earliest', 'latest' or a time, or an offset of one topic")
    stream = EventStream(session.connection, topic)
    no_topic = session.engine.topics.lacks(topic)
    stream.start(known, start)
    session.hand_over()
    session.connection.session = stream
    headers = {"X-Accel-Buffering": "no"} | ({CREATED: "topic"} if no_topic else {})
    return Answer(200, stream.head(), "text/event-stream", headers, endless=True)


ROUTES = [
    Route(
        "GET", "/stream/{topic}", on_stream, "Follow a topic as Server-Sent Events", "consuming",
        (Parameter("from", "Where to begin; by default, now.", PLACE), schemas.CLIENT_ID,
         Parameter("Last-Event-ID", "Continue after this event.", schemas.STRING, "header")),
        None,
        {"200": {"description": "An endless stream of events.",
                 "content": {"text/event-stream": {"schema": schemas.STRING}}}},
        safe=False,
    ),
]  # fmt: skip
