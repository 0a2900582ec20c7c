"""Publishing over HTTP: what is kept, where it goes, and what is refused."""

import json
import time
from typing import Any
from uuid import uuid4

import pytest

from headrace.model import derive_id, topic_hash
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import BYTES, JSON, TEXT, Http, http_of, target

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NDJSON = {"Content-Type": "application/x-ndjson"}


def post(http: Http, body: bytes | str, path: str = "/publish/orders", **headers: str) -> Any:
    return http.ask("POST", path, body, {**JSON, **headers})


# --- one message ----------------------------------------------------------------------------------
def test_a_receipt_says_where_it_is(http: Http) -> None:
    """Id, topic, partition, offset and time; the id leads back to the message."""
    receipts = [http.publish("orders", {"number": number}) for number in range(3)]
    assert [receipt["offset"] for receipt in receipts] == [0, 1, 2]
    for receipt in receipts:
        assert set(receipt) == {"id", "topic", "partition", "offset", "timestamp"}
        assert (receipt["topic"], receipt["partition"]) == ("orders", 0)
        assert receipt["id"] == str(derive_id(topic_hash("orders"), 0, receipt["offset"]))
        found = http.ok("GET", f"/messages/{receipt['id']}")
        assert found["data"] == {"number": receipt["offset"]}
        assert found["timestamp"] == receipt["timestamp"]


@pytest.mark.parametrize(
    "raw",
    [
        '{"a":1,"b":[true,null,"\\u00e9é"],"c":1.50,"d":1e3}',
        '"text"',
        "12345678901234567890123456789",
        "null",
        "[]",
        ' { "spaced" :\r\n\t1 } ',
        '{"twice":1,"twice":2}',
    ],
)
def test_json_is_kept_as_it_is(server: RunningServer, http: Http, raw: str) -> None:
    """Byte for byte in the log, and the same JSON in the answer."""
    post(http, raw)
    with server.client() as client:
        assert client.fetch("orders")[0].value == raw.encode()
    answer = http.get("/consume/orders")
    assert f'"data":{raw},"headers":{{}}' in answer.body.decode()
    assert answer.json["data"] == json.loads(raw)


def test_text_comes_back_as_text(http: Http) -> None:
    """With its content type, also when it looks like JSON."""
    for text in ("Grüße", "", '{"looks": "like JSON"}', "a\r\nb\0c"):
        http.ask("POST", "/publish/orders", text, TEXT)
        message = http.consume("orders")
        assert message["data"] == text
        assert message["headers"] == {"content-type": "text/plain"}
        assert "encoding" not in message


def test_bytes_come_back_as_base64(http: Http) -> None:
    """And say so."""
    http.ask("POST", "/publish/orders", bytes(range(256)), {"Content-Type": "image/png"})
    message = http.consume("orders")
    assert message["encoding"] == "base64"
    assert message["headers"] == {"content-type": "image/png"}
    assert message["data"].startswith("AAECAwQFBgcICQ")


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "application/x+json", ""],
)
def test_what_counts_as_json(http: Http, content_type: str) -> None:
    """By its name, its suffix, or because nothing else was said."""
    answer = http.ask("POST", "/publish/orders", '{"a":1}', {"Content-Type": content_type})
    assert answer.status == 200
    assert http.consume("orders")["data"] == {"a": 1}
    assert http.ask("POST", "/publish/orders", "{", {"Content-Type": content_type}).status == 400


def test_what_curl_sends_by_itself_is_json_where_it_can_be(http: Http) -> None:
    """``curl -d`` says that it is a form; nobody means that."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, data in (('{"a":1}', {"a": 1}), ("hello", "hello")):
        http.ask("POST", "/publish/orders", body, form)
        message = http.consume("orders")
        assert (message["data"], message["headers"]) == (data, {})
    assert http.ask("POST", "/publish/batch/orders", "[1,2]", form).json["published"] == 2


def test_headers_travel_with_the_message(server: RunningServer, http: Http) -> None:
    """x-header-* without the prefix, and the trace context as it is; nothing else."""
    given = {
        "X-Header-Source": "auth-service",
        "x-header-ort": "Köln",
        "X-Header-Empty": "",
        "traceparent": TRACEPARENT,
        "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
        "User-Agent": "a test",
        "Cookie": "secret=1",
    }
    post(http, "{}", **given)
    expected = {
        "source": "auth-service",
        "ort": "Köln",
        "empty": "",
        "traceparent": TRACEPARENT,
        "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
    }
    assert http.consume("orders")["headers"] == expected
    with server.client() as client:
        channel = client.subscribe("orders")
        post(http, "{}", **given)
        assert channel.get(10).headers == expected


def test_headers_of_a_client_over_tcp_arrive_over_http(server: RunningServer, http: Http) -> None:
    """The other way round, untouched too."""
    with server.client() as client:
        client.publish("orders", b"{}", {"traceparent": TRACEPARENT, "Source": "x"})
    assert http.consume("orders")["headers"] == {"traceparent": TRACEPARENT, "Source": "x"}


def test_a_trace_state_in_two_lines_is_one(server: RunningServer, http: Http) -> None:
    """As the standard of the trace context has it."""
    http._connection.putrequest("POST", "/publish/orders")
    for name, value in [("tracestate", "a=1"), ("Content-Length", "2"), ("tracestate", "b=2")]:
        http._connection.putheader(name, value)
    http._connection.endheaders(b"{}")
    assert http._connection.getresponse().read()
    assert http.consume("orders")["headers"]["tracestate"] == "a=1, b=2"


# --- where it goes --------------------------------------------------------------------------------
def test_a_key_chooses_the_partition(http: Http) -> None:
    """The same key, the same partition; it comes back with the message."""
    http.ok("PUT", "/topics/orders", {"partitions": 4})
    receipts = [http.publish("orders", number, key=f"k{number % 3}") for number in range(12)]
    for kind in range(3):
        assert len({receipt["partition"] for receipt in receipts[kind::3]}) == 1
    message = http.consume("orders")
    assert message["key"] == f"k{message['data'] % 3}"


def test_a_key_that_is_no_text_travels_as_base64(http: Http) -> None:
    """It has a name of its own, in both directions."""
    http.publish("orders", 1, key64="/wD+")
    message = http.consume("orders")
    assert message["key64"] == "/wD+"
    assert "key" not in message
    assert http.ask("POST", "/publish/orders?key64=%%%", "1", JSON).status == 400


def test_a_partition_can_be_named(http: Http) -> None:
    """If there is one."""
    http.ok("PUT", "/topics/orders", {"partitions": 3})
    assert http.publish("orders", 1, partition=2)["partition"] == 2
    assert post(http, "1", "/publish/orders?partition=3").code == "invalid_partition"
    assert post(http, "1", "/publish/orders?partition=-1").status == 400


def test_an_id_of_ones_own_is_kept(http: Http) -> None:
    """In the receipt and in the message."""
    own = str(uuid4())
    assert http.publish("orders", 1, id=own)["id"] == own
    assert http.consume("orders")["id"] == own
    assert post(http, "1", "/publish/orders?id=seven").code == "invalid_id"


def test_a_direct_message_goes_to_one_group(http: Http) -> None:
    """And to no other."""
    for group in ("billing", "mail"):
        http.ok("POST", "/subscribe/orders", {"group": group})
    http.publish("orders", "for mail", to="mail")
    http.publish("orders", "for all")
    assert http.consume("orders", group="billing")["data"] == "for all"
    assert http.consume("orders", group="mail")["data"] == "for mail"
    assert http.consume("orders", group="mail")["data"] == "for all"


def test_a_delayed_message_is_taken_and_comes_later(http: Http) -> None:
    """202, without a place; then it is a message like any other."""
    answer = post(http, '"later"', "/publish/orders?delay=0.3")
    assert answer.status == 202
    assert set(answer.json) == {"id", "topic", "timestamp", "scheduled"}
    assert http.consume("orders") is None
    assert http.consume("orders", wait=10_000)["data"] == "later"


def test_a_message_for_a_time(http: Http) -> None:
    """In the future it waits, in the past it does not; not both ways of saying it."""
    now = int(time.time() * 1000)
    assert post(http, "1", f"/publish/orders?deliver_at={now + 60_000}").status == 202
    assert post(http, "2", f"/publish/orders?deliver_at={now - 60_000}").status == 200
    assert http.consume("orders")["data"] == 2
    assert post(http, "3", f"/publish/orders?deliver_at={now}&delay=1").code == "invalid_delay"
    assert post(http, "4", "/publish/orders?delay=-1").status == 400
    assert post(http, "4", "/publish/orders?delay=soon").status == 400


def test_a_message_lives_as_long_as_it_was_given(http: Http) -> None:
    """After its ttl nobody gets it."""
    http.publish("orders", "short", ttl=0.02)
    http.publish("orders", "long", ttl=60)
    made = time.monotonic()
    wait_until(lambda: time.monotonic() > made + 0.05)
    assert http.consume("orders")["data"] == "long"
    assert http.consume("orders") is None
    assert post(http, "1", "/publish/orders?ttl=-1").status == 400


def test_a_time_of_its_own_is_kept_if_it_has_been(http: Http) -> None:
    """Records do not run backwards, and not ahead of the clock."""
    now = int(time.time() * 1000)
    early = http.publish("orders", 1, timestamp=now - 60_000)
    late = http.publish("orders", 2, timestamp=now + 60_000)
    assert early["timestamp"] < late["timestamp"]
    assert http.consume("orders")["timestamp"] == early["timestamp"]


# --- once -----------------------------------------------------------------------------------------
def test_a_repeated_key_is_answered_with_the_first_receipt() -> None:
    """Whether repeated at once, from elsewhere, or after a restart."""
    with running_server() as server:
        http = http_of(server)
        headers = {"Idempotency-Key": "order-101"}
        own = str(uuid4())
        first = post(http, "1", f"/publish/orders?id={own}", **headers).json
        http.publish("orders", "other")
        again = post(http, "1", **headers).json
        assert again == {**first, "duplicate": True}
        assert "duplicate" not in first
        http.close()
        server.restart()
        http = http_of(server)
        assert post(http, "1", **headers).json == {**first, "duplicate": True}
        assert http.ok("GET", "/topics/orders")["messages"] == 2
        http.close()


def test_a_repeated_batch_is_stored_once() -> None:
    """Also over a restart; another topic is another matter."""
    with running_server() as server:
        http = http_of(server)
        headers = {"Idempotency-Key": "import-7"}
        first = post(http, "[1,2,3]", "/publish/batch/orders", **headers).json
        again = post(http, "[1,2,3]", "/publish/batch/orders", **headers).json
        assert again["published"] == first["published"] == 3
        assert again["receipts"] == [{**first["receipts"][0], "duplicate": True}]
        other = post(http, "[1,2,3]", "/publish/batch/invoices", **headers).json
        assert "duplicate" not in other["receipts"][0]
        http.close()
        server.restart()
        http = http_of(server)
        again = post(http, "[1,2,3]", "/publish/batch/orders", **headers).json
        assert again["receipts"][0]["duplicate"]
        assert http.ok("GET", "/topics/orders")["messages"] == 3
        http.close()


def test_an_empty_key_is_no_key(http: Http) -> None:
    """Who sends one means to be safe and is not."""
    assert post(http, "1", **{"Idempotency-Key": ""}).code == "invalid_idempotency_key"
    empty = post(http, "[1]", "/publish/batch/orders", **{"Idempotency-Key": ""})
    assert empty.code == "invalid_idempotency_key"


# --- many -----------------------------------------------------------------------------------------
def test_a_batch_is_an_array(http: Http) -> None:
    """Of anything that is JSON, and every number keeps its digits."""
    items = [
        {"a": 1},
        "text",
        None,
        7,
        [1],
        12345678901234567890123456789,
        -9223372036854775809,
        1.5,
    ]
    answer = post(http, json.dumps(items), "/publish/batch/orders").json
    assert answer["published"] == len(items)
    (receipt,) = answer["receipts"]
    assert (receipt["offset"], receipt["count"]) == (0, len(items))
    found = http.consume_batch("orders", limit=100)
    assert [message["data"] for message in found] == items
    assert all(
        isinstance(message["data"], type(item)) for message, item in zip(found, items, strict=True)
    )


def test_a_batch_may_be_lines(http: Http) -> None:
    """Each is kept as it is; empty ones are none; any line end will do."""
    body = '{"a": 1}\r\n\n"two"\n  \n3e2'
    assert http.ask("POST", "/publish/batch/orders", body, NDJSON).json["published"] == 3
    assert b'"data":3e2,' in http.get("/topics/orders/messages?from=2").body
    assert [m["data"] for m in http.consume_batch("orders")] == [{"a": 1}, "two", 300.0]


def test_a_batch_has_the_options_that_make_sense_for_all(http: Http) -> None:
    """Headers, a key, a target, a time to live."""
    http.ok("PUT", "/topics/orders", {"partitions": 4})
    http.ok("POST", "/subscribe/orders", {"group": "mail"})
    path = "/publish/batch/orders?key=k&to=mail&ttl=60"
    answer = post(http, "[1,2,3]", path, **{"X-Header-Source": "import"}).json
    assert len(answer["receipts"]) == 1
    assert http.consume("orders") is None
    found = http.consume_batch("orders", group="mail")
    assert [message["data"] for message in found] == [1, 2, 3]
    assert all(m["headers"] == {"source": "import"} and m["key"] == "k" for m in found)
    assert post(http, "[1]", "/publish/batch/orders?delay=5").code == "unknown_parameter"


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ("[]", JSON, 400, "empty_batch"),
        ("", JSON, 400, "invalid_json"),
        ("\n\n", NDJSON, 400, "empty_batch"),
        ('{"a":1}', JSON, 400, "invalid_json"),
        ("[1,", JSON, 400, "invalid_json"),
        ("[" + "9" * 5000 + "]", JSON, 400, "invalid_json"),
        ("[" * 2000 + "]" * 2000, JSON, 400, "invalid_json"),
        ("1\n{", NDJSON, 400, "invalid_json"),
        ("[1]", TEXT, 415, "unsupported_media_type"),
        ("[1]", BYTES, 415, "unsupported_media_type"),
    ],
)
def test_a_batch_that_is_none_is_refused_whole(
    http: Http, body: str, headers: dict[str, str], status: int, code: str
) -> None:
    """Nothing of it is stored."""
    answer = http.ask("POST", "/publish/batch/orders", body, headers)
    assert (answer.status, answer.code) == (status, code)
    assert http.get("/topics/orders").status == 404


# --- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("POST", "/publish/orders", "{", JSON, 400, "invalid_json"),
        ("POST", "/publish/orders", "", JSON, 400, "invalid_json"),
        ("POST", "/publish/orders", "NaN", JSON, 400, "invalid_json"),
        ("POST", "/publish/orders", b'"\xff"', JSON, 400, "invalid_json"),
        ("POST", "/publish/orders", '"\\ud800"', JSON, 400, "invalid_json"),
        ("POST", "/publish/orders?colour=red", "1", JSON, 400, "unknown_parameter"),
        ("POST", "/publish/a%2Fb", "1", JSON, 400, "invalid_topic"),
        ("POST", "/publish/..", "1", JSON, 400, "invalid_topic"),
        ("POST", "/publish/__scheduled", "1", JSON, 400, "invalid_topic"),
        ("POST", "/publish/orders.*", "1", JSON, 400, "invalid_topic"),
        ("POST", "/publish/" + "x" * 250, "1", JSON, 400, "invalid_topic"),
        ("POST", "/publish/orders?to=a%2Fb", "1", JSON, 400, "invalid_subscription"),
        ("POST", "/publish/orders", "1", JSON | {"X-Header-": "x"}, 400, "invalid_headers"),
        ("POST", "/publish/orders", "1", JSON | {"Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
        ("POST", "/publish/", "1", JSON, 404, "no_route"),
        ("POST", "/publish/batch/", "[1]", JSON, 404, "no_route"),
        ("POST", "/publish", "1", JSON, 404, "no_route"),
        ("POST", "/publish/a/b", "1", JSON, 404, "no_route"),
        ("GET", "/publish/orders", None, {}, 405, "method_not_allowed"),
        ("PUT", "/publish/orders", "1", JSON, 405, "method_not_allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_refused(
    http: Http, method: str, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    """With the status that says whose mistake it is, and the connection goes on."""
    answer = http.ask(method, path, body, headers)
    assert (answer.status, answer.code) == (status, code)
    assert not answer.json["error"]["retryable"]
    assert http.ok("GET", "/topics") == []


def test_a_message_has_a_limit() -> None:
    """413, the limit itself being allowed; each message of a batch by itself."""
    with running_server(memory=True, max_message_size=100) as server:
        http = http_of(server)
        fits, too_large = '"' + "x" * 98 + '"', '"' + "x" * 99 + '"'
        assert post(http, fits).status == 200
        assert (post(http, too_large).status, post(http, too_large).code) == (
            413,
            "message_too_large",
        )
        with_key = post(http, too_large, "/publish/orders?key=k")
        assert (with_key.status, with_key.code) == (413, "message_too_large")
        batch = "/publish/batch/orders"
        assert post(http, f"[{fits},{fits},{fits}]", batch).status == 200
        assert post(http, f"[1,{too_large}]", batch).status == 413
        assert http.ok("GET", "/topics/orders")["messages"] == 4
        http.close()


def test_a_full_queue_says_when_to_come_again() -> None:
    """429 with Retry-After; after something was consumed there is room."""
    with running_server(memory=True, max_queue_size=3) as server:
        http = http_of(server)
        http.ok("POST", "/subscribe/orders")
        for number in range(3):
            http.publish("orders", number)
        for answer in (
            post(http, "3"),
            post(http, "3", "/publish/orders?key=k"),
            post(http, "[3]", "/publish/batch/orders"),
        ):
            assert (answer.status, answer.code) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
            assert answer.json["error"]["retryable"]
        http.consume("orders")
        assert post(http, "[3,4]", "/publish/batch/orders").status == 429
        http.publish("orders", 3)
        http.close()


def test_topics_are_not_made_where_that_is_off() -> None:
    """Neither by a publish nor by a consumer."""
    with running_server(memory=True, auto_create_topics=False) as server:
        http = http_of(server)
        for answer in (
            post(http, "1"),
            post(http, "1", "/publish/orders?key=k"),
            post(http, "[1]", "/publish/batch/orders"),
            post(http, "1", "/publish/orders?delay=5"),
            http.get("/consume/orders"),
            http.get("/stream/orders"),
            http.ask("POST", "/subscribe/orders"),
        ):
            assert (answer.status, answer.code) == (404, "topic_not_found")
        http.close()


def test_a_publish_is_seen_by_whatever_comes_behind_it(http: Http) -> None:
    """A topic is there, a message can be consumed: the answer is worth something."""
    for number in range(50):
        topic = f"t{number}"
        http.publish(topic, number)
        assert http.consume(topic)["data"] == number
    assert len(http.ok("GET", "/topics")) == 50


def test_the_target_helper_writes_what_it_means() -> None:
    """Slashes in words, and queries."""
    assert target("publish", "a/b", key="x&y") == "/publish/a%2Fb?key=x%26y"
