"""The fake loop and clock: what they promise is what the tests of everything else rest on."""

import asyncio

import pytest

from tests.fakes import FakeClock, FakeLoop, InlineWorkers


def test_callbacks_run_in_the_order_they_were_due() -> None:
    """Ready callbacks run first in, first out; timers by their time, then by when they were set."""
    loop, ran = FakeLoop(), []
    loop.call_later(2, ran.append, "later")
    loop.call_later(1, ran.append, "soon")
    loop.call_later(1, ran.append, "soon, set second")
    loop.call_soon(ran.append, "now")
    loop.call_soon_threadsafe(ran.append, "now, too")
    loop.run_until_idle()
    assert ran == ["now", "now, too"]
    loop.advance(5)
    assert ran[2:] == ["soon", "soon, set second", "later"]


def test_each_timer_sees_its_own_time() -> None:
    """A timer runs at the very time it was due, and one that it sets is due in the same advance."""
    loop, seen = FakeLoop(100.0), []

    def tick() -> None:
        seen.append(loop.time())
        loop.call_later(1.5, tick)

    loop.call_later(1.5, tick)
    loop.advance(5)
    assert seen == [101.5, 103.0, 104.5]
    assert loop.time() == 105.0
    assert loop.timers == 1


def test_a_cancelled_timer_never_runs() -> None:
    """Cancelling works for what is ready and for what is due later."""
    loop, ran = FakeLoop(), []
    loop.call_soon(ran.append, 1).cancel()
    loop.call_later(1, ran.append, 2).cancel()
    loop.advance(2)
    assert ran == []
    assert loop.timers == 0


def test_a_callback_that_raises_fails_the_test_that_runs_it() -> None:
    """An exception comes out of run_until_idle, and what is left can still be run."""
    loop, ran = FakeLoop(), []
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(ran.append, 1)
    with pytest.raises(ZeroDivisionError):
        loop.run_until_idle()
    loop.run_until_idle()
    assert ran == [1]


def test_the_wall_clock_follows_the_loop_and_can_jump() -> None:
    """Advancing the loop advances the wall clock; a jump of the wall clock leaves the loop alone."""
    loop = FakeLoop()
    clock = FakeClock(loop, now_ms=5_000)
    loop.advance(1.25)
    assert clock.now_ms() == 6_250
    before = loop.time()
    clock.jump(-6_000)
    assert (clock.now_ms(), loop.time()) == (250, before)
    clock.set(9_000)
    clock.advance(1)
    assert (clock.now_ms(), loop.time()) == (10_000, before + 1)


def test_a_clock_without_a_loop_moves_by_itself() -> None:
    """Where there is no loop, advance moves the wall clock alone."""
    clock = FakeClock(now_ms=0)
    clock.advance(0.5)
    assert clock.now_ms() == 500


def test_inline_workers_answer_on_the_next_turn() -> None:
    """Work runs inside submit, its answer comes through the loop, with the result or the error."""
    loop, answers = FakeLoop(), []
    workers = InlineWorkers(loop)
    workers.submit(lambda: 42, lambda result, error: answers.append((result, error)))
    workers.submit(lambda: 1 / 0, lambda result, error: answers.append((result, type(error))))
    assert (workers.jobs, answers) == (2, [])
    loop.run_until_idle()
    assert answers == [(42, None), (None, ZeroDivisionError)]


def test_held_jobs_wait_for_their_release() -> None:
    """With hold, nothing runs until it is released, one by one or all together."""
    loop, ran = FakeLoop(), []
    workers = InlineWorkers(loop, hold=True)
    for number in range(3):
        workers.submit(lambda number=number: ran.append(number), lambda result, error: None)
    assert (workers.held, ran) == (3, [])
    assert workers.release(1) == 1
    assert ran == [0]
    assert workers.release() == 2
    assert (workers.held, ran) == (0, [0, 1, 2])


def test_asyncio_and_the_fake_loop_agree() -> None:
    """A real loop has every method that the fake one stands in for."""
    loop = asyncio.new_event_loop()
    try:
        for name in ("time", "call_soon", "call_later", "call_soon_threadsafe"):
            assert callable(getattr(loop, name))
            assert callable(getattr(FakeLoop(), name))
    finally:
        loop.close()
