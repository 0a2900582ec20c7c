"""HTTP on its own port: the session that reads requests and writes answers.

Publishes follow each other without waiting; any other request waits for those before it, as on the TCP
port, and until the client has read its earlier answers. ``routes`` and ``operation_routes`` say what a
request means, ``origins`` which web pages may send it.

Clients that publish send the same head again and again. Everything that follows from the head alone is
found out once and kept in ``Request.memo``, which all requests with the same head share: that it is
admitted, its route, the headers of its answer (CORS), and what it says about a publish.
"""

from __future__ import annotations

import asyncio

from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    RequestTimeout,
    Unauthenticated,
    kind_of,
)
from headrace.log.interface import ReadPending, completed
from headrace.server.connection import Connection, RequestSession
from headrace.server.flow import Slot
from headrace.server.schemas import OPEN_PATHS
from headrace.wire import http
from headrace.wire.http import Answer, HttpParser, Request

BODY_BYTES_MAX = 64 << 20
STALLED_REQUEST_S = 60.0
"""A client that sends nothing more of an incomplete request for this long is dropped."""
TOKEN_IN_ADDRESS = ("ws", "stream")
"""Paths for which a browser cannot set headers. Addresses are never logged."""


class HttpSession(RequestSession[Request]):
    protocol = "http"

    def __init__(self, connection: Connection):
        self._http = HttpParser(BODY_BYTES_MAX, self._admit, connection.hub.known_heads)
        super().__init__(connection, self._http)
        self._heard = False
        self._watch = asyncio.get_running_loop().call_later(STALLED_REQUEST_S, self._look)

    # --- in ---------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        self._heard = True
        known = self._http.known(data)
        if known is not None:
            self._requests.add(known, not known.publishes)
            return
        super().feed(data)
        if self._http.expects_continue:
            if self.outbox.busy:
                self.outbox.on_idle = self._encourage
            else:
                self._encourage()

    def _encourage(self) -> None:
        """Tell a client that asked first that it may send its body."""
        self.outbox.on_idle = None
        if self._http.expects_continue and not self.connection.closing:
            self._http.expects_continue = False
            self.outbox.write(http.CONTINUE)

    def _look(self) -> None:
        """Now and then: does an incomplete request go on?"""
        if self.connection.session is not self or self.connection.closing:
            return
        if self._http.is_inside and not self._heard and self.outbox.reading:
            self._requests.add(
                RequestTimeout("the rest of the request did not come", code="request_stalled"),
                True,
            )
        self._heard = False
        self._watch = asyncio.get_running_loop().call_later(STALLED_REQUEST_S, self._look)

    def lost(self) -> None:
        self._watch.cancel()

    def hand_over(self) -> bytes:
        """Another session takes the connection; returns what came after the last request."""
        self._watch.cancel()
        # Nothing may hold on to this session: ten thousand parsers are 20 MB.
        self.outbox.on_idle, self.outbox.before_idle = None, lambda: None
        return self._http.rest or b""

    # --- requests ---------------------------------------------------------------------------
    def depends(self, item: Request) -> bool:
        return not item.publishes

    def begin(self, item: Request) -> None:
        route = item.memo.get("route")
        if route is None:
            self._admit(item)
            self._check_readable(item)
            route = item.memo["route"] = self.hub.routes.find(item.method, item.words)
        handler, parameters = route
        try:
            answer = handler(self, item, *parameters)
        except ReadPending:  # it has done nothing yet: call it again when the log has the records
            answer = completed(lambda: handler(self, item, *parameters))
        if answer is None:
            return  # the handler answers by itself
        if isinstance(answer, Answer):
            self.finish(item, answer)
        else:  # a coroutine
            slot = self.reserve(item)
            self.connection.answer_later(
                answer,
                lambda answer: self.finish(item, answer, slot),
                lambda error: self._error(item, error),
            )

    def _admit(self, request: Request) -> None:
        """Check page and token, once for each head. The parser asks before it keeps any of a body."""
        memo = request.memo
        if "admitted" not in memo:
            if request.version == "1.0" and request.keep_alive:
                memo["headers"] = {"Connection": "keep-alive"}
            memo["headers"] = {**memo.get("headers", {}), **self.hub.origins.admit(request)}
            self._authenticate(request)
            memo["admitted"] = True

    def _authenticate(self, request: Request) -> None:
        if self.hub.token is None or request.path in OPEN_PATHS or request.method == "OPTIONS":
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

    # --- answers ----------------------------------------------------------------------------
    def reserve(self, request: Request) -> Slot:
        """The place of an answer that comes later."""
        return self.outbox.reserve(len(request.body) + 256)

    def finish(self, request: Request, answer: Answer, slot: Slot | None = None) -> None:
        """Send the answer, in its place; it may be the last one."""
        keep_alive = request.keep_alive
        headers, head_only = request.memo.get("headers"), request.method == "HEAD"
        content = answer.encode(headers, keep_alive, head_only)
        is_last = not keep_alive and self.connection.session is self
        if is_last:
            self.connection.closing = True
        if slot is None:
            self.outbox.send(content)
        else:
            slot.fill(content)
        if is_last:
            self.connection.close()

    def fail(self, item: Request, error: HeadraceError, slot: Slot | None = None) -> None:
        if item.refusal is not None:
            self.connection.unread = True
        self.finish(item, self._error(item, error), slot)

    def _error(self, request: Request, error: HeadraceError) -> Answer:
        headers = {}
        if error.code == "method_not_allowed":
            headers["Allow"] = ", ".join(self.hub.routes.methods(request.words))
        return http.error_answer(error, kind_of(error), headers)

    def end(self, error: HeadraceError) -> None:
        self.connection.unread = True
        self.outbox.send(http.error_answer(error, kind_of(error)).encode(keep_alive=False))
        self.connection.close()
