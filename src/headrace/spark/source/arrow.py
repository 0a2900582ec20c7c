"""Columnar batches to Arrow, with no work per record.

The log lays its columns out as Arrow does (``log/batch.py``), so a column of a batch *is* an Arrow array
over the fetched bytes: nothing is decoded, and only columns that are joined are copied. Columns that the
log does not store are made all at once: offsets by ``arange``, a partition's number and a topic's name by
repeating bytes, ids by writing only the hexadecimal digits that change from one offset to the next.

Spark wants batches of 2,000 to 50,000 rows; messages that are published one by one are batches of one.
:func:`grouped` joins small batches and cuts large ones. A batch of a few records is taken apart by
builtins, because wrapping it for Arrow would cost more than its records.

The columns, and the types in which they may be asked for::

    key        binary, string                  null: the record has none
    value      binary, string                  null: it is a tombstone
    topic      string
    partition  int, bigint
    offset     bigint
    timestamp  timestamp, bigint (milliseconds)
    timestampType  int                         always 1, as Kafka says it: the log decides on the time
    headers    array<struct<key: string, value: binary>>, map<string, string>     null: none
    id         string                          the record's UUID

As text, bytes that are not UTF-8 become U+FFFD: a record never fails a query.
Rejected: dictionaries for the columns that repeat themselves (Spark refuses them).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InvalidArgument
from headrace.log.batch import HAS_HEADERS, HAS_IDS, HAS_KEYS, HAS_TIMES, STAGED, Batch
from headrace.log.columns import NO_ID
from headrace.model import derive_id, topic_hash

ROWS_ENOUGH = 2_000
BYTES_ENOUGH = 512 << 10
"""A batch of this many rows or bytes is passed on as it is; smaller ones are joined."""
ROWS_MAX = 50_000
BYTES_MAX = 8 << 20
"""A larger one is cut."""
FEW = 24
"""Records up to which a batch is taken apart by builtins. Measured: the costs meet at about 30."""

_LONG = struct.Struct("<q")
_INT = struct.Struct("<i")


class Part(NamedTuple):
    """Records ``start`` to ``stop - 1`` of a batch."""

    batch: Batch
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        return self.batch.base_offset + self.start


class Origin(NamedTuple):
    topic: str
    partition: int


Column = Callable[[list[Part], Origin], pa.Array]
"""Makes one column of the records."""


# --- joining and cutting ----------------------------------------------------------------------------
def grouped(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts in groups of a size that Spark likes."""
    group: list[Part] = []
    rows = size = 0
    for part in parts:
        stored = part.batch.stored_bytes
        if part.rows >= ROWS_ENOUGH or stored >= BYTES_ENOUGH:
            if group:
                yield group
                group, rows, size = [], 0, 0
            yield from ([piece] for piece in _cut(part))
            continue
        group.append(part)
        rows += part.rows
        size += stored
        if rows >= ROWS_MAX // 2 or size >= BYTES_MAX // 2:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _cut(part: Part) -> Iterator[Part]:
    each = part.batch.stored_bytes / part.batch.count
    step = max(1, min(ROWS_MAX, int(BYTES_MAX / max(each, 1.0))))
    for start in range(part.start, part.stop, step):
        yield Part(part.batch, start, min(start + step, part.stop))


def joined(chunks: list[pa.Array], type_: pa.DataType) -> pa.Array:
    if len(chunks) == 1:
        return chunks[0]
    return pa.concat_arrays(chunks) if chunks else pa.array([], type_)


def _collect(
    parts: list[Part],
    type_: pa.DataType,
    large: Callable[[Part], pa.Array],
    small: Callable[[Part], list[Any]],
) -> pa.Array:
    """A column from its parts: large ones as they lie there, runs of small ones as lists."""
    chunks: list[pa.Array] = []
    pending: list[Any] = []
    for part in parts:
        if part.batch.count <= FEW:
            pending += small(part)
            continue
        if pending:
            chunks.append(pa.array(pending, type_))
            pending = []
        chunks.append(large(part))
    if pending:
        chunks.append(pa.array(pending, type_))
    return joined(chunks, type_)


# --- stored columns -----------------------------------------------------------------------------------
def _binary_at(
    plain: pa.Buffer, at: int, count: int, type_: pa.DataType, validity: pa.Buffer | None = None
) -> tuple[pa.Array, int]:
    """The binary column at a place in a body, and where the next one begins."""
    size = 4 * (count + 1)
    base = at + size + (-size & 7)
    total = _INT.unpack_from(plain, at + size - 4)[0]
    buffers = [validity, plain.slice(at, size), plain.slice(base, total)]
    return pa.Array.from_buffers(type_, count, buffers), base + total + (-total & 7)


def binary_values(parts: list[Part], origin: Origin) -> pa.Array:
    def large(part: Part) -> pa.Array:
        plain = pa.py_buffer(part.batch.plain())
        found = _binary_at(plain, 0, part.batch.count, pa.binary())[0]
        found = found.slice(part.start, part.rows)
        nulls = part.batch.nulls(part.start, part.stop)
        if not nulls:
            return found
        is_null = pc.is_in(pa.arange(0, part.rows), pa.array(nulls, pa.int64()))
        return pc.if_else(is_null, pa.scalar(None, pa.binary()), found)

    return _collect(
        parts, pa.binary(), large, lambda part: part.batch.nullable(part.start, part.stop)
    )


def binary_keys(parts: list[Part], origin: Origin) -> pa.Array:
    def large(part: Part) -> pa.Array:
        batch = part.batch
        if not batch.flags & HAS_KEYS:
            return pa.nulls(part.rows, pa.binary())
        plain, at = pa.py_buffer(batch.plain()), batch.column(HAS_KEYS)
        size = (batch.count + 7) // 8
        validity = plain.slice(at, size)
        found = _binary_at(plain, at + size + (-size & 7), batch.count, pa.binary(), validity)[0]
        return found.slice(part.start, part.rows)

    def small(part: Part) -> list[bytes | None]:
        keys = part.batch.keys()
        return [None] * part.rows if keys is None else keys[part.start : part.stop]

    return _collect(parts, pa.binary(), large, small)


def as_text(found: pa.Array) -> pa.Array:
    """Bytes as text, whatever they are."""
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [
            None if each is None else each.decode(errors="replace") for each in found.to_pylist()
        ]
        return pa.array(texts, pa.string())


def _headers(type_: pa.DataType) -> Column:
    """Headers as a list of structs or as a map: both lie in memory alike."""
    is_map = pa.types.is_map(type_)
    pairs = pa.struct([type_.key_field, type_.item_field]) if is_map else type_.value_type
    names_type, texts_type = pairs.field(0).type, pairs.field(1).type

    def large(part: Part) -> pa.Array:
        batch = part.batch
        if not batch.flags & HAS_HEADERS:
            return pa.nulls(part.rows, type_)
        plain, at = pa.py_buffer(batch.plain()), batch.column(HAS_HEADERS)
        size = 4 * (batch.count + 1)
        lists = plain.slice(at, size)
        total = _INT.unpack_from(plain, at + size - 4)[0]
        names, at = _binary_at(plain, at + size + (-size & 7), total, names_type)
        texts, _ = _binary_at(plain, at, total, texts_type)
        children = [pa.Array.from_buffers(pairs, total, [None], children=[names, texts])]
        ends = pa.Array.from_buffers(pa.int32(), batch.count + 1, [None, lists])
        # None at all is null, as Kafka's source has it: the bits of "has some" are the validity.
        some = pc.greater(ends.slice(1), ends.slice(0, batch.count))
        validity = some.buffers()[1]
        found = pa.Array.from_buffers(type_, batch.count, [validity, lists], children=children)
        return found.slice(part.start, part.rows)

    def small(part: Part) -> list[Any]:
        headers = part.batch.headers()
        if headers is None:
            return [None] * part.rows
        some = headers[part.start : part.stop]
        if is_map:
            return [list(each.items()) if each else None for each in some]
        binary = pa.types.is_binary(texts_type)
        return [
            [
                {"key": name, "value": text.encode() if binary else text}
                for name, text in each.items()
            ]
            if each
            else None
            for each in some
        ]

    return lambda parts, origin: _collect(parts, type_, large, small)


def _has_times(batch: Batch) -> bool:
    """Whether each record has a time of its own; of a staged batch that is not yet its time."""
    return batch.flags & (HAS_TIMES | STAGED) == HAS_TIMES


def millis(parts: list[Part], origin: Origin) -> pa.Array:
    """The records' times in milliseconds."""
    pieces: list[Any] = []
    for batch, start, stop in parts:
        if _has_times(batch):
            at = batch.column(HAS_TIMES)
            pieces.append(batch.plain()[at + 8 * start : at + 8 * stop])
        else:
            pieces.append(_LONG.pack(batch.base_timestamp) * (stop - start))
    raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return pa.Array.from_buffers(pa.int64(), len(raw) // 8, [None, pa.py_buffer(raw)])


def timestamps(parts: list[Part], origin: Origin) -> pa.Array:
    if not any(_has_times(part.batch) for part in parts):
        raw = b"".join([_LONG.pack(p.batch.base_timestamp * 1000) * p.rows for p in parts])
        micros = pa.Array.from_buffers(pa.int64(), len(raw) // 8, [None, pa.py_buffer(raw)])
    else:
        micros = pc.multiply(millis(parts, origin), 1000)
    return micros.view(pa.timestamp("us", tz="UTC"))


# --- columns not stored -------------------------------------------------------------------------------
def _runs(parts: list[Part]) -> Iterator[tuple[int, int]]:
    """(first offset, end) of the stretches without a gap."""
    first = end = parts[0].offset
    for part in parts:
        if part.offset != end:
            yield first, end
            first = part.offset
        end = part.offset + part.rows
    yield first, end


def offsets(parts: list[Part], origin: Origin) -> pa.Array:
    return joined([pa.arange(first, end) for first, end in _runs(parts)], pa.int64())


def _rows(parts: list[Part]) -> int:
    return sum(part.rows for part in parts)


LOG_APPEND_TIME = 1


def _constant(type_: pa.DataType, packed: struct.Struct, number: Callable[[Origin], int]) -> Column:
    """A number that is the same in all rows."""

    def column(parts: list[Part], origin: Origin) -> pa.Array:
        rows = _rows(parts)
        raw = _repeated(packed.pack(number(origin)), _room(rows))
        return pa.Array.from_buffers(type_, rows, [None, pa.py_buffer(raw)])

    return column


def topics(parts: list[Part], origin: Origin) -> pa.Array:
    rows = _rows(parts)
    name = origin.topic.encode()
    return _texts(_repeated(name, _room(rows)), len(name), rows)


def _room(rows: int) -> int:
    """How many to make at once, so that few different ones are made and kept."""
    return max(1024, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=16)
def _repeated(piece: bytes, times: int) -> bytes:
    return piece * times


@lru_cache(maxsize=16)
def _even_offsets(width: int, count: int) -> bytes:
    return array("i", range(0, width * (count + 1), width)).tobytes()


def _texts(data: bytes | bytearray, width: int, rows: int) -> pa.Array:
    """Texts of one length each."""
    ends = _even_offsets(width, _room(rows))
    return pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data).slice(0, width * rows)]
    )


# --- ids ----------------------------------------------------------------------------------------------
_ID_CHARS = 36
_HEX = b"0123456789abcdef"
_PLACES = [place for place in range(_ID_CHARS) if place not in (8, 13, 18, 23)]
"""Where the digits stand between the dashes."""
_CYCLE_DIGITS = 4
"""Up to this one, the digits of all offsets repeat so soon that a whole cycle is kept."""


@lru_cache(maxsize=_CYCLE_DIGITS)
def _cycle(digit: int) -> bytes:
    return b"".join([bytes([char]) * 16**digit for char in _HEX])


def _digits(digit: int, first: int, count: int) -> bytes:
    """The hexadecimal digit, counted from the last, of ``count`` consecutive numbers."""
    if digit < _CYCLE_DIGITS:
        cycle = _cycle(digit)
        at = first % len(cycle)
        return (cycle * ((at + count) // len(cycle) + 1))[at : at + count]
    run, end = 16**digit, first + count
    pieces = []
    while first < end:
        stop = min((first // run + 1) * run, end)
        pieces.append(_HEX[first // run % 16 : first // run % 16 + 1] * (stop - first))
        first = stop
    return b"".join(pieces)


def _derived(origin: Origin, first: int, count: int) -> bytearray:
    """The texts of the derived ids of some offsets, one after the other."""
    hashed = topic_hash(origin.topic)
    texts = bytearray(str(derive_id(hashed, origin.partition, first)).encode())
    texts *= count
    digit, last = 0, first + count - 1
    while first >> 4 * digit != last >> 4 * digit:
        assert digit < 15, "no topic has 2**60 records"
        texts[_PLACES[-1 - digit] :: _ID_CHARS] = _digits(digit, first, count)
        digit += 1
    return texts


def _given(part: Part, origin: Origin) -> bytearray:
    """The texts of ids that clients gave, and of the derived ones among them."""
    batch = part.batch
    at = batch.column(HAS_IDS)
    raw = batch.plain()[at + 16 * part.start : at + 16 * part.stop]
    texts = bytearray(b"-" * (_ID_CHARS * part.rows))
    digits = raw.hex().encode()
    for number, place in enumerate(_PLACES):
        texts[place::_ID_CHARS] = digits[number::32]
    if NO_ID in raw:
        derived = _derived(origin, part.offset, part.rows)
        for number in range(part.rows):
            if raw[16 * number : 16 * number + 16] == NO_ID:
                here = slice(_ID_CHARS * number, _ID_CHARS * (number + 1))
                texts[here] = derived[here]
    return texts


def ids(parts: list[Part], origin: Origin) -> pa.Array:
    pieces: list[bytearray] = []
    plain: list[Part] = []

    def derive() -> None:
        for first, end in _runs(plain) if plain else ():
            pieces.append(_derived(origin, first, end - first))
        plain.clear()

    for part in parts:
        if part.batch.flags & HAS_IDS:
            derive()
            pieces.append(_given(part, origin))
        else:
            plain.append(part)
    derive()
    texts = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return _texts(texts, _ID_CHARS, len(texts) // _ID_CHARS)


# --- columns by name ----------------------------------------------------------------------------------
def _is_headers(type_: pa.DataType) -> bool:
    if pa.types.is_map(type_):
        return bool(pa.types.is_string(type_.key_type) and pa.types.is_string(type_.item_type))
    if not pa.types.is_list(type_) or not pa.types.is_struct(type_.value_type):
        return False
    pairs = type_.value_type
    return bool(
        pairs.num_fields == 2
        and [pairs.field(0).name, pairs.field(1).name] == ["key", "value"]
        and pa.types.is_string(pairs.field(0).type)
        and (pa.types.is_binary(pairs.field(1).type) or pa.types.is_string(pairs.field(1).type))
    )


def _text_of(column: Column) -> Column:
    return lambda parts, origin: as_text(column(parts, origin))


_TIMESTAMP = pa.timestamp("us", tz="UTC")
_MAKERS: dict[str, list[tuple[pa.DataType, Column]]] = {
    "key": [(pa.binary(), binary_keys), (pa.string(), _text_of(binary_keys))],
    "value": [(pa.binary(), binary_values), (pa.string(), _text_of(binary_values))],
    "topic": [(pa.string(), topics)],
    "partition": [
        (each, _constant(each, packed, lambda origin: origin.partition))
        for each, packed in ((pa.int32(), _INT), (pa.int64(), _LONG))
    ],
    "offset": [(pa.int64(), offsets)],
    "timestamp": [(_TIMESTAMP, timestamps), (pa.int64(), millis)],
    "id": [(pa.string(), ids)],
    "timestampType": [(pa.int32(), _constant(pa.int32(), _INT, lambda origin: LOG_APPEND_TIME))],
}
NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "headers", "id")
TIMESTAMP_TYPE = "timestampType"
"""A column of Kafka's source that only those get who ask for it."""


def column_of(name: str, type_: pa.DataType) -> Column:
    """The function that makes the column of this name, in this type."""
    if name == "headers":
        if _is_headers(type_):
            return _headers(type_)
        known = "array<struct<key: string, value: binary>> or map<string, string>"
    elif name in _MAKERS:
        for each, maker in _MAKERS[name]:
            if each == type_:
                return maker
        known = " or ".join(str(each) for each, _ in _MAKERS[name])
    else:
        raise InvalidArgument(
            f"there is no column {name!r}; there are {', '.join(NAMES)}", code="invalid_schema"
        )
    raise InvalidArgument(f"column {name!r} can be {known}, not {type_}", code="invalid_schema")
