"""What a fetch returns: a page of messages or values, and the positions after it.

A topic may have several partitions, so the place after a page is not one offset but one for each partition:
``page.next``. A fetch that begins there continues where the page ended::

    page = client.fetch("orders")
    while page:
        ...
        page = client.fetch("orders", page.next)

A partition that is missing in positions begins at its first message: it was added after the page was read,
or nothing of it was read yet. As text, positions are ``0:17,3:9``; HTTP calls this a cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.log.batch import COMPRESSION, LOST, Batch, no_collection
from headrace.model import Message, Start, parse_position

Item = TypeVar("Item")
From = Start | Mapping[int, int]
"""Where a fetch begins: a position, or an offset for each partition."""
Pages = Iterable[tuple[Batch, int]]
"""Batches, each with the index of its first wanted record."""


class Asked(NamedTuple):
    """The arguments of a fetch."""

    topic: str
    offset: From
    partition: int | None
    """None: all of them."""
    max_bytes: int
    wait: float
    limit: int = limits.LISTED_MAX


class Page(list[Item]):
    """A list, and in ``next`` the positions after it: partition -> offset."""

    def __init__(self, items: Iterable[Item], next: Mapping[int, int]):
        super().__init__(items)
        self.next = dict(next)


def parse_from(start: Any) -> Any:
    """Check where a fetch is to begin. Text becomes an offset or a time."""
    if not isinstance(start, Mapping):
        return parse_position(start)
    for partition, offset in start.items():
        if type(partition) is not int or not 0 <= partition < limits.PARTITIONS_PER_TOPIC_MAX:
            raise InvalidArgument(
                f"positions name partitions by their numbers, not {partition!r:.40}",
                code="invalid_partition",
            )
        if type(offset) is not int or not 0 <= offset <= limits.OFFSET_MAX:
            raise InvalidArgument(
                f"{offset!r:.40} is not an offset in partition {partition}", code="invalid_offset"
            )
    return start


def cursor_text(positions: Mapping[int, int]) -> str:
    return ",".join([f"{partition}:{offset}" for partition, offset in positions.items()])


def parse_cursor(text: str) -> Mapping[int, int]:
    """The positions that a cursor stands for; the empty cursor is the beginning."""
    try:
        pairs = [place.split(":") for place in text.split(",")] if text else []
        positions = {int(partition): int(offset) for partition, offset in pairs}
    except ValueError:
        raise InvalidArgument(
            f"{text[:40]!r} is not a cursor: use the cursor of the page before, such as 0:17,1:4",
            code="invalid_cursor",
        ) from None
    parse_from(positions)
    return positions


def partition_needed(topic: str, count: int, offset: int) -> InvalidArgument:
    return InvalidArgument(
        f"topic {topic!r} has {count} partitions, and each has its own offset {offset}: name one with "
        "partition, or begin at 'earliest', at a time, or at the positions after the page before",
        code="partition_needed",
    )


# --- of one partition -------------------------------------------------------------------------------
def page_of(pages: Pages, at: int, asked: Asked, *, values: bool) -> Page[Any]:
    """A page of one partition that begins at the offset ``at``."""
    partition = 0 if asked.partition is None else asked.partition
    found: list[Any] = (
        values_of(pages, asked.max_bytes)
        if values
        else messages_of(pages, asked.topic, partition, asked.limit, asked.max_bytes)
    )
    return Page(found, {partition: at + len(found)})


def readable(pages: Iterable[list[Batch]], at: int) -> Iterator[tuple[Batch, int]]:
    """The batches from the offset ``at`` up to the first batch whose records are lost.

    If the first batch is lost, this raises its error, which names the lost offsets. Later batches may begin
    before the end of the one before, too: the broker joins small ones between two reads (``log/run.py``).
    """
    first = True
    for batches in pages:
        for batch in batches:
            if batch.flags & LOST:
                if not first:
                    return
                batch.plain()
            yield batch, max(at - batch.base_offset, 0)
            first, at = False, batch.end_offset


def messages_of(
    pages: Pages, topic: str, partition: int, limit: int, max_bytes: int
) -> list[Message]:
    """Messages of about ``max_bytes`` together, twice that at most, however small they are when packed."""
    found: list[Message] = []
    size = 0
    with no_collection(limit):
        for batch, start in pages:
            stop = min(batch.count, start + limit - len(found))
            fits = batch.fitting(start, stop, max_bytes)  # cutting a batch means decoding it twice
            found += batch.messages(topic, partition, start, fits)
            size += max(batch.value_bytes(start, fits), batch.stored_bytes)
            _let_go(batch)
            if fits < stop or len(found) >= limit or size >= max_bytes:
                break
    return found


def values_of(pages: Pages, max_bytes: int) -> list[bytes]:
    found: list[bytes] = []
    size = 0
    for batch, start in pages:
        fits = batch.fitting(start, batch.count, max_bytes)
        found += batch.values(start, fits)
        size += max(batch.value_bytes(start, fits), batch.stored_bytes)
        _let_go(batch)
        if fits < batch.count or size >= max_bytes:
            break
    return found


def _let_go(batch: Batch) -> None:
    """The caller has its records. A page of packed batches must not stay unpacked until its end."""
    if batch.flags & COMPRESSION:
        batch.forget()
