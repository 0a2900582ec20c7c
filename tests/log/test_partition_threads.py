"""Readers in other threads, real files, real workers: what they see is always a prefix of the log."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.clock import Clock
from headrace.errors import OffsetOutOfRange
from headrace.files import Files
from headrace.log.cache import BatchCache
from headrace.log.fetching import Fetching
from headrace.log.interface import Append
from headrace.log.partition import PartitionLog
from headrace.log.segment import Readers
from headrace.log.uring import open_workers
from headrace.model import TopicSettings
from tests.log.rig import entry_of, values

COMMITS = 150
DISK = "auto"


@pytest.fixture(autouse=True, params=["threads", "auto"])
def _disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits by threads, and by io_uring where that is permitted."""
    monkeypatch.setattr(f"{__name__}.DISK", request.param)


@pytest.fixture(autouse=True)
def _hectic() -> Iterator[None]:
    """Threads take turns a thousand times as often, so that a few milliseconds try what takes days."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def value_of(offset: int) -> bytes:
    return b"%08d" % offset * 20


async def with_log(directory: Path, main: Callable[[PartitionLog], object]) -> object:
    """Run something with a real partition on a real loop, and close it."""
    loop, files = asyncio.get_running_loop(), Files()
    workers = open_workers(loop, files, DISK)  # type: ignore[arg-type]
    log = PartitionLog(
        directory,
        TopicSettings(segment_bytes=4096),
        files=files,
        clock=Clock(),
        loop=loop,  # type: ignore[arg-type]
        workers=workers,
        readers=Readers(files, 2),
        cache=BatchCache(10_000),
        fetching=Fetching(loop, workers),  # type: ignore[arg-type]
        on_failure=lambda error: None,
    )
    try:
        return await main(log)  # type: ignore[misc]
    finally:
        closed = loop.create_future()
        log.close(lambda: closed.set_result(None))
        await closed
        workers.close()


async def publish(log: PartitionLog, *records: bytes) -> Append:
    future = asyncio.get_running_loop().create_future()
    log.append(entry_of(*records, done=future.set_result))
    return await future


def follow(
    log: PartitionLog, turns: threading.Semaphore, stop: threading.Event, problems: list[object]
) -> None:
    """Read from the beginning to the end, once for each turn, and check every byte."""
    try:
        while turns.acquire(timeout=60) and not stop.is_set():
            offset = log.start_offset
            while offset < log.end_offset:
                try:
                    batches = log.read(offset, 2_000)
                except OffsetOutOfRange:
                    offset = log.start_offset  # retention was faster
                    continue
                assert batches, offset
                for batch in batches:
                    assert batch.base_offset <= offset
                    for at, value in enumerate(batch.values(), batch.base_offset):
                        assert value == value_of(at)
                    offset = batch.end_offset
            assert log.offset_at(0) >= 0
    except BaseException as problem:
        problems.append(problem)
        raise


def test_readers_in_threads_see_whole_records(tmp_path: Path) -> None:
    """While commits, rolls and retention go on, readers in other threads read what was stored."""
    problems: list[object] = []

    async def main(log: PartitionLog) -> None:
        turns, stop = threading.Semaphore(0), threading.Event()
        threads = [
            threading.Thread(target=follow, args=(log, turns, stop, problems)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        try:
            end = 0
            for number in range(COMMITS):
                count = number % 3 + 1
                turns.release(len(threads))
                entry = await publish(log, *(value_of(end + at) for at in range(count)))
                assert entry.first_offset == end
                end += count
                if number % 30 == 29:
                    log.drop_before(end - 60)
        finally:
            stop.set()
            turns.release(len(threads))
            for thread in threads:
                await asyncio.to_thread(thread.join)
        assert log.start_offset > 0
        found = await asyncio.to_thread(values, log)
        assert found == [value_of(offset) for offset in range(log.start_offset, end)]

    asyncio.run(with_log(tmp_path, main))
    assert problems == []


def test_handles_are_shared_by_threads(tmp_path: Path) -> None:
    """Many threads that open more segments than may stay open all get the right file."""
    files = Files()
    paths = [tmp_path / str(number) for number in range(6)]
    for path in paths:
        path.write_bytes(path.name.encode())
    readers, problems = Readers(files, 2), []

    def hammer(offset: int) -> None:
        try:
            for number in range(2_000):
                path = paths[number * (offset + 1) % len(paths)]
                assert files.read_at(readers.get(path), 0, 1) == path.name.encode()
                if number % 7 == 0:
                    readers.forget(path)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(readers) <= 2


def test_a_real_partition_survives_its_process(tmp_path: Path) -> None:
    """On a real file system: closed and opened again, everything is where it was."""

    async def fill(log: PartitionLog) -> int:
        for offset in range(100):
            await publish(log, value_of(offset))
        return log.end_offset

    async def look(log: PartitionLog) -> None:
        found = await asyncio.to_thread(values, log)
        assert found == [value_of(offset) for offset in range(100)]
        assert (log.torn_bytes, log.read_only) == (0, None)
        assert (await publish(log, b"next")).first_offset == 100

    assert asyncio.run(with_log(tmp_path, fill)) == 100
    asyncio.run(with_log(tmp_path, look))
