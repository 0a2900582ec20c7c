"""A storage whose logs take their time: late, but otherwise the same."""

import pytest

from headrace import limits
from headrace.log.columns import Columns
from headrace.log.interface import Append, Log, ReadPending, TopicRecord
from headrace.log.storage import MemoryStorage
from headrace.model import TopicSettings
from tests.fakes import FakeClock, FakeLoop, SlowStorage

TOPIC = TopicRecord("orders", TopicSettings(durable=False), 1, 0)


def opened(delay_s: float) -> tuple[FakeLoop, Log]:
    loop = FakeLoop()
    storage = SlowStorage(MemoryStorage(clock=FakeClock(loop), loop=loop), loop, delay_s)
    [log] = storage.create(TOPIC)
    log.append(Append(Columns([b"a", b"b"]), None, lambda entry: None))
    loop.run_until_idle()
    return loop, log


def test_a_read_is_here_after_the_delay() -> None:
    """The first one is told to wait, and so is every other one until then."""
    loop, log = opened(2.0)
    told: list[str] = []
    for name in ("first", "second"):
        with pytest.raises(ReadPending) as pending:
            log.read(0)
        pending.value.then(lambda name=name: told.append(name))
    loop.advance(1.9)
    assert told == []
    loop.advance(0.2)
    assert told == ["first", "second"]
    assert log.read(0)[0].values() == [b"a", b"b"]


def test_what_was_fetched_is_kept_as_long_as_promised() -> None:
    """And no longer, so that a caller that dawdles is found out."""
    loop, log = opened(0.0)
    with pytest.raises(ReadPending):
        log.read_cached(1)
    loop.run_until_idle()
    loop.advance(limits.READ_KEPT_S)
    assert log.read_cached(1).base_offset == 0
    loop.advance(0.1)
    with pytest.raises(ReadPending):
        log.read_cached(1)


def test_everything_else_is_that_of_the_other_log() -> None:
    """It knows where it ends, is told of news, and has no file to point at."""
    loop, log = opened(0.0)
    ends: list[int] = []
    log.on_advance = lambda: ends.append(log.end_offset)
    log.append(Append(Columns([b"c"]), None, lambda entry: None))
    loop.run_until_idle()
    assert ends == [3]
    assert (log.start_offset, log.durable, log.thread_safe_reads) == (0, False, False)
    assert log.whereabouts(0) is None
