"""Channels: where messages arrive, seen from both sides."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.channels import AsyncChannel, Channel
from headrace.errors import Closed, InvalidArgument, NotFound, RequestTimeout
from headrace.model import Message


def message(number: int) -> Message:
    return Message("orders", 0, number, 0, None, b"%d" % number, None)


def at_once(callback: Callable[..., Any], *arguments: Any) -> None:
    callback(*arguments)


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "10"])
def test_a_capacity_that_cannot_be_is_refused(capacity: Any) -> None:
    """A channel for nothing would wait for ever."""
    with pytest.raises(InvalidArgument, match="capacity"):
        Channel("orders", capacity, at_once)


def test_what_arrived_is_taken_in_order() -> None:
    """By get, by get_nowait, by iteration; then it is empty."""
    channel = Channel("orders", 10, at_once)
    channel.put([message(number) for number in range(3)])
    assert len(channel) == 3
    assert channel.get().offset == 0
    following = channel.get_nowait()
    assert following is not None
    assert following.offset == 1
    channel.closed(None)
    assert [each.offset for each in channel] == [2]
    with pytest.raises(Closed):
        channel.get()


def test_a_channel_that_was_full_asks_for_more_when_half_of_it_is_free() -> None:
    """Once, not for each message."""
    channel = Channel("orders", 10, at_once)
    asked: list[int] = []
    channel.refill = lambda: asked.append(len(channel))
    channel.put([message(number) for number in range(10)])
    assert channel.room() == 0
    for _ in range(8):
        channel.get()
    assert asked == [5]


def test_a_channel_that_is_emptied_while_it_is_looked_at_is_not_forgotten() -> None:
    """The loop finds it full, and before it has noted that, another thread takes everything."""
    channel = Channel("orders", 2, at_once)
    asked: list[bool] = []
    channel.refill = lambda: asked.append(True)

    class Items:
        """The channel's own queue, with a reader that comes while its length is being read."""

        def __init__(self, items: Any):
            self._items = items
            self.reader = False

        def __len__(self) -> int:
            size = len(self._items)
            if self.reader:
                self.reader = False
                channel.get()
                channel.get()
            return size

        def __getattr__(self, name: str) -> Any:
            return getattr(self._items, name)

    items = Items(channel._items)
    channel._items = items  # type: ignore[assignment]
    channel.put([message(0), message(1)])
    items.reader = True
    assert channel.room() == 2, "what is free by now"
    channel.put([message(2), message(3)])
    items.reader = True
    channel.want_refill()
    assert asked, "the reader or the loop must have asked for more"


def test_who_waits_is_woken_by_a_message_and_by_the_end() -> None:
    """Several threads in get: one gets the message, the others hear of the end."""
    channel = Channel("orders", 10, at_once)
    results: list[object] = []

    def wait() -> None:
        try:
            results.append(channel.get(10).offset)
        except Closed as error:
            results.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    channel.put([message(7)])
    while not results:
        pass
    channel.closed(None)
    for thread in threads:
        thread.join(10)
    assert sorted(results, key=str) == [7, Closed, Closed]


def test_the_end_of_a_channel_has_a_reason() -> None:
    """A closing that nobody asked for is raised as what it was, behind what had arrived."""
    channel = Channel("orders", 10, at_once)
    channel.put([message(0)])
    channel.closed(NotFound("the topic was deleted"))
    assert channel.get().offset == 0
    with pytest.raises(NotFound):
        channel.get()
    with pytest.raises(NotFound):
        list(channel)


def test_the_same_for_asyncio() -> None:
    """Waiting, timing out, being woken, ending."""

    async def main() -> None:
        channel = AsyncChannel("orders", 4)
        asked: list[int] = []
        channel.refill = lambda: asked.append(len(channel))
        with pytest.raises(RequestTimeout):
            await channel.get(0.01)
        waiting = [asyncio.create_task(channel.get(10)) for _ in range(2)]
        await asyncio.sleep(0)
        channel.put([message(0), message(1)])
        assert sorted([(await task).offset for task in waiting]) == [0, 1]
        channel.put([message(number) for number in range(4)])
        channel.want_refill()
        for _ in range(3):
            await channel.get()
        assert asked == [2]
        channel.closed(None)
        assert [each.offset async for each in channel] == [3]
        with pytest.raises(Closed):
            await channel.get()

    asyncio.run(main())
