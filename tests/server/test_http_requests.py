"""Requests and replies over HTTP, with a worker over HTTP and one in Python."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from headrace.model import Message
from headrace.testing import RunningServer
from tests.server.http_rig import Http, http_of


def test_a_request_over_http(server: RunningServer, http: Http) -> None:
    """A Python worker replies; JSON stays JSON, and headers are carried in both directions."""

    def handle(message: Message) -> None:
        assert message.key == b"k"
        message.reply(b'{"of": %b}' % message.value, {"lang": message.headers["lang"]})

    with server.client() as worker:
        worker.subscribe_to_subscription("pricing", handle, "prices")
        answer = http.ask(
            "POST", "/request/prices?key=k&wait=20000", {"a": 1}, {"X-Header-Lang": "en"}
        )
    assert answer.status == 200
    assert (answer.json["data"], answer.json["headers"]) == ({"of": {"a": 1}}, {"lang": "en"})


def test_a_worker_over_http(server: RunningServer, http: Http) -> None:
    """It consumes the request, replies to the address in its header, and acknowledges it."""
    replies: list[Any] = []

    def ask() -> None:
        with server.client() as client:
            replies.append(client.request("prices", "apple", timeout=20))

    thread = threading.Thread(target=ask)
    thread.start()
    request = http.consume("prices", group="pricing", ack="manual", wait=20_000)
    address = request["headers"]["headrace-reply-to"]
    path = f"/reply/{address}"
    assert http.ok("POST", path, "12 cents", **{"Content-Type": "text/plain"}) == {
        "delivered": True
    }
    assert http.ok("POST", path, "13 cents", **{"Content-Type": "text/plain"}) == {
        "delivered": False
    }
    settled = http.ok("POST", "/ack/prices?group=pricing", {"delivery": request["delivery"]})
    assert settled["settled"] == 1
    thread.join(20)
    assert replies[0].text() == "12 cents"


def test_no_reply_and_wrong_requests(http: Http) -> None:
    """Each has its code: in time no reply, no JSON, a wait that is too long, an address that is none."""
    answer = http.ask("POST", "/request/prices?wait=10", {})
    assert (answer.status, answer.code) == (504, "no_reply")
    for path, body, code in (
        ("/request/prices", "{", "invalid_json"),
        ("/request/prices?wait=99999999999", "1", "invalid_argument"),
        ("/request/prices?partition=1", "1", "unknown_parameter"),
        ("/request/__events?wait=1", "1", "invalid_topic"),
        ("/reply/someone", "1", "invalid_id"),
    ):
        refused = http.ask("POST", path, body, {"Content-Type": "application/json"})
        assert (refused.status, refused.code) == (400, code), path


def test_another_connection_is_not_held_up(server: RunningServer, http: Http) -> None:
    """While a request waits, its broker answers others; a stop of the broker ends it."""

    def ask() -> None:
        with suppress(HTTPException, OSError):  # the connection ends, or an answer says why
            http.ask("POST", "/request/prices?wait=600000", {})

    thread = threading.Thread(target=ask)
    thread.start()
    other = http_of(server)
    while not server.engine.requests:
        assert other.get("/health").status == 200
    other.close()
    server.stop()
    thread.join(20)
    assert not thread.is_alive()
