"""This node among the others of its cluster: what it owns, what it knows, and where the rest goes.

    definitions ──▶ every node: topics, subscriptions, named producers, access rules (``agreed.py``)
    partitions ───▶ every node reads all of them; the owner of a slot serves its partitions

    a client ──▶ any node ──▶ publish:    the partition's log, or the queue to its owner (``forwarding.py``)
                          ──▶ read:       the partition's log, when it has what any node answered before (``fresh``)
                          ──▶ subscribe:  the cursors here, and a share of those elsewhere (``shares.py``)
                          ──▶ operation:  here, at the owner, or everywhere (``routing.py``)

Who owns what is decided by the log alone (``engine/kafka/rule.py``). Kafka's group protocol hints at who should
(``engine/kafka/hints.py``), and the last claim of a partition says who does, so every node has the whole map.

A slot is taken in three steps: its journal is read and claimed, its partitions are claimed, and when all claims are read back its
cursors are attached (``broker/slots.py``). It is lost when a claim of another node is read in any of them. A node that
is to own a slot and does not, looks again every second.

*Fresh*: this node may be a moment behind the owner of a partition. Before a request that reads, it asks Kafka where the definitions
and the partitions end now, and waits until it has read so far. So a client that publishes through one node and reads through
another one finds its message. All requests that come while Kafka is asked share the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import orjson

from headrace.broker import attaching, audit, deleting, events, pipelines, schedule, staging
from headrace.broker.administration import Administration
from headrace.broker.audit import Source
from headrace.broker.clustering import ClusterFigures
from headrace.broker.delivery import Member
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish
from headrace.broker.slots import LEADER, SlotStates
from headrace.broker.subscription import Subscription
from headrace.cluster import delaying
from headrace.cluster.access import AgreedRules
from headrace.cluster.acks import AckLosses
from headrace.cluster.agreed import Agreed
from headrace.cluster.defining import LOOK_AGAIN_S, Defining
from headrace.cluster.forwarding import ForwardQueue
from headrace.cluster.founding import check_founded, secret
from headrace.cluster.freshness import Freshness
from headrace.cluster.gathering import ClusterGathering
from headrace.cluster.peers import Peer, Peers, address_of
from headrace.cluster.reporting import Reporting
from headrace.cluster.routing import Routing
from headrace.cluster.shares import ForeignShare
from headrace.engine.kafka.definitions import Definitions
from headrace.engine.kafka.hints import SlotHints
from headrace.engine.kafka.journal import KafkaJournal, open_together
from headrace.engine.kafka.log import KafkaLog
from headrace.engine.kafka.shared import SharedStorage
from headrace.errors import (
    Conflict,
    Done,
    HeadraceError,
    StorageFailed,
    refused_by_disk,
)
from headrace.log.columns import Columns
from headrace.log.interface import Append, TopicRecord
from headrace.log.storage import settings_content
from headrace.log.workers import SyncFailed
from headrace.model import (
    Receipt,
)
from headrace.operations.declaring import Operation
from headrace.wire.binary import Frame, Type

logger = logging.getLogger("headrace.cluster")
TOLD_S = 1.0
"""A node that does not answer for so long hears of a change when it reads the definitions."""
OWN_TOPICS = {
    schedule.TOPIC: schedule.SETTINGS,
    staging.TOPIC: staging.SETTINGS,
    events.TOPIC: events.SETTINGS,
    audit.TOPIC: audit.SETTINGS,
    pipelines.TOPIC: pipelines.SETTINGS,
}
"""Every cluster has them from its beginning, so that nobody has to wait for one."""


class Node(Defining, Reporting):
    """See :class:`headrace.broker.clustering.Cluster` and :class:`headrace.engine.kafka.log.Host`."""

    def __init__(
        self,
        engine: Engine,
        storage: SharedStorage,
        *,
        session_s: float,
        tls: ssl.SSLContext | None = None,
    ):
        self.engine, self.storage = engine, storage
        self.loop = asyncio.get_running_loop()
        self.name = storage.link.node
        self.address = address_of(self.name)
        self.timeout = storage.link.timeout
        self.session_s = session_s
        self.losses = AckLosses(engine, self.loop.time)
        self.peers = Peers(self.address, tls, self.timeout, self.losses.lost)
        self.agreed = Agreed()
        self.journals: dict[int, KafkaJournal] = {}
        """Of the slots that it serves, or has served."""
        self.definitions: Definitions = None  # type: ignore[assignment]
        self.freshness = Freshness(self)
        self._routing = Routing(self)
        gathering = ClusterGathering(self)
        self.point_in_time = gathering.point_in_time
        self.hold_elsewhere = gathering.hold_elsewhere
        self.slot_states = gathering.slot_states
        assert isinstance(engine.state, SlotStates)
        self.state = engine.state
        self.state.on_lost_acks = self.losses.lost
        self.hints = SlotHints(
            storage.link, storage.kafka.state, session_s, self._gained_soon, self._hand_back_now
        )
        self.assigned: set[int] = set()
        self._resumed: set[int] = set()
        """Of these: slots of the process that this one replaces, until Kafka divides the slots anew."""
        self._taking: set[int] = set()
        self._lost: set[int] = set()
        """Of those that are being taken: another node was faster."""
        self._claims = asyncio.Event()
        """Something has changed in what this node owns."""
        self._queues: dict[KafkaLog, ForwardQueue] = {}
        self._shares: dict[Subscription, dict[tuple[Member, str], ForeignShare]] = defaultdict(dict)
        self._resharing = False
        self._creating: dict[str, list[Done]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._members: set[str] = set()
        """The nodes of the group."""
        self._timer: Any = None
        self._looking = False
        self.drained = self.closing = False
        self.answered_s = self.loop.time()
        self.figures = ClusterFigures()
        self._given: dict[int, float] = {}
        """When slots were given to this node that it does not serve yet."""
        storage.on_read_back = lambda seconds: self.figures.on_read_back(seconds)
        self.rules = AgreedRules(self, engine.access.store)
        engine.access.store = self.rules
        storage.host = self
        engine.cluster = self

    # --- starting and ending ------------------------------------------------------------------
    async def prepare(self) -> None:
        """Read what there is, before the engine is opened."""
        try:
            await asyncio.to_thread(self._prepare)
        except (OSError, SyncFailed) as error:
            raise (
                refused_by_disk(error) if isinstance(error, OSError) else StorageFailed(str(error))
            ) from error

    def _prepare(self) -> None:
        self.storage.prepare()
        self.definitions = self.storage.define(self._apply, self.agreed.snapshot)
        self.definitions.open()
        known = Agreed()
        for payload in self.definitions.early:
            known.fold(payload)
        check_founded(known)
        self.storage.prepare_state(is_founded=bool(known.secret))
        self.agreed.rules = known.rules  # before a client is answered
        self.storage.open_all(list(known.topics.values()))

    def progress(self) -> str:
        """How far the start is."""
        read, total = self.storage.link.progress
        return f"reading Kafka, {min(100 * read // total, 99)} %" if total else "reading Kafka"

    async def start(self) -> None:
        """The engine is open: know what the others know, and own what this node should."""
        for payload in self.definitions.begin():
            self.agreed.fold(payload)
        for topic in tuple(self.engine.topics):
            known = self.agreed.topics.get(topic.name)
            if known is None or known.incarnation != topic.incarnation:
                deleting.delete_topic(self.engine, topic.name, lambda error: None)
        for record in self.agreed.topics.values():
            self._topic(record)
        for item in self.agreed.subscriptions.values():
            self._subscription(item)
        self.engine.publishing.producers = self.agreed.producers
        self.storage.link.logs.on_read = self.freshness.look
        self.storage.link.journals.on_read = self._journals_read
        await self._found()
        self.peers.secret = self.agreed.secret
        self.engine.access.look()
        await self.rules.adopt()
        found = await asyncio.to_thread(self.hints.members)
        self._resume(found or [])
        self.hints.start()
        self._timer = self.loop.call_later(LOOK_AGAIN_S, self._look)

    async def _found(self) -> None:
        """The first node gives the cluster its secret, and its own topics."""
        missing = [name for name in OWN_TOPICS if name not in self.agreed.topics]
        if self.agreed.secret and not missing:
            return
        records = [self._record(name, OWN_TOPICS[name]) for name in missing]
        names = {self.storage.kafka.name_of(each): 1 for each in records}
        await asyncio.to_thread(self.storage.kafka.create, names)
        used: list[TopicRecord] = []

        def decide() -> list[bytes]:
            used[:] = [each for each in records if each.name not in self.agreed.topics]
            check_founded(self.agreed)
            first = [] if self.agreed.secret else [secret()]
            return [*first, *map(settings_content, used)]

        await self.definitions.change(decide)
        await self._remove([each for each in records if each not in used])

    async def close(self) -> None:
        """Hand the slots back, so that others serve them at once."""
        if self.closing:
            return
        self.closing = True
        if self._timer is not None:
            self._timer.cancel()
        for log in self.logs():  # the next start begins there; nobody waits for it
            log.roll_soon(1)
        await asyncio.to_thread(self.hints.close)
        for task in tuple(self._tasks):
            task.cancel()
        for shares in list(self._shares.values()):
            for share in list(shares.values()):
                share.end()
        for queue in self._queues.values():
            queue.fail(StorageFailed("the node was stopped; try again", code="no_owner"))
        await self.peers.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def is_node(self, secret: str) -> bool:
        known = self.agreed.secret
        return bool(known) and hmac.compare_digest(known.encode(), secret.encode())

    # --- slots ----------------------------------------------------------------------------------
    @property
    def leads(self) -> bool:
        return LEADER in self.state

    def _slot(self, log: KafkaLog) -> int:
        return self.state.slot_of(*log.about)

    def logs(self) -> list[KafkaLog]:
        return [p.log for topic in self.engine.topics for p in topic.partitions]  # type: ignore[misc]

    def _logs_in(self, slots: set[int]) -> list[KafkaLog]:
        return [log for log in self.logs() if self._slot(log) in slots]

    def _take_new(self, logs: list[KafkaLog]) -> None:
        for log in logs:
            if self._slot(log) in self.state or self._slot(log) in self._taking:
                log.take()

    def _gained_soon(self, slots: list[int]) -> None:
        """In a thread."""
        self.loop.call_soon_threadsafe(self._gained, set(slots))

    def _gained(self, slots: set[int]) -> None:
        others, self._resumed = self._resumed - slots, set()
        self.assigned |= slots
        self._given |= dict.fromkeys(slots - set(self.state), self.loop.time())
        self._take_missing()
        if others:
            self.run(self._hand_back(others))

    def _resume(self, nodes: list[tuple[str, list[int]]]) -> None:
        """Go on with the slots of a process that was killed: see ``hints.py``."""
        for name, slots in nodes:
            if address_of(name) == self.address:
                self._resumed |= set(slots)
        self.assigned |= self._resumed
        self._take_missing()

    def _take_missing(self) -> None:
        missing = self.assigned - set(self.state) - self._taking
        if missing and not self.closing and self.engine.failed is None:
            self._taking |= missing
            self.run(self._take(missing))

    def _journals_read(self) -> None:
        """In a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.freshness.look)

    def _look(self) -> None:
        self._take_missing()
        self.run(self.freshness.confirm())
        if any(log.replica.is_behind for log in self.logs()) or self.definitions.replica.is_behind:
            self.engine.fail(
                StorageFailed(
                    "this node has slept for so long that records were deleted before it read them; "
                    "start it again"
                )
            )
            return
        if not self._looking:
            self.run(self._look_around())
        self._timer = self.loop.call_later(LOOK_AGAIN_S, self._look)

    async def _look_around(self) -> None:
        self._looking = (
            True  # while Kafka is away, it takes longer than the pause between two looks
        )
        try:
            found = await asyncio.to_thread(self.hints.members)
            with contextlib.suppress(HeadraceError):  # the next look tries again
                await self.rules.adopt()
        finally:
            self._looking = False
        if found is not None:
            self.answered_s = self.loop.time()
        if found:
            self._members = {address_of(name) for name, _ in found}

    async def _take(self, slots: set[int]) -> None:
        journals = {slot: self.storage.journal_of(slot) for slot in slots}
        gained: set[int] = set()
        try:
            self._lost -= slots
            payloads = await asyncio.to_thread(
                open_together, self.storage.link, list(journals.values())
            )
            for log in self._logs_in(slots & self.assigned):
                if log.replica.is_ours:
                    log.owned = True
                else:
                    log.take()
            for slot, found in zip(journals, payloads, strict=True):
                if await self._are_claimed(slot):
                    self.journals[slot] = journals[slot]
                    self.state.gain(
                        slot, journals[slot], found, partial(self.lose, slot, "its state")
                    )
                    gained.add(slot)
                    self.figures.slots_taken += 1
                    self.figures.on_taken(
                        self.loop.time() - self._given.pop(slot, self.loop.time())
                    )
            logger.info("this node serves slots %s", sorted(self.state))
        except (HeadraceError, OSError, SyncFailed) as error:
            logger.warning("slots %s are not taken yet: %s", sorted(slots - gained), error)
        finally:
            for slot in slots - gained:
                journals[slot].close()
            self._taking -= slots
            self._claims.set()
            self._reshare_soon()

    async def _are_claimed(self, slot: int) -> bool:
        """Whether all of its partitions are this node's; False if another node has one of them."""
        try:
            async with asyncio.timeout(self.timeout):
                while slot in self.assigned and slot not in self._lost:
                    logs = self._logs_in({slot})
                    if all(log.owned for log in logs):
                        if slot == LEADER:  # what it published before may be anywhere
                            await self.freshness.all()
                        return slot in self.assigned and slot not in self._lost
                    self._claims.clear()
                    await self._claims.wait()
        except TimeoutError:
            logger.warning("slot %d: Kafka has not answered for %g seconds", slot, self.timeout)
        return False

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a change of what this node owns."""
        while not is_so():
            self._claims.clear()
            await self._claims.wait()

    def _hand_back_now(self, slots: list[int]) -> None:
        """In a thread, which waits for it."""
        work = self._hand_back(set(slots))
        try:
            under_way = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the loop is closed
            work.close()
            return
        try:
            # Longer than this node is sure of what it owns (``freshness.py``).
            under_way.result(self.session_s * 2 / 3)
        except (TimeoutError, CancelledError):  # it goes on, while Kafka gives the slots to others
            logger.warning("slots %s are let go before all was stored", slots)

    async def _hand_back(self, slots: set[int]) -> None:
        self.assigned -= slots
        for slot in slots:
            self._given.pop(slot, None)
        await self._until(lambda: not self._taking & slots)
        mine = slots & set(self.state)
        if not mine:
            return
        logger.info("this node hands back slots %s", sorted(mine))
        self.figures.slots_handed_back += len(mine)
        await _all(partial(self.state.release, slot) for slot in mine)
        await _all(log.let_go for log in self._logs_in(mine) if log.owned)
        self._claims.set()
        self._reshare_soon()

    def lose(self, slot: int, why: str) -> None:
        """Another node has claimed it."""
        self._lost.add(slot)
        if slot in self._resumed:
            self._resumed.discard(slot)
            self.assigned.discard(slot)
        if slot in self.state:
            logger.warning("another node has taken slot %d (%s)", slot, why)
            self.figures.slots_lost += 1
            self._given[slot] = self.loop.time()  # it is this node's again when it is taken back
            self.state.lose(slot)
            for log in self._logs_in({slot}):
                if log.owned:
                    log.let_go(lambda: None)
            self._reshare_soon()
        self._claims.set()

    # --- what logs tell -------------------------------------------------------------------------
    def forward(self, log: KafkaLog, item: Append) -> None:
        queue = self._queues.get(log)
        if queue is None:
            queue = self._queues[log] = ForwardQueue(self, log)
        queue.put(item)

    def doubt(self) -> Callable[[Callable[[], None]], None] | None:
        return self.freshness.doubt()

    def claimed(self, log: KafkaLog, node: str, *, ours: bool) -> None:
        slot = self._slot(log)
        if not ours:
            if slot in self.state or slot in self._taking:
                self.lose(
                    slot, f"partition {log.about[1]} of {log.about[0]}, by {address_of(node)}"
                )
        elif slot in self.state:
            self.state.attach(log.about[0])
        elif slot not in self._taking:
            log.owned = False  # it is not wanted any more: whoever has the slot claims it
        self._claims.set()
        queue = self._queues.get(log)
        if queue is not None:
            queue.wake()
        self._reshare_soon()

    # --- members --------------------------------------------------------------------------------
    def joined(self, subscription: Subscription, member: Member) -> None:
        if not member.elsewhere:
            self._reshare(subscription)

    def left(self, subscription: Subscription, member: Member, *, gives_back: bool) -> None:
        for (owner, _), share in list(self._shares.get(subscription, {}).items()):
            if owner is member:
                share.end() if gives_back else share.withdraw()

    def expel(self, subscription: Subscription, member: Member, error: HeadraceError) -> None:
        """End a member that an owner does not take: it would miss messages, and nobody would know."""
        subscription.leave(member, count_attempt=False)
        member.sink.closed(error)

    def is_sharing(self, subscription: Subscription) -> bool:
        return any(share.is_pending for share in self._shares.get(subscription, {}).values())

    def nothing_comes(self, subscription: Subscription, member: Member) -> None:
        shares = self._shares.get(subscription, {})
        if not any(share.is_pending and owner is member for (owner, _), share in shares.items()):
            told = getattr(member.sink, "nothing_comes", None)
            if told is not None:
                told()

    def _reshare_soon(self) -> None:
        if not self._resharing and not self.closing:
            self._resharing = True
            self.loop.call_soon(self._reshare_all)

    def _reshare_all(self) -> None:
        self._resharing = False
        for subscription in self.engine.all_subscriptions():
            if subscription.members or subscription in self._shares:
                self._reshare(subscription)

    def _reshare(self, subscription: Subscription) -> None:
        """Have a share of each member at each other owner, and at nobody else."""
        owners = self._owners(subscription)
        members = [member for member in subscription.members if not member.elsewhere]
        shares = self._shares[subscription]
        for (member, address), share in list(shares.items()):
            if address not in owners and member in members:
                share.end()
        places = len(owners) + bool(subscription.cursors)
        for member in members:
            for address in owners:
                if (member, address) not in shares:
                    prefetch = max(1, member.prefetch // max(places, 1))
                    peer = self.peers.get(address)
                    shares[member, address] = ForeignShare(
                        self, subscription, member, peer, prefetch
                    )
        if not shares:
            self._shares.pop(subscription, None)

    def _owners(self, subscription: Subscription) -> set[str]:
        found = set()
        for topic in self.engine.topics.matching(subscription.pattern):
            if attaching.attaches(self.engine, subscription, topic.name):
                for partition in topic.partitions:
                    owner = partition.log.replica.owner  # type: ignore[attr-defined]
                    if owner is not None and not partition.log.owned:
                        found.add(address_of(owner))
        return found - {self.address}

    def share_ended(self, share: ForeignShare) -> None:
        shares = self._shares.get(share.of, {})
        for key, known in list(shares.items()):
            if known is share:
                del shares[key]
        self._reshare_soon()

    def _end_shares(self, subscription: Subscription) -> None:
        for share in list(self._shares.pop(subscription, {}).values()):
            share.end()

    # --- what goes to the leader ------------------------------------------------------------------
    def owner_of(self, topic: str, partition: int = 0) -> str | None:
        """The address of the node that serves a partition; None: nobody does now."""
        found = self.engine.topics.get(topic)
        if found is None or partition >= len(found.partitions):
            return None
        log: KafkaLog = found.partitions[partition].log  # type: ignore[assignment]
        if log.owned:
            return self.address if self._slot(log) in self.state else None
        owner = log.replica.owner
        return None if owner is None or address_of(owner) == self.address else address_of(owner)

    async def wait_for_owner(self, topic: str, partition: int = 0) -> str:
        deadline = self.loop.time() + self.timeout
        while (owner := self.owner_of(topic, partition)) is None:
            if self.loop.time() > deadline:
                raise StorageFailed(
                    f"no node has served {topic!r} for {self.timeout:g} seconds; try again",
                    code="no_owner",
                )
            await asyncio.sleep(0.02)
        return owner

    def nodes(self) -> set[str]:
        """The addresses of the other nodes, as far as is known."""
        owners = {log.replica.owner for log in self.logs() if log.replica.owner}
        return ({address_of(owner) for owner in owners} | self._members) - {self.address}

    async def settled_elsewhere(self) -> None:
        """What members here have settled has arrived at the owners."""
        waiting = [
            peer.ask(Type.HEARTBEAT, {}, timeout=self.timeout) for peer in self.peers if peer.is_up
        ]
        await asyncio.gather(*waiting)

    async def tell_all(self, *, patiently: bool = False) -> None:
        """Have the other nodes know what was defined until now, before a client is answered.

        ``patiently``: also those that this node has no connection to yet.
        """
        body = orjson.dumps({"op": "whoami"})
        asked = [
            peer.ask(Type.ADMIN, {"forwarded": "true"}, body, timeout=TOLD_S)
            for peer in map(self.peers.get, self.nodes())
            if peer.is_up or patiently
        ]
        await asyncio.gather(*asked, return_exceptions=True)

    async def leader(self) -> Peer | None:
        """The node that leads; None: this one."""
        address = await self.wait_for_owner(schedule.TOPIC)
        return None if address == self.address else self.peers.get(address)

    def delay(self, publish: Publish, columns: Columns, deliver_at: int) -> None:
        done = publish.done

        def answered(receipts: list[Receipt] | None, error: HeadraceError | None) -> None:
            done(receipts or [], error)

        topic, partition = publish.topic, publish.partition
        self._answer(delaying.delay(self, topic, columns, deliver_at, partition), answered)

    async def stage(self, properties: dict[str, str], body: bytes) -> str:
        peer = await self.leader()
        if peer is None:  # since a moment ago
            raise StorageFailed(
                "the node that stages batches has changed; try again", code="no_owner"
            )
        frame = await peer.ask(
            Type.STAGE, {**properties, "forwarded": "true"}, body, timeout=self.timeout
        )
        return frame.properties["piece"]

    async def settle(
        self, verb: str, deliveries: list[str], fields: dict[str, Any], caller: str | None
    ) -> list[str]:
        given = {"op": "settle_pulled", "verb": verb, "deliveries": deliveries, **fields}
        properties = {"forwarded": "true"} | ({} if caller is None else {"caller": caller})
        peers, body = [self.peers.get(each) for each in self.nodes()], orjson.dumps(given)
        asked = [p.ask(Type.ADMIN, properties, body, timeout=self.timeout) for p in peers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        stale = set(deliveries)
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, Frame):
                theirs = set(orjson.loads(answer.body)["stale"])
                peer.acks_sent += len(set(deliveries) - theirs) if verb == "ack" else 0
                stale &= theirs
        return [each for each in deliveries if each in stale]

    # --- reading and operations ------------------------------------------------------------------
    def fresh(self, topics: tuple[str, ...] = ()) -> Awaitable[None]:
        return self.freshness.of(topics)

    async def call(
        self, administration: Administration, operation: Operation, checked: dict[str, Any]
    ) -> Any:
        return await self._routing.call(administration, operation, checked)

    async def accept(self, operation: Operation, checked: dict[str, Any]) -> None:
        await self._routing.accept(operation, checked)

    def flushed(self, source: Source, began: float) -> None:
        self.losses.check(source.connection, began)

    async def settled(self) -> None:
        """Every partition has an owner, and what this node is taking is taken. If Kafka is slow, not for ever."""
        if not self._is_settled():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timeout):
                    await self._until(self._is_settled)

    def _is_settled(self) -> bool:
        return not self._taking and all(self.owner_of(*log.about) for log in self.logs())

    async def drain(self) -> None:
        """Hand all slots to other nodes; this node goes on to forward."""
        await self._look_around()
        if not self.drained and not self._members - {self.address}:
            raise Conflict(
                "no other node could take the slots: start one first, or stop this one without draining",
                code="last_node",
            )
        self.drained = True
        self.hints.drain()
        self._gained(set())  # lets go of what it resumed
        async with asyncio.timeout(self.timeout):
            await self._until(lambda: not set(self.state))


async def _all(works: Any) -> None:
    """Each takes a callback; returns when all were called."""
    loop, futures = asyncio.get_running_loop(), []
    for work in works:
        future: asyncio.Future[None] = loop.create_future()
        futures.append(future)
        work(partial(_settle, future))
    for future in futures:
        await future


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
