"""The broker inside the program: ``Broker`` for threads, ``AsyncBroker`` for asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from headrace import AsyncBroker, Broker
from headrace.model import DeadLetter, Receipt, Scheduled
from tests.contract.front_end import (
    STAY,
    WAIT_S,
    FrontEnd,
    Got,
    Inbox,
    LoopThread,
    Session,
    Stored,
)

_GONE = {STAY: "the broker is in the same process and goes with it"}


def stored(receipt: Receipt) -> Stored:
    return Stored(receipt.offset, receipt.id, receipt.duplicate)


class BrokerInbox(Inbox):
    def __init__(self, broker: Broker, channel: Any):
        self._broker, self._channel = broker, channel

    def get(self, timeout: float = WAIT_S) -> Got:
        return Got.of(self._channel.get(timeout))

    def ack(self, got: Got) -> None:
        got.handle.ack()
        self._broker.flush()

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        got.handle.nack(delay, reason)
        self._broker.flush()

    def extend(self, got: Got, seconds: float | None = None) -> None:
        got.handle.extend(seconds)
        self._broker.flush()

    def close(self) -> None:
        self._channel.close()


class BrokerSession(Session):
    def __init__(self, broker: Broker):
        self._broker = broker

    def create_topic(self, name: str, **settings: Any) -> None:
        self._broker.create_topic(name, **settings)

    def delete_topic(self, name: str) -> None:
        self._broker.delete_topic(name)

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        return stored(self._broker.publish(topic, value, headers, **options))

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        return [Got.of(message) for message in self._broker.fetch(topic, where, limit)]

    def subscribe(self, topic: str) -> Inbox:
        return BrokerInbox(self._broker, self._broker.subscribe(topic))

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        self._broker.create_subscription(name, topic, **settings)

    def delete_subscription(self, name: str, topic: str) -> None:
        self._broker.delete_subscription(name, topic)

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        return BrokerInbox(self._broker, self._broker.subscription(name, topic, prefetch=prefetch))

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        return self._broker.subscription_stats(name, topic)

    def seek(self, name: str, topic: str, to: Any) -> None:
        self._broker.seek(name, to, topic=topic)

    def dead_letters(self, name: str) -> list[DeadLetter]:
        return self._broker.dead_letters(name)

    def redrive(self, name: str) -> int:
        return self._broker.redrive(name)["redriven"]

    def scheduled(self, topic: str) -> list[Scheduled]:
        return self._broker.scheduled(topic)

    def cancel(self, id: UUID) -> None:
        self._broker.cancel(id)

    def job(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._broker, verb)(*arguments, **options)

    def close(self) -> None:
        """The broker is the front end's; it is closed once."""


class EmbeddedBroker(FrontEnd):
    name = "Broker"
    cannot: ClassVar = _GONE

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._broker = Broker.open(directory)

    def make_session(self) -> Session:
        return BrokerSession(self._broker)

    def restart(self) -> None:
        self._broker.close()
        self._broker = Broker.open(self.directory)

    def stop(self) -> None:
        self._broker.close()


# --- asyncio --------------------------------------------------------------------------------------
class AsyncInbox(Inbox):
    """Channels of ``AsyncBroker``; those of ``AsyncClient`` settle in their own way."""

    def __init__(self, thread: LoopThread, channel: Any):
        self._thread, self._channel = thread, channel

    def get(self, timeout: float = WAIT_S) -> Got:
        return Got.of(self._thread.run(self._channel.get(timeout), timeout + WAIT_S))

    def ack(self, got: Got) -> None:
        self._settle(got.handle.ack)

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        self._settle(got.handle.nack, delay, reason)

    def extend(self, got: Got, seconds: float | None = None) -> None:
        self._settle(got.handle.extend, seconds)

    def _settle(self, settle: Any, *arguments: Any) -> None:
        async def run() -> None:
            settle(*arguments)

        self._thread.run(run())

    def close(self) -> None:
        async def run() -> None:
            self._channel.close()

        self._thread.run(run())


class AsyncSession(Session):
    """``AsyncBroker`` and ``AsyncClient`` have the same words, so this speaks to both."""

    inbox: type[AsyncInbox] = AsyncInbox

    def __init__(self, thread: LoopThread, api: Any):
        self._thread, self._api = thread, api
        self._run = thread.run

    def create_topic(self, name: str, **settings: Any) -> None:
        self._run(self._api.create_topic(name, **settings))

    def delete_topic(self, name: str) -> None:
        self._run(self._api.delete_topic(name))

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        return stored(self._run(self._api.publish(topic, value, headers, **options)))

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        return [Got.of(message) for message in self._run(self._api.fetch(topic, where, limit))]

    def subscribe(self, topic: str) -> Inbox:
        return self.inbox(self._thread, self._run(self._api.subscribe(topic)))

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        self._run(self._api.create_subscription(name, topic, **settings))

    def delete_subscription(self, name: str, topic: str) -> None:
        self._run(self._api.delete_subscription(name, topic))

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        consumer = self._run(self._api.subscription(name, topic, prefetch=prefetch))
        return self.inbox(self._thread, consumer)

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        found: dict[str, Any] = self._run(self._api.subscription_stats(name, topic))
        return found

    def seek(self, name: str, topic: str, to: Any) -> None:
        self._run(self._api.seek(name, to, topic=topic))

    def dead_letters(self, name: str) -> list[DeadLetter]:
        found: list[DeadLetter] = self._run(self._api.dead_letters(name))
        return found

    def redrive(self, name: str) -> int:
        count: int = self._run(self._api.redrive(name))["redriven"]
        return count

    def scheduled(self, topic: str) -> list[Scheduled]:
        found: list[Scheduled] = self._run(self._api.scheduled(topic))
        return found

    def cancel(self, id: UUID) -> None:
        self._run(self._api.cancel(id))

    def job(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return self._run(getattr(self._api, verb)(*arguments, **options))

    def close(self) -> None:
        """The broker is the front end's; it is closed once."""


class EmbeddedAsyncBroker(FrontEnd):
    name = "AsyncBroker"
    cannot: ClassVar = _GONE

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._thread = LoopThread()
        self._start()

    def _start(self) -> None:
        async def start() -> AsyncBroker:
            return await AsyncBroker.open(self.directory)

        self._broker = self._thread.run(start())

    def make_session(self) -> Session:
        return AsyncSession(self._thread, self._broker)

    def restart(self) -> None:
        self._thread.run(self._broker.close())
        self._start()

    def stop(self) -> None:
        self._thread.run(self._broker.close())
        self._thread.close()
