"""Positions of subscriptions: a few are made at once, many in pieces, and whatever happens meanwhile is right."""

from collections.abc import Callable

import pytest

from headrace import limits
from headrace.broker import attaching, pace
from headrace.broker.engine import Engine
from headrace.errors import Closed, InvalidArgument, SubscriptionNotFound
from tests.broker.rig import GROUP, Answer, Rig

TOPICS = 40


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Topics ``t.0`` and so on with two messages each, and one step in each turn of the loop."""
    rig = Rig()
    for number in range(TOPICS):
        rig.engine.create_topic(f"t.{number}")
        rig.publish(f"t.{number}", b"a")
        rig.publish(f"t.{number}", b"b")
    monkeypatch.setattr(attaching, "NOW_MAX", 2)
    monkeypatch.setattr(pace, "PIECE_S", 0.0)
    monkeypatch.setattr(pace, "TURN_S", 0.0)
    return rig


def subscribed(rig: Rig, name: str = GROUP, start: str = "latest") -> Answer:
    answer = Answer()
    rig.engine.subscribe(name, "t.*", start=start, done=answer.done)
    return answer


def turn_by_turn(rig: Rig, each: Callable[[], None], turns: int = 4 * TOPICS) -> None:
    left = turns

    def turn() -> None:
        nonlocal left
        each()
        left -= 1
        if left:
            rig.loop.call_soon(turn)

    turn()
    rig.run()


def lags(rig: Rig, name: str = GROUP) -> dict[str, int]:
    found = rig.engine.subscription(name)
    return {
        topic: cursor.partition.log.end_offset - cursor.position
        for (topic, _), cursor in found.cursors.items()
    }


def test_a_wildcard_gets_its_positions_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many topics there are, a turn of the loop makes a few positions; then the subscription is stored."""
    made = [0]
    make = Engine.make_cursor

    def counted(*args: object, **more: object) -> None:
        made[-1] += 1
        make(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "make_cursor", counted)
    answer = subscribed(rig)
    assert answer.calls == 0
    turn_by_turn(rig, lambda: made.append(0))
    answer.get()
    assert sum(made) == TOPICS
    assert max(made) <= 2
    rig.crash()
    assert lags(rig) == {f"t.{number}": 0 for number in range(TOPICS)}


def test_what_happens_meanwhile(rig: Rig) -> None:
    """It begins where it was to begin, also in topics that get messages and partitions; deleted ones are left out."""
    answer = subscribed(rig)
    turns = 0

    def meanwhile() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            rig.offer("t.30", rig.columns([b"c"]))
            rig.ask(rig.engine.delete_topic, "t.31")
            rig.ask(rig.engine.change_topic, "t.32", {"partitions": 2})
            rig.engine.create_topic("t.new")

    turn_by_turn(rig, meanwhile)
    answer.get()
    rig.publish("t.new", b"x")
    rig.crash()
    found = lags(rig)
    assert "t.31" not in found
    assert (found["t.30"], found["t.32"], found["t.new"], found["t.39"]) == (1, 0, 1, 0)
    assert len(rig.engine.subscription(GROUP).cursors) == TOPICS + 1


def test_a_crash_before_the_end_leaves_no_subscription(rig: Rig) -> None:
    """It was not answered; one that begins at the earliest message in some topics would be wrong."""
    answer = subscribed(rig)
    for _ in range(20):
        timer = rig.loop._ready.popleft()
        timer.callback(*timer.args)
    rig.crash()
    assert answer.calls == 0
    assert rig.engine.subscriptions() == []


def test_the_same_asked_for_twice_is_answered_at_the_end(rig: Rig) -> None:
    """The second caller changes a setting; both hear when all of it is stored."""
    first = subscribed(rig)
    second = Answer()
    rig.engine.subscribe(GROUP, "t.*", settings={"max_deliveries": 7}, done=second.done)
    assert (first.calls, second.calls) == (0, 0)
    turn_by_turn(rig, lambda: None)
    first.get()
    second.get()
    rig.crash()
    assert rig.engine.subscription(GROUP).settings.max_deliveries == 7
    assert set(lags(rig).values()) == {0}


def test_deleted_or_closed_before_the_end(rig: Rig) -> None:
    """Whoever waits is told."""
    first = subscribed(rig)
    deleted = rig.ask(rig.engine.unsubscribe, rig.engine.subscription(GROUP))
    turn_by_turn(rig, lambda: None)
    deleted.get()
    assert isinstance(first.error, SubscriptionNotFound)
    second = subscribed(rig)
    rig.close()
    assert isinstance(second.error, Closed)
    assert rig.open().subscriptions() == []


def test_a_topic_under_many_wildcards(rig: Rig) -> None:
    """They get it in pieces, from its first message on, and nothing is lost by a crash in between."""
    for number in range(10):
        rig.wait(lambda done, number=number: rig.engine.subscribe(f"g{number}", "u.*", done=done))
    topic = rig.engine.create_topic("u.new")
    rig.offer("u.new", rig.columns([b"x"]))
    assert len(topic.partitions[0].watchers) < 10
    rig.run()
    assert len(topic.partitions[0].watchers) == 10
    rig.crash()
    assert [rig.engine.subscription(f"g{number}").lag() for number in range(10)] == [1] * 10


def test_wildcards_cannot_make_a_topic_expensive(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wildcards cost nothing until a topic comes; then the positions of all of them are counted."""
    for number in range(10):
        rig.wait(lambda done, number=number: rig.engine.subscribe(f"g{number}", "u.*", done=done))
    monkeypatch.setattr(limits, "POSITIONS_MAX", 50)
    settings = rig.engine.topics.defaults
    for ask in (
        lambda: rig.ask(rig.engine.create_topic_later, "u.x", settings.but({"partitions": 6})),
        lambda: rig.ask(rig.engine.change_topic, "u.y", {"partitions": 6}),
        lambda: [rig.publish(f"u.z{number}", b"x") for number in range(5)],
    ):
        with pytest.raises(InvalidArgument) as caught:
            ask()
        assert caught.value.code == "too_many_subscriptions"
        if "u.y" not in [topic.name for topic in rig.engine.topics]:
            rig.wait(rig.engine.create_topic_later, "u.y", settings)
    rig.publish("others", b"x")  # no wildcard is over it
