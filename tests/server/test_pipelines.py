"""Pipelines over HTTP, and their metrics."""

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import limits
from headrace.testing import RunningServer
from tests.server.http_rig import Http

Samples = dict[tuple[str, tuple[str, ...]], float]


def say(server: RunningServer, name: str = "daily", **more: Any) -> None:
    """A pipeline reports."""
    with server.client() as client:
        document = {"state": "running", "run_id": "r1", "started_at": 1000, "queries": [], **more}
        client.report_pipeline(name, document)


def samples(http: Http) -> Samples:
    """What a scrape says of pipelines: (name, values of the labels) -> value."""
    text = http.get("/metrics").body.decode()
    return {
        (
            sample.name.removeprefix("headrace_pipeline_"),
            tuple(sample.labels.values()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("headrace_pipeline_")
    }


QUERY = {
    "name": "orders",
    "batch_id": 3,
    "input_rows": 10,
    "input_rows_per_second": 2.5,
    "trigger_ms": 1500,
    "dead_letters": 4,
    "batches_total": 1,
    "input_rows_total": 10,
}


def test_pipelines_are_listed_shown_and_stopped(server: RunningServer, http: Http) -> None:
    """From the first report to the last."""
    assert http.ok("GET", "/pipelines") == []
    say(server, queries=[QUERY])
    [listed] = http.ok("GET", "/pipelines")
    assert listed == http.ok("GET", "/pipelines/daily")
    assert (listed["state"], listed["stale"], listed["stopping"]) == ("running", False, False)
    assert http.ok("POST", "/pipelines/daily/stop")["stopping"]
    say(server, state="stopped", queries=[QUERY])
    refused = http.ask("POST", "/pipelines/daily/stop")
    assert (refused.status, refused.code) == (409, "pipeline_not_running")
    assert http.ok("DELETE", "/pipelines/daily") == {"deleted": "daily"}
    assert http.ok("GET", "/pipelines") == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/pipelines/daily"),
        ("POST", "/pipelines/daily/stop"),
        ("DELETE", "/pipelines/daily"),
    ],
)
def test_one_that_never_reported_is_not_there(http: Http, method: str, path: str) -> None:
    """And a name that cannot be is a mistake."""
    answer = http.ask(method, path)
    assert (answer.status, answer.code) == (404, "pipeline_not_found")
    wrong = http.ask(method, re.sub("daily", "__daily", path))
    assert (wrong.status, wrong.code) == (400, "invalid_pipeline")


def test_what_pipelines_say_are_metrics(server: RunningServer, http: Http) -> None:
    """By pipeline and query."""
    assert samples(http) == {}
    say(server, queries=[QUERY])
    say(server, queries=[{**QUERY, "batch_id": 4, "batches_total": 2, "input_rows_total": 20}])
    found = samples(http)
    query = ("daily", "orders")
    assert 0 <= found.pop(("last_progress_seconds", query)) < 60
    assert found == {
        ("up", ("daily",)): 1,
        ("stalled", ("daily",)): 0,
        ("falling_behind", ("daily",)): 0,
        ("batches_total", query): 2,
        ("input_rows_total", query): 20,
        ("dead_letters_total", query): 4,
        ("input_rows_per_second", query): 2.5,
        ("trigger_seconds", query): 1.5,
    }


def test_up_is_about_those_that_should_run(
    server: RunningServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 for one that failed or fell silent; nothing for one that ended as it should."""
    say(server, "failed", state="failed", queries=[QUERY])
    say(server, "finished", state="finished", queries=[QUERY])
    say(server, "stopped", state="stopped")
    say(server, "idle", queries=[{"name": "orders"}])
    found = samples(http)
    assert {key: v for key, v in found.items() if key[0] == "up"} == {
        ("up", ("failed",)): 0,
        ("up", ("idle",)): 1,
    }
    assert ("batches_total", ("finished", "orders")) in found
    assert ("trigger_seconds", ("finished", "orders")) not in found
    assert ("last_progress_seconds", ("idle", "orders")) not in found
    monkeypatch.setattr(limits, "PIPELINE_STALE_S", -1.0)
    assert samples(http)[("up", ("idle",))] == 0
    assert [p["name"] for p in http.ok("GET", "/pipelines") if p["stale"]] == ["idle"]


def test_labels_may_be_any_text(server: RunningServer, http: Http) -> None:
    """The name of a query is the user's, and cannot break the format."""
    name = 'a "b"\n\\c{d="e"} 1'
    say(server, queries=[{**QUERY, "name": name}])
    assert samples(http)[("input_rows_total", ("daily", name))] == 10
