"""Starting, watching and stopping queries."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.pipelines import running
from headrace.spark.pipelines.reporting import Reporter
from headrace.testing import RunningServer, wait_until
from tests.spark.pipelines.rig import Bench

pytestmark = pytest.mark.xdist_group("spark")
PATIENCE_S = 90.0
"""Far more than it takes; a machine may be busy."""


@pytest.fixture
def bench(spark: Any, server: RunningServer, tmp_path: Path) -> Bench:
    return Bench(spark, server, tmp_path)


@pytest.fixture
def background() -> Iterator[list[tuple[running.Runner, threading.Thread]]]:
    """Runners that are stopped at the end of the test, whatever happens."""
    started: list[tuple[running.Runner, threading.Thread]] = []
    yield started
    for runner, thread in started:
        runner.stop(now=True)
        thread.join(PATIENCE_S)


def test_until_somebody_stops_it(bench: Bench, background: Any) -> None:
    """It follows what comes and tells the broker; who asks the broker, can stop it."""
    path = bench.write(
        "two.toml",
        """
        [pipeline.one]
        from = "a"
        to = "b"
        [pipeline.two]
        from = "a"
        to = "c"
        trigger = "1 hour"
        """,
    )
    bench.publish("a", b"1")
    looks: list[int] = []
    runner = bench.runner(
        path,
        reporter=Reporter(lambda: bench.server.client().connect()),
        on_look=lambda jobs: looks.append(len(jobs)),
    )
    thread = threading.Thread(target=runner.run)
    background.append((runner, thread))
    thread.start()
    one, two = runner.jobs
    with bench.server.client() as client:
        wait_until(lambda: bench.values("c") == [b"1"], PATIENCE_S)
        bench.publish("a", b"2", b"3")
        wait_until(lambda: len(bench.values("b")) == 3, PATIENCE_S)

        def reported() -> dict[str, Any]:
            return {each["name"]: each for each in client.pipelines()}

        def rows(name: str) -> Any:
            return [query.get("input_rows_total") for query in reported()[name]["queries"]]

        wait_until(lambda: rows("one") == [3] and rows("two") == [1], PATIENCE_S)
        assert {each["state"] for each in reported().values()} == {"running"}
        client.stop_pipeline("one")
        wait_until(lambda: one.state == "stopped", PATIENCE_S)
        assert two.state == "running"
        runner.stop()
        thread.join(PATIENCE_S)
        assert two.state == "stopped"
        assert {each["state"] for each in reported().values()} == {"stopped"}
    assert set(looks) == {2}


def test_a_broker_that_comes_later(bench: Bench) -> None:
    """An error that may go away is tried again; what was wrong is told meanwhile."""
    path = bench.write(
        "later.toml",
        """
        [pipeline.copy]
        from = "a"
        options = { timeout = 0.5 }
        to = "b"
        """,
    )
    bench.publish("a", b"1")
    bench.server.stop()
    errors: set[str] = set()

    def look(jobs: list[running.RunningJob]) -> None:
        if jobs[0].error and not errors:
            errors.add(jobs[0].error)
            assert jobs[0].document()["queries"][0]["error"] == jobs[0].error
            bench.server.start()

    runner = bench.runner(path, once=True, on_look=look)
    (job,) = runner.run()
    assert "no broker answers" in errors.pop()
    assert (job.state, job.error) == ("finished", None)
    assert bench.values("b") == [b"1"]


def test_what_cannot_go_away(bench: Bench) -> None:
    """A topic that is not there: the pipeline has failed at once, the other one goes on."""
    path = bench.write(
        "gone.toml",
        """
        [pipeline.good]
        from = "a"
        to = "b"
        [pipeline.bad]
        from = "nothing"
        to = "c"
        """,
    )
    bench.publish("a", b"1")
    good, bad = bench.runner(path, once=True).run()
    assert good.state == "finished"
    assert bad.state == "failed"
    assert bad.error is not None
    assert "there is no topic 'nothing'" in bad.error
    assert bad.document()["queries"][0]["error"] == bad.error


def test_stopped_before_it_began(bench: Bench) -> None:
    """A signal may come while Spark still starts."""
    path = bench.write("p.toml", '[pipeline.p]\nfrom = "a"\nto = "b"\n')
    bench.publish("a", b"1")
    runner = bench.runner(path)
    runner.stop()
    (job,) = runner.run()
    assert job.state == "stopped"
    with bench.server.client() as client:
        assert "b" not in client.topics()
