"""Columns as Arrow: the same records that a client would get, whatever their batches look like."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataCorrupt, InvalidArgument
from headrace.log import batch as batches
from headrace.log.batch import Batch
from headrace.log.columns import NO_ID, Columns
from headrace.model import derive_id, topic_hash
from headrace.spark.source import arrow
from headrace.spark.source.arrow import Origin, Part, column_of, grouped

ORIGIN = Origin("orders", 3)
PAIRS = pa.struct([("key", pa.string()), ("value", pa.binary())])
TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(PAIRS),
    "id": pa.string(),
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stamped(
    columns: Columns, base: int, time: int = 1_700_000_000_123, pack: bool = False
) -> Batch:
    """A batch as a broker has stored it."""
    batch = batches.encode(columns)
    batch.base_offset = base
    if columns.times is not None:
        batch.base_timestamp, batch.max_timestamp = columns.times[0], columns.times[-1]
    else:
        batch.base_timestamp = batch.max_timestamp = time
    if pack:
        batch.pack()
    parsed = batches.parse(batch.raw())
    assert parsed is not None
    return parsed


def parts_of(found: list[Batch], start: int, end: int) -> list[Part]:
    """The records at offsets ``start`` to ``end - 1``."""
    bounds = [(max(start - b.base_offset, 0), min(end - b.base_offset, b.count)) for b in found]
    return [
        Part(batch, low, high)
        for batch, (low, high) in zip(found, bounds, strict=True)
        if low < high
    ]


def rows_of(found: list[Batch], start: int, end: int, types: dict[str, pa.DataType] = TYPES) -> Any:
    schema = pa.schema(list(types.items()))
    columns = [column_of(name, type_) for name, type_ in types.items()]
    made = [
        pa.RecordBatch.from_arrays([column(group, ORIGIN) for column in columns], schema=schema)
        for group in grouped(parts_of(found, start, end))
    ]
    for each in made:
        each.validate(full=True)
        assert each.schema == schema
    return [row for each in made for row in each.to_pylist()]


def expected(found: list[Batch], start: int, end: int) -> list[dict[str, Any]]:
    """The same by way of message objects."""
    return [
        {
            "key": message.key,
            "value": message.value,
            "topic": "orders",
            "partition": 3,
            "offset": message.offset,
            "timestamp": EPOCH + timedelta(milliseconds=message.timestamp),
            "headers": [{"key": k, "value": v.encode()} for k, v in message.headers.items()]
            or None,
            "id": str(message.id),
        }
        for batch in found
        for message in batch.messages("orders", 3)
        if start <= message.offset < end
    ]


HEADERS = st.none() | st.dictionaries(
    st.text("abcé", min_size=1, max_size=4), st.text("xyü", max_size=5), max_size=3
)


@st.composite
def some_batches(draw: st.DrawFn) -> list[Batch]:
    found, base = [], draw(st.sampled_from([0, 1, 15, 4090, 65_530, 16**5 - 3, 16**9 - 5]))
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 5) | st.integers(20, 60))

        def column(element: st.SearchStrategy[Any], size: int = count) -> Any:
            return draw(st.none() | st.lists(element, min_size=size, max_size=size))

        times = column(st.integers(0, 2_000_000_000_000))
        columns = Columns(
            draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
            column(st.none() | st.binary(max_size=8)),
            column(HEADERS),
            None if times is None else sorted(times),
            column(st.just(NO_ID) | st.uuids().map(lambda each: each.bytes)),
            column(st.integers(0, 5)),
            column(st.sampled_from([b"", b"group"])),
        )
        found.append(stamped(columns, base, pack=draw(st.booleans())))
        base += count
    return found


@given(some_batches(), st.data())
def test_rows_are_the_messages(found: list[Batch], data: st.DataObject) -> None:
    """All columns, whole batches and parts of them, large and small, compressed or not."""
    low, high = found[0].base_offset, found[-1].end_offset
    start = data.draw(st.integers(low, high))
    end = data.draw(st.integers(start, high))
    assert rows_of(found, start, end) == expected(found, start, end)


def test_other_types_for_the_same_columns() -> None:
    """Texts instead of bytes, milliseconds, and headers as a map; large and small alike."""
    types = {
        "key": pa.string(),
        "value": pa.string(),
        "partition": pa.int64(),
        "timestamp": pa.int64(),
        "headers": pa.map_(pa.string(), pa.string()),
    }
    for count in (2, 40):
        headers = [{"a": "b", "c": "dé"}, *[None] * (count - 1)]
        columns = Columns([b"h\xc3\xa9"] * count, [None, *[b"k"] * (count - 1)], headers)
        rows = rows_of([stamped(columns, 0, 5)], 0, count, types)
        assert rows[0] == {
            "key": None,
            "value": "hé",
            "partition": 3,
            "timestamp": 5,
            "headers": [("a", "b"), ("c", "dé")],
        }
        assert rows[1]["headers"] is None
        assert rows[1]["key"] == "k"


def test_headers_may_have_texts() -> None:
    """As a list whose values are strings."""
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    for count in (1, 40):
        batch = stamped(Columns([b""] * count, None, [{"a": "b"}] * count), 0)
        rows = rows_of([batch], 0, count, {"headers": pairs})
        assert rows == [{"headers": [{"key": "a", "value": "b"}]}] * count


def test_what_is_not_text_does_not_fail() -> None:
    """Bytes that are no UTF-8 are shown as such, and the others as they are."""
    values = [b"fine", b"\xff\xfe", b"h\xc3\xa9"] * 20
    rows = rows_of([stamped(Columns(values), 0)], 0, 60, {"value": pa.string()})
    assert [row["value"] for row in rows[:3]] == ["fine", "��", "hé"]
    assert len(rows) == 60


@pytest.mark.parametrize(
    "first", [0, 1, 14, 255, 4095, 65_535, 65_536, 10**6, 16**7 - 20, 2**40 - 1, 2**59 + 12345]
)
@pytest.mark.parametrize("count", [1, 17, 300, 70_000])
def test_derived_ids(first: int, count: int) -> None:
    """Only the digits that change are written; they are those of the model."""
    texts = bytes(arrow._derived(ORIGIN, first, count)).decode()
    found = [texts[at : at + 36] for at in range(0, len(texts), 36)]
    some = {0, count - 1, count // 2, *range(min(count, 40)), *range(max(count - 40, 0), count)}
    for number in some:
        wanted = derive_id(topic_hash("orders"), 3, first + number)
        assert found[number] == str(wanted)
        assert uuid.UUID(found[number]) == wanted
    assert len(found) == count


# --- sizes ------------------------------------------------------------------------------------------
def sizes(found: list[Batch]) -> list[int]:
    parts = parts_of(found, 0, 1 << 40)
    return [sum(part.rows for part in group) for group in grouped(parts)]


def run_of(*counts: int, size: int = 10) -> list[Batch]:
    found, base = [], 0
    for count in counts:
        found.append(stamped(Columns([b"x" * size] * count), base))
        base += count
    return found


def test_small_batches_are_joined_and_large_ones_are_cut() -> None:
    """To what Spark likes: neither hundreds of rows nor hundreds of thousands."""
    assert sizes(run_of(*[1] * 100)) == [100]
    assert sizes(run_of(*[1000] * 60)) == [25_000, 25_000, 10_000]
    assert sizes(run_of(10, 5_000, 10, 10)) == [10, 5_000, 20]
    assert sizes(run_of(120_000)) == [50_000, 50_000, 20_000]
    assert sizes(run_of(2)) == [2]
    assert sizes([]) == []


def test_bytes_count_as_well_as_rows() -> None:
    """A few large records are enough for a batch."""
    assert sizes(run_of(100, 100, size=10_000)) == [100, 100]  # a megabyte each
    assert max(sizes(run_of(*[10] * 100, size=10_000))) == 420  # as soon as it is 4 MiB
    assert max(sizes(run_of(1000, size=50_000))) <= 168


def test_gaps_are_kept() -> None:
    """Offsets and ids go on behind what was left out."""
    first, second, third = run_of(30, 30, 30)
    rows = rows_of([first, third], 0, 90)
    assert [row["offset"] for row in rows] == [*range(30), *range(60, 90)]
    assert rows == expected([first, third], 0, 90)
    assert second.base_offset == 30


def test_what_was_lost_is_an_error() -> None:
    """The columns of a batch that was given up cannot be made up."""
    with pytest.raises(DataCorrupt, match="offsets 0 to 49"):
        rows_of([batches.lost(0, 50, 5)], 0, 50, {"value": pa.binary()})


@pytest.mark.parametrize(
    ("name", "type_", "complaint"),
    [
        ("valu", pa.binary(), "there is no column 'valu'; there are key, value"),
        ("value", pa.int64(), "column 'value' can be binary or string, not int64"),
        ("offset", pa.int32(), "column 'offset' can be int64"),
        ("headers", pa.string(), "column 'headers' can be array<struct"),
        ("headers", pa.list_(pa.string()), "column 'headers' can be array<struct"),
        ("headers", pa.map_(pa.string(), pa.int32()), "column 'headers' can be array<struct"),
    ],
)
def test_columns_that_are_not_there_are_named(
    name: str, type_: pa.DataType, complaint: str
) -> None:
    """With those that are."""
    with pytest.raises(InvalidArgument) as failed:
        column_of(name, type_)
    assert complaint in str(failed.value)
    assert failed.value.code == "invalid_schema"


@pytest.mark.parametrize("count", [3, 3000])
def test_a_null_value_is_null(count: int) -> None:
    """In small batches and large ones, and only where the value is empty."""
    tombstone = {"kafka-tombstone": "true"}
    values = [b"x", b"", b""] * (count // 3)
    headers = [tombstone, tombstone, None] * (count // 3)
    found = [stamped(Columns(values, headers=headers), 0), stamped(Columns(values), count)]
    rows = [row["value"] for row in rows_of(found, 1, 2 * count, {"value": pa.binary()})]
    assert rows == ([b"x", None, b""] * (count // 3))[1:] + values
    texts = [row["value"] for row in rows_of(found, 1, count, {"value": pa.string()})]
    assert texts == (["x", None, ""] * (count // 3))[1:]
