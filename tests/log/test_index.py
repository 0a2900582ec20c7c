"""The sparse index: a hint that is never wrong, or is not taken."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.log.batch import Batch
from headrace.log.index import Index


def batch(offset: int, count: int, time: int = 0, newest: int | None = None) -> Batch:
    made = Batch(b"", 0, count, 0)
    made.base_offset, made.base_timestamp = offset, time
    made.max_timestamp = time if newest is None else newest
    return made


shapes = st.lists(
    st.tuples(
        st.integers(1, 100),  # records
        st.integers(64, 3 * limits.INDEX_INTERVAL_BYTES),  # bytes
        st.integers(0, 50),  # ms since the one before
        st.integers(0, 20),  # ms that it spans itself
    ),
    min_size=1,
    max_size=40,
)


def built(shape: list[tuple[int, int, int, int]], base: int = 1000) -> tuple[Index, list]:
    index, placed = Index(base), []
    offset, position, time = base, 0, 0
    for count, size, pause, span in shape:
        time += pause
        made = batch(offset, count, time, time + span)
        index.add(made, position, size)
        placed.append((made, position, size))
        offset, position, time = offset + count, position + size, time + span
    return index, placed


@given(shapes)
def test_an_offset_is_never_behind_where_reading_begins(shape: list) -> None:
    """The position for any offset is that of a batch at or before the one that holds it, and near."""
    index, placed = built(shape)
    positions = {position for _, position, _ in placed}
    for made, position, size in placed:
        for offset in (made.base_offset, made.end_offset - 1):
            found = index.position_of(offset)
            assert found in positions
            assert found <= position
            assert position - found <= limits.INDEX_INTERVAL_BYTES + size
    assert index.position_of(0) == 0


@given(shapes, st.integers(0, 3000))
def test_a_time_is_never_behind_where_reading_begins(shape: list, time: int) -> None:
    """Reading from the offset for a time finds the first batch that reaches it."""
    index, placed = built(shape)
    first = next((made for made, _, _ in placed if made.max_timestamp >= time), None)
    if first is not None:
        assert index.offset_of_time(time) <= first.base_offset
    assert index.offset_of_time(time) in {made.base_offset for made, _, _ in placed}


@given(shapes)
def test_it_survives_its_bytes(shape: list) -> None:
    """What is dumped loads to the same, for the log of that size and no other."""
    index, placed = built(shape)
    _, position, size = placed[-1]
    raw = index.dump()
    again = Index.load(raw, 1000, position + size)
    assert again is not None
    for name in Index.__slots__:
        assert getattr(again, name) == getattr(index, name), name
    assert (again.batches, again.end_offset) == (len(placed), placed[-1][0].end_offset)
    assert Index.load(raw, 1000, position + size + 1) is None


def test_every_damage_is_found() -> None:
    """An index with any bit changed, or cut anywhere, is no index."""
    index, _ = built([(1, 64, 1, 0), (2, 20_000, 1, 0), (3, 64, 1, 0)])
    raw = index.dump()
    for at, bit in product(range(len(raw)), range(8)):
        wrong = bytearray(raw)
        wrong[at] ^= 1 << bit
        assert Index.load(bytes(wrong), 1000, index.log_bytes) is None
    for length in range(len(raw)):
        assert Index.load(raw[:length], 1000, index.log_bytes) is None
    assert Index.load(raw + bytes(24), 1000, index.log_bytes) is None


def test_it_is_sparse() -> None:
    """Small batches share an entry: at most one for each interval of bytes."""
    index, _ = built([(1, 64, 0, 0)] * 3_000)
    assert index.batches == 3_000
    assert len(index.offsets) == -(-3_000 * 64 // limits.INDEX_INTERVAL_BYTES)
