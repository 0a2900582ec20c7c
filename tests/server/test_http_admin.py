"""Topics, subscriptions, dead letters and delayed messages over HTTP, and every refusal in words."""

import time
from typing import Any
from uuid import UUID

import pytest

from headrace.server.server import ALL_ROUTES
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import TEXT, Http, http_of, target


def bury(http: Http, *values: Any, group: str = "billing", topic: str = "orders") -> None:
    """Publish values and let the group give all of them up."""
    http.ok("POST", f"/subscribe/{topic}", {"group": group, "max_deliveries": 1})
    before = http.ok("GET", target("subscriptions", group, topic=topic))["dead_lettered"]
    for value in values:
        http.publish(topic, value)
    for message in http.consume_batch(topic, group=group, ack="manual"):
        body = {"delivery": message["delivery"], "group": group, "reason": "no stock"}
        assert http.ask("POST", f"/nack/{topic}", body).status == 200
    path = target("subscriptions", group, topic=topic)
    wait_until(lambda: http.ok("GET", path)["dead_lettered"] == before + len(values))


# --- topics ---------------------------------------------------------------------------------------
def test_a_topics_life(http: Http) -> None:
    """Made, made again, changed, listed, described, deleted."""
    made = http.ask("PUT", "/topics/orders", {"partitions": 3, "retention_hours": 48})
    assert made.status == 201
    assert len(made.json["partitions"]) == 3
    assert made.json["settings"]["retention_hours"] == 48
    assert http.ask("PUT", "/topics/orders", {"partitions": 3}).status == 200
    assert http.ask("PUT", "/topics/orders", {"partitions": 2}).status == 409
    assert http.ask("PUT", "/topics/plain").status == 201
    changed = http.ok("PATCH", "/topics/orders", {"partitions": 4, "max_queue_size": 100})
    assert len(changed["partitions"]) == 4
    assert [topic["topic"] for topic in http.ok("GET", "/topics")] == ["orders", "plain"]
    assert http.ok("GET", "/topics/orders") == http.ok("GET", "/topics/orders/stats")
    assert http.ok("DELETE", "/topics/orders") == {"deleted": "orders"}
    for method in ("GET", "DELETE", "PATCH"):
        answer = http.ask(method, "/topics/orders", {} if method == "PATCH" else None)
        assert (answer.status, answer.code) == (404, "topic_not_found")


def test_statistics_say_what_is_there(http: Http) -> None:
    """Messages, bytes, what is unread, who reads, and how durable it is."""
    http.ok("POST", "/subscribe/orders", {"group": "billing"})
    http.ask("POST", "/publish/batch/orders", [1, 2, 3])
    http.consume("orders", group="billing")
    stats = http.ok("GET", "/topics/orders/stats")
    assert (stats["topic"], stats["backlog"], stats["durability"]) == ("orders", 2, "memory")
    assert stats["subscriptions"] == ["billing"]
    assert stats["partitions"][0]["end_offset"] == 3
    assert stats["bytes"] > 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"partitions": 0}, 400, "invalid_setting"),
        ({"partitions": "many"}, 400, "invalid_setting"),
        ({"partitions": None}, 400, "invalid_setting"),
        ({"colour": "red"}, 400, "unknown_setting"),
        ({"name": "other"}, 400, "unknown_setting"),
        ({"self": 1}, 400, "unknown_setting"),
        ({"topic": "other"}, 400, "unknown_setting"),
        ({"settings": {}}, 400, "unknown_setting"),
        ([], 400, "invalid_json"),
        ("{", 400, "invalid_json"),
    ],
)
def test_settings_that_cannot_be_are_refused(http: Http, body: Any, status: int, code: str) -> None:
    """When a topic is made and when it is changed; nothing is made or changed."""
    answer = http.ask("PUT", "/topics/orders", body)
    assert (answer.status, answer.code) == (status, code)
    assert http.ok("GET", "/topics") == []
    http.ok("PUT", "/topics/orders")
    before = http.ok("GET", "/topics/orders")
    answer = http.ask("PATCH", "/topics/orders", body)
    assert (answer.status, answer.code) == (status, code)
    assert http.ok("GET", "/topics/orders") == before


# --- subscriptions --------------------------------------------------------------------------------
def test_a_subscriptions_life(http: Http) -> None:
    """Made with settings, changed, listed with its lag, deleted."""
    made = http.ask("POST", "/subscribe/orders", {"group": "billing", "ack_timeout": 5})
    assert (made.status, made.json["settings"]["ack_timeout"]) == (201, 5)
    again = http.ask("POST", "/subscribe/orders", {"group": "billing", "max_deliveries": 3})
    assert again.status == 200
    assert again.json["settings"]["ack_timeout"] == 5
    assert again.json["settings"]["max_deliveries"] == 3
    http.ask("POST", "/publish/batch/orders", [1, 2, 3])
    http.consume("orders", group="billing")
    http.ok("POST", "/subscribe/invoices", {"group": "billing"})
    listed = http.ok("GET", "/subscriptions?topic=orders")
    assert [(s["name"], s["topic"], s["lag"]) for s in listed] == [("billing", "orders", 2)]
    assert len(http.ok("GET", "/subscriptions")) == 2
    ambiguous = http.get("/subscriptions/billing")
    assert (ambiguous.status, ambiguous.code) == (409, "ambiguous_subscription")
    assert http.ok("GET", "/subscriptions/billing?topic=orders")["lag"] == 2
    assert http.ok("DELETE", "/subscriptions/billing?topic=orders") == {"deleted": "billing"}
    assert http.ok("GET", "/subscriptions/billing")["topic"] == "invoices"
    gone = http.ask("DELETE", "/subscriptions/billing?topic=orders")
    assert (gone.status, gone.code) == (404, "subscription_not_found")


def test_without_a_body_it_is_the_default_group_from_the_earliest(http: Http) -> None:
    """As the shortest request there is."""
    http.publish("orders", 1)
    assert http.ask("POST", "/subscribe/orders").json["name"] == "default"
    assert http.consume("orders")["data"] == 1


@pytest.mark.parametrize(
    ("start", "expected"), [("earliest", 0), ("latest", None), (2, 2), ("1", 1), ("@0", 0)]
)
def test_where_a_subscription_begins(http: Http, start: object, expected: int | None) -> None:
    """At one of the ends, at an offset, at a time."""
    http.ok("POST", "/subscribe/orders", {"group": "keeper"})
    http.ask("POST", "/publish/batch/orders", [0, 1, 2])
    http.ok("POST", "/subscribe/orders", {"start": start})
    message = http.consume("orders")
    assert (None if message is None else message["data"]) == expected


def test_a_subscription_can_be_moved(http: Http) -> None:
    """Back to replay, forward to skip; over a wildcard also in one of its topics."""
    http.ok("POST", "/subscribe/orders", {"group": "keeper"})
    http.ask("POST", "/publish/batch/orders", [0, 1, 2])
    assert len(http.consume_batch("orders")) == 3
    moved = http.ok("POST", "/subscriptions/default/seek", {"to": 1})
    assert (moved["name"], moved["lag"]) == ("default", 2)
    assert [m["data"] for m in http.consume_batch("orders")] == [1, 2]
    http.ok("POST", "/subscriptions/default/seek?topic=orders", {"to": "earliest"})
    http.ok("POST", "/subscriptions/default/seek", {"to": "latest", "partition": 0})
    assert http.consume("orders") is None
    http.ok("POST", "/subscribe/a.*", {"group": "wild"})
    for topic in ("a.x", "a.y"):
        http.ok("POST", f"/subscribe/{topic}", {"group": "keeper"})
        http.publish(topic, topic)
    assert len(http.consume_batch("a.*", group="wild")) == 2
    answer = http.ask("POST", "/subscriptions/wild/seek?topic=a.y", {"to": "earliest"})
    assert (answer.status, answer.json["topic"]) == (200, "a.*")
    assert [m["data"] for m in http.consume_batch("a.*", group="wild")] == ["a.y"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/subscribe/orders", {"group": 5}, 400, "invalid_subscription"),
        ("/subscribe/orders", {"group": "a/b"}, 400, "invalid_subscription"),
        ("/subscribe/orders", {"group": "__own"}, 400, "invalid_subscription"),
        ("/subscribe/orders", {"start": True}, 400, "invalid_offset"),
        ("/subscribe/orders", {"start": []}, 400, "invalid_offset"),
        ("/subscribe/orders", {"group": "new", "start": -1}, 400, "invalid_offset"),
        ("/subscribe/orders", {"group": "new", "start": 99}, 404, "offset_out_of_range"),
        ("/subscribe/orders", {"group": "new", "start": "soon"}, 400, "invalid_offset"),
        ("/subscribe/orders", {"colour": "red"}, 400, "unknown_setting"),
        ("/subscribe/orders", {"name": "x"}, 400, "unknown_setting"),
        ("/subscribe/orders", {"topic": "x"}, 400, "unknown_setting"),
        ("/subscribe/orders", {"self": "x"}, 400, "unknown_setting"),
        ("/subscribe/orders", {"ack_timeout": -1}, 400, "invalid_setting"),
        ("/subscribe/a*b", {}, 400, "invalid_topic"),
        ("/subscriptions/default/seek", {}, 400, "missing_argument"),
        ("/subscriptions/default/seek", {"to": "soon"}, 400, "invalid_offset"),
        ("/subscriptions/default/seek", {"to": 99}, 404, "offset_out_of_range"),
        ("/subscriptions/default/seek", {"to": 0, "partition": 9}, 400, "invalid_partition"),
        ("/subscriptions/default/seek", {"to": 0, "subscription": "x"}, 400, "unknown_argument"),
        ("/subscriptions/default/seek", {"to": 0, "name": "x"}, 400, "unknown_argument"),
        ("/subscriptions/default/seek", {"to": 0, "connection": "x"}, 400, "unknown_argument"),
        ("/subscriptions/nobody/seek", {"to": 0}, 404, "subscription_not_found"),
        ("/subscriptions?colour=red", None, 405, "method_not_allowed"),
    ],
)
def test_what_cannot_be_subscribed_is_refused(
    http: Http, path: str, body: Any, status: int, code: str
) -> None:
    """And no topic or group is made on the way."""
    http.ok("PUT", "/topics/orders")
    http.ok("POST", "/subscribe/orders")
    answer = http.ask("POST", path, body)
    assert (answer.status, answer.code) == (status, code)
    assert len(http.ok("GET", "/subscriptions")) == 1
    assert len(http.ok("GET", "/topics")) == 1


# --- dead letters ---------------------------------------------------------------------------------
def test_dead_letters_are_listed_shown_and_counted(http: Http) -> None:
    """With their origin and the reason, page by page."""
    bury(http, {"n": 0}, {"n": 1}, {"n": 2})
    assert http.ok("GET", "/dead-letters") == [{"topic": "billing.dlq", "letters": 3}]
    listed = http.ok("GET", "/dead-letters/billing")
    assert [letter["message"]["data"]["n"] for letter in listed] == [0, 1, 2]
    assert listed == http.ok("GET", "/dead-letters/billing.dlq")
    first = listed[0]
    assert (first["subscription"], first["reason"], first["attempts"]) == ("billing", "no stock", 1)
    assert (first["message"]["topic"], first["message"]["offset"]) == ("orders", 0)
    page = http.ok("GET", f"/dead-letters/billing?after={first['offset']}&limit=1")
    assert [letter["message"]["data"]["n"] for letter in page] == [1]
    assert http.ok("GET", f"/dead-letters/billing/{first['offset']}") == first


def test_dead_letters_are_redriven(http: Http) -> None:
    """All, some by offset, reason or number; to the group that failed."""
    http.ok("POST", "/subscribe/orders", {"group": "mail"})
    bury(http, 0, 1, 2, 3)
    assert len(http.consume_batch("orders", group="mail")) == 4
    one = {"offsets": [1]}
    assert http.ok("POST", "/dead-letters/billing/redrive", one)["redriven"] == 1
    assert http.ok("POST", "/dead-letters/billing/redrive", {"limit": 1})["redriven"] == 1
    nothing = {"reason": "other"}
    assert http.ok("POST", "/dead-letters/billing/redrive", nothing)["redriven"] == 0
    assert http.ok("POST", "/dead-letters/billing/redrive")["redriven"] == 2
    assert http.ok("GET", "/dead-letters/billing") == []
    again = http.consume_batch("orders", group="billing")
    assert sorted(m["data"] for m in again) == [0, 1, 2, 3]
    assert http.consume("orders", group="mail") is None


def test_a_redrive_is_watched_and_stopped(http: Http) -> None:
    """Begun with ``wait``, listed, shown by its id, and stopped; a second stop changes nothing."""
    bury(http, 0, 1, 2, 3)
    begun = http.ok("POST", "/dead-letters/billing/redrive", {"rate": 0.01, "wait": 0})
    assert begun["state"] == "running"
    path = f"/dead-letters/billing/redrives/{begun['id']}"
    shown = http.ok("GET", f"{path}?wait=0.02")
    assert (shown["redriven"], shown["left"], shown["rate"]) == (1, 3, 0.01)
    assert http.ok("GET", "/dead-letters/billing/redrives") == [shown]
    stopped = http.ok("DELETE", path)
    assert (stopped["state"], stopped["redriven"], stopped["left"]) == ("stopped", 1, 3)
    assert http.ok("DELETE", path) == stopped == http.ok("GET", path)
    assert len(http.ok("GET", "/dead-letters/billing")) == 3


def test_a_dead_letter_can_be_corrected(http: Http) -> None:
    """What is shown can be sent back with changes; the rest stays as it was."""
    bury(http, {"n": "bad"})
    path = f"/dead-letters/billing/{http.ok('GET', '/dead-letters/billing')[0]['offset']}"
    big = 12345678901234567890123
    new = http.ok("PUT", path, {"data": {"n": big}, "headers": {"fixed": "yes"}})
    assert http.get(path).status == 404
    letter = http.ok("GET", f"/dead-letters/billing/{new['offset']}")
    assert letter["message"]["data"] == {"n": big}
    assert letter["message"]["headers"] == {"fixed": "yes"}
    assert letter["reason"] == "no stock"
    nulled = http.ok("PUT", f"/dead-letters/billing/{new['offset']}", {"data": None})
    letter = http.ok("GET", f"/dead-letters/billing/{nulled['offset']}")
    assert letter["message"]["data"] is None
    assert letter["message"]["headers"] == {"fixed": "yes"}


def test_a_dead_letter_that_is_no_json_is_corrected_as_what_it_is(http: Http) -> None:
    """Text stays text without quotes, bytes are given as base64."""
    http.ok("POST", "/subscribe/orders", {"group": "billing", "max_deliveries": 1})
    http.ask("POST", "/publish/orders", "hello", TEXT)
    message = http.consume("orders", group="billing", ack="manual")
    http.ask("POST", "/nack/orders?group=billing", {"delivery": message["delivery"]})
    wait_until(lambda: http.get("/dead-letters/billing").status == 200)
    wait_until(lambda: len(http.ok("GET", "/dead-letters/billing")) == 1)
    offset = http.ok("GET", "/dead-letters/billing")[0]["offset"]
    offset = http.ok("PUT", f"/dead-letters/billing/{offset}", {"data": "hallo"})["offset"]
    assert http.ok("GET", f"/dead-letters/billing/{offset}")["message"]["data"] == "hallo"
    body = {"data": "/wA=", "encoding": "base64"}
    offset = http.ok("PUT", f"/dead-letters/billing/{offset}", body)["offset"]
    shown = http.ok("GET", f"/dead-letters/billing/{offset}")["message"]
    assert (shown["data"], shown["encoding"]) == ("/wA=", "base64")


def test_dead_letters_are_given_up(http: Http) -> None:
    """One, or all there are."""
    bury(http, 0, 1, 2)
    offset = http.ok("GET", "/dead-letters/billing")[1]["offset"]
    assert http.ok("DELETE", f"/dead-letters/billing/{offset}") == {"purged": 1}
    assert http.ask("DELETE", f"/dead-letters/billing/{offset}").status == 404
    assert http.ok("DELETE", "/dead-letters/billing") == {"purged": 2}
    assert http.ok("GET", "/dead-letters/billing") == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/dead-letters/nobody", None, 404, "no_dead_letters"),
        ("GET", "/dead-letters/nobody/0", None, 404, "no_dead_letters"),
        ("DELETE", "/dead-letters/nobody", None, 404, "no_dead_letters"),
        ("POST", "/dead-letters/nobody/redrive", None, 404, "no_dead_letters"),
        ("GET", "/dead-letters/billing/99", None, 404, "message_not_found"),
        ("GET", "/dead-letters/billing/x", None, 400, "invalid_argument"),
        ("GET", "/dead-letters/nobody/redrives", None, 404, "no_dead_letters"),
        ("GET", "/dead-letters/billing/redrives/x", None, 400, "invalid_id"),
        ("DELETE", f"/dead-letters/billing/redrives/{UUID(int=7)}", None, 404, "redrive_not_found"),
        ("POST", "/dead-letters/billing/redrive", {"lease": 0}, 400, "invalid_argument"),
        ("POST", "/dead-letters/billing/redrive", {"wait": 61}, 400, "invalid_argument"),
        ("GET", "/dead-letters/billing?limit=0", None, 400, "invalid_argument"),
        ("GET", "/dead-letters/billing?after=x", None, 400, "invalid_argument"),
        ("PUT", "/dead-letters/billing/99", {"data": 1}, 404, "message_not_found"),
        ("PUT", "/dead-letters/billing/0", {"colour": 1}, 400, "unknown_argument"),
        ("PUT", "/dead-letters/billing/0", {"headers": {"a": 1}}, 400, "invalid_headers"),
        ("PUT", "/dead-letters/billing/0", {"headers": {"a": "b\r\nc"}}, 400, "invalid_headers"),
        ("PUT", "/dead-letters/billing/0", {"headers": []}, 400, "invalid_headers"),
        (
            "PUT",
            "/dead-letters/billing/0",
            {"data": "?", "encoding": "base64"},
            400,
            "invalid_value",
        ),
        ("PUT", "/dead-letters/billing/0", {"data": 1, "encoding": "rot13"}, 400, "invalid_value"),
        ("PUT", "/dead-letters/billing/0", {"data": "x" * (1 << 20)}, 413, "message_too_large"),
        ("PUT", "/dead-letters/billing/0", [], 400, "invalid_json"),
        ("POST", "/dead-letters/billing/redrive", {"offsets": ["a"]}, 400, "invalid_argument"),
        ("POST", "/dead-letters/billing/redrive", {"offsets": 5}, 400, "invalid_argument"),
        ("POST", "/dead-letters/billing/redrive", {"rate": -1}, 400, "invalid_argument"),
        ("POST", "/dead-letters/billing/redrive", {"to": "moon"}, 400, "invalid_argument"),
        ("POST", "/dead-letters/billing/redrive", {"subscription": "x"}, 400, "unknown_argument"),
        ("POST", "/dead-letters/billing/redrive", {"name": "x"}, 400, "unknown_argument"),
    ],
)
def test_what_cannot_be_done_with_dead_letters_is_refused(
    http: Http, method: str, path: str, body: Any, status: int, code: str
) -> None:
    """The letter is still there."""
    bury(http, 0)
    answer = http.ask(method, path, body)
    assert (answer.status, answer.code) == (status, code)
    assert len(http.ok("GET", "/dead-letters/billing")) == 1


# --- delayed messages -----------------------------------------------------------------------------
def test_delayed_messages_are_listed_and_cancelled(http: Http) -> None:
    """Soonest first, of one topic or of all; a cancelled one never comes."""
    later = http.publish("orders", "later", delay=900)
    sooner = http.publish("orders", "sooner", delay=600)
    http.publish("invoices", "other", delay=300)
    listed = http.ok("GET", "/scheduled?topic=orders")
    assert [item["id"] for item in listed] == [sooner["id"], later["id"]]
    assert set(listed[0]) == {"id", "topic", "deliver_at"}
    assert listed[0]["deliver_at"] > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    assert len(http.ok("GET", "/scheduled")) == 3
    assert len(http.ok("GET", "/scheduled?limit=1")) == 1
    assert http.ok("DELETE", f"/scheduled/{sooner['id']}") == {"cancelled": sooner["id"]}
    again = http.ask("DELETE", f"/scheduled/{sooner['id']}")
    assert (again.status, again.code) == (404, "not_scheduled")
    assert http.ask("DELETE", "/scheduled/seven").code == "invalid_id"
    assert http.get("/scheduled?limit=0").status == 400
    assert len(http.ok("GET", "/scheduled?topic=orders")) == 1


# --- the whole table ------------------------------------------------------------------------------
def fill(path: str) -> str:
    """A path of the table with names in it."""
    for name, value in (("topic", "orders"), ("group", "billing"), ("offset", "0")):
        path = path.replace(f"{{{name}}}", value)
    return path.replace("{id}", "00000000-0000-8000-8000-000000000000")


PATHS = sorted({route.path for route in ALL_ROUTES})


@pytest.mark.parametrize("path", PATHS)
def test_a_path_takes_its_methods_and_names_them(http: Http, path: str) -> None:
    """405 with Allow for all others, the same from OPTIONS."""
    expected = {route.method for route in ALL_ROUTES if route.path == path}
    safe = {route.method for route in ALL_ROUTES if route.path == path and route.safe}
    expected |= {"HEAD"} if "GET" in safe else set()
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE"} - expected:
        answer = http.ask(method, fill(path))
        assert answer.status == 405, (method, answer.body)
        assert set(answer.headers["allow"].split(", ")) == expected
    options = http.ask("OPTIONS", fill(path))
    assert options.status == 204
    assert set(options.headers["allow"].split(", ")) == expected


@pytest.mark.parametrize("path", [p for p in PATHS if p not in ("/ws", "/stream/{topic}")])
def test_a_path_does_not_take_what_it_does_not_know(http: Http, path: str) -> None:
    """An unknown parameter is a misspelt one."""
    for route in ALL_ROUTES:
        if route.path == path and not path.startswith(("/health", "/metrics", "/openapi")):
            answer = http.ask(route.method, fill(path) + "?colour=red", {})
            assert (answer.status, answer.code) == (400, "unknown_parameter")


def test_over_a_restart_everything_is_there() -> None:
    """Topics, groups with their places, dead letters, delayed messages."""
    with running_server() as server:
        http = http_of(server)
        http.ok("PUT", "/topics/orders", {"partitions": 2, "retention_hours": 48})
        bury(http, 0, 1)
        http.publish("orders", "later", delay=600)
        before = _state(http)
        http.close()
        server.restart()
        http = http_of(server)
        assert _state(http) == before
        http.close()


def _state(http: Http) -> Any:
    topics = [(t["topic"], t["settings"]) for t in http.ok("GET", "/topics")]
    groups = [(s["name"], s["lag"], s["settings"]) for s in http.ok("GET", "/subscriptions")]
    return topics, groups, http.ok("GET", "/dead-letters/billing"), http.ok("GET", "/scheduled")


def test_the_server_fixture_is_in_memory(server: RunningServer) -> None:
    """What these tests rely on: nothing is written."""
    assert server.engine.directory is None
