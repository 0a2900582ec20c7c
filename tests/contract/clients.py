"""The clients, against a real server: ``BrokerClient`` for threads, ``AsyncClient`` for asyncio.

The clients acknowledge behind the scenes: what the broker refuses is counted, not raised. So an inbox here
waits for the broker's word and raises when something was counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from headrace import AsyncClient, BrokerClient
from headrace.errors import StaleDelivery
from headrace.model import DeadLetter, Scheduled
from headrace.testing import RunningServer, running_server
from headrace.wire.binary import Type
from tests.contract.embedded import AsyncInbox, AsyncSession, stored
from tests.contract.front_end import WAIT_S, FrontEnd, Got, Inbox, LoopThread, Session, Stored


class ServerFrontEnd(FrontEnd):
    """Whatever talks to a server over the network."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._stack = contextlib.ExitStack()
        self.server: RunningServer = self._stack.enter_context(running_server(directory))

    def restart(self) -> None:
        self.server.restart()

    def stop(self) -> None:
        self._stack.close()


# --- threads --------------------------------------------------------------------------------------
class ClientInbox(Inbox):
    def __init__(self, client: BrokerClient, channel: Any):
        self._client, self._channel = client, channel

    def get(self, timeout: float = WAIT_S) -> Got:
        return Got.of(self._channel.get(timeout))

    def ack(self, got: Got) -> None:
        self._settle(got.handle.ack)

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        self._settle(got.handle.nack, delay, reason)

    def extend(self, got: Got, seconds: float | None = None) -> None:
        self._settle(got.handle.extend, seconds)

    def _settle(self, settle: Any, *arguments: Any) -> None:
        feed = getattr(self._channel, "feed", None)
        before = 0 if feed is None else feed.ledger.stale
        settle(*arguments)
        self._client.flush()
        if feed is not None and feed.ledger.stale > before:
            raise StaleDelivery("the broker counted it as stale")

    def close(self) -> None:
        self._channel.close()


class ClientSession(Session):
    def __init__(self, client: BrokerClient):
        self._client = client.connect()

    def create_topic(self, name: str, **settings: Any) -> None:
        self._client.create_topic(name, **settings)

    def delete_topic(self, name: str) -> None:
        self._client.delete_topic(name)

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        return stored(self._client.publish(topic, value, headers, **options))

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        return [Got.of(message) for message in self._client.fetch(topic, where, limit)]

    def subscribe(self, topic: str) -> Inbox:
        return ClientInbox(self._client, self._client.subscribe(topic))

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        self._client.create_subscription(name, topic, **settings)

    def delete_subscription(self, name: str, topic: str) -> None:
        self._client.delete_subscription(name, topic)

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        return ClientInbox(self._client, self._client.subscription(name, topic, prefetch=prefetch))

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        return self._client.subscription_stats(name, topic)

    def seek(self, name: str, topic: str, to: Any) -> None:
        self._client.seek(name, to, topic=topic)

    def dead_letters(self, name: str) -> list[DeadLetter]:
        return self._client.dead_letters(name)

    def redrive(self, name: str) -> int:
        return self._client.redrive(name)["redriven"]

    def scheduled(self, topic: str) -> list[Scheduled]:
        return self._client.scheduled(topic)

    def cancel(self, id: UUID) -> None:
        self._client.cancel(id)

    def job(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._client, verb)(*arguments, **options)

    def close(self) -> None:
        self._client.close()


class ThreadClient(ServerFrontEnd):
    name = "BrokerClient"

    def make_session(self) -> Session:
        return ClientSession(self.server.client(request_timeout=WAIT_S))


# --- asyncio --------------------------------------------------------------------------------------
class AsyncClientInbox(AsyncInbox):
    def _settle(self, settle: Any, *arguments: Any) -> None:
        feed = getattr(self._channel, "feed", None)

        async def run() -> int:
            before = 0 if feed is None else feed.ledger.stale
            settle(*arguments)
            if feed is None:
                return 0
            await self._channel.flush()
            await feed._link.ask(Type.ADMIN, {}, b'{"op": "info"}')  # what was before it is done
            after: int = feed.ledger.stale
            return after - before

        if self._thread.run(run()):
            raise StaleDelivery("the broker counted it as stale")


class AsyncClientSession(AsyncSession):
    inbox = AsyncClientInbox

    def close(self) -> None:
        self._run(self._api.close())


class AsyncioClient(ServerFrontEnd):
    name = "AsyncClient"

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._thread = LoopThread()

    def make_session(self) -> Session:
        async def connect() -> AsyncClient:
            return await AsyncClient(*self.server.address, request_timeout=WAIT_S)

        return AsyncClientSession(self._thread, self._thread.run(connect()))

    def stop(self) -> None:
        super().stop()
        self._thread.close()
