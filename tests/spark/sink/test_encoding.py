"""Arrow columns become the very batch that the broker's own encoder makes of the same records."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import TooLarge
from headrace.log import batch as batches
from headrace.log.admission import check
from headrace.log.columns import Columns
from headrace.spark.sink import encoding

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=6)
names = st.text("abcä-", min_size=1, max_size=4)
headers = st.dictionaries(names, texts, max_size=3)
record = st.tuples(
    st.binary(max_size=12),
    st.none() | st.binary(max_size=6),
    st.none() | headers,
    st.integers(0, limits.TIMESTAMP_MS_MAX),
)


def arrow(records: list[tuple]) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    """The four columns of the records, as Arrow has them."""
    values, keys, heads, times = zip(*records, strict=True)
    lists = [
        None if each is None else [{"key": name, "value": text} for name, text in each.items()]
        for each in heads
    ]
    return (
        pa.array(values, pa.binary()),
        pa.array(keys, pa.binary()),
        pa.array(lists, HEADERS),
        pa.array(times, pa.int64()),
    )


def expected(records: list[tuple], columns: str = "vkht") -> bytes:
    """What the broker's encoder makes of them."""
    values, keys, heads, times = map(list, zip(*records, strict=True))
    return batches.encode(
        Columns(
            values,
            keys if "k" in columns else None,
            heads if "h" in columns else None,
            times if "t" in columns else None,
        )
    ).raw()


@given(st.lists(record, min_size=1, max_size=40), st.data())
def test_a_batch_is_the_same_as_the_encoders(records: list[tuple], data: st.DataObject) -> None:
    """Any records, any slice of them, with any of the optional columns: equal to the last byte."""
    start = data.draw(st.integers(0, len(records) - 1))
    count = data.draw(st.integers(1, len(records) - start))
    there = data.draw(st.sets(st.sampled_from("kht")))
    values, keys, heads, times = (column.slice(start, count) for column in arrow(records))
    batch = encoding.encode(
        values,
        keys if "k" in there else None,
        heads if "h" in there else None,
        times if "t" in there else None,
    )
    assert batch.raw() == expected(records[start : start + count], "".join(there))
    assert check(batch.raw(), message_bytes_max=1 << 20).count == count


def test_bytes_behind_a_null_are_left_out() -> None:
    """Arrow lets a null have bytes; a batch does not."""
    offsets = pa.array([0, 3, 6], pa.int32()).buffers()[1]
    keys = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x02"), offsets, pa.py_buffer(b"oldnew")]
    )
    assert keys.to_pylist() == [None, b"new"]
    batch = encoding.encode(pa.array([b"a", b"b"]), keys)
    assert batch.raw() == expected([(b"a", None, None, 0), (b"b", b"new", None, 0)], "k")


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 50), st.integers(1, 20)
)
def test_a_column_is_cut_into_runs_of_some_bytes(sizes: list[int], limit: int, rows: int) -> None:
    """All items, in order, in runs that are as long as the limits allow."""
    array = pa.array([b"x" * size for size in sizes], pa.binary())
    cuts = encoding.cut(array, limit, rows)
    assert [index for start, count in cuts for index in range(start, start + count)] == list(
        range(len(sizes))
    )
    for start, count in cuts:
        run = sum(sizes[start : start + count])
        assert count == 1 or run <= limit
        assert count <= rows
        following = sizes[start + count : start + count + 1]
        assert not following or count == rows or run + following[0] > limit


def test_a_batch_beyond_the_limit_is_refused() -> None:
    """A single value may be larger than any batch; nothing is joined for it."""
    value = pa.array([bytes(limits.BATCH_BYTES_MAX + 1)], pa.binary())
    with pytest.raises(TooLarge):
        encoding.encode(value)
