"""Slices of columns: they are what the whole column has there, and cost what their own records cost."""

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log import body
from headrace.log.batch import Batch, encode
from headrace.log.columns import NO_ID, Columns

COUNT = 40
READERS: tuple[tuple[str, Callable[[Batch], Callable[..., list[object] | None]]], ...] = tuple(
    (name, lambda batch, name=name: getattr(batch, name))
    for name in ("values", "keys", "headers", "times", "ids", "expiry", "targets")
)


def everything(count: int = COUNT) -> Batch:
    return encode(
        Columns(
            [b"v%d" % n for n in range(count)],
            [None if n % 3 else b"k%d" % n for n in range(count)],
            [{f"name{n % 5}": f"text{n}"} if n % 4 else None for n in range(count)],
            [1_000 + n for n in range(count)],
            [NO_ID if n % 2 else bytes([n % 256]) * 16 for n in range(count)],
            list(range(count)),
            [b"" if n % 7 else b"group" for n in range(count)],
        )
    )


@pytest.mark.parametrize(("name", "reader"), READERS, ids=[name for name, _ in READERS])
@given(st.integers(0, COUNT), st.integers(0, COUNT), st.booleans())
def test_a_slice_is_a_part_of_the_column(
    name: str, reader: Callable[[Batch], Callable[..., list[object]]], a: int, b: int, packed: bool
) -> None:
    """For each column, wherever it begins and ends."""
    batch = everything()
    if packed:
        batch.pack()
    low, high = min(a, b), max(a, b)
    whole = reader(batch)()
    batch.forget()
    assert reader(batch)(low, high) == whole[low:high]


@pytest.mark.parametrize(("name", "reader"), READERS, ids=[name for name, _ in READERS])
@given(st.sets(st.integers(0, COUNT - 1), min_size=1))
def test_some_records_are_found_near_and_far(
    name: str, reader: Callable[[Batch], Callable[..., list[object]]], indexes: set[int]
) -> None:
    """Dense indexes are decoded together and sparse ones one by one, with the same result."""
    batch = everything()
    chosen = sorted(indexes)
    whole = reader(batch)()
    assert batch.some(reader(batch), chosen) == [whole[index] for index in chosen]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 9])
def test_members_in_turn_get_every_nth_record(step: int) -> None:
    batch = everything()
    indexes = range(1, COUNT, step)
    columns = batch.columns(indexes)
    assert columns.values == batch.values()[1::step]
    assert columns.headers == (batch.headers() or [])[1::step]


def test_a_column_that_does_not_exist_is_none() -> None:
    batch = encode(Columns([b"a", b"b"]))
    assert batch.some(batch.keys, [0, 1]) is None
    assert batch.columns([1]).headers is None


@pytest.mark.parametrize("name", ["values", "keys", "headers", "times", "ids", "expiry", "targets"])
def test_a_slice_of_a_large_batch_decodes_nothing_else(name: str) -> None:
    """Ten records of a hundred thousand take the memory of ten records."""
    batch = everything(100_000)
    batch.column(-1)
    tracemalloc.start()
    try:
        assert len(getattr(batch, name)(50_000, 50_010)) == 10
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 200), st.data())
def test_what_fits_is_as_much_as_possible(sizes: list[int], most: int, data: st.DataObject) -> None:
    """Never more bytes than allowed, except for a single value."""
    batch = encode(Columns([bytes(size) for size in sizes]))
    offsets = body.offsets_of(batch.plain(), 0, batch.count)
    low = data.draw(st.integers(0, len(sizes) - 1))
    high = data.draw(st.integers(low + 1, len(sizes)))
    end = body.fitting(offsets, low, high, most)
    assert low < end <= high
    assert end == low + 1 or sum(sizes[low:end]) <= most
    assert end == high or sum(sizes[low : end + 1]) > most


def test_sizes_are_known_before_anything_is_unpacked() -> None:
    batch = encode(Columns([bytes(100_000)] * 10))
    plain = batch.plain_bytes
    batch.pack()
    assert batch.stored_bytes < 1_000
    assert batch.plain_bytes == plain
    assert batch.memory_bytes > 2 * plain
    assert batch.value_bytes(0, 5) == pytest.approx(plain / 2, rel=0.01)
