"""A point in time of the whole broker, for a backup that copies it while the broker goes on.

``begin`` fixes the point, in one turn of the loop: where every partition ends, and what the journal of
subscriptions would hold if it were written now. So no position is after the end of its partition, a delayed
message is either still waiting or published, and a commit of staged batches is shown everywhere or nowhere.
The reader then copies messages up to these ends with ``FETCH``, at its own pace.

Rules:
- The journal is long where there are a hundred thousand subscriptions, so it is collected in slices. What
  changes meanwhile is tapped (``state.Tap``) and added at the end: a journal is a snapshot and the entries
  after it. The last turn holds up the loop for what has changed in the turns before it.
- As long as a backup runs, retention deletes nothing: what was there at the point is there to be copied,
  also delayed messages and staged batches, which are deleted as soon as they are done. But a full disk is
  worse than no backup: then the backup ends, and retention goes on. Deleting a topic is not held up.
- A backup ends by itself when nobody has asked for it for ``BACKUP_LEASE_S``. One runs at a time; its memory counts
  in the budget.
- Of a cluster, the node that leads takes it, with the states of all slots (``cluster/gathering.py``).
- Memory topics are listed without messages: they are empty after a start, too.

Rejected: copying the files of a running broker (positions could be ahead of messages, and a delayed message
could be in neither of two files); holding the broker still; a pin for each partition, released one by one
(retention waits for minutes at most, and the operator would have to understand it).
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.access.caller import Caller
from headrace.broker.restoring import snapshot
from headrace.broker.staged_commit import read_in_background
from headrace.broker.state import MAGIC, StateJournal, Tap
from headrace.clock import Timer
from headrace.errors import Conflict, InvalidArgument, NotFound
from headrace.log.interface import Log
from headrace.operations.backups import BackupBegun, BackupPage, BackupPartition, BackupTopic

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
RENEW_S = 20.0
"""How often other nodes of a cluster are told to hold their retention."""
Take = Callable[[int], None]
"""Counts bytes in the budget."""
Entries = Callable[[], Awaitable[list[bytes]]]


@dataclass(slots=True, eq=False)
class RunningBackup:
    id: str
    by: str
    began_ms: int
    time: int = 0
    pages: list[BackupPage] = field(default_factory=list)
    bytes: int = 0
    """What it holds of the budget."""
    asked_at: float = 0.0


class Backups:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._running: RunningBackup | None = None
        self._timer: Timer | None = None
        self._why = ""
        """Why the last one ended, if not as it should."""
        self._held_until = 0.0
        """Another node takes a backup of the cluster, and renews this."""
        self._told_at = 0.0
        engine.retention.is_held = self.holds

    def holds(self) -> bool:
        """Whether messages may not be deleted now."""
        if self._running is None:
            is_held = self._engine.time() < self._held_until
            return is_held and self._engine.guard.refusal() is None
        if self._engine.guard.refusal() is None:
            return True
        self._end("the disk became full, so retention had to delete messages")
        return False

    def hold(self, seconds: float) -> None:
        """Delete no messages for so long: another node takes a backup of the cluster."""
        self._held_until = self._engine.time() + seconds

    # --- beginning ----------------------------------------------------------------------------
    async def begin(self, by: str, *, access: bool) -> BackupBegun:
        engine = self._engine
        if engine.directory is None:
            raise InvalidArgument(
                "this broker keeps nothing on disk (persistence_enabled is off): there is nothing to "
                "back up",
                code="nothing_to_back_up",
            )
        if self._running is not None:
            seconds = (engine.now_ms() - self._running.began_ms) // 1000
            raise Conflict(
                f"{self._running.by} has begun a backup {seconds} seconds ago; wait for its end, or "
                f"{limits.BACKUP_LEASE_S:g} seconds after it was killed",
                code="backup_running",
            )
        number = f"{engine.next_lease_id():x}"
        backup = self._running = RunningBackup(number, by, engine.now_ms(), asked_at=engine.time())
        self._look_later()
        try:
            rules = await engine.access.file_content() if access else b""
            async with self._state(backup) as entries_of_it:
                # Nothing may be awaited from the last entries to here: this is the point in time.
                backup.time = engine.now_ms()
                topics = [_described(topic) for topic in engine.topics]
            self._lay_out(backup, topics, [MAGIC, *await entries_of_it()], rules)
        except BaseException:
            self._end("it could not begin")
            raise
        self._check(number)
        backup.asked_at = engine.time()
        return {
            "backup": number,
            "time": backup.time,
            "pages": len(backup.pages),
            "lease": limits.BACKUP_LEASE_S,
        }

    @asynccontextmanager
    async def _state(self, backup: RunningBackup) -> AsyncIterator[Entries]:
        """What the journal would hold. The caller goes on in the turn in which the last was added."""
        engine = self._engine
        if engine.cluster is not None:
            self._told_at = engine.time()
            take = partial(self._take, backup)
            async with engine.cluster.point_in_time(take, limits.BACKUP_LEASE_S) as entries:
                yield entries
            return
        assert isinstance(engine.state, StateJournal)
        tap = Tap()
        found: list[bytes] = []

        async def all_found() -> list[bytes]:
            return found

        engine.state.taps.append(tap)
        try:
            async for payload in engine.pace.each(tap.follow(snapshot(engine))):
                found.append(payload)
                self._take(backup, len(payload) + 64)
                backup.asked_at = engine.time()
            last = list(tap.take())
            self._take(backup, sum(map(len, last)))
            found += last
            yield all_found
        finally:
            engine.state.taps.remove(tap)

    def _take(self, backup: RunningBackup, size: int) -> None:
        self._engine.budget.take(size)
        backup.bytes += size

    def _lay_out(
        self, backup: RunningBackup, topics: list[BackupTopic], entries: list[bytes], rules: bytes
    ) -> None:
        """Divide it into pages. The bytes are encoded when a page is read."""
        page: Any = _page()
        size = 0
        for topic in topics:
            page["topics"].append(topic)
            size += len(topic["extents"]) + 10
            if size >= limits.BACKUP_PAGE_PARTITIONS:
                backup.pages.append(page)
                page, size = _page(), 0
        backup.pages.append(page)
        page, size = _page(), 0
        for entry in entries:
            page["entries"].append(entry)
            size += len(entry)
            if size >= limits.BACKUP_PAGE_BYTES:
                backup.pages.append(page)
                page, size = _page(), 0
        backup.pages.append(page)
        for at in range(0, len(rules), limits.BACKUP_PAGE_BYTES):
            page = _page()
            page["access"] = rules[at : at + limits.BACKUP_PAGE_BYTES]
            backup.pages.append(page)
        self._take(backup, len(rules) + 64 * len(topics))

    # --- reading ------------------------------------------------------------------------------
    def page(self, number: str, page: int | None) -> BackupPage:
        backup = self._check(number)
        if page is None:
            return _page()
        if page >= len(backup.pages):
            raise InvalidArgument(f"the backup has {len(backup.pages)} pages, not {page + 1}")
        raw: Any = backup.pages[page]
        return {
            "topics": raw["topics"],
            "entries": [b64encode(entry).decode() for entry in raw["entries"]],
            "access": b64encode(raw["access"]).decode() if raw["access"] else "",
        }

    async def partition(
        self, number: str, topic: str, partition: int, offset: int | None
    ) -> BackupPartition:
        self._check(number)
        log = self._engine.partition(topic, partition).log
        producers = log.producers_dump()
        readable = None if offset is None else await self._readable(log, offset)
        return {"producers": b64encode(producers).decode(), "readable": readable}

    async def _readable(self, log: Log, offset: int) -> int:
        """In a worker: it may have to read a whole segment."""
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(result: int | None, error: BaseException | None) -> None:
            if not found.done():
                found.set_exception(error) if error is not None else found.set_result(result or 0)

        read_in_background(self._engine, log, lambda: log.readable_from(offset), done)
        return await found

    def _check(self, number: str) -> RunningBackup:
        backup = self._running
        if backup is None or backup.id != number:
            why = self._why or "the broker was started again, or nobody asked for it in time"
            raise NotFound(f"the backup has ended: {why}; begin again", code="backup_not_found")
        engine = self._engine
        backup.asked_at = engine.time()
        if engine.cluster is not None and engine.time() - self._told_at > RENEW_S:
            self._told_at = engine.time()
            engine.cluster.hold_elsewhere(limits.BACKUP_LEASE_S)
        return backup

    # --- ending -------------------------------------------------------------------------------
    def end(self, number: str) -> None:
        if self._running is not None and self._running.id == number:
            self._end("")

    def close(self) -> None:
        if self._running is not None:
            self._end("the broker has stopped")

    def _end(self, why: str) -> None:
        backup, self._running = self._running, None
        self._why = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if backup is not None:
            if self._engine.cluster is not None and not self._engine.closing:
                self._engine.cluster.hold_elsewhere(0.0)
            self._engine.budget.give(backup.bytes)
            if why:
                logger.warning("the backup by %s has ended: %s", backup.by, why)

    def _look_later(self) -> None:
        assert self._running is not None
        left = self._running.asked_at + limits.BACKUP_LEASE_S - self._engine.time()
        if left <= 0:
            self._end(f"nobody has asked for it for {limits.BACKUP_LEASE_S:g} seconds")
        else:
            self._timer = self._engine.call_later(left, self._look_later)


def _page() -> BackupPage:
    return {"topics": [], "entries": [], "access": ""}


def _described(topic: Any) -> BackupTopic:
    record = topic.record
    return {
        "topic": record.name,
        "incarnation": record.incarnation,
        "created_ms": record.created_ms,
        "owner": record.owner,
        "settings": topic.settings.as_dict(),
        "extents": [
            [partition.log.start_offset, partition.log.end_offset] for partition in topic.partitions
        ]
        if topic.settings.durable
        else [],
    }


class BackupAdministration:
    """The operations of ``operations/backups.py``, for :class:`~headrace.broker.administration.Administration`."""

    engine: Engine
    caller: Caller

    async def begin_backup(self, access: bool) -> BackupBegun:
        self.caller.need_everything()
        return await self.engine.backups.begin(self.caller.name, access=access)

    async def read_backup(self, backup: str, page: int | None) -> BackupPage:
        self.caller.need_everything()
        return self.engine.backups.page(backup, page)

    async def read_backup_partition(
        self, backup: str, topic: str, partition: int, offset: int | None
    ) -> BackupPartition:
        self.caller.need_everything()
        return await self.engine.backups.partition(backup, topic, partition, offset)

    async def end_backup(self, backup: str) -> None:
        self.caller.need_everything()
        self.engine.backups.end(backup)
