"""A subscription: a durable position over topics, and the members that share its messages.

A message's life here::

    log ──read──▶ out with a member ──ack──▶ done
                    │        ▲
          nack, deadline,    │ backoff
          member gone        │
                    ▼        │
                 to retry ───┘──after max_deliveries──▶ dead letter (stored first) ──▶ done

Rules:
- All on the loop. ``pump`` is the only place that hands messages out; everything else schedules it.
- Round-robin over the members that have room, message by message: of a batch shared by three, each
  gets every third record, as one strided lease.
- A failed message is retried before fresh ones are read.
- A message is *done* only by an ack, by being meant for others, by its time to live, or when its dead
  letter is durable. It is never done because a member or the broker went away.
- ``max_deliveries`` holds over crashes: ``attempts.py``.
- ``ordering="key"``: a key that is out or waiting for a retry is *busy*; later messages of the same
  key are parked until it is free. Messages without a key are not ordered.

Rejected: an object per message in flight (250 MB for a million, against 2 MB); a timer per message.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from headrace import limits
from headrace.broker.activity import Activity
from headrace.broker.attempts import Attempts, others
from headrace.broker.cursor import Cursor
from headrace.broker.deadlines import Deadlines
from headrace.broker.delivery import Context, Delivery, Lease, Leases, Member, Tally
from headrace.broker.endings import TIMED_OUT, Ending, Endings
from headrace.broker.history import HistoryRing
from headrace.broker.members import Members
from headrace.broker.ordering import KeyOrder
from headrace.broker.reading import Reading
from headrace.broker.retries import Retries
from headrace.broker.selection import bytes_each, select, takes_all
from headrace.broker.statistics import statistics_of
from headrace.errors import Closed, DataCorrupt, HeadraceError, OffsetOutOfRange
from headrace.log.batch import HAS_KEYS, LOST, Batch
from headrace.log.interface import ReadPending
from headrace.model import SubscriptionSettings

logger = logging.getLogger("headrace.broker")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Subscription(Leases):
    _context: Context
    number: int
    name: str
    pattern: str
    settings: SubscriptionSettings
    created_ms: int
    owner: str | None = None
    """Who created it; a wildcard gets what its owner may consume. None: no bounds."""
    paused: bool = False
    tally: Tally = field(default_factory=Tally)
    activity: Activity = field(default_factory=Activity)
    cursors: dict[tuple[str, int], Cursor] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    leases: dict[int, Lease] = field(default_factory=dict)
    closed: bool = False
    ring: HistoryRing | None = None
    """Its last ten minutes."""
    starts: dict[tuple[str, int], int] = field(default_factory=dict)
    """With several nodes: where it was to begin in partitions that another node may own."""
    _target: bytes = field(init=False)
    _pumping: bool = False
    _reading: Reading = field(init=False)
    _retries: Retries = field(default_factory=Retries)
    _deadlines: Deadlines = field(init=False)
    _endings: Endings = field(init=False)
    _burying: dict[tuple[int, int], str] = field(default_factory=dict)
    """(cursor number, offset) of what is on its way to the dead letters, and why."""
    _now_ms: int = 0  # when the messages that are being handed out were looked at
    _timer: Any = None
    _timer_at: float = 0.0
    _order: KeyOrder = field(default_factory=KeyOrder)
    _attempts: Attempts = field(init=False)

    def __post_init__(self) -> None:
        self._target = self.name.encode()
        self._reading = Reading(self.name, self._context, self.tally, self.wake)
        self._deadlines = Deadlines(self.leases)
        self._endings = Endings(self._context.pace, self._end)
        self._attempts = Attempts(self)

    @property
    def key(self) -> tuple[str, str]:
        return (self.pattern, self.name)

    @property
    def _ordered(self) -> bool:
        return self.settings.ordering == "key"

    def change(self, settings: SubscriptionSettings) -> None:
        """New settings; another order takes effect by reading everything that is not done anew."""
        reread = settings.ordering != self.settings.ordering
        self.settings = settings
        if reread:
            assert not self.leases, "the order cannot change under members"
            for cursor in self.cursors.values():
                self._forget(cursor)
                cursor.next, cursor.blocked = cursor.position, None
                self._reading.advanced(cursor)

    # --- topics -----------------------------------------------------------------------------
    def attach(self, cursor: Cursor) -> None:
        partition = cursor.partition
        self.cursors[(partition.topic, partition.number)] = cursor
        partition.watchers[self] = None
        self._reading.advanced(cursor)

    def detach(self, topic: str, partition: int | None = None) -> list[Cursor]:
        """Forget a topic that is deleted, or a partition that another node owns."""
        chosen = [key for key in self.cursors if key[0] == topic and partition in (None, key[1])]
        gone = [self.cursors[key] for key in chosen]
        for cursor in gone:
            del self.cursors[(topic, cursor.partition.number)]
            cursor.partition.watchers.pop(self, None)
            self._forget(cursor)
        return gone

    def on_advance(self, topic: str, partition: int, at_once: bool) -> None:
        if not at_once and len(self._reading) == len(self.cursors):
            return  # all are to be read already; hundreds may be asked this for each message
        cursor = self.cursors.get((topic, partition))
        if cursor is None:
            return
        if at_once and not self._pumping:
            self._pumping = True  # so that nothing wakes it twice
            self._reading.advanced(cursor)
            self.pump()
        else:
            self._reading.advanced(cursor)

    # --- members ----------------------------------------------------------------------------
    def join(self, member: Member) -> None:
        if self.closed:  # the member would never be told
            raise Closed(f"subscription {self.name!r} is closed")
        member.joined = self._context.time()
        self.members.add(member)
        self._context.joined(self, member)
        self.wake()

    def leave(self, member: Member, *, count_attempt: bool = True) -> None:
        """The member is gone; its messages go to the others. ``count_attempt``: it vanished, perhaps because of
        a message, so a delivery is used up; without, it closed in good order and began none of these."""
        if self.closed or member not in self.members:
            return
        self.members.remove(member)
        leases = [lease for lease in member.leases.values() if lease.subscription is self]
        self._context.left(self, member, gives_back=True)
        self._endings.add(leases, "member left", at_once=True, counts=count_attempt)
        self.wake()

    def withdraw(self, member: Member) -> None:
        """Give the member nothing more; its messages stay out until settled or overdue."""
        if member in self.members:
            self.members.remove(member)
            self._context.left(self, member, gives_back=False)

    def wake(self) -> None:
        if not self._pumping and not self.closed:
            self._pumping = True
            self._context.pace.soon(self.pump)

    # --- handing out ------------------------------------------------------------------------
    def pump(self) -> None:
        """Hand out messages to the members that have room."""
        self._pumping = False
        if self.closed or self.paused:
            return
        if self._retries.later:
            self._retries.collect(self._context.time())
        pace = self._context.pace
        deadline = pace.deadline()
        while self.members.have_room():
            if self._attempts and self.members.room() <= len(self._attempts):
                break  # the room is for what waits for the journal to be delivered again
            elif self._retries.ready:
                self._hand_out_retries()
            elif (found := self._reading.next(self._order.has_room)) is not None:
                self._hand_out_fresh(*found)
            else:
                break
            if not self._has_work:
                break
            if pace.is_past(deadline):
                self.wake()  # the rest in a later turn
                break

    @property
    def is_fetching(self) -> bool:
        """Whether messages come that wait for a log, or for the journal."""
        parts = (self._reading, self._retries, self._attempts)
        return any(part.is_fetching for part in parts) or self._context.is_sharing(self)

    @property
    def _has_work(self) -> bool:
        return bool(self._retries.ready or self._reading)

    def _hand_out_fresh(self, cursor: Cursor, batch: Batch) -> None:
        start = cursor.next - batch.base_offset
        most = limits.LEASE_RECORDS_MAX * min(max(len(self.members), 1), limits.SHARED_LEASES_MAX)
        stop = min(batch.count, start + most)
        if not batch.flags & LOST:
            stop = batch.fitting(start, stop, limits.LEASE_BYTES_MAX)
        if self._attempts:
            stop = min(stop, start + self.members.room() - len(self._attempts))
        if batch.base_offset + stop > cursor.reserve_at:
            stop = self._attempts.admit(cursor, batch.base_offset + stop) - batch.base_offset
            if stop <= start:
                return
        indexes = self._deliverable(cursor, batch, start, stop)
        if self._ordered and batch.flags & HAS_KEYS:
            stop = self._hand_out_ordered(cursor, batch, indexes, stop)
        else:
            share = self._attempts.share if cursor.attempts or cursor.doubts else self._share
            left = share(cursor, batch, indexes)
            if left:
                stop = left[0]
        self._reading.read(cursor, batch.base_offset + stop)

    def _deliverable(self, cursor: Cursor, batch: Batch, start: int, stop: int) -> Sequence[int]:
        """Indexes of the records to hand out; the others in between are done."""
        base = batch.base_offset
        if batch.flags & LOST:
            self.tally.lost += stop - start
            cursor.done_run(base + start, base + stop)
            self._context.changed(cursor)
            return range(0)
        indexes: Sequence[int] = range(start, stop)
        if cursor.high > base + start:
            indexes = [index for index in indexes if not cursor.is_done(base + index)]
        return self._wanted(cursor, batch, indexes)

    def _wanted(self, cursor: Cursor, batch: Batch, indexes: Sequence[int]) -> Sequence[int]:
        """Those that are for us and still alive; the others are done."""
        self._now_ms = self._context.now_ms()
        ttl_ms = cursor.partition.message_ttl_ms
        if takes_all(batch, ttl_ms):
            return indexes
        chosen = select(batch, indexes, target=self._target, ttl_ms=ttl_ms, now_ms=self._now_ms)
        self.tally.skipped += len(chosen.foreign)
        self.tally.expired += len(chosen.expired)
        for index in (*chosen.foreign, *chosen.expired):
            self._done(cursor, batch.base_offset + index)
        return chosen.wanted

    def _share(self, cursor: Cursor, batch: Batch, indexes: Sequence[int]) -> Sequence[int]:
        """Deal the records out, one to each member in turn; returns those that found no room."""
        if not indexes:
            return indexes
        each = bytes_each(batch, indexes)
        while indexes:
            members, room = self.members.next(len(indexes), each)
            if not members:
                break
            step = len(members)
            taken = min(len(indexes), step * room)
            for number, member in enumerate(members):
                share = indexes[number:taken:step]
                if share:
                    self._give(member, cursor, batch, share, each)
            indexes = indexes[taken:]
        return indexes

    def _give(
        self, member: Member, cursor: Cursor, batch: Batch, indexes: Sequence[int], bytes_each: int
    ) -> None:
        count = len(indexes)
        base = batch.base_offset
        partition = cursor.partition
        if isinstance(indexes, range):
            offsets: Sequence[int] = range(base + indexes.start, base + indexes.stop, indexes.step)
        else:
            offsets = [base + index for index in indexes]
        attempts: int | list[int] = 1
        failed = cursor.attempts
        if cursor.doubts or (failed and not failed.keys().isdisjoint(offsets)):
            attempts = self._attempts.numbers(cursor, offsets)
            self.tally.redelivered += sum(attempt > 1 for attempt in attempts)
            self.activity.mixed(self._now_ms - batch.max_timestamp, attempts)
        else:
            self.activity.first(self._now_ms - batch.max_timestamp, count)
        self.tally.delivered += count
        if member.auto_ack:
            delivery = Delivery(
                partition.topic, partition.number, batch, indexes, attempts=attempts
            )
            self.tally.acked += count
            partition.consumed += count
            self._done_all(cursor, offsets)
            now = self._context.time()
            self._context.history.lives.note(
                (self.number, cursor.number, offsets, attempts, 0, member.name, now, now)
            )
            member.sink.deliver(delivery)
            return
        now, mask = self._context.time(), (1 << count) - 1
        deadline = now + self.settings.ack_timeout
        lease_id, size = self._context.next_lease_id(), bytes_each * count
        lease = Lease(
            lease_id, self, member, cursor, offsets, attempts, deadline, size, count, mask, now
        )
        self.leases[lease.id] = lease
        member.took(lease)
        self._deadlines.add(lease)
        self._arm(deadline)
        member.sink.deliver(
            Delivery(partition.topic, partition.number, batch, indexes, lease, attempts)
        )

    # --- order by key -----------------------------------------------------------------------
    def _hand_out_ordered(
        self, cursor: Cursor, batch: Batch, indexes: Sequence[int], stop: int
    ) -> int:
        """Records whose key is free go out, the others are parked. Returns where reading stopped."""
        keys = batch.some(batch.keys, indexes)
        assert keys is not None
        each = bytes_each(batch, indexes) if indexes else 0
        shares: dict[int, tuple[Member, list[int]]] = {}
        room: dict[int, int] = {}
        for index, key in zip(indexes, keys, strict=True):
            offset = batch.base_offset + index
            if key is not None and key in self._order.busy:
                if not self._order.has_room(cursor):
                    stop = index
                    break
                self._order.park(key, cursor, offset)
                continue
            if self._attempts.is_retry(cursor, offset):
                if key is not None:
                    self._order.hold(key, cursor, offset)
                self._retries.add(cursor, offset)
                continue
            member = self.members.one(room, each)
            if member is None:
                stop = index
                break
            shares.setdefault(id(member), (member, []))[1].append(index)
            if key is not None:
                self._order.hold(key, cursor, offset)
        for member, share in shares.values():
            self._give(member, cursor, batch, share, each)
        return stop

    def _free(self, cursor: Cursor, offset: int) -> None:
        """The message is done: the next one of its key, if any, may go."""
        following = self._order.free(cursor, offset)
        if following is not None:
            self._retries.add(*following)

    # --- retries ----------------------------------------------------------------------------
    def _hand_out_retries(self) -> None:
        """Give the waiting ones out again, those of one batch together."""
        pace = self._context.pace
        deadline = pace.deadline()
        room = self.members.room() - len(self._attempts)
        ready = self._retries.ready
        taken: list[tuple[Cursor, int]] = []
        while ready and len(taken) < min(room, limits.LEASE_RECORDS_MAX):
            cursor, offset = ready.popleft()
            if cursor.is_done(offset):
                self._free(cursor, offset)
            else:
                taken.append((cursor, offset))
        taken.sort(key=lambda item: (item[0].number, item[1]))
        for cursor, items in groupby(taken, key=lambda item: item[0]):
            offsets = [offset for _, offset in items]
            while offsets:
                offsets = self._retry_batch(cursor, offsets)
                if pace.is_past(deadline):  # they may be in a thousand different batches
                    ready.extendleft([(cursor, offset) for offset in reversed(offsets)])
                    break

    def _retry_batch(self, cursor: Cursor, offsets: list[int]) -> list[int]:
        """Hand out those that lie in the batch of the first; returns the rest."""
        try:
            batch = cursor.partition.log.read_cached(offsets[0])
        except ReadPending as pending:
            self._retries.wait_for_log(cursor, offsets)
            pending.then(self._fetched)
            return []
        except OffsetOutOfRange:
            self.tally.lost += 1
            self._done(cursor, offsets[0])
            return offsets[1:]
        except (DataCorrupt, OSError) as error:
            logger.error("subscription %s cannot read a message again: %s", self.name, error)
            self._retry_at(self._context.time() + 30.0, cursor, offsets[0])
            return offsets[1:]
        inside = [offset for offset in offsets if offset < batch.end_offset]
        indexes = self._wanted(cursor, batch, [offset - batch.base_offset for offset in inside])
        indexes = self._attempts.ready(cursor, batch, indexes)
        for index in self._share(cursor, batch, indexes):
            self._retries.add(cursor, batch.base_offset + index)
        return offsets[len(inside) :]

    def _fetched(self) -> None:
        self._retries.fetched()
        self.wake()

    def _retry_at(self, due: float, cursor: Cursor, offset: int) -> None:
        self._retries.add_at(due, cursor, offset)
        self._arm(due)

    # --- settling ---------------------------------------------------------------------------
    def ack(self, lease_id: int, offset: int) -> None:
        """One message is done. :class:`StaleDelivery` if it is no longer out with the member."""
        lease = self.lease(lease_id)
        self._settle(lease, offset)
        self.tally.acked += 1
        lease.cursor.partition.consumed += 1
        self._done(lease.cursor, offset)
        self._released(lease, 1)

    def _ack_bits(self, lease: Lease, bits: int) -> int:
        count = bits.bit_count()
        if not count:
            return 0
        lease.mask ^= bits
        low, high = (bits & -bits).bit_length() - 1, bits.bit_length()
        offsets = lease.offsets[low:high]
        if high - low > count:
            offsets = [offset for at, offset in enumerate(offsets, low) if bits >> at & 1]
        self._done_all(lease.cursor, offsets)
        self.tally.acked += count
        lease.cursor.partition.consumed += count
        self._released(lease, count)
        return count

    def _nack(self, lease: Lease, offset: int, delay: float | None, reason: str) -> None:
        index = self._settle(lease, offset)
        self.tally.nacked += 1
        attempt = lease.attempt_at(index)
        if delay is None:
            delay = self.settings.delay_after(attempt)
        lease.back |= 1 << index
        self._attempts.failed(lease, index, reason)
        self._failed(lease.cursor, offset, attempt, reason, delay)
        self._released(lease, 1)

    def release(self, lease_id: int, offset: int) -> None:
        """Give a message back that was never begun: it does not count as a delivery."""
        lease = self.lease(lease_id)
        index = self._settle(lease, offset)
        lease.back |= 1 << index
        self._attempts.not_begun(lease, index)
        self._retries.add(lease.cursor, offset)
        self._released(lease, 1)

    def _extend(self, lease: Lease, seconds: float | None) -> float:
        granted = self.settings.ack_timeout if seconds is None else seconds
        lease.deadline = self._context.time() + granted
        lease.member.stalled = False
        self._deadlines.add(lease)
        self._arm(lease.deadline)
        return granted

    def _released(self, lease: Lease, count: int) -> None:
        self._settled(lease, count)
        if not self._pumping and self._has_work:
            self.wake()

    def _settled(self, lease: Lease, count: int) -> None:
        """The member no longer holds ``count`` messages of the lease; an empty lease ends."""
        lease.member.settled(lease, count)
        if not lease.mask and self.leases.pop(lease.id, None) is not None:
            self._context.history.lives.delivered(lease, self._context.time())

    def _done(self, cursor: Cursor, offset: int) -> None:
        cursor.done(offset)
        self._context.changed(cursor)
        if self._ordered:
            self._free(cursor, offset)

    def _done_all(self, cursor: Cursor, offsets: Sequence[int]) -> None:
        if isinstance(offsets, range) and offsets.step == 1:
            cursor.done_run(offsets.start, offsets.stop)
        else:
            for offset in offsets:
                cursor.done(offset)
        self._context.changed(cursor)
        if self._ordered:
            for offset in offsets:
                self._free(cursor, offset)

    def _failed(self, cursor: Cursor, offset: int, attempt: int, reason: str, delay: float) -> None:
        """A delivery failed: try again, or store a dead letter."""
        cursor.failed(offset, attempt)
        self._context.changed(cursor)
        limit = self.settings.max_deliveries
        if limit and attempt >= limit:
            self._bury(cursor, offset, attempt, reason)
        elif delay > 0:
            self._retry_at(self._context.time() + delay, cursor, offset)
        else:
            self._retries.add(cursor, offset)

    def _bury(self, cursor: Cursor, offset: int, attempt: int, reason: str) -> None:
        self._burying[cursor.number, offset] = reason
        self._context.dead_letter(self, cursor, offset, attempt, reason)

    def buried(self, cursor: Cursor, offset: int, error: Exception | None) -> None:
        """The dead letter is durable, or could not be stored and will be tried again."""
        reason = self._burying.pop((cursor.number, offset), None)
        if reason is None or (self.closed and error is not None):
            return  # the subscription was moved, the topic deleted, or the broker stopped meanwhile
        if error is None:
            self.tally.dead_lettered += 1
            self.activity.buried(reason)
            self._done(cursor, offset)
        else:
            self._attempts.not_buried(cursor, offset, reason)
            logger.error("subscription %s: dead letter not stored: %s", self.name, error)
            self._retry_at(
                self._context.time() + max(self.settings.backoff_max, 1.0), cursor, offset
            )
        if self._has_work:
            self.wake()

    # --- time -------------------------------------------------------------------------------
    def _arm(self, at: float) -> None:
        """Have ``_tick`` run at the time, or earlier."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._context.call_later(max(at - self._context.time(), 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.closed:
            return
        now = self._context.time()
        self._endings.add(self._deadlines.expired(now), TIMED_OUT, at_once=False, counts=True)
        self._retries.collect(now)
        if self._retries.ready:
            self.wake()
        for at in (self._deadlines.next(), self._retries.next_due()):
            if at is not None:
                self._arm(at)

    def _end(self, ending: Ending) -> None:
        """Take back the messages of the lease that are still out."""
        lease, reason, at_once, counts = ending
        if reason is TIMED_OUT and lease.deadline > self._context.time():
            return  # it was extended while it waited for its end
        out = lease.out()
        if reason is TIMED_OUT:
            self.tally.timeouts += len(out)
        lease.back |= lease.mask
        lease.mask = 0
        self._settled(lease, len(out))
        for index in out:
            offset = lease.offsets[index]
            attempt = lease.attempt_at(index)
            if not counts:
                self._attempts.not_begun(lease, index)
                self._retries.add(lease.cursor, offset)
                continue
            self._attempts.failed(lease, index, reason)
            delay = 0.0 if at_once else self.settings.delay_after(attempt)
            self._failed(lease.cursor, offset, attempt, reason, delay)
        if reason is TIMED_OUT:
            lease.member.stalled = True
        self.wake()

    # --- moving and ending --------------------------------------------------------------------
    def seek(self, cursor: Cursor, offset: int) -> None:
        """Deliver again from the offset on; deliveries of this partition become stale."""
        self._forget(cursor)
        if cursor.seek(offset):
            self._context.reserve(cursor, lambda error: None)
        self._context.changed(cursor)
        self._reading.advanced(cursor)

    def advance(self, cursor: Cursor, offset: int) -> None:
        """Everything before the offset is done, whichever member holds it; never moves back. For readers that keep
        their own position. A member that settles one of these afterwards gets :class:`StaleDelivery`."""
        if offset <= cursor.position:
            return
        count = cursor.undone_count(offset)
        cursor.done_run(cursor.position, offset)
        self._forget(cursor, offset)
        if cursor.next < offset:
            cursor.blocked = None
            self._reading.forget(cursor)
            self._reading.read(cursor, offset)
        self.tally.acked += count
        cursor.partition.consumed += count
        self._context.changed(cursor)
        if self._has_work:
            self.wake()

    def _forget(self, cursor: Cursor, before: int | None = None) -> None:
        """Drop everything that is under way at the cursor, or only what lies before an offset."""
        for lease in [lease for lease in self.leases.values() if lease.cursor is cursor]:
            gone = lease.mask
            if before is not None:
                gone &= (1 << bisect_left(lease.offsets, before)) - 1
            if gone:
                lease.mask ^= gone
                lease.back |= gone
                self._settled(lease, gone.bit_count())
        self._retries.forget(cursor, before)
        self._attempts.forget(cursor, before)
        self._burying = others(self._burying, cursor, before)
        for item in self._order.forget(cursor, before):
            self._retries.add(*item)
        if before is None:
            self._reading.forget(cursor)
        if self._has_work:  # the members that had these have room for others now
            self.wake()

    def close(self, error: HeadraceError | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self._reading.close()
        if self._timer is not None:
            self._timer.cancel()
        for cursor in self.cursors.values():
            cursor.partition.watchers.pop(self, None)
        for member in list(self.members):  # a sink may leave when it is told
            member.sink.closed(error)
        self.members.clear()
        self._attempts.closed(self.leases.values())
        for lease in list(self.leases.values()):
            out = lease.mask.bit_count()
            lease.back |= lease.mask
            lease.mask = 0  # an ack that comes now is stale
            self._settled(lease, out)

    # --- asking -----------------------------------------------------------------------------
    def lag(self) -> int:
        return sum(cursor.lag() for cursor in self.cursors.values())

    def in_flight(self) -> int:
        return sum(lease.mask.bit_count() for lease in self.leases.values())

    def waiting_for_retry(self) -> int:
        return len(self._retries) + len(self._attempts)

    statistics = statistics_of
