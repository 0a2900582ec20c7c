"""Group commit: what is put while a job runs goes into the next one; and the real threads behind."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.workers import Lane, Workers
from tests.fakes import FakeLoop, InlineWorkers


class Bench:
    """A lane whose jobs are recorded, over workers that hold them until they are released."""

    def __init__(self, *, at_once: int = 1_000) -> None:
        self.loop = FakeLoop()
        self.workers = InlineWorkers(self.loop, hold=True)
        self.lane: Lane[int] = Lane(self.loop, self.workers.submit, self.take, self.finish)
        self.at_once = at_once
        self.jobs: list[list[int]] = []
        self.finished: list[tuple[Any, BaseException | None]] = []

    def take(self, items: list[int]) -> Callable[[], Any] | None:
        taken, left = items[: self.at_once], items[self.at_once :]
        self.lane.waiting[:0] = left
        if taken == [-1]:
            return None
        self.jobs.append(taken)
        return lambda: 1 // min(taken) if 0 in taken else len(taken)

    def finish(self, result: Any, error: BaseException | None) -> None:
        self.finished.append((result, error))

    def turn(self) -> None:
        """One job is done, and whatever follows from it."""
        self.workers.release()
        self.loop.run_until_idle()


def test_what_is_put_in_one_turn_goes_together() -> None:
    """Items of the same turn of the loop are one job."""
    bench = Bench()
    for number in (1, 2, 3):
        bench.lane.put(number)
    assert bench.jobs == []
    bench.loop.run_until_idle()
    assert bench.jobs == [[1, 2, 3]]
    assert not bench.lane.idle


def test_what_was_gathered_already_does_not_wait_for_the_end_of_the_turn() -> None:
    """It begins at once, unless a job runs or is about to."""
    bench = Bench()
    bench.lane.put(1, at_once=True)
    assert bench.jobs == [[1]]
    bench.lane.put(2, at_once=True)
    assert bench.jobs == [[1]]
    bench.turn()
    assert bench.jobs == [[1], [2]]
    bench.turn()
    bench.lane.put(3)
    bench.lane.put(4, at_once=True)
    assert bench.jobs == [[1], [2]]
    bench.loop.run_until_idle()
    assert bench.jobs == [[1], [2], [3, 4]]


def test_what_is_put_while_busy_goes_into_the_next_job() -> None:
    """However much comes while a job runs, it is one job more, and never two at a time."""
    bench = Bench()
    bench.lane.put(1)
    bench.loop.run_until_idle()
    for number in range(2, 10):
        bench.lane.put(number)
        bench.loop.run_until_idle()
    assert bench.jobs == [[1]]
    assert bench.workers.held == 1
    bench.turn()
    assert bench.jobs == [[1], list(range(2, 10))]
    assert bench.workers.held == 1
    bench.turn()
    assert bench.lane.idle
    assert bench.finished == [(1, None), (8, None)]


def test_what_is_put_back_comes_first_next_time() -> None:
    """What a job has no room for stays ahead of what came later."""
    bench = Bench(at_once=2)
    for number in range(1, 6):
        bench.lane.put(number)
    bench.loop.run_until_idle()
    bench.lane.put(6)
    while not bench.lane.idle:
        bench.turn()
    assert bench.jobs == [[1, 2], [3, 4], [5, 6]]


def test_a_take_that_makes_no_job_is_no_dead_end() -> None:
    """Where there is nothing to do, the lane is idle at once, or goes on with what waits."""
    bench = Bench(at_once=1)
    bench.lane.put(-1)
    bench.loop.run_until_idle()
    assert bench.lane.idle
    bench.lane.put(-1)
    bench.lane.put(5)
    bench.loop.run_until_idle()
    assert bench.jobs == [[5]]


def test_an_error_is_told_and_the_lane_goes_on() -> None:
    """A job that raises is finished with its error, and the next job runs."""
    bench = Bench()
    bench.lane.put(0)
    bench.loop.run_until_idle()
    bench.lane.put(7)
    bench.turn()
    bench.turn()
    assert isinstance(bench.finished[0][1], ZeroDivisionError)
    assert bench.finished[1] == (1, None)
    assert bench.lane.idle


def test_a_finish_that_raises_does_not_stop_the_lane() -> None:
    """A mistake in whoever hears the answer comes out, and what waits is still done."""
    bench = Bench()
    bench.lane.put(1)
    bench.loop.run_until_idle()
    bench.lane.put(2)
    bench.finish = None  # type: ignore[assignment]
    bench.lane._finish = lambda result, error: 1 // 0
    bench.workers.release()
    with pytest.raises(ZeroDivisionError):
        bench.loop.run_until_idle()
    assert bench.jobs == [[1], [2]]


@given(st.lists(st.sampled_from(["put", "turn", "idle"]), max_size=60), st.integers(1, 5))
def test_everything_is_done_once_and_in_order(script: list[str], at_once: int) -> None:
    """For any mix of puts and finished jobs, each item is in exactly one job, in order."""
    bench, count = Bench(at_once=at_once), 0
    for step in script:
        if step == "put":
            count += 1
            bench.lane.put(count)
        elif step == "turn":
            bench.turn()
        else:
            bench.loop.run_until_idle()
        assert bench.workers.held <= 1
    while not bench.lane.idle:
        bench.turn()
    assert [item for job in bench.jobs for item in job] == list(range(1, count + 1))


# --- threads --------------------------------------------------------------------------------------
def run(main: Callable[[Workers], Any], count: int = 8) -> Any:
    """Run a coroutine with real workers over a real loop."""

    async def wrapped() -> Any:
        workers = Workers(asyncio.get_running_loop(), count)  # type: ignore[arg-type]
        try:
            return await main(workers)
        finally:
            workers.close()

    return asyncio.run(wrapped())


def submit(workers: Workers, work: Callable[[], Any]) -> asyncio.Future[Any]:
    """The outcome of the work, and the thread that told it."""
    future = asyncio.get_running_loop().create_future()

    def done(result: Any, error: BaseException | None) -> None:
        future.set_result((result, error, threading.current_thread()))

    workers.submit(work, done)
    return future


def test_work_runs_in_a_thread_and_is_answered_on_the_loop() -> None:
    """The work is done elsewhere, its answer comes on the loop's thread."""

    async def main(workers: Workers) -> None:
        thread, error, answered = await submit(workers, threading.current_thread)
        assert thread is not threading.current_thread()
        assert thread.name.startswith("headrace-disk-")
        assert error is None
        assert answered is threading.current_thread()

    run(main)


@pytest.mark.parametrize("kind", [OSError, ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_whatever_the_work_raises_is_handed_over(kind: type[BaseException]) -> None:
    """Any exception in a worker is an answer, and the thread lives on."""

    async def main(workers: Workers) -> None:
        def fail() -> None:
            raise kind("on purpose")

        _, error, _ = await submit(workers, fail)
        assert type(error) is kind
        assert (await submit(workers, lambda: 42))[0] == 42

    run(main, 1)


def test_jobs_run_side_by_side() -> None:
    """As many jobs as there are threads wait for the disk at the same time."""

    async def main(workers: Workers) -> None:
        barrier = threading.Barrier(3, timeout=30)
        outcomes = await asyncio.gather(*(submit(workers, barrier.wait) for _ in range(3)))
        assert sorted(result for result, _, _ in outcomes) == [0, 1, 2]

    run(main, 3)


def test_threads_are_started_when_they_are_needed() -> None:
    """One job after the other needs one thread; none is started before the first job."""

    async def main(workers: Workers) -> None:
        assert workers._threads == []
        for _ in range(5):
            await submit(workers, lambda: None)
        assert len(workers._threads) == 1

    run(main)


def test_more_jobs_than_threads_are_all_done() -> None:
    """A small pool does many jobs, each once."""

    async def main(workers: Workers) -> None:
        outcomes = await asyncio.gather(
            *(submit(workers, lambda number=number: number) for number in range(200))
        )
        assert [result for result, _, _ in outcomes] == list(range(200))

    run(main, 2)


def test_close_ends_the_threads_behind_the_last_job() -> None:
    """Jobs that were submitted are done; then the threads end."""

    async def main(workers: Workers) -> list[threading.Thread]:
        futures = [submit(workers, lambda number=number: number) for number in range(20)]
        threads = list(workers._threads)
        workers.close()
        outcomes = await asyncio.gather(*futures)
        assert [result for result, _, _ in outcomes] == list(range(20))
        return threads

    for thread in run(main, 3):
        thread.join(30)
        assert not thread.is_alive()


def test_what_comes_after_the_close_is_done_and_leaves_no_thread() -> None:
    """As reads that have waited for their turn until then."""

    async def main(workers: Workers) -> None:
        before = await submit(workers, threading.current_thread)
        workers.close()
        found = await asyncio.gather(*[submit(workers, threading.current_thread) for _ in range(9)])
        for thread, _, _ in [before, *found]:
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()

    run(main, 2)


def test_a_system_without_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is refused, so nobody waits for ever; where there is another thread, that one does it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main(workers: Workers) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            _, error, _ = await submit(workers, lambda: 1)
            assert isinstance(error, OSError)
        assert (await submit(workers, lambda: 2))[0] == 2
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            both = await asyncio.gather(*[submit(workers, lambda: 3) for _ in range(2)])
            assert [result for result, _, _ in both] == [3, 3]

    run(main)


def test_a_loop_that_is_gone_ends_the_thread_quietly() -> None:
    """When there is nobody left to tell, a worker ends without a traceback."""
    loop = asyncio.new_event_loop()
    workers = Workers(loop, 1)  # type: ignore[arg-type]
    go = threading.Event()
    workers.submit(lambda: go.wait(30), lambda result, error: None)
    (thread,) = workers._threads
    loop.close()
    go.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_lane_over_real_threads_keeps_its_order() -> None:
    """Over real threads and a real loop, each item is done once, in order, in few jobs."""

    async def main(workers: Workers) -> None:
        loop = asyncio.get_running_loop()
        done: list[int] = []
        jobs: list[int] = []
        all_done = loop.create_future()

        def take(items: list[int]) -> Callable[[], list[int]]:
            return lambda: items

        def finish(result: list[int], error: BaseException | None) -> None:
            assert error is None
            jobs.append(len(result))
            done.extend(result)
            if len(done) == 1_000:
                all_done.set_result(None)

        lane: Lane[int] = Lane(loop, workers.submit, take, finish)  # type: ignore[arg-type]
        for number in range(1_000):
            lane.put(number)
            if number % 100 == 99:
                await asyncio.sleep(0)
        await all_done
        assert done == list(range(1_000))
        assert len(jobs) <= 10

    run(main)
