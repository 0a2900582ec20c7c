"""The operations about redrives of dead letters: a part of ``catalog.py``; ``broker/redrives.py`` says how they work."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace import limits
from headrace.operations.arguments import (
    Corrections,
    ExistingSubscription,
    MessageId,
    Offset,
    Offsets,
    Raises,
    Rate,
    TopicFilter,
    TopicName,
)
from headrace.operations.declaring import on_letters, route
from headrace.operations.results import Redriven
from headrace.operations.watching import Transform

RedriveWait = Annotated[float, Meta(ge=0, le=limits.REDRIVE_WAIT_S_MAX)]
RedriveLease = Annotated[float, Meta(ge=1, le=limits.REDRIVE_LEASE_S_MAX)]
KnownRedrive = Annotated[MessageId, Raises("redrive_not_found")]
"""One that runs, or ended lately."""


class RedriveOperations:
    @on_letters(
        permission="manage",
        repeatable=False,
        errors=("queue_full", "redrive_exists", "storage_full", "too_many_redrives"),
    )
    @route("POST", "/dead-letters/{subscription}/redrive", "Publish dead letters again")
    async def redrive(
        self,
        subscription: ExistingSubscription,
        *,
        offsets: Offsets | None = None,
        reason: str | None = None,
        topic: TopicFilter | None = None,
        limit: Offset | None = None,
        rate: Rate | None = None,
        to: Literal["subscription", "topic"] = "subscription",
        destination: TopicName | None = None,
        transform: Transform | None = None,
        corrections: Corrections | None = None,
        id: MessageId | None = None,
        wait: RedriveWait | None = None,
        lease: RedriveLease | None = None,
    ) -> Redriven:
        """Publish dead letters to their topic again; returns how many, and how many cannot be.

        By default all of them; otherwise those with these ``offsets``, this ``reason`` (a part of it is
        enough) or this ``topic``. With ``to="subscription"`` only the subscription that gave them up gets
        them; with ``to="topic"`` all subscriptions of the topic do. A letter that cannot be published again,
        because it does not say where it came from or the topic refuses it, is skipped, counted, and stays.
        With ``destination`` they go to that topic instead. ``transform`` changes each JSON payload: an
        object is a JSON Merge Patch, a list a JSON Patch. ``preview_redrive`` shows what would happen.
        With ``corrections`` (offset, and a new value, key or headers) only these letters are redriven, corrected.
        Every letter is redriven once: one that was dealt with is left out, also after a crash of the broker.

        The call waits until the redrive ends, and a call that is cancelled stops it. With ``wait`` it answers
        after so many seconds at the latest, and the redrive goes on in the broker: ``redrive_progress`` says
        how far it is, ``stop_redrive`` stops it. With ``lease`` it stops by itself when nobody has asked for
        its progress for so many seconds. ``id`` is a random UUID; by default the broker chooses one.

        Example::

            await client.redrive("email", reason="timeout", rate=100)
        """
        raise NotImplementedError

    @on_letters(permission="browse")
    @route("GET", "/dead-letters/{subscription}/redrives", "List redrives")
    async def redrives(self, subscription: ExistingSubscription) -> list[Redriven]:
        """The redrives of a subscription's dead letters that run or ended lately, oldest first.

        Example::

            for each in await client.redrives("email"):
                print(each["id"], each["state"], each["redriven"], each["left"])
        """
        raise NotImplementedError

    @on_letters(permission="browse")
    @route("GET", "/dead-letters/{subscription}/redrives/{id}", "Show a redrive")
    async def redrive_progress(
        self, subscription: ExistingSubscription, id: KnownRedrive, *, wait: RedriveWait = 0.0
    ) -> Redriven:
        """How far a redrive is, when it has ended or after ``wait`` seconds. Raises the error that ended it.

        Example::

            begun = await client.redrive("email", rate=5, wait=0)
            print((await client.redrive_progress("email", begun["id"], wait=10))["left"])
        """
        raise NotImplementedError

    @on_letters(permission="manage")
    @route("DELETE", "/dead-letters/{subscription}/redrives/{id}", "Stop a redrive")
    async def stop_redrive(self, subscription: ExistingSubscription, id: KnownRedrive) -> Redriven:
        """Stop a redrive, and return what it has done. Letters that it has not published stay dead letters.

        One that has ended stays as it is.

        Example::

            for each in await client.redrives("email"):
                await client.stop_redrive("email", each["id"])
        """
        raise NotImplementedError
