"""The schema that Spark asks for, and the Arrow columns that fill it, for every ``valueFormat``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from headrace.errors import InvalidArgument
from headrace.spark.options import ValueFormat, wrong
from headrace.spark.source.arrow import (
    NAMES,
    TIMESTAMP_TYPE,
    Column,
    Origin,
    Part,
    binary_values,
    column_of,
    grouped,
)
from headrace.spark.source.options import SourceOptions
from headrace.spark.versions import to_utc_schema

CORRUPT = "_corrupt"
PREFIX = "_"
RECORD: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "headers": ArrayType(StructType().add("key", StringType()).add("value", BinaryType())),
    "id": StringType(),
}
"""The columns of a record and their types. Of a JSON topic they have :data:`PREFIX` in front."""
assert tuple(RECORD) == NAMES


# --- schemas ------------------------------------------------------------------------------------------
def default_schema(options: SourceOptions) -> str:
    """The schema, as DDL, when the user gave none to ``.schema(…)``."""
    if options.value_format == "json":
        fields = _json_fields(options)
    else:
        types = dict(RECORD)
        if options.value_format == "text":
            types["value"] = StringType()
        if not options.include_headers:
            del types["headers"]
        fields = {name: f"{name} {type_.simpleString()}" for name, type_ in types.items()}
        if options.kafka_columns or TIMESTAMP_TYPE in (options.columns or ()):
            fields[TIMESTAMP_TYPE] = f"{TIMESTAMP_TYPE} int"
    if options.columns is not None:
        for name in options.columns:
            if name not in fields:
                raise wrong("columns", f"there is no {name!r}; there are {', '.join(fields)}")
        fields = {name: fields[name] for name in options.columns}
    return ", ".join(fields.values())


def _json_fields(options: SourceOptions) -> dict[str, str]:
    if options.schema is None:
        raise wrong(
            "schema",
            'valueFormat=json needs to know the fields: .schema("id INT, name STRING"), or the '
            "same as option schema",
        )
    fields = {}
    for declaration in _declarations(options.schema):
        found = _NAME.match(declaration)
        if found is None:
            raise wrong("schema", f"{declaration!r} is not a name and a type")
        fields[found["quoted"] or found["plain"]] = declaration
    fields.setdefault(CORRUPT, f"{CORRUPT} STRING")
    if options.columns is not None:  # a record's own columns need not be declared to be chosen
        for name, type_ in RECORD.items():
            fields.setdefault(PREFIX + name, f"{PREFIX}{name} {type_.simpleString()}")
        fields.setdefault(PREFIX + TIMESTAMP_TYPE, f"{PREFIX}{TIMESTAMP_TYPE} int")
    return fields


_NAME = re.compile(r"\s*(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[^\s:`]+))[\s:]+\S")
_TOKEN = re.compile(
    r"`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[(<]|[)>]|,|[^`'\"(<)>,]+"
)


def _declarations(ddl: str) -> list[str]:
    """The fields of a DDL text: cut at the commas that are in no brackets and no quotes."""
    depth, current, found = 0, "", []
    for token in _TOKEN.findall(ddl):
        depth += (token in "(<") - (token in ")>")
        if token == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += token
    return [each for each in (*found, current.strip()) if each]


# --- columns ---------------------------------------------------------------------------------------------
class BatchMaker:
    """Makes Arrow batches of one schema. It is pickled with the reader as its schema alone."""

    def __init__(self, schema: StructType, value_format: ValueFormat):
        if not schema.fields:
            raise InvalidArgument("a schema has at least one column", code="invalid_schema")
        self._struct = schema
        self._value_format = value_format
        self._schema: pa.Schema = to_utc_schema(self._struct)
        self._columns: list[Column | None] = []
        """None: a field of the JSON value."""
        for field in self._schema:
            self._columns.append(self._column(field))
        self._json = None
        if self._value_format == "json":
            from headrace.spark.source.json_values import JsonValues

            fields = [
                field
                for field, column in zip(self._schema, self._columns, strict=True)
                if column is None and field.name != CORRUPT
            ]
            self._json = JsonValues(fields)

    def __reduce__(self) -> tuple[object, ...]:
        return (BatchMaker, (self._struct, self._value_format))

    def _column(self, field: pa.Field) -> Column | None:
        name = field.name
        if self._value_format != "json":
            return column_of(name, field.type)
        if name == CORRUPT:
            if not pa.types.is_string(field.type):
                raise InvalidArgument(f"column {CORRUPT} is a string", code="invalid_schema")
            return None
        own = name.removeprefix(PREFIX)
        if own != name and own in (*NAMES, TIMESTAMP_TYPE):
            return column_of(own, field.type)
        return None

    def batches(
        self, parts: Iterable[Part], topic: str, partition: int
    ) -> Iterator[pa.RecordBatch]:
        origin = Origin(topic, partition)
        for group in grouped(parts):
            if self._json is not None:
                fields, corrupt = self._json.decode(binary_values(group, origin))
                found = iter(fields)
            arrays = [
                column(group, origin)
                if column is not None
                else corrupt if field.name == CORRUPT else next(found)
                for field, column in zip(self._schema, self._columns, strict=True)
            ]  # fmt: skip
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
