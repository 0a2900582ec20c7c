"""Where records are read: a live broker, or a data directory with no broker at all.

A :class:`Store` describes topics (:meth:`~Store.topics`), waits for new records (:meth:`~Store.wait`) and
reads (:meth:`~Store.read`). It is a value: only its options are pickled to executors, never an open file
or connection. A task reads with :func:`records`, which applies ``failOnDataLoss`` to a store's errors, so
that both stores report data loss alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.client.reader import BatchReader
from headrace.client.threads import BrokerClient
from headrace.errors import DataCorrupt, HeadraceError, NotFound, OffsetOutOfRange
from headrace.log.batch import LOST, Batch
from headrace.spark.connection import ConnectionOptions, connect
from headrace.spark.source.arrow import Part
from headrace.spark.source.directory import DirectoryStore
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import (
    RETENTION,
    Extent,
    Known,
    Loss,
    TaskSpan,
    TopicExtents,
    ends,
    loss_error,
)

if TYPE_CHECKING:
    from headrace.spark.history.store import HistoryStore

logger = logging.getLogger("headrace.spark")


class Store(Protocol):
    def names(self) -> list[str]:
        """All topics."""

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        """The topics that match, and their partitions; with a time, also the first offset after it."""

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        """Wait for records that ``known`` does not have; False when the time is up.

        Partitions of ``wanted`` that are not in ``known`` are news, too.
        """

    def read(self, span: TaskSpan) -> Iterator[list[Batch]]:
        """The batches that hold the span's offsets, in order, some at a time."""

    def bounds(self, span: TaskSpan) -> tuple[int, int]:
        """The first offset and the end of the span's partition, now."""

    def close(self) -> None: ...


def open_store(options: SourceOptions) -> BrokerStore | DirectoryStore | HistoryStore:
    if options.history is not None:
        from headrace.spark.history.store import HistoryStore

        return HistoryStore(_open_log(options), options.history)
    return _open_log(options)


def _open_log(options: SourceOptions) -> BrokerStore | DirectoryStore:
    if options.path is not None:
        return DirectoryStore(Path(options.path))
    assert options.connection is not None
    return BrokerStore(options.connection, direct=options.direct_reads)


def existing_topics(
    store: Store,
    wanted: Sequence[str],
    at_ms: int | None = None,
    *,
    unless: tuple[type[HeadraceError], ...] = (NotFound,),
) -> Known:
    """The topics that match; those for which the store raises such an error are left out."""
    found: dict[str, TopicExtents] = {}
    if not wanted:
        return found
    try:
        return store.topics(wanted, at_ms)
    except unless:
        for each in wanted:
            with suppress(*unless):
                found |= store.topics([each], at_ms)
        return found


# --- a live broker ----------------------------------------------------------------------------------
class BrokerStore:
    def __init__(self, connection: ConnectionOptions, *, direct: bool = True):
        self.connection = connection
        self._direct = direct
        self._client: BrokerClient | None = None
        self._reader: BatchReader | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(BrokerStore, direct=self._direct), (self.connection,))

    def close(self) -> None:
        opened = (self._client, self._reader)
        self._client = self._reader = None
        for each in opened:
            if each is not None:
                each.close()

    # --- the driver's part ------------------------------------------------------------------
    @property
    def client(self) -> BrokerClient:
        """Connected; the first time it waits for a broker that is not up yet."""
        if self._client is None:
            self._client = connect(self.connection)
        return self._client

    def names(self) -> list[str]:
        return self.client.topics()

    def topics(self, wanted: Sequence[str], at_ms: int | None = None) -> Known:
        found = self.client.positions(list(wanted), at=at_ms)
        return {
            topic: TopicExtents(
                partitions[0]["incarnation"],
                {
                    part["partition"]: Extent(
                        part["start"], part["end"], part["bytes"], part.get("offset")
                    )
                    for part in partitions
                },
            )
            for topic, partitions in found.items()
        }

    def wait(self, known: Known, wanted: Sequence[str], seconds: float) -> bool:
        topics = list(wanted) or None
        return self.client.wait_for(ends(known).offsets, topics=topics, timeout=seconds)

    # --- an executor's part -----------------------------------------------------------------
    @property
    def reader(self) -> BatchReader:
        if self._reader is None:
            self._reader = BatchReader(
                self.connection.addresses,
                token=self.connection.token,
                user=self.connection.user,
                password=self.connection.password,
                tls=self.connection.tls_context(),
                timeout=self.connection.timeout,
                direct=self._direct,
            )
        return self._reader

    def read(self, span: TaskSpan) -> Iterator[list[Batch]]:
        return self.reader.read(
            span.topic, span.partition, span.start, span.end, incarnation=span.incarnation
        )

    def bounds(self, span: TaskSpan) -> tuple[int, int]:
        return self.reader.bounds(span.topic, span.partition)


# --- how a task reads -----------------------------------------------------------------------------------
def records(store: Store, span: TaskSpan, *, fail_on_data_loss: bool) -> Iterator[Part]:
    """All records of the span. An error, or a warning, names the records that are gone."""

    def lost(first: int, end: int, why: str) -> int:
        end = min(end, span.end)
        loss = Loss(span.topic, span.partition, first, end - 1, why)
        if fail_on_data_loss:
            raise loss_error([loss])
        logger.warning("failOnDataLoss is false, so this is skipped: %s", loss)
        return end

    offset = span.start
    while offset < span.end:
        try:
            for batches in store.read(span._replace(start=offset)):
                for batch in batches:
                    end = min(batch.end_offset, span.end)
                    if end <= offset:
                        continue
                    if batch.base_offset > offset:
                        raise DataCorrupt(
                            f"{span.topic}/{span.partition} continues with offset {batch.base_offset} "
                            f"instead of {offset}"
                        )
                    if batch.flags & LOST:
                        offset = lost(offset, end, "were destroyed and given up by a repair")
                        continue
                    yield Part(batch, offset - batch.base_offset, end - batch.base_offset)
                    offset = end
            return
        except OffsetOutOfRange as error:
            start, end = store.bounds(span)
            if offset < start:
                offset = lost(offset, start, RETENTION)
            elif offset >= end:
                offset = lost(offset, span.end, "existed once and do not exist any more")
            else:
                raise error
        except NotFound as error:
            offset = lost(offset, span.end, f"are gone: {error.message}")
        except DataCorrupt as error:
            offset = lost(
                offset, _after_damage(store, span, offset), f"are damaged: {error.message}"
            )


def _after_damage(store: Store, span: TaskSpan, offset: int) -> int:
    """The first offset after damage at ``offset`` that can be read; the span's end if none can."""

    def first_readable(at: int) -> int | None:
        try:
            batches = next(store.read(span._replace(start=at)), None)
        except DataCorrupt:
            return None
        return max(batches[0].base_offset, offset + 1) if batches else None

    low, step = offset, 1
    found: int | None = None
    while found is None and low + step < span.end:
        found = first_readable(low + step)
        if found is None:
            low, step = low + step, step * 2
    if found is None:
        found = first_readable(span.end - 1)
        if found is None:
            return span.end
    while found - low > 1:  # low cannot be read, found can
        middle = (low + found) // 2
        readable = first_readable(middle)
        low, found = (middle, found) if readable is None else (low, min(readable, found))
    return found


__all__ = [
    "BrokerStore",
    "DirectoryStore",
    "Store",
    "existing_topics",
    "open_store",
    "records",
]
