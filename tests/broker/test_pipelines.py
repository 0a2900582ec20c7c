"""Pipelines: what they report is checked, kept within bounds, stored, and answered with wishes."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Broker, limits
from headrace.broker.pipelines import REPEATED_S, TOPIC
from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound, TooLarge
from headrace.operations.catalog import OPERATIONS
from tests.broker.rig import Rig

REPORT = OPERATIONS["report_pipeline"]


class Watch(Rig):
    """An engine that pipelines report to."""

    @property
    def pipelines(self) -> Any:
        return self.engine.pipelines

    def report(self, name: Any = "daily", said: Any = None, **more: Any) -> bool:
        given = {"pipeline": name, "report": report(**more) if said is None else said}
        answer = self.pipelines.report(*REPORT.check(given).values())
        self.run()
        assert set(answer) == {"stop"}
        return bool(answer["stop"])

    def show(self, name: str = "daily") -> dict[str, Any]:
        found: dict[str, Any] = self.pipelines.stats(name)
        return found

    def query(self, name: str = "daily", at: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.show(name)["queries"][at]
        return found

    def names(self) -> list[str]:
        return [shown["name"] for shown in self.pipelines]


def report(state: str = "running", run_id: str = "r1", **more: Any) -> dict[str, Any]:
    return {"state": state, "run_id": run_id, "started_at": 1000, "queries": [], **more}


def query(name: str = "orders", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


@pytest.fixture
def watch() -> Watch:
    return Watch()


# --- what is shown --------------------------------------------------------------------------------
def test_a_report_is_shown_with_what_the_broker_knows(watch: Watch) -> None:
    """The report itself, who it is from, when it came, and whether it is stale or to stop."""
    said = query(id="q", batch_id=4, input_rows=10, sources=[{"topic": "a"}], sink="delta")
    watch.report(queries=[said])
    shown = watch.show()
    assert shown == {
        "name": "daily",
        "state": "running",
        "run_id": "r1",
        "started_at": 1000,
        "stale": False,
        "stopping": False,
        "verdict": "ok",
        "reported_at": watch.clock.now_ms(),
        "queries": [said | {"last_progress_at": watch.clock.now_ms()}],
    }
    assert list(watch.pipelines) == [shown]


def test_the_age_of_unread_records(watch: Watch) -> None:
    """The broker computes it when it is asked; nothing unread is 0, nothing known is nothing."""
    now = watch.clock.now_ms()
    said = [query("a", oldest_unread_at=now - 4000), query("b", oldest_unread_at=0), query("c")]
    watch.report(queries=said)
    assert [each.get("lag_seconds") for each in watch.show()["queries"]] == [4.0, 0.0, None]
    watch.advance(2)
    assert watch.query()["lag_seconds"] == 6.0


def test_a_pipeline_that_is_stalled(watch: Watch) -> None:
    """It has records, or a batch, and finishes none; long batches and pauses are given their time."""

    def verdict(batch: int, **more: Any) -> str:
        watch.report(queries=[query(batch_id=batch, **more)])
        return str(watch.show()["verdict"])

    def silent_minute(batch: int, **more: Any) -> str:
        for _ in range(13):
            watch.advance(5)
            found = verdict(batch, **more)
        return found

    assert verdict(1, lag=5) == "ok"
    assert silent_minute(1, lag=5) == "stalled"
    assert verdict(2, lag=5) == "ok"
    assert silent_minute(2, lag=0) == "ok"
    assert silent_minute(2, lag=0, active=True) == "stalled"
    assert verdict(3, lag=5) == "ok"
    assert silent_minute(3, lag=5, interval_ms=60_000) == "ok"
    assert silent_minute(4, lag=5, trigger_ms=25_000) == "ok"
    watch.advance(limits.PIPELINE_STALE_S + 60)
    assert watch.show()["stale"]
    assert watch.show()["verdict"] == "ok"  # it is silent, which is worse


def test_a_pipeline_that_falls_behind(watch: Watch) -> None:
    """Its lag is larger than a minute ago; a new run is compared with itself only."""

    def minute(run: str, first: int, step: int) -> str:
        for number in range(8):
            lag = max(first + number * step, 0)
            watch.report(run_id=run, queries=[query(batch_id=number, lag=lag)])
            watch.advance(10)
        return str(watch.show()["verdict"])

    assert minute("r1", 0, 100) == "falling behind"
    assert minute("r1", 700, -100) == "ok"
    assert minute("r1", 100_000, 0) == "ok"
    watch.report(run_id="r2", queries=[query(batch_id=1, lag=1_000_000)])
    assert watch.show()["verdict"] == "ok"


def test_they_are_listed_by_name(watch: Watch) -> None:
    """Whoever reported last."""
    for name in ("b", "a", "c", "a"):
        watch.report(name)
    assert watch.names() == ["a", "b", "c"]


def test_what_is_shown_is_a_copy(watch: Watch) -> None:
    """Neither the pipeline nor a reader can change it afterwards."""
    said = report(queries=[query()])
    watch.report(said=said)
    said["queries"].clear()
    watch.show()["queries"].clear()
    assert len(watch.show()["queries"]) == 1


def test_one_that_falls_silent_is_stale(watch: Watch) -> None:
    """By the monotonic clock: a wall clock that jumps changes nothing. A report ends it."""
    watch.report()
    watch.clock.jump(3_600_000)
    watch.advance(limits.PIPELINE_STALE_S)
    assert not watch.show()["stale"]
    watch.advance(0.1)
    assert watch.show()["stale"]
    watch.report()
    assert not watch.show()["stale"]


@pytest.mark.parametrize("state", ["stopped", "failed", "finished"])
def test_one_that_has_ended_is_kept_and_never_stale(watch: Watch, state: str) -> None:
    """There is nothing more to expect of it."""
    watch.report(state=state, queries=[query(error="no such table")])
    watch.advance(1e4)
    shown = watch.show()
    assert (shown["state"], shown["stale"]) == (state, False)
    assert shown["queries"][0]["error"] == "no such table"


def test_the_time_of_the_last_progress_is_that_of_the_last_new_batch(watch: Watch) -> None:
    """A report that says nothing new is a sign of life, not of progress."""
    watch.report(queries=[query(batch_id=None)])
    assert watch.query()["last_progress_at"] is None
    watch.report(queries=[query(batch_id=-1)])
    assert watch.query()["last_progress_at"] is None
    watch.report(queries=[query(batch_id=0)])
    then = watch.clock.now_ms()
    watch.advance(10)
    watch.report(queries=[query(batch_id=0)])
    assert watch.query()["last_progress_at"] == then
    watch.report(queries=[query(batch_id=1)])
    assert watch.query()["last_progress_at"] == then + 10_000


# --- stored ---------------------------------------------------------------------------------------
def records(watch: Watch) -> list[dict[str, Any]]:
    return [orjson.loads(message.value) for message in watch.read(TOPIC)]


def test_reports_are_records_of_an_internal_topic(watch: Watch) -> None:
    """With the pipeline as the key. One that repeats the last is stored now and then only."""
    watch.report(queries=[query(batch_id=0)])
    watch.report(queries=[query(batch_id=1)])
    watch.report(queries=[query(batch_id=1)])
    assert [message.key for message in watch.read(TOPIC)] == [b"daily"] * 2
    watch.advance(REPEATED_S + 1)
    watch.report(queries=[query(batch_id=1)])
    assert [record["queries"][0]["batch_id"] for record in records(watch)] == [0, 1, 1]


def test_a_restart_knows_them_again(watch: Watch) -> None:
    """The last record of each name is what is known; one that ran is stale once it stays silent."""
    watch.report("a", queries=[query(batch_id=3)])
    watch.report("b", state="finished")
    watch.pipelines.stop("a")
    watch.run()
    before = list(watch.pipelines)
    watch.reopen()
    assert list(watch.pipelines) == before
    assert watch.report("a"), "the wish to stop is still known"
    watch.close()
    watch.advance(limits.PIPELINE_STALE_S + 1)
    watch.open()
    assert [shown["stale"] for shown in watch.pipelines] == [True, False]


def test_a_disk_without_room_keeps_nobody_from_reporting() -> None:
    """What cannot be stored is known until the broker stops."""
    watch = Watch()
    watch.report()
    watch.engine.guard.full = True
    watch.report(queries=[query(batch_id=5)])
    assert watch.query()["batch_id"] == 5
    assert len(records(watch)) == 1


# --- stopping -------------------------------------------------------------------------------------
def test_a_wish_to_stop_waits_for_the_next_report(watch: Watch) -> None:
    """It is said until the pipeline has ended; then it is fulfilled."""
    assert not watch.report()
    watch.pipelines.stop("daily")
    watch.pipelines.stop("daily")
    assert watch.show()["stopping"]
    assert watch.report()
    assert watch.report()
    assert not watch.report(state="stopped")
    assert not watch.show()["stopping"]
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


def test_only_a_pipeline_that_does_not_run_can_be_forgotten(watch: Watch) -> None:
    """Also for the next start. One that fell silent may be, too; if it reports again, it is known again."""
    watch.report()
    with pytest.raises(Conflict) as running:
        watch.pipelines.forget("daily")
    assert running.value.code == "pipeline_running"
    watch.advance(limits.PIPELINE_STALE_S + 1)
    watch.pipelines.forget("daily")
    watch.run()
    assert watch.names() == []
    watch.reopen()
    assert watch.names() == []
    watch.report()
    assert watch.names() == ["daily"]


def test_a_run_that_was_replaced_is_told_so(watch: Watch) -> None:
    """Two runs of one name do not take turns: the later one has it, until it ends or falls silent."""
    watch.report(run_id="old", started_at=1000)
    watch.report(run_id="new", started_at=2000)
    with pytest.raises(Conflict) as replaced:
        watch.report(run_id="old", started_at=1000)
    assert replaced.value.code == "pipeline_replaced"
    assert watch.show()["run_id"] == "new"
    watch.advance(limits.PIPELINE_STALE_S + 1)
    watch.report(run_id="old", started_at=1000)
    assert watch.show()["run_id"] == "old"


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
    assert watch.names() == ["runs", "second", "third"]
    watch.report("fourth")
    with pytest.raises(InvalidArgument) as refused:
        watch.report("fifth")
    assert refused.value.code == "too_many_pipelines"
    assert watch.names() == ["fourth", "runs", "third"]
    watch.report("runs")  # who is known may go on
    watch.advance(limits.PIPELINE_STALE_S + 1)
    watch.report("runs")
    watch.report("fifth")
    assert watch.names() == ["fifth", "fourth", "runs"]


def test_the_bytes_of_all_reports_have_a_bound(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a known pipeline says more than before."""

    def told(size: int) -> dict[str, Any]:
        return report(queries=[query(error="x" * size)])

    size = len(orjson.dumps(told(1000))) + len('"last_progress_at":null,')
    monkeypatch.setattr(limits, "PIPELINES_BYTES_MAX", 2 * size)
    watch.report("a", told(1000))
    watch.report("b", told(1000))
    with pytest.raises(InvalidArgument) as refused:
        watch.report("b", told(1100))
    assert refused.value.code == "too_many_pipelines"
    watch.report("b", told(900))
    watch.report("a", told(900) | {"state": "stopped"})
    watch.report("b", told(1500))
    assert watch.names() == ["b"]


def test_a_report_that_is_too_large_is_not_kept(watch: Watch) -> None:
    """The bound is checked before."""
    large = "x" * limits.PIPELINE_REPORT_BYTES_MAX
    with pytest.raises(TooLarge) as refused:
        watch.report("large", queries=[query(error=large)])
    assert refused.value.code == "report_too_large"
    assert watch.names() == []


@pytest.mark.parametrize("name", ["", "a b", "__own", "x" * 201, ".", "a/b", None, 3])
def test_a_name_is_as_that_of_a_subscription(watch: Watch, name: Any) -> None:
    """It stands in addresses and metrics."""
    with pytest.raises(InvalidArgument) as refused:
        watch.report(name)
    assert refused.value.code == "invalid_pipeline"


def deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "said",
    [
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
        report(queries=[query(sources=[{"more": object()}])]),
        report(queries=[query(sources=[{"more": 1 << 70}])]),
        report(queries=[query(sources=[{"more": "\ud800"}])]),
        report(queries=[query(sources=[{"more": deep(1000)}])]),
        report(queries=[query(input_rows_per_second=float("nan"))]),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(watch: Watch, said: Any) -> None:
    """With one code, and a sentence that says what is wrong."""
    with pytest.raises(InvalidArgument) as refused:
        watch.report(said=said)
    assert refused.value.code == "invalid_report"
    assert list(watch.pipelines) == []


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
            watch.report(said=said)
        except HeadraceError as error:
            refusals.add(error.code)
        assert orjson.dumps(list(watch.pipelines))
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
        assert broker.pipeline_stats("daily")["state"] == "stopped"
