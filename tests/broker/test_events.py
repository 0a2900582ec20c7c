"""The broker's own events: true, only when there is something to tell, and in nobody's way."""

import errno
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace import Broker, limits
from headrace.broker import events
from headrace.broker.activity import Activity
from headrace.broker.events import TOPIC as EVENTS
from headrace.broker.subscription import Subscription
from headrace.errors import InvalidArgument
from headrace.testing import wait_until
from tests.broker.rig import DATA, GROUP, TOPIC, Rig
from tests.fakes import FaultyFiles, SimulatedFiles

INTERVAL = limits.EVENTS_INTERVAL_S_DEFAULT


def told(rig: Rig, kind: str | None = None) -> list[dict[str, Any]]:
    """All events so far; of one type, if it is named."""
    if rig.engine.topics.get(EVENTS) is None:
        return []
    found = [orjson.loads(message.value) for message in rig.read(EVENTS)]
    return [event for event in found if kind in (None, event["type"])]


def without_times(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("from", "to")}


# --- what is told ---------------------------------------------------------------------------------
def test_deliveries_of_an_interval_are_one_event() -> None:
    """Counted as the subscription counts them, with how late they were and how often they were tried."""
    rig = Rig()
    rig.subscribe(backoff=1.0, max_deliveries=2)
    started = rig.clock.now_ms()
    rig.numbers(4)
    rig.advance(0.1)
    inbox = rig.join()
    first, second, third, _ = inbox.take()
    inbox.ack(first, second)
    inbox.nack(third)
    rig.advance(1.5)
    [again] = inbox.take()
    inbox.nack(again, reason="no stock")
    rig.advance(INTERVAL)
    [event] = told(rig, "deliveries")
    assert event == {
        "type": "deliveries",
        "subscription": GROUP,
        "topic": TOPIC,
        "from": started,
        "to": started + round(INTERVAL * 1000),
        "delivered": 5,
        "redelivered": 1,
        "acked": 2,
        "nacked": 2,
        "timeouts": 0,
        "dead_lettered": 1,
        "expired": 0,
        "skipped": 0,
        "lost": 0,
        "attempts": {"1": 4, "2": 1},
        "latency_ms": {"count": 4, "sum": 400, "max": 100, "p50": 96, "p99": 100},
        "dead_letters": {"no stock": 1},
        "lag": 1,
        "members": 1,
    }


def test_an_event_has_the_name_as_its_key() -> None:
    """So that it can be grouped without being read."""
    rig = Rig()
    rig.subscribe()
    rig.join(auto_ack=True)
    rig.numbers(1)
    rig.advance(INTERVAL)
    assert sorted(message.key or b"" for message in rig.read(EVENTS)) == [b"billing", b"orders"]


def test_what_was_published_is_told_too() -> None:
    """By topic: messages, bytes, and what was taken by anybody; the broker's own topics are not."""
    rig = Rig()
    rig.subscribe()
    rig.subscribe("other")
    rig.join(auto_ack=True)
    rig.numbers(3)
    rig.send("later", b"x", delay=3600)
    rig.advance(INTERVAL)
    [event] = told(rig, "topic")
    assert without_times(event) == {
        "type": "topic",
        "topic": TOPIC,
        "messages": 3,
        "bytes": rig.engine.topics.find(TOPIC).published_bytes,
        "consumed": 3,
    }
    assert event["bytes"] > 0


def test_a_quiet_interval_has_no_event() -> None:
    """The topic is made when there is first something to tell, and then grows only with what happens."""
    rig = Rig()
    rig.subscribe()
    rig.advance(3 * INTERVAL)
    assert rig.engine.topics.get(EVENTS) is None
    inbox = rig.join()
    rig.numbers(1)
    rig.advance(INTERVAL)
    assert len(told(rig)) == 2
    rig.advance(1.5 * INTERVAL)  # less than the time that its member has
    assert len(told(rig)) == 2
    inbox.ack(*inbox.take())
    rig.advance(INTERVAL)
    last = told(rig, "deliveries")[-1]
    assert (last["delivered"], last["acked"], last["lag"]) == (0, 1, 0)
    assert last["latency_ms"]["count"] == 0


def test_each_event_goes_on_where_the_last_one_ended() -> None:
    """The sum over all events is what the counters say."""
    rig = Rig()
    subscription = rig.subscribe()
    inbox = rig.join()
    for count in (5, 0, 7, 1):
        if count:
            rig.numbers(count)
        inbox.ack(*inbox.take())
        rig.advance(INTERVAL)
    found = told(rig, "deliveries")
    assert sum(event["acked"] for event in found) == subscription.tally.acked == 13
    assert sum(event["latency_ms"]["count"] for event in found) == 13
    assert all(before["to"] <= after["from"] for before, after in pairwise(found))


def test_what_ended_by_time_is_told() -> None:
    """Deadlines are timeouts; a time to live that ended is expired."""
    rig = Rig()
    rig.subscribe(ack_timeout=2.0, backoff=0.0)
    rig.publish(TOPIC, b"short", ttl=1.0)
    rig.publish(TOPIC, b"long")
    rig.advance(1.5)
    rig.join()
    rig.advance(INTERVAL)
    [event] = told(rig, "deliveries")
    assert event["expired"] == 1
    assert event["timeouts"] >= 1
    assert event["attempts"]["1"] == 1
    assert event["attempts"]["2"] == 1


def test_one_over_a_wildcard_is_told_by_its_pattern() -> None:
    """As it is called everywhere."""
    rig = Rig()
    rig.subscribe("all", "orders.*")
    rig.join(rig.engine.subscription("all"), auto_ack=True)
    rig.publish("orders.a", b"1")
    rig.publish("orders.b", b"2")
    rig.advance(INTERVAL)
    [event] = told(rig, "deliveries")
    assert (event["topic"], event["acked"]) == ("orders.*", 2)
    assert {event["topic"] for event in told(rig, "topic")} == {"orders.a", "orders.b"}


def test_what_is_deleted_is_told_with_the_next_round() -> None:
    """A worker that comes, does its part and is gone has left a trace."""
    rig = Rig()
    rig.subscribe()
    rig.join(auto_ack=True)
    rig.numbers(3)
    rig.wait(rig.engine.unsubscribe, rig.engine.subscription(GROUP))
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert told(rig) == []
    rig.advance(INTERVAL)
    assert [event["acked"] for event in told(rig, "deliveries")] == [3]
    assert [event["messages"] for event in told(rig, "topic")] == [3]


def test_a_topic_that_is_made_anew_begins_anew() -> None:
    """It is another one of the same name."""
    rig = Rig()
    rig.numbers(5)
    rig.advance(INTERVAL)
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.numbers(2)
    rig.advance(INTERVAL)
    assert [event["messages"] for event in told(rig, "topic")] == [5, 2]


def test_a_staged_commit_counts_as_published() -> None:
    """In messages and in bytes, like any publish."""
    rig = Rig()
    rig.numbers(1)
    [batch] = rig.log().read(0)
    piece = rig.wait(rig.engine.staging.stage, "lake", None, batch)
    rig.wait(rig.engine.staging.commit, "job", 1, [piece])
    rig.advance(INTERVAL)
    [event] = [event for event in told(rig, "topic") if event["topic"] == "lake"]
    assert event["messages"] == 1
    assert event["bytes"] > 0


def test_many_subscriptions_are_told_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the loop looks at all of them; none is left out."""
    monkeypatch.setattr(events, "STEP", 3)
    looked: list[int] = []
    take = Activity.take
    monkeypatch.setattr(Activity, "take", lambda self: looked.append(1) or take(self))
    rig = Rig()
    for number in range(10):
        rig.subscribe(f"g{number}")
        rig.join(rig.engine.subscription(f"g{number}"), auto_ack=True)
    rig.numbers(1)
    rig.loop.advance(INTERVAL - 0.001)
    turns: list[int] = []
    step = rig.engine.events._step

    def counted(*arguments: Any) -> None:
        before = len(looked)
        step(*arguments)
        turns.append(len(looked) - before)

    monkeypatch.setattr(rig.engine.events, "_step", counted)
    rig.advance(0.01)
    assert sorted(event["subscription"] for event in told(rig, "deliveries")) == [
        f"g{number}" for number in range(10)
    ]
    assert max(turns) == 3


# --- the topic ------------------------------------------------------------------------------------
def test_the_topic_is_the_brokers() -> None:
    """Bounded by age and size, hidden from lists and wildcards, and not to be written or deleted."""
    rig = Rig()
    rig.follow(">")
    rig.subscribe("all", ">")
    rig.numbers(1)
    rig.advance(INTERVAL)
    topic = rig.engine.topics.find(EVENTS)
    assert topic.settings.durable
    assert topic.settings.retention_hours == limits.EVENTS_KEPT_HOURS
    assert topic.settings.retention_bytes == limits.EVENTS_BYTES_MAX
    assert not topic.settings.retain_unread
    assert not any(partition.watchers for partition in topic.partitions)
    for refused in (
        lambda: rig.engine.delete_topic(EVENTS, lambda error: None),
        lambda: rig.publish(EVENTS, b"forged"),
        lambda: rig.subscribe("spy", EVENTS),
        lambda: rig.engine.follow(EVENTS, rig.follow(TOPIC)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            refused()
        assert caught.value.code == "invalid_topic"


def test_events_survive_a_restart() -> None:
    """And go on from zero, as the counters do; the last while is told when the broker is closed."""
    rig = Rig()
    rig.subscribe()
    rig.join(auto_ack=True)
    rig.numbers(2)
    rig.advance(INTERVAL)
    rig.numbers(3)
    rig.reopen()
    assert [event["acked"] for event in told(rig, "deliveries")] == [2, 3]
    rig.join(auto_ack=True)
    rig.numbers(4)
    rig.advance(INTERVAL)
    assert [event["acked"] for event in told(rig, "deliveries")] == [2, 3, 4]


def test_a_broker_that_ends_at_once_leaves_no_topic() -> None:
    """Nobody who opens one for a moment finds a directory that he did not ask for."""
    rig = Rig()
    rig.subscribe()
    rig.numbers(2)
    rig.close()
    assert EVENTS not in rig.files.names(DATA)


@pytest.mark.parametrize(
    "rig", [Rig(directory=None), Rig(events_interval=0)], ids=["memory", "off"]
)
def test_where_there_are_no_events(rig: Rig) -> None:
    """In memory, and where they are turned off; no timer is left for them either."""
    timers = rig.loop.timers
    rig.subscribe()
    rig.join(auto_ack=True)
    rig.numbers(2)
    rig.advance(3 * INTERVAL)
    assert rig.engine.topics.get(EVENTS) is None
    assert rig.loop.timers <= timers + 1
    rig.close()


def test_another_interval() -> None:
    """The setting is the interval."""
    rig = Rig(events_interval=2.0)
    rig.numbers(1)
    rig.advance(1.9)
    assert told(rig) == []
    rig.advance(0.2)
    assert len(told(rig)) == 1


# --- in nobody's way ------------------------------------------------------------------------------
def test_without_room_the_next_event_tells_of_the_longer_time() -> None:
    """Nothing is written while the disk is full, and nothing is lost by it."""
    files = SimulatedFiles()
    free = [1 << 40]
    files.free_bytes = lambda path: free[0]  # type: ignore[method-assign]
    rig = Rig(files)
    rig.subscribe()
    inbox = rig.join()
    started = rig.clock.now_ms()
    rig.numbers(3)
    free[0] = 0
    rig.engine.guard.open()
    rig.advance(INTERVAL)
    inbox.ack(*inbox.take())
    rig.advance(INTERVAL)
    assert rig.engine.topics.get(EVENTS) is None
    free[0] = 1 << 40
    rig.engine.guard.open()
    rig.advance(INTERVAL)
    [event] = told(rig, "deliveries")
    assert (event["delivered"], event["acked"], event["from"]) == (3, 3, started)


def test_a_disk_that_refuses_is_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; users' messages are not touched, and events go on when they can."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.subscribe()
    rig.join(auto_ack=True)
    rig.numbers(1)
    files.fail("mkdir", 1, errno.EACCES, name=EVENTS, repeat=True)
    with caplog.at_level(logging.WARNING):
        rig.advance(INTERVAL)
        rig.numbers(1)
        rig.advance(INTERVAL)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("events of the broker are not stored: the disk refused the write:")
    files.heal()
    rig.numbers(1)
    rig.advance(INTERVAL)
    assert [event["acked"] for event in told(rig, "deliveries")] == [1]
    assert rig.engine.subscription(GROUP).tally.acked == 3


def test_a_broken_subscription_does_not_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is set before anything is looked at."""
    rig = Rig()
    rig.numbers(1)
    lag = Subscription.lag
    rig.subscribe()
    rig.join(auto_ack=True)

    def fail(self: Subscription) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Subscription, "lag", fail)
    with pytest.raises(ZeroDivisionError):
        rig.advance(INTERVAL)
    monkeypatch.setattr(Subscription, "lag", lag)
    rig.numbers(1)
    rig.advance(INTERVAL)
    assert told(rig, "deliveries")


# --- the embedded broker --------------------------------------------------------------------------
def test_they_are_read_like_any_topic(tmp_path: Path) -> None:
    """By fetch; and the embedded broker takes the same setting."""
    with Broker.open(tmp_path, events_interval=0.05) as broker:
        consumer = broker.subscription(GROUP, TOPIC)
        broker.publish(TOPIC, b"x")
        consumer.get(10).ack()

        def acked() -> int:
            if broker.engine.topics.get(EVENTS) is None:
                return 0
            found = [orjson.loads(message.value) for message in broker.fetch(EVENTS)]
            return sum(event.get("acked", 0) for event in found)

        wait_until(acked)
        assert acked() == 1
        assert EVENTS not in broker.topics()


@pytest.mark.parametrize("interval", [-1, "often", True, 1e9])
def test_an_interval_that_cannot_be(interval: Any) -> None:
    """Is refused when the broker is opened."""
    with pytest.raises(InvalidArgument) as caught:
        Broker.open(None, events_interval=interval)
    assert caught.value.code == "invalid_setting"
