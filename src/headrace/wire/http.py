"""HTTP/1.1 without I/O: bytes to requests, answers to bytes. ``httptools`` (llhttp) does the parsing.

A framework cost six to ten times the throughput here, and what the broker needs of HTTP is small:
requests with bodies, keep-alive, pipelining, chunked bodies, ``Expect: 100-continue``. Everything has
a bound that is enforced while bytes arrive, and a message that is ambiguous about its length is
refused by the parser.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

import httptools
import orjson

from headrace.errors import HeadraceError, InvalidArgument, TooLarge

HEAD_BYTES_MAX = 64 << 10
TARGET_BYTES_MAX = 8 << 10
HEADERS_MAX = 200


class Request:
    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query", "upgrade", "version")

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep_alive = True
        self.upgrade = False
        self.version = "1.1"


class HttpParser:
    """Feed it bytes; it gives requests. After an error it gives nothing more."""

    def __init__(self, body_bytes_max: int):
        self._body_max = body_bytes_max
        self._parser = httptools.HttpRequestParser(self)
        self._found: list[Request] = []
        self._request = Request()
        self._url = b""
        self._body: list[bytes] = []
        self._body_size = 0
        self._head_size = 0
        self._failure: HeadraceError | None = None
        self.error: HeadraceError | None = None
        self.expects_continue = False
        """The client waits for a word before it sends the body."""
        self.rest: bytes | None = None
        """What came behind an upgrade request: it is not HTTP any more."""

    def feed(self, data: bytes) -> list[Request]:
        if self.error is not None or self.rest is not None:
            return []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset = upgrade.args[0]
            self._found[-1].upgrade = True
            self.rest = data[offset:]
        except httptools.HttpParserError as error:
            self.error = self._failure or InvalidArgument(
                f"this is not HTTP/1.1: {error}", code="bad_request"
            )
        found, self._found = self._found, []
        return found

    # --- what llhttp calls --------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._request = Request()
        self._url = b""
        self._body = []
        self._body_size = self._head_size = 0
        self.expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > TARGET_BYTES_MAX:
            self._fail(
                TooLarge(f"the address has more than {TARGET_BYTES_MAX} bytes", code="uri_too_long")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        headers = self._request.headers
        if self._head_size > HEAD_BYTES_MAX or len(headers) >= HEADERS_MAX:
            self._fail(
                TooLarge(f"the headers exceed {HEAD_BYTES_MAX} bytes", code="headers_too_large")
            )
        try:
            headers[name.lower().decode("ascii")] = value.decode()
        except UnicodeDecodeError:
            headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        request = self._request
        request.method = self._parser.get_method().decode("ascii")
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        length = request.headers.get("content-length")
        if length is not None and length.isdigit() and int(length) > self._body_max:
            self._too_large()
        if request.headers.get("expect", "").lower() == "100-continue":
            self.expects_continue = True
        path, question, query = self._url.partition(b"?")
        if path[:1] != b"/":  # an absolute address, as a proxy would send it
            path = httptools.parse_url(self._url).path or b"/"
        text = path.decode("latin-1")
        request.path = unquote(text) if "%" in text else text
        if question:
            request.query = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > self._body_max:
            self._too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = self._body
        if body:
            self._request.body = body[0] if len(body) == 1 else b"".join(body)
        self._found.append(self._request)
        self.expects_continue = False

    def _too_large(self) -> None:
        self._fail(
            TooLarge(f"the body has more than {self._body_max} bytes", code="body_too_large")
        )

    def _fail(self, error: HeadraceError) -> None:
        self._failure = error
        raise error


# --- answers ------------------------------------------------------------------------------------
_REASONS = {status.value: status.phrase for status in HTTPStatus}
JSON = "application/json"
_JSON_HEADS: dict[int, bytes] = {}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _json_head(status: int) -> bytes:
    head = _JSON_HEADS.get(status)
    if head is None:
        reason = _REASONS.get(status, "")
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {JSON}\r\nContent-Length: ".encode()
        _JSON_HEADS[status] = head
    return head


def json_answer(status: int, content: bytes, keep_alive: bool = True) -> bytes:
    """The common case, put together in one go."""
    end = b"\r\n\r\n" if keep_alive else b"\r\nConnection: close\r\n\r\n"
    return b"%b%d%b%b" % (_json_head(status), len(content), end, content)


def answer(
    status: int,
    content: bytes = b"",
    content_type: str = JSON,
    *,
    headers: dict[str, str] | None = None,
    keep_alive: bool = True,
    head_only: bool = False,
) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
    if content or status not in (204, 304):
        lines.append(f"Content-Type: {content_type}")
        lines.append(f"Content-Length: {len(content)}")
    for name, value in (headers or {}).items():
        lines.append(f"{name}: {value}")
    if not keep_alive:
        lines.append("Connection: close")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head if head_only else head + content


def stream_head(content_type: str, headers: dict[str, str] | None = None) -> bytes:
    """The head of an answer without end: the connection is the message."""
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {content_type}", "Cache-Control: no-store"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += ["Connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


_STATUS_BY_KIND = {
    "invalid_argument": 400,
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
    "storage_full": 503,
    "storage_failed": 503,
    "outcome_unknown": 500,
    "data_corrupt": 500,
    "read_only": 503,
    "closed": 503,
    "broker_failed": 503,
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
    "unsupported_media_type": 415,
    "invalid_batch": 400,
}


def status_of(error: HeadraceError, kind: str) -> int:
    return _STATUS_BY_CODE.get(error.code) or _STATUS_BY_KIND.get(kind, 500)


def error_document(error: HeadraceError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "retryable": error.retryable}}


def error_answer(
    error: HeadraceError,
    kind: str,
    *,
    keep_alive: bool = True,
    headers: dict[str, str] | None = None,
) -> bytes:
    status = status_of(error, kind)
    extra = dict(headers or {})
    if status in (429, 503) and error.retryable:
        extra.setdefault("Retry-After", "1")
    if status == 401:
        extra.setdefault("WWW-Authenticate", 'Bearer realm="headrace"')
    content = orjson.dumps(error_document(error))
    return answer(status, content, headers=extra, keep_alive=keep_alive)
