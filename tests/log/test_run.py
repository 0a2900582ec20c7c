"""Runs: neighbouring small batches as one batch."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.log.batch import (
    AFTER_SYNC,
    HEADER_BYTES,
    LOST,
    STAGED,
    Batch,
    encode,
    lost,
)
from headrace.log.columns import NO_ID, Columns
from headrace.log.run import is_small, merge, take, take_all

END = limits.OFFSET_MAX


def placed(batch: Batch, offset: int, time: int = 1000) -> Batch:
    batch.base_offset = offset
    batch.base_timestamp = batch.max_timestamp = time
    return batch


def singles(count: int, start: int = 0) -> list[Batch]:
    return [
        placed(encode(Columns([b"%d" % number])), number, 1000 + number // 3)
        for number in range(start, start + count)
    ]


def raw(batches: list[Batch]) -> bytes:
    return b"".join(batch.raw() for batch in batches)


def record_of(batch: Batch, at: int) -> tuple[object, ...]:
    columns = batch.columns([at])
    time = columns.times[0] if columns.times else batch.base_timestamp
    return (
        batch.base_offset + at,
        time,
        columns.values[0],
        columns.keys[0] if columns.keys else None,
        columns.headers[0] if columns.headers else None,
        columns.ids[0] if columns.ids else NO_ID,
        columns.expiry[0] if columns.expiry else 0,
        columns.targets[0] if columns.targets else b"",
    )


def records(batches: list[Batch]) -> list[tuple[object, ...]]:
    return [record_of(batch, at) for batch in batches for at in range(batch.count)]


def maybe(draw: st.DrawFn, count: int, column: st.SearchStrategy) -> list | None:
    return draw(st.none() | st.lists(column, min_size=count, max_size=count))


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Neighbours with any columns, some of them packed."""
    found: list[Batch] = []
    offset, time = draw(st.integers(0, 1000)), 1000
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.sampled_from([1, 1, 1, 2, 5]))
        times = maybe(draw, count, st.integers(0, 3))
        if times is not None:
            times = [time + sum(times[: n + 1]) for n in range(count)]
        batch = encode(
            Columns(
                [
                    draw(st.binary(max_size=9)) * draw(st.sampled_from([1, 90]))
                    for _ in range(count)
                ],
                maybe(draw, count, st.none() | st.binary(max_size=5)),
                maybe(draw, count, st.none() | st.just({"h": "ü"})),
                times,
                maybe(draw, count, st.binary(min_size=16, max_size=16)),
                maybe(draw, count, st.integers(0, 9)),
                maybe(draw, count, st.sampled_from([b"", b"group"])),
            )
        )
        placed(batch, offset, times[0] if times else time)
        batch.max_timestamp = times[-1] if times else time
        batch.producer_id = draw(st.sampled_from([0, 7]))
        if draw(st.booleans()):
            batch.pack()
        found.append(batch)
        offset = batch.end_offset
        time = batch.max_timestamp + draw(st.sampled_from([0, 0, 1]))
    return found


@given(batches())
def test_a_run_has_the_records_of_its_batches(found: list[Batch]) -> None:
    """Offsets, times and every column are kept, from memory and from bytes."""
    expected = records(found)
    joined = merge(found)
    assert records([joined]) == expected
    assert joined.end_offset == found[-1].end_offset
    assert (joined.base_timestamp, joined.max_timestamp) == (
        found[0].base_timestamp, found[-1].max_timestamp,
    )  # fmt: skip
    taken, at = take_all(raw(found), 0, END)
    assert at == len(raw(found))
    assert records(taken) == expected


@given(batches(), st.data())
def test_damage_is_never_part_of_a_run(found: list[Batch], data: st.DataObject) -> None:
    """A flipped bit anywhere ends the run before its batch."""
    whole = bytearray(raw(found))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    good, size = 0, 0
    while size + found[good].stored_bytes <= at:
        size += found[good].stored_bytes
        good += 1
    taken, end = take_all(bytes(whole), 0, END)
    assert records(taken) == records(found[:good])
    assert end == size


@pytest.mark.parametrize("count", [1, 7, 8, 100])
def test_plain_records_are_one_batch(count: int) -> None:
    """However many batches of one record there are, they become one batch with their times."""
    (batch,), _ = take_all(raw(singles(count)), 0, END)
    assert records([batch]) == records(singles(count))


def test_bounds_hold() -> None:
    """A run has no more records and bytes than it may have, and ends before the end."""
    data, one = raw(singles(100)), singles(1)[0].stored_bytes
    for bounds, count in (
        ({"records_max": 30}, 30), ({"records_max": 3}, 3), ({"bytes_max": 40 * one}, 40),
        ({"bytes_max": 1}, 1), ({}, 100),
    ):  # fmt: skip
        found = take(data, 0, 0, END, **bounds)
        assert found is not None
        assert found[0].count == count
        assert found[1] == count * one
    found = take(data, 0, 0, 50)
    assert found is not None
    assert found[0].count == 50
    assert take(data, 0, 1, END) is None
    assert take(data[:-1], 99 * one, 99, END) is None


def test_large_lost_and_staged_batches_stay_as_they_are() -> None:
    """Only small batches with records are joined."""
    many = placed(encode(Columns([b"x"] * (limits.SMALL_BATCH_RECORDS + 1))), 20)
    gone = lost(many.end_offset, 3, 1000)
    staged = placed(encode(Columns([b"s"])), gone.end_offset)
    staged.flags |= STAGED
    wide = placed(encode(Columns([b"x" * limits.SMALL_BATCH_BYTES])), staged.end_offset)
    found = [*singles(20), many, gone, staged, wide, *singles(2, wide.end_offset)]
    assert [is_small(batch) for batch in (*singles(1), many, gone, staged, wide)] == [
        True, False, False, False, False,
    ]  # fmt: skip
    taken, at = take_all(raw(found), 0, END)
    assert at == len(raw(found))
    assert [batch.count for batch in taken] == [20, many.count, 3, 1, 1, 2]
    assert [batch.flags & (LOST | STAGED) for batch in taken] == [0, 0, LOST, STAGED, 0, 0]


def test_a_gap_ends_a_run() -> None:
    """A batch that does not follow the one before it is not joined, and nothing after it is read."""
    found = [*singles(9), *singles(9, 10)]
    taken, at = take_all(raw(found), 0, END)
    assert [batch.count for batch in taken] == [9]
    assert at == len(raw(found[:9]))


def test_a_run_is_not_marked() -> None:
    """A run is for readers: it has no producer, and no word about the disk."""
    found = singles(10)
    for batch in found:
        batch.flags |= AFTER_SYNC
        batch.producer_id = 7
    ((run,), _) = take_all(raw(found), 0, END)
    for batch in (run, merge(found)):
        assert (batch.flags & AFTER_SYNC, batch.producer_id) == (0, 0)


def test_garbage_is_no_run() -> None:
    """Bytes that are no batch give nothing, whatever they are."""
    random = Random(4)
    for size in (0, 8, HEADER_BYTES, 200):
        assert take(random.randbytes(size), 0, 0, END) is None
