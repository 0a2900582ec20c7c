"""Reading all partitions of a topic at once, in the order of time.

The heads of the partitions are merged: the message with the earliest time is next, and of equal times
that of the lower partition. Messages of one partition keep their order, whatever times they have::

    partition 0:  10:00 ── 10:03 ── 10:04          a page:  10:00 (0), 10:01 (1), 10:02 (1), 10:03 (0) …
    partition 1:  10:01 ── 10:02                   its next positions:  0:2, 1:2

Rules:
- A topic may have thousands of partitions. Each head holds a few records and its share of the page's bytes,
  and a larger record only by its time, until it is its turn: reading the heads takes no more memory than a page.
- On the loop the work is done in pieces (``pace.py``). In another thread it runs at once.
- A page ends before damage, or before records that retention has dropped meanwhile; a page that begins
  there is an error. So a reader learns of every gap, and no message is before an earlier one.

Rejected: merging in the client. It needs at least one batch of each partition, however few messages are asked
for: a thousand requests and as many megabytes for the first ten messages of a large topic.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace import limits
from headrace.broker.engine import Engine
from headrace.broker.positions import news_in
from headrace.broker.topic import Partition, Topic
from headrace.channels import check_count
from headrace.errors import DataCorrupt, HeadraceError, OffsetOutOfRange
from headrace.log.batch import Batch, encode
from headrace.log.columns import NO_ID, Columns
from headrace.log.interface import completed
from headrace.model import Message, split_position
from headrace.paging import Asked, Page, parse_from, partition_needed

RECORDS_MIN = 8
BYTES_MIN = 4 << 10
"""What each head may hold at least."""
HEADER_BYTES = 64
"""What a header counts: a page of tiny messages with a thousand headers each takes as long to send."""


async def browse(
    engine: Engine, asked: Asked, check: Callable[[], object] = lambda: None
) -> Page[Message]:
    """Messages of all partitions. ``check`` runs after a wait: rights may have changed."""
    check_count("max_bytes", asked.max_bytes)
    engine.check_open()
    topic = engine.topics.find(asked.topic)
    pace = _Pace(engine)
    places = await _places(engine, topic, asked.offset, pace)
    if asked.wait and all(at >= place.log.end_offset for place, at in places.items()):
        await news_in(list(places), asked.wait)
        engine.check_open()
        check()
        # One answer after the other: a publish may wake a thousand of these at once.
        await engine.pace.turn()
    if pace.on_loop:
        engine.budget.take(asked.max_bytes)
    try:
        return await _Merge(topic, places, asked, pace).page()
    finally:
        if pace.on_loop:
            engine.budget.give(asked.max_bytes)


def one_batch(messages: list[Message]) -> Batch:
    """Messages of several partitions as one batch, to be sent; their places are sent beside it."""
    return encode(
        Columns(
            [message.value or b"" for message in messages],
            [message.key for message in messages],
            [message.headers for message in messages],
            [message.timestamp for message in messages],
            [message._id or NO_ID for message in messages],
        )
    )


class _Pace:
    """Pieces on the broker's loop; no pauses in any other thread, where a log is read without its cache."""

    def __init__(self, engine: Engine):
        try:
            self.on_loop = asyncio.get_running_loop() is engine.loop
        except RuntimeError:
            self.on_loop = False
        self._pace = engine.pace
        self._deadline = self._pace.deadline()

    async def rest(self) -> None:
        if self.on_loop and self._pace.is_past(self._deadline):
            await self._pace.turn()
            self._deadline = self._pace.deadline()

    async def read(self, place: Partition, offset: int) -> Batch:
        await self.rest()
        if not self.on_loop:
            return place.log.read(offset, limits.INDEX_INTERVAL_BYTES)[0]
        return await completed(partial(place.log.read_cached, offset))


async def _places(engine: Engine, topic: Topic, start: Any, pace: _Pace) -> dict[Partition, int]:
    """Where each partition begins."""
    start = parse_from(start)
    partitions = list(topic.partitions)
    if isinstance(start, Mapping):
        for number in start:
            topic.partition(number)
        places = {place: start.get(place.number, place.log.start_offset) for place in partitions}
        for place, at in places.items():
            _check(place, at)
        return places
    if isinstance(start, int):
        raise partition_needed(topic.name, len(partitions), start)
    where, time_ms = split_position(start)
    places = {}
    for place in partitions:
        await pace.rest()
        places[place] = await completed(
            partial(engine.resolve, place, where, time_ms=time_ms),
        )
    return places


def _check(place: Partition, at: int) -> None:
    if not place.log.start_offset <= at <= place.log.end_offset:
        raise OffsetOutOfRange(
            f"offset {at} does not exist in {place.topic}/{place.number}, which has "
            f"{place.log.start_offset} to {place.log.end_offset}; leave this partition out of the "
            "positions to begin at its first message"
        )


class _Head:
    """The next messages of one partition."""

    __slots__ = ("at", "end", "messages", "place", "time")

    def __init__(self, place: Partition, at: int):
        self.place = place
        self.at = at
        """The offset of the next message."""
        self.end = place.log.end_offset
        self.messages: deque[Message] = deque()
        """Empty: the next message is known by its time only."""
        self.time = 0

    def __lt__(self, other: _Head) -> bool:
        return (self.time, self.place.number) < (other.time, other.place.number)


class _Merge:
    def __init__(self, topic: Topic, places: dict[Partition, int], asked: Asked, pace: _Pace):
        self._topic = topic.name
        self._asked = asked
        self._pace = pace
        self._heads = [_Head(place, at) for place, at in places.items()]
        count = max(sum(head.at < head.end for head in self._heads), 1)
        self._records = max(2 * asked.limit // count, RECORDS_MIN)
        self._bytes = max(asked.max_bytes // count, BYTES_MIN)

    async def page(self) -> Page[Message]:
        heap = [head for head in self._heads if head.at < head.end]
        for head in heap:
            await self._fill(head)
        heapq.heapify(heap)
        found: list[Message] = []
        size = 0
        while heap and len(found) < self._asked.limit and size < self._asked.max_bytes:
            head = heap[0]
            try:
                message = head.messages.popleft() if head.messages else await self._large(head)
            except OffsetOutOfRange:  # retention was faster
                if not found:
                    raise
                break
            message_bytes = len(message.value or b"") + HEADER_BYTES * len(message.headers)
            if found and size + message_bytes > 2 * self._asked.max_bytes:
                break
            found.append(message)
            size += message_bytes
            head.at += 1
            if head.messages:
                head.time = head.messages[0].timestamp
                heapq.heapreplace(heap, head)
            elif head.at >= head.end:
                heapq.heappop(heap)
            elif await self._filled(head):
                heapq.heapreplace(heap, head)
            else:
                break
        return Page(found, {head.place.number: head.at for head in self._heads})

    async def _filled(self, head: _Head) -> bool:
        try:
            await self._fill(head)
        except (DataCorrupt, OffsetOutOfRange):
            return False  # the page ends here, and the next one says why
        return True

    async def _fill(self, head: _Head) -> None:
        try:
            batch = await self._pace.read(head.place, head.at)
            start = head.at - batch.base_offset
            stop = min(batch.count, start + self._records, head.end - batch.base_offset)
            stop = batch.fitting(start, stop, self._bytes)
            if batch.value_bytes(start, stop) <= self._bytes:
                head.messages.extend(
                    batch.messages(self._topic, head.place.number, start, stop),
                )
                head.time = head.messages[0].timestamp
            else:
                batch.plain()  # raises if the records are lost
                times = batch.times(start, start + 1)
                head.time = batch.base_timestamp if times is None else times[0]
        except DataCorrupt as error:
            raise _named(error, head) from error

    async def _large(self, head: _Head) -> Message:
        """A message that is larger than the share of its partition."""
        batch = await self._pace.read(head.place, head.at)
        return batch.message(self._topic, head.place.number, head.at)


def _named(error: HeadraceError, head: _Head) -> DataCorrupt:
    place = f"{head.place.topic}/{head.place.number}"
    return DataCorrupt(f"{place}: {error.message}", code=error.code)
