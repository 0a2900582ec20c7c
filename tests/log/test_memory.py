"""The log in memory, and that it means the same as the one on disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.budget import Budget
from headrace.errors import Closed, OffsetOutOfRange, SequenceGap
from headrace.log.batch import Batch, encode
from headrace.log.cache import BatchCache
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.log.memory import MemoryLog
from tests.fakes import FakeClock, FakeLoop
from tests.log.rig import Rig, entry_of, number_of


class Memory:
    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.clock = FakeClock(self.loop, now_ms=1_000)
        self.log = MemoryLog(clock=self.clock, loop=self.loop)
        self.advanced: list[int] = []
        self.log.on_advance = lambda: self.advanced.append(self.log.end_offset)

    def publish(self, *values: bytes, **more: object) -> Append:
        entry = entry_of(*values, **more)
        self.log.append(entry)
        self.loop.run_until_idle()
        return entry


def test_what_is_appended_can_be_read() -> None:
    """Records have gapless offsets and are shown once they are answered."""
    memory = Memory()
    entries = [entry_of(b"a"), entry_of(b"b", b"c")]
    for entry in entries:
        memory.log.append(entry)
    assert (memory.log.end_offset, memory.log.read(0)) == (0, [])
    memory.loop.run_until_idle()
    assert [entry.first_offset for entry in entries] == [0, 1]
    assert memory.log.read(0)[0].values() == [b"a", b"b", b"c"]
    assert memory.log.read_cached(2).values() == [b"a", b"b", b"c"]
    assert (memory.log.end_offset, memory.advanced) == (3, [3])
    assert memory.log.read(3) == []


def test_reading_is_bounded_and_gives_at_least_one_batch() -> None:
    """As many batches as fit, and one in any case."""
    memory = Memory()
    for number in range(5):
        memory.publish(b"%d" % number)
    size = memory.log.read(0, 1)[0].stored_bytes
    assert [len(memory.log.read(0, limit)) for limit in (1, size, 3 * size, 1 << 20)] == [
        1,
        1,
        3,
        5,
    ]
    assert memory.log.size_bytes() == 5 * size


def test_what_is_dropped_is_gone_exactly() -> None:
    """Whole batches are freed, but not one record before the given offset is shown again."""
    memory = Memory()
    for number in range(4):
        memory.publish(b"%d" % number, b"x")
    size = memory.log.size_bytes()
    memory.log.drop_before(3)
    assert memory.log.start_offset == 3
    assert memory.log.size_bytes() == size * 3 // 4
    for gone in (0, 2):
        with pytest.raises(OffsetOutOfRange):
            memory.log.read(gone)
    assert memory.log.read(3)[0].base_offset == 2
    memory.log.drop_before(1)
    assert memory.log.start_offset == 3
    memory.log.drop_before(100)
    assert (memory.log.start_offset, memory.log.end_offset) == (8, 8)
    assert memory.log.size_bytes() == 0
    assert memory.publish(b"next").first_offset == 8
    with pytest.raises(OffsetOutOfRange):
        memory.log.read(9 + 1)


def test_times_lead_to_offsets() -> None:
    """The first record that is not older than a time, also within a batch, or the end."""
    memory = Memory()
    memory.publish(b"a", b"b")  # 1000
    memory.loop.advance(1)
    memory.publish(b"c", b"d", b"e", times=[1_200, 1_500, 1_900])
    for time, offset in [(0, 0), (1_000, 0), (1_001, 2), (1_500, 3), (1_501, 4), (1_901, 5)]:
        assert memory.log.offset_at(time) == offset, time
    memory.log.drop_before(3)
    assert memory.log.offset_at(0) == 3


def test_idempotent_producers_are_known() -> None:
    """A repetition is answered with its first offset, a gap is refused."""
    memory = Memory()
    first = memory.publish(b"a", producer=(7, 0, 0))
    again = memory.publish(b"a", producer=(7, 0, 0))
    gap = memory.publish(b"a", producer=(7, 0, 5))
    assert (first.first_offset, again.first_offset, again.duplicate) == (0, 0, True)
    assert isinstance(gap.error, SequenceGap)
    assert memory.log.last_producer_batch(7) == (0, 1)
    assert memory.log.next_sequence(7) == 1
    assert memory.log.end_offset == 1


def test_closing_answers_what_waits() -> None:
    """What was handed over before the close is answered before it is done; what comes later is refused."""
    memory = Memory()
    waiting = entry_of(b"a")
    memory.log.append(waiting)
    order: list[str] = []
    memory.log.close(lambda: order.append(f"closed after {number_of(waiting)}"))
    memory.loop.run_until_idle()
    late = memory.publish(b"b")
    assert order == ["closed after 1"]
    assert (waiting.first_offset, number_of(waiting)) == (0, 1)
    assert isinstance(late.error, Closed)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.integers(1, 3)),
            st.tuples(st.just("producer"), st.integers(0, 3)),
            st.tuples(st.just("times"), st.lists(st.integers(0, 3_000), min_size=2, max_size=2)),
            st.tuples(st.just("wait"), st.integers(1, 500)),
        ),
        max_size=20,
    )
)
def test_memory_and_disk_agree(script: list) -> None:
    """The same calls give the same offsets, answers, records and times on both engines."""
    memory, rig = Memory(), Rig()
    rig.clock.set(1_000)
    for kind, value in script:
        if kind == "wait":
            memory.loop.advance(value / 1000)
            rig.loop.advance(value / 1000)
            continue
        more = {
            "publish": lambda n=value: ([b"v"] * n, {}),
            "producer": lambda n=value: ([b"p"], {"producer": (7, 0, n)}),
            "times": lambda n=value: ([b"t", b"u"], {"times": list(n)}),
        }[kind]
        values, options = more()
        one, other = memory.publish(*values, **options), rig.publish(*values, **options)
        assert (one.first_offset, one.timestamp, one.duplicate, type(one.error)) == (
            other.first_offset, other.timestamp, other.duplicate, type(other.error)
        )  # fmt: skip
        assert memory.log.end_offset == rig.log.end_offset
    for time in range(0, 4_000, 250):
        assert memory.log.offset_at(time) == rig.log.offset_at(time)
    found = [memory.log.read(0), rig.log.read(0)] if memory.log.end_offset else [[], []]
    in_memory, on_disk = (
        [
            record
            for batch in log
            for record in zip(
                batch.values(), batch.times() or [batch.base_timestamp] * batch.count, strict=True
            )
        ]
        for log in found
    )
    assert in_memory == on_disk


# --- the cache ------------------------------------------------------------------------------------
def sized(offset: int, size: int) -> Batch:
    batch = Batch(bytes(size - 64), 0, 1, 0)
    batch.base_offset = offset
    return batch


def test_the_cache_is_bounded_in_bytes() -> None:
    """The oldest batches go when the bound is reached; one too large stays until the next one comes."""
    budget = Budget()
    cache = BatchCache(5 * sized(0, 200).memory_bytes, budget=budget)
    for offset in range(10):
        cache.put(1, sized(offset, 200))
    assert [offset for offset in range(10) if cache.get(1, offset)] == [5, 6, 7, 8, 9]
    cache.put(1, sized(50, 50_000))
    assert [offset for offset in range(60) if cache.get(1, offset)] == [50]
    cache.put(1, sized(51, 200))
    assert [offset for offset in range(60) if cache.get(1, offset)] == [51]
    cache.forget(1)
    assert budget.used == 0


def test_the_cache_counts_what_batches_become_when_they_are_read() -> None:
    """Packed batches of a few hundred bytes do not stay unpacked by the hundred."""
    batches = [encode(Columns([bytes(1 << 20)])) for _ in range(20)]
    budget = Budget()
    cache = BatchCache(8 << 20, budget=budget)
    for number, batch in enumerate(batches):
        batch.pack()
        batch.base_offset = number
        assert batch.stored_bytes < 1_000
        cache.put(1, batch)
    kept = [batch for number, batch in enumerate(batches) if cache.get(1, number)]
    assert 1 <= len(kept) <= 4
    for batch in kept:
        batch.values()
    assert sum(len(batch.plain()) + len(batch.values()[0]) for batch in kept) <= budget.used


def test_the_cache_replaces_and_forgets() -> None:
    """A batch put twice counts once, and a log that is closed takes its batches along."""
    cache = BatchCache(5 * sized(0, 200).memory_bytes)
    for _ in range(20):
        cache.put(1, sized(0, 200))
    cache.put(2, sized(0, 200))
    assert cache.get(1, 0) is not cache.get(2, 0)
    cache.forget(1)
    assert cache.get(1, 0) is None
    assert cache.get(2, 0) is not None
    for offset in range(4):
        cache.put(3, sized(offset, 200))
    assert cache.get(2, 0) is not None, "the bytes of what was forgotten are free again"
