"""The redrives of a broker: those that run, and the counts of those that ended lately.

A redrive runs in the broker (``redriving.py``), whoever waits for it, so its end must be said::

    begin ──▶ running ──▶ done       no letters are left
                 │  │ └─▶ failed     an error that concerns all letters, or the broker closes
                 │  └───▶ stopped    by ``stop_redrive``
                 └──────▶ stopped    its lease ran out: nobody has asked for its progress for so long

Rules:
- A client that waits for a redrive asks for its progress again and again, and so renews its lease: when the
  client is gone, in whatever way, the redrive stops. One that was begun with ``wait`` and without a lease is
  left to the broker, and goes on.
- A redrive is known on the node that runs it, by its id, and until the broker ends. What it has done is
  durable; who wants the rest begins another one.
- One that has ended keeps its counts, and not its letters.

Rejected: a redrive that ends with its connection. A client may connect again, a proxy may hold the connection of
a client that is gone, and in a cluster the connection is at another node.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import limits
from headrace.access.caller import Caller
from headrace.access.rights import Right
from headrace.broker.audit import IN_PROCESS, Source
from headrace.broker.permissions import Permissions
from headrace.broker.redriving import Begun, Redrive, Select
from headrace.broker.transforming import check_transform
from headrace.broker.watching import letter_filter
from headrace.clock import Timer
from headrace.errors import Conflict, HeadraceError, NotFound, QueueFull, SubscriptionNotFound
from headrace.log.interface import completed
from headrace.model import DeadLetter
from headrace.operations.arguments import Correction
from headrace.operations.results import Redriven

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")


class Ended(NamedTuple):
    """What is kept of a redrive."""

    letters: str
    status: Redriven
    error: HeadraceError | None


class Redrives:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._running: dict[uuid.UUID, Redrive] = {}
        self._ended: OrderedDict[uuid.UUID, Ended] = OrderedDict()
        self._leases: dict[uuid.UUID, Timer] = {}

    def begin(self, redrive: Redrive) -> None:
        id = redrive.begun.id
        if id in self._running or id in self._ended:
            raise Conflict(
                f"there is another redrive {id}; use a new random id", code="redrive_exists"
            )
        if len(self._running) >= limits.REDRIVES_MAX:
            raise QueueFull(
                f"{len(self._running)} redrives are running; wait for some of them, or stop them",
                code="too_many_redrives",
            )
        self._running[id] = redrive
        redrive.then(lambda: self._keep(redrive))
        self.renew(redrive)
        redrive.step()

    def renew(self, redrive: Redrive) -> None:
        """Somebody asks for it: its lease begins anew."""
        begun = redrive.begun
        if begun.lease_s is None or redrive.state != "running":
            return
        timer = self._leases.pop(begun.id, None)
        if timer is not None:
            timer.cancel()
        self._leases[begun.id] = self._engine.call_later(begun.lease_s, self._expire, redrive)

    def _expire(self, redrive: Redrive) -> None:
        del self._leases[redrive.begun.id]
        why = f"nobody has asked for it for {redrive.begun.lease_s:g} seconds"
        logger.warning(
            "the redrive of %s by %s is stopped: %s", redrive.letters, redrive.begun.by, why
        )
        redrive.stop(why)

    def _keep(self, redrive: Redrive) -> None:
        id = redrive.begun.id
        del self._running[id]
        timer = self._leases.pop(id, None)
        if timer is not None:
            timer.cancel()
        self._ended[id] = Ended(redrive.letters, redrive.status(), redrive.error)
        if len(self._ended) > limits.REDRIVES_KEPT_MAX:
            self._ended.popitem(last=False)

    def running(self, letters: str, id: uuid.UUID) -> Redrive | None:
        found = self._running.get(id)
        return found if found is not None and found.letters == letters else None

    def ended(self, letters: str, id: uuid.UUID) -> Ended:
        found = self._ended.get(id)
        if found is None or found.letters != letters:
            raise NotFound(
                f"no redrive {id} runs or ended lately; a broker that was started again knows none of "
                "before. Letters that are still listed were not redriven",
                code="redrive_not_found",
            )
        return found

    def of(self, letters: str) -> list[Redriven]:
        """Those of a dead-letter topic, oldest first."""
        found = [each.status for each in self._ended.values() if each.letters == letters]
        found += [each.status() for each in self._running.values() if each.letters == letters]
        return sorted(found, key=lambda each: each["began"])

    def close(self, error: HeadraceError) -> None:
        for redrive in list(self._running.values()):
            redrive.close(error)
        for timer in self._leases.values():
            timer.cancel()
        self._leases.clear()


class RedriveAdministration:
    """The operations of ``operations/redriving.py``, for :class:`~headrace.broker.administration.Administration`."""

    engine: Engine
    caller: Caller
    permissions: Permissions
    source: Source

    async def redrive(
        self,
        subscription: str,
        offsets: list[int] | None,
        reason: str | None,
        topic: str | None,
        limit: int | None,
        rate: float | None,
        to: str,
        destination: str | None,
        transform: Any,
        corrections: dict[int, Correction] | None,
        id: uuid.UUID | None,
        wait: float | None,
        lease: float | None,
    ) -> Redriven:
        if transform is not None:
            check_transform(transform)
        if destination is not None:
            self.permissions.check_publish(destination)
        engine = self.engine
        begin = partial(
            engine.dead_letters.redrive,
            subscription,
            lambda result, error: None,
            offsets=offsets,
            where=letter_filter(reason, topic),
            limit=limit,
            rate=rate,
            to=to,
            destination=destination,
            transform=transform,
            corrections=corrections,
            allowed=self._redrivable(destination),
            begun=Begun(id or uuid.uuid4(), self.caller.name, engine.now_ms(), lease),
        )
        return await self._follow(await completed(begin), wait)

    def _redrivable(self, destination: str | None) -> Select | None:
        """A letter says itself where it comes from, and anybody can publish one that says anything: it goes
        only where the caller could publish it. None: everywhere."""
        if self.caller.unlimited:
            return None
        rights: tuple[Right, ...] = ("publish", "manage") if destination is None else ("browse",)

        def may(letter: DeadLetter) -> bool:
            return any(self.permissions.may_see_letter(right, letter) for right in rights)

        return may

    async def _follow(self, redrive: Redrive, wait: float | None) -> Redriven:
        """How far it is when it has ended, or after so many seconds."""
        ended = asyncio.Event()
        redrive.then(ended.set)
        try:
            async with asyncio.timeout(wait):
                await ended.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if wait is None and self.source is IN_PROCESS:  # of others, the connection may be lost
                redrive.stop("the call was cancelled")
            raise
        finally:
            redrive.forget(ended.set)
        if redrive.error is not None:
            raise redrive.error.with_traceback(None)
        return redrive.status()

    async def redrives(self, subscription: str) -> list[Redriven]:
        letters, sees = self.engine.dead_letters, self.permissions.sees
        try:
            return letters.redrives.of(letters.topic_of(subscription))
        except SubscriptionNotFound:
            if any(
                each.name == subscription and sees(each) for each in self.engine.subscriptions()
            ):
                return []
            raise

    async def redrive_progress(self, subscription: str, id: uuid.UUID, wait: float) -> Redriven:
        redrives, letters = self._redrives(subscription)
        redrive = redrives.running(letters, id)
        if redrive is None:
            ended = redrives.ended(letters, id)
            if ended.error is not None:
                raise ended.error.with_traceback(None)
            return ended.status
        redrives.renew(redrive)
        try:
            return await self._follow(redrive, wait)
        finally:
            redrives.renew(redrive)

    async def stop_redrive(self, subscription: str, id: uuid.UUID) -> Redriven:
        redrives, letters = self._redrives(subscription)
        redrive = redrives.running(letters, id)
        if redrive is None:
            return redrives.ended(letters, id).status
        redrive.stop(f"stopped by {self.caller.name}")
        ended = asyncio.Event()
        redrive.then(ended.set)
        await ended.wait()
        return redrive.status()

    def _redrives(self, subscription: str) -> tuple[Redrives, str]:
        """All redrives, and the topic of the subscription's letters."""
        letters = self.engine.dead_letters
        return letters.redrives, letters.topic_of(subscription)
