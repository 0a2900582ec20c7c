"""What is counted of a query, and how the broker hears of it."""

import threading
from typing import Any

import pytest

from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError
from headrace.spark.pipelines.reporting import Reporter, Watch, lag_of, positions_of, rows_of
from headrace.testing import RunningServer, wait_until


class Query:
    """As much of a StreamingQuery as a watch asks when it is told of progress by hand."""

    id, name = "0000-11", "revenue"


def offset(begin: dict[str, dict[str, int]] | None = None, **topics: dict[str, int]) -> Any:
    document: dict[str, Any] = {"@topics": dict.fromkeys(topics, 1), **topics}
    return document if begin is None else {**document, "@begin": begin}


def progress(batch: int, start: Any, end: Any, latest: Any, **more: Any) -> dict[str, Any]:
    source = {"startOffset": start, "endOffset": end, "latestOffset": latest, "numInputRows": 20}
    return {
        "batchId": batch,
        "numInputRows": 20,
        "inputRowsPerSecond": 40.0,
        "processedRowsPerSecond": 100.0,
        "durationMs": {"triggerExecution": 200},
        "sources": [source],
    } | more


def test_rows_are_counted_by_offsets() -> None:
    """Spark counts a row as often as it scans it; the first batch says where it began."""
    first = progress(0, None, offset({"a": {"0": 5}}, a={"0": 12, "1": 3}), None)
    assert rows_of(first) == 7 + 3
    later = progress(1, offset(a={"0": 12}), offset(a={"0": 15, "1": 2}), None)
    assert rows_of(later) == 3 + 2
    foreign = progress(1, "0", "7", "8")
    assert rows_of(foreign) == 20


def test_lag() -> None:
    """The records after the end of the batch; unknown for sources that are not ours."""
    source = {"endOffset": offset(a={"0": 5}), "latestOffset": offset(a={"0": 9, "1": 2})}
    assert lag_of(source) == 6
    assert lag_of({"endOffset": "7", "latestOffset": "9"}) is None
    assert lag_of({"endOffset": offset(a={"0": 5}), "latestOffset": None}) is None
    found = positions_of('{"@topics": {"a": 1}, "a": {"0": 3}}')
    assert found is not None
    assert found.offsets == {"a": {0: 3}}


def test_what_a_watch_adds_up() -> None:
    """Batches, rows and dead letters; an idle query says its last batch again."""
    watch = Watch(Query(), "out", ("orders",))  # type: ignore[arg-type]
    one = progress(
        0,
        None,
        offset({"a": {"0": 0}}, a={"0": 10}),
        offset(a={"0": 13}),
        observedMetrics={"headrace": {"dead_letters": 2}},
    )
    watch.took(one)
    assert (watch.lag, watch.batch_id, watch.has_progress) == (3, 0, True)
    document = watch.document()
    assert document["input_rows"] == document["input_rows_total"] == 10
    assert document["input_rows_per_second"] == 20.0  # Spark's 40 counted each row twice
    assert (document["dead_letters"], document["trigger_ms"]) == (2, 200)
    assert document["sources"] == [{"name": "orders", "lag": 3, "end": {"a": {"0": 10}}}]
    watch.took(progress(0, offset(a={"0": 10}), offset(a={"0": 10}), offset(a={"0": 10})))
    again = watch.document()
    assert (again["input_rows"], again["input_rows_total"], again["batches_total"]) == (0, 10, 1)
    assert (again["dead_letters"], again["lag"]) == (2, 0)
    restarted = Watch(Query(), "out")  # type: ignore[arg-type]
    restarted.goes_on_from(watch)
    assert not restarted.has_progress
    restarted.took(progress(1, offset(a={"0": 10}), offset(a={"0": 12}), offset(a={"0": 12})))
    assert restarted.document()["input_rows_total"] == 12


def test_watermark_and_state() -> None:
    """Of all stateful operators together; a watermark that no row has set is none."""
    watch = Watch(Query(), "out", interval="5 minutes")  # type: ignore[arg-type]
    operators = [
        {"numRowsTotal": 3, "memoryUsedBytes": 100},
        {"numRowsTotal": 4, "memoryUsedBytes": 50},
    ]
    more = {"eventTime": {"watermark": "2026-01-01T08:00:00.500Z"}, "stateOperators": operators}
    watch.took(progress(0, None, "1", "1", **more))
    found = watch.document()
    assert (found["state_rows"], found["state_bytes"]) == (7, 150)
    assert (found["watermark"], found["interval_ms"]) == (1_767_254_400_500, 300_000)
    watch.took(progress(1, None, "1", "1", eventTime={"watermark": "1970-01-01T00:00:00.000Z"}))
    found = watch.document()
    assert (found["watermark"], found["state_rows"]) == (None, None)


def test_rates_that_are_none() -> None:
    """Spark knows rates that no JSON can carry."""
    watch = Watch(Query(), "out")  # type: ignore[arg-type]
    watch.took(progress(0, None, "1", "1", inputRowsPerSecond="NaN", processedRowsPerSecond=None))
    assert watch.document()["input_rows_per_second"] == 0.0


class Reported:
    def __init__(self) -> None:
        self.name = "revenue"
        self.state = "running"
        self.watches: list[Watch] = []
        self.stopped = threading.Event()

    def document(self) -> dict[str, Any]:
        return {"state": self.state, "run_id": "r", "started_at": 1, "queries": []}

    def wish_to_stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.spark.pipelines.reporting.INTERVAL_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_the_broker_hears_and_answers(server: RunningServer, client: BrokerClient) -> None:
    """Reports arrive, a wish to stop comes back, the age of unread records is asked for, the end is told."""
    client.create_subscription("revenue", "orders")
    client.publish("orders", b"1")
    job = Reported()
    groups = [("revenue", "orders"), ("other", "orders")]
    job.watches.append(Watch(Query(), "out", groups=groups))  # type: ignore[arg-type]
    reporter = Reporter(lambda: server.client().connect())
    reporter.start([job])
    wait_until(lambda: [each["name"] for each in client.pipelines()] == ["revenue"])
    assert not job.stopped.is_set()
    assert job.watches[0].oldest_unread_at == client.fetch("orders")[0].timestamp
    client.stop_pipeline("revenue")
    assert job.stopped.wait(10)
    job.state = "stopped"
    reporter.close()
    assert client.pipelines()[0]["state"] == "stopped"


@pytest.mark.usefixtures("quick")
def test_a_broker_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and nothing else happens."""

    def connect() -> BrokerClient:
        raise HeadraceError("nobody there")

    tries = threading.Semaphore(0)
    job = Reported()
    job.document = lambda: tries.release() or {}  # type: ignore[method-assign, func-returns-value]
    reporter = Reporter(connect)
    reporter.start([job])
    wait_until(lambda: reporter.failure == "nobody there")
    reporter.report_all()
    reporter.close()
    assert [record.message for record in caplog.records] == [
        "the progress of revenue was not reported: nobody there"
    ]
