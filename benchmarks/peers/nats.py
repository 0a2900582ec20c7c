"""NATS JetStream, through nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar

import nats
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig

from benchmarks.peers.driver import Driver, Seen
from benchmarks.peers.fetching import go
from benchmarks.peers.server import Server


class Broker(Server):
    name = "NATS JetStream"
    modes: ClassVar = {
        "default": "file storage, sync_interval 2 minutes (the default)",
        "fsync": "file storage, sync_interval always",
    }

    @classmethod
    def fetch(cls) -> None:
        go("nats-server", "github.com/nats-io/nats-server/v2@latest")

    def command(self) -> list[str]:
        sync = "sync_interval: always" if self.mode == "fsync" else ""
        config = self.directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.directory / "data"}", {sync} }}\n'
        )
        return [go("nats-server", "github.com/nats-io/nats-server/v2@latest"), "-c", str(config)]


class Client(Driver):
    """nats-py is asyncio only, so each call runs a piece of one loop."""

    def __init__(self, address: str, mode: str, topic: str):
        super().__init__(address, mode, topic)
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._nats = self._run(nats.connect(f"nats://{address}"))
        self._stream = self._nats.jetstream(publish_async_max_pending=20_000)
        config = StreamConfig(name=topic, subjects=[topic], storage=StorageType.FILE)
        self._run(self._stream.add_stream(config))

    def _run(self, call: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._run(self._nats.close())
        self._runner.close()

    def put(self, value: bytes) -> None:
        self._run(self._stream.publish(self.topic, value))

    def send_all(self, values: Iterable[bytes]) -> None:
        self._run(self._send(values))

    async def _send(self, values: Iterable[bytes]) -> None:
        for value in values:
            await self._stream.publish_async(self.topic, value, wait_stall=60)
        await self._stream.publish_async_completed()

    def send_batch(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def send_paced(self, values: Iterable[bytes]) -> None:
        async def send() -> None:
            for value in values:
                await self._stream.publish_async(self.topic, value, wait_stall=60)
                await asyncio.sleep(0)  # so that the client sends it
            await self._stream.publish_async_completed()

        self._run(send())

    def read(self, count: int) -> int:
        async def read() -> int:
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
            consumer = await self._stream.pull_subscribe(self.topic, config=config)
            found = 0
            while found < count:
                found += len(await consumer.fetch(min(10_000, count - found), timeout=30))
            return found

        return int(self._run(read()))

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        async def take() -> None:
            consumer = await self._stream.pull_subscribe(self.topic, durable="q")
            if ready:
                ready()
            left = count
            while left:
                # A full fetch waits for 500 messages; few at a time keeps the latency low.
                want = 1 if seen else min(500, left)
                try:
                    messages = await consumer.fetch(want, timeout=30)
                except NatsTimeout:
                    continue
                for message in messages:
                    if seen:
                        seen(message.data)
                    await message.ack()
                left -= len(messages)
            await self._nats.flush()

        async def push() -> None:
            """For the latency: a push consumer, which waits for no request."""
            left, done = count, asyncio.Event()

            async def got(message: Any) -> None:
                nonlocal left
                assert seen is not None
                seen(message.data)
                await message.ack()
                left -= 1
                if not left:
                    done.set()

            await self._stream.subscribe(self.topic, durable="q", cb=got, manual_ack=True)
            if ready:
                ready()
            await done.wait()

        self._run(push() if seen else take())

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
            config = ConsumerConfig(ack_policy=AckPolicy.NONE)
            for client in clients:
                await client.jetstream().subscribe(self.topic, cb=got, config=config)
            began = time.perf_counter()
            await self._send(values)
            await done.wait()
            took = time.perf_counter() - began
            for client in clients:
                await client.close()
            return took

        return float(self._run(fan_out()))
