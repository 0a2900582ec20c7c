"""How a replay is cut into steps, what users may write, and the file that keeps the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import Conflict, DataCorrupt, HeadraceError, InvalidArgument
from headrace.limits import OFFSET_MAX
from headrace.spark.builtin.replay import steps_of_round
from headrace.spark.builtin.replay_plan import (
    Plan,
    Request,
    State,
    StepSpan,
    default_state,
    new_name,
    parse_offsets,
    parse_rate,
    step_offsets,
)
from headrace.spark.builtin.replay_staging import Staged, parts, staged_rows
from headrace.spark.lake.offsets import Offsets, Span


def plan_of(step: int, *spans: Span) -> Plan:
    return Plan.of(Request.of("orders", "copy"), Offsets(spans), step, (None, None))


# --- what users write -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "rate"),
    [("1000/s", 1000), ("1000", 1000), ("5k/s", 5000), ("60/m", 1), ("1.5/s", 1.5), ("36/h", 0.01)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "-5/s", "0/s", "5/day", "1e3"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--rate"):
        parse_rate(text)


def test_offsets() -> None:
    """Both ends are meant in text; JSON is that of a manifest."""
    assert parse_offsets("0:100-200, 1:5-") == [(None, 0, 100, 201), (None, 1, 5, OFFSET_MAX)]
    assert parse_offsets("orders/3:7") == [("orders", 3, 7, 8)]
    assert parse_offsets("0:-9") == [(None, 0, 0, 10)]
    assert parse_offsets('{"orders": {"0": [[100, 201], [300, 301]]}}') == [
        ("orders", 0, 100, 201),
        ("orders", 0, 300, 301),
    ]


@pytest.mark.parametrize("text", ["", "0", "0:9-3", "x:1-2", "0:1-2;1:2-3", "{}x", '{"a": 1}', "{"])
def test_what_are_no_offsets(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--offsets") as caught:
        parse_offsets(text)
    assert caught.value.code == "invalid_offsets"


def test_which_offsets_are_chosen() -> None:
    there = Offsets([Span("orders", 0, 10, 100), Span("orders", 1, 0, 50)])

    def chosen(text: str | None) -> list[Span]:
        return list(Request.of("orders", "copy", offsets=text).chosen(there))

    assert chosen(None) == list(there)
    assert chosen("0:-19") == [Span("orders", 0, 10, 20)]
    assert chosen("1:40-") == [Span("orders", 1, 40, 50)]
    with pytest.raises(InvalidArgument, match="orders/1@50-60 is not there"):
        chosen("1:40-60")
    with pytest.raises(InvalidArgument, match="nothing in orders/7"):
        chosen("7:1-2")
    there.add("other", 0, 0, 5)
    with pytest.raises(InvalidArgument, match="which topic"):
        chosen("0:10-20")


@pytest.mark.parametrize(
    ("source", "to", "given"),
    [
        ("orders", "copy", {"since": "yesterday"}),
        ("orders", "copy", {"offsets": "0:1-2", "since": "1h"}),
        ("orders", "copy", {"partition": "any"}),
        ("orders", "no topic", {}),
        ("orders", "copies.*", {}),
        ("two words", "copy", {}),
        ("s3://bucket/table", "copy", {}),
    ],
)
def test_what_cannot_be_asked_for(source: str, to: str, given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        Request.of(source, to, **given)


def test_a_path_is_a_table() -> None:
    assert Request.of("/lake/orders", "copy").is_table
    assert Request.of("./orders", "copy").source == str(Path.cwd() / "orders")
    assert not Request.of("shop.>", "copy").is_table
    assert Request.of("a, b,a", "copy").topics == ["a", "b"]


# --- steps ------------------------------------------------------------------------------------------
def test_a_step_is_a_second_or_what_a_commit_may_have() -> None:
    assert step_offsets(1000, 100) == 1000
    assert step_offsets(None, 0) == 50_000
    assert step_offsets(None, 1 << 20) == 16
    assert step_offsets(0.01, 0) == 1
    assert step_offsets(1000, 1 << 30) == 1


@pytest.mark.parametrize("step", [1, 3, 7, 50, 1000])
def test_steps_have_every_offset_once_and_in_order(step: int) -> None:
    spans = [Span("a", 0, 5, 60), Span("a", 0, 70, 71), Span("a", 1, 0, 3), Span("b", 0, 9, 200)]
    plan = plan_of(step, *spans)
    for topic, partition in plan.offsets.partitions():
        found = plan.steps_of(topic, partition)
        assert found == sorted(found, key=lambda span: (span.step, span.start))
        assert Offsets(Span(topic, partition, s.start, s.end) for s in found) == Offsets(
            span for span in spans if (span.topic, span.partition) == (topic, partition)
        )
        assert sum(s.end - s.start for s in found) == sum(
            span.length for span in spans if (span.topic, span.partition) == (topic, partition)
        )
        # Rounds have what the whole has.
        assert [
            s for n in range(plan.steps) for s in plan.steps_of(topic, partition, n, n + 1)
        ] == found
    plan.done = plan.steps
    assert plan.done_offsets() == plan.count


def test_partitions_move_on_together() -> None:
    plan = plan_of(110, Span("a", 0, 0, 1000), Span("a", 1, 0, 100))
    assert plan.steps == 10
    assert plan.spans(4, 5) == {
        ("a", 0): [StepSpan(400, 500, 4)],
        ("a", 1): [StepSpan(40, 50, 4)],
    }


def test_rounds_grow_where_a_condition_leaves_little() -> None:
    """At a rate a round is half a minute; it grows up to what is staged at a time."""
    plan = plan_of(10, Span("a", 0, 0, 1_000_000))
    assert steps_of_round(plan, 10) == 30
    assert steps_of_round(plan, 10, 30, rows=300) == 30
    assert steps_of_round(plan, 10, 30, rows=3) == 60
    assert steps_of_round(plan, 10, 15_000, rows=3) == 20_000
    plan.weight = 1 << 20
    assert steps_of_round(plan, 10, 30, rows=3) == 30
    assert steps_of_round(plan, 10) == 6
    assert steps_of_round(plan_of(50_000, Span("a", 0, 0, 1_000_000)), None) == 10


def test_rows_are_cut_where_a_step_ends() -> None:
    spans = {
        ("a", 0): [StepSpan(0, 10, 0), StepSpan(10, 20, 1)],
        ("a", 1): [StepSpan(5, 6, 0), StepSpan(7, 9, 1)],
    }
    topics = ["a"] * 9 + ["z"]
    partitions = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    offsets = [8, 9, 11, 25, 4, 5, 6, 7, 8, 1]
    found = [(p.step, p.topic, p.partition, p.first, p.begin, p.end) for p in parts(topics, partitions, offsets, spans)]  # fmt: skip
    assert found == [
        (0, "a", 0, 8, 0, 2),
        (1, "a", 0, 11, 2, 3),
        (0, "a", 1, 5, 5, 6),
        (1, "a", 1, 7, 7, 9),
    ]


def test_pieces_are_committed_in_the_order_of_offsets() -> None:
    rows = [
        (0, "a", 0, 50, 0, "third", 1),
        (0, "a", 0, 10, 1, "second", 1),
        (0, "a", 0, 10, 0, "first", 1),
        (1, "a", 0, 60, 0, "other", 1),
    ]
    found = staged_rows(rows)
    assert [each.piece for each in found[0]] == ["first", "second", "third"]
    assert found[1] == [Staged(*rows[3])]


# --- the file -----------------------------------------------------------------------------------------
def test_the_plan_is_kept(tmp_path: Path) -> None:
    plan = plan_of(10, Span("orders", 0, 0, 100))
    request = Request.of("orders", "copy")
    with State(tmp_path / "new" / "state", "once") as state:
        assert state.load(request) is None
        temporary = state.begin(plan)
        assert state.load(request) is None
        state.begun(temporary)
        plan.done, plan.rows = 3, 30
        state.save(plan)
    with State(tmp_path / "new" / "state", "once") as state:
        found = state.load(request)
    assert found == plan
    assert found is not None
    assert not found.is_finished
    assert found.done_offsets() == 30


def test_a_name_is_one_replay(tmp_path: Path) -> None:
    with State(tmp_path, "once") as state:
        state.save(plan_of(10, Span("orders", 0, 0, 100)))
        with pytest.raises(Conflict, match="--to 'copy', not 'elsewhere'") as caught:
            state.load(Request.of("orders", "elsewhere"))
        assert caught.value.code == "replay_differs"
        with pytest.raises(Conflict, match="--keep-timestamps False, not True"):
            state.load(Request.of("orders", "copy", keep_timestamps=True))
        with pytest.raises(Conflict, match="running already"), State(tmp_path, "once"):
            pass


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "once.json").write_text('{"version": 7}')
    with State(tmp_path, "once") as state, pytest.raises(DataCorrupt, match="not the plan"):
        state.load(Request.of("orders", "copy"))
    with pytest.raises(HeadraceError, match="--state"), State(tmp_path / "once.json", "x"):
        pass
    with pytest.raises(InvalidArgument):
        State(tmp_path, "../escape")


def test_names_and_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert new_name() != new_name()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state() == tmp_path / "headrace" / "replays"
