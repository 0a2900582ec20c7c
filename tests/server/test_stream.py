"""Event streams: what a browser's EventSource sees, and where it goes on."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server import flow, stream
from headrace.server.stream import EventStream, parse_event_id
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import TEXT, Event, Events, Http, RawHttp, http_of, raw_request


def listen(server: RunningServer, topic: str = "orders", **options: Any) -> Events:
    """An event stream that has begun."""
    query = options.pop("query", "")
    events = Events(server.http_address, f"/stream/{topic}{query}", **options)
    assert events.head.status == 200
    events.begin()
    return events


def data_of(events: list[Event]) -> list[Any]:
    return [event.json["data"] for event in events]


@pytest.fixture
def disk_server() -> Iterator[RunningServer]:
    """One whose messages are there after a restart."""
    with running_server() as server:
        yield server


def sessions(server: RunningServer) -> list[EventStream]:
    def find() -> list[EventStream]:
        found = [connection.session for connection in server.server.hub.connections]
        return [session for session in found if isinstance(session, EventStream)]

    return server.call(find)


# --- events ---------------------------------------------------------------------------------------
def test_a_stream_has_every_message_from_now_on(server: RunningServer, http: Http) -> None:
    """In the message format, with nothing to acknowledge."""
    http.publish("orders", "before")
    with listen(server) as events:
        assert events.head.headers["cache-control"] == "no-store"
        receipt = http.ok("POST", "/publish/orders", {"a": 1}, **{"X-Header-Source": "x"})
        event = events.next()
        assert event.name == "message"
        assert event.json == {
            "id": receipt["id"],
            "topic": "orders",
            "partition": 0,
            "offset": 1,
            "data": {"a": 1},
            "headers": {"source": "x"},
            "timestamp": receipt["timestamp"],
            "attempt": 1,
            "retryCount": 0,
        }
        assert event.id == "orders/0:2"


def test_a_stream_begins_where_it_is_told(disk_server: RunningServer) -> None:
    """At either end, at an offset, at a time."""
    http = http_of(disk_server)
    http.ask("POST", "/publish/batch/orders", [0, 1, 2])
    for start, first in (("earliest", 0), ("1", 1), ("2020-01-01T00:00:00Z", 0), ("@0", 0)):
        with listen(disk_server, query=f"?from={start}") as events:
            assert events.next().json["data"] == first
    with listen(disk_server, query="?from=latest") as events:
        http.publish("orders", 3)
        assert events.next().json["data"] == 3
    http.close()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/stream/orders?from=99", 404, "offset_out_of_range"),
        ("/stream/orders?from=soon", 400, "invalid_offset"),
        ("/stream/orders?from=-1", 400, "invalid_offset"),
        ("/stream/orders.*?from=1", 400, "invalid_argument"),
        ("/stream/orders?to=1", 400, "unknown_parameter"),
        ("/stream/a*b", 400, "invalid_topic"),
        ("/stream/__scheduled", 400, "invalid_topic"),
    ],
)
def test_what_cannot_be_streamed_is_answered(
    http: Http, server: RunningServer, path: str, status: int, code: str
) -> None:
    """Like any other request; the connection goes on, and nothing is left of it."""
    http.publish("orders", 1)
    answer = http.get(path)
    assert (answer.status, answer.code) == (status, code)
    assert http.get("/topics").status == 200
    assert server.call(lambda: len(server.engine._followers)) == 0


@pytest.mark.parametrize(
    "text", ["nonsense", "orders:5", "orders/0:x", "orders/0:5,", "a/0:٣", ","]
)
def test_an_id_of_another_kind_is_refused(http: Http, text: str) -> None:
    """It is not ours, so there is nowhere to go on."""
    answer = http.get("/stream/orders", {"Last-Event-ID": text})
    assert (answer.status, answer.code) == (400, "bad_event_id")


def test_a_wildcard_covers_topics_that_come_later(server: RunningServer, http: Http) -> None:
    """Each message says of which topic it is; the id names all of them."""
    http.publish("orders.old", 0)
    with listen(server, "orders.*") as events:
        http.publish("orders.old", 1)
        assert events.next().json["topic"] == "orders.old"
        http.publish("orders.new", 2)
        http.publish("invoices.new", 3)
        event = events.next()
        assert (event.json["topic"], event.json["data"]) == ("orders.new", 2)
        assert parse_event_id(event.id) == {"orders.old/0": 2, "orders.new/0": 1}


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r", "\n\n", "\r\r\n"])
def test_json_over_several_lines_is_one_event(
    server: RunningServer, http: Http, line_end: str
) -> None:
    """Whatever ends its lines: the standard knows three ways, and none of them ends the event."""
    raw = f'{{{line_end}"a": 1,{line_end}"event": "error"{line_end}}}'
    with listen(server) as events:
        http.ask("POST", "/publish/orders", raw, {"Content-Type": "application/json"})
        http.publish("orders", "next")
        event = events.next()
        assert event.name == "message"
        assert event.json["data"] == {"a": 1, "event": "error"}
        assert events.next().json["data"] == "next"


def test_text_with_line_ends_cannot_make_an_event(server: RunningServer, http: Http) -> None:
    """They are escaped in JSON, as in every answer."""
    text = "x\n\nevent: error\ndata: forged\r\rid: 7\n\n"
    with listen(server) as events:
        http.ask("POST", "/publish/orders", text, TEXT)
        event = events.next()
        assert (event.name, event.json["data"]) == ("message", text)


def test_a_target_or_an_expiry_is_respected(server: RunningServer, http: Http) -> None:
    """A direct message is not for everybody who listens."""
    http.ok("POST", "/subscribe/orders", {"group": "billing"})
    with listen(server) as events:
        http.publish("orders", "direct", to="billing")
        http.publish("orders", "for all")
        assert events.next().json["data"] == "for all"


def test_nothing_happens_for_a_while(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment now and then keeps those in between from giving up."""
    monkeypatch.setattr(stream, "COMMENT_S", 0.05)
    with listen(server) as events:
        assert events.raw.until(b": alive\n\n").endswith(b": alive\n\n")
        assert events.raw.until(b": alive\n\n").endswith(b": alive\n\n")


def test_a_stream_behind_other_requests(server: RunningServer) -> None:
    """Pipelined: the answers before it come first."""
    with RawHttp(server.http_address) as raw:
        raw.send(raw_request("POST", "/publish/orders", b"1") * 3)
        raw.send(raw_request("GET", "/stream/orders?from=1"))
        assert [raw.answer().json["offset"] for _ in range(3)] == [0, 1, 2]
        assert raw.head().headers["content-type"] == "text/event-stream"
        raw.until(b'"offset":1,')
        raw.until(b'"offset":2,')


# --- going on -------------------------------------------------------------------------------------
def test_who_comes_back_goes_on_exactly_behind_what_it_has_seen(
    disk_server: RunningServer,
) -> None:
    """Over a restart of the broker, after every single message: nothing missed, nothing twice."""
    http = http_of(disk_server)
    http.ask("POST", "/publish/batch/orders", list(range(10)))
    http.close()
    last, seen = None, []
    for life in range(3):
        for _ in range(3):
            query = "?from=earliest" if last is None else ""
            with listen(disk_server, query=query, last_event_id=last) as events:
                event = events.next()
            seen.append(event.json["data"])
            last = event.id
        if life < 2:
            disk_server.restart()
    assert seen == [*range(9)]


def test_what_came_while_away_is_not_missed(disk_server: RunningServer) -> None:
    """Also in topics that did not exist yet, and by who had seen nothing so far."""
    http = http_of(disk_server)
    http.publish("orders.a", "before")
    with listen(disk_server, "orders.>") as events:
        nothing_seen = events.last_event_id
        http.publish("orders.a", 0)
        seen = events.next().id
    http.publish("orders.a", 1)
    http.publish("orders.b", 2)
    http.publish("orders.c.d", 3)
    http.close()
    disk_server.restart()
    with listen(disk_server, "orders.>", last_event_id=seen) as events:
        assert sorted(data_of(events.take(3))) == [1, 2, 3]
    with listen(disk_server, "orders.>", last_event_id=nothing_seen) as events:
        assert sorted(data_of(events.take(4))) == [0, 1, 2, 3]


def test_an_id_is_there_before_there_is_a_topic(disk_server: RunningServer) -> None:
    """A wildcard over nothing can be gone on with, too."""
    with listen(disk_server, "orders.*") as events:
        assert events.last_event_id == "-"
    http = http_of(disk_server)
    http.publish("orders.a", 1)
    with listen(disk_server, "orders.*", last_event_id="-") as events:
        assert events.next().json["data"] == 1
    http.close()


def test_a_partition_that_came_meanwhile_is_read_from_its_beginning(
    disk_server: RunningServer,
) -> None:
    """Every partition has its own place in the id."""
    http = http_of(disk_server)
    http.ok("PUT", "/topics/orders", {"partitions": 2})
    with listen(disk_server) as events:
        for partition in (0, 1, 1):
            http.publish("orders", partition, partition=partition)
        last = [event.id for event in events.take(3)][-1]
        assert parse_event_id(last) == {"orders/0": 1, "orders/1": 2}
    http.ok("PATCH", "/topics/orders", {"partitions": 3})
    for partition in (2, 0):
        http.publish("orders", partition, partition=partition)
    with listen(disk_server, last_event_id=last) as events:
        assert sorted(data_of(events.take(2))) == [0, 2]
    http.close()


def test_a_topic_that_was_made_anew_is_another_one(server: RunningServer, http: Http) -> None:
    """A place beyond its end means nothing there, so it is read from its beginning."""
    http.ok("POST", "/subscribe/orders")
    http.ask("POST", "/publish/batch/orders", list(range(10)))
    with listen(server, query="?from=earliest") as events:
        last = events.take(10)[-1].id
    http.ok("DELETE", "/topics/orders")
    http.ok("POST", "/subscribe/orders")
    http.publish("orders", "new")
    with listen(server, last_event_id=last) as events:
        assert events.next().json["data"] == "new"


# --- cost and end ---------------------------------------------------------------------------------
def test_a_slow_reader_costs_a_bounded_buffer_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is behind in the log, not in memory; who takes nothing for long is gone."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    monkeypatch.setattr(flow, "STALLED_S", 1.0)
    with running_server(durability="never") as server:
        http = http_of(server)
        slow = listen(server, receive_bytes=16 << 10)
        (session,) = sessions(server)
        for _ in range(30):
            http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 500)
            size = server.call(lambda: session.outbox._transport.get_write_buffer_size())
            assert size < 2 << 20
        wait_until(lambda: not sessions(server))
        assert server.call(lambda: len(server.engine._followers)) == 0
        slow.close()
        http.close()


def test_a_slow_reader_that_reads_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, without a gap."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    with running_server(durability="never") as server:
        http = http_of(server)
        with listen(server, receive_bytes=64 << 10) as events:
            for _ in range(4):
                http.ask("POST", "/publish/batch/orders", ["x" * 1000] * 500)
            assert [event.json["offset"] for event in events.take(2000)] == [*range(2000)]
        http.close()


def test_who_leaves_is_forgotten(server: RunningServer) -> None:
    """Whether it says goodbye or not."""
    streams = [listen(server) for _ in range(3)]
    assert server.call(lambda: len(server.engine._followers)) == 3
    streams[0].close()
    streams[1].raw.socket.shutdown(socket.SHUT_WR)
    streams[2].raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    streams[2].close()
    server.wait_until(lambda: len(server.engine._followers) == 0)
    streams[1].close()


def test_a_stop_ends_the_stream(disk_server: RunningServer) -> None:
    """At once; who comes back afterwards goes on."""
    with listen(disk_server) as events:
        before = time.monotonic()
        disk_server.stop()
        assert time.monotonic() - before < 4
        with pytest.raises(EOFError):
            events.next()
    disk_server.start()
    with listen(disk_server, last_event_id=events.last_event_id) as events:
        http = http_of(disk_server)
        http.publish("orders", 1)
        assert events.next().json["data"] == 1
        http.close()


def test_too_many_partitions_for_an_id(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id comes with every event, so it has a bound; past it the stream says so."""
    monkeypatch.setattr(stream, "EVENT_ID_BYTES_MAX", 35)
    http.ok("PUT", "/topics/a.few", {"partitions": 2})
    with listen(server, "a.*") as events:
        http.publish("a.few", 1)
        assert events.next().json["data"] == 1
        http.ok("PUT", "/topics/a.lot", {"partitions": 3})
        for partition in range(3):
            http.publish("a.lot", partition, partition=partition)
        found = events.next()
        while found.name == "message":
            found = events.next()
        assert json.loads(found.data)["error"]["code"] == "too_many_partitions"
        with pytest.raises(EOFError):
            events.next()
    answer = http.get("/stream/a.*")
    assert (answer.status, answer.code) == (400, "too_many_partitions")
