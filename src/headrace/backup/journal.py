"""The journal of subscriptions without some topics: those that were deleted, or are not to be restored.

The letters are those of ``broker/state.py``. A subscription on such a topic alone goes with it; a wildcard
stays, without its position there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import orjson

from headrace.log.journal import frame
from headrace.model import is_pattern

_NUMBER = struct.Struct("<I")


def without_topics(entries: list[bytes], is_kept: Callable[[str], bool]) -> list[bytes]:
    """The entries that are about topics which are kept, or about no topic."""
    subscriptions: set[int] = set()
    cursors: set[int] = set()
    for entry in entries[1:]:
        if entry[:1] == b"S":
            item = orjson.loads(entry[1:])
            if not is_pattern(item["topic"]) and not is_kept(item["topic"]):
                subscriptions.add(item["id"])
        elif entry[:1] == b"K":
            item = orjson.loads(entry[1:])
            if item["subscription"] in subscriptions or not is_kept(item["topic"]):
                cursors.add(item["cursor"])

    def wanted(entry: bytes) -> bool:
        kind = entry[:1]
        if kind == b"C":
            return _NUMBER.unpack_from(entry, 1)[0] not in cursors
        if kind in (b"K", b"M"):
            return orjson.loads(entry[1:])["cursor"] not in cursors
        return kind != b"S" or orjson.loads(entry[1:])["id"] not in subscriptions

    return [*entries[:1], *filter(wanted, entries[1:])]


def framed(entries: list[bytes]) -> list[bytes]:
    """The content of ``@subscriptions.journal``."""
    return [frame(entry) for entry in entries]
