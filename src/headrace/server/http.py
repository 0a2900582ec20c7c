"""HTTP on its own port: one connection, its requests in order.

Publishes follow each other without waiting; everything else waits for what came before it, as on the
TCP port, and until the client has read its earlier answers. What a request means is in ``routes``, who
may ask is in ``origins``; this file is the socket, the order, authentication and errors.

A connection ends in one of three ways. *In good order* (``close``): what is unanswered is answered
first. *After a request that was not read to its end*: the answer is sent, then what the client goes on
sending is thrown away for a while, because a reset would reach it before the answer. *At once*
(``abort``).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any, cast

from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    RequestTimeout,
    Unauthenticated,
    kind_of,
)
from headrace.log.interface import ReadPending, completed
from headrace.server.flow import Outbox, Slot
from headrace.server.origins import Origins
from headrace.server.routing import Handler, RouteTable
from headrace.server.schemas import OPEN_PATHS
from headrace.server.tcp import Hub, Session, keep_alive, own_mistake
from headrace.server.turns import Turns
from headrace.wire import http
from headrace.wire.http import HttpParser, KnownHeads, Request

logger = logging.getLogger("headrace.server")
BODY_BYTES_MAX = 64 << 20
LINGER_S = 2.0
STALLED_REQUEST_S = 60.0
"""Half a request is not kept for ever: who sends nothing more of it for so long is dropped."""
TOKEN_IN_ADDRESS = ("ws", "stream")
"""Where a browser cannot set headers. Nothing of the address is ever logged."""


class HttpConnection(asyncio.Protocol):
    """Also the home of a WebSocket once the client has asked for one."""

    def __init__(self, hub: Hub, site: Site):
        self.hub = hub
        self.site = site
        self._parser = HttpParser(BODY_BYTES_MAX, self._check_head, site.heads)
        self.outbox: Outbox = None  # type: ignore[assignment]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._turns: Turns[Request | HeadraceError] = None  # type: ignore[assignment]
        self._tasks: set[asyncio.Task[None]] = set()
        self.session: Session | None = None
        """A WebSocket or an event stream that has taken the connection over."""
        self.waiting: set[Callable[[], None]] = set()
        """Long polls; calling one ends its waiting. Nobody waits for a client that goes away."""
        self.closing = False
        self.leaving = False
        """The client has said that it says no more, or we have: not a time for long polls."""
        self._watch: asyncio.TimerHandle | None = None
        self._heard = False
        self._unread = False
        """The client may be in the midst of sending something that will not be read."""
        self.peer = "?"

    # --- the socket -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outbox = Outbox(self._transport, asyncio.get_running_loop())
        self._turns = Turns(self.outbox, self._handle, _depends, patient=True)
        self.outbox.on_idle = self._encourage
        hub = self.hub
        if hub.draining or len(hub.connections) >= hub.max_connections:
            hub.refused += 1
            self._transport.abort()
            return
        hub.accepted += 1
        hub.connections.add(self)
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else "?"
        keep_alive(transport.get_extra_info("socket"))
        self._look()

    def _look(self) -> None:
        """Now and then: does a request that has begun go on?"""
        if self.session is not None or self.closing:
            return
        if self._parser.is_inside and not self._heard and self.outbox.reading:
            self._turns.add(
                RequestTimeout("the rest of the request did not come", code="request_stalled")
            )
        self._heard = False
        self._watch = asyncio.get_running_loop().call_later(STALLED_REQUEST_S, self._look)

    @property
    def protocol(self) -> str:
        return "http" if self.session is None else self.session.protocol

    def data_received(self, data: bytes) -> None:
        try:
            if self.session is not None:
                self.session.feed(data)
            elif not self.closing:
                self._heard = True
                if self._turns.are_free and self._parser.is_between:
                    known = self.site.heads.look(data)
                    if known is not None and "express" in known[0].memo:
                        self._express(known[0], data[len(data) - known[1] :])
                        return
                for request in self._parser.feed(data):
                    self._turns.add(request)
                if self._parser.error is not None:
                    self._turns.add(self._parser.error)
                elif not self.outbox.unanswered:
                    self._encourage()
        except Exception:
            logger.exception("connection %s failed", self.peer)
            self._transport.abort()

    def _encourage(self) -> None:
        """Say to a client that asks first that it may send its body."""
        if self._parser.expects_continue and not self.closing:
            self._parser.expects_continue = False
            self.outbox.write(http.CONTINUE)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.hub.left(self)
        self.outbox.close()
        if self._watch is not None:
            self._watch.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self.session is not None:
            self.session.lost()

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    def eof_received(self) -> bool:
        """A client that has said everything may still want its answers; but it may also be gone."""
        self._stop_waiting()
        is_plain = self._transport.get_extra_info("sslcontext") is None
        if self.outbox.unanswered and self.session is None and is_plain:
            self.outbox.on_idle = self._transport.close
            return True
        return False

    def _stop_waiting(self) -> None:
        self.leaving = True
        for stop in tuple(self.waiting):
            stop()

    # --- ending -----------------------------------------------------------------------------
    def close(self) -> None:
        """What is unanswered is answered, then the connection closes."""
        self.closing = True
        self._stop_waiting()
        if self.outbox.unanswered:
            self.outbox.on_idle = self._leave
        else:
            self._leave()

    def _leave(self) -> None:
        going_away = getattr(self.session, "going_away", None)
        if self._unread or (going_away is not None and going_away()):
            self.linger()
        else:
            self._transport.close()

    def hang_up(self) -> None:
        """Everything has been said, on both sides."""
        self.closing = True
        self._transport.close()

    def linger(self) -> None:
        """Nothing more is said; the other side gets a little time to hear the last word."""
        self.closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def abort(self) -> None:
        self._transport.abort()

    def take_rest(self) -> bytes:
        """What came behind the request that changed the protocol."""
        rest, self._parser = self._parser.rest, _NO_MORE_HTTP
        return rest or b""

    # --- requests ---------------------------------------------------------------------------
    def _check_head(self, request: Request) -> None:
        """Nobody's body is kept before it is known that he may send one."""
        self.site.origins.admit(request)
        self._authenticate(request)

    def _handle(self, request: Request | HeadraceError) -> None:
        if self.closing:
            return
        if isinstance(request, HeadraceError):
            self._unread = True
            self.outbox.send(http.error_answer(request, kind_of(request), keep_alive=False))
            self.close()
            return
        cors: dict[str, str] = {}
        try:
            way = request.memo.get("way")
            if way is None:  # else the very same head was admitted before
                cors = self.site.origins.admit(request)
                self._authenticate(request)
                self._check_readable(request)
                way = request.memo["way"] = (*self.site.find(request), cors)
            handler, parameters, cors = way
            self._dispatch(request, handler, parameters, cors)
        except HeadraceError as error:
            self._unread = request.refusal is not None
            self._answer_error(request, error, cors)
        except Exception:
            self._answer_error(request, own_mistake(self.peer), cors)

    def _express(self, request: Request, body: bytes) -> None:
        """Another of many that differ in their bodies only: the way to its handler is known."""
        try:
            handler, parameter = request.memo["express"]
            handler(self, request, parameter, body)
        except HeadraceError as error:
            self._answer_error(request, error, {})
        except Exception:
            self._answer_error(request, own_mistake(self.peer), {})

    def _authenticate(self, request: Request) -> None:
        if not self.hub.needs_token or request.path in OPEN_PATHS or request.method == "OPTIONS":
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not token and request.words[0] in TOKEN_IN_ADDRESS:
            scheme, token = "bearer", request.query.get("token", "")
        if scheme.lower() != "bearer" or not self.hub.is_token(token.strip()):
            raise Unauthenticated("send 'Authorization: Bearer <token>' with the broker's token")

    @staticmethod
    def _check_readable(request: Request) -> None:
        if request.refusal is not None:
            raise request.refusal
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidArgument(
                "bodies are not compressed here; a topic may be", code="unsupported_media_type"
            )

    def _dispatch(
        self, request: Request, handler: Handler, parameters: list[str], cors: dict[str, str]
    ) -> None:
        result: Any
        try:
            result = handler(self, request, *parameters)
        except ReadPending:  # it has done nothing yet: call it again when the log has the records
            result = completed(lambda: handler(self, request, *parameters))
        if result is None:
            return  # it answers by itself
        if isinstance(result, bytes):
            self._finish(request, result, cors, None)
        elif inspect.isawaitable(result):
            slot = self.reserve(request)

            async def run() -> None:
                try:
                    content: bytes | None = await result
                except HeadraceError as error:
                    content = self._error(request, error)
                except Exception:
                    content = self._error(request, own_mistake(self.peer))
                if content is None:  # it has answered by itself
                    slot.fill(b"")
                else:
                    self._finish(request, content, cors, slot)

            task = asyncio.get_running_loop().create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reserve(self, request: Request) -> Slot:
        """For a handler that answers by itself; see ``published`` and ``publish_failed``."""
        return self.outbox.reserve(len(request.body) + 256)

    def _finish(
        self, request: Request, content: bytes, cors: dict[str, str], slot: Slot | None
    ) -> None:
        if request.method == "HEAD":
            content = content[: content.index(b"\r\n\r\n") + 4]
        extra = cors
        if request.version == "1.0" and request.keep_alive:
            extra = {**cors, "Connection": "keep-alive"}
        if extra:
            content = http.with_headers(content, extra)
        is_last = not request.keep_alive and self.session is None
        if is_last:
            self.closing = True
        if slot is None:
            self.outbox.send(content)
        else:
            slot.fill(content)
        if is_last:
            self.close()

    def _error(self, request: Request, error: HeadraceError) -> bytes:
        headers = {}
        if error.code == "method_not_allowed":
            headers["Allow"] = ", ".join(self.site.methods(request))
        return http.error_answer(
            error, kind_of(error), keep_alive=request.keep_alive, headers=headers
        )

    def _answer_error(self, request: Request, error: HeadraceError, cors: dict[str, str]) -> None:
        self._finish(request, self._error(request, error), cors, None)

    def publish_failed(self, request: Request, slot: Slot, error: HeadraceError) -> None:
        """Like an error that a handler raises, for one that answers into its slot."""
        self.published(request, slot, self._error(request, error))

    def published(self, request: Request, slot: Slot, content: bytes) -> None:
        if "express" in request.memo:
            slot.fill(content)
        else:
            cors = self.site.origins.admit(request) if "origin" in request.headers else {}
            self._finish(request, content, cors, slot)


def _depends(request: Request | HeadraceError) -> bool:
    return isinstance(request, HeadraceError) or not (
        request.method == "POST" and request.words[0] == "publish"
    )


_NO_MORE_HTTP = HttpParser(0)
"""In the place of a parser that is not needed any more: ten thousand of them are 20 MB."""


class Site:
    """The routes and the policy that all connections share."""

    def __init__(self, routes: RouteTable, origins: Origins):
        self._routes = routes
        self.origins = origins
        self.heads = KnownHeads()

    def find(self, request: Request) -> tuple[Handler, list[str]]:
        return self._routes.find(request.method, request.words)

    def methods(self, request: Request) -> list[str]:
        return self._routes.methods(request.words)
