"""A producer without a network: the test is the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.client.producer import Producer
from headrace.errors import HeadraceError, kind_of
from headrace.log.batch import Batch, parse
from headrace.log.columns import Columns
from headrace.model import Receipt
from headrace.wire.binary import Frame, Type


class Request:
    """A batch that the producer sent, and how it is answered."""

    def __init__(self, properties: dict[str, str], body: bytes, answer: Callable[..., None]):
        self.topic, self.partition = properties["topic"], int(properties["partition"])
        planned_on = properties.get("partitions")
        self.planned_on = None if planned_on is None else int(planned_on)
        batch = parse(body)
        assert batch is not None
        self.batch: Batch = batch
        self._answer = answer

    @property
    def values(self) -> list[bytes]:
        return self.batch.values()

    @property
    def identity(self) -> tuple[int, int]:
        return self.batch.producer_id, self.batch.first_sequence

    def store(self, offset: int, *, duplicate: bool = False, owner: str | None = None) -> None:
        properties = {"status": "success", "offset": str(offset), "timestamp": "1000"}
        if owner is not None:
            properties["owner"] = owner
        if duplicate:
            properties["duplicate"] = "true"
        self._answer(Frame(Type.ACK, 0, properties))

    def refuse(self, error: HeadraceError) -> None:
        properties = {
            "status": "error",
            "code": error.code,
            "error": error.message,
            "kind": kind_of(error),
            "retryable": str(error.retryable).lower(),
        }
        self._answer(Frame(Type.ACK, 0, properties))

    def lose(self) -> None:
        """The connection broke before the answer."""
        self._answer(None)


class FakeWire:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def send(
        self, type: int, properties: dict[str, str], body: bytes, answer: Callable[..., None]
    ) -> None:
        assert type == Type.PUBLISH_BATCH
        self.requests.append(Request(dict(properties), body, answer))

    def take(self) -> list[Request]:
        taken, self.requests = self.requests, []
        return taken


class FakeLink:
    def __init__(self) -> None:
        self.wire: FakeWire | None = FakeWire()
        self.node: str | None = None


class Rig:
    """A producer, the requests it makes, and what became of each publish."""

    def __init__(self, *, linger: float = 0.0, batch_bytes: int = 1000, timeout: float = 30.0):
        self.link = FakeLink()
        self.partitions: dict[str, int | HeadraceError] = {}
        self.hold: asyncio.Event | None = None
        self.questions = 0
        self.producer = Producer(
            self.link,  # type: ignore[arg-type]
            self._ask,
            linger=linger,
            batch_bytes=batch_bytes,
            timeout=timeout,
        )
        self.results: dict[bytes, Receipt | HeadraceError] = {}

    async def _ask(self, topic: str) -> int:
        self.questions += 1
        if self.hold is not None:
            await self.hold.wait()
        answer = self.partitions.get(topic, 1)
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    def publish(self, *values: bytes, topic: str = "orders", partition: int | None = 0) -> None:
        """One call each; partition 0 unless told otherwise, so that nothing has to be asked."""
        for value in values:
            self.producer.publish(topic, Columns([value]), partition, self._hear(value))

    def _hear(self, value: bytes) -> Callable[[Receipt | None, HeadraceError | None], None]:
        def done(receipt: Receipt | None, error: HeadraceError | None) -> None:
            assert value not in self.results, f"{value!r} was answered twice"
            result = receipt or error
            assert result is not None
            self.results[value] = result

        return done

    async def settle(self) -> None:
        """Let everything run that is ready to."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def sent(self) -> list[Request]:
        """What has been sent since the last time."""
        await self.settle()
        assert self.link.wire is not None
        return self.link.wire.take()

    async def one(self) -> Request:
        (request,) = await self.sent()
        return request

    def go_down(self, *unanswered: Request) -> None:
        self.link.wire = None
        for request in unanswered:
            request.lose()

    def come_up(self) -> None:
        self.link.wire = FakeWire()
        self.producer.resume()

    def code(self, value: bytes) -> str:
        result = self.results[value]
        assert isinstance(result, HeadraceError), result
        return result.code

    def offset(self, value: bytes) -> int:
        result = self.results[value]
        assert isinstance(result, Receipt), result
        return result.offset


async def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Until the condition holds, looked at in every turn of the loop."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine, on a loop of its own."""

    def wrapper() -> None:
        asyncio.run(test())

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper
