"""Redis Streams, through redis-py with hiredis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import redis
import redis.asyncio

from benchmarks.peers.driver import Driver, Seen
from benchmarks.peers.fetching import debian
from benchmarks.peers.server import Server

PIPELINE = 1000
"""redis-py has no publish without waiting. A pipeline of this size is what its users write instead."""


class Broker(Server):
    name = "Redis"
    modes: ClassVar = {
        "default": "appendfsync everysec: the setting that Redis's documentation advises",
        "fsync": "appendfsync always",
    }

    @classmethod
    def fetch(cls) -> None:
        debian("redis-server", "redis-server")

    def command(self) -> list[str]:
        return [
            debian("redis-server", "redis-server"), "--bind", "127.0.0.1", "--port", str(self.port),
            "--dir", str(self.directory), "--save", "", "--appendonly", "yes",
            "--appendfsync", "always" if self.mode == "fsync" else "everysec",
        ]  # fmt: skip

    def serves(self) -> bool:
        """After a restart the port is open before the data is loaded."""
        try:
            with redis.Redis(port=self.port) as client:
                return bool(client.ping())
        except redis.exceptions.RedisError:
            return False


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str):
        super().__init__(address, mode, topic)
        self._redis = redis.Redis(self.host, self.port)

    def close(self) -> None:
        self._redis.close()

    def put(self, value: bytes) -> None:
        self._redis.xadd(self.topic, {b"v": value})

    def send_all(self, values: Iterable[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(self.topic, {b"v": value})
            if len(pipeline) >= PIPELINE:
                pipeline.execute()
        pipeline.execute()

    def send_batch(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def send_paced(self, values: Iterable[bytes]) -> None:
        for value in values:
            self.put(value)

    def read(self, count: int) -> int:
        read, last = 0, b"0"
        while read < count:
            found = self._redis.xread({self.topic: last}, count=10_000)
            messages = found[self.topic.encode()][0] if isinstance(found, dict) else found[0][1]
            read += len(messages)
            last = messages[-1][0]
        return read

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        self._redis.xgroup_create(self.topic, "q", id="0", mkstream=True)
        if ready:
            ready()
        while count > 0:
            found = self._redis.xreadgroup("q", "member", {self.topic: ">"}, count=500, block=5000)
            if not found:
                continue
            messages = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
            acks = self._redis.pipeline(transaction=False)
            for number, fields in messages:
                if seen:
                    seen(fields[b"v"])
                acks.xack(self.topic, "q", number)
            acks.execute()
            count -= len(messages)

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        return asyncio.run(self._fan_out(subscribers, values))

    async def _fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        clients = [
            redis.asyncio.Redis(host=self.host, port=self.port) for _ in range(subscribers + 1)
        ]

        async def follow(client: redis.asyncio.Redis) -> None:
            left, last = len(values), b"0"
            while left:
                found = await client.xread({self.topic: last}, count=100, block=5000)
                if found:
                    messages = (
                        next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
                    )
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
