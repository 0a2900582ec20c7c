"""The access rules of a cluster, which all nodes agree on: a store in place of the access file.

A change is decided as any definition is (``engine/kafka/definitions.py``): with all that other nodes changed before. All nodes that
can be reached have it in force before it is answered, so a user who is deleted at one node is refused at all of them.

Until the cluster has rules, the access file of each node counts, and the first node that has one gives its rules to all. So the
first administrator is made as for a single broker (``headrace users add --data``). From then on no file counts.

Rejected: all rules as one entry, because a change of one of 100,000 users would write all of them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.access.file import Change, InThread, RuleStore, encode_file
from headrace.access.rules import AccessRules
from headrace.cluster.agreed import changed_rules
from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.cluster.node import Node

logger = logging.getLogger("headrace.cluster")
CHANGE_BYTES_MAX = 60 << 20
"""One record of Kafka holds a change."""


class AgreedRules:
    """See :class:`headrace.access.file.RuleStore`."""

    def __init__(self, node: Node, file: RuleStore):
        self._node, self._file = node, file
        self._unused: object = None
        """The file that the log has told of."""

    def stamp(self) -> object:
        rules = self._node.agreed.rules
        return self._file.stamp() if rules is None else rules.version

    def read(self) -> AccessRules | None:
        return self._node.agreed.rules or self._file.read()

    def content(self) -> bytes:
        rules = self._node.agreed.rules
        return self._file.content() if rules is None else encode_file(rules)

    async def change_in(self, in_thread: InThread, change: Change) -> AccessRules:
        node = self._node
        while True:
            before = node.agreed.rules
            after: AccessRules = await in_thread(change, self.read() or AccessRules())
            entries: list[bytes] = await in_thread(changed_rules, before, after)
            if sum(map(len, entries)) > CHANGE_BYTES_MAX:
                raise InvalidArgument(
                    f"the users and tokens take more than {CHANGE_BYTES_MAX >> 20} MB",
                    code="too_many_principals",
                )
            is_current = True

            def decide(
                before: AccessRules | None = before, entries: list[bytes] = entries
            ) -> list[bytes]:
                nonlocal is_current
                is_current = node.agreed.rules is before  # else another node has changed them
                return entries if is_current else []

            await node.definitions.change(decide)
            if is_current:
                await node.tell_all(patiently=True)
                return after

    async def adopt(self) -> None:
        """Give the rules of this node's file to a cluster that has none."""
        stamp = self._file.stamp()
        if stamp is None or stamp == self._unused:
            return
        if self._node.agreed.rules is None:
            await self.change_in(asyncio.to_thread, lambda rules: rules)
            logger.info("the cluster has the users and tokens of this node's access file now")
        self._unused = stamp
        logger.warning(
            "the access file in the data directory is not used: the cluster has access rules; change them "
            "with 'headrace users --server', and remove the file"
        )
