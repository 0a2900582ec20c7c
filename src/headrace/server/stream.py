"""Server-Sent Events: ``GET /stream/{topic}``, for those who cannot or will not use a WebSocket.

Each message is an event whose id says where every partition stands, so a browser that reconnects (it
sends ``Last-Event-ID`` by itself) goes on exactly behind what it has seen: nothing missed, nothing
twice, as far as the log reaches back. A comment every 15 seconds keeps proxies from giving up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from headrace.broker.delivery import Delivery
from headrace.broker.follower import Follower
from headrace.errors import HeadraceError, InvalidArgument
from headrace.model import is_pattern
from headrace.server import schemas
from headrace.server.http import HttpConnection
from headrace.server.operations import parse_position
from headrace.server.routes import check_query
from headrace.server.routing import Parameter, Route
from headrace.server.views import message_view
from headrace.wire import http
from headrace.wire.http import Request

COMMENT_S = 15.0
AT_ONCE = 500


class EventStream:
    """A follower that writes events. It has taken the connection over."""

    protocol = "sse"

    def __init__(self, connection: HttpConnection, topic: str):
        self._connection = connection
        self._outbox = connection.outbox
        self._outbox.on_writable = self._wake
        self._positions: dict[str, int] = {}
        self._topic = topic
        self.follower: Follower | None = None
        self._timer = asyncio.get_running_loop().call_later(COMMENT_S, self._comment)

    def start(self, positions: dict[str, int], start: Any) -> None:
        engine = self._connection.hub.engine
        follower = engine.follow(self._topic, self)
        self.follower = follower
        for topic in engine.topics:
            for partition in topic.partitions:
                key = f"{topic.name}/{partition.number}"
                if not follower.follows(topic.name, partition.number):
                    continue
                offset = positions.get(key)
                if offset is None and start is not None:
                    offset = engine.resolve(partition, start)
                if offset is not None:
                    follower.move(partition, min(offset, partition.log.end_offset))
                self._positions[key] = follower.place(topic.name, partition.number)

    # --- Sink -------------------------------------------------------------------------------
    def room(self) -> int:
        return AT_ONCE if self._outbox.writable and not self._outbox.closed else 0

    def deliver(self, delivery: Delivery) -> None:
        parts = []
        key = f"{delivery.topic}/{delivery.partition}"
        for message in delivery.messages():
            self._positions[key] = message.offset + 1
            # JSON has line ends only between its tokens; an event's data has them as further lines.
            data = orjson.dumps(message_view(message)).replace(b"\n", b"\ndata: ")
            parts.append(b"id: %b\ndata: %b\n\n" % (self._id(), data))
        self._outbox.write(b"".join(parts))

    def _id(self) -> bytes:
        return ",".join(f"{key}:{offset}" for key, offset in self._positions.items()).encode()

    def closed(self, error: HeadraceError | None) -> None:
        if error is not None:
            data = orjson.dumps(http.error_document(error))
            self._outbox.write(b"event: error\ndata: %b\n\n" % data)
        self._connection.close()

    # --- Session ------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        """A client has nothing more to say here."""

    def lost(self) -> None:
        self._timer.cancel()
        if self.follower is not None:
            self._connection.hub.engine.unfollow(self.follower)

    def _wake(self) -> None:
        if self.follower is not None:
            self.follower.wake()

    def _comment(self) -> None:
        self._outbox.write(b": alive\n\n")
        self._timer = asyncio.get_running_loop().call_later(COMMENT_S, self._comment)


def parse_event_id(text: str) -> dict[str, int]:
    """Where every partition stood at the last event."""
    positions: dict[str, int] = {}
    for part in text.split(",") if text else ():
        key, colon, offset = part.rpartition(":")
        if not colon or not offset.isdigit() or "/" not in key or len(offset) > 19:
            raise InvalidArgument(f"{text[:80]!r} is not an id of this stream", code="bad_event_id")
        positions[key] = int(offset)
    return positions


def on_stream(connection: HttpConnection, request: Request, topic: str) -> None:
    query = check_query(request, "from")
    positions = parse_event_id(request.headers.get("last-event-id", ""))
    start = None
    if "from" in query:
        start = parse_position(query["from"])
        if not isinstance(start, (str, int)) or (is_pattern(topic) and isinstance(start, int)):
            raise InvalidArgument("from is 'earliest', 'latest' or an offset of one topic")
    stream = EventStream(connection, topic)
    try:
        stream.start(positions, start)
    except HeadraceError:
        stream.lost()
        raise
    connection.session = stream
    connection.outbox.send(
        http.stream_head("text/event-stream", {"X-Accel-Buffering": "no"}) + b"retry: 1000\n\n"
    )


ROUTES = [
    Route(
        "GET", "/stream/{topic}", on_stream, "Follow a topic as Server-Sent Events", "consuming",
        (Parameter("from", "earliest, latest or an offset; else from now on.", schemas.STRING),
         Parameter("Last-Event-ID", "Go on behind this event.", schemas.STRING, "header")),
        None,
        {"200": {"description": "Events without end.",
                 "content": {"text/event-stream": {"schema": schemas.STRING}}}},
    ),
]  # fmt: skip
