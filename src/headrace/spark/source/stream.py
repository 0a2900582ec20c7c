"""The streaming reader: where a batch ends, which tasks read it, and what it reports to the broker.

Spark asks in this order, always in one process beside the driver, never at the same time::

    initialOffset()                  a new query: where it begins
    latestOffset(start, limit)       everything up to ``start`` is done; how far may it go?
    partitions(start, end)           the tasks of the batch, also when it is repeated
    commit(end)                      everything up to ``end`` is done

- **Waiting.** When there are no new records, ``latestOffset`` waits for them in the broker. So a new
  record is seen at once, and an idle query asks a few times a second at most. The longer a query is
  idle, the longer it waits. It does not wait while batches run: then another source of the same query
  has new records, and Spark asks one source after the other.
- **group.** When ``latestOffset(start)`` is called, the batch that ended at ``start`` is in Spark's commit
  log. Positions are reported to the broker there, and also in ``commit``, which Spark only calls while it
  builds the next batch. So the lag of an idle query is right, and no record is acknowledged early.
- **latest.** The latest offset is only known when the query starts, so the first batch runs at once, empty
  or not: from then on the checkpoint holds that offset.
- **AvailableNow.** The records that exist at the start are the target; partitions that appear later are
  not part of it.
- **Data loss** is checked for when a batch is planned, and again by every task that reads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from headrace.errors import HeadraceError, NotFound, OffsetOutOfRange
from headrace.spark import versions
from headrace.spark.options import wrong
from headrace.spark.source.chosen import ChosenTopics
from headrace.spark.source.data_source import SpanPartition, read_span
from headrace.spark.source.group import ProgressGroup
from headrace.spark.source.options import Place, SourceOptions
from headrace.spark.source.positions import (
    Known,
    Positions,
    TaskSpan,
    ends,
    find_losses,
    limited,
    loss_error,
    spans,
    split,
    waiting,
)
from headrace.spark.source.rows import BatchMaker
from headrace.spark.source.stores import open_store

logger = logging.getLogger("headrace.spark")
WAIT_S = (0.0, 0.05, 0.1, 0.25)
"""How long to wait for new records, the first, second, … time that there are none."""
GATHER_S = 0.1
"""How often to look whether minOffsetsPerTrigger is reached."""


def refuse_limits(options: SourceOptions) -> None:
    for name, value in (
        ("minOffsetsPerTrigger", options.min_offsets_per_trigger),
        ("maxOffsetsPerTrigger", options.max_offsets_per_trigger),
        ("maxBytesPerTrigger", options.max_bytes_per_trigger),
    ):
        if value is not None:
            raise wrong(name, f"it needs Spark 4.2 or newer, and this is Spark {versions.VERSION}")


class HeadraceStreamReader(DataSourceStreamReader, versions.SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, schema: StructType):
        if options.ending is not None:
            raise wrong(options.ending.option, "it is for a batch; a stream has no end")
        if options.starting is not None and options.starting.kind == "group" and not options.group:
            raise wrong(
                options.starting.option, "to begin where a group is, name it (option group)"
            )
        if not versions.HAS_ADMISSION_CONTROL:
            refuse_limits(options)
        if options.history is not None:
            raise wrong("history", "it is for a batch (spark.read); a stream reads the log")
        self._options = options
        self._rows = BatchMaker(schema, options.value_format)
        self._store = open_store(options)
        self._chosen = ChosenTopics(options, self._store)
        self._known: Known = {}
        self._initial: dict[str, Any] | None = None
        self._idle = 0
        self._last_batch = -math.inf
        """When records were last let through, on the clock of :func:`time.monotonic`."""
        self._target: Positions | None = None
        self._done: dict[str, Any] | None = None
        """The end of the last batch, where Spark does not say it (before 4.2)."""
        self._group = ProgressGroup.of(options, self._store)

    # --- where it begins --------------------------------------------------------------------
    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # Spark asks twice, and means the same place
            place = self._place
            self._known = self._chosen.known()
            if not self._known:
                logger.warning("nothing to read yet: %s", self._chosen.nothing_matches())
            by_group = self._group if place.kind == "group" else None
            group = by_group.positions(self._known) if by_group else None
            self._initial = self._chosen.resolve(place, self._known, group).as_dict()
        return self._initial

    @property
    def _place(self) -> Place:
        return self._options.starting or Place("latest", "startingOffsets")

    # --- how far it may go --------------------------------------------------------------------
    def getDefaultReadLimit(self) -> versions.ReadLimit:
        if self._options.min_offsets_per_trigger is not None:
            return versions.ReadMinRows(self._options.min_offsets_per_trigger)
        if self._options.max_offsets_per_trigger is not None:
            return versions.ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return versions.ReadMaxBytes(self._options.max_bytes_per_trigger)
        return versions.ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._known = self._chosen.known()
        self._target = ends(self._known)

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: versions.ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is None:  # Spark before 4.2 asks without
            start = self._done or self._initial
        if start is None:  # a query that goes on; its next batch says from where
            self._known = self._chosen.existing()
            return ends(self._known).as_dict()
        limit = limit or versions.ReadAllAvailable()
        read = Positions.of(start)
        self._look(read)
        self._tell(read)
        if self._target is None and ends(self._known).offsets == read.offsets:
            self._wait(read)
        target = self._reachable(read)
        if not isinstance(limit, versions.ReadAllAvailable) and self._is_too_little(read, target):
            time.sleep(GATHER_S)
            return start
        for maximum, by_bytes in self._limits(limit):
            parts = waiting(read, target, self._known, by_bytes=by_bytes)
            target = limited(target, parts, maximum)
        is_first = start == self._initial
        if target.offsets == read.offsets and target.incarnations == read.incarnations:
            self._idle += 1
            if not is_first or self._place.kind != "latest":
                return start
        self._last_batch = time.monotonic()
        target.begin = read.offsets if is_first else None
        return target.as_dict()

    def _is_too_little(self, read: Positions, target: Positions) -> bool:
        """Whether to wait for more records (``minOffsetsPerTrigger``). The first batch does not wait."""
        least = self._options.min_offsets_per_trigger
        if least is None or self._target is not None:  # AvailableNow reads what there is
            return False
        if time.monotonic() - self._last_batch >= self._options.max_trigger_delay:
            return False
        parts = waiting(read, target, self._known, by_bytes=False)
        return 0 < sum(part.total for part in parts) < least

    def _look(self, read: Positions) -> None:
        """The topics as they are now. Records that are gone are an error, or a warning."""
        self._known = self._chosen.existing()
        if self._options.fail_on_data_loss:
            self._chosen.check_same(read)
        losses = find_losses(read, self._known)
        if losses and self._options.fail_on_data_loss:
            raise loss_error(losses)
        for loss in losses:
            logger.warning("failOnDataLoss is false, so this is skipped: %s", loss)

    def _wait(self, read: Positions) -> None:
        seconds = WAIT_S[min(self._idle, len(WAIT_S) - 1)]
        try:
            if not seconds or not self._chosen.wait(self._known, seconds):
                return
        except NotFound:
            pass  # a topic was deleted while it waited: that is a change
        self._look(read)

    def _reachable(self, read: Positions) -> Positions:
        """All records; with AvailableNow, those that existed when the query started."""
        now = ends(self._known)
        if self._target is None:
            return now
        found = Positions()
        for topic, some in now.offsets.items():
            if now.incarnations[topic] != self._target.incarnations.get(topic):
                continue  # it came later
            found.incarnations[topic] = now.incarnations[topic]
            found.offsets[topic] = {
                number: min(end, self._target.offsets[topic][number])
                for number, end in some.items()
                if number in self._target.offsets[topic]
            }
        for topic, some in read.offsets.items():  # partitions outside the target do not move
            found.incarnations.setdefault(topic, read.incarnations[topic])
            mine = found.offsets.setdefault(topic, {})
            for number, offset in some.items():
                mine.setdefault(number, offset)
        return found

    def _limits(self, limit: versions.ReadLimit) -> list[tuple[int, bool]]:
        """(maximum, whether it is bytes). Spark knows one limit; the options may name two."""
        if isinstance(limit, versions.ReadAllAvailable):
            return []
        rows, size = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if isinstance(limit, versions.ReadMaxRows):
            rows = limit.max_rows
        elif isinstance(limit, versions.ReadMaxBytes):
            size = limit.max_bytes
        return [(each, by_bytes) for each, by_bytes in ((rows, False), (size, True)) if each]

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return ends(self._known).as_dict() if self._known else None

    # --- tasks --------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        found = self._planned(start, end)
        return [SpanPartition(span) for span in split(found, self._options.min_partitions)]

    def _planned(self, start: dict[str, Any], end: dict[str, Any]) -> list[TaskSpan]:
        """The spans of a batch."""
        if not versions.HAS_ADMISSION_CONTROL:  # then nobody has looked yet whether it can be read
            self._look(Positions.of(start))
            self._done = end
        return spans(Positions.of(start), Positions.of(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(self._store, self._options, self._rows, partition)

    # --- the group ----------------------------------------------------------------------------
    def commit(self, end: dict[str, Any]) -> None:
        self._idle = 0  # a batch is built, perhaps for another source of the query
        self._tell(Positions.of(end))

    def _tell(self, done: Positions) -> None:
        if self._group is None:
            return
        try:
            self._group.advance(done, self._known)
        except HeadraceError as error:
            if not error.retryable and not isinstance(error, (NotFound, OffsetOutOfRange)):
                raise
            # The group then keeps more than it must, which does no harm, and moves with the next
            # batch. If the cause is data loss, the next look at the topics reports it.
            logger.warning("the group %s was not moved: %s", self._options.group, error)

    def stop(self) -> None:
        self._store.close()
