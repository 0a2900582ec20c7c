"""The checker finds each anomaly when it is planted, and nothing in a history that has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.crash.checker import Checker
from tests.crash.history import Event, key_of, value_of

MS = 1_000_000
TOPIC = "orders"


def anomalies(history: list[Event]) -> set[str]:
    checker = Checker()
    for event in history:
        checker.add(event)
    return {anomaly.kind for anomaly in checker.finish()}


class Story:
    """Writes a history, one millisecond an event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ms = 0
        self._deliveries = 0
        self.life = 1
        self.tell("topic", name=TOPIC, partitions=2, retention=False)
        self.tell("topic", name="events", partitions=1, retention=True)
        self.group("workers")
        self.group("in-turn", ordering="key")
        self.start()

    def tell(self, event: str, **fields: Any) -> Event:
        self._ms += 1
        told: Event = {"event": event, "at": self._ms * MS, **fields}
        self.events.append(told)
        return told

    def group(self, name: str, *, ordering: str = "none") -> None:
        self.tell("group", name=name, topic=TOPIC, ordering=ordering, max_deliveries=3)

    def start(self) -> None:
        self.tell("start", life=self.life)
        self.tell("opened", life=self.life)

    def restart(self) -> None:
        self.tell("killed", life=self.life, at_ms=self._ms)
        self.life += 1
        self.start()

    def sent(self, op: str, partition: int, offset: int, count: int = 1, **more: Any) -> None:
        self.tell("invoke", op=op, what="publish", topic=TOPIC, count=count, **more)
        self.tell("ok", op=op, receipts=[[partition, offset, count]])

    def bounds(self, partition: int, start: int, end: int, topic: str = TOPIC) -> None:
        self.tell("bounds", topic=topic, partition=partition, start=start, end=end)

    def read(self, partition: int, offset: int, *values: str, topic: str = TOPIC) -> None:
        self.tell("read", topic=topic, partition=partition, offset=offset, values=list(values))

    def deliver(
        self,
        group: str,
        partition: int,
        offset: int,
        value: str,
        settle: str | None = "ack",
        *,
        member: str = "m",
        attempt: int = 1,
        lease_ms: int = 30_000,
    ) -> str:
        self._deliveries += 1
        delivery = str(self._deliveries)
        told = self.tell(
            "deliver",
            delivery=delivery,
            group=group,
            member=member,
            life=self.life,
            topic=TOPIC,
            partition=partition,
            offset=offset,
            value=value,
            key=key_of(value),
            attempt=attempt,
        )
        told["deadline"] = told["at"] + lease_ms * MS
        if settle:
            self.tell(settle, delivery=delivery)
        return delivery

    def later(self, ms: int) -> None:
        self._ms += ms


def same_key(count: int) -> list[str]:
    """Operations of a keyed client whose single messages have one and the same key."""
    found: dict[str | None, list[str]] = {}
    for number in range(10_000):
        op = f"k1-1-{number}"
        ops = found.setdefault(key_of(value_of(op, 0)), [])
        ops.append(op)
        if len(ops) == count:
            return ops
    raise AssertionError("unreachable")


A, B, C = same_key(3)


def whole() -> Story:
    """A history in which everything happens and nothing is wrong."""
    story = Story()
    story.sent(A, 0, 0)
    story.sent(B, 0, 1)
    story.sent("b1-1-1", 1, 0, 3)
    # Two partitions, and an answer that comes after the kill: never.
    story.tell("invoke", op="kb1-1-1", what="publish", topic=TOPIC, count=1)
    story.tell("invoke", op="made", what="define", topic="made-1")
    story.tell("ok", op="made")
    for group in ("workers", "in-turn"):
        story.deliver(group, 0, 0, value_of(A, 0), "nack")
        story.deliver(group, 0, 0, value_of(A, 0), attempt=2)
        story.deliver(group, 0, 1, value_of(B, 0))
        for index in range(3):
            story.deliver(group, 1, index, value_of("b1-1-1", index))
    story.restart()
    story.tell("defined", names=["made-1"])
    story.bounds(0, 0, 2)
    story.bounds(1, 0, 3)
    story.read(0, 0, value_of(A, 0), value_of(B, 0))
    # An ack that was not durable yet: the message comes again.
    story.deliver("workers", 0, 1, value_of(B, 0))
    story.tell("flushed", member="m", life=2, since=story._ms * MS + 1)
    story.sent("i1-2-1", 1, 3, 2, atomic=True)
    story.sent("i1-2-1", 1, 3, 2, atomic=True)
    for group in ("workers", "in-turn"):
        for index in range(2):
            story.deliver(group, 1, 3 + index, value_of("i1-2-1", index))
    story.tell("invoke", op="drop", what="drop", topic="made-1")
    story.tell("ok", op="drop")
    story.tell("closed", life=2)
    return story


def final(story: Story) -> list[Event]:
    """What the last reading finds, if nothing else was told."""
    story.tell("final")
    story.tell("defined", names=[])
    story.bounds(0, 0, 2)
    story.read(0, 0, value_of(A, 0), value_of(B, 0))
    story.bounds(1, 0, 5)
    bulk = [value_of("b1-1-1", index) for index in range(3)]
    story.read(1, 0, *bulk, *[value_of("i1-2-1", index) for index in range(2)])
    return story.events


def test_nothing_wrong() -> None:
    """A history with a kill, repetitions, a nack and an unknown outcome has no anomaly."""
    assert anomalies(final(whole())) == set()


# --- planted ----------------------------------------------------------------------------------
def last_read(history: list[Event], partition: int) -> Event:
    return [e for e in history if e["event"] == "read" and e["partition"] == partition][-1]


def last_bounds(history: list[Event], partition: int) -> Event:
    return [e for e in history if e["event"] == "bounds" and e["partition"] == partition][-1]


def lost_at_the_end(history: list[Event]) -> None:
    last_read(history, 1)["values"].pop()
    last_bounds(history, 1)["end"] -= 1


def lost_in_the_middle(history: list[Event]) -> None:
    read = last_read(history, 1)
    rest = {**read, "offset": 3, "values": read["values"][3:]}
    read["values"] = read["values"][:2]
    history.append(rest)


def invented_value(history: list[Event]) -> None:
    last_read(history, 0)["values"].append("s9-1-1.0")
    last_bounds(history, 0)["end"] += 1


def invented_after_a_refusal(history: list[Event]) -> None:
    at = next(i for i, e in enumerate(history) if e["event"] == "killed")
    history.insert(at, {"event": "fail", "op": "kb1-1-1", "code": "storage_full", "at": 1})
    last_read(history, 0)["values"].append("kb1-1-1.0")
    last_bounds(history, 0)["end"] += 1


def unstable_value(history: list[Event]) -> None:
    last_read(history, 0)["values"].reverse()


def unstable_answer(history: list[Event]) -> None:
    again = [e for e in history if e["event"] == "ok" and e["op"] == "i1-2-1"][-1]
    again["receipts"] = [[1, 5, 2]]


def gap(history: list[Event]) -> None:
    last_bounds(history, 0)["end"] += 1


def gap_at_the_start(history: list[Event]) -> None:
    last_bounds(history, 0)["start"] = 1
    read = last_read(history, 0)
    read["offset"], read["values"] = 1, read["values"][1:]


def duplicate(history: list[Event]) -> None:
    last_read(history, 0)["values"].append(value_of("i1-2-1", 0))
    last_bounds(history, 0)["end"] += 1


def reordered(history: list[Event]) -> None:
    """The answers of A and B change places, and so does everything that shows them."""
    for event in history:
        if event["event"] == "ok" and event["op"] in (A, B):
            event["receipts"][0][1] ^= 1
        elif event["event"] == "read" and event["partition"] == 0:
            event["values"].reverse()
        elif event["event"] == "deliver" and event["partition"] == 0:
            event["offset"] ^= 1


def skipped(history: list[Event]) -> None:
    forget_deliveries(history, "workers", 1, 4)


def unexplained(history: list[Event]) -> None:
    at = next(i for i, e in enumerate(history) if e["event"] == "killed")
    first = next(e for e in history if e["event"] == "deliver" and e["offset"] == 2)
    history[at:at] = [
        {**first, "delivery": "again", "at": history[at]["at"] - 2},
        {"event": "ack", "delivery": "again", "at": history[at]["at"] - 1},
    ]


def lost_definition(history: list[Event]) -> None:
    next(e for e in history if e["event"] == "defined")["names"] = []


def undone_deletion(history: list[Event]) -> None:
    [e for e in history if e["event"] == "defined"][-1]["names"] = ["made-1"]


def moved_key(history: list[Event]) -> None:
    last_read(history, 1)["values"].append(value_of(C, 0))
    last_bounds(history, 1)["end"] += 1
    history.insert(
        0, {"event": "invoke", "op": C, "what": "publish", "topic": TOPIC, "count": 1, "at": 0}
    )


def stuck(history: list[Event]) -> None:
    history.append({"event": "stuck", "what": "workers lags by 3"})


def problem(history: list[Event]) -> None:
    history.append({"event": "problem", "what": "an exception"})


def no_final_reading(history: list[Event]) -> None:
    history[:] = [event for event in history if event["event"] != "final"]


def forget_deliveries(history: list[Event], group: str, partition: int, offset: int) -> None:
    gone = {
        e["delivery"]
        for e in history
        if e["event"] == "deliver"
        and (e["group"], e["partition"], e["offset"]) == (group, partition, offset)
    }
    history[:] = [event for event in history if event.get("delivery") not in gone]


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lost_at_the_end, "lost"),
        (lost_in_the_middle, "lost"),
        (lost_definition, "lost"),
        (invented_value, "invented"),
        (invented_after_a_refusal, "invented"),
        (undone_deletion, "invented"),
        (unstable_value, "unstable"),
        (unstable_answer, "unstable"),
        (gap, "gap"),
        (gap_at_the_start, "gap"),
        (duplicate, "duplicate"),
        (reordered, "reordered"),
        (moved_key, "moved key"),
        (skipped, "skipped"),
        (unexplained, "unexplained"),
        (stuck, "stuck"),
        (problem, "problem"),
        (no_final_reading, "problem"),
    ],
)
def test_planted(plant: Callable[[list[Event]], None], kind: str) -> None:
    """One thing is wrong, and it is found."""
    history = copy.deepcopy(final(whole()))
    plant(history)
    assert kind in anomalies(history)


# --- told as stories of their own -------------------------------------------------------------
def test_lost_over_a_restart_is_found_at_once() -> None:
    """A restart that ends before what was acknowledged is reported without waiting for the end."""
    story = Story()
    story.sent("s1-1-1", 0, 0)
    story.restart()
    story.bounds(0, 0, 0)
    checker = Checker()
    for event in story.events:
        checker.add(event)
    assert [anomaly.kind for anomaly in checker.anomalies] == ["lost"]


def test_reordered_with_an_unknown_outcome() -> None:
    """B, which was sent after A's answer and never answered itself, stands before A."""
    story = Story()
    story.sent("s1-1-1", 0, 1)
    story.tell("invoke", op="s1-1-2", what="publish", topic=TOPIC, count=1)
    story.restart()
    story.tell("final")
    story.bounds(0, 0, 2)
    story.read(0, 0, "s1-1-2.0", "s1-1-1.0")
    assert "reordered" in anomalies(story.events)


def test_two_at_once_may_stand_in_any_order() -> None:
    """Neither was answered before the other was sent."""
    story = Story()
    story.tell("invoke", op="s1-1-1", what="publish", topic="events", count=1)
    story.tell("invoke", op="s2-1-1", what="publish", topic="events", count=1)
    story.tell("ok", op="s1-1-1", receipts=[[0, 1, 1]])
    story.tell("ok", op="s2-1-1", receipts=[[0, 0, 1]])
    story.tell("final")
    story.bounds(0, 0, 2, "events")
    story.read(0, 0, "s2-1-1.0", "s1-1-1.0", topic="events")
    assert anomalies(story.events) == set()


def test_refusal_that_cannot_be() -> None:
    """A producer that goes on where it was is told that there is a gap."""
    story = Story()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=1, atomic=True)
    story.tell("fail", op="i1-1-1", code="sequence_gap")
    story.tell("final")
    assert anomalies(story.events) == {"problem"}


def test_torn_batch_of_an_idempotent_producer() -> None:
    """Two of three records are there, and the call was never answered."""
    story = Story()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=3, atomic=True)
    story.restart()
    story.tell("final")
    story.bounds(0, 0, 2, "events")
    story.read(0, 0, "i1-1-1.0", "i1-1-1.1", topic="events")
    assert anomalies(story.events) == {"torn"}


def test_repetition_that_was_stored_twice() -> None:
    """The first call had no answer but was stored; its repetition was stored again."""
    story = Story()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=1, atomic=True)
    story.restart()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=1, atomic=True)
    story.tell("ok", op="i1-1-1", receipts=[[0, 1, 1]])
    story.tell("final")
    story.bounds(0, 0, 2, "events")
    story.read(0, 0, "i1-1-1.0", "i1-1-1.0", topic="events")
    assert anomalies(story.events) == {"duplicate"}


def test_refused_repetition_is_not_a_refusal() -> None:
    """The first call may have been stored, whatever became of the second."""
    story = Story()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=1, atomic=True)
    story.restart()
    story.tell("invoke", op="i1-1-1", what="publish", topic="events", count=1, atomic=True)
    story.tell("fail", op="i1-1-1", code="storage_full")
    story.tell("final")
    story.bounds(0, 0, 1, "events")
    story.read(0, 0, "i1-1-1.0", topic="events")
    assert anomalies(story.events) == set()


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([[0, 0, 2], [1, 0, 1]], set()),
        ([[0, 0, 1], [1, 0, 1]], {"lost"}),
        ([[0, 0, 2], [1, 1, 1]], {"lost", "skipped"}),
    ],
)
def test_parts_in_several_partitions(receipts: list[list[int]], expected: set[str]) -> None:
    """The receipts of one call cover each of its messages once, where they stand."""
    story = Story()
    story.events = [event for event in story.events if event["event"] != "group"]
    story.tell("invoke", op="b1-1-1", what="publish", topic=TOPIC, count=3)
    story.tell("ok", op="b1-1-1", receipts=receipts)
    story.tell("final")
    story.bounds(0, 0, 2)
    story.bounds(1, 0, 1)
    story.read(0, 0, "b1-1-1.0", "b1-1-1.2")
    story.read(1, 0, "b1-1-1.1")
    assert anomalies(story.events) <= expected | {"gap"}
    assert bool(anomalies(story.events)) == bool(expected)


def test_parts_in_another_order() -> None:
    """Messages of one call keep their order in each partition."""
    story = Story()
    story.events = [event for event in story.events if event["event"] != "group"]
    story.tell("invoke", op="b1-1-1", what="publish", topic=TOPIC, count=3)
    story.tell("ok", op="b1-1-1", receipts=[[0, 0, 2], [1, 0, 1]])
    story.tell("final")
    story.bounds(0, 0, 2)
    story.bounds(1, 0, 1)
    story.read(0, 0, "b1-1-1.2", "b1-1-1.0")
    story.read(1, 0, "b1-1-1.1")
    assert anomalies(story.events) == {"reordered"}


def delayed(*, acked: bool = True) -> Story:
    story = Story()
    due = (story._ms + 100) * MS
    story.tell("invoke", op="d1-1-1", what="delay", topic="events", count=1, due=due)
    if acked:
        story.tell("ok", op="d1-1-1")
    return story


def end(story: Story, *values: str) -> set[str]:
    story.tell("final")
    story.bounds(0, 0, len(values), "events")
    story.read(0, 0, *values, topic="events")
    return anomalies(story.events)


def test_delayed_once() -> None:
    story = delayed()
    story.later(200)
    assert end(story, "d1-1-1.0") == set()


def test_delayed_never() -> None:
    story = delayed()
    story.later(200)
    assert end(story) == {"lost"}


def test_delayed_twice() -> None:
    story = delayed()
    story.later(200)
    assert end(story, "d1-1-1.0", "d1-1-1.0") == {"duplicate"}


def test_delayed_too_early() -> None:
    assert end(delayed(), "d1-1-1.0") == {"early"}


def test_delayed_and_never_answered() -> None:
    """It may come or not."""
    assert end(delayed(acked=False)) == set()


@pytest.mark.parametrize(
    ("answer", "values", "expected"),
    [
        ("ok", [], set()),
        ("ok", ["d1-1-1.0"], {"invented"}),
        ("fail", ["d1-1-1.0"], set()),
        ("fail", [], {"lost"}),
        (None, [], set()),
        (None, ["d1-1-1.0"], set()),
    ],
)
def test_cancelled(answer: str | None, values: list[str], expected: set[str]) -> None:
    """A cancel that was acknowledged holds; one that was refused changes nothing."""
    story = delayed()
    story.tell("invoke", op="d1-1-2", what="cancel", topic="events", of="d1-1-1")
    if answer:
        story.tell(answer, op="d1-1-2", code="not_scheduled")
    story.later(200)
    assert end(story, *values) == expected


def one_message(group: str = "workers") -> Story:
    story = Story()
    story.events = [e for e in story.events if e["event"] != "group"]
    story.group(group, ordering="key" if group == "in-turn" else "none")
    story.sent(A, 0, 0)
    return story


def end_of_one(story: Story) -> set[str]:
    story.tell("final")
    story.bounds(0, 0, 1)
    story.read(0, 0, value_of(A, 0))
    return anomalies(story.events)


def test_redelivered_after_the_deadline() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), None, lease_ms=50)
    story.later(60)
    story.deliver("workers", 0, 0, value_of(A, 0), attempt=2)
    assert end_of_one(story) == set()


def test_late_out_of_the_channel() -> None:
    """It was handed to one, its time was up, another got it and finished it; then the first saw it."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), attempt=2)
    late = story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=-20)
    story.tell("stale", delivery=late)
    story.tell("closed", life=1)
    assert end_of_one(story) == set()


def test_redelivered_before_the_deadline() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), None, lease_ms=50)
    story.deliver("workers", 0, 0, value_of(A, 0), attempt=2)
    assert end_of_one(story) == {"unexplained"}


@pytest.mark.parametrize("answered", [True, False])
def test_redelivered_after_an_ack_in_time(answered: bool) -> None:
    """A broker that answered another call between the ack and the deadline has seen the ack, too."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), lease_ms=500)
    if answered:
        story.sent(B, 0, 1)
    story.later(600)
    story.deliver("workers", 0, 0, value_of(A, 0), attempt=2)
    if answered:
        story.deliver("workers", 0, 1, value_of(B, 0))
    story.tell("final")
    story.bounds(0, 0, 1 + answered)
    story.read(0, 0, *(value_of(op, 0) for op in (A, B)[: 1 + answered]))
    assert anomalies(story.events) == ({"unexplained"} if answered else set())


def test_redelivered_when_a_member_left() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), None, member="m1")
    story.tell("left", member="m1", life=1)
    story.deliver("workers", 0, 0, value_of(A, 0), member="m2", attempt=2)
    assert end_of_one(story) == set()


def test_redelivered_when_another_member_left() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), None, member="m1")
    story.tell("left", member="m3", life=1)
    story.deliver("workers", 0, 0, value_of(A, 0), member="m2", attempt=2)
    assert end_of_one(story) == {"unexplained"}


def test_redelivered_after_a_durable_ack() -> None:
    """A restart explains that an ack came too late for the disk, not that a durable one is gone."""
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0))
    story.tell("flushed", member="m", life=1, since=story._ms * MS + 1)
    story.restart()
    story.deliver("workers", 0, 0, value_of(A, 0))
    assert end_of_one(story) == {"unexplained"}


def test_redelivered_after_a_close_in_good_order() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0))
    story.tell("closed", life=1)
    story.life += 1
    story.start()
    story.deliver("workers", 0, 0, value_of(A, 0))
    assert end_of_one(story) == {"unexplained"}


def test_stale_ack_that_is_not_followed_by_another_delivery() -> None:
    """The broker said that the ack came too late, and then did not deliver it again."""
    story = one_message()
    delivery = story.deliver("workers", 0, 0, value_of(A, 0))
    story.tell("stale", delivery=delivery)
    assert end_of_one(story) == {"skipped"}


def test_delivered_and_never_done() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), "nack")
    assert end_of_one(story) == {"skipped"}


def test_dead_letter_is_an_end() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), "nack")
    dead = {"group": "workers", "topic": TOPIC, "partition": 0, "offset": 0, "stored_ms": 5}
    story.tell("dead", **dead, value=value_of(A, 0))
    assert end_of_one(story) == set()


def test_two_dead_letters_need_a_restart() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), "nack")
    dead = {"group": "workers", "topic": TOPIC, "partition": 0, "offset": 0}
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=1)
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=2)
    assert end_of_one(story) == {"unexplained"}


def test_a_broker_that_stopped_itself_explains_two_dead_letters() -> None:
    story = one_message()
    story.deliver("workers", 0, 0, value_of(A, 0), "nack")
    story.tell("failed", life=story.life, what="a sync failed", at_ms=2)
    dead = {"group": "workers", "topic": TOPIC, "partition": 0, "offset": 0}
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=1)
    story.tell("dead", **dead, value=value_of(A, 0), stored_ms=3)
    assert end_of_one(story) == set()


def in_turn() -> Story:
    story = one_message("in-turn")
    story.sent(B, 0, 1)
    return story


def end_of_two(story: Story) -> set[str]:
    story.tell("final")
    story.bounds(0, 0, 2)
    story.read(0, 0, value_of(A, 0), value_of(B, 0))
    return anomalies(story.events)


def test_in_turn() -> None:
    story = in_turn()
    story.deliver("in-turn", 0, 0, value_of(A, 0), "nack")
    story.deliver("in-turn", 0, 0, value_of(A, 0))
    story.deliver("in-turn", 0, 1, value_of(B, 0))
    assert end_of_two(story) == set()


def test_out_of_turn_while_the_first_is_out() -> None:
    story = in_turn()
    first = story.deliver("in-turn", 0, 0, value_of(A, 0), None)
    story.deliver("in-turn", 0, 1, value_of(B, 0))
    story.tell("ack", delivery=first)
    assert end_of_two(story) == {"out of turn"}


def test_out_of_turn_while_the_first_waits_for_a_retry() -> None:
    story = in_turn()
    story.deliver("in-turn", 0, 0, value_of(A, 0), "nack")
    story.deliver("in-turn", 0, 1, value_of(B, 0))
    story.deliver("in-turn", 0, 0, value_of(A, 0))
    assert end_of_two(story) == {"out of turn"}


def test_out_of_turn_after_a_restart() -> None:
    """The first was acknowledged, not durably, and came again: then the second has to wait again."""
    story = in_turn()
    story.deliver("in-turn", 0, 0, value_of(A, 0))
    story.restart()
    again = story.deliver("in-turn", 0, 0, value_of(A, 0), None)
    story.deliver("in-turn", 0, 1, value_of(B, 0))
    story.tell("ack", delivery=again)
    assert end_of_two(story) == {"out of turn"}


def test_retention_may_take_the_start() -> None:
    """What was dropped by a topic that may drop is neither lost nor a gap."""
    story = Story()
    story.tell("invoke", op="e1-1-1", what="publish", topic="events", count=2)
    story.tell("ok", op="e1-1-1", receipts=[[0, 0, 2]])
    story.tell("final")
    story.bounds(0, 1, 2, "events")
    story.read(0, 1, "e1-1-1.1", topic="events")
    assert anomalies(story.events) == set()
