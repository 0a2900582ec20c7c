"""Pipelines: what they report is checked, counted, kept within bounds, and answered with wishes."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Broker, limits
from headrace.broker.pipelines import Pipelines
from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound, TooLarge
from headrace.testing import FakeClock, FakeLoop


class Watch:
    """Pipelines, and the clocks that they go by."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.clock = FakeClock(self.loop)
        self.pipelines = Pipelines(self.loop.time, self.clock.now_ms)

    def report(self, name: str = "daily", **said: Any) -> bool:
        answer = self.pipelines.report(name, report(**said))
        assert set(answer) == {"stop"}
        return bool(answer["stop"])

    def query(self, name: str = "daily", at: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.pipelines.show(name)["queries"][at]
        return found


def report(state: str = "running", run_id: str = "r1", **more: Any) -> dict[str, Any]:
    return {"state": state, "run_id": run_id, "started_at": 1000, "queries": [], **more}


def query(name: str = "orders", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


@pytest.fixture
def watch() -> Watch:
    return Watch()


# --- what is shown --------------------------------------------------------------------------------
def test_a_report_is_shown_as_it_came(watch: Watch) -> None:
    """With everything that was in it, known or not, and what the broker knows beside it."""
    said = query(
        id="q", batch_id=4, input_rows=10, sources=[{"topic": "a"}], sink="delta", colour=1
    )
    watch.report(queries=[said], host="worker-1")
    shown = watch.pipelines.show("daily")
    assert shown == {
        "name": "daily",
        "state": "running",
        "run_id": "r1",
        "started_at": 1000,
        "host": "worker-1",
        "stale": False,
        "stopping": False,
        "reported_at": watch.clock.now_ms(),
        "queries": [
            said
            | {
                "batches_total": 1,
                "input_rows_total": 10,
                "last_progress_at": watch.clock.now_ms(),
            }
        ],
    }
    assert watch.pipelines.documents() == [shown]


def test_they_are_listed_by_name(watch: Watch) -> None:
    """Whoever reported last."""
    for name in ("b", "a", "c", "a"):
        watch.report(name)
    assert [shown["name"] for shown in watch.pipelines.documents()] == ["a", "b", "c"]


def test_what_is_shown_is_a_copy(watch: Watch) -> None:
    """Neither who reported nor who asked can change it afterwards."""
    said = report(queries=[query()])
    watch.pipelines.report("daily", said)
    said["queries"].clear()
    watch.pipelines.show("daily")["queries"].clear()
    assert len(watch.pipelines.show("daily")["queries"]) == 1


def test_one_that_falls_silent_is_stale(watch: Watch) -> None:
    """By the monotonic clock: a wall clock that jumps changes nothing. A report ends it."""
    watch.report()
    watch.clock.jump(3_600_000)
    watch.loop.advance(limits.PIPELINE_STALE_S)
    assert not watch.pipelines.show("daily")["stale"]
    watch.loop.advance(0.1)
    assert watch.pipelines.show("daily")["stale"]
    watch.report()
    assert not watch.pipelines.show("daily")["stale"]


@pytest.mark.parametrize("state", ["stopped", "failed", "finished"])
def test_one_that_has_ended_is_kept_and_never_stale(watch: Watch, state: str) -> None:
    """There is nothing more to expect of it."""
    watch.report(state=state, queries=[query(error="no such table")])
    watch.loop.advance(1e6)
    shown = watch.pipelines.show("daily")
    assert (shown["state"], shown["stale"]) == (state, False)
    assert shown["queries"][0]["error"] == "no such table"


# --- counting -------------------------------------------------------------------------------------
def test_batches_and_rows_are_counted_once(watch: Watch) -> None:
    """A repeated report of the same batch counts nothing; skipped batches are counted as batches."""
    for batch_id, rows in ((7, 10), (7, 10), (8, 5), (11, 1)):
        watch.report(queries=[query(batch_id=batch_id, input_rows=rows)])
    assert (watch.query()["batches_total"], watch.query()["input_rows_total"]) == (5, 16)


def test_counts_go_on_over_runs(watch: Watch) -> None:
    """A second run that begins with the batch at which the first one ended has done it again."""
    watch.report(queries=[query(batch_id=7, input_rows=10)])
    watch.report(state="failed", queries=[query(batch_id=7, input_rows=10)])
    watch.report(run_id="r2", queries=[query(batch_id=7, input_rows=10)])
    assert (watch.query()["batches_total"], watch.query()["input_rows_total"]) == (2, 20)


def test_who_counts_by_itself_is_believed(watch: Watch) -> None:
    """Its own totals know the batches that were never reported."""
    for total in (30, 70):
        watch.report(
            queries=[query(batch_id=total, batches_total=total, input_rows_total=total * 2)]
        )
    assert (watch.query()["batches_total"], watch.query()["input_rows_total"]) == (70, 140)


def test_the_time_of_the_last_progress_is_that_of_the_last_new_batch(watch: Watch) -> None:
    """A report that says nothing new is a sign of life, not of progress."""
    watch.report(queries=[query(batch_id=None)])
    assert watch.query()["last_progress_at"] is None
    watch.report(queries=[query(batch_id=-1)])
    assert watch.query()["last_progress_at"] is None
    watch.report(queries=[query(batch_id=0)])
    then = watch.clock.now_ms()
    watch.loop.advance(10)
    watch.report(queries=[query(batch_id=0)])
    assert watch.query()["last_progress_at"] == then


def test_a_query_that_is_not_reported_any_more_is_gone(watch: Watch) -> None:
    """It belongs to an earlier shape of the pipeline."""
    watch.report(queries=[query("a", batch_id=1), query("b", batch_id=1)])
    watch.report(queries=[query("b", batch_id=2)])
    assert [q["name"] for q in watch.pipelines.show("daily")["queries"]] == ["b"]
    assert watch.query()["batches_total"] == 2


# --- stopping and forgetting ----------------------------------------------------------------------
def test_a_wish_to_stop_waits_for_the_next_report(watch: Watch) -> None:
    """It is said until the pipeline has ended; then it is fulfilled."""
    assert not watch.report()
    watch.pipelines.stop("daily")
    watch.pipelines.stop("daily")
    assert watch.pipelines.show("daily")["stopping"]
    assert watch.report()
    assert watch.report()
    assert not watch.report(state="stopped")
    assert not watch.pipelines.show("daily")["stopping"]
    assert not watch.report(run_id="r2")


def test_a_wish_to_stop_is_not_meant_for_the_next_run(watch: Watch) -> None:
    """Whoever starts it again wants it to run."""
    watch.report()
    watch.pipelines.stop("daily")
    assert not watch.report(run_id="r2")


def test_only_what_runs_can_be_stopped(watch: Watch) -> None:
    """One that has ended, or was never there, is refused with the reason."""
    with pytest.raises(NotFound) as missing:
        watch.pipelines.stop("daily")
    assert missing.value.code == "pipeline_not_found"
    watch.report(state="finished")
    with pytest.raises(Conflict) as ended:
        watch.pipelines.stop("daily")
    assert ended.value.code == "pipeline_not_running"


def test_only_what_does_not_run_can_be_forgotten(watch: Watch) -> None:
    """One that fell silent may be; should it speak again, it is known again."""
    watch.report()
    with pytest.raises(Conflict) as running:
        watch.pipelines.forget("daily")
    assert running.value.code == "pipeline_running"
    watch.loop.advance(limits.PIPELINE_STALE_S + 1)
    watch.pipelines.forget("daily")
    assert watch.pipelines.documents() == []
    watch.report()
    assert [shown["name"] for shown in watch.pipelines.documents()] == ["daily"]


def test_a_run_that_was_replaced_is_told_so(watch: Watch) -> None:
    """Two runs of one name do not take turns: the later one has it, until it ends or falls silent."""
    watch.report(run_id="old", started_at=1000)
    watch.report(run_id="new", started_at=2000)
    with pytest.raises(Conflict) as replaced:
        watch.report(run_id="old", started_at=1000)
    assert replaced.value.code == "pipeline_replaced"
    assert watch.pipelines.show("daily")["run_id"] == "new"
    watch.loop.advance(limits.PIPELINE_STALE_S + 1)
    watch.report(run_id="old", started_at=1000)
    assert watch.pipelines.show("daily")["run_id"] == "old"


# --- bounds ---------------------------------------------------------------------------------------
def test_those_that_ended_longest_ago_make_room(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run never do; when all run, another one is refused and nothing is lost."""
    monkeypatch.setattr(limits, "PIPELINES_MAX", 3)
    watch.report("runs")
    watch.report("first", state="finished")
    watch.report("second", state="failed")
    watch.report("third")
    assert [s["name"] for s in watch.pipelines.documents()] == ["runs", "second", "third"]
    watch.report("fourth")
    with pytest.raises(InvalidArgument) as refused:
        watch.report("fifth")
    assert refused.value.code == "too_many_pipelines"
    assert [s["name"] for s in watch.pipelines.documents()] == ["fourth", "runs", "third"]
    watch.report("runs")  # who is known may go on
    watch.loop.advance(limits.PIPELINE_STALE_S + 1)
    watch.report("runs")
    watch.report("fifth")
    assert [s["name"] for s in watch.pipelines.documents()] == ["fifth", "fourth", "runs"]


def test_the_bytes_of_all_reports_have_a_bound(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when one that is known says more than before."""
    size = len(orjson.dumps(report(text="x" * 1000)))
    monkeypatch.setattr(limits, "PIPELINES_BYTES_MAX", 2 * size)
    watch.report("a", text="x" * 1000)
    watch.report("b", text="x" * 1000)
    with pytest.raises(InvalidArgument) as refused:
        watch.report("b", text="x" * 1001)
    assert refused.value.code == "too_many_pipelines"
    watch.report("b", text="x" * 900)
    watch.report("a", state="stopped", text="x" * 900)
    watch.report("b", text="x" * 1500)
    assert [s["name"] for s in watch.pipelines.documents()] == ["b"]
    watch.loop.advance(limits.PIPELINE_STALE_S + 1)
    watch.pipelines.forget("b")
    watch.report("a", text="x" * 1000)
    watch.report("c", text="x" * 1000)


def test_a_report_that_is_too_large_is_not_kept(watch: Watch) -> None:
    """The bound is checked before."""
    spare = limits.PIPELINE_REPORT_BYTES_MAX - len(orjson.dumps(report(text="")))
    watch.report("fits", text="x" * spare)
    with pytest.raises(TooLarge) as refused:
        watch.report("large", text="x" * (spare + 1))
    assert refused.value.code == "report_too_large"
    assert [shown["name"] for shown in watch.pipelines.documents()] == ["fits"]


@pytest.mark.parametrize("name", ["", "a b", "__own", "x" * 201, ".", "a/b", None, 3])
def test_a_name_is_as_that_of_a_subscription(watch: Watch, name: Any) -> None:
    """It stands in addresses and metrics."""
    for call in (lambda: watch.report(name), lambda: watch.pipelines.show(name)):
        with pytest.raises(InvalidArgument) as refused:
            call()
        assert refused.value.code == "invalid_pipeline"


def deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        report(state="asleep"),
        report(run_id=""),
        report(run_id="x" * 201),
        report(run_id=3),
        report(started_at=None),
        report(started_at=True),
        report(started_at=-1),
        report(started_at=1 << 53),
        report(queries=None),
        report(queries={}),
        report(queries=[query(str(n)) for n in range(limits.PIPELINE_QUERIES_MAX + 1)]),
        report(queries=[query("twice"), query("twice")]),
        report(queries=["orders"]),
        report(queries=[{}]),
        report(queries=[query("")]),
        report(queries=[query("x" * 201)]),
        report(queries=[query(batch_id=-2)]),
        report(queries=[query(batch_id=1.0)]),
        report(queries=[query(batch_id=True)]),
        report(queries=[query(input_rows=-1)]),
        report(queries=[query(input_rows="many")]),
        report(queries=[query(dead_letters=1 << 63)]),
        report(queries=[query(trigger_ms=-0.5)]),
        report(queries=[query(input_rows_per_second="fast")]),
        report(queries=[query(sink=7)]),
        report(queries=[query(error={})]),
        report(queries=[query(sources="orders")]),
        report(more=object()),
        report(more={1: 2}),
        report(more=1 << 70),
        report(more="\ud800"),
        report(more=deep(1000)),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(watch: Watch, said: Any) -> None:
    """With one code, and a sentence that says what is wrong."""
    with pytest.raises(InvalidArgument) as refused:
        watch.pipelines.report("daily", said)
    assert refused.value.code == "invalid_report"
    assert watch.pipelines.documents() == []


def test_a_number_that_is_none_is_not_there(watch: Watch) -> None:
    """Spark says NaN of a rate that nothing was measured of."""
    watch.report(queries=[query(input_rows_per_second=float("nan"), trigger_ms=float("inf"))])
    assert watch.query()["input_rows_per_second"] is None
    assert watch.query()["trigger_ms"] is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=True)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    ["name", "batch_id", "input_rows", "batches_total", "dead_letters", "trigger_ms", "sink"]
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"state": st.just("running") | JSON, "run_id": st.just("r") | JSON},
            optional={
                "started_at": st.just(1) | JSON,
                "queries": st.lists(st.dictionaries(FIELDS, JSON)) | JSON,
            },
        ),
        max_size=5,
    )
)
def test_whatever_is_said_it_is_refused_or_shown(reports: list[dict[str, Any]]) -> None:
    """Nothing else happens, and what is shown is JSON."""
    watch = Watch()
    refusals = set()
    for said in reports:
        try:
            watch.pipelines.report("daily", said)
        except HeadraceError as error:
            refusals.add(error.code)
        assert orjson.dumps(watch.pipelines.documents())
    assert refusals <= {"invalid_report", "pipeline_replaced"}


# --- the embedded broker --------------------------------------------------------------------------
def test_the_embedded_broker_keeps_them_too() -> None:
    """A pipeline may run in the same process."""
    with Broker() as broker:
        assert broker.pipelines() == []
        assert broker.report_pipeline("daily", report()) == {"stop": False}
        broker.stop_pipeline("daily")
        assert broker.report_pipeline("daily", report()) == {"stop": True}
        assert [shown["stopping"] for shown in broker.pipelines()] == [True]
        broker.report_pipeline("daily", report(state="stopped"))
        broker.forget_pipeline("daily")
        assert broker.pipelines() == []
