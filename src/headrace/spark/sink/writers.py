"""The writers: ``df.write`` and ``df.writeStream.format("headrace")``.

::

    executor: write(rows)      rows ──▶ pieces ──▶ staged in the broker: durable, not visible
                               returns the ids of the pieces, the query and the batch
    driver:   commit(ids, n)   all pieces, in one atomic step, under a name and the number n
              abort(ids)       the pieces are dropped; a commit is not undone

Exactly once, whatever fails:
- A task that fails, or a speculative copy of it, has staged pieces that no commit names. It drops them if
  it can; else the broker drops them, when a later commit of the same query shows that they are left over.
- A driver that dies before the commit repeats the batch: the same rows, new pieces. A driver that dies
  after the commit does so too; the broker knows the name and number, and drops the new pieces.
- The checkpoint's files about the batch are synced before the commit (``checkpoints.py``), so that a
  power cut does not make Spark forget a batch that the broker has committed.
- A commit whose answer is lost is sent again, with the same effect. If Spark then calls ``abort``, that
  does not undo it.

The name is the query's id, which lives in its checkpoint, so a restarted query continues under it. A *new*
checkpoint is a new query: its rows are new rows. With the option ``appId`` the name is that, whatever the
checkpoint; then a batch whose number was committed before is skipped, so ``appId`` is for jobs that run
the same batches again. A batch write has a name of its own and is written once; inside of
``foreachBatch`` give it ``appId`` and ``batchId``, and a repeated batch is not written twice.

Spark tells ``write`` its query and batch through the properties of the task, and ``commit`` reads them
from the messages that ``write`` returned.

``deliveryGuarantee=at-least-once`` publishes from the tasks, without a commit: faster, and a batch that is
repeated is in the topic twice.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pyarrow as pa
from msgspec import Meta
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace import limits
from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError, InvalidArgument
from headrace.model import check_subscription_name
from headrace.publication import Pending
from headrace.spark.checkpoints import sync_offsets
from headrace.spark.connection import CONNECTION, ConnectionOptions, connect
from headrace.spark.options import Given, ValueFormat, wrong
from headrace.spark.sink.outgoing import Layout, Outgoing, OutgoingPiece, layout_of
from headrace.spark.versions import StreamArrowWriter

logger = logging.getLogger("headrace.spark")
UNDER_WAY_BYTES_MAX = 16 << 20
"""Sent by a task and not answered yet."""
UNDER_WAY_MAX = 1000
ABORT_TIMEOUT_S = 10.0
COMMIT_BYTES_PER_S = 10 << 20
"""The least speed at which a broker stores a commit: a large commit gets more time."""
WRITING = (
    *CONNECTION, "topic", "deliveryGuarantee", "appId", "batchId", "valueFormat", "keyColumn",
    "checkpointLocation", "queryName", "redrive", "redriveTo",
)  # fmt: skip


@dataclass(frozen=True)
class SinkOptions:
    """The options of a write. Pickled to executors."""

    connection: ConnectionOptions
    topic: str | None = None
    delivery_guarantee: Literal["exactly-once", "at-least-once"] = "exactly-once"
    app_id: str | None = None
    batch_id: Annotated[int, Meta(ge=0, le=limits.OFFSET_MAX)] | None = None
    value_format: ValueFormat | None = None
    key_column: str | None = None
    checkpoint_location: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SinkOptions:
        given = Given(options)
        if given.text("path") is not None:
            raise wrong("path", "a topic has no path; name it with .option('topic', …)")
        given.check_names(WRITING)
        for name in ("redrive", "redriveTo"):
            if given.text(name) is not None:
                raise wrong(name, "it is for df.write; in a stream use foreachBatch")
        values = given.read(cls)
        if "app_id" in values:
            check_subscription_name(values["app_id"])
        return cls(ConnectionOptions.of(given), **values)

    @property
    def is_exactly_once(self) -> bool:
        return self.delivery_guarantee == "exactly-once"


@dataclass
class Written(WriterCommitMessage):
    """What a task has done, for the driver."""

    pieces: list[str] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    query_id: str | None = None


def batch_writer(options: Mapping[str, Any], schema: Any, overwrite: bool) -> BatchSink:
    """For ``df.write``: every mistake is refused here, before anything runs."""
    found = SinkOptions.of(options)
    if overwrite:
        raise InvalidArgument(
            "a topic cannot be overwritten: it is a log that others read. Use .mode('append'); to begin "
            "anew, delete the topic first",
            code="overwrite_refused",
        )
    if (found.app_id is None) != (found.batch_id is None):
        raise wrong(
            "appId" if found.batch_id is None else "batchId",
            "in a batch write give both appId and batchId, as in foreachBatch, or neither",
        )
    return BatchSink(found, _layout(found, schema), uuid.uuid4().hex)


def stream_writer(options: Mapping[str, Any], schema: Any, overwrite: bool) -> StreamSink:
    """For ``df.writeStream``. In complete mode each trigger appends the whole result, as in Kafka."""
    del overwrite
    found = SinkOptions.of(options)
    if found.batch_id is not None:
        raise wrong("batchId", "it is for batch writes; a stream numbers its batches itself")
    return StreamSink(found, _layout(found, schema), schema)


def _layout(options: SinkOptions, schema: Any) -> Layout:
    return layout_of(
        schema,
        topic=options.topic,
        value_format=options.value_format,
        key_column=options.key_column,
    )


# --- on executors -----------------------------------------------------------------------------------
class _Task:
    """The pieces of one task, staged or published, many at a time, in order."""

    def __init__(self, options: SinkOptions, layout: Layout, commit: tuple[str, int] | None):
        self._options = options
        self._commit = commit
        """The name and number of the commit that it is for."""
        self._out = Outgoing(layout, self._partitions)
        self._client: BrokerClient | None = None
        self._under_way: deque[tuple[OutgoingPiece, Pending[Any]]] = deque()
        self._bytes = 0
        self._pieces: list[str] = []

    def run(self, batches: Iterator[pa.RecordBatch]) -> Written:
        limits.keep_freed_memory()
        try:
            for batch in batches:
                for piece in self._out.add(batch):
                    self._send(piece)
            for piece in self._out.finish():
                self._send(piece)
            while self._under_way:
                self._wait_for_one()
        except BaseException:
            self._give_up()
            with suppress(HeadraceError):  # the first error is the one to tell
                self._close()
            raise
        self._close()
        return Written(self._pieces, self._out.rows, self._out.bytes)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> BrokerClient:
        """Connected with the first row: many tasks of a small batch have no rows."""
        if self._client is None:
            self._client = connect(self._options.connection)
        return self._client

    def _partitions(self, topic: str) -> int:
        return len(self.client.topic_stats(topic, create=True)["partitions"])

    def _send(self, piece: OutgoingPiece) -> None:
        while self._under_way and (
            self._bytes + piece.bytes > UNDER_WAY_BYTES_MAX or len(self._under_way) >= UNDER_WAY_MAX
        ):
            self._wait_for_one()
        sent: Pending[Any]
        if self._options.is_exactly_once:
            name, number = self._commit or (None, None)
            sent = self.client.stage_nowait(
                piece.topic,
                piece.batch,
                partition=piece.partition,
                name=name,
                number=number,
                delayed=piece.delayed,
            )
        elif piece.delayed:
            self._publish_delayed(piece)
            return
        else:
            sent = self.client.publish_batch_nowait(
                piece.topic, piece.batch, partition=piece.partition
            )
        self._bytes += piece.bytes
        self._under_way.append((piece, sent))

    def _publish_delayed(self, piece: OutgoingPiece) -> None:
        """One by one, as the broker keeps them."""
        batch = piece.batch
        keys, headers, times = batch.keys(), batch.headers(), batch.times()
        assert times is not None
        for index, value in enumerate(batch.values()):
            if len(self._under_way) >= UNDER_WAY_MAX:
                self._wait_for_one()
            one = self.client.publish_nowait(
                piece.topic,
                value,
                headers[index] if headers else None,
                key=keys[index] if keys else None,
                partition=piece.partition,
                deliver_at=times[index],
            )
            self._under_way.append((OutgoingPiece(piece.topic, None, batch, True, 0), one))

    def _wait_for_one(self) -> None:
        piece, sent = self._under_way.popleft()
        self._bytes -= piece.bytes
        try:
            answer = sent.result()
        except HeadraceError as error:
            raise type(error)(
                f"rows for topic {piece.topic!r} could not be written: {error.message}",
                code=error.code,
                retryable=error.retryable,
            ) from None
        if isinstance(answer, str):
            self._pieces.append(answer)

    def _give_up(self) -> None:
        """The task has failed: drop the pieces that it staged. Those that remain expire."""
        if self._client is None or not self._options.is_exactly_once:
            return
        for _, sent in self._under_way:
            if sent.done():
                with suppress(HeadraceError):
                    self._pieces.append(sent.result())
        if self._pieces:
            _abort(self._options, self._pieces)


def _local_property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


# --- in the driver ----------------------------------------------------------------------------------
def _commit(options: SinkOptions, name: str, number: int, messages: Sequence[Written]) -> None:
    pieces = [piece for message in messages for piece in message.pieces]
    if not pieces:
        return
    weight = sum(message.bytes for message in messages) / COMMIT_BYTES_PER_S
    patience = options.connection.timeout + weight
    with connect(options.connection, patience=patience) as client:
        first = client.commit_staged(name, number, pieces)
    if not first:
        rows = sum(message.rows for message in messages)
        logger.warning("batch %d of %s was committed before: its %d rows are not written again", number, name, rows)  # fmt: skip


def _abort(options: SinkOptions, pieces: list[str]) -> None:
    """Free the room at once. If that fails, the broker does it by itself, later."""
    timeout = min(options.connection.timeout, ABORT_TIMEOUT_S)
    try:
        with connect(replace(options.connection, timeout=timeout)) as client:
            client.abort_staged(pieces)
    except HeadraceError as error:
        logger.warning("%d staged batches are left to expire: %s", len(pieces), error)


def _answers(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """The messages of tasks that ended; a failed task has none."""
    return [message for message in messages if isinstance(message, Written)]


class _Sink:
    def __init__(self, options: SinkOptions, layout: Layout):
        self._options, self._layout = options, layout

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        pieces = [piece for message in _answers(messages) for piece in message.pieces]
        if pieces:
            _abort(self._options, pieces)


class BatchSink(_Sink, DataSourceArrowWriter):
    """``df.write.format("headrace")``."""

    def __init__(self, options: SinkOptions, layout: Layout, write_id: str):
        super().__init__(options, layout)
        self._name = options.app_id or f"spark-write-{write_id}"
        self._number = options.batch_id or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _Task(self._options, self._layout, (self._name, self._number)).run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._options, self._name, self._number, _answers(messages))


class StreamSink(_Sink, StreamArrowWriter):
    """``df.writeStream.format("headrace")``."""

    def __init__(self, options: SinkOptions, layout: Layout, incoming: StructType):
        super().__init__(options, layout)
        self.incoming = incoming

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        query_id = _local_property("sql.streaming.queryId")
        number = _local_property("streaming.sql.batchId")
        commit = None
        if number is not None and (query_id or self._options.app_id):
            commit = (self._name(query_id), int(number))
        written = _Task(self._options, self._layout, commit).run(iterator)
        written.query_id = query_id
        return written

    def _name(self, query_id: str | None) -> str:
        if self._options.app_id is not None:
            return self._options.app_id
        if query_id is None:
            raise InvalidArgument(
                "Spark does not say which query this is; give the write a name with .option('appId', …)",
                code="unknown_query",
            )
        return f"spark-{query_id}"

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        answers = _answers(messages)
        if any(message.pieces for message in answers):
            name = self._name(next((m.query_id for m in answers if m.query_id), None))
            sync_offsets(self._options.checkpoint_location, batchId)
            _commit(self._options, name, batchId, answers)
