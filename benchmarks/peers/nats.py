"""NATS JetStream, through nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig

from benchmarks.peers.driver import AsyncDriver, Ready, Seen

WINDOW = 10_000
"""Publishes whose answer is outstanding."""
FETCH = 1000


class Client(AsyncDriver):
    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        self._nats = self.run(nats.connect(f"nats://{address}"))
        self._stream = self._nats.jetstream(publish_async_max_pending=WINDOW, timeout=60)
        config = StreamConfig(name=topic, subjects=[topic, f"{topic}.*"], storage=StorageType.FILE)
        self.run(self._stream.add_stream(config))

    def close(self) -> None:
        self.run(self._nats.close())
        super().close()

    def drop(self) -> None:
        self.run(self._stream.delete_stream(self.topic))

    def enqueue(self) -> None:
        self.run(self._stream.pull_subscribe(self.topic, durable="q"))

    # --- publishing -------------------------------------------------------------------------
    def put_each(self, values: Iterable[bytes]) -> list[float]:
        async def put_each() -> list[float]:
            times, clock, publish = [], time.perf_counter, self._stream.publish
            for value in values:
                began = clock()
                await publish(self.topic, value)
                times.append(clock() - began)
            return times

        return list(self.run(put_each()))

    def send_all(self, values: Iterable[bytes]) -> None:
        self.run(self._send((self.topic, value) for value in values))

    async def _send(self, messages: Iterable[tuple[str, bytes]], pause: bool = False) -> None:
        publish, answers = self._stream.publish_async, []
        for subject, value in messages:
            answers.append(await publish(subject, value))
            if pause:
                await asyncio.sleep(0)  # so that the client sends it
        await self._stream.publish_async_completed()
        for answer in answers:
            answer.result()  # an error is raised here

    def send_paced(self, due: Iterable[list[bytes]]) -> None:
        values = chain.from_iterable(due)
        self.run(self._send(((self.topic, value) for value in values), pause=True))

    def topics(self, many: int, values: Sequence[bytes]) -> float:
        """Subjects of one stream, as its documentation advises."""
        subjects = [f"{self.topic}.{number}" for number in range(many)]
        began = time.perf_counter()
        self.run(self._send((subjects[at % many], value) for at, value in enumerate(values)))
        return time.perf_counter() - began

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, ready: Ready) -> int:
        async def read() -> int:
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
            consumer = await self._stream.pull_subscribe(self.topic, config=config)
            ready()
            found = 0
            while found < count:
                found += len(await consumer.fetch(min(10 * FETCH, count - found), timeout=60))
            await consumer.unsubscribe()
            return found

        return int(self.run(read()))

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        async def take() -> None:
            consumer = await self._stream.pull_subscribe(self.topic, durable="q")
            ready()
            left = count
            while left:
                messages = await consumer.fetch(min(FETCH, left), timeout=60)
                for message in messages:
                    await message.ack()
                left -= len(messages)
            await self._nats.flush(60)

        async def push(seen: Seen) -> None:
            """For the latency: a push consumer, which waits for no request."""
            left, done = count, asyncio.Event()

            async def got(message: Any) -> None:
                nonlocal left
                seen(message.data)
                await message.ack()
                left -= 1
                if not left:
                    done.set()

            await self._stream.subscribe(self.topic, durable="q", cb=got, manual_ack=True)
            await self._nats.flush()
            ready()
            await done.wait()

        self.run(push(seen) if seen else take())

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        async def fan_out() -> float:
            done = asyncio.Event()
            left = subscribers * len(values)

            async def got(_message: Any) -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            clients = [await nats.connect(f"nats://{self.address}") for _ in range(subscribers)]
            for (
                client
            ) in clients:  # each with a configuration of its own: nats-py writes an inbox into it
                config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
                await client.jetstream(timeout=60).subscribe(self.topic, cb=got, config=config)
                await client.flush(60)
            began = time.perf_counter()
            await self._send([(self.topic, value) for value in values])
            await done.wait()
            took = time.perf_counter() - began
            assert not left, "more came than was published"
            for client in clients:
                await client.close()
            return took

        return float(self.run(fan_out()))
