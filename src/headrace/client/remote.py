"""Operations over the wire: each is one ``ADMIN`` request with a JSON answer.

After a broken connection, an operation that may be repeated is sent again; the others raise
:class:`OutcomeUnknown`. Patient ones (jobs of many tasks) are also tried again while the broker is full,
busy or restarting, for as long as a publish would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace import limits
from headrace.client.link import Link
from headrace.client.owners import Owners, Question
from headrace.errors import (
    BrokerFailed,
    Closed,
    ConnectFailed,
    ConnectionLost,
    DataCorrupt,
    HeadraceError,
    NotFound,
    OutcomeUnknown,
    RequestTimeout,
)
from headrace.facade import AsyncFacade
from headrace.log.batch import Batch
from headrace.log.run import take_all
from headrace.model import Message, Receipt
from headrace.operations.declaring import Operation
from headrace.operations.results import Redriven
from headrace.paging import Page
from headrace.wire import binary
from headrace.wire.binary import Frame, Type

Result = TypeVar("Result")
RETRY_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
WAIT_S_MAX = 30.0
"""Of one ``wait_for`` request; a longer wait asks again."""
REDRIVE_WAIT_S = 10.0
"""Of one question about a redrive."""
REPLY_SPARE_S = 2.0
"""How long the broker may take to say that nobody has replied in time."""


class RemoteOperations(AsyncFacade):
    @property
    def link(self) -> Link:
        raise NotImplementedError

    @property
    def owners(self) -> Owners:
        raise NotImplementedError

    @property
    def patience(self) -> float:
        """Seconds for which a request that can succeed later is tried again."""
        raise NotImplementedError

    async def _operate(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        operation.check(arguments)  # a mistake is refused here, without asking the broker
        if operation.name == "wait_for":
            return await self._wait_for(operation, arguments)
        if operation.name == "request":
            return await self._request(operation, arguments)
        if operation.name == "redrive" and "wait" not in arguments:
            return await self._redrive(operation, arguments)
        return await self._attempt(operation, arguments)

    async def _attempt(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        body = operation.encode(arguments)
        if not operation.patient:
            seconds = self.link.request_timeout + arguments.get("wait", 0.0)
            return operation.decode(await self._ask(operation, body, seconds))

        async def ask(seconds: float) -> bytes:
            return await self._ask(operation, body, seconds)

        seconds = self.patience if operation.name == "commit_staged" else self.link.request_timeout
        return operation.decode(await self._patiently(ask, seconds + arguments.get("wait", 0.0)))

    async def _ask(self, operation: Operation, body: bytes, timeout: float | None = None) -> bytes:
        try:
            frame = await self.link.ask(
                Type.ADMIN, {}, body, again=operation.repeatable, timeout=timeout
            )
        except ConnectionLost:
            raise OutcomeUnknown(
                f"the connection broke during {operation.name}: it may or may not have been done"
            ) from None
        return frame.body

    async def _patiently(
        self, ask: Callable[[float], Awaitable[Result]], seconds: float | None = None
    ) -> Result:
        """Ask, again and again while that may help. ``ask`` gets the seconds that are left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.patience if seconds is None else seconds)
        tries = 0
        while True:
            try:
                return await ask(max(deadline - loop.time(), 0.001))
            except HeadraceError as error:
                pause = RETRY_S[min(tries, len(RETRY_S) - 1)]
                # A broker that stops is, as a rule, followed by one that starts.
                stopping = isinstance(error, (Closed, BrokerFailed)) and not self.link.is_closed
                if not (error.retryable or stopping) or loop.time() + pause >= deadline:
                    raise
            tries += 1
            await asyncio.sleep(pause)

    async def _wait_for(self, operation: Operation, arguments: dict[str, Any]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + arguments["wait"]
        while True:
            wait = min(max(deadline - loop.time(), 0.0), WAIT_S_MAX)
            if await self._attempt(operation, {**arguments, "wait": wait}):
                return True
            if loop.time() >= deadline:
                return False

    async def _request(self, operation: Operation, arguments: dict[str, Any]) -> Message:
        # With an id of its own it can be sent again: the broker knows it, and publishes once.
        given = {"id": str(uuid.uuid4()), **arguments}
        seconds = given.get("wait", operation.arguments["wait"].default) + REPLY_SPARE_S
        message: Message = operation.decode(
            await self._ask(operation, operation.encode(given), seconds)
        )
        return message

    async def _redrive(self, operation: Operation, arguments: dict[str, Any]) -> Redriven:
        """However long it takes. The questions renew its lease, so it stops when this client is gone."""
        subscription: str = arguments["subscription"]
        id = arguments.get("id") or uuid.uuid4()
        given = {"lease": limits.REDRIVE_LEASE_S, **arguments, "id": str(id)}
        wait = min(REDRIVE_WAIT_S, given["lease"] / 3)
        try:
            try:
                found: Redriven = await self._attempt(operation, {**given, "wait": wait})
            except OutcomeUnknown:  # the connection broke: it may have begun
                found = await self.redrive_progress(subscription, id)
            while found["state"] == "running":
                found = await self.redrive_progress(subscription, id, wait=wait)
        except asyncio.CancelledError:
            with contextlib.suppress(HeadraceError):  # else its lease ends it
                await self.stop_redrive(subscription, id)
            raise
        except (ConnectFailed, ConnectionLost, RequestTimeout, NotFound) as error:
            if isinstance(error, NotFound) and error.code != "redrive_not_found":
                raise
            raise OutcomeUnknown(
                f"the broker was lost during the redrive ({error.message}); letters that are still listed "
                "were not redriven: begin it again"
            ) from error
        return found

    # --- batches ----------------------------------------------------------------------------
    async def _stage(self, topic: str, batch: Batch, partition: int | None, **purpose: Any) -> str:
        more = {key: str(purpose[key]) for key in ("name", "number") if purpose[key] is not None}
        if purpose["delayed"]:
            more["delayed"] = "true"
        frame = await self._send(Type.STAGE, topic, batch, partition, more)
        return frame.properties["piece"]

    async def publish_batch(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Receipt:
        return receipt_of(await self._send(Type.PUBLISH_BATCH, topic, batch, partition))

    async def _send(
        self,
        type: int,
        topic: str,
        batch: Batch,
        partition: int | None,
        more: Mapping[str, str] | None = None,
    ) -> Frame:
        properties = {"topic": topic, **(more or {})}
        if partition is not None:
            properties["partition"] = str(partition)
        raw = batch.raw()
        owners = self.owners

        async def when_there_is_room() -> Frame:
            if partition is not None and type == Type.PUBLISH_BATCH and owners.is_active:
                question = Question(type, properties, raw)
                return await owners.send((topic, partition), question, self.patience)
            wire = await self.link.ready()
            await wire.writable()
            return await self.link.ask(type, properties, raw, again=True, timeout=self.patience)

        async def ask(seconds: float) -> Frame:
            return await self.link.within_time(when_there_is_room(), seconds)

        return await self._patiently(ask)


# --- answers ----------------------------------------------------------------------------------------
def batches_in(body: bytes) -> list[Batch]:
    """The batches of an answer, small neighbours joined."""
    found, at = take_all(body, 0, limits.OFFSET_MAX)
    if at < len(body):
        raise DataCorrupt("a fetched batch arrived damaged")
    return found


def merged_page(topic: str, frame: Frame, *, values: bool) -> Page[Any]:
    """The answer to a fetch of several partitions: positions, places, and one batch of all messages."""
    count, partitions = int(frame.properties["count"]), int(frame.properties["partitions"])
    numbers = list(binary.decode_places(frame.body, partitions + count))
    batches = batches_in(frame.body[binary.PLACE_BYTES * len(numbers) :])
    found: list[Any] = []
    for batch in batches:
        found += batch.values() if values else batch.messages(topic, 0)
    if not values:
        for message, (partition, offset) in zip(found, numbers[partitions:], strict=True):
            message.partition, message.offset = partition, offset
    return Page(found, dict(numbers[:partitions]))


def receipt_of(frame: Frame) -> Receipt:
    properties = frame.properties
    return Receipt(
        properties["topic"],
        int(properties["partition"]) if "partition" in properties else None,
        int(properties["offset"]) if "offset" in properties else None,
        int(properties["timestamp"]),
        int(properties.get("count", "1")),
        properties.get("duplicate") == "true",
        uuid.UUID(properties["id"]).bytes,
    )
