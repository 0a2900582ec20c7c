"""HTTP on its own port: the session that reads requests and writes answers.

Publishes follow each other without waiting; any other request waits for those before it, as on the TCP
port, and until the client has read its earlier answers. ``routes`` and ``operation_routes`` say what a
request means, ``origins`` which web pages may send it.

Clients that publish send the same head again and again. Everything that follows from the head alone is
found out once and kept in ``Request.memo``, which all requests with the same head share: that it is
admitted, its route, the headers of its answer (CORS), and what it says about a publish. That includes who
sends it: a :class:`Caller`, which says itself when it is not valid any more. Then the head is admitted anew.

A login that takes time (a password, or a client that has failed often) runs as a task from the moment the
head is known. Until it is done, nothing more is read from the client; its request begins afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

from headrace.access.caller import Caller
from headrace.errors import (
    Forbidden,
    HeadraceError,
    InvalidArgument,
    RequestTimeout,
    Unauthenticated,
    kind_of,
)
from headrace.log.interface import ReadPending, completed
from headrace.server.connection import Connection, readable_id
from headrace.server.flow import Slot
from headrace.server.logins import Credentials
from headrace.server.schemas import OPEN_PATHS, OPEN_WORDS
from headrace.server.session import RequestSession
from headrace.wire import http
from headrace.wire.http import Answer, HttpParser, Request

BODY_BYTES_MAX = 65 << 20
"""Of any request; each route has a limit of its own, known before the body is read."""
LONG_BODY_BYTES = 32 << 10
"""To look through a JSON body of this size takes a noticeable time."""
TOKEN_IN_ADDRESS = ("ws", "stream")
"""Paths for which a browser cannot set headers. Addresses are never logged."""


def credentials_in(request: Request) -> Credentials | None:
    """What the head says about its sender; None if it says nothing that can be read."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not value and request.words[0] in TOKEN_IN_ADDRESS:
        scheme, value = "bearer", request.query.get("token", "")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return Credentials(value)
    if scheme.lower() == "basic":
        try:
            user, colon, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        return Credentials(user=user, password=password) if colon else None
    return None


def client_id_in(request: Request) -> str | None:
    """What the client calls itself. A browser cannot set headers for a WebSocket or an event stream."""
    headers = request.headers
    given = request.query.get("client_id") if request.words[0] in TOKEN_IN_ADDRESS else None
    return readable_id(given or headers.get("x-client-id") or headers.get("user-agent") or "")


class HttpSession(RequestSession[Request]):
    protocol = "http"

    def __init__(self, connection: Connection):
        self._http = HttpParser(BODY_BYTES_MAX, self._admit_body, connection.hub.known_heads)
        super().__init__(connection, self._http)
        self._logins: dict[int, asyncio.Task[Caller]] = {}
        """By the id of the head's memo: logins that are under way."""
        self._heard = False
        self._number = -1
        """Of the request that was incomplete at the last look."""

    # --- in ---------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        self._heard = True
        known = self._http.known(data)
        if known is not None:
            self._requests.begin_turn()
            self._requests.add(known, not known.publishes, may_be_long=self.may_be_long(known))
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

    def check_deadline(self, now: float) -> None:
        """A head must come within a time, a body at a rate, and the next request within a longer time."""
        connection, parser, hub = self.connection, self._http, self.hub
        heard, self._heard = self._heard, False
        if not self.outbox.reading or self.outbox.busy:  # it is we who are slow
            connection.since = now
        elif parser.is_inside:
            if parser.number != self._number:
                self._number, connection.since = parser.number, now
            elif now - connection.since > hub.head_s + parser.buffered / hub.body_bytes_per_s:
                hub.overdue += 1
                hub.watched.discard(connection)
                self._requests.add(
                    RequestTimeout("the request came too slowly", code="request_stalled"),
                    True,
                )
        elif heard:
            connection.since = now
        elif now - connection.since > hub.idle_s:
            connection.overdue()

    def forget_heads(self) -> None:
        """The next request is admitted anew, even if its head was admitted before."""
        self._http.forget()

    def hand_over(self) -> bytes:
        """Another session takes the connection; returns what came after the last request."""
        self.hub.watched.discard(self.connection)
        # Nothing may hold on to this session: ten thousand parsers are 20 MB.
        self.outbox.on_idle = None
        self._requests.leave()
        return self._http.rest or b""

    # --- requests ---------------------------------------------------------------------------
    def depends(self, item: Request) -> bool:
        # While a login is under way, the answer of a request has no place yet.
        return not item.publishes or bool(self._logins)

    def topics_in(self, item: Request) -> tuple[str, ...]:
        return self.known_topics(item.words)

    def may_be_long(self, item: Request) -> bool:
        if item.publishes:
            return len(item.body) >= LONG_BODY_BYTES
        return item.words[0] != "health"

    def begin(self, item: Request) -> None:
        memo = item.memo
        caller = memo.get("caller")
        if (caller is not self.connection.caller or not caller.valid) and not self._identify(item):
            return  # it begins again when the login is done
        route = memo.get("route")
        if route is None:
            self._check_readable(item)
            route = memo["route"] = self.hub.routes.find(item.method, item.words)
        if memo["client_id"] != self.connection.client_id:
            self.connection.client_id, self.connection.publisher = memo["client_id"], None
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
            try:
                slot = self.reserve(item)
            except HeadraceError:
                answer.close()
                raise
            self.connection.answer_later(
                answer,
                lambda answer: self.finish(item, answer, slot),
                lambda error: self._error(item, error),
            )

    def _admit_body(self, request: Request) -> int:
        """How large a request's body may be. The parser asks before it keeps any of it."""
        self._admit(request)
        caller = request.memo.get("caller")
        if caller is not None and caller.meter is not None and not self.outbox.busy:
            self.connection.enter(caller)  # the body counts against the quotas of its sender
        message_max = self.engine.max_message_size
        return self.hub.routes.body_limit(request.method, request.words, message_max)

    def _identify(self, item: Request) -> bool:
        """The connection's caller is the request's sender, from now on; False if a login is under way."""
        self._admit(item)
        login = self._logins.get(id(item.memo))
        if login is not None:
            slot = self.reserve(item)
            self.connection.answer_later(
                self._wait_for(login),
                lambda error: self._logged_in(item, slot, error),
                lambda error: error,
            )
            return False
        self.connection.enter(item.memo.get("caller") or self._certified())
        return True

    async def _wait_for(self, login: asyncio.Task[Caller]) -> HeadraceError | None:
        await asyncio.wait([login])
        login.result()
        return None

    def _logged_in(self, item: Request, slot: Slot, error: HeadraceError | None) -> None:
        """The login of a waiting request is done: carry the request out, in its place."""
        if error is not None:
            self.fail(item, error, slot)
            return
        try:
            self.begin(item)
        except HeadraceError as failure:
            self.fail(item, failure)
        except Exception:
            self.fail(item, self.connection.bug())
        slot.fill(b"")

    def _admit(self, request: Request) -> None:
        """Check page and token, once for each head."""
        memo = request.memo
        caller = memo.get("caller")
        if caller is not None and caller.valid:
            return
        if "headers" not in memo:
            try:
                headers = self.hub.origins.admit(request)
            except Forbidden as error:
                cause = "host" if error.code == "host_not_allowed" else "origin"
                self.hub.refusals.note(cause, self.connection.source, error.message)
                raise
            if request.version == "1.0" and request.keep_alive:
                headers = {"Connection": "keep-alive", **headers}
            memo["headers"], memo["client_id"] = headers, client_id_in(request)
        if id(memo) not in self._logins:
            self._authenticate(request)

    def _certified(self) -> Caller:
        """Who the client is by its certificate. That is the connection's, not the head's: other
        connections send the same heads, so it is not remembered with the head."""
        caller = self.connection.certified
        if caller is None:
            raise Unauthenticated(
                "send 'Authorization: Bearer <token>', or Basic with a user and a password"
            )
        return caller

    def _authenticate(self, request: Request) -> None:
        """Find out who sends it: ``memo["caller"]``, now or by a task."""
        memo, access, connection = request.memo, self.engine.access, self.connection
        memo.pop("caller", None)
        if not access.is_on:
            memo["caller"] = access.anyone
            return
        words = request.words
        is_open = request.path in OPEN_PATHS or words[0] in OPEN_WORDS
        if is_open or request.method == "OPTIONS":
            memo["caller"] = access.nobody
            return
        credentials = credentials_in(request)
        if credentials is None:
            caller = self.hub.sessions.find(request)
            if caller is None:
                self._certified()
            else:
                memo["caller"] = caller
            return
        caller = self.hub.logins.at_once(connection.source, credentials)
        if caller is not None:
            memo["caller"] = caller
            return
        check = self.hub.logins.check(connection.source, credentials)
        login = self._logins[id(memo)] = connection.start(check)
        self.outbox.throttle(True)
        login.add_done_callback(lambda login: self._login_done(memo, login))

    def _login_done(self, memo: dict[str, Any], login: asyncio.Task[Caller]) -> None:
        del self._logins[id(memo)]
        self.outbox.throttle(False)
        if login.cancelled():
            return
        error = login.exception()
        if error is None:
            memo["caller"] = login.result()
        elif self._http.is_inside and not self.connection.closing:
            # Nothing more of the body is read.
            failed = error if isinstance(error, HeadraceError) else self.connection.bug()
            self._requests.add(failed, True)

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
        pieces = [content, *answer.more] if answer.more and not head_only else None
        if slot is not None:
            slot.fill(pieces or content)
        elif pieces is not None:
            self.outbox.send_pieces(pieces)
        else:
            self.outbox.send(content)
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
