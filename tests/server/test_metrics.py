"""Metrics and health: the numbers agree with what was done, and what is wrong is said."""

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import HeadraceError
from headrace.server import metrics as metrics_module
from headrace.server.metrics import BOUNDS_S, Histogram
from headrace.testing import RunningServer, running_server, wait_until
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Events, Http, RawHttp, http_of, raw_request
from tests.server.http_websocket import WebSocket

SEED = {
    "message_broker_messages_published_total": "counter",
    "message_broker_messages_consumed_total": "counter",
    "message_broker_active_connections": "gauge",
    "message_broker_queue_size": "gauge",
    "message_broker_processing_duration": "histogram",
}


class Metrics:
    """What one scrape says."""

    def __init__(self, http: Http):
        answer = http.get("/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        self.families = list(text_string_to_metric_families(answer.body.decode()))
        self.text = answer.body.decode()

    def value(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == f"message_broker_{name}" and sample.labels == labels
        ]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    def type_of(self, name: str) -> str:
        lines = [line.split() for line in self.text.splitlines() if line.startswith("# TYPE")]
        return next(kind for _, _, found, kind in lines if found == name)


# --- scrapes ----------------------------------------------------------------------------------------
def test_a_scrape_gives_way_to_others(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each topic and subscription if its time is up, however many there are."""
    with server.client() as client:
        for number in range(30):
            client.create_subscription(f"group-{number}", "orders")
    monkeypatch.setattr(metrics_module, "SLICE_S", -1.0)

    def pauses() -> int:
        found: metrics_module.Metrics = server.server.hub.metrics.__self__  # type: ignore[attr-defined]
        scrape, count = found._render(), 0
        try:
            while True:
                scrape.send(None)
                count += 1
        except StopIteration:
            return count

    assert server.call(pauses) > 30
    metrics = Metrics(http)
    assert [metrics.value("group_lag", topic="orders", group=f"group-{n}") for n in (0, 29)] == [
        0,
        0,
    ]


def test_scrapes_at_the_same_time_share_one(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape that many ask for costs no more than one; one who leaves takes nothing from the others."""
    begun = []
    collect = metrics_module.Metrics.collect

    def counted(self: metrics_module.Metrics) -> Any:
        begun.append(self)
        return collect(self)

    monkeypatch.setattr(metrics_module.Metrics, "collect", counted)

    async def scrape() -> list[bytes]:
        hub = server.server.hub
        tasks = [asyncio.ensure_future(hub.metrics()) for _ in range(5)]
        await asyncio.sleep(0)
        tasks.pop(0).cancel()
        return [content for content, _ in await asyncio.gather(*tasks)]

    found = server._begin(scrape()).result(10)
    assert len(set(found)) == 1
    assert len(begun) == 1


# --- numbers --------------------------------------------------------------------------------------
def test_the_five_names_are_there_from_the_beginning(http: Http) -> None:
    """With their types, before anything has happened."""
    metrics = Metrics(http)
    for name, kind in SEED.items():
        assert metrics.type_of(name) == kind
    assert metrics.value("active_connections") == 0


def test_every_metric_has_a_text_and_a_prefix(http: Http) -> None:
    """Who sees it for the first time can read what it is, and whose: the broker's or a pipeline's."""
    http.publish("orders", 1)
    for family in Metrics(http).families:
        assert family.name.startswith(("message_broker_", "headrace_"))
        assert len(family.documentation) > 5


def test_what_was_published_and_consumed_is_counted(http: Http, server: RunningServer) -> None:
    """Whichever way it came and went, by topic."""
    http.ok("POST", "/subscribe/orders", {"group": "billing", "max_deliveries": 1})
    http.publish("orders", 1)
    http.publish("orders", 2, key="k")
    http.ask("POST", "/publish/batch/orders", [3, 4, 5])
    with WebSocket(server.http_address) as ws:
        ws.ok("publish", topic="orders", data=6)
    with server.client() as client:
        client.publish("orders", b"7")
        client.publish("invoices", b"x")
    metrics = Metrics(http)
    assert metrics.value("messages_published_total", topic="orders") == 7
    assert metrics.value("messages_published_total", topic="invoices") == 1
    assert metrics.value("queue_size", topic="orders") == 7
    assert metrics.value("messages_consumed_total", topic="orders") == 0
    http.consume("orders", group="billing")
    http.consume_batch("orders", group="billing", limit=2)
    for message in http.consume_batch("orders", group="billing", limit=2, ack="manual"):
        http.ask("POST", "/ack/orders?group=billing", {"delivery": message["delivery"]})
    lost = http.consume("orders", group="billing", ack="manual")
    http.ask("POST", "/nack/orders?group=billing", {"delivery": lost["delivery"]})
    wait_until(lambda: Metrics(http).value("dead_letters", topic="billing.dlq") == 1)
    held = http.consume("orders", group="billing", ack="manual")
    assert held is not None
    metrics = Metrics(http)
    group = {"topic": "orders", "group": "billing"}
    assert metrics.value("messages_consumed_total", topic="orders") == 5
    assert metrics.value("queue_size", topic="orders") == 1
    assert metrics.value("group_lag", **group) == 1
    assert metrics.value("group_in_flight", **group) == 1
    assert metrics.value("group_delivered_total", **group) == 7
    assert metrics.value("group_acked_total", **group) == 5
    assert metrics.value("group_nacked_total", **group) == 1
    assert metrics.value("group_dead_lettered_total", **group) == 1
    assert metrics.value("topic_durability", topic="orders", mode="memory") == 1


@pytest.mark.parametrize("memory", [False, True])
def test_how_long_it_took_is_measured_once_for_each_message(memory: bool) -> None:
    """From its arrival to its being stored, finer than the loop counts; and each sync of the disk."""
    with running_server(memory=memory) as server:
        http = http_of(server)
        for number in range(5):
            http.publish("orders", number)
        http.ask("POST", "/publish/batch/orders", list(range(20)))
        metrics = Metrics(http)
        assert metrics.value("processing_duration_count") == 25
        assert 0 < metrics.value("processing_duration_sum") < 60
        assert metrics.value("processing_duration_bucket", le="+Inf") == 25
        syncs = metrics.value("fsync_duration_seconds_count")
        assert syncs == 0 if memory else syncs >= 6
        took = metrics.value("fsync_duration_seconds_sum")
        assert took == 0 if memory else 0 < took < 60
        spent = metrics.value("processing_duration_sum")
        assert spent * 1000 % 1 != 0, "a whole number of milliseconds is what the loop counts"
        mode = "memory" if memory else "always"
        assert metrics.value("topic_durability", topic="orders", mode=mode) == 1
        assert metrics.value("topic_messages", topic="orders") == 25
        assert metrics.value("topic_bytes", topic="orders") > 0
        assert metrics.value("disk_full") == 0
        http.close()


def test_connections_are_counted_by_what_they_speak(server: RunningServer, http: Http) -> None:
    """The active ones of the first README are the WebSockets."""
    text = TextSocket(server.address)
    text.ask("PING")
    with (
        WebSocket(server.http_address) as one,
        WebSocket(server.http_address),
        Events(server.http_address, "/stream/orders") as events,
        server.client() as client,
    ):
        events.begin()
        client.publish("orders", b"1")
        one.ok("ping")
        metrics = Metrics(http)
        assert metrics.value("active_connections") == 2
        for protocol, count in (
            ("websocket", 2), ("sse", 1), ("http", 1), ("text", 1), ("binary", 1), ("tcp", 0),
        ):  # fmt: skip
            assert metrics.value("connections", protocol=protocol) == count
        assert metrics.value("connections_accepted_total") == 6
    text.close()
    wait_until(lambda: Metrics(http).value("active_connections") == 0)


def test_refusals_are_counted() -> None:
    """Messages for want of room, connections for want of places."""
    with running_server(memory=True, max_queue_size=2, max_connections=1) as server:
        http = http_of(server)
        for number in range(5):
            http.ask("POST", "/publish/orders", number)
        with RawHttp(server.http_address) as refused:
            assert is_refused(refused, lambda: None)
        metrics = Metrics(http)
        assert metrics.value("messages_refused_total", topic="orders") == 3
        assert metrics.value("connections_refused_total") == 1
        http.close()


def test_delayed_messages_are_counted(http: Http) -> None:
    """As long as they wait; what the broker keeps for itself is no topic of anybody's."""
    http.publish("orders", 1, delay=600)
    metrics = Metrics(http)
    assert metrics.value("scheduled_messages") == 1
    assert "__scheduled" not in metrics.text


def test_a_deleted_topic_is_gone_from_the_metrics(http: Http) -> None:
    """Names do not pile up."""
    http.publish("orders", 1)
    assert 'topic="orders"' in Metrics(http).text
    http.ok("DELETE", "/topics/orders")
    assert 'topic="orders"' not in Metrics(http).text


def test_publishing_touches_nothing_of_prometheus(
    http: Http, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is put together when somebody asks: with all its ways barred, publishing goes on."""

    def barred(*_: object, **__: object) -> Any:
        raise AssertionError("the hot path has met prometheus")

    Metrics(http)
    with monkeypatch.context() as patch:
        for kind in ("Counter", "Gauge", "Histogram", "Summary"):
            for method in ("inc", "dec", "set", "observe", "labels", "time"):
                if hasattr(getattr(prometheus_client, kind), method):
                    patch.setattr(getattr(prometheus_client, kind), method, barred)
        for family in ("CounterMetricFamily", "GaugeMetricFamily", "HistogramMetricFamily"):
            patch.setattr(f"headrace.server.metrics.{family}", barred)
        patch.setattr("headrace.server.metrics.generate_latest", barred)
        with WebSocket(server.http_address) as ws:
            ws.ok("subscribe", topic="orders")
            for number in range(10):
                http.publish("orders", number)
                ws.message()
                http.consume("orders")
    assert Metrics(http).value("messages_published_total", topic="orders") == 10


def test_a_histogram_counts_up_to_its_bounds() -> None:
    """A value on a bound is below it; what is above all is in the last one."""
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, 99.0):
        histogram.add(seconds)
    histogram.add(0.003, weight=10)
    (family,) = [histogram.family("x", "text")]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert buckets[repr(BOUNDS_S[0])] == 2
    assert buckets[repr(BOUNDS_S[1])] == 3
    assert buckets["0.0025"] == 3
    assert buckets["0.005"] == 13
    assert buckets["+Inf"] == 14
    counts = [s.value for s in family.samples if s.name == "x_count"]
    assert counts == [14]


# --- health ---------------------------------------------------------------------------------------
def ready(http: Http) -> tuple[int, list[str]]:
    answer = http.get("/health/ready")
    return answer.status, answer.json["reasons"]


def test_a_healthy_broker_says_so(http: Http) -> None:
    """Three questions, one mood."""
    http.publish("orders", 1)
    assert http.get("/health/live").json == {"status": "ok"}
    assert http.get("/health/ready").json == {"status": "ok", "reasons": []}
    health = http.get("/health")
    assert health.status == 200
    assert health.json == {"status": "ok", "reasons": [], "topics": 1, "connections": 1}


def test_a_full_disk_is_a_reason_not_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, it is consumed from, publishes are refused; and it recovers by itself."""
    with running_server() as server:
        http = http_of(server)
        http.publish("orders", 1)
        guard = server.engine.guard
        free = {"bytes": 0}

        def look() -> None:
            guard._files.free_bytes = lambda path: free["bytes"]  # type: ignore[method-assign]
            guard.open()

        server.call(look)
        status, reasons = ready(http)
        assert status == 503
        assert "MiB are free" in reasons[0]
        assert http.get("/health/live").status == 200
        assert http.get("/health").json["status"] == "degraded"
        assert Metrics(http).value("disk_full") == 1
        for path, body in (("/publish/orders", 2), ("/publish/batch/orders", [2])):
            answer = http.ask("POST", path, body)
            assert (answer.status, answer.code) == (503, "storage_full")
            assert answer.headers["retry-after"] == "1"
        with WebSocket(server.http_address) as ws:
            answer = ws.ask("publish", topic="orders", data=2)
            assert (answer["code"], answer["retryable"]) == ("storage_full", True)
        assert http.consume("orders")["data"] == 1
        free["bytes"] = 1 << 40
        server.call(look)
        assert ready(http) == (200, [])
        http.publish("orders", 3)
        http.close()


def test_a_damaged_partition_is_a_reason_not_to_be_ready(tmp_path: Path) -> None:
    """Which one, and what to do; the others take publishes, this one refuses them with 503."""
    with running_server(tmp_path / "data") as server:
        http = http_of(server)
        for number in range(3):
            http.publish("orders", number)
        http.close()
        server.stop()
        (log,) = (tmp_path / "data" / "orders" / "0").glob("*.log")
        content = bytearray(log.read_bytes())
        second = content.index(b"HRB1", 4)
        content[second + 70] ^= 0xFF
        log.write_bytes(content)
        server.start()
        http = http_of(server)
        status, reasons = ready(http)
        assert status == 503
        assert "orders/0 is read-only" in reasons[0]
        assert "doctor" in reasons[0]
        answer = http.ask("POST", "/publish/orders", 4)
        assert (answer.status, answer.code) == (503, "read_only")
        assert "retry-after" not in answer.headers
        http.publish("other", 1)
        assert Metrics(http).value("topic_read_only", topic="orders") == 1
        assert [m["data"] for m in http.ok("GET", "/topics/orders/messages")] == [0]
        damaged = http.get("/topics/orders/messages?from=1")
        assert (damaged.status, damaged.code) == (500, "data_corrupt")
        assert [m["data"] for m in http.ok("GET", "/topics/orders/messages?from=2")] == [2]
        http.close()


def test_a_broker_that_is_stopping_is_not_ready(server: RunningServer, http: Http) -> None:
    """Who is still connected is told; nobody else gets in."""
    http.get("/health")

    def drain(draining: bool) -> None:
        server.server.hub.draining = draining

    server.call(drain, True)
    status, reasons = ready(http)
    assert (status, reasons) == (503, ["the broker is stopping"])
    assert http.get("/health/live").status == 200
    with RawHttp(server.http_address) as late:
        late.socket.settimeout(5)
        assert is_refused(late, lambda: late.send(raw_request("GET", "/health")))
    server.call(drain, False)


def is_refused(raw: RawHttp, send: Callable[[], None]) -> bool:
    try:
        send()
        return raw.is_ended()
    except ConnectionError:
        return True


def test_a_failed_disk_is_a_reason_not_to_be_ready(server: RunningServer, http: Http) -> None:
    """As long as it can still be asked."""
    http.publish("orders", 1)
    server.call(lambda: setattr(server.engine, "failed", HeadraceError("the disk has failed")))
    status, reasons = ready(http)
    assert (status, reasons) == (503, ["the disk has failed"])
    server.call(lambda: setattr(server.engine, "failed", None))


def test_a_sync_that_fails_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """500, which may not be tried again without thought; then the broker ends."""
    with running_server(disk="threads") as server:
        http = http_of(server)
        http.publish("orders", 1)

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("headrace.files.Files.sync", fail)
        answer = http.ask("POST", "/publish/orders", 2)
        assert (answer.status, answer.code) == (500, "outcome_unknown")
        assert not answer.json["error"]["retryable"]
        http.close()
        server.kill()


def test_a_closed_port_is_closed(server: RunningServer) -> None:
    """After a stop nobody listens there."""
    address = server.http_address
    server.stop()
    with socket.socket() as probe:
        assert probe.connect_ex(address) == errno.ECONNREFUSED


def test_readiness_names_topics_that_lost_their_settings(tmp_path: Path) -> None:
    """A damaged topic.json is told, also after a restart, until somebody sets the settings; nothing of it is thrown away."""
    with running_server(tmp_path / "data") as server:
        http = http_of(server)
        http.publish("orders", 1)
        http.close()
        server.stop()
        path = tmp_path / "data" / "orders" / "topic.json"
        damaged = path.read_bytes().replace(b"retention", b"detention")
        path.write_bytes(damaged)
        for _ in range(2):  # the second start finds the settings that the first one stored
            server.start()
            http = http_of(server)
            status, reasons = ready(http)
            assert (status, len(reasons)) == (503, 1)
            assert reasons[0].startswith("orders has lost its settings")
            http.publish("orders", 2)
            http.close()
            server.stop()
        assert path.with_name("topic.json.damaged").read_bytes() == damaged
        server.start()
        http = http_of(server)
        http.ok("PATCH", "/topics/orders", {"retention_hours": 24})
        assert ready(http) == (200, [])
        http.close()
        server.stop()
        server.start()
        http = http_of(server)
        assert ready(http) == (200, [])
        http.close()
