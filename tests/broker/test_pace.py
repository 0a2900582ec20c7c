"""Long work in short turns."""

import asyncio

import pytest

from headrace.broker.pace import PIECE_S, REQUESTS_S, SHARE, TURN_S, TURN_S_MIN, Pace
from headrace.clock import Clock
from tests.fakes import FakeLoop


class Ticking(Clock):
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def seconds(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


def test_work_waits_for_the_next_turn_and_keeps_its_order(clock: Ticking) -> None:
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)
    for number in range(3):
        pace.soon(lambda number=number: done.append(number))
    assert done == []
    loop.run_until_idle()
    assert done == [0, 1, 2]


def test_all_pieces_of_a_turn_share_its_time(clock: Ticking) -> None:
    """What the loop has to do besides comes between them, however many want to go on."""
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)

    def work(name: str, pieces: int) -> None:
        clock.now += TURN_S_MIN * 0.6
        done.append(name)
        if pieces > 1:
            pace.soon(lambda: work(name, pieces - 1))

    for name in "abcd":
        pace.soon(lambda name=name: work(name, 2))
    loop.call_soon(done.append, "others")
    loop.run_until_idle()
    assert "".join(done).replace("others", "|") == "ab|cdabcd"


@pytest.mark.parametrize(
    ("others_s", "expected"),
    [(0.0, 1), (3 * TURN_S_MIN / SHARE, 3), (10 * TURN_S, TURN_S / TURN_S_MIN)],
)
def test_pieces_have_a_share_of_the_time(clock: Ticking, others_s: float, expected: float) -> None:
    """Few where a publisher waits for the next turn, more where publishers keep the loop busy."""
    loop, turns = FakeLoop(), []
    pace = Pace(loop, clock)

    def work(left: int) -> None:
        clock.now += TURN_S_MIN
        turns[-1] += 1
        if left:
            pace.soon(lambda: work(left - 1))

    def others() -> None:
        clock.now += others_s
        turns.append(0)
        if len(turns) < 5:
            loop.call_soon(others)

    others()
    pace.soon(lambda: work(200))
    loop.run_until_idle()
    assert turns[2:4] == pytest.approx([expected] * 2, abs=1)


def test_an_error_does_not_stop_the_others(clock: Ticking) -> None:
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)
    pace.soon(lambda: 1 / 0)
    pace.soon(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.run_until_idle()
    loop.run_until_idle()
    assert done == [1]


def test_a_piece_knows_when_to_end(clock: Ticking) -> None:
    pace = Pace(FakeLoop(), clock)
    deadline = pace.deadline()
    assert not pace.is_past(deadline)
    clock.now += TURN_S
    assert pace.is_past(deadline)


def test_a_coroutine_lets_the_others_have_their_turn() -> None:
    async def run() -> list[str]:
        pace, done = Pace(asyncio.get_running_loop(), Clock()), []
        pace.soon(lambda: done.append("other"))
        await pace.turn()
        return [*done, "mine"]

    assert asyncio.run(run()) == ["other", "mine"]


def test_a_cancelled_coroutine_is_no_error() -> None:
    async def run() -> None:
        pace = Pace(asyncio.get_running_loop(), Clock())
        task = asyncio.create_task(pace.turn())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await pace.turn()

    asyncio.run(run())


def test_items_are_gone_through_in_pieces(clock: Ticking) -> None:
    """The first piece at once, the others in later turns, and ``done`` after the last item."""
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)

    def do(item: int) -> None:
        clock.now += PIECE_S * 0.6
        done.append(item)

    pace.go_through(range(5), do, lambda: done.append("end"))
    assert done == [0, 1]
    loop.run_until_idle()
    assert done == [0, 1, 2, 3, 4, "end"]


def test_a_coroutine_goes_through_items_in_pieces(clock: Ticking) -> None:
    async def run() -> list[object]:
        loop, seen = asyncio.get_running_loop(), []
        async for item in Pace(loop, clock).each(range(4)):
            seen.append(item)
            if item == 0:
                loop.call_soon(seen.append, "others")
            clock.now += PIECE_S * 0.6
        return seen

    assert asyncio.run(run()) == [0, 1, "others", 2, 3]


def test_a_turn_wakes_one_coroutine() -> None:
    """It goes on after the pieces, where nobody measures it: a thousand at once would be one long turn."""

    async def run() -> int:
        loop = asyncio.get_running_loop()
        pace, turn, woken = Pace(loop, Clock()), 0, []

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        async def wait() -> None:
            await pace.turn()
            woken.append(turn)

        tasks = [asyncio.create_task(wait()) for _ in range(10)]
        count()
        await asyncio.wait(tasks)
        return len(set(woken))

    assert asyncio.run(run()) == 10


def test_the_requests_of_all_connections_share_a_turn(clock: Ticking) -> None:
    """One that has asked for little lately has twice the time, and the next turn begins anew."""
    loop = FakeLoop()
    pace = Pace(loop, clock)
    assert not pace.is_over()
    clock.now += REQUESTS_S
    assert pace.is_over()
    assert not pace.is_over(is_heavy=False)
    clock.now += REQUESTS_S
    assert pace.is_over(is_heavy=False)
    loop.run_until_idle()
    assert not pace.is_over()


def test_long_work_comes_after_other_pieces_but_does_not_wait_for_all(clock: Ticking) -> None:
    """One of it for each ``TURN_S`` of the others, however short their turns are."""
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)

    def work(name: str) -> None:
        clock.now += TURN_S * 0.6
        done.append(name)

    for _ in range(3):
        pace.soon(lambda: work("late"), late=True)
    for _ in range(5):
        pace.soon(lambda: work("soon"))
    loop.run_until_idle()
    assert done == ["soon", "soon", "late", "soon", "soon", "late", "soon", "late"]


def test_items_wait_for_a_turn_that_has_time_for_them(clock: Ticking) -> None:
    loop, done = FakeLoop(), []
    pace = Pace(loop, clock)
    assert not pace.is_over()
    clock.now += REQUESTS_S
    pace.go_through([1, 2], done.append, lambda: done.append("end"))
    assert done == []
    loop.run_until_idle()
    assert done == [1, 2, "end"]
