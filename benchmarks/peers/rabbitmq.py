"""RabbitMQ, through pika (one at a time) and aio-pika (everything that runs at the same time)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import aio_pika
import pika

from benchmarks.peers.driver import Driver, Seen
from benchmarks.peers.fetching import debian
from benchmarks.peers.server import Server, free_port

WINDOW = 1000
"""Publishes whose confirmation is outstanding."""
PREFETCH = 500


class Broker(Server):
    name = "RabbitMQ"
    modes: ClassVar = {
        "default": "durable classic queue, persistent messages, publisher confirms",
        "fsync": "quorum queue of one node, publisher confirms: each confirm after fsync",
    }

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self.http_port, self._distribution = free_port(), free_port()

    @classmethod
    def fetch(cls) -> None:
        debian("rabbitmq-server", "rabbitmq-server")

    def command(self) -> list[str]:
        (self.directory / "plugins").write_text("[rabbitmq_management].\n")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\nmanagement.tcp.ip = 127.0.0.1\n"
            f"management.tcp.port = {self.http_port}\nloopback_users = none\n"
            "vm_memory_high_watermark.relative = 0.6\ndisk_free_limit.absolute = 1GB\n"
        )
        # Debian's wrapper changes to the user rabbitmq, who may not write here; the server itself does not.
        return [
            str(next(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server")))
        ]

    def environment(self) -> dict[str, str]:
        home = self.directory
        return {
            "HOME": str(home),
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def serves(self) -> bool:
        """The port is open before clients are served."""
        if not super().serves():
            return False
        try:
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port)).close()
        except Exception:
            return False
        return True


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str):
        super().__init__(address, mode, topic)
        self._connection = pika.BlockingConnection(
            pika.ConnectionParameters(self.host, self.port, heartbeat=0)
        )
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._persistent = pika.BasicProperties(delivery_mode=2)
        self._kind = {"x-queue-type": "quorum" if mode == "fsync" else "classic"}
        self._channel.queue_declare(topic, durable=True, arguments=self._kind)

    def close(self) -> None:
        self._connection.close()

    def put(self, value: bytes) -> None:
        self._channel.basic_publish("", self.topic, value, self._persistent)

    def _aio(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            url = f"amqp://guest:guest@{self.address}/?heartbeat=0"
            async with await aio_pika.connect(url) as connection:
                return await call(connection)

        return asyncio.run(run())

    def send_all(self, values: Iterable[bytes]) -> None:
        async def send(connection: Any) -> None:
            channel = await connection.channel()
            window = asyncio.Semaphore(WINDOW)

            async def one(value: bytes) -> None:
                message = aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                try:
                    await channel.default_exchange.publish(message, self.topic)
                finally:
                    window.release()

            async with asyncio.TaskGroup() as group:
                for value in values:
                    await window.acquire()
                    group.create_task(one(value))

        self._aio(send)

    def send_batch(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def send_paced(self, values: Iterable[bytes]) -> None:
        """pika without confirms: with them it waits for each."""
        channel = self._connection.channel()
        for value in values:
            channel.basic_publish("", self.topic, value, self._persistent)
        self._connection.process_data_events(0)

    def read(self, count: int) -> int:
        raise NotImplementedError  # a stream needs a client of its own, which none of the two is

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        async def take(connection: Any) -> None:
            channel = await connection.channel()
            await channel.set_qos(PREFETCH)
            queue = await channel.get_queue(self.topic)
            left, done = count, asyncio.Event()

            async def got(message: Any) -> None:
                nonlocal left
                if seen:
                    seen(message.body)
                await message.ack()
                left -= 1
                if not left:
                    done.set()

            await queue.consume(got)
            if ready:
                ready()
            await done.wait()

        self._aio(take)

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        async def fan_out(connection: Any) -> float:
            url = f"amqp://guest:guest@{self.address}/?heartbeat=0"
            done = asyncio.Event()
            left = subscribers * len(values)

            async def got(_message: Any) -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            channel = await connection.channel()
            exchange = await channel.declare_exchange(
                f"{self.topic}.all", aio_pika.ExchangeType.FANOUT
            )
            clients = [await aio_pika.connect(url) for _ in range(subscribers)]
            for client in clients:
                own = await client.channel()
                queue = await own.declare_queue(exclusive=True)
                await queue.bind(f"{self.topic}.all")
                await queue.consume(got, no_ack=True)
            began = time.perf_counter()
            await asyncio.gather(
                *[exchange.publish(aio_pika.Message(value), "") for value in values]
            )
            await done.wait()
            took = time.perf_counter() - began
            for client in clients:
                await client.close()
            return took

        return float(self._aio(fan_out))
