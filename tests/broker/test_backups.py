"""A point in time of the whole broker: taken in slices, consistent, held for as long as somebody asks."""

import asyncio
from base64 import b64decode
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace import limits
from headrace.broker import state
from headrace.broker.state import Loaded
from headrace.errors import HeadraceError
from tests.broker.rig import GROUP, TOPIC, Rig


def run(rig: Rig, call: Coroutine[Any, Any, Any], between: Any = lambda: None) -> Any:
    """Carry a coroutine out on the rig's loop; ``between`` is called whenever it waits."""

    async def whole() -> Any:
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.sleep(0)
            rig.run()
            between()
        return task.result()

    return asyncio.run(whole())


def begun(rig: Rig, between: Any = lambda: None) -> Any:
    return run(rig, rig.engine.backups.begin("tester", access=False), between)


def read(rig: Rig, backup: Any) -> tuple[dict[str, Any], Loaded]:
    """The topics by name, and the journal, folded."""
    topics: dict[str, Any] = {}
    loaded = Loaded()
    entries: list[bytes] = []
    for number in range(backup["pages"]):
        page = rig.engine.backups.page(backup["backup"], number)
        topics |= {topic["topic"]: topic for topic in page["topics"]}
        entries += map(b64decode, page["entries"])
    for entry in entries[1:]:
        loaded.add(entry)
    return topics, loaded


def test_positions_and_ends_are_of_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes while the journal is collected is in it, and no position is after an end."""
    monkeypatch.setattr("headrace.broker.pace.PIECE_S", 0.0)
    monkeypatch.setattr(state, "CHANGED_MAX", 1)
    rig = Rig()
    inboxes = [rig.join(rig.subscribe(f"{GROUP}{number}")) for number in range(5)]
    rig.run()
    made = 0

    def change() -> None:
        nonlocal made
        made += 1
        rig.publish(TOPIC, b"%d" % made)
        rig.run()
        for inbox in inboxes:
            inbox.ack(*inbox.take())
        if made == 3:
            rig.engine.subscribe("new", TOPIC)

    topics, loaded = read(rig, begun(rig, change))
    assert made > 10  # it took that many turns
    [[start, end]] = topics[TOPIC]["extents"]
    assert start == 0
    assert end > 0
    names = {item["name"] for item in loaded.subscriptions.values()}
    assert names == {"new", *(f"{GROUP}{number}" for number in range(5))}
    for number, item in loaded.cursors.items():
        live = next(
            cursor
            for subscription in rig.engine.all_subscriptions()
            for cursor in subscription.cursors.values()
            if cursor.number == number
        )
        cursor = type(live)(number, live.partition, 0)
        for payload in loaded.deltas.get(number, ()):
            cursor.apply(payload)
        assert cursor.position <= end
        if loaded.subscriptions[item["subscription"]]["name"] != "new":
            assert cursor.position == end


def test_a_backup_that_nobody_reads_ends_by_itself() -> None:
    """Its memory is given back, and retention is free again."""
    rig = Rig(events_interval=0)
    rig.publish(TOPIC, b"x")
    used = rig.engine.budget.used
    backup = begun(rig)
    assert rig.engine.backups.holds()
    assert rig.engine.budget.used > used
    rig.advance(limits.BACKUP_LEASE_S - 1)
    rig.engine.backups.page(backup["backup"], None)
    rig.advance(limits.BACKUP_LEASE_S - 1)
    assert rig.engine.backups.holds()
    rig.advance(2)
    assert not rig.engine.backups.holds()
    assert rig.engine.budget.used == used
    with pytest.raises(HeadraceError, match="nobody has asked for it for 60 seconds") as caught:
        rig.engine.backups.page(backup["backup"], 0)
    assert caught.value.code == "backup_not_found"


def test_it_needs_room_in_memory() -> None:
    """A broker without room refuses, and nothing is held afterwards."""
    rig = Rig()
    rig.publish(TOPIC, b"x")
    rig.engine.subscribe(GROUP, TOPIC)
    budget = rig.engine.budget
    limit, budget.limit = budget.limit, budget.used
    with pytest.raises(HeadraceError) as caught:
        begun(rig)
    assert caught.value.code == "memory_full"
    assert budget.used == budget.limit
    budget.limit = limit
    assert not rig.engine.backups.holds()
    assert rig.engine.state.taps == []
    begun(rig)


def test_a_broker_in_memory_has_nothing_to_back_up() -> None:
    """It says so."""
    rig = Rig(directory=None)
    with pytest.raises(HeadraceError, match="nothing on disk"):
        begun(rig)
