"""Redrives that run in the broker: their progress, and everything that stops them."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncBroker, limits
from headrace.broker.redriving import Begun, Redrive
from headrace.errors import Closed, Conflict, HeadraceError, NotFound, QueueFull, StorageFull
from tests.broker.rig import GROUP, Answer, Rig
from tests.broker.test_aio import until
from tests.broker.test_dead_letters import offsets, with_letters
from tests.fakes import FaultyFiles, SimulatedFiles

LETTERS = f"{GROUP}.dlq"


def begin(
    rig: Rig, *, id: uuid.UUID | None = None, lease: float | None = None, **more: Any
) -> tuple[Redrive, Answer]:
    answer = Answer()
    begun = Begun(id or uuid.uuid4(), "user:alice", rig.clock.now_ms(), lease)
    redrive = rig.engine.dead_letters.redrive(GROUP, answer.done, begun=begun, **more)
    rig.run()
    return redrive, answer


# --- progress -----------------------------------------------------------------------------------
def test_progress_counts_what_is_done_and_what_is_left() -> None:
    """While it runs, and when it has ended; the sum is always the same."""
    rig = with_letters(10)
    redrive, _ = begin(rig, rate=5)
    for count in range(1, 10):
        status = redrive.status()
        assert (status["state"], status["redriven"], status["left"]) == (
            "running",
            count,
            10 - count,
        )
        rig.advance(0.2)
    rig.advance(0.4)
    status = redrive.status()
    assert (status["state"], status["redriven"], status["left"]) == ("done", 10, 0)
    assert (status["by"], status["rate"], status["why"]) == ("user:alice", 5, None)
    assert rig.engine.dead_letters.redrives.of(LETTERS) == [status]


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ({"offsets": [2, 3, 7, 99]}, 2),
        ({"limit": 4}, 3),
        ({"limit": 4, "offsets": [2, 3]}, 1),
        ({"where": lambda letter: letter.reason == "odd"}, 8),
    ],
    ids=["offsets", "a limit", "both", "a filter"],
)
def test_what_is_left_follows_the_choice(choice: dict[str, Any], left: int) -> None:
    """Offsets and a limit are known; a filter may want any letter that is left."""
    rig = with_letters(10)
    redrive, answer = begin(rig, rate=1, **choice)
    assert (redrive.status()["redriven"], redrive.status()["left"]) == (1, left)
    rig.advance(20)
    assert answer.get()["left"] == 0


def test_letters_that_the_caller_may_not_redrive_are_counted() -> None:
    """Each once, with a reason; they stay."""
    rig = with_letters(6)
    _, answer = begin(rig, allowed=lambda letter: letter.offset % 2 == 0)
    result = answer.get()
    assert (result["redriven"], result["skipped"]) == (3, 3)
    assert result["reason"] == "user:alice may not publish to the topics they come from"
    assert offsets(rig.letters()) == [1, 3, 5]


# --- stopping -----------------------------------------------------------------------------------
def test_a_redrive_at_a_rate_is_stopped_at_once() -> None:
    """It does not wait for its next letter; what it has not published stays, for another redrive."""
    rig = with_letters(10)
    redrive, answer = begin(rig, rate=0.001)
    redrive.stop("stopped by user:bob")
    rig.run()
    result = answer.get()
    assert (result["state"], result["redriven"], result["left"]) == ("stopped", 1, 9)
    assert result["why"] == "stopped by user:bob"
    rig.advance(10_000)
    assert offsets(rig.letters()) == list(range(1, 10))
    assert begin(rig)[1].get()["redriven"] == 9


def test_a_redrive_is_stopped_during_a_write() -> None:
    """It ends when that is stored: the letters of the page are redriven, and counted."""
    rig = with_letters(10)
    rig.workers.hold = True
    redrive, answer = begin(rig, rate=40)  # pages of four
    redrive.stop("enough")
    rig.run()
    assert answer.calls == 0
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    result = answer.get()
    assert (result["state"], result["redriven"], result["left"]) == ("stopped", 4, 6)
    rig.crash()
    assert offsets(rig.letters()) == [4, 5, 6, 7, 8, 9]


def test_a_redrive_that_waits_for_another_one_is_stopped() -> None:
    """Its page was chosen, and is not published."""
    rig = with_letters(5)
    rig.workers.hold = True
    begin(rig, offsets=[0])
    second, answer = begin(rig, offsets=[1, 2])
    second.stop("enough")
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    result = answer.get()
    assert (result["state"], result["redriven"], result["left"]) == ("stopped", 0, 2)
    assert offsets(rig.letters()) == [1, 2, 3, 4]


def test_stopping_what_has_ended_changes_nothing() -> None:
    """It stays done."""
    rig = with_letters(2)
    redrive, answer = begin(rig)
    redrive.stop("late")
    rig.run()
    assert answer.get()["state"] == redrive.status()["state"] == "done"
    assert redrive.status()["why"] is None


def test_a_lease_ends_a_redrive_that_nobody_asks_for() -> None:
    """Questions renew it; without one it runs to its end."""
    rig = with_letters(10)
    redrive, answer = begin(rig, rate=0.01, lease=30)
    free, _ = begin(rig, rate=0.01)
    rig.advance(25)
    rig.engine.dead_letters.redrives.renew(redrive)
    rig.advance(25)
    assert redrive.state == "running"
    rig.advance(6)
    assert answer.get()["state"] == "stopped"
    assert answer.get()["why"] == "nobody has asked for it for 30 seconds"
    rig.advance(3_000)
    assert free.state == "done"


def test_a_closing_broker_ends_redrives() -> None:
    """Whoever waits for one hears it at once, however low its rate."""
    rig = with_letters(3)
    redrive, answer = begin(rig, rate=0.001, lease=30)
    rig.close()
    assert (redrive.state, answer.calls) == ("failed", 1)
    with pytest.raises(Closed):
        answer.get()


def test_an_error_is_kept_with_the_redrive() -> None:
    """Whoever asks later hears why it failed."""
    files = FaultyFiles(SimulatedFiles())
    rig = with_letters(4, files)
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name=".log", code=28)
    redrive, answer = begin(rig)
    with pytest.raises(StorageFull):
        answer.get()
    assert redrive.status()["state"] == "failed"
    kept = rig.engine.dead_letters.redrives.ended(LETTERS, redrive.begun.id)
    assert isinstance(kept.error, StorageFull)
    assert kept.status["why"] == kept.error.message


# --- which ones there are -------------------------------------------------------------------------
def test_an_id_is_used_once() -> None:
    """Also after the end of its redrive."""
    rig = with_letters(2)
    redrive, _ = begin(rig)
    with pytest.raises(Conflict) as caught:
        begin(rig, id=redrive.begun.id)
    assert caught.value.code == "redrive_exists"


def test_redrives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, and those that are kept: the oldest is forgotten."""
    monkeypatch.setattr(limits, "REDRIVES_MAX", 2)
    monkeypatch.setattr(limits, "REDRIVES_KEPT_MAX", 2)
    rig = with_letters(5)
    running = [begin(rig, rate=0.01)[0] for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        begin(rig)
    assert caught.value.code == "too_many_redrives"
    for each in running:
        each.stop("enough")
    rig.run()
    begin(rig, limit=1)
    kept = rig.engine.dead_letters.redrives
    assert [each["state"] for each in kept.of(LETTERS)] == ["stopped", "done"]
    with pytest.raises(NotFound) as missing:
        kept.ended(LETTERS, running[0].begun.id)
    assert missing.value.code == "redrive_not_found"
    with pytest.raises(NotFound):
        kept.ended("other.dlq", running[1].begun.id)


# --- the operations -------------------------------------------------------------------------------
async def given_up(broker: AsyncBroker, count: int) -> None:
    async with broker.subscription("email", "orders", max_deliveries=1) as messages:
        await broker.publish_many("orders", [b"x"] * count)
        for _ in range(count):
            (await messages.get(10)).nack()
    subscription = broker.engine.subscription("email")
    await until(lambda: subscription.lag() == 0)


def test_a_redrive_is_followed_and_stopped(tmp_path: Path) -> None:
    """``wait`` bounds the answer; ``redrive_progress`` and ``stop_redrive`` find it by its id."""

    async def scenario() -> None:
        async with await AsyncBroker.open(tmp_path) as broker:
            assert await list_of_unknown(broker) == "no_dead_letters"
            await given_up(broker, 5)
            begun = await broker.redrive("email", rate=0.01, wait=0)
            assert begun["state"] == "running"
            progress = begun
            while not progress["redriven"]:
                progress = await broker.redrive_progress("email", begun["id"], wait=0.01)
            assert (progress["redriven"], progress["left"]) == (1, 4)
            assert await broker.redrives("email") == [progress]
            stopped = await broker.stop_redrive("email", begun["id"])
            assert (stopped["state"], stopped["why"]) == ("stopped", "stopped by owner")
            assert await broker.stop_redrive("email", begun["id"]) == stopped
            assert await broker.redrive_progress("email", begun["id"]) == stopped
            with pytest.raises(NotFound):
                await broker.stop_redrive("email", uuid.uuid4())
            assert (await broker.redrive("email"))["redriven"] == 4

    asyncio.run(scenario())


async def list_of_unknown(broker: AsyncBroker) -> str:
    try:
        await broker.redrives("nobody")
    except HeadraceError as error:
        return error.code
    return ""


def test_no_redrives_of_a_subscription_without_letters(tmp_path: Path) -> None:
    """An empty list, as of its dead letters."""

    async def scenario() -> None:
        async with await AsyncBroker.open(tmp_path) as broker:
            await broker.create_subscription("email", "orders")
            assert await broker.redrives("email") == []

    asyncio.run(scenario())


def test_a_cancelled_call_stops_its_redrive(tmp_path: Path) -> None:
    """Of an embedded broker, for example by ``asyncio.timeout``."""

    async def scenario() -> None:
        async with await AsyncBroker.open(tmp_path) as broker:
            await given_up(broker, 3)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await broker.redrive("email", rate=0.01)
            [begun] = await broker.redrives("email")
            found = await broker.redrive_progress("email", begun["id"], wait=10)
            assert (found["state"], found["why"]) == ("stopped", "the call was cancelled")

    asyncio.run(scenario())
