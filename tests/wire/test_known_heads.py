"""Heads that are compared instead of parsed: nothing is understood otherwise because of it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.http import HttpParser, KnownHeads, Request

BODY_BYTES_MAX = 100


class NoHeads(KnownHeads):
    """Knows none, so that everything is parsed."""

    def find(self, data: bytes) -> Request | None:
        return None


def post(body: bytes, *lines: str, path: str = "/publish/orders", version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: localhost", *lines]
    if not any(line.lower().startswith(("transfer-encoding", "content-length")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


REQUESTS = [
    post(b"12345"),
    post(b"54321"),
    post(b"\r\n\r\n!"),
    post(b""),
    post(b"x" * 101),
    post(b"12345", "X-Header-Source: shop"),
    post(b"12345", "Connection: close"),
    post(b"12345", "Expect: 100-continue"),
    post(b"5\r\n12345\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    post(b"12345", version="1.0"),
    post(b"12345", "Connection: keep-alive", version="1.0"),
    post(b"12345", "Content-Length: 6"),
    post(b"12345", "Content-Length: 4"),
    post(b"12345", path="/publish/orders?key=1"),
    post(b"12345", path="/publish/%6frders"),
    b"\r\n" + post(b"12345"),
    b"GET /topics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /topics HTTP/1.1\nHost: localhost\n\n",
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"rubbish\r\n\r\n",
]


def facts(request: Request) -> tuple[object, ...]:
    return (
        request.method,
        request.path,
        request.words,
        request.query,
        request.headers,
        request.body,
        request.keep_alive,
        request.upgrade,
        request.version,
        request.refusal and request.refusal.code,
    )


def understood(pieces: list[bytes], heads: KnownHeads) -> list[object]:
    parser = HttpParser(BODY_BYTES_MAX, heads=heads)
    found: list[object] = []
    for piece in pieces:
        known = parser.known(piece)
        found += [facts(request) for request in ([known] if known else parser.feed(piece))]
        found.append((parser.expects_continue, parser.rest))
    found.append(parser.error and parser.error.code)
    return found


@given(st.lists(st.lists(st.sampled_from(REQUESTS), max_size=6), max_size=6), st.data())
def test_streams_mean_the_same_with_and_without(
    streams: list[list[bytes]], data: st.DataObject
) -> None:
    """Connections that share what they know, with requests in one piece, in two, or glued together."""
    heads = KnownHeads()
    for requests in streams:
        pieces: list[bytes] = []
        for request in requests:
            how = data.draw(st.sampled_from(["whole", "cut", "glued"]))
            if how == "cut":
                at = data.draw(st.integers(1, len(request) - 1))
                pieces += [request[:at], request[at:]]
            elif how == "glued" and pieces:
                pieces[-1] += request
            else:
                pieces.append(request)
        assert understood(pieces, heads) == understood(pieces, NoHeads())


def test_a_known_head_is_not_parsed_again() -> None:
    """Also on another connection; the body is its own, what was found out is shared."""
    heads = KnownHeads()
    [first] = HttpParser(BODY_BYTES_MAX, heads=heads).feed(post(b"12345"))
    first.memo["seen"] = True
    parser = HttpParser(BODY_BYTES_MAX, heads=heads)
    parser._feed = lambda data: None  # type: ignore[method-assign]
    again = parser.known(post(b"54321"))
    assert again is not None
    assert (again.body, again.memo) == (b"54321", {"seen": True})
    assert first.body == b"12345"


def test_what_is_known_is_bounded() -> None:
    """A head for each request does not grow for ever, and a long one is not kept."""
    heads = KnownHeads()
    parser = HttpParser(BODY_BYTES_MAX, heads=heads)
    for number in range(KnownHeads.COUNT_MAX * 2 + 1):
        parser.feed(post(b"", f"X-Number: {number}"))
        assert len(heads._requests) <= KnownHeads.COUNT_MAX
    heads = KnownHeads()
    HttpParser(BODY_BYTES_MAX, heads=heads).feed(post(b"", "X-Long: " + "x" * KnownHeads.BYTES_MAX))
    assert heads._requests == {}
