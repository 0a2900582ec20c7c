"""HTTP/1.1 without I/O: bytes to requests, answers to bytes. ``httptools`` (llhttp) does the parsing.

A framework would divide the throughput by six to ten, and the broker needs little of HTTP: requests with
bodies, keep-alive, pipelining, chunked bodies, ``Expect: 100-continue``. Everything has a bound that is
checked while bytes arrive. A request with an ambiguous length is refused: by llhttp, or here if llhttp
accepts it.

A failure before the head of a request is complete is the parser's ``error``. A later failure is that
request's ``refusal``: it can be answered, and the rest of its body is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from time import time
from typing import Any
from urllib.parse import parse_qsl, unquote

import httptools
import orjson

from headrace.errors import HeadraceError, InvalidArgument, TooLarge

HEAD_BYTES_MAX = 64 << 10
TARGET_BYTES_MAX = 8 << 10
HEADERS_MAX = 200


class Request:
    __slots__ = (
        "body",
        "headers",
        "keep_alive",
        "memo",
        "method",
        "path",
        "publishes",
        "query",
        "refusal",
        "upgrade",
        "version",
        "words",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        """Decoded, for messages and comparisons; a route is found by ``words``."""
        self.words: list[str] = []
        """The path, cut at its slashes and then decoded: ``%2F`` is part of a word."""
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        """Names in lower case; the values of a repeated header are joined with commas."""
        self.body = b""
        self.keep_alive = True
        self.upgrade = False
        self.version = "1.1"
        self.refusal: HeadraceError | None = None
        """Why its body is not read to the end."""
        self.publishes = False
        """Whether it publishes: such requests need not wait for each other."""
        self.memo: dict[str, Any] = {}
        """Results that depend only on the head, shared by all requests whose heads are the same bytes."""

    def again(self, body: bytes) -> Request:
        """The same request with another body."""
        request = Request.__new__(Request)
        request.method, request.path, request.words = self.method, self.path, self.words
        request.query, request.headers, request.version = self.query, self.headers, self.version
        request.keep_alive, request.upgrade, request.refusal = True, False, None
        request.memo, request.publishes = self.memo, self.publishes
        request.body = body
        return request

    @property
    def has_body(self) -> bool:
        """Whether the head announces a body."""
        headers = self.headers
        return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


Known = tuple[bytes, int, Request]
"""A head, the size of the head with its body, and the request without its body."""
_NOT_KNOWN: Known = (b"", -1, Request())


class KnownHeads:
    """Requests by the bytes of their heads, shared by all connections.

    A client that publishes sends the same head again and again. Equal bytes have the same meaning, so the
    parser compares heads instead of parsing them. This works for a request that arrives in one piece with
    nothing after it, as most do; llhttp parses all others.
    """

    COUNT_MAX = 512
    BYTES_MAX = 2 << 10

    def __init__(self) -> None:
        self._requests: dict[bytes, Known] = {}

    def clear(self) -> None:
        self._requests.clear()

    def find(self, data: bytes) -> Known | None:
        """The request in the data, if its head is known and nothing follows its body."""
        start = data.find(b"\r\n\r\n", 0, self.BYTES_MAX) + 4
        known = self._requests.get(data[:start])
        return known if known is not None and len(data) == known[1] else None

    def learn(self, data: bytes, request: Request) -> None:
        """Keep the head of a valid request that was alone in its data."""
        size = len(request.body)
        head = data[: len(data) - size]
        headers = request.headers
        if (
            len(head) > self.BYTES_MAX
            or head.find(b"\r\n\r\n") + 4 != len(head)
            or int(headers.get("content-length", "0")) != size
            or "transfer-encoding" in headers
            or "expect" in headers
            or request.upgrade
            or request.refusal is not None
            or not request.keep_alive
        ):
            return
        if len(self._requests) >= self.COUNT_MAX:
            self._requests.clear()
        self._requests[head] = (head, len(data), request.again(b""))


class HttpParser:
    """Feed it bytes; it returns requests. After an error it returns nothing more.

    ``check`` is called with the head of each request that has a body, before any of the body is kept. It
    returns how many bytes that body may have, or raises why the request is refused.
    """

    def __init__(
        self,
        body_bytes_max: int,
        check: Callable[[Request], int] | None = None,
        heads: KnownHeads | None = None,
    ):
        self._default_max = self._body_max = body_bytes_max
        self._check = check
        self._heads = heads or KnownHeads()
        self._parser = httptools.HttpRequestParser(self)
        self._found: list[Request] = []
        self._request = Request()
        self._url = b""
        self._body: bytes | bytearray = b""
        self._head_size = 0
        self._in_head = self._in_body = False
        self.number = 0
        """Of the request that is being parsed."""
        self._between = True
        """The next bytes begin a request."""
        self._last = _NOT_KNOWN
        """Most requests of a connection have the same head."""
        self._quiet = 0
        """Bytes since the last callback from llhttp, which may be collecting an endless header."""
        self._failure: HeadraceError | None = None
        self._ended = False
        self.error: HeadraceError | None = None
        self.expects_continue = False
        """The client waits for ``100 Continue`` before it sends the body."""
        self.rest: bytes | None = None
        """The bytes after a request to change the protocol; they are not HTTP."""

    @property
    def buffered(self) -> int:
        return len(self._body)

    @property
    def is_inside(self) -> bool:
        """Whether a request is incomplete."""
        return (self._in_head or self._in_body) and not self._ended

    def forget(self) -> None:
        """What was found out about the last head does not hold any more."""
        self._last = _NOT_KNOWN

    def known(self, data: bytes) -> Request | None:
        """The request in the data, if its head is known and nothing else is in the data.

        This is the fast path; pass all other data to ``feed``.
        """
        if not self._between:
            return None
        head, size, request = self._last
        if len(data) != size or not data.startswith(head):
            known = self._heads.find(data)
            if known is None:
                return None
            head, _, request = self._last = known
        return request.again(data[len(head) :])

    def feed(self, data: bytes) -> list[Request]:
        """The requests that are complete now; for data that ``known`` does not recognize."""
        if self.rest is not None:
            self.rest += data
        elif not self._ended:
            between = self._between
            self._feed(data)
            if between and len(self._found) == 1 and not self._in_head and not self._ended:
                self._heads.learn(data, self._found[0])
        found, self._found = self._found, []
        return found

    def _feed(self, data: bytes) -> None:
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
            if self._quiet > HEAD_BYTES_MAX:
                self._fail(_head_too_large())
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            request = self._found[-1]
            if "websocket" in request.headers["upgrade"].lower():
                request.upgrade = True
                request.keep_alive = False  # unless the upgrade succeeds
                self.rest = rest
                self._between = False
            else:
                self._decline_upgrade(self._found.pop(), rest)
        except (httptools.HttpParserError, HeadraceError) as error:
            self._end(
                self._failure
                or InvalidArgument(f"this is not HTTP/1.1: {error}", code="bad_request")
            )

    def _end(self, error: HeadraceError) -> None:
        if self._ended:
            return  # data after a request that the client announced as its last
        self._ended = True
        self._between = False
        self.expects_continue = False
        if not self._in_body:
            self.error = error
            return
        self._request.refusal = error
        self._request.keep_alive = False
        self._found.append(self._request)

    def _decline_upgrade(self, request: Request, rest: bytes) -> None:
        """Ignore an upgrade to a protocol other than WebSocket: treat it as a plain request.

        llhttp has skipped its body, so it parses the head again, without the ``Upgrade`` header.
        """
        del request.headers["upgrade"]
        lines = [f"{request.method} {self._url.decode('latin-1')} HTTP/{request.version}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        self._parser = httptools.HttpRequestParser(self)
        self._feed("\r\n".join(lines).encode() + b"\r\n\r\n" + rest)

    # --- what llhttp calls --------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._request = Request()
        self._url = b""
        self._body = b""
        self._head_size = self._quiet = 0
        self._in_head, self._in_body = True, False
        self.number += 1
        self._between = False
        self.expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > TARGET_BYTES_MAX:
            self._fail(
                TooLarge(f"the address has more than {TARGET_BYTES_MAX} bytes", code="uri_too_long")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._quiet = 0
        self._head_size += len(name) + len(value)
        headers = self._request.headers
        if self._head_size > HEAD_BYTES_MAX or len(headers) >= HEADERS_MAX:
            self._fail(_head_too_large())
        if not self._in_head:
            return  # a trailer after a chunked body: too late to have an effect
        key = name.lower().decode("ascii")
        try:
            text = value.decode().rstrip(" \t")
        except UnicodeDecodeError:
            text = value.decode("latin-1").rstrip(" \t")
        if key not in headers:
            headers[key] = text
        elif key == "host":
            self._fail(InvalidArgument("there is more than one Host header", code="bad_request"))
        else:
            headers[key] += ", " + text

    def on_headers_complete(self) -> None:
        self._quiet = 0
        request = self._request
        request.method = self._parser.get_method().decode("ascii")
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        headers = request.headers
        if request.method == "CONNECT":
            self._fail(InvalidArgument("this is no proxy", code="bad_request"))
        if "host" not in headers and request.version == "1.1":
            self._fail(InvalidArgument("there is no Host header", code="bad_request"))
        coding = headers.get("transfer-encoding")
        if coding is not None and (coding.lower() != "chunked" or request.version == "1.0"):
            self._fail(InvalidArgument("the only transfer coding is chunked", code="bad_request"))
        try:
            self._read_target(request)
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            self._fail(InvalidArgument("the address cannot be read", code="bad_request"))
        self._in_head, self._in_body = False, True
        if request.has_body:
            self._body_max = self._default_max
            if self._check is not None:
                try:
                    self._body_max = min(self._check(request), self._default_max)
                except HeadraceError as error:
                    self._fail(error)
            length = headers.get("content-length")
            if length is not None and int(length) > self._body_max:
                self._too_large()
            if headers.get("expect", "").lower() == "100-continue" and request.version != "1.0":
                self.expects_continue = True

    def _read_target(self, request: Request) -> None:
        path, question, query = self._url.partition(b"?")
        if path[:1] != b"/":  # an absolute URL, as clients send it to a proxy, or a host, or "*"
            path = httptools.parse_url(self._url).path or b"/"
        text = path.decode("ascii")
        request.words = text[1:].split("/")
        if "%" in text:
            request.words = [unquote(word, errors="strict") for word in request.words]
            text = "/" + "/".join(request.words)
        request.path = text
        request.publishes = request.method == "POST" and request.words[0] == "publish"
        if question:
            request.query = dict(
                parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
            )

    def on_body(self, body: bytes) -> None:
        self._quiet = 0
        self.expects_continue = False
        if len(self._body) + len(body) > self._body_max:
            self._too_large()
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = bytearray(self._body) + body

    def on_message_complete(self) -> None:
        self._quiet = 0
        self._in_body = False
        request = self._request
        request.body = bytes(self._body)
        self._body = b""
        self._found.append(request)
        self.expects_continue = False
        self._ended = not request.keep_alive
        self._between = request.keep_alive

    def _too_large(self) -> None:
        self._fail(
            TooLarge(
                f"the body has more than {self._body_max} bytes, the most for this request",
                code="body_too_large",
            )
        )

    def _fail(self, error: HeadraceError) -> None:
        self._failure = error
        raise error


def _head_too_large() -> TooLarge:
    return TooLarge(
        f"the headers exceed {HEAD_BYTES_MAX} bytes, or are more than {HEADERS_MAX}",
        code="headers_too_large",
    )


# --- answers ------------------------------------------------------------------------------------
_REASONS = {status.value: status.phrase for status in HTTPStatus}
JSON = "application/json"
_json_heads: dict[int, bytes] = {}
"""The heads of the current second: they contain the date."""
_date = ""
_date_s = 0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FOR_BROWSERS = (
    "\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nCache-Control: no-store"
)
"""Messages come from strangers: no browser may guess a type for them, frame them or keep them."""


def _status_line(status: int) -> str:
    """The head, with the date: HTTP requires it of a server that has a clock."""
    global _date, _date_s
    now = int(time())
    if now != _date_s:
        _date, _date_s = formatdate(now, usegmt=True), now
        _json_heads.clear()
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\nDate: {_date}{_FOR_BROWSERS}"


def _json_head(status: int) -> bytes:
    head = _json_heads.get(status)
    if head is None or int(time()) != _date_s:
        line = _status_line(status)
        head = f"{line}\r\nContent-Type: {JSON}\r\nContent-Length: ".encode()
        _json_heads[status] = head
    return head


@dataclass(slots=True)
class Answer:
    """An answer to a request; it becomes bytes when it is sent."""

    status: int
    content: bytes = b""
    content_type: str = JSON
    headers: Mapping[str, str] | None = None
    endless: bool = False
    """More content follows until the connection closes."""
    more: Sequence[bytes] = ()
    """The rest of a large content, which is sent without a copy."""

    def encode(
        self,
        extra: Mapping[str, str] | None = None,
        keep_alive: bool = True,
        head_only: bool = False,
    ) -> bytes:
        """The bytes, with ``extra`` headers for the connection (not for the content); ``more`` follows them."""
        content = self.content
        size = len(content) + sum(map(len, self.more))
        if not (extra or self.headers or head_only) and self.content_type is JSON and content:
            end = b"\r\n\r\n" if keep_alive else b"\r\nConnection: close\r\n\r\n"
            return b"%b%d%b%b" % (_json_head(self.status), size, end, content)
        lines = [_status_line(self.status)]
        if (
            self.headers and "Cache-Control" in self.headers
        ):  # of the console, which says it all itself
            lines[0] = lines[0].replace(_FOR_BROWSERS, "")
        if self.endless:
            lines.append(f"Content-Type: {self.content_type}")
        elif content or self.status not in (204, 304):
            lines += [f"Content-Type: {self.content_type}", f"Content-Length: {size}"]
        for headers in (self.headers, extra):
            if headers:
                lines += [f"{name}: {value}" for name, value in headers.items()]
        if not keep_alive or self.endless:
            lines.append("Connection: close")
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        return head if head_only else head + content


_STATUS_BY_KIND = {
    "invalid_argument": 400,
    "invalid_json": 400,
    "too_large": 413,
    "not_found": 404,
    "topic_not_found": 404,
    "subscription_not_found": 404,
    "message_not_found": 404,
    "conflict": 409,
    "offset_out_of_range": 404,
    "stale_delivery": 409,
    "sequence_gap": 409,
    "producer_fenced": 409,
    "queue_full": 429,
    "memory_full": 503,
    "storage_full": 503,
    "storage_failed": 503,
    "outcome_unknown": 500,
    "data_corrupt": 500,
    "read_only": 503,
    "closed": 503,
    "broker_failed": 503,
    "connect_failed": 503,
    "connection_lost": 503,
    "timeout": 503,
    "unauthenticated": 401,
    "forbidden": 403,
}
_STATUS_BY_CODE = {
    "bad_request": 400,
    "uri_too_long": 414,
    "headers_too_large": 431,
    "no_route": 404,
    "method_not_allowed": 405,
    "request_stalled": 408,
    "no_reply": 504,
    "unsupported_media_type": 415,
    "not_a_websocket": 426,
}


def status_of(error: HeadraceError, kind: str) -> int:
    return _STATUS_BY_CODE.get(error.code) or _STATUS_BY_KIND.get(kind, 500)


def error_document(error: HeadraceError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "retryable": error.retryable}}


def error_answer(
    error: HeadraceError, kind: str, headers: Mapping[str, str] | None = None
) -> Answer:
    status = status_of(error, kind)
    extra = dict(headers or {})
    if status in (429, 503) and error.retryable:
        extra.setdefault("Retry-After", "1")
    if status == 401:
        extra.setdefault("WWW-Authenticate", 'Bearer realm="headrace"')
    if status == 426:
        extra |= {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return Answer(status, orjson.dumps(error_document(error)), headers=extra)
