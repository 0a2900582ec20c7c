"""Headrace, through ``BrokerClient`` (and ``AsyncClient`` where there are many connections)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from benchmarks.peers.driver import Driver, Ready, Seen, in_loop
from headrace import AsyncClient, BrokerClient
from headrace.log.batch import encode
from headrace.log.columns import Columns

PREFETCH = 5000
FETCH = 10_000
PIPELINED = 500
CONNECTIONS = 10
"""For many subscriptions."""


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        self._client = BrokerClient(self.host, self.port).connect()
        self._durability = "always" if mode == "fsync" else "interval"
        self._client.create_topic(topic, durability=self._durability)
        self._others: list[str] = []

    def close(self) -> None:
        self._client.close()

    def drop(self) -> None:
        self._client.delete_topic(self.topic)
        in_loop(self._for_others(lambda client, topic: client.delete_topic(topic)))

    async def _for_others(self, call: Callable[[AsyncClient, str], Awaitable[object]]) -> None:
        async with AsyncClient(self.host, self.port) as client:
            for at in range(0, len(self._others), 100):
                await asyncio.gather(
                    *[call(client, topic) for topic in self._others[at : at + 100]]
                )

    def enqueue(self) -> None:
        self._client.create_subscription("q", self.topic)

    # --- publishing -------------------------------------------------------------------------
    def put(self, value: bytes) -> None:
        self._client.publish(self.topic, value)

    def send_all(self, values: Iterable[bytes]) -> None:
        publish, topic = self._client.publish_nowait, self.topic
        for value in values:
            publish(topic, value)
        self._client.flush()

    def send_batch(self, values: Sequence[bytes]) -> None:
        self._client.publish_many(self.topic, values)

    def send_singly(self, values: Sequence[bytes]) -> None:
        async def send() -> None:
            batches = [encode(Columns([value])) for value in values]
            async with AsyncClient(self.host, self.port) as client:
                for at in range(0, len(batches), PIPELINED):
                    part = batches[at : at + PIPELINED]
                    await asyncio.gather(*[client.publish_batch(self.topic, each) for each in part])

        in_loop(send())

    def topics(self, many: int, values: Sequence[bytes]) -> float:
        self._others = [f"{self.topic}-{number}" for number in range(many)]

        durability = self._durability
        in_loop(
            self._for_others(
                lambda client, topic: client.create_topic(topic, durability=durability)
            )
        )
        publish = self._client.publish_nowait
        for topic in self._others:  # the files of each are made by its first message
            publish(topic, values[0])
        self._client.flush()
        began = time.perf_counter()
        for number, value in enumerate(values):
            publish(self._others[number % many], value)
        self._client.flush()
        return time.perf_counter() - began

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, ready: Ready) -> int:
        ready()
        at = 0
        while at < count and (found := self._client.fetch(self.topic, at, FETCH, partition=0)):
            at += len(found)
        return at

    def values(self, count: int, ready: Ready) -> int:
        ready()
        at = 0
        while at < count and (found := self._client.fetch_values(self.topic, at, partition=0)):
            at += len(found)
        return at

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        with self._client.subscription("q", self.topic, prefetch=PREFETCH) as messages:
            ready()
            for message in messages:
                if seen:
                    seen(message.payload)
                message.ack()
                count -= 1
                if not count:
                    break
            self._client.flush()

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        async def fan_out() -> float:
            clients = [
                await AsyncClient(self.host, self.port).connect() for _ in range(subscribers + 1)
            ]
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
            await asyncio.gather(*[client.close() for client in clients])
            return took

        return in_loop(fan_out())

    def subscriptions(self, many: int, values: Sequence[bytes]) -> float:
        async def subscriptions() -> float:
            clients = [
                await AsyncClient(self.host, self.port).connect() for _ in range(CONNECTIONS + 1)
            ]
            consumers = [
                await clients[1 + number % CONNECTIONS].subscription(f"q{number}", self.topic)
                for number in range(many)
            ]

            async def follow(consumer) -> None:  # type: ignore[no-untyped-def]
                left = len(values)
                async for message in consumer:
                    message.ack()
                    left -= 1
                    if not left:
                        return

            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for consumer in consumers:
                    group.create_task(follow(consumer))
                for value in values:
                    await clients[0].publish(self.topic, value)
            await asyncio.gather(*[client.flush() for client in clients])
            took = time.perf_counter() - began
            await asyncio.gather(*[client.close() for client in clients])
            return took

        return in_loop(subscriptions())
