"""The HTTP parser: what it finds, what it refuses, and what it may cost."""

import json
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import Forbidden, HeadraceError, InvalidArgument, QueueFull, kind_of
from headrace.wire import http
from headrace.wire.http import Answer, HttpParser, Request
from tests.wire.streams import CUTS, FEEDINGS, byte_by_byte, cut_at, whole

BODY_BYTES_MAX = 2000
HOST = b"Host: localhost\r\n"


def flat(request: Request) -> tuple[Any, ...]:
    return (
        request.method,
        request.path,
        tuple(request.words),
        dict(request.query),
        dict(request.headers),
        request.body,
        request.keep_alive,
        request.upgrade,
        None if request.refusal is None else request.refusal.code,
    )


def read(pieces: Iterable[bytes], parser: HttpParser | None = None) -> tuple[list[Any], str | None]:
    """What is found, and the code of the error that ended it."""
    parser = parser or HttpParser(BODY_BYTES_MAX)
    found = [flat(request) for piece in pieces for request in parser.feed(piece)]
    assert parser.error is None or isinstance(parser.error, HeadraceError)
    return found, None if parser.error is None else parser.error.code


def parse(data: bytes) -> list[Request]:
    parser = HttpParser(BODY_BYTES_MAX)
    found = parser.feed(data)
    assert parser.error is None, parser.error
    return found


def one(data: bytes) -> Request:
    (request,) = parse(data)
    assert request.refusal is None
    return request


def refusal(data: bytes) -> str:
    """The code with which the parser ends, of the connection or of the request."""
    parser = HttpParser(BODY_BYTES_MAX)
    found = parser.feed(data)
    error = parser.error or (found[-1].refusal if found else None)
    assert error is not None, [flat(request) for request in found]
    assert parser.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == [], "it went on"
    return error.code


def get(path: str = "/", *lines: str, version: str = "1.1") -> bytes:
    head = [f"GET {path} HTTP/{version}", "Host: localhost", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


def post(body: bytes, *lines: str, path: str = "/publish/orders") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    head = b"POST /publish/orders HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n" + trailers + b"\r\n"


# --- what is found --------------------------------------------------------------------------------
def test_a_request_has_its_parts() -> None:
    """Method, path, query, headers by lower-case name, body."""
    raw = post(b'{"a":1}', "X-Header-Source: auth", path="/publish/user.events?key=k&ttl=5")
    request = one(raw)
    assert (request.method, request.path) == ("POST", "/publish/user.events")
    assert request.words == ["publish", "user.events"]
    assert request.query == {"key": "k", "ttl": "5"}
    assert request.headers["x-header-source"] == "auth"
    assert request.body == b'{"a":1}'
    assert request.keep_alive
    assert not request.upgrade


def test_requests_follow_each_other_on_one_connection() -> None:
    """Pipelined: each with its own parts and nothing of the one before."""
    found = parse(post(b"1", "X-A: 1") + get("/topics?a=b") + post(b"") + get("/health"))
    assert [request.path for request in found] == [
        "/publish/orders", "/topics", "/publish/orders", "/health",
    ]  # fmt: skip
    assert [request.body for request in found] == [b"1", b"", b"", b""]
    assert "x-a" not in found[1].headers
    assert found[3].query == {}


@pytest.mark.parametrize("feeding", FEEDINGS)
def test_how_the_bytes_are_cut_makes_no_difference(
    feeding: Callable[[bytes], list[bytes]],
) -> None:
    """Whole, in halves, or one by one."""
    raw = (
        post(b"one") + chunked(b"t", b"wo") + get("/a%20b?c=%C3%A9", "X-Empty:") + post(b"x" * 500)
    )
    assert read(feeding(raw)) == read([raw])
    assert len(read([raw])[0]) == 4


def test_chunks_are_put_together() -> None:
    """A chunked body is one body, and what stands behind it is the next request."""
    found = parse(chunked(b"hello ", b"world") + chunked() + get())
    assert [request.body for request in found] == [b"hello world", b"", b""]


def test_trailers_mean_nothing() -> None:
    """They come too late: a body must not say who sent it."""
    raw = chunked(b"x", trailers=b"Authorization: Bearer stolen\r\nX-Header-A: b\r\n")
    (request, following) = parse(raw + get())
    assert set(request.headers) == {"host", "transfer-encoding"}
    assert set(following.headers) == {"host"}


def test_a_path_is_cut_before_it_is_decoded() -> None:
    """%2F is a part of a word, and nothing that could be taken for another path."""
    request = one(get("/consume/a%2Fbatch/%C3%A9%20x?key=a%26b%3Dc&b=%2B&c=a+b"))
    assert request.words == ["consume", "a/batch", "é x"]
    assert request.query == {"key": "a&b=c", "b": "+", "c": "a b"}


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://broker:8080/topics?a=b", "/topics", {"a": "b"}),
        ("http://broker:8080", "/", {}),
        ("http://broker:8080/a%2Fb/c", "/a/b/c", {}),
        ("/", "/", {}),
        ("/topics?", "/topics", {}),
        ("/topics?a=&b", "/topics", {"a": "", "b": ""}),
        ("/topics?a=1?2", "/topics", {"a": "1?2"}),
    ],
)
def test_targets_in_all_their_forms(target: str, path: str, query: dict[str, str]) -> None:
    """As clients send them, and as they are sent to proxies."""
    request = one(get(target))
    assert (request.path, request.query) == (path, query)


def test_what_is_said_twice_is_joined() -> None:
    """Two lines of a header are a list, as with tracestate; white space around values is none of it."""
    request = one(get("/", "tracestate: a=1", "X-A:  \t b \t ", "Tracestate: b=2"))
    assert request.headers["tracestate"] == "a=1, b=2"
    assert request.headers["x-a"] == "b"


def test_header_values_are_text() -> None:
    """UTF-8 where it is UTF-8, else what the old standard said it is."""
    raw = b"GET / HTTP/1.1\r\n" + HOST + b"X-A: K\xc3\xb6ln\r\nX-B: K\xf6ln\r\n\r\n"
    request = one(raw)
    assert (request.headers["x-a"], request.headers["x-b"]) == ("Köln", "Köln")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (get(), True),
        (get("/", "Connection: close"), False),
        (get("/", version="1.0"), False),
        (get("/", "Connection: keep-alive", version="1.0"), True),
    ],
)
def test_whether_the_connection_is_kept(raw: bytes, expected: bool) -> None:
    """In 1.1 unless told otherwise, in 1.0 only when asked for."""
    assert one(raw).keep_alive is expected


def test_nothing_is_read_behind_the_last_request() -> None:
    """Who says that it is the last one is believed."""
    for feeding in (whole, byte_by_byte):
        found, error = read(feeding(get("/a", "Connection: close") + get("/b") + b"rubbish"))
        assert [request[1] for request in found] == ["/a"]
        assert error is None


# --- asking before sending ------------------------------------------------------------------------
def test_a_client_that_asks_first_is_noticed() -> None:
    """Between the head and the body, and not afterwards."""
    parser = HttpParser(BODY_BYTES_MAX)
    head, _, body = post(b"abc", "Expect: 100-continue").partition(b"\r\n\r\n")
    assert parser.feed(head + b"\r\n\r\n") == []
    assert parser.expects_continue
    assert parser.feed(body)[0].body == b"abc"
    assert not parser.expects_continue


def test_a_client_that_does_not_wait_needs_no_word() -> None:
    """It has sent the body along, or has none."""
    parser = HttpParser(BODY_BYTES_MAX)
    parser.feed(post(b"abc", "Expect: 100-continue"))
    assert not parser.expects_continue
    parser.feed(get("/", "Expect: 100-continue"))
    assert not parser.expects_continue


def test_who_may_not_send_a_body_is_told_before_it_comes() -> None:
    """The head is looked at first; of the body nothing is kept."""
    seen: list[str] = []

    def check(request: Request) -> int:
        seen.append(request.path)
        if "authorization" not in request.headers:
            raise Forbidden("who is there?")
        return 3

    parser = HttpParser(BODY_BYTES_MAX, check)
    assert parser.feed(get("/topics"))[0].refusal is None
    assert parser.feed(post(b"abc", "Authorization: yes"))[0].body == b"abc"
    (refused,) = parser.feed(post(b"abc", "Expect: 100-continue"))
    assert isinstance(refused.refusal, Forbidden)
    assert (refused.body, refused.keep_alive) == (b"", False)
    assert not parser.expects_continue
    assert seen == ["/publish/orders", "/publish/orders"]
    assert parser.feed(get("/topics")) == []


def test_each_request_has_a_limit_of_its_own() -> None:
    """That the check returns; never above that of the parser."""
    limits = {"/publish/small": 3, "/publish/large": 1 << 40}
    parser = HttpParser(BODY_BYTES_MAX, lambda request: limits[request.path])
    small = post(b"abc").replace(b"/publish/orders", b"/publish/small")
    large = post(b"x" * 2000).replace(b"/publish/orders", b"/publish/large")
    assert [len(r.body) for r in parser.feed(small + large + small)] == [3, 2000, 3]
    (refused,) = parser.feed(small.replace(b"Length: 3", b"Length: 4"))
    assert refused.refusal is not None
    assert refused.refusal.code == "body_too_large"
    assert "3 bytes" in refused.refusal.message


# --- other protocols ------------------------------------------------------------------------------
WEBSOCKET = get("/ws", "Connection: Upgrade", "Upgrade: websocket")


def test_what_comes_behind_a_websocket_request_is_not_http() -> None:
    """It is kept for whoever takes the connection over, also when it comes later."""
    parser = HttpParser(BODY_BYTES_MAX)
    (request,) = parser.feed(WEBSOCKET + b"\x81\x80")
    assert request.upgrade
    assert not request.keep_alive, "unless it succeeds, this is the end"
    assert parser.feed(b"GET / HTTP/1.1\r\n") == []
    assert parser.rest == b"\x81\x80GET / HTTP/1.1\r\n"


@pytest.mark.parametrize("feeding", FEEDINGS)
def test_an_offer_of_http_2_is_not_taken_up(feeding: Callable[[bytes], list[bytes]]) -> None:
    """Java's client makes one with its first request: body and all, it is a request like any other."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
    found, error = read(feeding(post(b'{"a":1}', *offer) + get("/topics", *offer) + get("/health")))
    assert error is None
    assert [(r[1], r[5], r[6], r[7]) for r in found] == [
        ("/publish/orders", b'{"a":1}', True, False),
        ("/topics", b"", True, False),
        ("/health", b"", True, False),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT broker:80 HTTP/1.1\r\nHost: broker\r\n\r\n",
        b"CONNECT /x HTTP/1.1\r\nHost: broker\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PUB orders 5\r\nhello",
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
        b"GET / HTTP/3.0\r\nHost: x\r\n\r\n",
        b"GET / NONSENSE\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    """TLS, HTTP/2, the text protocol, proxies' verbs."""
    assert refusal(raw) == "bad_request"


# --- one meaning ----------------------------------------------------------------------------------
def with_lines(*lines: bytes, body: bytes = b"0\r\n\r\n", version: bytes = b"1.1") -> bytes:
    head = b"POST / HTTP/" + version + b"\r\n" + HOST + b"".join(line + b"\r\n" for line in lines)
    return head + b"\r\n" + body


CHUNKED = b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    "raw",
    [
        with_lines(b"Content-Length: 5", CHUNKED),
        with_lines(CHUNKED, b"Content-Length: 5"),
        with_lines(b"Content-Length: 5", b"Content-Length: 5"),
        with_lines(b"Content-Length: 5", b"Content-Length: 6"),
        with_lines(b"Content-Length: 5, 5"),
        with_lines(b"Content-Length: -5"),
        with_lines(b"Content-Length: +5"),
        with_lines(b"Content-Length: 0x5"),
        with_lines(b"Content-Length:"),
        with_lines(b"Content-Length: 99999999999999999999999"),
        with_lines(b"Content-Length : 5"),
        with_lines(b" Content-Length: 5"),
        with_lines(b"Transfer-Encoding: xchunked"),
        with_lines(b"Transfer-Encoding: gzip"),
        with_lines(b"Transfer-Encoding: gzip, chunked"),
        with_lines(b"Transfer-Encoding: chunked, gzip"),
        with_lines(b"Transfer-Encoding: chunked, chunked"),
        with_lines(CHUNKED, CHUNKED),
        with_lines(b"Transfer-Encoding : chunked"),
        with_lines(b"Transfer-Encoding:\x0bchunked"),
        with_lines(CHUNKED, version=b"1.0"),
        with_lines(CHUNKED, b"Connection: keep-alive", version=b"1.0"),
        with_lines(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"-5\r\nhello\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"5 \r\nhello\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"5\r\nhelloX\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
        with_lines(CHUNKED, body=b"\r\n\r\n"),
        with_lines(CHUNKED, body=b"G\r\n\r\n"),
        with_lines(b"Host: elsewhere"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("feeding", [whole, byte_by_byte])
def test_a_message_with_two_meanings_is_refused(
    raw: bytes, feeding: Callable[[bytes], list[bytes]]
) -> None:
    """Whoever stands in front of us must not see another request than we do."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    parser = HttpParser(BODY_BYTES_MAX)
    found = [request for piece in feeding(raw + smuggled) for request in parser.feed(piece)]
    errors = [parser.error, *(request.refusal for request in found)]
    assert [error.code for error in errors if error is not None] == ["bad_request"]
    assert all(request.path != "/smuggled" for request in found)
    assert all(request.refusal is not None for request in found), "it was taken for whole"


@pytest.mark.parametrize(
    "line",
    [
        b"X-A: a\rX-B: b",
        b"X-A: a\nX-B: b",
        b"X-A: a\r\n folded",
        b"X-A: a\0b",
        b"X-A: a\x01b",
        b"X A: b",
        b"X-\xc3\x84: b",
        b": b",
        b"X-A",
    ],
)
def test_a_header_is_one_line_of_text(line: bytes) -> None:
    """No line ends, control characters or folds in values, no rubbish in names."""
    assert refusal(b"GET / HTTP/1.1\r\n" + HOST + line + b"\r\n\r\n") == "bad_request"


def test_a_path_that_is_no_text_is_refused() -> None:
    """Nothing is replaced by question marks: a key would be another key."""
    assert refusal(get("/publish/orders?key=%FF")) == "bad_request"
    assert refusal(get("/publish/%FF")) == "bad_request"
    assert refusal("GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == "bad_request"


# --- bounds ---------------------------------------------------------------------------------------
def test_a_long_address_is_refused() -> None:
    """While it comes, not when it is there."""
    assert refusal(b"GET /" + b"a" * 10_000) == "uri_too_long"
    assert one(get("/" + "a" * 8000)).path == "/" + "a" * 8000


@pytest.mark.parametrize(
    "lines",
    [
        [b"X-%d: a\r\n" % number for number in range(250)],
        [b"X-A: " + b"a" * 40_000 + b"\r\n"] * 2,
        [b"X-" + b"a" * 70_000 + b": a\r\n"],
    ],
)
def test_a_large_head_is_refused(lines: list[bytes]) -> None:
    """By number and by size."""
    assert refusal(b"GET / HTTP/1.1\r\n" + HOST + b"".join(lines) + b"\r\n") == "headers_too_large"


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n" + HOST + b"X-A: ",
        b"GET / HTTP/1.1\r\n" + HOST + b"X-",
        chunked(b"x")[:-2] + b"X-A: ",
        with_lines(CHUNKED, body=b"5;"),
        b"GET /",
        b"",
    ],
)
def test_something_without_an_end_is_given_up(start: bytes) -> None:
    """A header, a trailer, the extension of a chunk, or nothing but line ends, in any pieces."""
    parser = HttpParser(1 << 20)
    found = parser.feed(start)
    fed = 0
    while not (parser.error or found) and fed < 10 << 20:
        piece = b"a" * 1000 if start else b"\r\n" * 500
        found = parser.feed(piece)
        fed += len(piece)
    error = parser.error or found[0].refusal
    assert error is not None
    assert error.code in ("headers_too_large", "uri_too_long")
    assert fed <= (128 << 10)


def test_a_body_is_bounded_before_it_comes_and_while_it_comes() -> None:
    """Announced or in chunks, and however small these are."""
    head = post(b"").replace(b"Content-Length: 0", b"Content-Length: 2001")
    assert refusal(head) == "body_too_large"
    assert refusal(head.replace(b"2001", b"2001 ")) == "body_too_large"
    assert refusal(with_lines(CHUNKED, body=b"7d1\r\n" + b"x" * 2001)) == "body_too_large"
    assert refusal(chunked(*[b"x"] * 2001)) == "body_too_large"
    assert one(chunked(*[b"x"] * 2000)).body == b"x" * 2000
    assert one(post(b"x" * 2000)).body == b"x" * 2000


def test_a_refused_body_is_the_refusal_of_its_request() -> None:
    """So that it is answered as such, behind those before it."""
    ok, refused = parse(post(b"x") + post(b"x" * 3000, path="/publish/large"))
    assert ok.refusal is None
    assert refused.path == "/publish/large"
    assert refused.refusal is not None
    assert http.status_of(refused.refusal, kind_of(refused.refusal)) == 413


def test_many_small_pieces_cost_no_more_than_their_bytes() -> None:
    """A body of single bytes is kept as one run of bytes."""
    parser = HttpParser(1 << 20)
    head = chunked()[: -len(b"0\r\n\r\n")]
    tracemalloc.start()
    try:
        parser.feed(head)
        piece = b"1\r\nx\r\n" * 1000
        for _ in range(100):
            parser.feed(piece)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(parser.feed(b"0\r\n\r\n")[0].body) == 100_000


# --- answers --------------------------------------------------------------------------------------
def test_an_answer_in_one_go_is_the_same_as_one_in_parts() -> None:
    """The short way and the long way write the same bytes."""
    for keep_alive in (True, False):
        answer = Answer(200, b'{"a":1}')
        short = answer.encode(keep_alive=keep_alive)
        assert short == answer.encode(keep_alive=keep_alive, head_only=True) + b'{"a":1}'


def test_an_answer_without_content_has_none() -> None:
    """204 says nothing about a length."""
    content = Answer(204).encode()
    assert content.startswith(b"HTTP/1.1 204 No Content\r\nDate: ")
    assert content.endswith(b"\r\n\r\n")
    assert b"Content-" not in content.replace(b"X-Content-Type-Options", b"")


def test_every_answer_tells_browsers_to_be_careful() -> None:
    """No guessing of types, no frames, no cache: short and long answers, errors and streams."""
    for answer in (
        Answer(200, b"{}").encode(),
        Answer(200, b"{}").encode(keep_alive=False),
        Answer(200, b"{}").encode({"Vary": "Origin"}),
        Answer(204).encode(head_only=True),
        Answer(200, b"", "text/event-stream", endless=True).encode(),
        http.error_answer(Forbidden("no"), "forbidden").encode(),
    ):
        lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
        assert lines.count(b"X-Content-Type-Options: nosniff") == 1
        assert lines.count(b"X-Frame-Options: DENY") == 1
        assert lines.count(b"Cache-Control: no-store") == 1


def test_every_answer_says_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HTTP asks of a server that has a clock; and the next second has another."""
    answers: list[list[bytes]] = []
    for now in (0.0, 0.9, 86_399.0):
        monkeypatch.setattr(http, "time", lambda now=now: now)
        answers.append(
            [
                Answer(200, b"{}").encode(),
                Answer(204).encode(),
                Answer(200, b"", "text/event-stream", endless=True).encode(),
            ]
        )
    for early, late, other in zip(*answers, strict=True):
        assert b"\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n" in early
        assert late == early
        assert b"\r\nDate: Thu, 01 Jan 1970 23:59:59 GMT\r\n" in other


def test_further_headers_go_into_the_head() -> None:
    """After its own headers, before the content."""
    answer = Answer(200, b"{}", headers={"Allow": "GET"}).encode({"Vary": "Origin"})
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nDate: ")
    assert answer.endswith(b"\r\nAllow: GET\r\nVary: Origin\r\n\r\n{}")


def test_an_error_is_a_document_with_code_sentence_and_whether_to_try_again() -> None:
    """And a header for who tries again."""
    error = QueueFull("the queue is full")
    head, _, body = http.error_answer(error, kind_of(error)).encode().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nRetry-After: 1" in head
    assert json.loads(body) == {
        "error": {"code": "queue_full", "message": "the queue is full", "retryable": True}
    }


def test_every_kind_of_error_has_a_status_of_its_own_choice() -> None:
    """Nothing that a client can do something about is a 500."""
    from headrace import errors

    mistakes_of_ours = {"error", "outcome_unknown", "data_corrupt", "directory_locked"}
    for kind, cls in errors._KINDS.items():
        status = http.status_of(cls("x"), kind)
        assert (status == 500) == (kind in mistakes_of_ours), kind
        assert not cls.retryable or status in (429, 503), kind
    assert http.status_of(InvalidArgument("x", code="unsupported_media_type"), "x") == 415


# --- anything at all ------------------------------------------------------------------------------
TOKENS = st.text("abcdefghijklmnopqrstuvwxyzABC0123456789-", min_size=1, max_size=10)
VALUES = st.text(
    st.characters(min_codepoint=33, max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]),
    max_size=20,
)
PLAIN = st.sampled_from(["X-Header-A", "x-header-b", "traceparent", "Content-Type", "X-Other"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, bytes, dict[str, str]]]:
    method = draw(st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]))
    path = "/" + "/".join(draw(st.lists(TOKENS, max_size=3)))
    headers = draw(st.dictionaries(PLAIN, VALUES, max_size=3))
    body = draw(st.binary(max_size=60)) if method in ("POST", "PUT", "PATCH") else b""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{n}: {v}" for n, v in headers.items())]
    if body and draw(st.booleans()):
        at = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:at], body[at:]) if part]
        lines.append("Transfer-Encoding: chunked")
        raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
        raw = body
    expected = {n.lower(): v.strip(" \t") for n, v in headers.items()}
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw, (method, path, body, expected)


@given(st.lists(requests(), max_size=5), CUTS)
def test_what_is_written_is_read(
    items: list[tuple[bytes, tuple[str, str, bytes, dict[str, str]]]], cuts: list[int]
) -> None:
    """Any requests in any pieces are found as they were meant."""
    stream = b"".join(raw for raw, _ in items)
    parser = HttpParser(BODY_BYTES_MAX)
    found = [request for piece in cut_at(stream, cuts) for request in parser.feed(piece)]
    assert parser.error is None
    assert len(found) == len(items)
    for request, (_, (method, path, body, headers)) in zip(found, items, strict=True):
        assert (request.method, request.path, request.body) == (method, path, body)
        assert headers.items() <= request.headers.items()


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Requests to which something was done."""
    raw = bytearray(b"".join(raw for raw, _ in draw(st.lists(requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert"]))
        if kind == "flip" and at < len(raw):
            raw[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 8))]
        elif kind == "double":
            raw[at:at] = raw[at : at + draw(st.integers(1, 40))]
        else:
            raw[at:at] = draw(
                st.sampled_from([b"\r\n", b"\r", b"\0", b"Content-Length: 3\r\n", b"%", b"?", b":"])
            )
    return bytes(raw)


@given(st.one_of(broken(), st.binary(max_size=300)), CUTS)
@example(b"GET /%FF HTTP/1.1\r\nHost: x\r\n\r\n", [])
@example(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", [])
@example(WEBSOCKET + b"\xff\xfe", [3])
def test_whatever_comes_there_are_requests_and_typed_errors_and_nothing_else(
    data: bytes, cuts: list[int]
) -> None:
    """However it is cut; and no request has a line end in a header."""
    parser = HttpParser(BODY_BYTES_MAX)
    found = [request for piece in cut_at(data, cuts) for request in parser.feed(piece)]
    assert parser.error is None or isinstance(parser.error, HeadraceError)
    for request in found:
        assert request.method
        assert request.words
        assert len(request.body) <= BODY_BYTES_MAX
        for name, value in request.headers.items():
            assert not set("\r\n\0") & set(name + value)
    whole_parser = HttpParser(BODY_BYTES_MAX)
    again = whole_parser.feed(data)
    assert [flat(r) for r in again] == [flat(r) for r in found]
    assert (whole_parser.error and whole_parser.error.code) == (parser.error and parser.error.code)
    assert whole_parser.rest == parser.rest
