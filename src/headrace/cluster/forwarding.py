"""Publishes to partitions that other nodes own: one queue for each partition, sent in batches.

What waits is taken together, as a group commit does: plain records become one batch, batches of idempotent producers stay what they
are. All of a *burst* is sent at once, in order, and the next one when it is answered. Meanwhile more gathers.

A batch without a producer gets the queue's own, with the next sequence. So it can be sent again, to the same owner or
to the next one, when the first goes away in between: if it was stored, it is answered with its first offset, and nothing is doubled.
What is refused has not used its sequence: those after it are refused, too, and go again under a new producer. A burst has no more of them than
an owner remembers.

A batch is *doubtful* when it was sent and not answered, or answered with an unknown outcome: it may be stored, now or later. It is sent again
until it is answered, whatever refusals that may pass (Kafka is away) come in between: they are about the repetition only.

An entry waits for at most ``timeout`` seconds. If it is certainly not stored, the error is definite and it is not sent any more; otherwise
its outcome is unknown.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.cluster.peers import address_of
from headrace.errors import HeadraceError, OutcomeUnknown, SequenceGap, StorageFailed
from headrace.log.batch import Batch, encode
from headrace.log.columns import concat, pieces
from headrace.log.interface import Append
from headrace.wire.binary import Frame, Type

if TYPE_CHECKING:
    from headrace.cluster.node import Node
    from headrace.engine.kafka.log import KafkaLog

logger = logging.getLogger("headrace.cluster")
AGAIN_S = 0.05
BURST_BYTES = 4 << 20
AGAIN = ("partition_moved", "closed", "broker_failed", "topic_not_found")
"""Refusals of a node that does not serve the partition, or not any more."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One batch under way, and the entries that are in it."""

    batch: Batch
    entries: list[Append]
    is_run: bool
    """Its producer is this queue's."""
    sent: bool = False
    tries: int = 0
    answered: bool = False
    whole: bool = True
    """All of its entry is in it."""
    again: bool = False
    """It was certainly not stored, and goes again with another number."""
    doubtful: bool = False
    refusal: HeadraceError | None = None
    """Its answer, unless it is a repetition. The entry may be given up before it is known."""

    @property
    def may_be_stored(self) -> bool:
        return self.sent or self.doubtful


class ForwardQueue:
    def __init__(self, node: Node, log: KafkaLog):
        self._node, self._log = node, log
        self._waiting: deque[tuple[float, Append]] = deque()
        """(when it is given up, entry)"""
        self._burst: list[Parcel] = []
        self._until: dict[Append, float] = {}
        self._producer, self._sequence = _new_producer(), 0
        self._renews = False
        self.batches = 0
        """That were sent, again and again counted."""
        self._timer: Any = None
        self._due = False

    def put(self, entry: Append) -> None:
        loop = self._node.loop
        self._waiting.append((loop.time() + self._node.timeout, entry))
        self.wake()

    def wake(self) -> None:
        """Something has changed: entries, the owner, the connection."""
        if not self._due:
            self._due = True
            self._node.loop.call_soon(self._go)

    def _later(self) -> None:
        if self._timer is None:
            self._timer = self._node.loop.call_later(AGAIN_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._give_up()
        self._go()

    def _give_up(self) -> None:
        now = self._node.loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            _, entry = self._waiting.popleft()
            entry.fail(self._nobody())
        for parcel in self._burst:
            late = [entry for entry in parcel.entries if self._until.get(entry, now + 1) <= now]
            is_definite = parcel.again or (parcel.whole and not parcel.may_be_stored)
            if late and is_definite:
                self._drop(parcel)
            for entry in late:
                parcel.entries.remove(entry) if not parcel.is_run else None
                if self._until.pop(entry, None) is not None:
                    entry.fail(self._nobody() if is_definite else self._unknown())
        self._end_burst()

    def _drop(self, parcel: Parcel) -> None:
        """Never send it again. Numbers that follow its own are refused without it, so nothing after it is stored, either:
        what is not late goes again with other numbers."""
        for each in self._burst[self._burst.index(parcel) :]:
            if each is parcel or (parcel.is_run and each.is_run and not each.answered):
                each.answered = each.again = True
        self._renews |= parcel.is_run

    def _nobody(self) -> StorageFailed:
        topic, number = self._log.about
        return StorageFailed(
            f"no node has served partition {number} of {topic!r} for {self._node.timeout:g} seconds; nothing "
            "was stored, try again",
            code="no_owner",
        )

    def _unknown(self) -> OutcomeUnknown:
        topic, number = self._log.about
        return OutcomeUnknown(
            f"the node that owns partition {number} of {topic!r} has not answered for {self._node.timeout:g} "
            "seconds: this may be stored, now or later"
        )

    # --- sending ------------------------------------------------------------------------------
    def _go(self) -> None:
        self._due = False
        if not self._burst and not self._waiting:
            return
        owner = self._log.replica.owner
        if self._log.owned and not self._burst:
            waiting, self._waiting = self._waiting, deque()
            for _, entry in waiting:
                self._log.append(entry)
            return
        self._later()
        if owner is None or address_of(owner) == self._node.address:
            if self._log.owned:
                self._store_here()
            return
        try:
            peer = self._node.peers.get(address_of(owner))
        except HeadraceError as error:
            logger.warning("%s", error)
            return
        if not peer.is_up:
            peer.on_up[self] = self.wake
            return
        if not self._burst:
            self._gather()
        topic, number = self._log.about
        for parcel in self._burst:
            if parcel.sent or parcel.answered:
                continue
            parcel.sent = True
            parcel.tries += 1
            self.batches += 1
            properties = {"topic": topic, "partition": str(number), "forwarded": "true"}
            if parcel.refusal is not None:
                properties["only_repeated"] = "true"
            raw, figures = parcel.batch.raw(), self._node.figures
            figures.forwarded_batches += 1
            figures.forwarded_bytes += len(raw)
            peer.send(Type.PUBLISH_BATCH, properties, raw, self._answered_by(parcel))

    def _store_here(self) -> None:
        """It was sent to an owner that is gone, and this node is the next one."""
        for parcel in self._burst:
            if not parcel.answered and not parcel.sent:
                parcel.sent = True
                parcel.tries += 1

                def stored(entry: Append, parcel: Parcel = parcel) -> None:
                    if entry.error is not None:
                        self._finish(parcel, None, entry.error)
                    else:
                        place = {
                            "offset": str(entry.first_offset),
                            "timestamp": str(entry.timestamp),
                        }
                        if entry.duplicate:
                            place["duplicate"] = "true"
                        self._finish(parcel, Frame(0, 0, place), None)

                entry = Append.of_batch(parcel.batch, stored)
                entry.refusal = parcel.refusal
                self._log.append(entry)

    def _gather(self) -> None:
        """A burst: batches as they came, then plain records as one batch."""
        size = own = 0
        run: list[Append] = []
        while self._waiting and size < BURST_BYTES and own < limits.PRODUCER_BATCHES_KEPT:
            until, entry = self._waiting[0]
            columns = None if entry.batch is not None or entry.producer_id else entry.columns
            is_plain = columns is not None and columns.times is None
            if run and (not is_plain or size + entry.bytes > limits.BATCH_BYTES_TARGET):
                break
            self._waiting.popleft()
            self._until[entry] = until
            size += entry.bytes
            if is_plain:
                run.append(entry)
                continue
            try:
                batch = entry.batch or encode(entry.columns)  # type: ignore[arg-type]
            except HeadraceError as error:
                self._until.pop(entry)
                entry.fail(error)
                continue
            batch.producer_id = entry.producer_id
            batch.producer_epoch = entry.producer_epoch
            batch.first_sequence = entry.first_sequence
            parcel = Parcel(batch, [entry], is_run=not entry.producer_id, refusal=entry.refusal)
            self._burst.append(parcel)
            own += parcel.is_run
        if run:
            try:
                columns = concat([e.columns for e in run if e.columns is not None])
                batches = list(map(encode, pieces(columns)))
            except HeadraceError as error:
                for entry in run:
                    self._until.pop(entry)
                    entry.fail(error)
                batches = []
            is_whole = len(batches) == 1
            self._burst += [Parcel(batch, run, is_run=True, whole=is_whole) for batch in batches]
        self._number([each for each in self._burst if each.is_run])

    def _number(self, parcels: list[Parcel]) -> None:
        sequence = self._sequence
        for parcel in parcels:
            parcel.batch.producer_id = self._producer
            parcel.batch.producer_epoch = 0
            parcel.batch.first_sequence = sequence & 0xFFFF_FFFF
            sequence += parcel.batch.count

    def _answered_by(self, parcel: Parcel) -> Callable[[Frame | None, HeadraceError | None], None]:
        return lambda frame, error: self._finish(parcel, frame, error)

    def _finish(self, parcel: Parcel, frame: Frame | None, error: HeadraceError | None) -> None:
        if parcel not in self._burst or parcel.answered:
            return  # it was sent twice, and is known
        is_doubtful = error is None or _is_unknown(error)
        if frame is None and (
            error is None
            or is_doubtful
            or error.code in AGAIN
            or (parcel.doubtful and error.retryable)
        ):
            # The connection broke, or the node does not own it (any more): the same again, to whoever does.
            for each in self._burst:
                if each.sent and not each.answered and (each is not parcel or is_doubtful):
                    each.doubtful = True
                each.sent = False
            self._later()
            return
        if frame is None and parcel.doubtful:
            error = self._unknown()
            self._renews |= parcel.is_run  # nobody knows whether its numbers are used
        parcel.answered = True
        if parcel.is_run and isinstance(error, SequenceGap):
            if parcel.tries == 1:
                parcel.again = True
            else:
                error = self._unknown()
        if parcel.is_run:
            self._finish_run(parcel, frame, error)
        else:
            for entry in parcel.entries:
                if self._until.pop(entry, None) is not None:
                    _answer(entry, frame, error, 0)
        self._end_burst()

    def _end_burst(self) -> None:
        """When all of it is answered."""
        if self._burst and all(each.answered for each in self._burst):
            again = {entry: None for each in self._burst if each.again for entry in each.entries}
            if again or self._renews:
                self._producer, self._sequence, self._renews = _new_producer(), 0, False
                left = [entry for entry in again if entry in self._until]
                self._waiting.extendleft((self._until.pop(e), e) for e in reversed(left))
            self._burst = []
            self.wake()

    def _finish_run(self, parcel: Parcel, frame: Frame | None, error: HeadraceError | None) -> None:
        if frame is not None:
            self._sequence = (parcel.batch.first_sequence + parcel.batch.count) & 0xFFFF_FFFF
        if parcel.again and parcel.whole:
            return
        if not parcel.whole:  # one large entry in several batches: its first says where it is
            runs = [each for each in self._burst if each.entries is parcel.entries]
            if runs[0].again:
                return
            if frame is not None and parcel is not runs[-1]:
                parcel.batch.base_offset = int(frame.properties["offset"])
                return
            for entry in parcel.entries:
                if self._until.pop(entry, None) is None:
                    continue
                if frame is None and parcel is not runs[0]:
                    error = OutcomeUnknown(
                        f"only a part was stored; the rest was refused: {error}",
                        code="partly_stored",
                    )
                _answer(entry, frame, error, 0)
                if frame is not None:
                    entry.first_offset = runs[0].batch.base_offset
            return
        index = 0
        for entry in parcel.entries:
            if self._until.pop(entry, None) is not None:
                _answer(entry, frame, error, index, is_run=True)
            index += entry.count

    def fail(self, error: HeadraceError) -> None:
        """The topic is gone, or the node ends."""
        waiting, self._waiting = self._waiting, deque()
        burst, self._burst = self._burst, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for parcel in burst:
            for entry in parcel.entries:
                if self._until.pop(entry, None) is not None:
                    entry.fail(self._unknown() if parcel.may_be_stored else error)
        for _, entry in waiting:
            entry.fail(error)


def _new_producer() -> int:
    return secrets.randbits(62) | 1


def _is_unknown(error: HeadraceError) -> bool:
    return isinstance(error, OutcomeUnknown)


def _answer(
    entry: Append,
    frame: Frame | None,
    error: HeadraceError | None,
    index: int,
    *,
    is_run: bool = False,
) -> None:
    if frame is None:
        assert error is not None
        entry.fail(error)
        return
    entry.first_offset = int(frame.properties["offset"]) + index
    entry.timestamp = int(frame.properties["timestamp"])
    entry.duplicate = not is_run and frame.properties.get("duplicate") == "true"
    entry.done(entry)
