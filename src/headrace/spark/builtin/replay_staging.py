"""The part of a replay that runs in tasks: rows into pieces, each for one step.

A task gets rows of one or more partitions, each in order of offsets. It cuts them where a step ends,
stages the pieces for that step (durable, seen by nobody), and answers with their ids. The driver commits
them, step by step. What a failed attempt has staged is dropped by the broker when a later step is
committed; it is given up at once where that can be done.

Spark calls it as an Arrow function over an iterator, which has to give back as many items as it got: all
are null but the last one, which is the list of pieces. (``mapInArrow`` would be the natural way, and
wants pandas.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from headrace import limits
from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError
from headrace.spark.builtin.replay_plan import StepSpan
from headrace.spark.connecting import connect
from headrace.spark.options import Connection
from headrace.spark.sink.outgoing import Layout, Outgoing, Piece

PLACE = ("_topic", "_partition", "_offset")
"""Columns that say where a row was; the others are what is written."""
ANSWER = "array<struct<step:bigint,topic:string,partition:int,first:bigint,number:bigint,piece:string,rows:bigint>>"
_ANSWER = pa.list_(
    pa.struct(
        [
            ("step", pa.int64()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("first", pa.int64()),
            ("number", pa.int64()),
            ("piece", pa.string()),
            ("rows", pa.int64()),
        ]
    )
)
UNDER_WAY_BYTES_MAX = 16 << 20


class Staged(NamedTuple):
    """A piece, and what tells its place among those of its step."""

    step: int
    topic: str
    partition: int
    first: int
    number: int
    piece: str
    rows: int


class Part(NamedTuple):
    """Rows ``begin`` to ``end - 1`` of a batch, which are of one partition and one step."""

    step: int
    topic: str
    partition: int
    first: int
    begin: int
    end: int


def parts(
    topics: Sequence[str],
    partitions: Sequence[int],
    offsets: Sequence[int],
    spans: Mapping[tuple[str, int], Sequence[StepSpan]],
) -> Iterator[Part]:
    """Cut rows by partition and step; what is in no span is left out."""
    begin = 0
    for key, some in groupby(zip(topics, partitions, strict=True)):
        end = begin + sum(1 for _ in some)
        wanted = spans.get(key, ())
        for span in wanted[_first(wanted, offsets[begin]) :]:
            low = bisect_left(offsets, span.start, begin, end)
            high = bisect_left(offsets, span.end, low, end)
            if high > low:
                yield Part(span.step, *key, offsets[low], low, high)
            if high == end:
                break
        begin = end


def _first(spans: Sequence[StepSpan], offset: int) -> int:
    """The first span that ends behind the offset."""
    return bisect_left(spans, offset + 1, key=lambda span: span.end)


class Stage:
    """What a task does; pickled to executors."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        name: str,
        spans: Mapping[tuple[str, int], Sequence[StepSpan]],
        numbered_from: int,
    ):
        self.connection, self.layout = connection, layout
        self.name, self.spans = name, spans
        self.numbered_from = numbered_from
        """The number of step 0's commit."""

    def __call__(self, columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
        limits.keep_freed_memory()
        sender = _Sender(self)
        held = 0
        try:
            for column in columns:
                if held:
                    yield pa.nulls(held, _ANSWER)
                held = len(column)
                sender.add(pa.RecordBatch.from_struct_array(column))
            answers = sender.finish()
        except BaseException:
            sender.give_up()
            raise
        finally:
            sender.close()
        if held:
            yield pa.array([None] * (held - 1) + [[each._asdict() for each in answers]], _ANSWER)


class _Sender:
    """Many pieces under way at a time."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._out = Outgoing(stage.layout, self._partitions)
        self._client: BrokerClient | None = None
        self._at: Part | None = None
        """Where the rows were that have not been sent yet."""
        self._under_way: deque[tuple[Part, Piece, Future[str]]] = deque()
        self._bytes = 0
        self._done: list[Staged] = []

    @property
    def client(self) -> BrokerClient:
        if self._client is None:
            self._client = connect(self._stage.connection)
        return self._client

    def _partitions(self, topic: str) -> int:
        return len(self.client.admin("topic", topic=topic)["partitions"])

    def add(self, batch: pa.RecordBatch) -> None:
        topics, partitions, offsets = (batch.column(name).to_pylist() for name in PLACE)
        rows = batch.select([name for name in batch.schema.names if name not in PLACE])
        for part in parts(topics, partitions, offsets, self._stage.spans):
            at = self._at
            if at is None or part[:3] != at[:3]:
                self._flush()
                self._at = part
            for piece in self._out.add(rows.slice(part.begin, part.end - part.begin)):
                self._send(piece)

    def finish(self) -> list[Staged]:
        self._flush()
        while self._under_way:
            self._wait_for_one()
        return self._done

    def _flush(self) -> None:
        for piece in self._out.finish():
            self._send(piece)

    def _send(self, piece: Piece) -> None:
        assert self._at is not None
        while self._under_way and self._bytes + piece.bytes > UNDER_WAY_BYTES_MAX:
            self._wait_for_one()
        stage = self._stage
        sent = self.client.stage_nowait(
            piece.topic,
            piece.batch,
            partition=piece.partition,
            name=stage.name,
            number=stage.numbered_from + self._at.step,
        )
        self._bytes += piece.bytes
        self._under_way.append((self._at, piece, sent))

    def _wait_for_one(self) -> None:
        part, piece, sent = self._under_way.popleft()
        self._bytes -= piece.bytes
        self._done.append(
            Staged(
                part.step,
                part.topic,
                part.partition,
                part.first,
                len(self._done),
                sent.result(),
                piece.batch.count,
            )
        )

    def give_up(self) -> None:
        """The task has failed: what it has staged is of no use."""
        ids = [each.piece for each in self._done]
        for _, _, sent in self._under_way:
            if sent.done() and not sent.cancelled() and sent.exception() is None:
                ids.append(sent.result())
        if ids and self._client is not None:
            with suppress(HeadraceError):  # then they expire
                self._client.abort_staged(ids)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def staged_rows(rows: Sequence[Any]) -> dict[int, list[Staged]]:
    """What tasks have answered, by step, in the order in which a commit is to have it."""
    found: dict[int, list[Staged]] = {}
    for row in rows:
        each = Staged(*row)
        found.setdefault(each.step, []).append(each)
    for some in found.values():
        some.sort(key=lambda each: (each.topic, each.partition, each.first, each.number))
    return found
