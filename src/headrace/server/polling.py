"""Long polls: wait for a new message in a partition, or until a timeout."""

from __future__ import annotations

import asyncio

from headrace.broker.topic import Partition


class _Poll:
    def __init__(self) -> None:
        self.has_news = asyncio.Event()

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None:
        self.has_news.set()


async def wait_for(partition: Partition, seconds: float) -> bool:
    """True if there is a new message; False after the timeout."""
    poll = _Poll()
    partition.watchers.append(poll)
    try:
        async with asyncio.timeout(seconds):
            await poll.has_news.wait()
        return True
    except TimeoutError:
        return False
    finally:
        partition.watchers.remove(poll)
