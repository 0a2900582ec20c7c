"""Founding a cluster: as an empty one by its first node, or by an import with the whole of a single broker.

A cluster is founded when its definitions hold a secret. Whoever founds it writes the secret with everything that belongs to it in one
commit, so a cluster is founded as a whole or not at all. A new cluster has no definitions, one that is being imported has the
topic ``__importing``, and one with other definitions and no secret is of an earlier version.

:class:`Founding` is an import's side of it (``moving/importing.py``). It claims every partition, as a node does, and is
their only owner: no node serves meanwhile, and none starts. The rule of claims holds here, too: should a node or a
second import get in between, what this one writes is void, and it fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from headrace.broker import state as entries
from headrace.broker.state import Loaded
from headrace.budget import Budget
from headrace.clock import Clock
from headrace.cluster.agreed import Agreed, deleted, entry
from headrace.cluster.peers import address_of
from headrace.engine.kafka.definitions import Definitions
from headrace.engine.kafka.hints import nodes_of
from headrace.engine.kafka.journal import open_together
from headrace.engine.kafka.log import KafkaLog
from headrace.engine.kafka.shared import SharedStorage
from headrace.errors import Conflict, HeadraceError, StorageFailed, refused_by_disk
from headrace.log.interface import Append, Log, TopicRecord
from headrace.log.storage import settings_content
from headrace.log.workers import SyncFailed
from headrace.model import INTERNAL_PREFIX, TopicSettings

IMPORTING = f"{INTERNAL_PREFIX}importing"
"""Defined while a cluster is imported."""
LOOK_AGAIN_S = 0.2


def secret() -> bytes:
    return entry(kind="secret", secret=secrets.token_hex(32))


def check_founded(agreed: Agreed) -> None:
    """Whether a node may start on the cluster: it is founded, or new."""
    if IMPORTING in agreed.topics:
        raise Conflict(
            "an import into this cluster was interrupted; run the same 'headrace cluster import' again, which "
            "continues it",
            code="import_unfinished",
        )
    if agreed.topics and not agreed.secret:
        raise StorageFailed(
            "this cluster was made by an earlier version of Headrace, with one node at a time (slots=0); start a new one "
            "(another --cluster), and move the messages with that version's 'headrace cluster export'",
            code="cluster_too_old",
            retryable=False,
        )


class Founding:
    """See :class:`headrace.moving.importing.Destination` and :class:`headrace.engine.kafka.log.Host`."""

    def __init__(self, make: Callable[[Any], SharedStorage], session_s: float):
        self.loop, self.clock, self.budget = asyncio.get_running_loop(), Clock(), Budget()
        self._storage = make(self)
        self._storage.host = self
        self._session_s = session_s
        self._agreed = Agreed()
        self._definitions: Definitions | None = None

    # --- as the host of the logs ------------------------------------------------------------------
    def forward(self, log: KafkaLog, entry: Append) -> None:
        entry.fail(_in_use(log.replica.owner))

    def claimed(self, log: KafkaLog, node: str, *, ours: bool) -> None:
        pass  # whoever appends next to what was lost gets the error

    def doubt(self) -> None:
        return None  # it reads what it has just claimed

    # --- for the import ---------------------------------------------------------------------------
    async def open(self) -> dict[str, tuple[TopicRecord, list[Log]]]:
        storage = self._storage
        await _blocking(storage.link.reach)  # a wrong login is said at once
        await self._wait_for_nodes()
        await _blocking(storage.prepare)
        found = storage.define(self._agreed.fold, self._agreed.snapshot)
        await _blocking(found.open)
        self._definitions = found
        for payload in found.begin():
            self._agreed.fold(payload)
        topics = self._agreed.topics
        if IMPORTING not in topics and (topics or self._agreed.secret):
            raise Conflict(
                "the cluster is not new: a node has served it. Import into a new one (another --cluster)",
                code="cluster_not_empty",
            )
        await _blocking(storage.prepare_state, is_founded=False)
        if IMPORTING not in topics:
            now = self.clock.now_ms()
            await self.create(TopicRecord(IMPORTING, TopicSettings(), now, now))
            return {}
        records = [record for name, record in topics.items() if name != IMPORTING]
        await _blocking(storage.open_all, records, claim=True)
        return {
            record.name: (
                record,
                [storage.open(record, number) for number in range(record.settings.partitions)],
            )
            for record in records
        }

    async def _wait_for_nodes(self) -> None:
        """A node that was stopped or killed a moment ago may be known for a while."""
        deadline = self.loop.time() + self._session_s
        while nodes := await asyncio.to_thread(nodes_of, self._storage.link):
            if self.loop.time() > deadline:
                raise _in_use(nodes[0][0])
            await asyncio.sleep(LOOK_AGAIN_S)

    async def create(self, topic: TopicRecord) -> list[Log]:
        storage = self._storage
        name = storage.kafka.name_of(topic)
        await _blocking(storage.kafka.create, {name: topic.settings.partitions})
        await self._define(settings_content(topic))
        logs = [storage.make_log(topic, number) for number in range(topic.settings.partitions)]
        replicas = [log.replica for log in logs]
        await _blocking(storage.link.open, replicas, storage.link.logs, new=True)
        return list(logs)

    async def _define(self, *payloads: bytes) -> None:
        def decide() -> list[bytes]:
            if self._agreed.secret:
                raise _in_use(None)
            return list(payloads)

        assert self._definitions is not None
        await self._definitions.change(decide)

    async def finish(self, loaded: Loaded, *, clean: bool) -> None:
        await _blocking(self._write_slots, loaded, clean)
        marker = self._agreed.topics[IMPORTING]
        await self._define(
            secret(),
            *[_subscription(item) for item in loaded.subscriptions.values() if _is_defined(item)],
            *[
                entry(kind="producer", name=name, id=number, epoch=epoch)
                for name, (number, epoch) in loaded.producers.items()
            ],
            deleted(marker),
        )
        kafka = self._storage.kafka
        await _blocking(kafka.delete, kafka.name_of(marker))

    def _write_slots(self, loaded: Loaded, clean: bool) -> None:
        storage = self._storage
        journals = [storage.journal_of(slot) for slot in range(storage.slots)]
        try:
            open_together(storage.link, journals)
            for slot, journal in enumerate(journals):
                journal.rewrite(list(_state_of(loaded, slot, storage.slot_of, clean)))
        finally:
            for journal in journals:
                journal.close()

    async def close(self) -> None:
        await asyncio.to_thread(self._storage.close)


def _state_of(loaded: Loaded, slot: int, slot_of: Any, clean: bool) -> Iterator[bytes]:
    """What the journal of a slot holds. ``clean``: what the broker was allowed to deliver and had not, it did not deliver."""
    if slot == 0:
        yield from map(entries.decide, loaded.commits.values())
    mine = {
        number: item
        for number, item in loaded.cursors.items()
        if item["subscription"] in loaded.subscriptions
        and slot_of(item["topic"], item["partition"]) == slot
    }
    for number in sorted({item["subscription"] for item in mine.values()}):
        yield b"S" + orjson.dumps(loaded.subscriptions[number])
    for number, item in mine.items():
        yield b"K" + orjson.dumps(item)
        yield from loaded.deltas.get(number, ())
        kept = loaded.reserves.get(number)
        if kept is not None:
            yield b"M" + orjson.dumps({**kept, "reserved": 0} if clean else kept)


def _is_defined(item: dict[str, Any]) -> bool:
    return not item["name"].startswith(INTERNAL_PREFIX)


def _subscription(item: dict[str, Any]) -> bytes:
    return entry(
        kind="subscription",
        name=item["name"],
        topic=item["topic"],
        settings=item["settings"],
        created_ms=item["created_ms"],
        owner=item.get("owner"),
        paused=bool(item.get("paused")),
        starts=[],
    )


async def _blocking(work: Callable[..., Any], *given: Any, **more: Any) -> Any:
    try:
        return await asyncio.to_thread(work, *given, **more)
    except OSError as error:
        raise (error if isinstance(error, HeadraceError) else refused_by_disk(error)) from error
    except SyncFailed:
        raise _in_use(None) from None


def _in_use(node: str | None) -> Conflict:
    who = "a node" if node is None else f"node {address_of(node)}"
    return Conflict(
        f"{who} serves this cluster; stop all its nodes, and import again", code="cluster_in_use"
    )
