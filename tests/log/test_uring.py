"""Commits by io_uring: real rings, real files, and devices that refuse writes and syncs."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.files import Files, Handle
from headrace.log import uring
from headrace.log.uring import COMMITS_MAX, RingWorkers, open_workers
from headrace.log.workers import SyncFailed, Workers, Write


def _is_permitted() -> bool:
    try:
        uring.KernelRing().close()
    except OSError:
        return False
    return True


needs_ring = pytest.mark.skipif(not _is_permitted(), reason="io_uring is not permitted here")


class WriteJob:
    """A job that says by whom it was carried out."""

    def __init__(self, path: str | Path, position: int, *parts: bytes, sync: bool = True):
        flags = os.O_RDWR | (0 if str(path).startswith("/dev") else os.O_CREAT)
        self.write = Write(Handle(os.open(path, flags), Path(path)), position, list(parts), sync)
        self.by: list[str] = []

    def run(self) -> None:
        self.by.append("thread")

    def request(self) -> Write:
        return self.write

    def stored(self, seconds: float) -> None:
        assert seconds > 0
        self.by.append("ring")


def with_ring(main: Callable[[RingWorkers], Awaitable[None]]) -> None:
    async def run() -> None:
        workers = RingWorkers(asyncio.get_running_loop())  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(main(workers), 30)
        finally:
            workers.close()

    asyncio.run(run())


async def committed(workers: Workers, job: WriteJob) -> BaseException | None:
    future: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    workers.commit(job, lambda _result, error: future.set_result(error))
    return await future


@needs_ring
def test_a_commit_is_written_and_synced_without_a_thread(tmp_path: Path) -> None:
    """All buffers are at their place, and no thread was started."""

    async def main(workers: RingWorkers) -> None:
        job = WriteJob(tmp_path / "file", 16, b"one\0", b"two", b"x" * 100_000)
        assert await committed(workers, job) is None
        assert (job.by, workers._threads) == (["ring"], [])
        content = (tmp_path / "file").read_bytes()
        assert content == bytes(16) + b"one\0two" + b"x" * 100_000
        assert not workers._owed

    with_ring(main)


@needs_ring
def test_a_sync_that_fails_is_final(tmp_path: Path) -> None:
    """/dev/null takes every byte and has no sync: the job is neither stored nor tried again."""

    async def main(workers: RingWorkers) -> None:
        job = WriteJob("/dev/null", 0, b"lost")
        assert isinstance(await committed(workers, job), SyncFailed)
        assert job.by == []
        unsynced = WriteJob("/dev/null", 0, b"not promised", sync=False)
        assert await committed(workers, unsynced) is None

    with_ring(main)


@needs_ring
def test_a_thread_does_again_what_could_not_be_written() -> None:
    """On a full disk the sync is cancelled, and the thread handles and reports the failure."""

    async def main(workers: RingWorkers) -> None:
        for sync in (True, False):
            job = WriteJob("/dev/full", 0, b"no room", sync=sync)
            assert await committed(workers, job) is None
            assert job.by == ["thread"]
        assert not workers._failed

    with_ring(main)


@needs_ring
def test_more_commits_than_the_ring_holds_go_to_the_threads(tmp_path: Path) -> None:
    """Each is answered once, whoever carries it out."""

    async def main(workers: RingWorkers) -> None:
        jobs = [WriteJob(tmp_path / str(n), 0, b"%d" % n) for n in range(COMMITS_MAX + 20)]
        errors = await asyncio.gather(*[committed(workers, job) for job in jobs])
        assert set(errors) == {None}
        assert [job.by for job in jobs].count(["ring"]) == COMMITS_MAX
        assert [job.by for job in jobs].count(["thread"]) == 20

    with_ring(main)


@needs_ring
def test_closing_waits_until_the_kernel_has_read_the_bytes(tmp_path: Path) -> None:
    """Commits that are left are carried out; nobody is told."""

    async def main(workers: RingWorkers) -> None:
        told: list[Any] = []
        for number in range(20):
            job = WriteJob(tmp_path / str(number), 0, b"left")
            workers.commit(job, lambda *answer: told.append(answer))
        workers.close()
        workers.close()
        assert {(tmp_path / str(number)).read_bytes() for number in range(20)} == {b"left"}
        assert told == []
        job = WriteJob(tmp_path / "late", 0, b"late")
        assert await committed(workers, job) is None
        assert job.by == ["thread"]

    with_ring(main)


def test_the_setting_and_the_system_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads where they are wanted, where the disk is another one, and where a ring is not permitted."""

    def refused(entries: int = 0) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    class OtherFiles(Files):
        pass

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        assert open_workers(loop, Files(), "threads").method == "threads"
        assert open_workers(loop, OtherFiles(), "io_uring").method == "threads"
        assert open_workers(loop, None, "io_uring").method == "threads"
        monkeypatch.setattr(uring, "KernelRing", refused)
        assert open_workers(loop, Files()).method == "threads"
        with pytest.raises(InvalidArgument, match="Operation not permitted") as caught:
            open_workers(loop, Files(), "io_uring")
        assert caught.value.code == "invalid_setting"

    asyncio.run(main())
