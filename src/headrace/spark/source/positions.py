"""Offsets per topic and partition: where a query is, where a batch ends, and which tasks read it.

Everything here is arithmetic over two things, without Spark and without a broker:

- :class:`Positions` are the offsets that Spark keeps in its checkpoint. As JSON they look like Kafka's,
  with one more entry, so that a topic which was deleted and created again is not taken for the old one::

      {"@topics": {"orders": 4711}, "orders": {"0": 23, "1": 0}}

  The end of a query's first batch also holds where the query began (``"@begin"``). Spark does not store
  that: after a crash in the first batch it asks again, and "latest" is another offset by then.
  Topic names cannot hold an ``@``. Topics and partitions are in order, so equal positions are equal
  texts, which is how Spark compares them.
- :class:`TopicExtents` are what a store holds of a topic now: its *incarnation*, and each partition's
  :class:`Extent` (first offset, end, bytes).

A partition that appears while a query runs is read from offset 0. Where the two do not meet, data is
lost: :func:`find_losses` names the offsets of each partition, and why they are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.errors import HeadraceError, InvalidArgument
from headrace.spark.options import wrong
from headrace.spark.source.options import EARLIEST_OFFSET, LATEST_OFFSET, Place

TOPICS = "@topics"
BEGIN = "@begin"
Offsets = dict[str, dict[int, int]]


class DataLoss(HeadraceError, code="data_loss"):
    """Records that a query was to read are gone."""


@dataclass(frozen=True)
class Extent:
    """What a store holds of one partition."""

    start: int
    end: int
    bytes: int = 0
    at: int | None = None
    """The first offset at or after the time that was asked about."""

    @property
    def bytes_per_record(self) -> float:
        return self.bytes / (self.end - self.start) if self.end > self.start else 0.0


@dataclass(frozen=True)
class TopicExtents:
    incarnation: int
    partitions: Mapping[int, Extent]

    @property
    def records(self) -> int:
        return sum(extent.end - extent.start for extent in self.partitions.values())


Known = Mapping[str, TopicExtents]
"""What a store says now, by topic."""


@dataclass
class Positions:
    """An offset for each partition: everything before it has been read."""

    offsets: Offsets = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    begin: Offsets | None = None
    """Where the query began, in the end of its first batch."""

    def as_dict(self) -> dict[str, Any]:
        """For Spark: keys are texts, in order."""
        document: dict[str, Any] = {
            TOPICS: {topic: self.incarnations[topic] for topic in sorted(self.offsets)}
        }
        if self.begin is not None:
            document[BEGIN] = texts_of(self.begin)
        return document | texts_of(self.offsets)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Positions:
        """From a checkpoint, which may have been edited."""
        try:
            incarnations = {topic: int(number) for topic, number in document[TOPICS].items()}
            offsets = _numbers({t: some for t, some in document.items() if not t.startswith("@")})
            begin = _numbers(document[BEGIN]) if BEGIN in document else None
        except (KeyError, AttributeError, TypeError, ValueError):
            raise InvalidArgument(
                f"the checkpoint holds {str(document)[:200]}, which are not positions of Headrace; "
                "was it made by another source? Use another checkpointLocation",
                code="invalid_checkpoint",
            ) from None
        if incarnations.keys() != offsets.keys():
            raise InvalidArgument(
                f"the checkpoint holds {str(document)[:200]}, in which topics and offsets differ",
                code="invalid_checkpoint",
            )
        return cls(offsets, incarnations, begin)

    def since(self, start: Offsets) -> int:
        """How many offsets lie between a start and here."""
        return sum(
            max(offset - start.get(topic, {}).get(number, 0), 0)
            for topic, some in self.offsets.items()
            for number, offset in some.items()
        )

    def get(self, topic: str, partition: int) -> int:
        """The next offset to read; a partition that is not known is read from its beginning."""
        return self.offsets.get(topic, {}).get(partition, 0)

    def put(self, topic: str, partition: int, offset: int) -> None:
        self.offsets.setdefault(topic, {})[partition] = offset


def texts_of(offsets: Offsets) -> dict[str, dict[str, int]]:
    return {
        topic: {str(number): offsets[topic][number] for number in sorted(offsets[topic])}
        for topic in sorted(offsets)
    }


def _numbers(document: Mapping[str, Any]) -> Offsets:
    return {
        topic: {int(number): int(offset) for number, offset in some.items()}
        for topic, some in document.items()
    }


# --- where to begin and to end --------------------------------------------------------------------
def resolve(place: Place, known: Known, group: Mapping[str, Mapping[int, int]]) -> Positions:
    """The offsets of a place that a user named. ``group``: the positions of the subscription.

    Where the place is a time, ``known`` says which offset that is (``Extent.at``).
    """
    positions = Positions()
    offsets = place.offsets or {}
    _check_named(place, place.times or offsets, known)
    beginning = place.option.startswith("starting")
    for topic, state in known.items():
        positions.incarnations[topic] = state.incarnation
        positions.offsets[topic] = {}
        for number, extent in state.partitions.items():
            if place.kind == "earliest":
                offset = extent.start
            elif place.kind == "latest":
                offset = extent.end
            elif extent.at is not None and place.time_of(topic, number) is not None:
                offset = min(extent.at, extent.end)
            elif place.kind == "group":
                offset = group.get(topic, {}).get(number, extent.start)
            else:
                default = EARLIEST_OFFSET if beginning else LATEST_OFFSET
                offset = offsets.get(topic, {}).get(number, default)
                if offset == EARLIEST_OFFSET:
                    offset = extent.start
                elif offset == LATEST_OFFSET:
                    offset = extent.end
                elif offset > extent.end:
                    raise wrong(
                        place.option,
                        f"{topic}/{number} ends at {extent.end}; there is no offset {offset} yet",
                    )
            positions.put(topic, number, offset)
    return positions


def _check_named(place: Place, offsets: Mapping[str, Mapping[int, int]], known: Known) -> None:
    for topic, some in offsets.items():
        if topic not in known:
            raise wrong(place.option, f"{topic!r} is not among the topics that are read")
        for number in some:
            if number not in known[topic].partitions:
                count = len(known[topic].partitions)
                raise wrong(
                    place.option, f"{topic!r} has no partition {number}, only 0 to {count - 1}"
                )


def ends(known: Known) -> Positions:
    """The end of every partition."""
    return Positions(
        {
            topic: {number: extent.end for number, extent in state.partitions.items()}
            for topic, state in known.items()
        },
        {topic: state.incarnation for topic, state in known.items()},
    )


# --- data loss --------------------------------------------------------------------------------------
class Loss(NamedTuple):
    """Offsets ``first`` to ``last`` cannot be read any more."""

    topic: str
    partition: int
    first: int
    last: int
    why: str

    def __str__(self) -> str:
        if self.last < self.first:
            return f"{self.topic}/{self.partition}: {self.why}"
        return f"{self.topic}/{self.partition}: offsets {self.first} to {self.last} {self.why}"


RETENTION = "were deleted by retention before they were read"


def loss_error(losses: Iterable[Loss]) -> DataLoss:
    return DataLoss(
        "records are missing: "
        + "; ".join(map(str, losses))
        + ". To continue without them set failOnDataLoss=false; to prevent this, give the "
        "query a group (retain_unread then keeps its unread records) or the topic a longer retention"
    )


def find_losses(read: Positions, known: Known) -> list[Loss]:
    """Records after these positions that do not exist any more."""
    losses = []
    for topic, some in read.offsets.items():
        state = known.get(topic)
        if state is None:
            losses.append(Loss(topic, min(some, default=0), 0, -1, "the topic was deleted"))
            continue
        if state.incarnation != read.incarnations[topic]:
            losses.append(
                Loss(
                    topic, min(some, default=0), 0, -1,
                    "the topic was deleted and created again; its unread records are gone",
                )
            )  # fmt: skip
            continue
        for number, offset in some.items():
            extent = state.partitions.get(number)
            if extent is None:
                losses.append(Loss(topic, number, 0, -1, "the partition does not exist any more"))
            elif offset < extent.start:
                losses.append(Loss(topic, number, offset, extent.start - 1, RETENTION))
            elif offset > extent.end:
                losses.append(
                    Loss(topic, number, extent.end, offset - 1,
                         "were read once and do not exist any more")
                )  # fmt: skip
        for number, extent in state.partitions.items():
            if number not in some and extent.start > 0:
                losses.append(Loss(topic, number, 0, extent.start - 1, RETENTION))
    return losses


# --- how far one batch goes -------------------------------------------------------------------------
class Waiting(NamedTuple):
    """Records of one partition that may be read now."""

    topic: str
    partition: int
    start: int
    end: int
    weight: float
    """The weight of one record: 1 for rows, its average size for bytes."""

    @property
    def total(self) -> float:
        return (self.end - self.start) * self.weight


def waiting(read: Positions, target: Positions, known: Known, *, by_bytes: bool) -> list[Waiting]:
    found = []
    for topic, some in target.offsets.items():
        renewed = read.incarnations.get(topic) != target.incarnations[topic]
        for number, end in some.items():
            extent = known[topic].partitions.get(number) if topic in known else None
            if extent is None:
                continue
            start = extent.start if renewed else max(read.get(topic, number), extent.start)
            if end > start:
                weight = max(extent.bytes_per_record, 1.0) if by_bytes else 1.0
                found.append(Waiting(topic, number, start, end, weight))
    return found


def limited(target: Positions, parts: list[Waiting], maximum: int) -> Positions:
    """The target, or less, so that a batch reads at most ``maximum`` rows or bytes.

    Every partition gets its share of the maximum, in proportion to its unread records, as in Kafka's
    source. A share of less than a record is one record while there is room, so no partition starves
    and every batch makes progress.
    """
    total = sum(part.total for part in parts)
    if total <= maximum:
        return target
    positions = Positions(
        {topic: dict(some) for topic, some in target.offsets.items()}, dict(target.incarnations)
    )
    left = float(maximum)
    counts = []
    for part in parts:
        count = min(int(maximum * (part.total / total) / part.weight), part.end - part.start)
        counts.append(count)
        left -= count * part.weight
    # The rest after rounding goes to the partitions that are closest to a whole record.
    order = sorted(range(len(parts)), key=lambda n: (counts[n] > 0, -parts[n].total))
    moved = any(counts)
    for number in order:
        part = parts[number]
        if counts[number] < part.end - part.start and (left >= part.weight or not moved):
            counts[number] += 1
            left -= part.weight
            moved = True
    for part, count in zip(parts, counts, strict=True):
        positions.put(part.topic, part.partition, part.start + count)
    return positions


# --- tasks ------------------------------------------------------------------------------------------
class TaskSpan(NamedTuple):
    """What one task reads: offsets ``start`` to ``end - 1`` of a partition."""

    topic: str
    partition: int
    start: int
    end: int
    incarnation: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def spans(start: Positions, end: Positions) -> list[TaskSpan]:
    """The offsets between two positions."""
    if end.begin is not None and start.begin is None:  # it is the first batch, perhaps again
        start = Positions(end.begin, {t: end.incarnations.get(t, 0) for t in end.begin})
    found = []
    for topic, some in end.offsets.items():
        incarnation = end.incarnations[topic]
        renewed = start.incarnations.get(topic, incarnation) != incarnation
        for number, stop in some.items():
            first = 0 if renewed else start.get(topic, number)
            if stop > first:
                found.append(TaskSpan(topic, number, first, stop, incarnation))
    return found


def split(parts: list[TaskSpan], at_least: int | None) -> list[TaskSpan]:
    """Cut spans into pieces of about the same size, until there are ``at_least`` of them."""
    total = sum(part.rows for part in parts)
    if at_least is None or len(parts) >= at_least or not total:
        return parts
    found = []
    for part in parts:
        pieces = max(1, min(part.rows, -(-part.rows * at_least // total)))
        for number in range(pieces):
            first = part.start + part.rows * number // pieces
            last = part.start + part.rows * (number + 1) // pieces
            found.append(part._replace(start=first, end=last))
    return found
