"""A partition with everything it needs, and the words that the tests of this room use."""

from collections.abc import Callable
from copy import copy
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.files import Files
from headrace.log.batch import Batch
from headrace.log.cache import BatchCache
from headrace.log.columns import Columns
from headrace.log.fetching import Fetching
from headrace.log.interface import Append, LastStop
from headrace.log.partition import PartitionLog
from headrace.log.rewriting import Rewriter
from headrace.log.segment import Readers
from headrace.model import TopicSettings
from tests.fakes import FakeClock, FakeLoop, InlineWorkers, SimulatedFiles

DIRECTORY = Path("data/orders/0")


class Rig:
    """A loop, a clock, workers and a disk, and the partition that is opened over them."""

    def __init__(
        self, files: Files | None = None, directory: Path = DIRECTORY, *, hold: bool = False,
        cache_bytes: int = 0, readers_max: int = 8, rewrite: bool = False, **options: object,
    ):  # fmt: skip
        self.files: Files = files if files is not None else SimulatedFiles()
        self.directory = directory
        self.loop = FakeLoop()
        self.clock = FakeClock(self.loop)
        self.workers = InlineWorkers(self.loop, hold=hold)
        self.readers = Readers(self.files, readers_max)
        # Without a cache every read goes to the bytes, which is what these tests are about.
        self.cache = BatchCache(cache_bytes)
        self.settings = TopicSettings(**options)  # type: ignore[arg-type]
        self.rewrite = rewrite
        self.rewriter: Rewriter | None = None
        self.failures: list[HeadraceError] = []
        self.advanced: list[int] = []
        self.files.make_directory(directory)
        self._log: PartitionLog | None = None

    @property
    def log(self) -> PartitionLog:
        if self._log is None:
            self.open()
        assert self._log is not None
        return self._log

    def open(self, *, suspect: bool = False) -> PartitionLog:
        if self.rewrite:
            self.rewriter = Rewriter(self.loop, self.workers, self.clock)
        self._log = PartitionLog(
            self.directory,
            self.settings,
            files=self.files,
            clock=self.clock,
            loop=self.loop,
            workers=self.workers,
            readers=self.readers,
            cache=self.cache,
            fetching=Fetching(self.loop, self.workers),
            on_failure=self.failures.append,
            rewriter=self.rewriter,
            stop=LastStop(suspect),
        )
        self._log.on_advance = lambda: self.advanced.append(self.log.end_offset)
        return self._log

    def append(self, *values: bytes, **more: object) -> Append:
        """Hand records over; nothing happens until the loop runs."""
        entry = entry_of(*values, **more)
        self.log.append(entry)
        return entry

    def publish(self, *values: bytes, **more: object) -> Append:
        """Hand records over and wait for the answer."""
        entry = self.append(*values, **more)
        self.loop.run_until_idle()
        return entry

    def close(self) -> None:
        closed: list[bool] = []
        self.log.close(lambda: closed.append(True))
        self.loop.run_until_idle()
        assert closed == [True]
        self._log = None

    def abandon(self) -> None:
        """Forget the partition as a killed process would: nothing is flushed, cut or told."""
        self._log = None
        self.loop = FakeLoop(self.loop.time())
        self.clock = FakeClock(self.loop, self.clock.now_ms())
        self.workers = InlineWorkers(self.loop, hold=self.workers.hold)
        self.readers = Readers(self.files, 8)

    def change(self, **values: object) -> None:
        """Other settings from now on; also values that no topic may have, such as tiny segments."""
        settings = copy(self.log.settings)
        for name, value in values.items():
            object.__setattr__(settings, name, value)
        self.log.change(settings)

    def reopen(self, *, suspect: bool = False) -> PartitionLog:
        self.close()
        return self.open(suspect=suspect)


def entry_of(
    *values: bytes, batch: Batch | None = None, keys: list[bytes | None] | None = None,
    times: list[int] | None = None, producer: tuple[int, int, int] = (0, 0, 0),
    done: Callable[[Append], None] | None = None, columns: Columns | None = None,
) -> Append:  # fmt: skip
    """``producer`` is (id, epoch, first sequence). ``context`` counts how often it was answered."""

    def answered(entry: Append) -> None:
        entry.context = (entry.context or 0) + 1  # type: ignore[operator]
        if done is not None:
            done(entry)

    if batch is None and columns is None:
        columns = Columns(list(values), keys=keys, times=times)
    number, epoch, first = producer
    return Append(
        columns, batch, answered,
        producer_id=number, producer_epoch=epoch, first_sequence=first,
    )  # fmt: skip


def records(log: PartitionLog, start: int | None = None) -> list[tuple[int, bytes]]:
    """(offset, value) of everything there is, read in one pass as a consumer would."""
    found: list[tuple[int, bytes]] = []
    offset = log.start_offset if start is None else start
    while offset < log.end_offset:
        batches = log.read(offset)
        assert batches, f"nothing at {offset}, though the end is {log.end_offset}"
        for batch in batches:
            for at, value in enumerate(batch.values(), batch.base_offset):
                if at >= offset:
                    found.append((at, value))
            offset = batch.end_offset
    return found


def as_stored(log: PartitionLog) -> list[Batch]:
    """The batches as they are on disk, not joined for a reader."""
    found: list[Batch] = []
    ends = [*(segment.base_offset for segment in log._segments[1:]), log.end_offset]
    for segment, end in zip(log._segments, ends, strict=True):
        offset = segment.base_offset
        while offset < end:
            found += segment.read(offset, end, 1)
            offset = found[-1].end_offset
    return found


def values(log: PartitionLog) -> list[bytes]:
    """All values; their offsets must be gapless from the start."""
    found = records(log)
    assert [offset for offset, _ in found] == list(range(log.start_offset, log.end_offset))
    return [value for _, value in found]


def number_of(entry: Append) -> int:
    """How often the entry was answered; it must always come to be exactly once."""
    return entry.context or 0  # type: ignore[return-value]
