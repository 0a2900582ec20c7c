"""Consuming over HTTP: groups, long polls, settling, and clients that go away."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from headrace.broker.pull import Pull
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Events, Http, RawHttp, http_of, raw_request, target


def stats(http: Http, group: str = "default", topic: str = "orders") -> Any:
    return http.ok("GET", target("subscriptions", group, topic=topic))


def wait_for_members(http: Http, count: int, group: str = "default") -> None:
    wait_until(lambda: stats(http, group)["members"] == count, what=f"{count} members")


def settle(http: Http, verb: str, body: object, topic: str = "orders") -> Any:
    return http.ask("POST", f"/{verb}/{topic}", body)


def polled(server: RunningServer, path: str) -> Any:
    """What a long poll is answered with, in a thread of its own."""
    http = http_of(server)
    try:
        return http.get(path)
    finally:
        http.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that wait."""
    with ThreadPoolExecutor(8) as executor:
        yield executor


# --- messages -------------------------------------------------------------------------------------
def test_a_message_has_the_whole_format(http: Http) -> None:
    """Id, topic, data, headers, time and how often it failed; and its place."""
    receipt = http.ok("POST", "/publish/orders", {"a": 1}, **{"X-Header-Source": "auth"})
    message = http.consume("orders")
    assert message == {
        "id": receipt["id"],
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "data": {"a": 1},
        "headers": {"source": "auth"},
        "timestamp": receipt["timestamp"],
        "attempt": 1,
        "retryCount": 0,
    }


def test_a_group_begins_at_the_earliest_and_takes_each_message_once(http: Http) -> None:
    """What is delivered is acknowledged, unless told otherwise; nothing there is 204."""
    for number in range(3):
        http.publish("orders", number)
    assert [http.consume("orders")["data"] for _ in range(3)] == [0, 1, 2]
    assert http.consume("orders") is None
    assert (stats(http)["lag"], stats(http)["acked"], stats(http)["members"]) == (0, 3, 0)


def test_a_topic_that_does_not_exist_is_told(http: Http, server: RunningServer) -> None:
    """Consuming or following creates it, empty; the answer says what was created, and only once."""
    answers = [http.get("/consume/mispelt"), http.get("/consume/mispelt")]
    assert [answer.status for answer in answers] == [204, 204]
    created = [answer.headers.get("headrace-created") for answer in answers]
    assert created == ["topic, group", None]
    assert http.get("/consume/mispelt?group=b").headers["headrace-created"] == "group"
    batch = http.get("/consume/mispelt2/batch")
    assert (batch.json, batch.headers["headrace-created"]) == ([], "topic, group")
    subscribed = http.ok("POST", "/subscribe/mispelt3")
    assert subscribed["topic_created"] is True
    assert "topic_created" not in http.ok("POST", "/subscribe/mispelt3")
    assert "topic_created" not in stats(http, topic="mispelt3")
    for expected in ("topic", None):
        with closing(Events(server.http_address, "/stream/mispelt4")) as events:
            assert events.head.headers.get("headrace-created") == expected


def test_every_group_gets_everything(http: Http) -> None:
    """Each has a place of its own."""
    for group in ("billing", "mail"):
        http.ok("POST", "/subscribe/orders", {"group": group})
    for number in range(3):
        http.publish("orders", number)
    for group in ("billing", "mail"):
        assert [m["data"] for m in http.consume_batch("orders", group=group)] == [0, 1, 2]


def test_a_group_over_a_wildcard(http: Http) -> None:
    """Asked for by the pattern, in the address as it must be written."""
    assert http.consume("orders.>", group="all") is None
    http.publish("orders.new", 1)
    http.publish("orders.old", 2)
    http.publish("orders.old.very", 3)
    found = http.consume_batch("orders.*")
    assert sorted(m["topic"] for m in found) == ["orders.new", "orders.old"]
    assert len(http.consume_batch("orders.>", group="all")) == 3


def test_a_batch_has_up_to_a_limit(http: Http) -> None:
    """Ten unless told otherwise, perhaps fewer, perhaps none."""
    assert http.consume_batch("orders") == []
    http.ask("POST", "/publish/batch/orders", list(range(25)))
    assert [m["data"] for m in http.consume_batch("orders")] == [*range(10)]
    assert [m["data"] for m in http.consume_batch("orders", limit=3)] == [10, 11, 12]
    assert [m["data"] for m in http.consume_batch("orders", limit=10_000)] == [*range(13, 25)]
    assert http.consume_batch("orders", limit=5) == []


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "invalid_argument"),
        ("limit=10001", "invalid_argument"),
        ("limit=-1", "invalid_argument"),
        ("limit=ten", "invalid_argument"),
        ("limit=", "invalid_argument"),
        ("limit=٣", "invalid_argument"),
        ("wait=60001", "invalid_argument"),
        ("wait=1.5", "invalid_argument"),
        ("ack=maybe", "invalid_argument"),
        ("group=a%2Fb", "invalid_subscription"),
        ("group=", "invalid_subscription"),
        ("offset=5", "unknown_parameter"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(http: Http, query: str, code: str) -> None:
    """And nothing is made of it."""
    answer = http.get("/consume/orders/batch?" + query.replace("٣", "%D9%A3"))
    assert (answer.status, answer.code) == (400, code)
    assert http.ok("GET", "/topics") == []


def test_limit_is_for_batches(http: Http) -> None:
    """A single message is one."""
    assert http.get("/consume/orders?limit=5").code == "unknown_parameter"


def test_asking_for_the_head_takes_nothing(http: Http) -> None:
    """HEAD is for what takes nothing away; Allow says what is."""
    http.publish("orders", 1)
    for path in ("/consume/orders", "/consume/orders/batch", "/stream/orders", "/ws"):
        answer = http.ask("HEAD", path)
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
    assert http.consume("orders")["data"] == 1


def test_what_belongs_to_the_broker_cannot_be_consumed(http: Http) -> None:
    """Not the delayed messages, not the dead letters' book-keeping, by whatever way."""
    http.publish("orders", "later", delay=600)
    answers = [
        http.get("/consume/__scheduled?group=__schedule"),
        http.get("/consume/__scheduled"),
        http.get("/consume/orders?group=__schedule"),
        settle(http, "ack", {"delivery": "1.0", "group": "__schedule"}, "__scheduled"),
        http.ask("POST", "/subscriptions/__schedule/seek?topic=__scheduled", {"to": "latest"}),
        http.ask("DELETE", "/subscriptions/__schedule?topic=__scheduled"),
        http.ask("PATCH", "/topics/__scheduled", {"retention_hours": 1}),
        http.ask("DELETE", "/topics/__scheduled"),
        http.ask("POST", "/subscribe/__scheduled"),
        http.get("/stream/__scheduled"),
    ]
    assert [answer.status for answer in answers] == [400] * len(answers)
    assert len(http.ok("GET", "/scheduled")) == 1


# --- waiting --------------------------------------------------------------------------------------
def test_a_long_poll_is_woken_by_a_publish(
    server: RunningServer, http: Http, pool: ThreadPoolExecutor
) -> None:
    """Not after its time: as soon as there is something."""
    http.ok("POST", "/subscribe/orders")
    waiting = pool.submit(polled, server, "/consume/orders?wait=60000")
    wait_for_members(http, 1)
    http.publish("orders", "hello")
    assert waiting.result(10).json["data"] == "hello"
    assert stats(http)["members"] == 0


def test_a_long_poll_ends_with_nothing(http: Http) -> None:
    """204, or an empty array, when the time is up."""
    before = time.monotonic()
    assert http.consume("orders", wait=50) is None
    assert http.consume_batch("orders", wait=50) == []
    assert 0.1 <= time.monotonic() - before < 5


def test_an_answer_has_a_bounded_size(http: Http) -> None:
    """Deliveries, pages and dead letters stop after 4 MiB of values; what is left comes with the next one."""
    http.ok("POST", "/subscribe/large", {"group": "g", "max_deliveries": 1})
    for _ in range(20):
        http.publish("large", "x" * 1_000_000)
    page = http.ok("GET", "/topics/large/messages?limit=100")
    assert 4 <= len(page) <= 8
    given = []
    while len(given) < 20:
        batch = http.consume_batch("large", group="g", limit=100, ack="manual")
        assert 1 <= len(batch) <= 9
        given += [message["delivery"] for message in batch]
    http.ok("POST", "/nack", {"deliveries": given})
    wait_until(lambda: stats(http, "g", topic="large")["dead_lettered"] == 20)
    found: list[int] = []
    while letters := http.ok("GET", f"/dead-letters/g?limit=100&after={max(found, default=-1)}"):
        assert len(letters) == 4
        found += [letter["offset"] for letter in letters]
    assert found == list(range(20))


def test_a_batch_does_not_wait_for_the_rest(
    server: RunningServer, http: Http, pool: ThreadPoolExecutor
) -> None:
    """It waits for the first, and takes along what is there with it."""
    http.ok("POST", "/subscribe/orders")
    waiting = pool.submit(polled, server, "/consume/orders/batch?wait=60000&limit=10")
    wait_for_members(http, 1)
    http.ask("POST", "/publish/batch/orders", [1, 2, 3])
    assert [m["data"] for m in waiting.result(10).json] == [1, 2, 3]


def test_a_deleted_topic_ends_all_long_polls(
    server: RunningServer, http: Http, pool: ThreadPoolExecutor
) -> None:
    """All of them, and they hear why."""
    http.ok("POST", "/subscribe/orders")
    polls = [pool.submit(polled, server, "/consume/orders?wait=60000") for _ in range(4)]
    wait_for_members(http, 4)
    http.ok("DELETE", "/topics/orders")
    answers = [poll.result(10) for poll in polls]
    assert [(a.status, a.code) for a in answers] == [(404, "topic_not_found")] * 4


def test_a_stopping_broker_ends_long_polls_in_good_order(pool: ThreadPoolExecutor) -> None:
    """With 204, and without waiting for them."""
    with running_server(memory=True) as server:
        http = http_of(server)
        http.ok("POST", "/subscribe/orders")
        poll = pool.submit(polled, server, "/consume/orders?wait=60000")
        wait_for_members(http, 1)
        http.close()
        before = time.monotonic()
        server.stop()
        assert time.monotonic() - before < 4
        assert poll.result(10).status == 204


# --- clients that go away -------------------------------------------------------------------------
def vanish_with_fin(raw: RawHttp) -> None:
    """As when the program ends: the system says goodbye for it."""
    raw.close()


def vanish_with_reset(raw: RawHttp) -> None:
    """As when it is killed with something unread."""
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("vanish", [vanish_with_fin, vanish_with_reset])
@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_who_goes_away_while_waiting_loses_nothing(
    server: RunningServer, http: Http, vanish: Any, ack: str
) -> None:
    """The next message goes to somebody who is there, and it is its first delivery."""
    http.ok("POST", "/subscribe/orders")
    raw = RawHttp(server.http_address)
    raw.request("GET", f"/consume/orders?wait=60000&ack={ack}")
    wait_for_members(http, 1)
    vanish(raw)
    wait_for_members(http, 0)
    http.publish("orders", "precious")
    assert http.consume("orders")["retryCount"] == 0
    assert stats(http)["acked"] == 1


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_who_goes_away_at_the_last_moment_loses_nothing(
    server: RunningServer, http: Http, ack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the delivery and the answer: it goes back, and was no delivery."""
    http.ok("POST", "/subscribe/orders")
    with RawHttp(server.http_address) as raw:
        raw.request("GET", f"/consume/orders?wait=60000&ack={ack}")
        wait_for_members(http, 1)
        hub = server.server.hub
        (waiter,) = server.call(lambda: [c for c in hub.connections if c.long_polls])
        finish = Pull.finish

        def finish_and_lose(self: Pull, error: Any = None) -> None:
            finish(self, error)
            if self._got:
                waiter.connection_lost(None)  # type: ignore[attr-defined]

        monkeypatch.setattr(Pull, "finish", finish_and_lose)
        server.call(lambda: None)
        http.publish("orders", "precious")
        server.wait_until(lambda: waiter not in hub.connections)
        monkeypatch.undo()
        again = http.consume("orders", ack="manual", wait=10_000)
        assert (again["data"], again["retryCount"]) == ("precious", 0)
        assert stats(http)["acked"] == 0


def test_who_has_said_everything_still_gets_what_is_there(
    server: RunningServer, http: Http
) -> None:
    """Like netcat, which ends its side at once; but nobody waits for it."""
    http.publish("orders", "hello")
    with RawHttp(server.http_address) as raw:
        raw.request("GET", "/consume/orders?wait=60000")
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.answer().json["data"] == "hello"
        assert raw.is_ended()
    with RawHttp(server.http_address) as raw:
        raw.send(raw_request("POST", "/publish/orders", b'"own"') * 3)
        raw.send(raw_request("GET", "/consume/orders?wait=60000") * 4)
        raw.socket.shutdown(socket.SHUT_WR)
        assert [raw.answer().status for _ in range(3)] == [200, 200, 200]
        assert [raw.answer().status for _ in range(4)] == [200, 200, 200, 204]
        assert raw.is_ended()


# --- settling -------------------------------------------------------------------------------------
def test_manual_acknowledgement(http: Http) -> None:
    """The delivery comes with the message, and is answered once."""
    http.publish("orders", 1)
    message = http.consume("orders", ack="manual")
    assert message["delivery"].endswith(".0")
    assert (stats(http)["in_flight"], stats(http)["lag"]) == (1, 1)
    assert http.consume("orders") is None
    body = {"delivery": message["delivery"]}
    assert settle(http, "ack", body).json == {"settled": 1, "stale": []}
    assert (stats(http)["in_flight"], stats(http)["lag"]) == (0, 0)
    for verb in ("ack", "nack", "extend"):
        answer = settle(http, verb, body)
        assert (answer.status, answer.code) == (409, "stale_delivery")


def test_a_delivery_is_enough_to_settle_it(http: Http, server: RunningServer) -> None:
    """It says which group and which topic it is of, also in one request about several groups."""
    groups = ("billing", "mail", "default")
    for group in groups:
        http.ok("POST", "/subscribe/orders", {"group": group, "backoff": 0})
    http.publish("orders", 1)

    def deliveries() -> list[str]:
        found = [http.consume("orders", ack="manual", group=group) for group in groups]
        return [message["delivery"] for message in found]

    for path in ("/nack", "/nack/orders"):
        answer = http.ok("POST", path, {"deliveries": deliveries(), "reason": "again"})
        assert answer == {"settled": 3, "stale": []}
    held = deliveries()
    assert http.ok("POST", "/extend", {"delivery": held[0], "seconds": 600})["settled"] == 1
    other = http.ask("POST", "/ack/payments", {"delivery": held[0]})
    assert (other.status, other.code) == (400, "invalid_delivery")
    assert (
        http.ask("POST", "/ack", {"delivery": held[0], "group": "mail"}).code == "unknown_argument"
    )
    assert http.ask("POST", "/ack/orders", {"delivery": held[0], "group": ""}).status == 400
    assert http.ok("POST", "/ack", {"deliveries": held}) == {"settled": 3, "stale": []}
    assert http.ask("POST", "/ack", {"deliveries": held}).code == "stale_delivery"
    assert http.ask("POST", "/ack", {"delivery": "1.0"}).code == "stale_delivery"
    assert not server.server.hub.pulled


def test_deliveries_that_end_by_themselves_are_forgotten(http: Http, server: RunningServer) -> None:
    """A deadline or the end of the topic leaves nothing behind in the register of deliveries."""
    http.ok("POST", "/subscribe/orders", {"ack_timeout": 0.05})
    http.publish("orders", 1)
    http.consume("orders", ack="manual")
    wait_until(lambda: not server.server.hub.pulled)
    http.publish("payments", 1)
    http.consume("payments", ack="manual")
    assert len(server.server.hub.pulled) == 1
    http.ok("DELETE", "/topics/payments")
    assert not server.server.hub.pulled


def test_a_nack_brings_it_again(http: Http) -> None:
    """After the delay, with its count; a delay keeps it away meanwhile."""
    http.ok("POST", "/subscribe/orders", {"backoff": 0})
    http.publish("orders", 1)
    first = http.consume("orders", ack="manual")
    settle(http, "nack", {"delivery": first["delivery"], "reason": "no stock"})
    second = http.consume("orders", ack="manual")
    assert (second["retryCount"], second["offset"]) == (1, 0)
    settle(http, "nack", {"delivery": second["delivery"], "delay": 600})
    assert http.consume("orders") is None
    assert stats(http)["waiting_for_retry"] == 1


def test_more_time_can_be_asked_for(http: Http) -> None:
    """Without it the delivery ends, and comes again."""
    http.ok("POST", "/subscribe/orders", {"ack_timeout": 0.3, "backoff": 0})
    http.ask("POST", "/publish/batch/orders", [0, 1])
    kept, lost = (http.consume("orders", ack="manual") for _ in range(2))
    answer = settle(http, "extend", {"delivery": kept["delivery"], "seconds": 600})
    assert answer.json == {"settled": 1, "stale": []}
    again = http.consume("orders", ack="manual", wait=10_000)
    assert (again["data"], again["retryCount"]) == (1, 1)
    assert settle(http, "ack", {"delivery": lost["delivery"]}).status == 409
    assert settle(http, "ack", {"delivery": kept["delivery"]}).status == 200
    assert settle(http, "ack", {"delivery": again["delivery"]}).status == 200


def test_many_are_settled_at_once(http: Http) -> None:
    """Those that are out; those that are not are named, and only if there are no others is it 409."""
    http.ask("POST", "/publish/batch/orders", list(range(4)))
    tokens = [m["delivery"] for m in http.consume_batch("orders", ack="manual")]
    settle(http, "ack", {"delivery": tokens[0]})
    answer = settle(http, "ack", {"deliveries": tokens[:3]})
    assert (answer.status, answer.json) == (200, {"settled": 2, "stale": [tokens[0]]})
    assert settle(http, "ack", {"deliveries": tokens[:3]}).status == 409
    assert stats(http)["lag"] == 1


def test_a_group_is_named_in_the_address_or_in_the_body(http: Http) -> None:
    """Where the message was asked for by it."""
    for group in ("billing", "mail"):
        http.ok("POST", "/subscribe/orders", {"group": group})
    http.publish("orders", 1)
    for path, extra in (("/ack/orders?group=billing", {}), ("/ack/orders", {"group": "mail"})):
        group = extra.get("group", "billing")
        message = http.consume("orders", ack="manual", group=group)
        body = {"delivery": message["delivery"], **extra}
        wrong = {**body, "group": "default"}
        assert http.ask("POST", "/ack/orders", wrong).status == 404
        assert http.ask("POST", path, body).status == 200
    missing = settle(http, "ack", {"delivery": "1.0", "group": "nobody"})
    assert (missing.status, missing.code) == (404, "subscription_not_found")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_delivery"),
        ({"delivery": None}, "invalid_delivery"),
        ({"delivery": 7}, "invalid_delivery"),
        ({"delivery": "7"}, "invalid_delivery"),
        ({"delivery": "7.x"}, "invalid_delivery"),
        ({"delivery": ".7"}, "invalid_delivery"),
        ({"delivery": "٣.٣"}, "invalid_delivery"),
        ({"delivery": "1" * 60 + ".1"}, "invalid_delivery"),
        ({"deliveries": 5}, "invalid_delivery"),
        ({"deliveries": []}, "invalid_delivery"),
        ({"deliveries": {}}, "invalid_delivery"),
        ({"deliveries": "1.1"}, "invalid_delivery"),
        ({"deliveries": ["1.1", 5]}, "invalid_delivery"),
        ({"delivery": "1.1", "deliveries": ["1.1"]}, "invalid_delivery"),
        ({"delivery": "1.1", "colour": "red"}, "unknown_argument"),
        ({"delivery": "1.1", "group": 5}, "invalid_argument"),
        ([], "invalid_json"),
    ],
)
def test_what_is_no_delivery_is_refused(http: Http, body: object, code: str) -> None:
    """Before anything is settled."""
    http.publish("orders", 1)
    http.consume("orders", ack="manual")
    for verb in ("ack", "nack", "extend"):
        answer = settle(http, verb, body)
        assert (answer.status, answer.code) == (400, code)
    assert stats(http)["in_flight"] == 1


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("nack", {"delay": -1}),
        ("nack", {"delay": "soon"}),
        ("nack", {"delay": True}),
        ("nack", {"reason": 5}),
        ("extend", {"seconds": -1}),
        ("extend", {"seconds": 1e9}),
        ("ack", {"seconds": 1}),
    ],
)
def test_a_field_that_cannot_be_is_refused(http: Http, verb: str, fields: dict[str, Any]) -> None:
    """The message stays out."""
    http.publish("orders", 1)
    message = http.consume("orders", ack="manual")
    answer = settle(http, verb, {"delivery": message["delivery"], **fields})
    assert answer.status == 400
    assert settle(http, "ack", {"delivery": message["delivery"]}).status == 200


# --- together with others -------------------------------------------------------------------------
def test_a_group_is_shared_by_all_protocols(
    server: RunningServer, http: Http, pool: ThreadPoolExecutor
) -> None:
    """Members over TCP and long polls take turns, and each message goes to one of them."""
    with server.client() as client:
        member = client.subscription("default", "orders", prefetch=100)
        polls = [pool.submit(polled, server, "/consume/orders?wait=60000") for _ in range(2)]
        wait_for_members(http, 3)
        for number in range(3):
            http.publish("orders", number)
        found = [poll.result(10).json["data"] for poll in polls]
        own = int(member.get(10).value)
        assert sorted([own, *found]) == [0, 1, 2]


def test_polls_do_not_disturb_the_turns_of_others(server: RunningServer, http: Http) -> None:
    """Two members get as much of what comes one by one, whatever polls come and go between."""
    with server.client() as one, server.client() as two:
        members = [c.subscription("default", "orders", prefetch=100) for c in (one, two)]
        wait_for_members(http, 2)
        for number in range(20):
            http.publish("orders", number)
            assert http.consume("orders") is None
        for member in members:
            for _ in range(10):
                assert member.get(10) is not None


def test_many_polls_at_once_get_each_message_once(
    server: RunningServer, http: Http, pool: ThreadPoolExecutor
) -> None:
    """Eight consumers, two hundred messages, none twice and none missing."""
    http.ok("POST", "/subscribe/orders")
    found: list[int] = []
    lock = threading.Lock()

    def consume() -> None:
        mine = http_of(server)
        while (message := mine.consume("orders", wait=10_000)) is not None:
            if message["data"] == "stop":
                break
            with lock:
                found.append(message["data"])
        mine.close()

    consumers = [pool.submit(consume) for _ in range(8)]
    for number in range(200):
        http.publish("orders", number)
    for _ in consumers:
        http.publish("orders", "stop")
    for consumer in consumers:
        consumer.result(20)
    assert sorted(found) == [*range(200)]


def test_what_keeps_failing_is_given_up(http: Http) -> None:
    """After max_deliveries it is a dead letter, with the last reason."""
    http.ok("POST", "/subscribe/orders", {"backoff": 0, "max_deliveries": 2})
    http.publish("orders", {"bad": True})
    for attempt in range(2):
        message = http.consume("orders", ack="manual", wait=10_000)
        assert message["retryCount"] == attempt
        settle(http, "nack", {"delivery": message["delivery"], "reason": f"attempt {attempt}"})
    wait_until(lambda: stats(http)["dead_lettered"] == 1)
    (letter,) = http.ok("GET", "/dead-letters/default")
    assert (letter["reason"], letter["attempts"]) == ("attempt 1", 2)
    assert letter["message"]["data"] == {"bad": True}
    assert http.consume("orders") is None


# --- reading --------------------------------------------------------------------------------------
def test_reading_takes_nothing(http: Http) -> None:
    """From an offset or a time, no more than asked for, again and again."""
    for number in range(5):
        http.publish("orders", number)
    path = "/topics/orders/messages"
    for _ in range(2):
        assert [m["data"] for m in http.ok("GET", path)] == [0, 1, 2, 3, 4]
    assert [m["offset"] for m in http.ok("GET", path + "?from=2&limit=2")] == [2, 3]
    assert http.ok("GET", path + "?from=latest") == []
    assert len(http.ok("GET", path + "?from=2020-01-01T00:00:00Z")) == 5
    assert http.ok("GET", path + "?from=@99999999999999") == []
    first = http.ok("GET", path + "?limit=1")[0]
    assert "delivery" not in first
    assert http.ask("HEAD", path).status == 200


def test_reading_all_partitions(http: Http) -> None:
    """In the order of time, page by page with the cursor of the answer, in the address or as a header."""
    http.ok("PUT", "/topics/parts", {"partitions": 3})
    for number in range(6):
        http.ok("POST", f"/publish/parts?partition={number % 3}&timestamp={1000 + number}", number)
    path = "/topics/parts/messages"
    assert [m["data"] for m in http.ok("GET", path)] == [0, 1, 2, 3, 4, 5]
    assert [m["data"] for m in http.ok("GET", path + "?partition=1")] == [1, 4]
    first = http.get(path + "?limit=4")
    cursor = first.headers["x-cursor"]
    assert cursor == "0:2,1:1,2:1"
    second = http.get(f"{path}?limit=4&cursor={cursor}")
    assert [m["data"] for m in second.json] == [4, 5]
    again = http.ask("GET", path + "?limit=4", headers={"X-Cursor": cursor})
    assert again.json == second.json
    assert http.get(f"{path}?cursor={second.headers['x-cursor']}").json == []
    assert [m["data"] for m in http.ok("GET", path + "?cursor=")] == [0, 1, 2, 3, 4, 5]
    for query, code in (
        ("from=1", "partition_needed"),
        ("cursor=1", "invalid_cursor"),
        ("cursor=0:-1", "invalid_offset"),
        ("cursor=9:1", "invalid_partition"),
        ("cursor=0:1&from=earliest", "invalid_argument"),
    ):
        assert http.get(f"{path}?{query}").code == code, query


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/topics/nowhere/messages", 404, "topic_not_found"),
        ("/topics/orders/messages?from=7", 404, "offset_out_of_range"),
        ("/topics/orders/messages?from=-1", 400, "invalid_offset"),
        ("/topics/orders/messages?from=yesterday", 400, "invalid_offset"),
        ("/topics/orders/messages?from=@x", 400, "invalid_offset"),
        ("/topics/orders/messages?from=99999999999999999999", 404, "offset_out_of_range"),
        ("/topics/orders/messages?partition=1", 400, "invalid_partition"),
        ("/topics/orders/messages?limit=0", 400, "invalid_argument"),
        ("/messages/seven", 400, "invalid_id"),
        ("/messages/00000000-0000-0000-0000-000000000000", 404, "message_not_found"),
        ("/messages/00000000-0000-8000-8000-000000000000", 404, "message_not_found"),
    ],
)
def test_reading_where_nothing_is_says_why(http: Http, path: str, status: int, code: str) -> None:
    """A topic, an offset, an id that is not there."""
    http.publish("orders", 1)
    answer = http.get(path)
    assert (answer.status, answer.code) == (status, code)


def test_the_brokers_own_events_are_read_like_any_topic() -> None:
    """Over HTTP and by a client; what was done here is what they say."""
    with running_server(events_interval=0.05) as server, server.client() as client:
        http = http_of(server)
        http.publish("orders", {"number": 1})
        assert http.consume("orders", group="billing")["data"] == {"number": 1}

        def deliveries() -> list[dict[str, Any]]:
            answer = http.get("/topics/__events/messages")
            found = answer.json if answer.status == 200 else []
            return [m["data"] for m in found if m["data"]["type"] == "deliveries"]

        wait_until(lambda: sum(event["acked"] for event in deliveries()) == 1)
        assert {event["subscription"] for event in deliveries()} == {"billing"}
        assert any(b'"topic":"orders"' in value for value in client.fetch_values("__events"))
        assert http.ask("DELETE", "/topics/__events").code == "invalid_topic"
        assert [topic["topic"] for topic in http.ok("GET", "/topics")] == ["orders"]
        http.close()
