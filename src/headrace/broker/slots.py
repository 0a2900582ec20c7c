"""With several nodes: the state of each slot in a journal of its own, and how a slot comes and goes.

Partitions are divided into *slots* (``Storage.slot_of``). Whoever owns a slot owns its partitions and what belongs to them: the
cursors of all subscriptions there, with attempts. Slot 0 also has the broker's own topics, and so delayed messages, staged
batches and their commits, and reports of pipelines. :class:`SlotStates` takes the place of the one journal
(``state.py``): each slot that this node owns has a :class:`StateJournal` over a partition of Kafka, under the rule of claims.

- A slot is *gained* when its journal is read and claimed and its partitions are claimed: the cursors of the journal are attached
  to the subscriptions, which all nodes know. Then the journal is rewritten, because numbers of cursors are this process's own.
- It is *left* in good order (the journal is flushed first) or because another node has claimed it (nothing is written any more).
  Its cursors are detached; what members hold of it is stale, and is delivered again by the next owner.

One journal for each slot is the simplest form in which a slot can move alone. Rejected: a journal for each partition (a thousand
partitions would make a thousand writes of what is one now), and a topic that Kafka compacts (``engine/kafka/rule.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import orjson

from headrace.broker import attaching
from headrace.broker.cursor import Cursor
from headrace.broker.pipelines import Pipelines
from headrace.broker.restoring import decisions, definition, positions, restore_cursors
from headrace.broker.schedule import WAITING_BYTES, Schedule
from headrace.broker.staging import Staging
from headrace.broker.state import Loaded, StateJournal, Tap
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition
from headrace.errors import Done, HeadraceError, StorageFailed
from headrace.log.interface import StateLog
from headrace.log.witness import Ends, Witnesses
from headrace.model import INTERNAL_PREFIX, SubscriptionSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

LEADER = 0
"""The slot of the broker's own topics."""


class SlotStates:
    """See :class:`headrace.broker.state.StateJournal`; each call goes to the journal of its slot."""

    def __init__(self, engine: Engine, slot_of: Callable[[str, int], int]):
        self._engine = engine
        self.slot_of = slot_of
        self._states: dict[int, StateJournal] = {}
        self.on_lost_acks: Callable[[], None] = lambda: None
        """A slot is gone before all its positions were stored."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._states

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._states))

    # --- as a journal ---------------------------------------------------------------------------
    def load(self, ends: Ends | None = None) -> Loaded:
        """Nothing but how far partitions had reached: a slot brings the rest when it is gained."""
        loaded = Loaded()
        loaded.witnesses = Witnesses(ends)
        return loaded

    def start(self) -> None:
        pass

    def write(
        self,
        payload: bytes,
        done: Done | None = None,
        *,
        counts: bool = False,
        at: Partition | str | None = None,
    ) -> None:
        if at is None:
            slot = LEADER
        elif isinstance(at, str):
            slot = self.slot_of(at, 0)
        else:
            slot = self.slot_of(at.topic, at.number)
        state = self._states.get(slot)
        if state is not None:
            state.write(payload, done, counts=counts)
        elif done is not None:
            self._engine.call_soon(done, moved())

    def changed(self, cursor: Cursor) -> None:
        state = self._of(cursor)
        if state is not None:
            state.changed(cursor)

    def forget(self, cursor: Cursor) -> None:
        state = self._of(cursor)
        if state is not None:
            state.forget(cursor)

    def _of(self, cursor: Cursor) -> StateJournal | None:
        return self._states.get(self.slot_of(cursor.partition.topic, cursor.partition.number))

    def flush(self, done: Done, *, counts: bool = False) -> None:
        """Write all positions of all slots that this node owns."""
        waiting = 1
        failed: HeadraceError | None = None

        def flushed(error: HeadraceError | None) -> None:
            nonlocal waiting, failed
            waiting, failed = waiting - 1, failed or error
            if not waiting:
                done(failed)

        for state in tuple(self._states.values()):
            waiting += 1
            state.flush(flushed, counts=counts)
        self._engine.call_soon(flushed, None)

    @property
    def oldest_unwritten(self) -> float:
        return max((state.oldest_unwritten for state in self._states.values()), default=0.0)

    @property
    def writes(self) -> int:
        return sum(state.writes for state in self._states.values())

    @property
    def write_seconds(self) -> float:
        return max((state.write_seconds for state in self._states.values()), default=0.0)

    def close(self, done: Callable[[], None]) -> None:
        waiting = 1

        def closed() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                done()

        for slot in self:
            waiting += 1
            self._states.pop(slot).close(closed)
        closed()

    def serves(self, partition: Partition) -> bool:
        """Whether the cursors of all subscriptions are here."""
        state = self._states.get(self.slot_of(partition.topic, partition.number))
        return state is not None and not state.leaving

    async def gather(self) -> tuple[set[int], list[bytes]]:
        """All slots that are served here, and what their journals hold in the turn in which this returns."""
        engine, tap = self._engine, Tap()
        slots, states = set(self._states), tuple(self._states.values())
        found = [definition(each) async for each in engine.pace.each(engine.all_subscriptions())]
        for state in states:
            state.taps.append(tap)
        try:
            snapshots = chain.from_iterable(map(self._snapshot, slots))
            async for payload in engine.pace.each(tap.follow(snapshots)):
                found.append(payload)
            if slots != set(self._states) or any(state.leaving for state in states):
                raise moved()
            found += tap.take()
            return slots, found
        finally:
            for state in states:
                state.taps.remove(tap)

    def pause(self, slot: int) -> Callable[[], None]:
        """Have the slot's journal store nothing until the returned function is called."""
        state = self._states.get(slot)
        if state is None:
            raise moved()
        return state.pause()

    # --- coming and going -----------------------------------------------------------------------
    def gain(
        self, slot: int, journal: StateLog, payloads: list[bytes], lost: Callable[[], None]
    ) -> None:
        """The journal is read, and everything is claimed: serve the slot."""
        engine = self._engine
        loaded = Loaded()
        for payload in payloads:
            try:
                loaded.add(payload)
            except (orjson.JSONDecodeError, KeyError, ValueError):
                loaded.damaged += 1
        self._states[slot] = StateJournal(
            journal,
            engine.loop,
            engine.workers,
            engine.pace,
            lambda: self._snapshot(slot),
            lambda error: lost(),
        )
        by_number: dict[int, Subscription] = {}
        for number, item in loaded.subscriptions.items():
            found = engine.subscription_or_none(item["name"], item["topic"])
            if found is None and item["name"].startswith(INTERNAL_PREFIX):
                found = engine.add_subscription(
                    item["name"], item["topic"], SubscriptionSettings.of({}), item["created_ms"]
                )
            if found is not None:
                by_number[number] = found
        restore_cursors(
            engine, loaded, by_number, clean=False, renumber=lambda _: engine.next_number()
        )
        self._states[slot].begin()
        for topic in tuple(engine.topics):
            if any(self.slot_of(topic.name, p.number) == slot for p in topic.partitions):
                self.attach(topic.name)
        if slot == LEADER:
            engine.retention.before_run = engine.staging.expire_orphans
            engine.staging.load(list(loaded.commits.values()))
            engine.schedule.load()
            engine.pipelines.load()

    def attach(self, name: str) -> None:
        """Give every subscription over the topic its cursors in partitions that this node serves."""
        topic = self._engine.topics.get(name)
        if topic is not None:
            for subscription in self._engine.all_subscriptions():
                if attaching.attaches(self._engine, subscription, name):
                    for _ in attaching.attach(self._engine, subscription, topic):
                        pass

    def stop_delivering(self, slot: int) -> None:
        """Detach the cursors: nothing more is delivered, and what is out is stale."""
        engine = self._engine
        for topic in tuple(engine.topics):
            for partition in topic.partitions:
                if self.slot_of(topic.name, partition.number) != slot:
                    continue
                for watcher in tuple(partition.watchers):
                    if isinstance(watcher, Subscription):
                        watcher.detach(topic.name, partition.number)
        if slot == LEADER and slot in self._states:
            engine.schedule.close()
            engine.staging.close(moved())
            engine.budget.used -= WAITING_BYTES * len(engine.schedule)
            engine.schedule = Schedule(engine)
            engine.staging = Staging(engine, engine.random)
            engine.retention.before_run = lambda: None
            engine.pipelines = Pipelines(engine)

    def release(self, slot: int, done: Callable[[], None]) -> None:
        """Let another node have it: write what is known, and stop."""
        state = self._states.get(slot)
        if state is None:
            done()
            return

        def flushed(_error: HeadraceError | None) -> None:
            self.lose(slot)
            done()

        def written(error: HeadraceError | None) -> None:
            if error is not None:
                self.on_lost_acks()
            state.leaving = True
            self.stop_delivering(slot)
            state.flush(flushed)

        # First, because a snapshot may be due, which needs the cursors.
        state.flush(written)

    def lose(self, slot: int) -> None:
        """Another node has it."""
        self.stop_delivering(slot)
        state = self._states.pop(slot, None)
        if state is not None:
            if state.oldest_unwritten:
                self.on_lost_acks()
            state.abandon(moved())

    def _snapshot(self, slot: int) -> Iterator[bytes]:
        engine = self._engine

        def is_here(cursor: Cursor) -> bool:
            return self.slot_of(cursor.partition.topic, cursor.partition.number) == slot

        if slot == LEADER:
            yield from decisions(engine)
        for subscription in engine.all_subscriptions():
            if any(map(is_here, tuple(subscription.cursors.values()))):
                yield definition(subscription)
                yield from positions(engine, subscription, is_here)


def moved() -> StorageFailed:
    return StorageFailed(
        "another node of the cluster has this now; nothing was stored, try again",
        code="partition_moved",
    )
