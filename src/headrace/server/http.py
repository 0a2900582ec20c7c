"""HTTP on its own port: one connection, its requests in order.

Publishes follow each other without waiting; everything else waits for what came before it, as on the
TCP port. What a request means is in ``routes``; this file is the socket, the order, authentication,
CORS and errors.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import cast

from headrace.errors import Forbidden, HeadraceError, Unauthenticated, kind_of
from headrace.server.flow import Outbox, Slot
from headrace.server.routing import Handler, RouteTable
from headrace.server.tcp import Hub, Session, keep_alive
from headrace.server.turns import Turns
from headrace.wire import http
from headrace.wire.http import HttpParser, Request

logger = logging.getLogger("headrace.server")
BODY_BYTES_MAX = 64 << 20
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/openapi.json")


class HttpConnection(asyncio.Protocol):
    """Also the home of a WebSocket once the client has asked for one."""

    def __init__(self, hub: Hub, site: Site):
        self.hub = hub
        self._site = site
        self._parser = HttpParser(BODY_BYTES_MAX)
        self.outbox: Outbox = None  # type: ignore[assignment]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._turns: Turns[Request | HeadraceError] = None  # type: ignore[assignment]
        self._tasks: set[asyncio.Task[None]] = set()
        self.session: Session | None = None
        """A WebSocket or an event stream that has taken the connection over."""
        self.authenticated = False
        self.closing = False
        self.peer = "?"

    # --- the socket -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outbox = Outbox(self._transport, asyncio.get_running_loop())
        self._turns = Turns(self.outbox, self._handle, _depends)
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

    @property
    def protocol(self) -> str:
        return "http" if self.session is None else self.session.protocol

    def data_received(self, data: bytes) -> None:
        try:
            if self.session is not None:
                self.session.feed(data)
                return
            for request in self._parser.feed(data):
                self._turns.add(request)
            if self._parser.expects_continue and not self.outbox.unanswered:
                self._parser.expects_continue = False
                self.outbox.write(http.CONTINUE)
            if self._parser.error is not None:
                self._turns.add(self._parser.error)
        except Exception:
            logger.exception("connection %s failed", self.peer)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.hub.left(self)
        self.outbox.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self.session is not None:
            self.session.lost()

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    def eof_received(self) -> bool:
        """A client that has said everything may still want its answers."""
        if self.outbox.unanswered and self.session is None:
            self.close()
            return True
        return False

    def close(self) -> None:
        """What is unanswered is answered, then the connection closes."""
        self.closing = True
        if self.session is not None and hasattr(self.session, "going_away"):
            self.session.going_away()
        if self.outbox.unanswered:
            self.outbox.on_idle = self._transport.close
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def take_rest(self) -> bytes:
        """What came behind the request that changed the protocol."""
        rest, self._parser.rest = self._parser.rest, None
        return rest or b""

    # --- requests ---------------------------------------------------------------------------
    def _handle(self, request: Request | HeadraceError) -> None:
        if self.closing:
            return
        if isinstance(request, HeadraceError):
            self.outbox.send(http.error_answer(request, kind_of(request), keep_alive=False))
            self.close()
            return
        cors: dict[str, str] = {}
        try:
            cors = self._site.cors(request)
            self._authenticate(request)
            self._dispatch(request, cors)
        except HeadraceError as error:
            self._answer_error(request, error, cors)

    def _authenticate(self, request: Request) -> None:
        if not self.hub.needs_token or request.path in OPEN_PATHS or request.method == "OPTIONS":
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not token and request.path.startswith(("/ws", "/stream/")):
            # A browser cannot set headers here; nothing of the address is ever logged.
            scheme, token = "bearer", request.query.get("token", "")
        if scheme.lower() != "bearer" or not self.hub.is_token(token.strip()):
            raise Unauthenticated("send 'Authorization: Bearer <token>' with the broker's token")

    def _dispatch(self, request: Request, cors: dict[str, str]) -> None:
        handler, parameters = self._site.find(request)
        result = handler(self, request, *parameters)
        if isinstance(result, bytes):
            self._finish(request, result, cors, None)
        elif inspect.isawaitable(result):
            slot = self.outbox.reserve(len(request.body) + 256)

            async def run() -> None:
                try:
                    content = await result
                except HeadraceError as error:
                    content = self._error(request, error, cors)
                except Exception:
                    logger.exception("%s %s failed", request.method, request.path)
                    content = self._error(
                        request,
                        HeadraceError("the broker made a mistake; its log says more", code="bug"),
                        cors,
                    )
                if content is not None:
                    self._finish(request, content, cors, slot)

            task = asyncio.get_running_loop().create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reserve(self, request: Request) -> Slot:
        """For a handler that answers by itself; see ``finish``."""
        return self.outbox.reserve(len(request.body) + 256)

    def _finish(
        self, request: Request, content: bytes, cors: dict[str, str], slot: Slot | None
    ) -> None:
        if request.method == "HEAD":
            content = content[: content.index(b"\r\n\r\n") + 4]
        if cors:
            lines = "".join(f"{name}: {value}\r\n" for name, value in cors.items())
            head, line_end, rest = content.partition(b"\r\n")
            content = head + line_end + lines.encode() + rest
        if slot is None:
            self.outbox.send(content)
        else:
            slot.fill(content)
        if not request.keep_alive and self.session is None:
            self.close()

    def _error(self, request: Request, error: HeadraceError, cors: dict[str, str]) -> bytes:
        headers = {}
        if error.code == "method_not_allowed":
            headers["Allow"] = ", ".join(self._site.methods(request.path))
        return http.error_answer(
            error, kind_of(error), keep_alive=request.keep_alive, headers=headers
        )

    def _answer_error(self, request: Request, error: HeadraceError, cors: dict[str, str]) -> None:
        self._finish(request, self._error(request, error, cors), cors, None)

    def publish_failed(self, request: Request, slot: Slot, error: HeadraceError) -> None:
        """Like an error that a handler raises, for one that answers into its slot."""
        self._finish(request, self._error(request, error, {}), self._site.cors(request), slot)

    def published(self, request: Request, slot: Slot, content: bytes) -> None:
        self._finish(request, content, self._site.cors(request), slot)


def _depends(request: Request | HeadraceError) -> bool:
    return isinstance(request, HeadraceError) or not (
        request.method == "POST" and request.path.startswith("/publish/")
    )


class Site:
    """The routes and the policy that all connections share."""

    def __init__(self, routes: RouteTable, allowed_origins: list[str] | None):
        self._routes = routes
        self._origins = allowed_origins

    def find(self, request: Request) -> tuple[Handler, list[str]]:
        return self._routes.find(request.method, request.path)

    def methods(self, path: str) -> list[str]:
        return self._routes.methods(path)

    def allows_origin(self, request: Request) -> bool:
        """A page of another site may not use a browser's reach to get here, unless it is listed."""
        origin = request.headers.get("origin")
        if origin is None:
            return True
        if self._origins is not None and ("*" in self._origins or origin in self._origins):
            return True
        host = request.headers.get("host", "")
        return origin.partition("://")[2] == host

    def cors(self, request: Request) -> dict[str, str]:
        origin = request.headers.get("origin")
        if origin is None:
            return {}
        if not self.allows_origin(request):
            if request.method == "OPTIONS" or request.path == "/ws":
                raise Forbidden(
                    f"pages of {origin} may not use this broker; see allowed_origins",
                    code="origin_not_allowed",
                )
            return {}
        if self._origins is None:
            return {}
        headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if request.method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = "GET, POST, PUT, PATCH, DELETE"
            headers["Access-Control-Allow-Headers"] = request.headers.get(
                "access-control-request-headers", "Content-Type"
            )
            headers["Access-Control-Max-Age"] = "600"
        return headers
