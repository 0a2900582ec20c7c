"""The operations of a backup (``headrace backup``): a point in time of the whole broker, read in pages.

They are for administrators who may do everything: a backup holds all messages of all topics, and the hashes
of passwords. ``broker/backups.py`` says how they work. Messages are read with ``FETCH``, as by any reader.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from headrace import limits
from headrace.operations.arguments import ExistingTopic, Offset, Partition, TimeMs
from headrace.operations.declaring import Operation, operation

BackupId = Annotated[str, Meta(min_length=1, max_length=64)]
Page = Annotated[int, Meta(ge=0, le=limits.OFFSET_MAX)]


class BackupBegun(TypedDict):
    backup: str
    """Its id."""
    time: TimeMs
    pages: int
    lease: float
    """Seconds after which the broker forgets a backup that nobody reads."""


class BackupTopic(TypedDict):
    topic: str
    incarnation: int
    created_ms: TimeMs
    owner: str | None
    settings: dict[str, Any]
    extents: list[list[int]]
    """(start, end) of each partition; none for a topic in memory."""


class BackupPage(TypedDict):
    topics: list[BackupTopic]
    entries: list[str]
    """Entries of the journal of subscriptions, as base64; the first of all is the format's name."""
    access: str
    """A part of the access file, as base64; empty if there is none."""


class BackupPartition(TypedDict):
    producers: str
    """The table of idempotent producers before the partition's end, as base64."""
    readable: int | None
    """The first offset at or after the requested one that can be read; None if none was requested."""


class BackupOperations:
    async def _operate(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError

    @operation(permission="admin", runs="leader", repeatable=False, errors=("backup_running",))
    async def begin_backup(self, *, access: bool = True) -> BackupBegun:
        """Fix a point in time of the whole broker, and keep its messages until the backup ends.

        While it lasts, retention deletes nothing, unless the disk is full. ``access``: also the access file.
        A backup that is not read for a minute ends by itself. ``headrace backup`` calls this.

        Example::

            backup = (await client.begin_backup())["backup"]
        """

    @operation(permission="admin", runs="leader", errors=("backup_not_found",))
    async def read_backup(self, backup: BackupId, page: Page | None = None) -> BackupPage:
        """A page of the topics, journal and access file of a backup. Without ``page``, only renew its lease.

        Example::

            page = await client.read_backup(backup, 0)
        """

    @operation(permission="admin", about="topic", runs="leader", errors=("backup_not_found",))
    async def read_backup_partition(
        self,
        backup: BackupId,
        topic: ExistingTopic,
        partition: Partition,
        *,
        offset: Offset | None = None,
    ) -> BackupPartition:
        """The idempotent producers of a partition; with ``offset``, also where it can be read again.

        Example::

            producers = (await client.read_backup_partition(backup, "orders", 0))["producers"]
        """

    @operation(permission="admin", runs="leader", answer="ended")
    async def end_backup(self, backup: BackupId) -> None:
        """End a backup: retention deletes messages again.

        Example::

            await client.end_backup(backup)
        """
