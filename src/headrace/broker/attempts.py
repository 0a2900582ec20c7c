"""``max_deliveries`` over crashes: no message is delivered more often, however the broker ends.

A delivery must be in the journal before it can be lost with the process, but a plain first delivery must not
wait for the disk. So:

- First deliveries may go up to an offset that the journal already has (``Cursor.allowed``). It is kept ahead by
  what is delivered in a fraction of a second, so in practice nothing waits for it but the first delivery
  after a start, and in a new partition.
- A message that failed is delivered again when the journal counts that delivery as made (*armed*). A delivery
  that is not begun is taken back. So what a kill costs a message that failed before is exact: nothing while
  it waits for its turn, however long that is.

After a broker that did not stop cleanly, every message before that offset that is not done and never failed may
have been out once more, and is counted so (``Cursor.doubts``), up to the last delivery but one; then it is
delivered as one that failed is. So a message that had never been delivered may lose one of its attempts if it
was about to be, but not the last one. With ``max_deliveries=1`` there is no other one: then the offset in the
journal is never ahead, and a message that may have been out becomes a dead letter.

Rejected: an entry in the journal for each delivery (a disk write in every delivery); counting only what the
journal happens to know (the last 50 milliseconds would be forgotten at every crash, without a bound); one more
attempt for everything that had failed and was not done (fifteen kills made one message in ten a dead letter).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from headrace import limits
from headrace.broker.activity import REASON_CHARS
from headrace.broker.cursor import UNLIMITED, Cursor
from headrace.broker.history import Failure
from headrace.errors import HeadraceError
from headrace.log.batch import Batch

if TYPE_CHECKING:
    from headrace.broker.delivery import Lease, Member
    from headrace.broker.subscription import Subscription

AHEAD_MIN, AHEAD_MAX = 64, 32_768
"""How many first deliveries the journal allows in advance; more for a subscription that is fast."""
QUICK_S = 0.025
"""Half of that is to last for so long, and four times as long as the journal takes to write it."""
LAST_ATTEMPT_PAUSE_S = 0.1
"""After this time a member for the last attempt of a message is looked for again."""
INTERRUPTED = "the broker stopped during the last delivery"
Place = tuple[int, int]
"""(cursor number, offset)"""
Value = TypeVar("Value")


def first_reserve(subscription: Subscription, cursor: Cursor) -> None:
    """Ask for the first deliveries of a cursor that is about to be written to the journal."""
    if subscription.settings.max_deliveries > 1 and cursor.partition.log.durable:
        cursor.ahead = AHEAD_MIN
        subscription._attempts.reserve(cursor, cursor.next + AHEAD_MIN)


def recall(cursor: Cursor, kept: dict[str, Any] | None, limit: int, *, clean: bool) -> None:
    """At a start: what the journal has kept about deliveries; the last broker stopped cleanly, or not.

    Nothing is allowed in advance: a subscription without members loses nothing by kills.
    """
    if kept is not None:
        cursor.recall(kept["reserved"], kept["doubts"], clean=clean, limit=limit)


@dataclass(slots=True, eq=False)
class Attempts:
    """The part of a subscription that counts deliveries."""

    _owner: Subscription
    _arming: set[Place] = field(default_factory=set)
    """They wait for the journal."""
    _armed: set[Place] = field(default_factory=set)
    """The journal counts their next delivery, as ``Cursor.attempts`` does: it may be made."""
    _failed_by: dict[Place, Member] = field(default_factory=dict)
    """Who had the last attempt but one."""
    _given_up: dict[Place, str] = field(default_factory=dict)
    """Why a message was given up whose dead letter could not be stored yet."""
    _waiting: set[int] = field(default_factory=set)
    """Numbers of the cursors whose next first delivery waits for the journal."""
    _took: float = 0.0
    """Seconds that the journal needed for the last permission."""

    def __len__(self) -> int:
        return len(self._arming)

    @property
    def is_fetching(self) -> bool:
        """Whether something can go on only when the journal is written."""
        return bool(self._arming or self._waiting)

    # --- first deliveries -----------------------------------------------------------------------
    def admit(self, cursor: Cursor, end: int) -> int:
        """How far first deliveries may go, at most to ``end``; asks for more in advance."""
        owner = self._owner
        context, limit = owner._context, owner.settings.max_deliveries
        if not limit or not context.keeps_positions or not cursor.partition.log.durable:
            cursor.allowed = cursor.reserve_at = UNLIMITED
            return end
        # No more than is going to be delivered; but many at a time where most are done or for others.
        room = owner.members.room()
        end = min(end, cursor.next + (room if limit == 1 else max(room, AHEAD_MIN)))
        if end + cursor.ahead // 2 > cursor.reserved:
            lasted = context.time() - cursor.reserved_at
            quick = max(QUICK_S, 4 * self._took)
            if limit == 1:
                cursor.ahead = 0
            elif cursor.allowed <= cursor.next or lasted < quick:
                cursor.ahead = min(max(2 * cursor.ahead, AHEAD_MIN), AHEAD_MAX)
            elif lasted > 4 * quick:
                cursor.ahead = max(cursor.ahead // 2, AHEAD_MIN)
            self.reserve(cursor, end + cursor.ahead)
        if cursor.allowed <= cursor.next:
            cursor.waiting = True
            self._waiting.add(cursor.number)
        return min(end, cursor.allowed)

    def reserve(self, cursor: Cursor, upto: int) -> None:
        cursor.reserved, cursor.reserved_at = upto, self._owner._context.time()
        self._owner._context.reserve(cursor, lambda error: self._reserved(cursor, upto))

    def _reserved(self, cursor: Cursor, upto: int) -> None:
        # Also after an error: a journal that finds no room must not stop the deliveries.
        self._waiting.discard(cursor.number)
        self._took = self._owner._context.time() - cursor.reserved_at
        if cursor.waiting:  # it was not enough
            cursor.ahead = min(2 * cursor.ahead, AHEAD_MAX)
        cursor.allowed = max(cursor.allowed, upto)
        cursor.reserve_at = cursor.allowed - cursor.ahead // 2
        cursor.waiting = False
        self._owner.wake()

    def is_retry(self, cursor: Cursor, offset: int) -> bool:
        """Whether a message that was read, after a start, has failed before, or is due for its last attempt,
        or has had it."""
        limit = self._owner.settings.max_deliveries
        failures = cursor.failures(offset)
        return bool(limit and failures and (offset in cursor.attempts or failures + 1 >= limit))

    def share(self, cursor: Cursor, batch: Batch, indexes: Sequence[int]) -> Sequence[int]:
        """Deal out those that go the usual way, and note the retries among them.

        Returns those that found no room. The retries behind the first of these are read again.
        """
        usual: list[int] = []
        retries: list[int] = []
        for index in indexes:
            is_retry = self.is_retry(cursor, batch.base_offset + index)
            (retries if is_retry else usual).append(index)
        left = self._owner._share(cursor, batch, usual)
        for index in retries:
            if not left or index < left[0]:
                self._owner._retries.add(cursor, batch.base_offset + index)
        return left

    # --- retries --------------------------------------------------------------------------------
    def ready(self, cursor: Cursor, batch: Batch, indexes: Sequence[int]) -> Sequence[int]:
        """Those that may go now, together. The others wait for the journal, go alone, or are given up."""
        limit = self._owner.settings.max_deliveries
        if not limit or not (cursor.attempts or cursor.doubts):
            return indexes
        now: list[int] = []
        waiting: list[Place] = []
        # No more than the members have room for: what is armed and not delivered is given up at a kill.
        room = self._owner.members.room() - len(self._arming) - len(self._armed)
        for index in indexes:
            offset = batch.base_offset + index
            place = (cursor.number, offset)
            failures = cursor.failures(offset)
            if not failures:
                now.append(index)
            elif place in self._armed:
                if failures < limit:
                    now.append(index)
                else:
                    self._last(cursor, batch, index)
            elif failures >= limit and (limit == 1 or offset in cursor.attempts):
                self._give_up(cursor, offset, failures)
            elif len(waiting) >= room:
                self._owner._retry_at(
                    self._owner._context.time() + LAST_ATTEMPT_PAUSE_S, cursor, offset
                )
            else:  # doubts alone give no message up, also when the limit was lowered
                waiting.append(place)
                cursor.failed(offset, min(failures + 1, limit))
        if waiting:
            self._arm(cursor, waiting)
        return now

    def _arm(self, cursor: Cursor, places: list[Place]) -> None:
        self._arming.update(places)
        context = self._owner._context
        context.changed(cursor)

        def written(_error: HeadraceError | None) -> None:
            # Those that are left: the subscription may have been moved meanwhile.
            armed = [place for place in places if place in self._arming]
            self._arming.difference_update(armed)
            self._armed.update(armed)
            self._owner._retries.add_first(cursor, [offset for _, offset in armed])
            self._owner.wake()

        if context.keeps_positions:
            context.flush(written)
        else:
            written(None)

    def _last(self, cursor: Cursor, batch: Batch, index: int) -> None:
        """The last permitted delivery, which the journal has: alone, and to another member."""
        owner, offset = self._owner, batch.base_offset + index
        place = (cursor.number, offset)
        member, is_worth_waiting = owner.members.for_last_attempt(self._failed_by.get(place))
        if member is not None:
            self._failed_by.pop(place, None)
            owner._give(member, cursor, batch, [index], batch.stored_bytes // batch.count)
        elif is_worth_waiting:
            owner._retry_at(owner._context.time() + LAST_ATTEMPT_PAUSE_S, cursor, offset)
        else:
            owner._retries.add(cursor, offset)

    def _give_up(self, cursor: Cursor, offset: int, attempt: int) -> None:
        """It was delivered as often as it may be, or a killed broker may have done so."""
        reason = self._given_up.pop((cursor.number, offset), INTERRUPTED)
        self._owner._bury(cursor, offset, attempt, reason)

    def numbers(self, cursor: Cursor, offsets: Sequence[int]) -> list[int]:
        """Of a delivery of these, which attempt each one is."""
        most = self._owner.settings.max_deliveries or limits.MAX_DELIVERIES_MAX
        armed, number = self._armed, cursor.number
        found = []
        for offset in offsets:
            count = cursor.failures(offset)
            if (number, offset) in armed:  # it is counted already
                armed.discard((number, offset))
            else:
                count += 1
            found.append(min(count, most))
        return found

    # --- what became of deliveries ----------------------------------------------------------------
    def failed(self, lease: Lease, index: int, reason: str) -> None:
        """Remember that a delivery failed, and whose it was if the next attempt is the last one."""
        owner = self._owner
        owner._context.history.failures.append(
            Failure(
                owner.number, lease.cursor.number, lease.offsets[index], owner._context.now_ms(),
                lease.attempt_at(index), lease.member.name, reason[:REASON_CHARS],
            )
        )  # fmt: skip
        if lease.attempt_at(index) + 1 == self._owner.settings.max_deliveries:
            self._failed_by[lease.cursor.number, lease.offsets[index]] = lease.member

    def not_begun(self, lease: Lease, index: int) -> None:
        """A delivery that does not count: if the journal counts it, that is taken back."""
        attempt, offset = lease.attempt_at(index), lease.offsets[index]
        if attempt > 1 and lease.cursor.attempts.get(offset) == attempt:
            self._take_back(lease.cursor, offset)

    def _take_back(self, cursor: Cursor, offset: int) -> None:
        cursor.failed(offset, cursor.attempts[offset] - 1)
        self._owner._context.changed(cursor)

    def closed(self, leases: Iterable[Lease]) -> None:
        """The broker stops cleanly, and does not count what is out, nor what was only about to be."""
        owner = self._owner
        if owner._context.failed is not None:
            return  # the journal has the last word, and may have it already
        for lease in leases:
            if lease.attempts != 1:
                for index in lease.out():
                    self.not_begun(lease, index)
        cursors = {cursor.number: cursor for cursor in owner.cursors.values()}
        for number, offset in (*self._arming, *self._armed):
            cursor = cursors.get(number)
            if cursor is not None and cursor.attempts.get(offset, 0) > 1:
                self._take_back(cursor, offset)

    def not_buried(self, cursor: Cursor, offset: int, reason: str) -> None:
        self._given_up[cursor.number, offset] = reason

    def forget(self, cursor: Cursor, before: int | None) -> None:
        """The subscription was moved. A delivery that was only about to be made does not count."""
        for place in (*self._arming, *self._armed):
            if not is_other(place, cursor, before) and cursor.attempts.get(place[1], 0) > 1:
                self._take_back(cursor, place[1])
        self._arming = {place for place in self._arming if is_other(place, cursor, before)}
        self._armed = {place for place in self._armed if is_other(place, cursor, before)}
        self._failed_by = others(self._failed_by, cursor, before)
        self._given_up = others(self._given_up, cursor, before)


def is_other(place: Place, cursor: Cursor, before: int | None) -> bool:
    """Not of the cursor; with ``before`` also what is at that offset of it or behind."""
    return place[0] != cursor.number or (before is not None and place[1] >= before)


def others(places: dict[Place, Value], cursor: Cursor, before: int | None) -> dict[Place, Value]:
    return {place: value for place, value in places.items() if is_other(place, cursor, before)}
