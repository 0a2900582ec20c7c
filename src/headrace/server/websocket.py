"""WebSocket: JSON messages both ways at ``/ws``, in the format of ``docs/protocol.md``.

The ``websockets`` library is the protocol core (sans-I/O, 370,000 small frames a second here; wsproto
managed 109,000, and picows wants the listening socket for itself). It checks the handshake, masks,
fragments, sizes, pings and closing. Compression is not offered, so there is no decompression bomb.

A frame holds one command or an array of commands. An error is always answered; a success is answered if
the command has a ``messageId``. Publishes are answered in order and count against the unanswered requests
that one client may have, as in every protocol. A message that goes to many subscribers is encoded and
framed once.

Frames, and the commands in them, run in the order in which they came. After a few milliseconds the rest waits
for later turns of the loop (``broker/pace.py``), and no more is read from the client meanwhile.

How it ends: a client that closes gets its close frame back. When the broker stops, it answers the
unanswered commands and closes with 1001. Data that is not WebSocket or not JSON text ends the connection
with the code that says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import Protocol, Side, State
from websockets.server import ServerProtocol

from headrace.broker.delivery import Delivery
from headrace.checking import shown
from headrace.contents import is_text
from headrace.errors import HeadraceError, InvalidArgument, QueueFull
from headrace.limits import COUNTED_BYTES_MIN
from headrace.model import Message, PublishOptions, Receipt
from headrace.operations import exact_json
from headrace.operations.views import CONTENT_TYPE, message_view
from headrace.server import schemas
from headrace.server.arguments import publish_options
from headrace.server.connection import Connection
from headrace.server.http import HttpSession
from headrace.server.hub import Hub
from headrace.server.members import WireSink
from headrace.server.routes import with_first_receipts
from headrace.server.routing import Route
from headrace.server.settling import deliveries_in, settle_each, settling, text_in
from headrace.server.subscribing import SubscribingSession
from headrace.server.views import Views, receipt_json, value_of
from headrace.wire.http import Request
from headrace.wire.websocket import PlainFrames

logger = logging.getLogger("headrace.server")
PING_S = 20.0
FRAME_BYTES_SPARE = 64 << 10
COMMANDS_PER_FRAME_MAX = 10_000
MESSAGE_ID_BYTES_MAX = 4 << 10


def text_frame(content: bytes) -> bytes:
    """An unmasked text frame."""
    size = len(content)
    if size < 126:
        return bytes((0x81, size)) + content
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2, "big") + content
    return b"\x81\x7f" + size.to_bytes(8, "big") + content


def frame_of(message: Message) -> bytes:
    return text_frame(orjson.dumps({"type": "message", **message_view(message)}))


_views: WeakKeyDictionary[Hub, Views] = WeakKeyDictionary()


def _new_views(hub: Hub) -> Views:
    views = _views[hub] = Views(lambda message: frame_of(message), hub.engine.budget)
    return views


class WebSocketSession(SubscribingSession):
    protocol = "websocket"
    hears_goodbye = True

    def __init__(self, connection: Connection, protocol: Protocol):
        super().__init__(connection)
        self._protocol = protocol
        self._frames = PlainFrames()
        self._views = _views.get(self.hub) or _new_views(self.hub)
        self._last_task: asyncio.Task[None] | None = None
        self._partial: bytearray | None = None
        self._waiting: deque[object] = deque()
        """What has come and has not run yet: frames as tuples (``PlainFrames.cut``), and commands."""
        self._is_held = False
        """No more is read until it has run."""
        self._is_broken = False
        self._ping = asyncio.get_running_loop().call_later(PING_S, self._send_ping)
        self._ponged = True
        self._unfinished = 0
        """Bytes that came since the last complete frame with commands."""

    # --- frames -----------------------------------------------------------------------------
    @property
    def _is_open(self) -> bool:
        return self._protocol.state is State.OPEN and not self.connection.closing

    def feed(self, data: bytes) -> None:
        self._unfinished += len(data)
        self._waiting.extend(self._frames.cut(data))
        if not self._is_held:
            self._run()
        if self._unfinished >= COUNTED_BYTES_MIN or self.outbox.incomplete.size:
            self._count_unfinished()

    def _run(self, is_piece: bool = False) -> None:
        """Run what waits, for a few milliseconds; the rest waits for later turns of the loop."""
        pace, waiting = self.engine.pace, self._waiting
        deadline = pace.deadline()
        while waiting and not self.outbox.closed:
            is_long = pace.is_past(deadline)
            if is_long or (not is_piece and pace.is_over(is_heavy=False)):
                if not self._is_held:
                    self._is_held = True
                    self.outbox.hold(True)
                pace.soon(self._run_piece, late=is_long)
                return
            item = waiting.popleft()
            if not isinstance(item, tuple):
                self._command(item)
            elif item[1] is False:
                waiting.extendleft(reversed(self._feed_library(item[0])))
            elif self._is_open or (item[1] is None and not self._is_broken):
                waiting.extendleft(reversed(self._commands_in(item[0])))
        self._flush()
        if self._is_held and not self.outbox.closed:
            self._is_held = False
            self.outbox.hold(False)
            self.outbox.rest()
        self._end_if_over()

    def _run_piece(self) -> None:
        self._run(is_piece=True)

    def _count_unfinished(self) -> None:
        """A large frame that has not come completely counts against the broker's memory."""
        size, incomplete = self._unfinished, self.outbox.incomplete
        refusal = incomplete.refusal(size - incomplete.size) if size > incomplete.size else None
        incomplete.set(size if size >= COUNTED_BYTES_MIN and not self.outbox.closed else 0)
        if refusal is not None and self._is_open:
            self._fail(None, refusal)
            self._break_off(1013, "the broker has no memory for this")
            self._flush()

    def _feed_library(self, data: bytes) -> list[tuple[bytes, None]]:
        """The texts that are complete now. They count although a close may have come with them."""
        protocol, texts = self._protocol, []
        was_open = self._is_open
        protocol.receive_data(data)
        for event in protocol.events_received():
            if not isinstance(event, Frame) or not was_open:
                continue
            if event.opcode is Opcode.BINARY:
                self._break_off(1003, "text frames only")
                break
            text = self._frame(event)
            if text is not None:
                texts.append((text, None))
        self._flush()
        return texts

    def _break_off(self, code: int, reason: str) -> None:
        """The client has broken a rule: nothing after that counts."""
        self._is_broken = True
        self._protocol.fail(code, reason)

    def _end_if_over(self) -> None:
        protocol = self._protocol
        if protocol.eof_sent:
            self._memberships.leave_all()
            if protocol.close_rcvd is not None:  # both sides have closed
                self.connection.hang_up()
            elif not self.connection.closing:
                self.connection.linger()

    def _flush(self) -> None:
        data = b"".join(self._protocol.data_to_send())
        if self._protocol.state is State.OPEN:
            self.outbox.write(data)
        else:
            self._memberships.leave_all()
            self.outbox.end(data)  # with a close frame, and nothing comes after that

    def _frame(self, frame: Frame) -> bytes | None:
        """The text that is complete with this frame."""
        if frame.opcode is Opcode.PONG:
            self._ponged = True
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            if frame.fin and self._partial is None:
                return bytes(frame.data)
            if self._partial is None:
                self._partial = bytearray()
            self._partial += frame.data
            if frame.fin:
                whole, self._partial = bytes(self._partial), None
                return whole
        return None

    def _send_ping(self) -> None:
        if not self._ponged:
            self.connection.abort()  # it has not answered the last one
            return
        if self._is_open:
            self._ponged = False
            self._protocol.send_ping(b"")
            self._flush()
            self._ping = asyncio.get_running_loop().call_later(PING_S, self._send_ping)

    def say_goodbye(self) -> bool:
        """Close with 1001; the client answers that, unless it has closed already."""
        if self._protocol.state is not State.OPEN:
            return False
        self._memberships.leave_all()
        self._protocol.send_close(1001, "the broker is stopping")
        self._flush()
        return True

    def lost(self) -> None:
        self._ping.cancel()
        super().lost()

    def expel(self, error: HeadraceError) -> None:
        """1008: the client breaks a rule; here, that it must be logged in."""
        self._fail(None, error)
        self._memberships.leave_all()
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1008, error.code)
            self._flush()
        self.connection.close()

    # --- commands ---------------------------------------------------------------------------
    def _commands_in(self, content: bytes) -> list[object]:
        self._unfinished = 0
        if self.outbox.incomplete.size:
            self.outbox.incomplete.clear()  # it is complete now, and counts as a request
        try:
            commands = exact_json.loads(content)
        except InvalidArgument as error:
            if is_text(content):
                self._fail(None, error)
            else:
                self._break_off(1007, "a text frame is UTF-8")
            return []
        many = commands if isinstance(commands, list) else [commands]
        if len(many) > COMMANDS_PER_FRAME_MAX:
            self._fail(
                None,
                InvalidArgument(f"at most {COMMANDS_PER_FRAME_MAX} commands in one frame"),
            )
            return []
        return many

    def _command(self, command: object) -> None:
        message_id = None
        try:
            if not isinstance(command, dict):
                raise InvalidArgument("a command is a JSON object", code="invalid_json")
            message_id = _message_id(command)
            if self.connection.is_metered:
                self.connection.charge(requests=1)
            kind = command.get("type")
            handler = TYPES.get(kind) if isinstance(kind, str) else None
            if handler is None:
                raise InvalidArgument(
                    f"there is no type {shown(kind)}; the types are {', '.join(sorted(TYPES))}",
                    code="unknown_command",
                )
            handler(self, command, message_id)
        except HeadraceError as error:
            missing = error.missing_topic if isinstance(error, QueueFull) else ""
            if missing and self.engine.cluster is not None:
                self.connection.start(self._create_first(missing, command, message_id))
            else:
                self._fail(message_id, error)
        except Exception:
            self._fail(message_id, self.connection.bug())

    async def _create_first(self, topic: str, command: object, message_id: object) -> None:
        """With several nodes: the command needs a topic that all of them have to know."""
        assert self.engine.cluster is not None
        try:
            await self.engine.cluster.ensure(topic)
        except HeadraceError as error:
            self._fail(message_id, error)
        except Exception:
            self._fail(message_id, self.connection.bug())
        else:
            self._command(command)

    def _answer(self, message_id: object, document: dict[str, Any]) -> bytes:
        """A success; empty if the client did not ask for an answer."""
        if message_id is None or self._protocol.state is not State.OPEN:
            return b""
        return text_frame(exact_json.dumps({**document, "messageId": message_id}))

    def _error(self, message_id: object, error: HeadraceError) -> bytes:
        if self._protocol.state is not State.OPEN:
            return b""
        document = {
            "type": "error",
            "messageId": message_id,
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
        }
        return text_frame(exact_json.dumps(document))

    def _ok(self, message_id: object, document: dict[str, Any]) -> None:
        self.outbox.write(self._answer(message_id, document))

    def _fail(self, message_id: object, error: HeadraceError) -> None:
        self.outbox.write(self._error(message_id, error))

    def _in_turn(self, message_id: object, work: Callable[[], dict[str, Any]]) -> None:
        """At once, unless an earlier command is still under way."""
        if self._last_task is None or self._last_task.done():
            self._ok(message_id, work())
            return

        async def wait() -> dict[str, Any]:
            return work()

        self._later(message_id, wait)

    def _later(
        self, message_id: object, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> None:
        """Answer when the work is done; one command after the other."""
        before = self._last_task

        async def run() -> bytes:
            if before is not None and not before.done():
                await asyncio.wait([before])
            return self._answer(message_id, await work())

        self._last_task = self.connection.answer_later(
            run(), self.outbox.reserve().fill, lambda error: self._error(message_id, error)
        )

    # --- publishing -------------------------------------------------------------------------
    def on_publish(self, command: dict[str, Any], message_id: object) -> None:
        topic = _topic(command)
        if "data" not in command:
            raise InvalidArgument("a publish has 'data'", code="missing_argument")
        headers: dict[str, str] = {}
        options: PublishOptions = {}
        if command.keys() <= _PLAIN:  # as most are
            value = value_of(command["data"], None, headers)
        else:
            headers, encoding = _headers(command), command.get("encoding")
            value = value_of(command["data"], encoding, headers)
            if encoding is not None:
                headers.setdefault(CONTENT_TYPE, "application/octet-stream")
            options = _options(command)
        try:
            publish = self.publishing.message(topic, value, headers, options, gather=True)
        except HeadraceError as error:  # answered in its place, like every publish
            self.outbox.send(self._error(message_id, error))
            return
        slot = self.outbox.reserve(len(value) + 256)

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(self._error(message_id, error))
            else:
                with_first_receipts(self.engine, receipts, published)

        def published(receipts: list[Receipt]) -> None:
            if message_id is None or self._protocol.state is not State.OPEN:
                slot.fill(b"")
            else:
                slot.fill(_published(receipts[0], message_id))

        self.connection.publish(publish, done)

    # --- subscribing ------------------------------------------------------------------------
    def on_subscribe(self, command: dict[str, Any], message_id: object) -> None:
        topic = _topic(command)
        if command.get("group") is None:
            self._in_turn(message_id, lambda: self._follow(topic))
            return
        group, ack = text_in(command, "group", ""), text_in(command, "ack", "auto")
        prefetch = command.get("prefetch", 100)
        start = command.get("start", "earliest")
        if isinstance(start, bool) or not isinstance(start, (str, int)):
            raise InvalidArgument(
                "start is 'earliest', 'latest', an offset or a time", code="invalid_offset"
            )
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):
            raise InvalidArgument("prefetch is a whole number")
        if ack not in ("auto", "manual"):
            raise InvalidArgument("ack is 'auto' or 'manual'")
        self._later(message_id, lambda: self._join(topic, group, start, prefetch, ack == "auto"))

    def _follow(self, topic: str) -> dict[str, Any]:
        sink = self._memberships.follow(topic)
        created = {"topic_created": True} if sink.topic_created else {}
        return {"type": "subscribed", "topic": topic, **created}

    async def _join(
        self, topic: str, group: str, start: Any, prefetch: int, auto: bool
    ) -> dict[str, Any]:
        arguments = {"subscription": group, "topic": topic, "start": start}
        made = await self.connection.call("create_subscription", arguments)
        subscription = self.engine.subscription(group, topic)
        name = self.connection.client_id or self.connection.peer
        self._memberships.join(subscription, name, prefetch, auto)
        created = {"topic_created": True} if made.get("topic_created") else {}
        return {"type": "subscribed", "topic": topic, "group": group, **created}

    def on_unsubscribe(self, command: dict[str, Any], message_id: object) -> None:
        topic = _topic(command)
        group = None if command.get("group") is None else text_in(command, "group", "")

        def leave() -> dict[str, Any]:
            self._memberships.leave(topic, group)
            return {"type": "unsubscribed", "topic": topic}

        self._in_turn(message_id, leave)

    def _delivered(self, sink: WireSink, delivery: Delivery) -> bytes:
        if delivery.lease is None and delivery.attempts == 1:
            return self._views.of(delivery)
        lease = delivery.lease
        parts = []
        for message in delivery.messages():
            token = None if lease is None else f"{lease.id}.{message.offset}"
            view = {"type": "message", **message_view(message, delivery=token)}
            if sink.subscription is not None:
                view["group"] = sink.subscription.name
            parts.append(text_frame(orjson.dumps(view)))
        return b"".join(parts)

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        if error is not None:
            self._fail(None, error)

    # --- settling ---------------------------------------------------------------------------
    def _settle(self, verb: str, command: dict[str, Any], message_id: object) -> None:
        settle, deliveries = settling(verb, command), deliveries_in(command)
        stale = settle_each(deliveries, settle, self._memberships.of_lease)
        self._ok(message_id, {"type": f"{verb}ed", **({"stale": stale} if stale else {})})

    def on_ack(self, command: dict[str, Any], message_id: object) -> None:
        self._settle("ack", command, message_id)

    def on_nack(self, command: dict[str, Any], message_id: object) -> None:
        self._settle("nack", command, message_id)

    def on_extend(self, command: dict[str, Any], message_id: object) -> None:
        self._settle("extend", command, message_id)

    def on_ping(self, command: dict[str, Any], message_id: object) -> None:
        self.outbox.write(text_frame(exact_json.dumps({"type": "pong", "messageId": message_id})))


TYPES: dict[str, Callable[[WebSocketSession, dict[str, Any], object], None]] = {
    name.removeprefix("on_"): handler
    for name, handler in vars(WebSocketSession).items()
    if name.startswith("on_")
}
_TEXTS = ("key", "key64", "id", "to", "idempotency_key")
_TIMES = ("delay", "deliver_at", "ttl")
_KINDS: list[tuple[tuple[str, ...], tuple[type, ...], str]] = [
    (_TEXTS, (str,), "a string"),
    (("partition",), (int,), "a number"),
    (_TIMES, (int, float, str), "a number, or text with a unit"),
]


def _message_id(command: dict[str, Any]) -> object:
    """What the answer repeats. It may be any JSON, but must fit into the answer."""
    message_id = command.get("messageId")
    if isinstance(message_id, (dict, list)):
        size = len(
            exact_json.dumps([[message_id]])
        )  # as deep as it will be in the answer, and more
    else:
        size = len(message_id) if isinstance(message_id, str) else 0
    if size > MESSAGE_ID_BYTES_MAX:
        raise InvalidArgument(f"a messageId has at most {MESSAGE_ID_BYTES_MAX} bytes")
    return message_id


def _topic(command: dict[str, Any]) -> str:
    topic = command.get("topic")
    if not isinstance(topic, str):
        raise InvalidArgument("a command has a 'topic'", code="missing_argument")
    return topic


def _headers(command: dict[str, Any]) -> dict[str, str]:
    headers = command.get("headers")
    if headers is None:
        return {}
    if not isinstance(headers, dict) or not all(isinstance(v, str) for v in headers.values()):
        raise InvalidArgument("headers are an object of strings", code="invalid_headers")
    return dict(headers)


_PLAIN = {"type", "topic", "data", "messageId"}


def _options(command: dict[str, Any]) -> PublishOptions:
    options = {}
    for names, kinds, said in _KINDS:
        for name in names:
            value = command.get(name)
            if value is None:
                continue
            no_key = name == "idempotency_key" and not value
            if isinstance(value, bool) or not isinstance(value, kinds) or no_key:
                raise InvalidArgument(f"{name} is {said}, not {shown(value)}")
            options[name] = str(value)
    return publish_options(options)


def _published(receipt: Receipt, message_id: object) -> bytes:
    content, answered = receipt_json(receipt)[1:-1], exact_json.dumps(message_id)
    return text_frame(b'{"type":"published",%b,"messageId":%b}' % (content, answered))


_HANDSHAKE = ("host", "connection", "upgrade", "origin")


def on_websocket(session: HttpSession, request: Request) -> None:
    """Take the connection over after a valid handshake."""
    connection = session.connection
    protocol = ServerProtocol(logger=_QUIET)
    lines = ["GET /ws HTTP/1.1"]
    lines += [
        f"{name}: {value}"
        for name, value in request.headers.items()
        if name in _HANDSHAKE or name.startswith("sec-websocket-")
    ]
    protocol.receive_data(("\r\n".join(lines) + "\r\n\r\n").encode())
    handshake = next(
        (event for event in protocol.events_received() if isinstance(event, Handshake)), None
    )
    if handshake is None:
        raise InvalidArgument("this is not a WebSocket handshake", code="bad_request")
    response = protocol.accept(handshake)
    other = request.headers.get("sec-websocket-version", "13") != "13"
    if response.status_code == 426 or other:
        raise InvalidArgument(
            "this path is for WebSockets: send an Upgrade request", code="not_a_websocket"
        )
    if response.status_code != 101:
        raise InvalidArgument("the WebSocket handshake is invalid", code="bad_request")
    protocol.send_response(response)
    for chunk in protocol.data_to_send():
        if chunk:
            connection.outbox.write(chunk)
    # A new protocol object: that of the handshake would keep all its headers.
    frames = Protocol(
        Side.SERVER,
        # A value that is not text travels as base64.
        max_size=connection.hub.engine.max_message_size * 4 // 3 + FRAME_BYTES_SPARE,
        logger=_QUIET,
    )
    rest = session.hand_over()
    websocket = connection.session = WebSocketSession(connection, frames)
    if rest:
        websocket.feed(rest)


_QUIET = logging.getLogger("headrace.server.websocket")
_QUIET.setLevel(logging.WARNING)

ROUTES = [
    Route(
        "GET", "/ws", on_websocket, "WebSocket", "consuming", (), None,
        {"101": {"description": "Speak the protocol of docs/protocol.md."},
         **schemas.answers("426", schemas.ref("Error"), "Upgrade.")},
        safe=False,
    ),
]  # fmt: skip
