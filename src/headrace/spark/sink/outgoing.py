"""From a DataFrame's rows to the pieces that are sent to the broker.

::

    record batch ──▶ values, keys, headers, times ──▶ by topic and partition ──▶ lanes ──▶ pieces
                     (JSON: all columns as one)        (only where there is more than one)

A :class:`Layout` says what each column of the DataFrame means. It is made once, when the write is
planned, and every mistake in a schema is refused there. :class:`Outgoing` lives in one task. It keeps the
order of the rows of each partition, joins small batches and cuts large ones, so that a piece has about a
megabyte, which suits the broker and its readers.

Where a row goes:
- The option ``topic`` is for all rows and wins over a column ``topic``, as in Spark's Kafka sink: a job
  that copies one topic into another carries the column of its source, and must not write back into it.
- A row with a partition goes there; else one with a key goes where every Headrace client puts that key
  (``partitioning.py``); else the broker takes its partitions in turn, one piece after the other.
- Only topics with keys are asked for their number of partitions, once in a task.

Nothing here works record by record but the hash of each *distinct* key.

A null value with a key is a tombstone (``contents.py``). Without a key it says nothing, and is more likely a
mistake of the query: it is an error that names the column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace import limits
from headrace.contents import TOMBSTONE_HEADER, TOMBSTONE_TEXT
from headrace.errors import InvalidArgument, TooLarge
from headrace.log.batch import Batch
from headrace.model import check_topic_name
from headrace.partitioning import partition_of_key
from headrace.spark import json_texts
from headrace.spark.sink import encoding

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
PIECE_BYTES = limits.BATCH_BYTES_TARGET
ENOUGH_BYTES = PIECE_BYTES * 3 // 4
"""A lane of this size is sent and does not wait for more: joining two parts copies both."""
PIECE_ROWS_MAX = 50_000
"""Records of ten bytes should not make batches of a hundred thousand."""
HELD_BYTES_MAX = 32 << 20
"""For all lanes of a task together; many topics and partitions would take many megabytes."""
ANY = -1
"""The broker chooses the partition."""

_TEXT_OR_BYTES = ("string", "char", "varchar", "binary")
_TEXT = ("string", "char", "varchar")
_MEANINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "value": (_TEXT_OR_BYTES, "string or binary"),
    "key": (_TEXT_OR_BYTES, "string or binary"),
    "topic": (_TEXT, "string"),
    "partition": (("integer", "short", "byte"), "int"),
    "timestamp": (("timestamp",), "timestamp"),
    "deliver_at": (("timestamp",), "timestamp"),
    "headers": ((), "array<struct<key:string,value:binary>> or map<string,string>"),
}
_OF_A_SOURCE = ("offset", "id", "timestamptype")
"""Columns that a source of ours or Kafka's has and that mean nothing in another topic."""


@dataclass(frozen=True)
class Layout:
    """What the columns of a DataFrame mean. Pickled to executors."""

    topic: str | None
    """For all rows; None: the column says it."""
    is_json: bool
    columns: dict[str, str]
    """value, key, topic, … -> the name of the column."""


def layout_of(
    schema: Any, *, topic: str | None, value_format: str | None, key_column: str | None
) -> Layout:
    """How a DataFrame of this Spark schema is written; :class:`InvalidArgument` says why it cannot be."""
    fields = {field.name: field.dataType for field in schema.fields}
    by_name = _by_lower_name(list(fields))
    is_json = value_format == "json" or (value_format is None and "value" not in by_name)
    columns: dict[str, str] = {}
    if is_json:
        if not fields:
            raise InvalidArgument("the DataFrame has no columns to write", code="no_columns")
        for name, data_type in fields.items():
            json_texts.check(name, data_type)
        if topic is None:
            raise InvalidArgument(
                "all columns are written as JSON, and no option says where to; add "
                ".option('topic', …), or give the DataFrame a column 'value' and a column 'topic'",
                code="missing_topic",
            )
    else:
        columns = _meanings(by_name, fields)
        if topic is None and "topic" not in columns:
            raise InvalidArgument(
                "nothing says where the rows go; add .option('topic', …), or a column 'topic'",
                code="missing_topic",
            )
        if topic is not None:
            columns.pop("topic", None)
    if key_column is not None:
        if key_column.lower() not in by_name:
            raise InvalidArgument(
                f"the option keyColumn names {key_column!r}, and the DataFrame has only "
                f"{', '.join(fields)}",
                code="unknown_column",
            )
        columns["key"] = by_name[key_column.lower()]
        _check_type("key", columns["key"], fields[columns["key"]])
    if topic is not None:
        check_topic_name(topic)
    return Layout(topic, is_json, columns)


def _by_lower_name(names: list[str]) -> dict[str, str]:
    """Spark ignores the case of column names, but allows two that differ only by case."""
    found: dict[str, str] = {}
    for name in names:
        if name.lower() in found:
            raise InvalidArgument(
                f"the DataFrame has two columns {name!r}; drop or rename one", code="unknown_column"
            )
        found[name.lower()] = name
    return found


def _meanings(by_name: dict[str, str], fields: dict[str, Any]) -> dict[str, str]:
    columns: dict[str, str] = {}
    if "value" not in by_name:
        raise InvalidArgument(
            f"there is no column 'value' among {', '.join(fields)}; name the one to write 'value', or "
            "write all of them with .option('valueFormat', 'json')",
            code="missing_value_column",
        )
    for lower, name in by_name.items():
        if lower in _MEANINGS:
            _check_type(lower, name, fields[name])
            columns[lower] = name
        elif lower not in _OF_A_SOURCE:
            raise InvalidArgument(
                f"column {name!r} has no place in a message; the columns are "
                f"{', '.join(_MEANINGS)}. Drop it, or write all columns with "
                ".option('valueFormat', 'json')",
                code="unknown_column",
            )
    return columns


def _check_type(meaning: str, name: str, data_type: Any) -> None:
    kinds, wanted = _MEANINGS[meaning]
    good = _is_headers(data_type) if meaning == "headers" else data_type.typeName() in kinds
    if not good:
        hint = (
            "; .option('valueFormat', 'json') writes all columns as JSON"
            if meaning == "value"
            else ""
        )
        raise InvalidArgument(
            f"column {name!r} is {data_type.simpleString()}, and as the {meaning} of a message it must "
            f"be {wanted}; cast it{hint}",
            code="column_type",
        )


def _is_headers(data_type: Any) -> bool:
    kind = data_type.typeName()
    if kind == "map":
        pair = (data_type.keyType.typeName(), data_type.valueType.typeName())
    elif kind == "array" and data_type.elementType.typeName() == "struct":
        fields = data_type.elementType.fields
        if [field.name.lower() for field in fields] != ["key", "value"]:
            return False
        pair = (fields[0].dataType.typeName(), fields[1].dataType.typeName())
    else:
        return False
    return pair[0] in _TEXT and pair[1] in _TEXT_OR_BYTES


# --- in a task --------------------------------------------------------------------------------------
@dataclass(slots=True)
class OutgoingPiece:
    """One batch on its way to one partition."""

    topic: str
    partition: int | None
    """None: the broker takes its partitions in turn."""
    batch: Batch
    delayed: bool
    """The times of the batch say when each record is to be published."""
    bytes: int
    """Of the values."""


@dataclass(slots=True)
class _OutgoingLane:
    """Rows for one partition that wait until they make a piece."""

    parts: list[pa.RecordBatch] = field(default_factory=list)
    bytes: int = 0
    rows: int = 0


class Outgoing:
    """The rows of one task, turned into pieces."""

    def __init__(self, layout: Layout, partitions: Callable[[str], int]):
        self._layout = layout
        self._ask_partitions = partitions
        self._partitions: dict[str, int] = {}
        self._lanes: dict[tuple[str, int, bool], _OutgoingLane] = {}
        self._held = 0
        self.rows = 0
        self.bytes = 0
        """Of the values, up to now."""

    def add(self, batch: pa.RecordBatch) -> Iterator[OutgoingPiece]:
        """Take rows; yields the pieces that are large enough to be sent."""
        if not batch.num_rows:
            return
        records = self._records(batch)
        self.rows += batch.num_rows
        self.bytes += encoding.data_bytes(records.column(0))
        due = self._column(batch, "deliver_at")
        topics = self._column(batch, "topic")
        numbers = self._column(batch, "partition")
        if due is None or due.null_count == len(due):
            yield from self._split_topics(records, topics, numbers, False)
            return
        # Rows that are published later are kept apart from the others.
        times = _as_milliseconds(self._layout.columns["deliver_at"], due)
        for delayed, rows in _grouped(due.is_valid(), records, topics, numbers, times):
            some, topics, numbers, time_ms = rows
            if delayed:
                # Its time is when it is published: a time of its own has no meaning then.
                fields = {n: some.column(n) for n in some.schema.names if n != "time"}
                some = pa.record_batch({**fields, "time": time_ms})
            yield from self._split_topics(some, topics, numbers, delayed)

    def finish(self) -> Iterator[OutgoingPiece]:
        """Yields the rest."""
        for where, lane in self._lanes.items():
            if lane.parts:
                yield from self._send(where, lane)

    # --- columns ----------------------------------------------------------------------------
    def _column(self, batch: pa.RecordBatch, meaning: str) -> pa.Array | None:
        name = self._layout.columns.get(meaning)
        return None if name is None else batch.column(name)

    def _records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """value, and if the rows have them: key, headers, time."""
        if self._layout.is_json:
            values = json_texts.LIKE_SPARK.rows(batch)
        else:
            values = self._column(batch, "value")
        assert values is not None
        columns = {"value": _as_binary(values)}
        keys = self._column(batch, "key")
        if keys is not None and keys.null_count < len(keys):
            columns["key"] = _as_binary(keys)
        headers = self._column(batch, "headers")
        if headers is not None and headers.null_count < len(headers):
            columns["headers"] = _as_headers(self._layout.columns["headers"], headers)
        if values.null_count:
            columns |= self._tombstones(columns)
        times = self._column(batch, "timestamp")
        if times is not None and times.null_count < len(times):
            now = pa.scalar(time.time_ns() // 1_000_000, pa.int64())
            milliseconds = _as_milliseconds(self._layout.columns["timestamp"], times)
            columns["time"] = pc.fill_null(milliseconds, now)
        return pa.record_batch(columns)

    def _tombstones(self, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """Values and headers of rows of which some have no value."""
        values, keys = columns["value"], columns.get("key")
        headers = columns.get("headers")
        if headers is None:
            headers = pa.nulls(len(values), HEADERS)
        rows = pc.indices_nonzero(values.is_null())
        order, keyless = list(range(len(values))), 0
        marked: list[list[dict[str, str]]] = []
        for at, own in zip(rows.to_pylist(), headers.take(rows).to_pylist(), strict=True):
            order[at] = len(values) + len(marked)
            named = {each["key"]: each["value"] for each in own or ()}
            if TOMBSTONE_HEADER not in named and (keys is None or not keys[at].is_valid):
                keyless += 1
            named[TOMBSTONE_HEADER] = TOMBSTONE_TEXT
            marked.append([{"key": name, "value": text} for name, text in named.items()])
        if keyless:
            name = self._layout.columns["value"]
            raise InvalidArgument(
                f"{keyless} of {len(values)} rows have no value (column {name!r} is null) and no key. A "
                "null value is a tombstone, which needs a key; filter such rows out, or give them a "
                "value with coalesce",
                code="null_value",
            )
        both = pa.concat_arrays([headers, pa.array(marked, headers.type)])
        return {"value": pc.fill_null(values, b""), "headers": both.take(pa.array(order))}

    # --- where to ---------------------------------------------------------------------------
    def _split_topics(
        self,
        records: pa.RecordBatch,
        topics: pa.Array | None,
        numbers: pa.Array | None,
        delayed: bool,
    ) -> Iterator[OutgoingPiece]:
        if topics is None:
            assert self._layout.topic is not None
            yield from self._place(self._layout.topic, records, numbers, delayed)
            return
        if topics.null_count:
            raise InvalidArgument(
                f"{topics.null_count} of {len(topics)} rows have no topic (column "
                f"{self._layout.columns['topic']!r} is null); filter them out, or name one for all rows "
                "with .option('topic', …)",
                code="missing_topic",
            )
        for name, (some, where) in _grouped(topics, records, numbers):
            yield from self._place(check_topic_name(name), some, where, delayed)

    def _place(
        self, topic: str, records: pa.RecordBatch, numbers: pa.Array | None, delayed: bool
    ) -> Iterator[OutgoingPiece]:
        places = self._places(topic, records, numbers, delayed)
        if places is None:
            yield from self._put(topic, ANY, records, delayed)
            return
        for number, (some,) in _grouped(places, records):
            yield from self._put(topic, number, some, delayed)

    def _places(
        self, topic: str, records: pa.RecordBatch, numbers: pa.Array | None, delayed: bool
    ) -> pa.Array | None:
        """The partition of each row; None: the broker chooses."""
        # The broker chooses the partition of a key when the record's time has come.
        by_key = None if delayed else self._by_key(topic, records)
        if numbers is None or numbers.null_count == len(numbers):
            return by_key
        lowest, highest = (x.as_py() for x in pc.min_max(numbers).values())
        if lowest < 0 or highest >= limits.PARTITIONS_PER_TOPIC_MAX:
            wrong = lowest if lowest < 0 else highest
            raise InvalidArgument(
                f"a row for topic {topic!r} has {wrong} in column "
                f"{self._layout.columns['partition']!r}; partitions are counted from 0",
                code="invalid_partition",
            )
        numbers = numbers.cast(pa.int32())
        if numbers.null_count:
            numbers = pc.coalesce(numbers, pa.scalar(ANY, pa.int32()) if by_key is None else by_key)
        return numbers

    def _by_key(self, topic: str, records: pa.RecordBatch) -> pa.Array | None:
        if "key" not in records.schema.names:
            return None
        count = self._partitions.get(topic)
        if count is None:
            count = self._partitions[topic] = self._ask_partitions(topic)
        if count == 1:
            return None
        coded = records.column("key").dictionary_encode()
        hashed = [partition_of_key(key, count) for key in coded.dictionary.to_pylist()]
        return pc.fill_null(pa.array(hashed, pa.int32()).take(coded.indices), ANY)

    # --- lanes ------------------------------------------------------------------------------
    def _put(
        self, topic: str, partition: int, records: pa.RecordBatch, delayed: bool
    ) -> Iterator[OutgoingPiece]:
        where = (topic, partition, delayed)
        lane = self._lanes.get(where)
        if lane is None:
            lane = self._lanes[where] = _OutgoingLane()
        elif lane.parts and lane.parts[0].schema != records.schema:
            yield from self._send(where, lane)  # no row of it had a key so far, or headers
        size = records.nbytes
        lane.parts.append(records)
        lane.bytes += size
        lane.rows += records.num_rows
        self._held += size
        if lane.bytes >= ENOUGH_BYTES or lane.rows >= PIECE_ROWS_MAX:
            yield from self._send(where, lane)
        elif self._held > HELD_BYTES_MAX:
            # All of them: a part holds on to the whole record batch that it was cut from.
            yield from self.finish()

    def _send(self, where: tuple[str, int, bool], lane: _OutgoingLane) -> Iterator[OutgoingPiece]:
        topic, partition, delayed = where
        records = lane.parts[0] if len(lane.parts) == 1 else pa.concat_batches(lane.parts)
        self._held -= lane.bytes
        lane.parts, lane.bytes, lane.rows = [], 0, 0
        names = records.schema.names
        values = records.column("value")
        for start, count in encoding.cut(values, 2 * PIECE_BYTES, PIECE_ROWS_MAX):
            some = values.slice(start, count)
            columns = {n: records.column(n).slice(start, count) for n in names}
            size = encoding.data_bytes(some)
            try:
                batch = encoding.encode(
                    some, columns.get("key"), columns.get("headers"), columns.get("time")
                )
            except TooLarge:
                raise TooLarge(
                    f"a row for topic {topic!r} has {size} bytes, and no message may have more than "
                    f"{limits.MESSAGE_BYTES_CEILING}; keep such data elsewhere and send where it is",
                    code="message_too_large",
                ) from None
            yield OutgoingPiece(
                topic, None if partition == ANY else partition, batch, delayed, size
            )


def _grouped(column: pa.Array, *others: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Each value of a column, and its rows of the others (batches, columns or None), in their order."""
    coded = column.dictionary_encode()
    values = coded.dictionary.to_pylist()
    if len(values) == 1:
        yield values[0], others
        return
    order = pc.sort_indices(coded.indices)
    counted = pc.value_counts(coded.indices)
    sizes = dict(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
    start = 0
    for code, value in enumerate(values):
        rows = order.slice(start, sizes[code])
        yield value, [None if each is None else each.take(rows) for each in others]
        start += sizes[code]


def _as_binary(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_binary(kind):
        return column
    if pa.types.is_string(kind):
        return column.view(pa.binary())
    return column.cast(pa.binary())


def _as_milliseconds(name: str, column: pa.Array) -> pa.Array:
    found = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    lowest, highest = (x.as_py() for x in pc.min_max(found).values())
    if lowest is not None and (lowest < 0 or highest > limits.TIMESTAMP_MS_MAX):
        raise InvalidArgument(
            f"column {name!r} has a time before 1970 or beyond the year 200000; messages cannot be "
            "dated so",
            code="invalid_time",
        )
    return found


def _as_headers(name: str, column: pa.Array) -> pa.Array:
    """As a list of struct of two strings."""
    if pa.types.is_map(column.type):
        offsets, keys, texts = column.offsets, column.keys, column.items
    else:
        items = column.values
        offsets, (keys, texts) = column.offsets, items.flatten()
        if items.null_count:
            raise _bad_headers(name, "has a null among the headers of a row")
    used = slice(offsets[0].as_py(), offsets[-1].as_py())
    for what, part in (("name", keys), ("value", texts)):
        if part[used].null_count:
            raise _bad_headers(name, f"has a header whose {what} is null")
    try:
        strings = [part.cast(pa.string()) for part in (keys, texts)]
    except pa.ArrowInvalid:
        raise _bad_headers(name, "has a header value that is not UTF-8 text") from None
    entries = pa.StructArray.from_arrays(strings, names=["key", "value"])
    if not column.null_count:
        return pa.ListArray.from_arrays(offsets, entries)
    # Arrow takes a mask only with offsets that are no slice: adding nothing makes them anew.
    return pa.ListArray.from_arrays(pc.add(offsets, 0), entries, mask=column.is_null())


def _bad_headers(name: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"column {name!r} {what}, and headers are texts; filter such rows out, or put the data into the "
        "value",
        code="invalid_headers",
    )
