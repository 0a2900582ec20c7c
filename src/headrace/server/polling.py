"""Long polls: wait for a new message in a partition, or until a timeout."""

from __future__ import annotations

import asyncio

from headrace.broker.topic import Partition


class _Bell:
    def __init__(self, future: asyncio.Future[None]):
        self._future = future

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None:
        if not self._future.done():
            self._future.set_result(None)


async def wait_for(partition: Partition, seconds: float) -> bool:
    """True if there is a new message; False after the timeout."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bell = _Bell(future)
    partition.watchers.append(bell)
    try:
        async with asyncio.timeout(seconds):
            await future
        return True
    except TimeoutError:
        return False
    finally:
        partition.watchers.remove(bell)
