"""The loop never waits for a disk: everything that opens, reads, removes or syncs a file does it in a disk thread."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace import AsyncBroker, limits
from headrace.broker import engine as engine_module
from headrace.errors import DataCorrupt
from headrace.files import Files, Handle, NotAtHand
from headrace.log import fetching
from headrace.log.directory import JOURNAL
from tests.broker.test_aio import on_a_loop, until
from tests.fakes import Fault, FaultyFiles
from tests.fakes.faults import CHANGES

TOPIC = "orders"
WAITS = {"open", "create", "read_at", *CHANGES}


class WatchedFiles(FaultyFiles):
    """Notes the calls that the loop makes and that may take a disk's time. With ``cold``, nothing is in memory."""

    def __init__(self) -> None:
        super().__init__(Files())
        self.watching = False
        self.cold = True
        self.seen: list[tuple[str, str]] = []

    def _meet(self, kind: str, path: Path) -> Fault | None:
        waits = kind in WAITS and not (
            kind == "read_at" and self.cold
        )  # fetched before, so it does not wait
        if (
            self.watching
            and waits
            and {TOPIC, JOURNAL} & {*path.parts}
            and asyncio._get_running_loop() is not None
        ):
            self.seen.append((kind, path.name))
        return super()._meet(kind, path)

    def free_bytes(self, path: Path) -> int:
        if self.watching and asyncio._get_running_loop() is not None:
            self.seen.append(("free_bytes", path.name))
        return super().free_bytes(path)

    def read_at_once(self, handle: Handle, position: int, length: int) -> bytes:
        if self.cold:
            raise NotAtHand(unknown=True)
        return super().read_at_once(handle, position, length)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedFiles]:
    files = WatchedFiles()
    monkeypatch.setattr(engine_module, "Files", lambda: files)
    yield files
    assert files.seen == []


async def filled(directory: Path, files: WatchedFiles) -> AsyncBroker:
    """A broker that has just started, with a topic of many closed segments."""
    async with AsyncBroker(directory) as broker:
        await broker.create_topic(TOPIC, segment_bytes=4096, partitions=1)
        for number in range(20):
            await broker.publish_many(TOPIC, [b"%d" % number * 200] * 20)
    broker = AsyncBroker(directory, memory_limit=64 << 20)
    await broker.start()
    files.watching = True
    return broker


@pytest.mark.parametrize("cold", [True, False])
@on_a_loop
async def test_reading(tmp_path: Path, files: WatchedFiles, cold: bool) -> None:
    """Fetches, times, consumers and followers, whether the records are in the page cache or not."""
    broker = await filled(tmp_path, files)
    files.cold = cold
    page = await broker.fetch(TOPIC, 0, limit=400)
    assert len(page) == 400
    assert (await broker.offset_at(TOPIC, datetime(2020, 1, 1, tzinfo=UTC))) == 0
    published = datetime.fromtimestamp(page[250].timestamp / 1000, UTC)
    assert (await broker.offset_at(TOPIC, published)) <= 250
    async with broker.subscription("email", TOPIC) as consumer:
        taken = 0
        async for message in consumer:
            message.ack()
            taken += 1
            if taken == 400:
                break
    await broker.seek("email", 5)
    assert (await broker.find(page[123].id)).offset == 123
    files.watching = False
    await broker.close()


@on_a_loop
async def test_retention_and_closing(tmp_path: Path, files: WatchedFiles) -> None:
    """Indexes are read, files are removed and cut in a thread, and the files of dropped segments go."""
    broker = await filled(tmp_path, files)
    directory = tmp_path / TOPIC / "0"
    before = len(list(directory.glob("*.log")))
    await broker.change_topic(TOPIC, retention_bytes=5000)
    await broker.publish(TOPIC, b"x")  # the writer is open from now on
    broker.engine.retention.run()
    await until(lambda: len(list(directory.glob("*.log"))) == 1)
    assert before > 10
    log = broker.engine.partition(TOPIC).log
    assert log.start_offset == int(next(directory.glob("*.log")).stem) > 0
    await broker.close()
    assert not [path for path in directory.glob("*.log") if path.stat().st_size % 8]


@on_a_loop
async def test_damage(tmp_path: Path, files: WatchedFiles) -> None:
    """Looking for the end of damage goes through a whole segment, in a thread."""
    broker = await filled(tmp_path, files)
    path = sorted((tmp_path / TOPIC / "0").glob("*.log"))[1]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataCorrupt, match="damaged"):
        await broker.fetch(TOPIC, int(path.stem))
    files.watching = False
    await broker.close()


@on_a_loop
async def test_thousands_of_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time is looked up in all of them, however soon the log forgets the answers; others ask at the same time."""
    monkeypatch.setattr(limits, "RESOLVED_AT_ONCE", 1)
    monkeypatch.setattr(fetching, "ENDED_MAX", 1)
    early = datetime(2020, 1, 1, tzinfo=UTC)
    async with AsyncBroker(tmp_path) as broker, asyncio.timeout(10):
        await broker.create_topic(TOPIC, partitions=3)
        for number in range(3):
            await broker.publish(TOPIC, b"x", partition=number)
        await broker.create_subscription("email", TOPIC, start=early)
        await broker.seek("email", early)
        found = await broker.positions(TOPIC, at=early)
        assert [each["offset"] for each in found[TOPIC]] == [0, 0, 0]
