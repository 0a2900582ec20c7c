"""A replay among the pipelines of the broker."""

from __future__ import annotations

from headrace import BrokerClient
from headrace.spark.builtin.replay import Progress
from headrace.spark.builtin.replay_report import ReplayReport
from headrace.spark.pipelines.reporting import Reporter
from headrace.spark.sessions.stop_flag import StopFlag
from headrace.testing import RunningServer


def test_the_broker_knows_it_and_can_stop_it(server: RunningServer, client: BrokerClient) -> None:
    stop = StopFlag()
    report = ReplayReport("again", "orders", "copy", stop)
    reporter = Reporter(lambda: server.client().connect())
    reporter.start([report])
    report.tell(Progress("again", 100, 1000, 90, 1, 10))
    reporter.report_all()
    [known] = client.pipelines()
    assert (known["name"], known["state"]) == ("replay-again", "running")
    [query] = known["queries"]
    assert (query["input_rows_total"], query["lag"], query["sink"]) == (100, 900, "copy")
    assert not stop.is_set()
    client.stop_pipeline("replay-again")
    reporter.report_all()
    assert stop.is_set()
    report.ended("stopped")
    reporter.close()
    assert client.pipelines()[0]["state"] == "stopped"


def test_a_failure_is_told(server: RunningServer, client: BrokerClient) -> None:
    report = ReplayReport("broken", "orders", "copy", StopFlag())
    reporter = Reporter(lambda: server.client().connect())
    reporter.start([report])
    report.ended("failed", "the table is gone")
    reporter.close()
    [known] = client.pipelines()
    assert known["state"] == "failed"
    assert known["queries"][0]["error"] == "the table is gone"
