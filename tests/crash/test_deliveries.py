"""The history of a cluster: what a fault explains, and what it does not explain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.crash.checker import Checker
from tests.crash.deliveries import SETTLED_NS, TRANSIT_NS, Faults
from tests.crash.history import value_of
from tests.crash.test_checker import MS, TOPIC, A, B, Story, anomalies, in_turn, one_message

S = 1000
"""Milliseconds."""


def fault(story: Story, ms: int = 1000, *, holds: bool = False) -> None:
    """Something is broken from now on, for so long."""
    at, until = story._ms, story._ms + ms
    told: dict[str, Any] = {"what": "node killed", "holds": holds}
    story.tell("fault", **told, until=until * MS, at_ms=at, until_ms=until)
    story.events[-1]["at"] = at * MS
    story.later(ms)


def quiet(story: Story) -> None:
    """Long enough that no fault explains anything."""
    story.later((SETTLED_NS + 2 * TRANSIT_NS) // MS)


def flushed(story: Story) -> None:
    story.tell("flushed", member="m", life=1, since=story._ms * MS + 1)


def end(story: Story, *values: str) -> set[str]:
    """Three nodes show the same."""
    story.tell("final")
    for _ in range(3):
        story.bounds(0, 0, len(values))
        story.read(0, 0, *values)
    return anomalies(story.events)


def end_of_one(story: Story) -> set[str]:
    return end(story, value_of(A, 0))


# --- redeliveries ---------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["between", "long before", None])
def test_a_fault_explains_what_comes_again(when: str | None) -> None:
    """Only if it was between the two deliveries, or a moment before."""
    story = one_message()
    if when == "long before":
        fault(story)
        quiet(story)
    story.deliver("workers", 0, 0, value_of(A, 0), None, lease_ms=60 * S)
    if when == "between":
        fault(story)
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    assert end_of_one(story) == (set() if when == "between" else {"unexplained"})


def test_a_kill_does_not_undo_a_flush() -> None:
    """Whoever owns the partition after it knows the ack."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    flushed(story)
    fault(story, 10 * S)
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    assert end_of_one(story) == {"unexplained"}


@pytest.mark.parametrize(("first", "expected"), [("fault", set()), ("flush", {"unexplained"})])
def test_a_sleeping_node_may_have_held_a_delivery_back(first: str, expected: set[str]) -> None:
    """If it slept before the ack was flushed, and not if it fell asleep afterwards."""
    story = one_message()
    quiet(story)
    if first == "flush":
        story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
        flushed(story)
        story.later(5 * S)
        fault(story, 8 * S, holds=True)
    else:
        fault(story, 8 * S, holds=True)
        story._ms -= 4 * S
        story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
        flushed(story)
        story.later(4 * S)
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    assert end_of_one(story) == expected


def test_a_flush_that_failed_promises_nothing() -> None:
    """Also not when a later flush succeeds."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    story.tell("unflushed", member="m", life=1)
    flushed(story)
    fault(story)
    story.later(10 * S)
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    assert end_of_one(story) == set()


def test_what_comes_again_before_the_flush_is_no_broken_promise() -> None:
    """The slot moved before the ack was stored."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    fault(story)
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=60 * S)
    flushed(story)
    assert end_of_one(story) == set()


def test_a_fault_does_not_explain_what_is_skipped() -> None:
    story = one_message()
    fault(story)
    assert end_of_one(story) == {"skipped"}


def test_a_fault_does_not_explain_what_is_never_done() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), None)
    fault(story)
    assert end_of_one(story) == {"skipped"}


def test_done_once_is_done() -> None:
    """A delivery that was held back comes after the one that was acknowledged."""
    story = one_message()
    fault(story, holds=True)
    story.deliver("workers", 0, 0, value_of(A, 0))
    late = story.deliver("workers", 0, 0, value_of(A, 0))
    story.tell("stale", delivery=late)
    assert end_of_one(story) == set()


@pytest.mark.parametrize(("attempts", "expected"), [((1, 1, 2, 3), set()), ((1, 4), {"too often"})])
def test_a_fault_may_repeat_attempts_and_not_add_some(
    attempts: tuple[int, ...], expected: set[str]
) -> None:
    """An attempt that was not stored is counted again; no number is above the limit."""
    story = one_message()
    fault(story)
    for attempt in attempts:
        settle = "ack" if attempt == attempts[-1] else "nack"
        story.deliver("workers", 0, 0, value_of(A, 0), settle, attempt=attempt)
    assert end_of_one(story) == expected


@pytest.mark.parametrize("broken", [True, False])
def test_another_node_goes_on_with_a_key(broken: bool) -> None:
    """B was delivered, then A comes again because its ack is lost: without a fault that is out of turn."""
    story = in_turn()
    story.deliver("in-turn", 0, 0, value_of(A, 0))
    story.deliver("in-turn", 0, 1, value_of(B, 0), None)
    if broken:
        fault(story)
    story.deliver("in-turn", 0, 0, value_of(A, 0), lease_ms=60 * S)
    story.deliver("in-turn", 0, 1, value_of(B, 0), lease_ms=60 * S)
    found = end(story, value_of(A, 0), value_of(B, 0))
    assert ("out of turn" in found) is not broken


def test_a_fault_does_not_explain_what_is_out_of_turn() -> None:
    """B before A, which nobody has acknowledged."""
    story = in_turn()
    fault(story)
    story.deliver("in-turn", 0, 1, value_of(B, 0))
    story.deliver("in-turn", 0, 0, value_of(A, 0))
    assert end(story, value_of(A, 0), value_of(B, 0)) == {"out of turn"}


def test_a_fault_explains_two_dead_letters() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), "nack")
    dead = {"group": "workers", "topic": TOPIC, "partition": 0, "offset": 0}
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=1)
    fault(story)
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=story._ms)
    assert end_of_one(story) == set()


@pytest.mark.parametrize(("broken", "late"), [(True, True), (True, False), (False, True)])
def test_a_delayed_message_that_was_sent_again_after_its_time(broken: bool, late: bool) -> None:
    """It may be there twice if a fault kept its answer back until then."""
    story = Story()
    story.events = [event for event in story.events if event["event"] != "group"]
    due = (story._ms + 100) * MS
    story.tell("invoke", op="d1-1-1", what="delay", topic=TOPIC, count=1, due=due)
    if broken:
        fault(story, 10)
    if late:
        story.later(200)
    story.tell("ok", op="d1-1-1")
    story.later(200)
    expected = set() if broken and late else {"duplicate"}
    assert end(story, "d1-1-1.0", "d1-1-1.0") == expected


# --- several nodes --------------------------------------------------------------------------------
def test_a_node_that_shows_less_than_another_has_answered() -> None:
    """Only what was answered before it was asked."""
    story = Story()
    story.sent("s1-1-1", 0, 0)
    asked = story._ms * MS + 1
    story.sent("s1-1-2", 0, 1)
    story.tell("bounds", topic=TOPIC, partition=0, start=0, end=1, since=asked)
    checker = Checker()
    for event in story.events:
        checker.add(event)
    assert checker.anomalies == []
    checker.add({**story.events[-1], "since": story._ms * MS})
    assert [anomaly.kind for anomaly in checker.anomalies] == ["lost"]


def test_two_nodes_show_another_value_at_an_offset() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0))
    story.tell("invoke", op=B, what="publish", topic=TOPIC, count=1)
    story.tell("final")
    for op in (A, B):
        story.bounds(0, 0, 1)
        story.read(0, 0, value_of(op, 0))
    assert "unstable" in anomalies(story.events)


def test_a_node_that_does_not_know_a_topic_yet() -> None:
    """It is wrong if the topic was created before the question."""
    story = Story()
    asked = story._ms * MS
    story.tell("invoke", op="made", what="define", topic="made-1")
    story.tell("ok", op="made")
    story.tell("defined", names=[], since=asked)
    checker = Checker()
    for event in story.events:
        checker.add(event)
    assert checker.anomalies == []
    checker.add({**story.events[-1], "since": story._ms * MS})
    assert [anomaly.kind for anomaly in checker.anomalies] == ["lost"]


def test_faults() -> None:
    """Those that follow each other are one; a delivery began before the first of them, or a moment ago."""
    faults = Faults()
    assert not faults
    second = 1_000_000_000
    faults.add(100 * second, 104 * second, holds=True)
    faults.add(105 * second, 106 * second, holds=True)
    faults.add(10 * second, 11 * second, holds=False)
    assert faults
    assert faults.begun(107 * second) == 100 * second - TRANSIT_NS
    assert faults.begun(11 * second) == 11 * second - TRANSIT_NS
    assert faults.begun(200 * second) == 200 * second - TRANSIT_NS
    assert faults.touch(11 * second, 12 * second)
    assert not faults.touch(30 * second, 99 * second)
    assert faults.touch(30 * second, 101 * second)
