"""WebSocket: JSON messages both ways at ``/ws``, in the format of ``docs/protocol.md``.

The protocol core is the ``websockets`` library's (sans-I/O, 370,000 small frames a second here; wsproto
managed 109,000, and picows wants the listening socket for itself). It checks the handshake, masks,
fragments, UTF-8, sizes, pings and closing; compression is not offered, so there is nothing to bomb.

A frame holds one command or an array of commands. Successes are answered when the command brought a
``messageId``; errors always are. A message that goes to many subscribers is encoded and framed once.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from typing import Any

import orjson
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import State
from websockets.server import ServerProtocol

from headrace import limits
from headrace.broker.delivery import Delivery
from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import Message, Receipt
from headrace.server import schemas
from headrace.server.http import HttpConnection
from headrace.server.members import Memberships, WireSink
from headrace.server.operations import parse_position
from headrace.server.routes import number_in, parse_delivery
from headrace.server.routing import Route
from headrace.server.text import publish_arguments
from headrace.server.views import Views, message_view, receipt_view
from headrace.wire.http import Request

logger = logging.getLogger("headrace.server")
PING_S = 20.0
FRAME_BYTES_SPARE = 64 << 10
COMMANDS_PER_FRAME_MAX = 10_000


def text_frame(content: bytes) -> bytes:
    """An unmasked text frame."""
    size = len(content)
    if size < 126:
        return bytes((0x81, size)) + content
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2, "big") + content
    return b"\x81\x7f" + size.to_bytes(8, "big") + content


def _frame_of(message: Message) -> bytes:
    return text_frame(orjson.dumps({"type": "message", **message_view(message)}))


class WebSocketSession:
    protocol = "websocket"
    views = Views(_frame_of)

    def __init__(self, connection: HttpConnection, protocol: ServerProtocol):
        self._connection = connection
        self._hub = connection.hub
        self._engine = connection.hub.engine
        self._outbox = connection.outbox
        self._protocol = protocol
        self._memberships = Memberships(
            self._engine, self._outbox, self._deliver, self._subscription_closed
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._fragments: list[bytes] = []
        self._ping = asyncio.get_running_loop().call_later(PING_S, self._send_ping)
        self._ponged = True

    # --- frames -----------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._frame(event)
        self._flush()
        if protocol.close_expected():
            self._connection.close()

    def _flush(self) -> None:
        for chunk in self._protocol.data_to_send():
            if chunk:
                self._outbox.write(chunk)

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._ponged = True
        elif frame.opcode is Opcode.BINARY:
            self._protocol.fail(1003, "text frames only")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            if frame.fin and not self._fragments:
                self._text(bytes(frame.data))
                return
            self._fragments.append(bytes(frame.data))
            if frame.fin:
                whole = b"".join(self._fragments)
                self._fragments.clear()
                self._text(whole)

    def _send_ping(self) -> None:
        if not self._ponged:
            self._connection.abort()  # it has not answered the last one
            return
        self._ponged = False
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush()
        self._ping = asyncio.get_running_loop().call_later(PING_S, self._send_ping)

    def going_away(self) -> None:
        """The server stops: say so."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1001, "the broker is stopping")
            self._flush()

    def lost(self) -> None:
        self._ping.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        self._memberships.leave_all()

    # --- commands ---------------------------------------------------------------------------
    def _text(self, content: bytes) -> None:
        try:
            commands = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            self._fail(None, InvalidArgument(f"a frame is JSON: {error}", code="invalid_json"))
            return
        many = commands if isinstance(commands, list) else [commands]
        if len(many) > COMMANDS_PER_FRAME_MAX:
            self._fail(
                None,
                InvalidArgument(f"at most {COMMANDS_PER_FRAME_MAX} commands in one frame"),
            )
            return
        for command in many:
            message_id = command.get("messageId") if isinstance(command, dict) else None
            try:
                if not isinstance(command, dict):
                    raise InvalidArgument("a command is a JSON object", code="invalid_json")
                handler = TYPES.get(str(command.get("type")))
                if handler is None:
                    raise InvalidArgument(
                        f"there is no type {command.get('type')!r}; there are "
                        f"{', '.join(sorted(TYPES))}",
                        code="unknown_command",
                    )
                handler(self, command, message_id)
            except HeadraceError as error:
                self._fail(message_id, error)

    def _send(self, document: dict[str, Any]) -> None:
        self._outbox.write(text_frame(orjson.dumps(document)))

    def _ok(self, message_id: object, document: dict[str, Any]) -> None:
        if message_id is not None:
            self._send({**document, "messageId": message_id})

    def _fail(self, message_id: object, error: HeadraceError) -> None:
        self._send(
            {
                "type": "error",
                "messageId": message_id,
                "code": error.code,
                "message": error.message,
                "retryable": error.retryable,
            }
        )

    # --- publishing -------------------------------------------------------------------------
    def on_publish(self, command: dict[str, Any], message_id: object) -> None:
        topic = _topic(command)
        if "data" not in command:
            raise InvalidArgument("a publish has 'data'", code="missing_argument")
        if command.get("encoding") == "base64":
            value = _base64(command["data"])
        else:
            value = orjson.dumps(command["data"])
        options = {
            name: str(command[name]) for name in _PUBLISH_FIELDS if command.get(name) is not None
        }
        headers = command.get("headers")
        if headers is not None and not isinstance(headers, dict):
            raise InvalidArgument("headers are an object of texts", code="invalid_headers")
        if not options and not headers and command.get("encoding") is None:
            self._publish_plain(topic, value, message_id)
            return
        for name, text in (headers or {}).items():
            if not isinstance(text, str):
                raise InvalidArgument(f"header {name!r} is not a text", code="invalid_headers")
            options[f"h.{name}"] = text
        if command.get("encoding") == "base64":
            options.setdefault("h.content-type", "application/octet-stream")
        columns, how = publish_arguments(value, options, self._engine)

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                self._fail(message_id, error)
            else:
                self._ok(message_id, {"type": "published", **receipt_view(receipts[0])})

        self._engine.publish(topic, columns, done, **how)

    def _publish_plain(self, name: str, value: bytes, message_id: object) -> None:
        engine = self._engine
        if len(value) > engine.max_message_size:
            publish_arguments(value, {}, engine)  # raises, with the words that all use
        topic = engine.topic_for_publish(name)
        number = topic.next_partition() if len(topic.partitions) > 1 else 0

        def stored(entry: Append) -> None:
            if entry.error is not None:
                self._fail(message_id, entry.error)
            elif message_id is not None:
                receipt = Receipt(name, number, entry.first_offset, entry.timestamp)
                self._ok(message_id, {"type": "published", **receipt_view(receipt)})

        engine.append(topic, number, Append(Columns([value]), None, stored))

    # --- subscribing ------------------------------------------------------------------------
    def on_subscribe(self, command: dict[str, Any], message_id: object) -> None:
        topic, group = _topic(command), command.get("group")
        answer = {"type": "subscribed", "topic": topic}
        if group is None:
            self._memberships.follow(topic)
            self._ok(message_id, answer)
            return
        prefetch = command.get("prefetch", 100)
        auto = command.get("ack", "auto") == "auto"
        start = parse_position(command.get("start", "earliest"))
        if (
            not isinstance(group, str)
            or isinstance(prefetch, bool)
            or not isinstance(prefetch, int)
        ):
            raise InvalidArgument("group is a text, prefetch a whole number")

        async def join() -> None:
            try:
                broker = self._hub.operations.broker
                await broker.create_subscription(group, topic, start=start)
                subscription = self._engine.subscription(group, topic)
                self._memberships.join(subscription, self._connection.peer, prefetch, auto)
                self._ok(message_id, {**answer, "group": group})
            except HeadraceError as error:
                self._fail(message_id, error)

        task = asyncio.get_running_loop().create_task(join())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_unsubscribe(self, command: dict[str, Any], message_id: object) -> None:
        topic = _topic(command)
        self._memberships.leave(topic, command.get("group"))
        self._ok(message_id, {"type": "unsubscribed", "topic": topic})

    def _deliver(self, sink: WireSink, delivery: Delivery) -> None:
        if delivery.lease is None and delivery.attempts == 1:
            self._outbox.write(self.views.of(delivery))
            return
        lease = delivery.lease
        parts = []
        for message in delivery.messages():
            token = None if lease is None else f"{lease.id}.{message.offset}"
            view = {"type": "message", **message_view(message, delivery=token)}
            if sink.subscription is not None:
                view["group"] = sink.subscription.name
            parts.append(text_frame(orjson.dumps(view)))
        self._outbox.write(b"".join(parts))

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        if error is not None:
            self._fail(None, error)

    # --- settling ---------------------------------------------------------------------------
    def on_ack(self, command: dict[str, Any], message_id: object) -> None:
        for delivery in _deliveries(command):
            lease, offset = parse_delivery(delivery)
            self._memberships.of_lease(lease).ack(lease, offset)
        self._ok(message_id, {"type": "acked"})

    def on_nack(self, command: dict[str, Any], message_id: object) -> None:
        delay = _seconds(command, "delay", limits.DELAY_S_MAX)
        reason = str(command.get("reason", "nack"))[:1000]
        for delivery in _deliveries(command):
            lease, offset = parse_delivery(delivery)
            self._memberships.of_lease(lease).nack(lease, offset, delay, reason)
        self._ok(message_id, {"type": "nacked"})

    def on_extend(self, command: dict[str, Any], message_id: object) -> None:
        seconds = _seconds(command, "seconds", limits.ACK_TIMEOUT_S_MAX)
        for delivery in _deliveries(command):
            lease, _ = parse_delivery(delivery)
            self._memberships.of_lease(lease).extend(lease, seconds)
        self._ok(message_id, {"type": "extended"})

    def on_ping(self, command: dict[str, Any], message_id: object) -> None:
        self._send({"type": "pong", "messageId": message_id})


TYPES: dict[str, Callable[[WebSocketSession, dict[str, Any], object], None]] = {
    name.removeprefix("on_"): handler
    for name, handler in vars(WebSocketSession).items()
    if name.startswith("on_")
}
_PUBLISH_FIELDS = ("key", "id", "partition", "to", "delay", "deliver_at", "ttl", "idempotency_key")


def _topic(command: dict[str, Any]) -> str:
    topic = command.get("topic")
    if not isinstance(topic, str):
        raise InvalidArgument("a command has a 'topic'", code="missing_argument")
    return topic


def _deliveries(command: dict[str, Any]) -> list[object]:
    many = command.get("deliveries")
    return many if isinstance(many, list) else [command.get("delivery")]


def _seconds(command: dict[str, Any], name: str, high: float) -> float | None:
    return number_in(command, name, high)


def _base64(data: object) -> bytes:
    try:
        return base64.b64decode(str(data), validate=True)
    except ValueError:
        raise InvalidArgument("data is not base64", code="invalid_value") from None


def on_websocket(connection: HttpConnection, request: Request) -> None:
    """Take the connection over after a proper handshake."""
    protocol = ServerProtocol(
        max_size=connection.hub.engine.max_message_size + FRAME_BYTES_SPARE, logger=_QUIET
    )
    lines = [f"GET {request.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    protocol.receive_data(("\r\n".join(lines) + "\r\n\r\n").encode())
    handshake = next(
        (event for event in protocol.events_received() if isinstance(event, Handshake)), None
    )
    if handshake is None:
        raise InvalidArgument("this is where WebSockets connect: upgrade", code="not_a_websocket")
    response = protocol.accept(handshake)
    if response.status_code != 101:
        raise InvalidArgument(
            "this is where WebSockets connect: send a proper upgrade request",
            code="not_a_websocket",
        )
    protocol.send_response(response)
    for chunk in protocol.data_to_send():
        if chunk:
            connection.outbox.write(chunk)
    session = WebSocketSession(connection, protocol)
    connection.session = session
    rest = connection.take_rest()
    if rest:
        session.feed(rest)


_QUIET = logging.getLogger("headrace.server.websocket")
_QUIET.setLevel(logging.WARNING)

ROUTES = [
    Route(
        "GET", "/ws", on_websocket, "WebSocket", "consuming", (), None,
        {"101": {"description": "Speak the protocol of docs/protocol.md."},
         **schemas.answers("426", schemas.ref("Error"), "Upgrade.")},
    ),
]  # fmt: skip
