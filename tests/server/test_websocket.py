"""WebSockets: the commands, and who gets which message."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from headrace.server import websocket
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Events, Http, http_of, target
from tests.server.http_websocket import TEXT, WebSocket, frame

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def ws(server: RunningServer) -> Iterator[WebSocket]:
    """A connection."""
    with WebSocket(server.http_address) as connection:
        yield connection


@pytest.fixture
def other(server: RunningServer) -> Iterator[WebSocket]:
    """Another one."""
    with WebSocket(server.http_address) as connection:
        yield connection


def stats(http: Http, group: str, topic: str = "orders") -> Any:
    return http.ok("GET", target("subscriptions", group, topic=topic))


# --- publishing -----------------------------------------------------------------------------------
def test_a_publish_is_answered_when_it_brings_an_id(ws: WebSocket) -> None:
    """With the receipt; without an id nothing is said, unless it fails."""
    answer = ws.ask("publish", topic="orders", data={"a": 1})
    assert set(answer) == {
        "type", "messageId", "id", "topic", "partition", "offset", "timestamp",
    }  # fmt: skip
    assert (answer["type"], answer["messageId"], answer["offset"]) == ("published", "m-1", 0)
    ws.send({"type": "publish", "topic": "orders", "data": 2})
    ws.send({"type": "publish", "topic": "a/b", "data": 3})
    error = ws.read()
    assert (error["type"], error["code"], error["messageId"]) == ("error", "invalid_topic", None)
    assert ws.ok("publish", topic="orders", data=4)["offset"] == 2


def test_the_message_format_of_the_first_readme(ws: WebSocket, http: Http) -> None:
    """All its fields, also the time, which is the broker's own business."""
    ws.send(
        {
            "type": "publish",
            "topic": "user.events",
            "data": {"userId": 123},
            "messageId": "550e8400-e29b-41d4-a716-446655440000",
            "timestamp": "2023-01-01T00:00:00Z",
        }
    )
    answer = ws.read()
    assert answer["messageId"] == "550e8400-e29b-41d4-a716-446655440000"
    assert not answer["timestamp"].startswith("2023")
    assert http.consume("user.events")["data"] == {"userId": 123}


@pytest.mark.parametrize(
    "data", [{"a": [1, None, True]}, "text", 12345678901234567890123, -1.5, None, [], "é\u2028\0"]
)
def test_any_json_arrives_as_it_was(ws: WebSocket, other: WebSocket, http: Http, data: Any) -> None:
    """Over WebSockets and over HTTP, every digit of it."""
    other.ok("subscribe", topic="orders")
    ws.ok("publish", topic="orders", data=data)
    assert other.message()["data"] == data
    assert http.consume("orders")["data"] == data


def test_bytes_travel_as_base64(ws: WebSocket, http: Http, server: RunningServer) -> None:
    """And are bytes for everybody else; what arrives can be sent on as it is."""
    http.ok("POST", "/subscribe/orders", {"group": "copy"})
    ws.ok("publish", topic="orders", data="AP/+", encoding="base64")
    with server.client() as client:
        assert client.fetch("orders")[0].value == b"\x00\xff\xfe"
    message = http.consume("orders")
    assert (message["data"], message["encoding"]) == ("AP/+", "base64")
    assert message["headers"] == {"content-type": "application/octet-stream"}
    again = {name: message[name] for name in ("data", "encoding", "headers")}
    ws.ok("publish", topic="orders", **again)
    copy = http.consume("orders")
    assert {name: copy[name] for name in ("data", "encoding", "headers")} == again


def test_text_of_another_type_is_sent_on_as_text(ws: WebSocket, http: Http) -> None:
    """Without quotes around it, because its type says that it is no JSON."""
    headers = {"content-type": "text/plain"}
    ws.ok("publish", topic="orders", data="hello", headers=headers)
    message = http.consume("orders")
    assert (message["data"], message["headers"]) == ("hello", headers)


def test_options_of_a_publish(ws: WebSocket, http: Http) -> None:
    """Key, id, headers, partition, target, delay, life, and once only."""
    http.ok("PUT", "/topics/orders", {"partitions": 2})
    http.ok("POST", "/subscribe/orders", {"group": "mail"})
    own = str(uuid4())
    answer = ws.ok(
        "publish",
        topic="orders",
        data=1,
        key="k",
        id=own,
        headers={"traceparent": TRACEPARENT, "Source": "ws"},
        partition=1,
        to="mail",
        ttl=60,
        idempotency_key="order-1",
    )
    assert (answer["id"], answer["partition"]) == (own, 1)
    again = ws.ok("publish", topic="orders", data=1, partition=1, idempotency_key="order-1")
    assert again["duplicate"]
    assert (again["id"], again["timestamp"]) == (own, answer["timestamp"])
    assert http.consume("orders") is None
    message = http.consume("orders", group="mail")
    assert message["headers"] == {"traceparent": TRACEPARENT, "Source": "ws"}
    assert (message["key"], message["id"]) == ("k", own)
    later = ws.ok("publish", topic="orders", data=2, delay="10m")
    assert later["scheduled"]
    assert "offset" not in later
    assert len(http.ok("GET", "/scheduled")) == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"data": 1}, "missing_argument"),
        ({"topic": 5, "data": 1}, "missing_argument"),
        ({"topic": "orders"}, "missing_argument"),
        ({"topic": "a/b", "data": 1}, "invalid_topic"),
        ({"topic": "__scheduled", "data": 1}, "invalid_topic"),
        ({"topic": "orders.*", "data": 1}, "invalid_topic"),
        ({"topic": "orders", "data": 1, "headers": []}, "invalid_headers"),
        ({"topic": "orders", "data": 1, "headers": {"a": 1}}, "invalid_headers"),
        ({"topic": "orders", "data": 1, "headers": {"a": "b\r\nc"}}, "invalid_headers"),
        ({"topic": "orders", "data": 1, "headers": {"": "b"}}, "invalid_headers"),
        ({"topic": "orders", "data": "?", "encoding": "base64"}, "invalid_value"),
        ({"topic": "orders", "data": 5, "encoding": "base64"}, "invalid_value"),
        ({"topic": "orders", "data": "x", "encoding": "rot13"}, "invalid_value"),
        ({"topic": "orders", "data": 1, "key": ["k"]}, "invalid_argument"),
        ({"topic": "orders", "data": 1, "key64": "?"}, "invalid_key"),
        ({"topic": "orders", "data": 1, "partition": True}, "invalid_argument"),
        ({"topic": "orders", "data": 1, "partition": 7}, "invalid_partition"),
        ({"topic": "orders", "data": 1, "id": "seven"}, "invalid_id"),
        ({"topic": "orders", "data": 1, "delay": -1}, "invalid_argument"),
        ({"topic": "orders", "data": 1, "idempotency_key": ""}, "invalid_argument"),
        ({"topic": "orders", "data": "x" * (1 << 20)}, "message_too_large"),
        ({"topic": "orders", "data": "x" * (1 << 20), "key": "k"}, "message_too_large"),
    ],
)
def test_what_cannot_be_published_is_answered(
    ws: WebSocket, http: Http, fields: dict[str, Any], code: str
) -> None:
    """With the id of the command; the connection goes on and nothing was stored."""
    answer = ws.ask("publish", **fields)
    assert (answer["type"], answer["code"]) == ("error", code)
    assert len(answer["message"]) > 10
    assert answer["retryable"] is False
    assert ws.ok("ping")["type"] == "pong"
    assert all(topic["messages"] == 0 for topic in http.ok("GET", "/topics"))


def test_a_full_queue_may_be_tried_again() -> None:
    """The error says so."""
    with (
        running_server(memory=True, max_queue_size=1) as server,
        WebSocket(server.http_address) as ws,
    ):
        ws.ok("publish", topic="orders", data=1)
        answer = ws.ask("publish", topic="orders", data=2)
        assert (answer["code"], answer["retryable"]) == ("queue_full", True)


# --- commands -------------------------------------------------------------------------------------
def test_a_frame_may_hold_many_commands(ws: WebSocket) -> None:
    """An array, done in order; one that fails does not hold up the others."""
    ws.send(
        [
            {"type": "subscribe", "topic": "orders", "messageId": 1},
            {"type": "publish", "topic": "orders", "data": "a", "messageId": 2},
            {"type": "nonsense", "messageId": 3},
            "nonsense",
            {"type": "publish", "topic": "orders", "data": "b", "messageId": {"any": "JSON"}},
        ]
    )
    found = [ws.read() for _ in range(7)]
    answers = [item for item in found if item["type"] != "message"]
    messages = [item["data"] for item in found if item["type"] == "message"]
    assert messages == ["a", "b"]
    by_id = {json.dumps(item["messageId"]): item["type"] for item in answers}
    assert by_id == {
        "1": "subscribed", "2": "published", "3": "error", "null": "error",
        '{"any": "JSON"}': "published",
    }  # fmt: skip


def test_a_thousand_publishes_are_answered_in_order(ws: WebSocket) -> None:
    """In arrays and one by one."""
    for start in range(0, 1000, 100):
        ws.send(
            [
                {"type": "publish", "topic": "orders", "data": n, "messageId": n}
                for n in range(start, start + 99)
            ]
        )
        ws.send({"type": "publish", "topic": "orders", "data": 0, "messageId": start + 99})
    answers = [ws.read() for _ in range(1000)]
    assert [a["messageId"] for a in answers] == [*range(1000)]
    assert [a["offset"] for a in answers] == [*range(1000)]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"nonsense", "invalid_json"),
        (b"", "invalid_json"),
        (b"[" * 2000, "invalid_json"),
        (b"5", "invalid_json"),
        (b'{"type": "nonsense"}', "unknown_command"),
        (b'{"type": ["publish"]}', "unknown_command"),
        (b'{"type": "__init__"}', "unknown_command"),
        (b"{}", "unknown_command"),
        (b'{"type": "publish", "topic": "t", "data": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" + b"{}," * 10_000 + b"{}]", "invalid_argument"),
    ],
)
def test_what_is_no_command_is_answered(ws: WebSocket, raw: bytes, code: str) -> None:
    """And the connection goes on."""
    ws.raw.send(frame(TEXT, raw))
    answer = ws.read()
    assert (answer["type"], answer["code"], answer["messageId"]) == ("error", code, None)
    assert ws.ok("ping")["type"] == "pong"


def test_a_mistake_of_ours_is_one_answer(
    ws: WebSocket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command fails, the connection goes on."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(websocket, "publish_options", fail)
    monkeypatch.setattr("headrace.broker.engine.Engine.subscription", fail)
    monkeypatch.setattr("headrace.server.members.Memberships.follow", fail)
    assert ws.ask("publish", topic="orders", data=1, key="k")["code"] == "bug"
    assert ws.ask("subscribe", topic="orders", group="billing")["code"] == "bug"
    assert ws.ask("subscribe", topic="orders")["code"] == "bug"
    assert ws.ok("publish", topic="orders", data=1)["offset"] == 0
    assert "a mistake" in caplog.text


# --- subscribing ----------------------------------------------------------------------------------
def test_a_topic_that_does_not_exist_is_told(ws: WebSocket) -> None:
    """Subscribing creates it, empty, and the answer says so."""
    created = [
        ws.ok("subscribe", **fields).get("topic_created")
        for fields in (
            {"topic": "mispelt"},
            {"topic": "mispelt2", "group": "g"},
            {"topic": "mispelt", "group": "g"},
            {"topic": "mispelt2"},
            {"topic": "other.*"},
        )
    ]
    assert created == [True, True, None, None, None]


def test_a_plain_subscriber_gets_everything_from_now_on(ws: WebSocket, other: WebSocket) -> None:
    """Its own messages too; until it unsubscribes."""
    other.ok("publish", topic="orders", data="before")
    answer = ws.ok("subscribe", topic="orders")
    assert answer == {"type": "subscribed", "topic": "orders", "messageId": "m-1"}
    other.ok("publish", topic="orders", data=1)
    ws.ok("publish", topic="orders", data=2)
    first = ws.message()
    assert set(first) == {
        "type", "id", "topic", "partition", "offset", "data", "headers", "timestamp", "attempt",
        "retryCount",
    }  # fmt: skip
    assert [first["data"], *ws.messages(1)] == [1, 2]
    assert ws.ok("unsubscribe", topic="orders")["type"] == "unsubscribed"
    other.ok("publish", topic="orders", data=3)
    assert ws.is_quiet()
    assert ws.ask("unsubscribe", topic="orders")["code"] == "not_subscribed"


def test_subscribing_twice_is_a_conflict(ws: WebSocket) -> None:
    """A message is not sent twice to who asked twice."""
    ws.ok("subscribe", topic="orders")
    assert ws.ask("subscribe", topic="orders")["code"] == "subscribed"
    ws.ok("subscribe", topic="orders", group="billing")
    assert ws.ask("subscribe", topic="orders", group="billing")["code"] == "subscribed"
    ws.ok("publish", topic="orders", data=1)
    assert ws.messages(2) == [1, 1]
    assert ws.is_quiet()


def test_wildcards(ws: WebSocket, other: WebSocket) -> None:
    """One word, or all the rest; also over topics that come later."""
    ws.ok("subscribe", topic="orders.*")
    other.ok("subscribe", topic="orders.>")
    for topic in ("orders.a", "orders.a.b", "orders.c", "invoices.a"):
        ws.ok("publish", topic=topic, data=topic)
    assert sorted(ws.messages(2)) == ["orders.a", "orders.c"]
    assert sorted(other.messages(3)) == ["orders.a", "orders.a.b", "orders.c"]
    assert ws.is_quiet()


def test_a_group_shares_and_keeps_its_place(
    ws: WebSocket, other: WebSocket, http: Http, server: RunningServer
) -> None:
    """Each message to one member; acknowledged on delivery unless told otherwise."""
    for member in (ws, other):
        answer = member.ok("subscribe", topic="orders", group="billing")
        assert answer["group"] == "billing"
    assert stats(http, "billing")["members"] == 2
    for number in range(10):
        http.publish("orders", number)
    shares = [ws.messages(5), other.messages(5)]
    assert sorted(shares[0] + shares[1]) == [*range(10)]
    assert stats(http, "billing")["lag"] == 0
    ws.ok("unsubscribe", topic="orders", group="billing")
    other.close()
    wait_until(lambda: stats(http, "billing")["members"] == 0)
    http.publish("orders", 10)
    ws.ok("subscribe", topic="orders", group="billing")
    assert ws.messages(1) == [10]


def test_where_a_new_group_begins(ws: WebSocket, http: Http) -> None:
    """At the earliest unless told otherwise."""
    http.ok("POST", "/subscribe/orders", {"group": "keeper"})
    http.ask("POST", "/publish/batch/orders", [0, 1, 2])
    ws.ok("subscribe", topic="orders", group="all", ack="manual")
    assert ws.messages(3) == [0, 1, 2]
    ws.ok("subscribe", topic="orders", group="last", start=2, ack="manual")
    assert ws.messages(1) == [2]
    ws.ok("subscribe", topic="orders", group="new", start="latest")
    assert ws.is_quiet()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "missing_argument"),
        ({"topic": "a*b"}, "invalid_topic"),
        ({"topic": "__scheduled"}, "invalid_topic"),
        ({"topic": "orders", "group": 5}, "invalid_argument"),
        ({"topic": "orders", "group": "a/b"}, "invalid_subscription"),
        ({"topic": "__scheduled", "group": "__schedule"}, "invalid_subscription"),
        ({"topic": "orders", "group": "g", "prefetch": 0}, "invalid_argument"),
        ({"topic": "orders", "group": "g", "prefetch": "x"}, "invalid_argument"),
        ({"topic": "orders", "group": "g", "ack": "maybe"}, "invalid_argument"),
        ({"topic": "orders", "group": "g", "start": "soon"}, "invalid_offset"),
        ({"topic": "orders", "group": "g", "start": []}, "invalid_offset"),
        ({"topic": "orders", "group": "g", "start": {}}, "invalid_offset"),
    ],
)
def test_what_cannot_be_subscribed_is_answered(
    ws: WebSocket, fields: dict[str, Any], code: str
) -> None:
    """With the id of the command."""
    answer = ws.ask("subscribe", **fields)
    assert (answer["type"], answer["code"]) == ("error", code)


def test_unsubscribing_before_the_subscription_is_there(ws: WebSocket, http: Http) -> None:
    """It waits for it: in the end there is none."""
    ws.send(
        [
            {"type": "subscribe", "topic": "orders", "group": "billing", "messageId": 1},
            {"type": "subscribe", "topic": "orders", "messageId": 2},
            {"type": "unsubscribe", "topic": "orders", "group": "billing", "messageId": 3},
            {"type": "unsubscribe", "topic": "orders", "messageId": 4},
        ]
    )
    types = [ws.read()["type"] for _ in range(4)]
    assert types == ["subscribed", "subscribed", "unsubscribed", "unsubscribed"]
    assert stats(http, "billing")["members"] == 0
    http.publish("orders", 1)
    assert ws.is_quiet()


def test_the_end_of_a_topic_is_told(ws: WebSocket, http: Http) -> None:
    """To its members; a plain subscriber goes on when it is made again."""
    ws.ok("subscribe", topic="orders", group="billing")
    ws.ok("subscribe", topic="orders")
    http.ok("DELETE", "/topics/orders")
    error = ws.read()
    assert (error["type"], error["code"]) == ("error", "topic_not_found")
    http.publish("orders", 1)
    assert ws.messages(1) == [1]
    assert ws.ask("unsubscribe", topic="orders", group="billing")["code"] == "not_subscribed"


# --- settling -------------------------------------------------------------------------------------
@pytest.fixture
def member(ws: WebSocket, http: Http) -> WebSocket:
    """A member of a group that acknowledges by hand."""
    http.ok("POST", "/subscribe/orders", {"group": "billing", "backoff": 0, "ack_timeout": 30})
    ws.ok("subscribe", topic="orders", group="billing", ack="manual", prefetch=10)
    return ws


def test_acknowledging(member: WebSocket, http: Http) -> None:
    """A delivery comes with the message and with the group's name; it is settled once."""
    http.publish("orders", 1)
    message = member.message()
    assert message["group"] == "billing"
    assert stats(http, "billing")["in_flight"] == 1
    assert member.ok("ack", delivery=message["delivery"])["type"] == "acked"
    assert stats(http, "billing")["lag"] == 0
    for verb in ("ack", "nack", "extend"):
        assert member.ask(verb, delivery=message["delivery"])["code"] == "stale_delivery"


def test_giving_back(member: WebSocket, http: Http) -> None:
    """It comes again, with its count; with a delay, later."""
    http.publish("orders", 1)
    first = member.message()
    answer = member.ok("nack", delivery=first["delivery"], reason="no stock")
    assert answer["type"] == "nacked"
    again = member.message()
    assert (again["retryCount"], again["offset"]) == (1, first["offset"])
    member.ok("nack", delivery=again["delivery"], delay=600)
    assert member.is_quiet()
    assert stats(http, "billing")["waiting_for_retry"] == 1


def test_asking_for_more_time(ws: WebSocket, http: Http) -> None:
    """Without it the message comes again."""
    http.ok("POST", "/subscribe/orders", {"group": "billing", "backoff": 0, "ack_timeout": 0.3})
    ws.ok("subscribe", topic="orders", group="billing", ack="manual")
    http.publish("orders", "kept")
    kept = ws.message()
    assert ws.ok("extend", delivery=kept["delivery"], seconds=600)["type"] == "extended"
    http.publish("orders", "lost")
    lost = ws.message()
    again = ws.message()
    assert (again["data"], again["retryCount"]) == ("lost", 1)
    assert ws.ask("ack", delivery=lost["delivery"])["code"] == "stale_delivery"
    ws.ok("ack", delivery=kept["delivery"])


def test_settling_many(member: WebSocket, http: Http) -> None:
    """Those that are out; the others are named."""
    http.ask("POST", "/publish/batch/orders", [0, 1, 2, 3])
    tokens = [member.message()["delivery"] for _ in range(4)]
    member.ok("ack", delivery=tokens[0])
    answer = member.ok("ack", deliveries=tokens[:3])
    assert (answer["type"], answer["stale"]) == ("acked", [tokens[0]])
    assert member.ask("ack", deliveries=tokens[:3])["code"] == "stale_delivery"
    assert stats(http, "billing")["lag"] == 1


def test_a_delivery_belongs_to_its_connection(
    member: WebSocket, other: WebSocket, http: Http
) -> None:
    """Another one cannot settle it; and when its connection ends it goes to another one."""
    http.publish("orders", 1)
    message = member.message()
    assert other.ask("ack", delivery=message["delivery"])["code"] == "stale_delivery"
    other.ok("subscribe", topic="orders", group="billing", ack="manual")
    member.close()
    again = other.message()
    assert (again["offset"], again["retryCount"]) == (message["offset"], 1)


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("ack", {}),
        ("ack", {"delivery": 5}),
        ("ack", {"deliveries": 5}),
        ("ack", {"deliveries": []}),
        ("ack", {"deliveries": ["x"]}),
        ("nack", {"delay": -1}),
        ("nack", {"delay": "soon"}),
        ("nack", {"reason": 5}),
        ("extend", {"seconds": -1}),
        ("extend", {"seconds": "long"}),
    ],
)
def test_what_cannot_be_settled_is_answered(
    member: WebSocket, http: Http, verb: str, fields: dict[str, Any]
) -> None:
    """The message stays out."""
    http.publish("orders", 1)
    token = member.message()["delivery"]
    needed = {} if verb == "ack" else {"delivery": token}
    answer = member.ask(verb, **{**needed, **fields})
    assert answer["type"] == "error"
    assert answer["code"].startswith("invalid_")
    member.ok("ack", delivery=token)


def test_no_more_than_the_prefetch_is_out(member: WebSocket, http: Http) -> None:
    """Acknowledging makes room for the next."""
    http.ask("POST", "/publish/batch/orders", list(range(30)))
    first = [member.message() for _ in range(10)]
    assert member.is_quiet()
    member.ok("ack", deliveries=[message["delivery"] for message in first])
    assert member.messages(10) == [*range(10, 20)]


# --- fan-out --------------------------------------------------------------------------------------
def test_a_message_for_many_is_encoded_once(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty subscribers, one encoding for each message."""
    count = 0
    encode = websocket.frame_of

    def counting(message: Any) -> bytes:
        nonlocal count
        count += 1
        return encode(message)

    monkeypatch.setattr(websocket, "frame_of", counting)
    sockets = [WebSocket(server.http_address) for _ in range(30)]
    for ws in sockets:
        ws.ok("subscribe", topic="orders")
    for number in range(5):
        http.publish("orders", number)
        for ws in sockets:
            assert ws.message()["data"] == number
    assert count == 5
    for ws in sockets:
        ws.close()


def test_what_was_encoded_is_kept_in_bounds(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bytes, whatever the number of topics; and what does not fit is sent all the same."""
    monkeypatch.setattr("headrace.server.views.Views.KEPT_BYTES_MAX", 50_000)
    with WebSocket(server.http_address) as ws:
        ws.ok("subscribe", topic="t.*")
        for number in range(40):
            http.publish(f"t.{number}", "x" * 5_000)
            http.publish(f"t.{number % 3}", "y" * 100)
        http.publish("t.large", "x" * 200_000)
        assert len([ws.message() for _ in range(81)]) == 81
        views = websocket._views[server.server.hub]
        kept = sum(map(len, views._kept.values()))
        assert kept <= views._share.size <= 50_000


def test_wet_and_dry_ways_out_show_the_same(server: RunningServer, http: Http) -> None:
    """A message is the same JSON over a WebSocket, an event stream and HTTP."""
    with (
        WebSocket(server.http_address) as ws,
        Events(server.http_address, "/stream/orders") as events,
    ):
        events.begin()
        ws.ok("subscribe", topic="orders")
        http.publish("orders", {"a": 1}, key="k")
        expected = http.consume("orders")
        message = ws.message()
        assert message.pop("type") == "message"
        assert message == events.next().json == expected


def test_a_restart_is_survived_by_who_comes_back() -> None:
    """A group goes on where it stood."""
    with running_server() as server:
        with WebSocket(server.http_address) as ws:
            ws.ok("subscribe", topic="orders", group="billing", ack="manual")
            for number in range(3):
                ws.ok("publish", topic="orders", data=number)
            ws.ok("ack", delivery=ws.message()["delivery"])
        server.restart()
        with WebSocket(server.http_address) as ws:
            ws.ok("subscribe", topic="orders", group="billing", ack="manual")
            assert ws.messages(2) == [1, 2]
        http = http_of(server)
        assert stats(http, "billing")["lag"] == 2
        http.close()
