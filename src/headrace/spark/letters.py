"""Dead letters as a table, and back: the options ``deadLetters`` and ``redrive`` of ``format("headrace")``.

::

    letters = spark.read.format("headrace").option("deadLetters", "email").load()
    fixed = letters.where("reason LIKE '%currency%'").withColumn("value", …)
    fixed.write.format("headrace").option("redrive", "email").mode("append").save()

The table holds the letters that wait when it is read: those that were redriven, edited or purged are no letters any
more. The broker lists them page by page, in one task: it alone knows which ones are done, and who may see them.

A redrive needs no commit of its own. Tasks send corrections to the broker, which publishes each letter and marks it
done, exactly once (``broker/redriving.py``), and leaves out letters that were dealt with. So a task that is repeated, a
job that is killed in the middle, and the same job run again redrive what is left, and nothing twice.

Rejected: staging the corrected messages and one atomic commit, as for topics. All of a job's letters would appear at
once, but the broker would have to mark letters of another topic in the same step, and one letter that cannot be redriven would hold up
all the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from headrace.errors import Conflict, InvalidArgument, SubscriptionNotFound
from headrace.model import DeadLetter
from headrace.spark.connection import CONNECTION, ConnectionOptions, connect
from headrace.spark.options import Given, ValueFormat, wrong
from headrace.spark.source.rows import RECORD
from headrace.spark.versions import to_utc_schema

if TYPE_CHECKING:
    from headrace.client.threads import BrokerClient

logger = logging.getLogger("headrace.spark")
READING = (*CONNECTION, "deadLetters", "valueFormat", "columns")
WRITING = (*CONNECTION, "redrive", "redriveTo")
ORIGIN = StructType()
for _name in ("topic", "partition", "offset", "id", "timestamp"):
    ORIGIN.add(_name, RECORD[_name])
LETTER: dict[str, DataType] = {
    "offset": RECORD["offset"],
    "reason": StringType(),
    "attempts": RECORD["partition"],
    "subscription": StringType(),
    "died_at": RECORD["timestamp"],
    "origin": ORIGIN,
    "key": RECORD["key"],
    "value": RECORD["value"],
    "headers": RECORD["headers"],
}
"""The columns of a letter: ``offset`` identifies it, ``origin`` is the message that died."""
PAGE = 1000
CHUNK_ROWS = 500
CHUNK_BYTES = 1 << 20
"""Corrections that are sent at a time."""


# --- reading --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LetterOptions:
    dead_letters: str
    connection: ConnectionOptions
    value_format: ValueFormat = "binary"
    columns: tuple[str, ...] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LetterOptions:
        given = Given(options)
        for name in ("topic", "path", "history"):
            if given.text(name) is not None:
                raise wrong(
                    name, "deadLetters names a subscription of a broker; give one of the two"
                )
        given.check_names(READING)
        values = given.read(cls)
        if values.get("value_format") == "json":
            raise wrong("valueFormat", "read dead letters as text, and parse them with from_json")
        return cls(connection=ConnectionOptions.of(given), **values)

    def schema(self) -> StructType:
        types = dict(LETTER)
        if self.value_format == "text":
            types["value"] = StringType()
        for name in self.columns or ():
            if name not in types:
                raise wrong("columns", f"there is no {name!r}; there are {', '.join(types)}")
        return StructType([StructField(name, types[name]) for name in self.columns or types])


class LetterReader(DataSourceReader):
    def __init__(self, options: LetterOptions, schema: StructType):
        self._options = options
        types = {field.name: field.dataType for field in schema.fields}
        for name, type_ in types.items():
            text = name == "value" and isinstance(type_, StringType)
            if name not in LETTER or (type_ != LETTER[name] and not text):
                known = StructType([StructField(*each) for each in LETTER.items()])
                raise InvalidArgument(
                    f"dead letters have no column {name} {type_.simpleString()}: their columns are "
                    f"{known.simpleString()}",
                    code="invalid_schema",
                )
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        with closing(connect(self._options.connection)) as client:
            next(self._pages(client), None)  # a wrong name is an error now
        return [InputPartition(0)]

    def _pages(self, client: BrokerClient) -> Iterator[list[DeadLetter]]:
        name, after = self._options.dead_letters, -1
        while True:
            try:
                found = client.dead_letters(name, after=after, limit=PAGE)
            except SubscriptionNotFound:
                if any(each["name"] == name for each in client.subscriptions()):
                    return  # it has given up nothing so far
                raise
            if not found:
                return
            yield found
            after = found[-1].offset

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_utc_schema(self._schema)
        as_text = {
            field.name for field in self._schema.fields if isinstance(field.dataType, StringType)
        }
        with closing(connect(self._options.connection)) as client:
            for letters in self._pages(client):
                rows = [_row(letter) for letter in letters]
                if "value" in as_text:
                    for row in rows:
                        if row["value"] is not None:  # a tombstone has none
                            row["value"] = row["value"].decode(errors="replace")
                yield pa.RecordBatch.from_pylist(rows, schema=schema)


def _row(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    headers = [{"key": name, "value": text.encode()} for name, text in message.headers.items()]
    return {
        "offset": letter.offset,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "subscription": letter.subscription,
        "died_at": letter.timestamp * 1000,
        "origin": {
            "topic": message.topic,
            "partition": message.partition,
            "offset": message.offset,
            "id": str(message.id),
            "timestamp": message.timestamp * 1000,
        },
        "key": message.key,
        "value": message.value,
        "headers": headers or None,
    }


# --- redriving ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RedriveOptions:
    redrive: str
    connection: ConnectionOptions
    redrive_to: Literal["subscription", "topic"] = "subscription"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RedriveOptions:
        given = Given(options)
        given.check_names(WRITING)
        return cls(connection=ConnectionOptions.of(given), **given.read(cls))


@dataclass
class RedrivenLetters(WriterCommitMessage):
    """What became of the letters of a task."""

    rows: int = 0
    redriven: int = 0
    skipped: int = 0
    reason: str | None = None


def redrive_writer(options: Mapping[str, Any], schema: StructType, overwrite: bool) -> RedriveSink:
    """For ``df.write``: every mistake is refused here, before anything runs."""
    if overwrite:
        raise wrong("redrive", "dead letters are redriven with .mode('append')")
    types = {field.name: field.dataType for field in schema.fields}
    if types.get("offset") != LETTER["offset"]:
        raise InvalidArgument(
            "a redrive needs the column offset (bigint), which identifies the dead letter",
            code="unknown_column",
        )
    for name in types:
        if name not in LETTER:
            raise InvalidArgument(
                f"column {name!r} is none of a dead letter: drop it before the redrive",
                code="unknown_column",
            )
    for name in ("value", "key"):
        if not isinstance(types.get(name, BinaryType()), (BinaryType, StringType)):
            raise InvalidArgument(f"column {name!r} is a string or binary", code="column_type")
    if types.get("headers", LETTER["headers"]) != LETTER["headers"]:
        raise InvalidArgument(
            f"column 'headers' is {LETTER['headers'].simpleString()}", code="invalid_headers"
        )
    return RedriveSink(RedriveOptions.of(options), "value" in types)


class RedriveSink(DataSourceArrowWriter):
    """``df.write.format("headrace").option("redrive", …)``."""

    def __init__(self, options: RedriveOptions, has_values: bool):
        self._options = options
        self._has_values = has_values

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RedrivenLetters:
        """On an executor."""
        done = RedrivenLetters()
        chunk: dict[int, dict[str, Any]] = {}
        size = 0
        client: BrokerClient | None = None
        try:
            for batch in iterator:
                for row in batch.to_pylist():
                    correction = self._correction(row)
                    if correction["offset"] in chunk:
                        raise InvalidArgument(
                            f"dead letter {row['offset']} has two rows: a letter is redriven once",
                            code="invalid_argument",
                        )
                    client = client or connect(self._options.connection)
                    chunk[row["offset"]] = correction
                    size += len(row.get("value") or b"")
                    if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                        self._send(client, chunk, done)
                        chunk, size = {}, 0
            if chunk:
                assert client is not None
                self._send(client, chunk, done)
        finally:
            if client is not None:
                client.close()
        return done

    def _correction(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["offset"] is None or (self._has_values and row["value"] is None):
            what = "no offset" if row["offset"] is None else f"no value (letter {row['offset']})"
            raise InvalidArgument(f"a row of a redrive has {what}", code="null_value")
        found = {
            name: row[name] for name in ("offset", "value", "key") if row.get(name) is not None
        }
        if row.get("headers") is not None:
            found["headers"] = {each["key"]: each["value"].decode() for each in row["headers"]}
        return found

    def _send(
        self, client: BrokerClient, chunk: dict[int, dict[str, Any]], done: RedrivenLetters
    ) -> None:
        options = self._options
        answer = client.redrive(
            options.redrive, corrections=list(chunk.values()), to=options.redrive_to
        )
        done.rows += len(chunk)
        done.redriven += answer["redriven"]
        done.skipped += answer["skipped"]
        done.reason = done.reason or answer["reason"]

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything is done by now; this tells what was not."""
        done = [each for each in messages if isinstance(each, RedrivenLetters)]
        redriven, skipped = sum(each.redriven for each in done), sum(each.skipped for each in done)
        others = sum(each.rows for each in done) - redriven - skipped
        if others:
            logger.warning("%d of the dead letters had been dealt with before", others)
        if skipped:
            reason = next(each.reason for each in done if each.reason)
            raise Conflict(
                f"{redriven} dead letters of {self._options.redrive} were redriven, and {skipped} cannot be: {reason}",
                code="not_redriven",
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A redriven letter is redriven: the next run does the rest."""
