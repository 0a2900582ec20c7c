"""The schema of a topic without a declared one, inferred from some of its records.

The first and the last records of each partition are looked at, not those between: what a topic began
with and what it holds now is what queries are about, and reading all of it would be the query itself.
If most of them are JSON objects, the topic has their fields; else its values are text, or bytes if they
are not UTF-8.

The values of a field decide its type. Whole numbers are BIGINT (DECIMAL(20,0) beyond that), numbers
DOUBLE, true and false BOOLEAN, texts STRING, objects STRUCT, arrays ARRAY. Values of different kinds make
a STRING, which takes any JSON value as its text, so that inference never makes a record bad that was
looked at. An object with more fields than anybody names is a MAP.

Rejected: dates and times out of texts. A text that looks like a time in a thousand records is none in
the next one, and then all of the record would be bad; ``CAST(ordered_at AS TIMESTAMP)`` in the query, or
a declared schema, says what is meant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from headrace.contents import is_text
from headrace.spark.source.arrow import NAMES
from headrace.spark.source.positions import Known, TaskSpan
from headrace.spark.source.rows import CORRUPT, PREFIX, RECORD
from headrace.spark.source.stores import Store, records

SAMPLE_RECORDS = 1_000
SAMPLE_BYTES = 8 << 20
SAMPLE_PARTITIONS = 64
"""Of a wildcard over more partitions, these many are looked at."""
FIELDS_MAX = 1_000
INNER_FIELDS_MAX = 100
"""An object inside with more fields than this is a map: its keys are data."""
DEPTH_MAX = 20
_LONG_MAX = (1 << 63) - 1
TAKEN = frozenset({CORRUPT, *(PREFIX + name for name in NAMES)})
"""Names that no field can have: they are columns of every record."""


# --- looking ------------------------------------------------------------------------------------------
@dataclass
class Sample:
    """Some records of a topic."""

    values: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    total: int = 0
    """How many records there are."""


def take_sample(store: Store, known: Known, count: int = SAMPLE_RECORDS) -> Sample:
    """The first and the last records of the partitions."""
    spans = [
        TaskSpan(topic, number, extent.start, extent.end, state.incarnation)
        for topic, state in known.items()
        for number, extent in state.partitions.items()
        if extent.end > extent.start
    ]
    sample = Sample(total=sum(span.rows for span in spans))
    if len(spans) > SAMPLE_PARTITIONS:
        step = len(spans) / SAMPLE_PARTITIONS
        spans = [spans[int(number * step)] for number in range(SAMPLE_PARTITIONS)]
    share = max(1, count // max(1, len(spans)))
    size = 0
    for span in spans:
        half = max(1, share // 2)
        pieces = [span]
        if span.rows > share:
            # The newest are looked at first: if the bytes run out, the oldest are left out.
            pieces = [
                span._replace(start=span.end - half),
                span._replace(end=span.start + share - half),
            ]
        for piece in pieces:
            for part in records(store, piece, fail_on_data_loss=False):
                found = part.batch.nullable(part.start, part.stop)
                values = [value for value in found if value is not None]
                keys = part.batch.keys()
                sample.values += values
                if keys is not None:
                    sample.keys += [key for key in keys[part.start : part.stop] if key is not None]
                size += sum(map(len, values))
                if size > SAMPLE_BYTES:
                    return sample
    return sample


# --- kinds --------------------------------------------------------------------------------------------
class Kind:
    """The kinds of values that a field has."""

    def __init__(self) -> None:
        self.scalars: set[str] = set()
        self.fields: defaultdict[str, Kind] | None = None
        self.item: Kind | None = None

    def see(self, value: Any, depth: int = 0) -> None:
        if value is None:
            return
        if isinstance(value, bool):
            self.scalars.add("boolean")
        elif isinstance(value, int):
            self.scalars.add("long" if -_LONG_MAX - 1 <= value <= _LONG_MAX else "big")
        elif isinstance(value, float):
            self.scalars.add("double")
        elif isinstance(value, str) or depth >= DEPTH_MAX:
            self.scalars.add("string")
        elif isinstance(value, dict):
            self.fields = defaultdict(Kind) if self.fields is None else self.fields
            for name, inner in value.items():
                self.fields[name].see(inner, depth + 1)
        else:
            self.item = self.item or Kind()
            for inner in value:
                self.item.see(inner, depth + 1)

    def see_kind(self, other: Kind) -> None:
        """As if all that the other has seen had been seen here."""
        self.scalars |= other.scalars
        if other.item is not None:
            self.item = self.item or Kind()
            self.item.see_kind(other.item)
        if other.fields is not None:
            self.fields = defaultdict(Kind) if self.fields is None else self.fields
            for name, inner in other.fields.items():
                self.fields[name].see_kind(inner)

    def type(self) -> DataType:
        if self.fields is not None:
            if self.item is not None or self.scalars:
                return StringType()
            return self._object(self.fields)
        if self.item is not None:
            return StringType() if self.scalars else ArrayType(self.item.type())
        if self.scalars == {"boolean"}:
            return BooleanType()
        if self.scalars == {"long"}:
            return LongType()
        if self.scalars and self.scalars <= {"long", "big"}:
            return DecimalType(20, 0)
        if self.scalars and self.scalars <= {"long", "big", "double"}:
            return DoubleType()
        return StringType()

    @staticmethod
    def _object(fields: dict[str, Kind]) -> DataType:
        names = [name for name in apart_by_case(fields)[0] if name]
        if 0 < len(names) <= INNER_FIELDS_MAX:
            return StructType([StructField(name, fields[name].type()) for name in names])
        every = Kind()
        for inner in fields.values():
            every.see_kind(inner)
        return MapType(StringType(), every.type())


def apart_by_case(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Spark does not tell ``Id`` from ``id``: the first of such names, and the others."""
    kept: dict[str, str] = {}
    others = []
    for name in names:
        if kept.setdefault(name.lower(), name) != name:
            others.append(name)
    return list(kept.values()), others


# --- topics -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """The values of a topic: JSON with these fields, text or bytes."""

    values: Literal["json", "text", "binary"]
    fields: tuple[StructField, ...] = ()
    key_is_text: bool = True
    notes: tuple[str, ...] = ()
    """Notes for the user: fields that are left out, and why."""
    seen: int = 0
    total: int = 0
    is_declared: bool = False

    def __str__(self) -> str:
        if self.values == "json":
            return ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in self.fields)
        return f"value {'string' if self.values == 'text' else 'binary'}"


def infer(sample: Sample) -> Shape:
    """The shape of a topic, inferred from some of its records."""
    seen, total = len(sample.values), sample.total
    key_is_text = all(map(is_text, sample.keys))
    objects = [each for each in map(_object_of, sample.values) if each is not None]
    if 2 * len(objects) < seen or not objects:
        values: Any = "text" if all(map(is_text, sample.values)) else "binary"
        return Shape(values, (), key_is_text, seen=seen, total=total)
    kind = Kind()
    for each in objects:
        kind.see(each)
    assert kind.fields is not None
    fields, notes = _columns(kind.fields)
    if not fields:
        return Shape("text", (), key_is_text, tuple(notes), seen, total)
    if len(objects) < seen:
        count = seen - len(objects)
        notes.append(f"{count} of {seen} records are no JSON objects; see the column {CORRUPT}")
    return Shape("json", tuple(fields), key_is_text, tuple(notes), seen, total)


def _columns(kinds: dict[str, Kind]) -> tuple[list[StructField], list[str]]:
    names, others = apart_by_case(kinds)
    taken = [name for name in names if name.lower() in TAKEN or not name]
    names = [name for name in names if name not in taken]
    notes = [f"field {name!r} is left out: another differs only in case" for name in others]
    notes += [f"field {name!r} is left out: that is the name of another column" for name in taken]
    if len(names) > FIELDS_MAX:
        notes.append(f"{len(names)} fields are too many: only {FIELDS_MAX} are columns")
    return [StructField(name, kinds[name].type()) for name in names[:FIELDS_MAX]], notes


def _object_of(value: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# --- columns ------------------------------------------------------------------------------------------
def columns(shape: Shape) -> StructType:
    """The columns of a topic's view: its fields, or its value, then what every record has."""
    text = StringType()
    if shape.values == "json":
        first = [*shape.fields, StructField(CORRUPT, text)]
    else:
        first = [StructField("value", text if shape.values == "text" else RECORD["value"])]
    own = {name: type_ for name, type_ in RECORD.items() if name != "value"}
    own["headers"] = MapType(text, text)
    if shape.key_is_text:
        own["key"] = text
    return StructType([*first, *(StructField(PREFIX + name, type_) for name, type_ in own.items())])
