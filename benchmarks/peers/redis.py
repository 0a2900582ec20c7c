"""Redis Streams, through redis-py with hiredis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import redis
import redis.asyncio

from benchmarks.peers.driver import Driver, Ready, Seen, in_loop

PIPELINE = 1000
"""redis-py has no publish without waiting. A pipeline of this size is what its users write instead."""
FETCH = 10_000


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        self._redis = redis.Redis(self.host, self.port)
        self._others: list[str] = []

    def close(self) -> None:
        self._redis.close()

    def drop(self) -> None:
        self._redis.unlink(self.topic, *self._others)

    def enqueue(self) -> None:
        self._redis.xgroup_create(self.topic, "q", id="0", mkstream=True)

    # --- publishing -------------------------------------------------------------------------
    def put(self, value: bytes) -> None:
        self._redis.xadd(self.topic, {b"v": value})

    def send_all(self, values: Iterable[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(self.topic, {b"v": value})
            if len(pipeline) >= PIPELINE:
                pipeline.execute()
        pipeline.execute()

    def send_paced(self, due: Iterable[list[bytes]]) -> None:
        for values in due:
            self.send_all(values)

    def topics(self, many: int, values: Sequence[bytes]) -> float:
        self._others = [f"{self.topic}-{number}" for number in range(many)]
        began = time.perf_counter()
        pipeline = self._redis.pipeline(transaction=False)
        for number, value in enumerate(values):
            pipeline.xadd(self._others[number % many], {b"v": value})
            if len(pipeline) >= PIPELINE:
                pipeline.execute()
        pipeline.execute()
        return time.perf_counter() - began

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, ready: Ready) -> int:
        ready()
        read, last = 0, b"0"
        while read < count:
            messages = _messages(self._redis.xread({self.topic: last}, count=FETCH))
            read += len(messages)
            last = messages[-1][0]
        return read

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        self._redis.xgroup_create(self.topic, "q", id="0", mkstream=True)
        ready()
        while count > 0:
            found = self._redis.xreadgroup(
                "q", "member", {self.topic: ">"}, count=PIPELINE, block=5000
            )
            if not found:
                continue
            messages = _messages(found)
            if seen:
                for _, fields in messages:
                    seen(fields[b"v"])
            self._redis.xack(self.topic, "q", *[number for number, _ in messages])
            count -= len(messages)

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        async def fan_out() -> float:
            clients = [
                redis.asyncio.Redis(host=self.host, port=self.port) for _ in range(subscribers + 1)
            ]

            async def follow(client: redis.asyncio.Redis) -> None:
                left, last = len(values), b"0"
                while left:
                    found = await client.xread({self.topic: last}, count=PIPELINE, block=5000)
                    if found:
                        messages = _messages(found)
                        left -= len(messages)
                        last = messages[-1][0]

            await asyncio.gather(*[client.ping() for client in clients])
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for client in clients[1:]:
                    group.create_task(follow(client))
                pipeline = clients[0].pipeline(transaction=False)
                for value in values:
                    pipeline.xadd(self.topic, {b"v": value})
                await pipeline.execute()
            took = time.perf_counter() - began
            for client in clients:
                await client.aclose()
            return took

        return in_loop(fan_out())


def _messages(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Of the only stream, whatever form this version of redis-py gives it."""
    if isinstance(found, dict):
        return next(iter(found.values()))[0]  # type: ignore[no-any-return]
    return found[0][1]  # type: ignore[no-any-return]
