"""Where partitions begin and end, waiting until one has more, and moving a subscription along.

These serve readers that keep their own position, such as a Spark query with its checkpoint. One request
tells where all partitions of many topics begin and end, one waits for news in any of them, and one says
how far the reader has come, so that a subscription of its name shows the lag and retains unread messages.

``positions`` travel as ``{topic: {partition: offset}}``. Their declaration (``operations/arguments.py``)
checks them as a whole before anything is done with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition, Topic
from headrace.broker.topics import Topics
from headrace.errors import Done, InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.log.interface import ReadPending
from headrace.model import check_pattern, check_topic_name, is_pattern, pattern_matches
from headrace.operations.results import PartitionPosition

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

Positions = Mapping[str, Mapping[int, int]]
May = Callable[[str], bool]
"""Whether the caller may read a topic."""


def all_of_them(topic: str) -> bool:
    return True


def matching(engine: Engine, topics: object, may: May = all_of_them) -> list[Topic]:
    """The topics that a name, a wildcard or a list of these stands for, in the order of their names.

    A named topic has to exist; a wildcard may match nothing yet. A wildcard never matches internal
    topics, and only what the caller ``may`` read.
    """
    wanted = [topics] if isinstance(topics, str) else topics
    if not isinstance(wanted, (list, tuple)) or not wanted:
        raise InvalidArgument(
            f"topics are a name, a wildcard, or a list of these, not {topics!r}",
            code="invalid_topic",
        )
    found: dict[str, Topic] = {}
    for name in wanted:
        if isinstance(name, str) and is_pattern(name):
            check_pattern(name)
            found |= {
                t.name: t for t in engine.topics if pattern_matches(name, t.name) and may(t.name)
            }
        else:
            found[check_topic_name(name, internal=True)] = engine.topics.find(name)
    return [found[name] for name in sorted(found)]


def resolve_all(
    engine: Engine,
    partitions: Iterable[Partition],
    where: str | int,
    *,
    time_ms: int | None = None,
    known: dict[Partition, int] | None = None,
) -> dict[Partition, int]:
    """``Engine.resolve`` for each. Where logs have to fetch, many of them begin before any is awaited.

    ``known`` keeps what was found until then. A caller that asks again gives the same dict, and so comes to an end, whatever
    logs forget meanwhile.
    """
    known = {} if known is None else known
    pending: list[ReadPending] = []
    partitions = list(partitions)
    for partition in partitions:
        if partition in known:
            continue
        try:
            known[partition] = engine.resolve(partition, where, time_ms=time_ms)
        except ReadPending as error:
            pending.append(error)
            if len(pending) == limits.RESOLVED_AT_ONCE:
                break
    if pending:
        raise ReadPending.for_all(pending)
    return {each: max(known[each], each.log.start_offset) for each in partitions}


def describe(
    engine: Engine,
    topics: object,
    at_ms: int | None = None,
    may: May = all_of_them,
    known: dict[Partition, int] | None = None,
) -> dict[str, list[PartitionPosition]]:
    """Start, end and size of every partition; with a time also the first offset not older than it (``known``: see
    ``resolve_all``).

    The topic's incarnation tells it from an earlier one of the same name. Readers that keep positions
    need it.
    """
    engine.check_open()
    found = matching(engine, topics, may)
    offsets: dict[Partition, int] = {}
    if at_ms is not None:
        partitions = [partition for topic in found for partition in topic.partitions]
        offsets = resolve_all(engine, partitions, "earliest", time_ms=at_ms, known=known)
    return {
        topic.name: [
            _describe(topic, partition, offsets.get(partition)) for partition in topic.partitions
        ]
        for topic in found
    }


def _describe(topic: Topic, partition: Partition, offset: int | None) -> PartitionPosition:
    log = partition.log
    document: PartitionPosition = {
        "partition": partition.number,
        "incarnation": topic.incarnation,
        "start": log.start_offset,
        "end": log.end_offset,
        "bytes": log.size_bytes(),
    }
    if offset is not None:
        document["offset"] = offset
    return document


def _check_count(positions: Positions) -> Positions:
    count = sum(map(len, positions.values()))
    if count > limits.PARTITIONS_TOTAL_MAX:
        raise InvalidArgument(
            f"{count} positions are too many; the limit is {limits.PARTITIONS_TOTAL_MAX}",
            code="invalid_argument",
        )
    return positions


# --- waiting --------------------------------------------------------------------------------------
class _Bell:
    """Rings when a partition has grown, or when topics have."""

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    def on_advance(self, topic: str, partition: int, at_once: bool = True) -> None:
        self.rung.set()


async def news_in(
    partitions: Sequence[Partition], seconds: float, topics: Topics | None = None
) -> bool:
    """True when a partition has grown, or the topics have changed; False after the time."""
    bell = _Bell()
    watchers = [] if topics is None else topics.watchers
    for partition in partitions:
        partition.watchers[bell] = None
    watchers.append(bell.rung.set)
    try:
        async with asyncio.timeout(seconds):
            await bell.rung.wait()
        return True
    except TimeoutError:
        return False
    finally:
        watchers.remove(bell.rung.set)
        for partition in partitions:
            partition.watchers.pop(bell, None)


async def wait_for(
    engine: Engine, positions: Positions, topics: object, seconds: float, may: May = all_of_them
) -> bool:
    """True when a partition has more than ``positions`` say, or a topic is new; False after the time."""
    engine.check_open()
    _check_count(positions)
    deadline = engine.time() + seconds
    while not _is_news(engine, positions, topics, may):
        watched = [
            engine.partition(topic, number) for topic, some in positions.items() for number in some
        ]
        if not await news_in(watched, deadline - engine.time(), engine.topics):
            return False
        engine.check_open()
    return True


def _is_news(engine: Engine, positions: Positions, topics: object, may: May) -> bool:
    for topic, some in positions.items():
        for number, offset in some.items():
            if engine.partition(topic, number).log.end_offset > offset:
                return True
    if topics is None:
        return False
    return any(
        partition.number not in positions.get(topic.name, {})
        for topic in matching(engine, topics, may)
        for partition in topic.partitions
    )


# --- moving a subscription along ------------------------------------------------------------------
def advance(engine: Engine, subscription: Subscription, positions: Positions, done: Done) -> None:
    """Everything before the positions is done. If one lies beyond the end, nothing changes."""
    engine.check_open()
    moves: list[tuple[Cursor, int]] = []
    for topic, some in _check_count(positions).items():
        for number, offset in some.items():
            cursor = subscription.cursors.get((topic, number))
            if cursor is None:
                if engine.topics.get(topic) is None:
                    raise TopicNotFound(f"there is no topic {topic!r}")
                raise InvalidArgument(
                    f"subscription {subscription.name!r} has no partition {number} of {topic!r}",
                    code="invalid_partition",
                )
            end = cursor.partition.log.end_offset
            if offset > end:
                raise OffsetOutOfRange(
                    f"offset {offset} is after the end of {topic}/{number}, which is {end}"
                )
            moves.append((cursor, offset))
    for cursor, offset in moves:
        subscription.advance(cursor, offset)
    engine.state.flush(done)
