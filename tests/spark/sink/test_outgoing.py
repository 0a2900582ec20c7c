"""From rows to pieces: what each column means, where each row goes, and how large pieces are."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from headrace import limits
from headrace.errors import InvalidArgument, TooLarge
from headrace.log.admission import check
from headrace.log.batch import crc32c
from headrace.spark.sink import outgoing
from headrace.spark.sink.outgoing import Layout, Outgoing, OutgoingPiece, layout_of

STRING, BINARY, INT, TIME = T.StringType(), T.BinaryType(), T.IntegerType(), T.TimestampType()
NOW_MS = 1_700_000_000_000


def schema(**columns: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in columns.items()])


def plan(
    columns: dict[str, T.DataType],
    topic: str | None = "out",
    value_format: str | None = None,
    key_column: str | None = None,
) -> Layout:
    return layout_of(
        schema(**columns), topic=topic, value_format=value_format, key_column=key_column
    )


def headers_of(key: T.DataType, value: T.DataType) -> T.DataType:
    return T.ArrayType(schema(key=key, value=value))


# --- planning -------------------------------------------------------------------------------------
def test_every_column_has_its_meaning() -> None:
    """All that the documentation lists, and what a source brings along besides."""
    layout = plan(
        {
            "value": BINARY, "KEY": STRING, "topic": STRING, "partition": INT, "timestamp": TIME,
            "deliver_at": TIME, "headers": headers_of(STRING, BINARY), "offset": T.LongType(),
            "id": STRING, "timestampType": INT,
        },
        topic=None,
    )  # fmt: skip
    assert layout.columns == {
        "value": "value", "key": "KEY", "topic": "topic", "partition": "partition",
        "timestamp": "timestamp", "deliver_at": "deliver_at", "headers": "headers",
    }  # fmt: skip
    assert not layout.is_json


def test_the_option_topic_goes_before_the_column() -> None:
    """A job that copies a topic carries its source's column, and must not write back into it."""
    assert "topic" not in plan({"value": BINARY, "topic": STRING}).columns


@pytest.mark.parametrize(
    ("columns", "topic", "code", "word"),
    [
        ({"value": BINARY}, None, "missing_topic", "topic"),
        ({"amount": INT}, None, "missing_topic", "topic"),
        ({"value": INT}, "out", "column_type", "'value' is int"),
        ({"value": BINARY, "key": INT}, "out", "column_type", "'key' is int"),
        ({"value": BINARY, "partition": STRING}, "out", "column_type", "'partition'"),
        ({"value": BINARY, "timestamp": T.LongType()}, "out", "column_type", "'timestamp'"),
        ({"value": BINARY, "timestamp": T.TimestampNTZType()}, "out", "column_type", "cast it"),
        ({"value": BINARY, "deliver_at": T.DateType()}, "out", "column_type", "'deliver_at'"),
        ({"value": BINARY, "topic": INT}, None, "column_type", "'topic'"),
        ({"value": BINARY, "headers": STRING}, "out", "column_type", "'headers'"),
        ({"value": BINARY, "headers": T.MapType(INT, STRING)}, "out", "column_type", "map<string"),
        ({"value": BINARY, "headers": headers_of(STRING, INT)}, "out", "column_type", "'headers'"),
        ({"value": BINARY, "amount": INT}, "out", "unknown_column", "'amount'"),
        ({"value": BINARY, "Value": BINARY}, "out", "unknown_column", "two columns"),
        ({"value": BINARY}, "no such topic", "invalid_topic", "no such topic"),
        ({}, "out", "no_columns", "no columns"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_before_anything_runs(
    columns: dict[str, T.DataType], topic: str | None, code: str, word: str
) -> None:
    """With the column's name, what it is, and what to do."""
    with pytest.raises(InvalidArgument) as refused:
        plan(columns, topic)
    assert refused.value.code == code
    assert word in refused.value.message


def test_a_value_is_asked_for_by_name() -> None:
    """valueFormat other than JSON needs the column."""
    with pytest.raises(InvalidArgument) as refused:
        plan({"text": STRING}, value_format="text")
    assert refused.value.code == "missing_value_column"


def test_json_is_for_all_columns() -> None:
    """Without a column value, or when it is asked for; then no column has a meaning of its own."""
    assert plan({"amount": INT, "key": INT}).is_json
    layout = plan({"value": INT, "key": INT, "topic": STRING}, value_format="json")
    assert layout.is_json
    assert layout.columns == {}


def test_the_key_can_be_any_text_column() -> None:
    """keyColumn names it, for JSON too; it stays in the object."""
    layout = plan({"user": STRING, "amount": INT}, key_column="USER")
    assert layout.columns == {"key": "user"}
    with pytest.raises(InvalidArgument) as refused:
        plan({"user": STRING}, key_column="customer")
    assert refused.value.code == "unknown_column"
    with pytest.raises(InvalidArgument) as refused:
        plan({"user": INT}, key_column="user")
    assert refused.value.code == "column_type"


# --- in a task --------------------------------------------------------------------------------------
def one_partition(_: str) -> int:
    return 1


def pieces(
    layout: Layout, *parts: pa.RecordBatch, partitions: Callable[[str], int] = one_partition
) -> list[OutgoingPiece]:
    out = Outgoing(layout, partitions)
    found = [piece for part in parts for piece in out.add(part)]
    found += out.finish()
    for piece in found:  # as the broker does
        check(piece.batch.raw(), message_bytes_max=limits.MESSAGE_BYTES_CEILING)
    assert out.rows == sum(part.num_rows for part in parts)
    assert out.bytes == sum(piece.bytes for piece in found)
    return found


VALUE = Layout("out", False, {"value": "value"})


def layout(*columns: str, topic: str | None = "out") -> Layout:
    return Layout(topic, False, {name: name for name in ("value", *columns)})


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(
        {n: c if isinstance(c, pa.Array) else pa.array(c) for n, c in columns.items()}
    )


def by_place(found: list[OutgoingPiece]) -> dict[Any, list[bytes]]:
    """(topic, partition) -> values, in order."""
    values: dict[Any, list[bytes]] = {}
    for piece in found:
        values.setdefault((piece.topic, piece.partition), []).extend(piece.batch.values())
    return values


def test_small_parts_are_joined_and_large_ones_cut() -> None:
    """A piece has about a megabyte, however the rows come; their order is kept."""
    rows = [b"%06d" % number * 100 for number in range(10_000)]
    parts = [batch(value=rows[n : n + 50]) for n in range(0, 5000, 50)]
    found = pieces(VALUE, *parts, batch(value=rows[5000:]))
    assert by_place(found) == {("out", None): rows}
    sizes = [piece.bytes for piece in found]
    assert all(
        outgoing.ENOUGH_BYTES * 9 // 10 <= size <= 2 * outgoing.PIECE_BYTES for size in sizes[:-1]
    )
    assert len(sizes) < 7


def test_a_large_value_is_a_piece_of_its_own() -> None:
    """It does not drag its neighbours beyond what a batch should be."""
    rows = [b"small", bytes(9 << 20), b"small", bytes(5 << 20)]
    found = pieces(VALUE, batch(value=rows))
    assert [piece.batch.count for piece in found] == [1, 1, 1, 1]
    assert by_place(found) == {("out", None): rows}


def test_a_value_larger_than_any_message_is_an_error_that_names_it() -> None:
    """The topic and the size."""
    with pytest.raises(TooLarge, match=r"topic 'out' has 134217729 bytes") as refused:
        pieces(VALUE, batch(value=[bytes(limits.BATCH_BYTES_MAX + 1)]))
    assert refused.value.code == "message_too_large"


def test_strings_and_all_their_relatives_are_values() -> None:
    """As the bytes of their text; 64-bit offsets too."""
    for kind in (pa.string(), pa.large_string()):
        assert by_place(pieces(VALUE, batch(value=pa.array(["ä", "b"], kind)))) == {
            ("out", None): ["ä".encode(), b"b"]
        }
    found = pieces(VALUE, batch(value=pa.array([b"a", b"b"], pa.large_binary())))
    assert by_place(found) == {("out", None): [b"a", b"b"]}


def test_rows_without_a_value_and_a_key_are_an_error() -> None:
    """Not an empty message that nobody wrote, nor a tombstone of nothing."""
    with pytest.raises(InvalidArgument, match="'value' is null") as refused:
        pieces(VALUE, batch(value=[b"a", None]))
    assert refused.value.code == "null_value"


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_rows_without_a_value_are_tombstones() -> None:
    """Of their key. A row that was read as a tombstone stays one, also without a key."""
    marked = [{"key": "kafka-tombstone", "value": b"true"}, {"key": "a", "value": b"b"}]
    rows = pa.record_batch(
        {
            "value": pa.array([b"x", None, None, b"", None], pa.binary()),
            "key": pa.array([b"1", b"2", None, b"4", b"5"], pa.binary()),
            "headers": pa.array([None, None, marked, None, [marked[1]]], HEADERS),
        }
    )
    [piece] = pieces(layout("key", "headers"), rows)
    tombstone = {"kafka-tombstone": "true"}
    assert piece.batch.nullable() == [b"x", None, None, b"", None]
    assert piece.batch.values() == [b"x", b"", b"", b"", b""]
    assert piece.batch.headers() == [
        None,
        tombstone,
        {**tombstone, "a": "b"},
        None,
        {**tombstone, "a": "b"},
    ]
    [piece] = pieces(layout("key", "headers"), rows.slice(1, 1))  # no row has headers
    assert piece.batch.headers() == [tombstone]


keys = st.none() | st.binary(max_size=3)


@given(st.lists(st.lists(keys, max_size=20), max_size=4), st.integers(1, 5))
def test_a_key_goes_where_every_client_puts_it(parts: list[list[Any]], count: int) -> None:
    """By its hash; without a key, wherever the broker likes. Order is kept in each partition."""
    rows = [
        (b"%d" % number, key) for number, key in enumerate(key for part in parts for key in part)
    ]
    chunks, at = [], 0
    for part in parts:
        some = rows[at : at + len(part)]
        at += len(part)
        chunks.append(
            batch(
                value=pa.array([value for value, _ in some], pa.binary()),
                key=pa.array([key for _, key in some], pa.binary()),
            )
        )
    expected: dict[Any, list[Any]] = {}
    for value, key in rows:
        place = None if key is None or count == 1 else crc32c(key) % count
        expected.setdefault(("out", place), []).append((value, key))
    found: dict[Any, list[Any]] = {}
    for piece in pieces(layout("key"), *chunks, partitions=lambda _: count):
        names = piece.batch.keys() or [None] * piece.batch.count
        pairs = list(zip(piece.batch.values(), names, strict=True))
        found.setdefault((piece.topic, piece.partition), []).extend(pairs)
    assert found == expected


def test_a_topic_is_asked_for_its_partitions_once_and_only_for_keys() -> None:
    """A question for each batch would be one too many; without keys the broker chooses."""
    asked: list[str] = []

    def partitions(topic: str) -> int:
        asked.append(topic)
        return 3

    rows = batch(value=[b"a"], key=[b"k"])
    pieces(layout("key"), rows, rows, partitions=partitions)
    assert asked == ["out"]
    pieces(VALUE, rows, partitions=partitions)
    assert asked == ["out"]


def test_a_row_may_name_its_partition() -> None:
    """Before its key; without a number the key decides, and without both the broker."""
    rows = batch(
        value=[b"a", b"b", b"c", b"d"],
        partition=pa.array([2, None, 2, None], pa.int32()),
        key=[b"k", b"k", None, None],
    )
    found = pieces(layout("partition", "key"), rows, partitions=lambda _: 3)
    by_key = crc32c(b"k") % 3
    expected: dict[Any, list[bytes]] = {("out", 2): [b"a", b"c"], ("out", None): [b"d"]}
    expected.setdefault(("out", by_key), []).append(b"b")
    assert {place: sorted(v) for place, v in by_place(found).items()} == {
        place: sorted(v) for place, v in expected.items()
    }
    with pytest.raises(InvalidArgument, match="-1 in column 'partition'"):
        pieces(layout("partition"), batch(value=[b"a"], partition=[-1]))


def test_a_row_may_name_its_topic() -> None:
    """Rows of many topics are sorted out, in order; one without a topic is an error."""
    rows = batch(value=[b"1", b"2", b"3", b"4"], topic=["b", "a", "b", "b"])
    found = pieces(layout("topic", topic=None), rows, rows)
    assert by_place(found) == {("a", None): [b"2", b"2"], ("b", None): [b"1", b"3", b"4"] * 2}
    with pytest.raises(InvalidArgument) as refused:
        pieces(layout("topic", topic=None), batch(value=[b"1", b"2"], topic=["a", None]))
    assert refused.value.code == "missing_topic"
    with pytest.raises(InvalidArgument) as refused:
        pieces(layout("topic", topic=None), batch(value=[b"1"], topic=["not a name"]))
    assert refused.value.code == "invalid_topic"


def test_many_topics_do_not_fill_the_memory() -> None:
    """When all lanes together hold enough, everything is sent, however small the pieces are."""
    out = Outgoing(layout("topic", topic=None), one_partition)
    rows = batch(value=[bytes(20_000)] * 200, topic=[f"t{number}" for number in range(200)])
    sent = [list(out.add(rows)) for _ in range(10)]
    assert any(sent)
    assert out._held <= outgoing.HELD_BYTES_MAX + rows.nbytes


def test_headers_of_both_shapes() -> None:
    """An array of structs as the source has it, or a map; null is none."""
    shapes = [
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])),
        pa.map_(pa.string(), pa.string()),
    ]
    heads = [{"a": "1", "b": "ä"}, None, {}, {"c": ""}]
    for kind in shapes:
        items: list[Any] = []
        for each in heads:
            if each is None or pa.types.is_map(kind):
                items.append(each and list(each.items()))
            else:
                items.append([{"key": n, "value": v.encode()} for n, v in each.items()])
        if kind == shapes[1]:
            items = pa.array(items, shapes[0]).cast(kind).to_pylist()
        column = pa.array([None, *items], kind).slice(1)
        (piece,) = pieces(layout("headers"), batch(value=[b"x"] * 4, headers=column))
        assert piece.batch.headers() == [{"a": "1", "b": "ä"}, None, None, {"c": ""}]


@pytest.mark.parametrize(
    "item",
    [[{"key": "a", "value": None}], [{"key": None, "value": b"1"}], [None], [{"key": "a", "value": b"\xff"}]],
)  # fmt: skip
def test_headers_that_are_no_texts_are_refused(item: Any) -> None:
    """Null or broken names and values; the column is named."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    with pytest.raises(InvalidArgument, match="column 'headers'") as refused:
        pieces(layout("headers"), batch(value=[b"x"], headers=pa.array([item], kind)))
    assert refused.value.code == "invalid_headers"


def moments(*milliseconds: int | None) -> pa.Array:
    times = [None if ms is None else ms * 1000 for ms in milliseconds]
    return pa.array(times, pa.int64()).cast(pa.timestamp("us", "Europe/Vienna"))


def test_a_row_may_have_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds, whatever the session's zone; a null is now, and no time at all costs nothing."""
    monkeypatch.setattr(outgoing.time, "time_ns", lambda: NOW_MS * 1_000_000)
    rows = batch(value=[b"a", b"b"], timestamp=moments(5, None))
    (piece,) = pieces(layout("timestamp"), rows)
    assert piece.batch.times() == [5, NOW_MS]
    (piece,) = pieces(layout("timestamp"), batch(value=[b"a"], timestamp=moments(None)))
    assert piece.batch.times() is None
    with pytest.raises(InvalidArgument, match="'timestamp' has a time before 1970") as refused:
        pieces(layout("timestamp"), batch(value=[b"a"], timestamp=moments(-1)))
    assert refused.value.code == "invalid_time"


def test_rows_that_wait_for_their_time_go_a_way_of_their_own() -> None:
    """Their times are when they are to be published; the others keep theirs."""
    at = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1000)
    rows = batch(
        value=[b"now", b"later", b"now too", b"later too"],
        key=[b"k", b"l", None, None],
        timestamp=moments(1, 2, 3, 4),
        deliver_at=moments(None, at, None, at + 1),
        topic=["a", "a", "b", "b"],
    )
    found = pieces(layout("key", "timestamp", "deliver_at", "topic", topic=None), rows)
    assert [(p.topic, p.delayed, p.batch.values(), p.batch.times()) for p in found] == [
        ("a", False, [b"now"], [1]),
        ("b", False, [b"now too"], [3]),
        ("a", True, [b"later"], [at]),
        ("b", True, [b"later too"], [at + 1]),
    ]
    plain = pieces(layout("deliver_at"), batch(value=[b"x"], deliver_at=moments(None)))
    assert [piece.delayed for piece in plain] == [False]


def test_all_columns_as_json_with_a_key() -> None:
    """The key is the text of its column."""
    found = pieces(
        Layout("out", True, {"key": "user"}),
        batch(user=["a", None], amount=[1, 2]),
        partitions=lambda _: 1,
    )
    assert [(p.batch.values(), p.batch.keys()) for p in found] == [
        ([b'{"user":"a","amount":1}', b'{"amount":2}'], [b"a", None])
    ]


def test_no_rows_are_no_pieces() -> None:
    """An empty task, or an empty part of one."""
    assert pieces(VALUE, batch(value=pa.array([], pa.binary()))) == []
