"""Headrace, through ``BrokerClient`` (and ``AsyncClient`` for the fan-out)."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.peers.driver import Driver, Seen
from benchmarks.peers.server import Server, free_port
from headrace import AsyncClient, BrokerClient


class Broker(Server):
    name = "Headrace"
    modes: ClassVar = {
        "fsync": "durability always (the default): each answer after fdatasync, shared by all that wait",
        "default": "durability interval: synced every second",
    }

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self.http_port = free_port()

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "headrace", "serve", "--data-dir", str(self.directory / "data"),
            "--port", str(self.port), "--http-port", str(self.http_port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"HEADRACE_RETENTION_HOURS": "none"}


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str):
        super().__init__(address, mode, topic)
        self._client = BrokerClient(self.host, self.port).connect()
        durability = "always" if mode == "fsync" else "interval"
        self._client.create_topic(topic, durability=durability)

    def close(self) -> None:
        self._client.close()

    def put(self, value: bytes) -> None:
        self._client.publish(self.topic, value)

    def send_all(self, values: Iterable[bytes]) -> None:
        publish, topic = self._client.publish_nowait, self.topic
        for value in values:
            publish(topic, value)
        self._client.flush()

    def send_batch(self, values: Sequence[bytes]) -> None:
        self._client.publish_many(self.topic, values)

    def read(self, count: int) -> int:
        at = 0
        while found := self._client.fetch(self.topic, at, 10_000, partition=0):
            at += len(found)
        return at

    def values(self, count: int) -> int:
        at = 0
        while found := self._client.fetch_values(self.topic, at, partition=0):
            at += len(found)
        return at

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        with self._client.subscription("q", self.topic) as messages:
            if ready:
                ready()
            for message in messages:
                if seen:
                    seen(message.payload)
                message.ack()
                count -= 1
                if not count:
                    break

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        return asyncio.run(self._fan_out(subscribers, values))

    async def _fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        clients = [await AsyncClient(self.host, self.port) for _ in range(subscribers + 1)]
        channels = [await client.subscribe(self.topic) for client in clients[1:]]

        async def follow(channel) -> None:  # type: ignore[no-untyped-def]
            left = len(values)
            async for _message in channel:
                left -= 1
                if not left:
                    return

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for channel in channels:
                group.create_task(follow(channel))
            for value in values:
                clients[0].publish_nowait(self.topic, value)
        took = time.perf_counter() - began
        for client in clients:
            await client.close()
        return took
