"""Which records of a batch are for a reader, and which are passed over.

A record with a target is for the subscription it names and for no other. A record whose time to
live has ended, its own or else its topic's, is delivered no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace import limits
from headrace.log.batch import HAS_EXPIRY, HAS_TARGETS, Batch


class Selection(NamedTuple):
    """Indexes of a batch's records."""

    wanted: Sequence[int]
    foreign: Sequence[int] = ()
    """Meant for another subscription."""
    expired: Sequence[int] = ()


def takes_all(batch: Batch, ttl_ms: int | None) -> bool:
    """Whether all records of the batch are for every reader, and none of them expires."""
    return ttl_ms is None and not batch.flags & (HAS_EXPIRY | HAS_TARGETS)


def select(
    batch: Batch, indexes: Sequence[int], *, target: bytes, ttl_ms: int | None, now_ms: int
) -> Selection:
    """``target``: the subscription that reads, or nothing for a reader that is none."""
    if takes_all(batch, ttl_ms):
        return Selection(indexes)
    targets = batch.some(batch.targets, indexes)
    expiry, times = batch.some(batch.expiry, indexes), batch.some(batch.times, indexes)
    wanted: list[int] = []
    foreign: list[int] = []
    expired: list[int] = []
    for place, index in enumerate(indexes):
        if targets is not None and targets[place] not in (b"", target):
            foreign.append(index)
            continue
        ends = expiry[place] if expiry is not None else 0
        if not ends and ttl_ms is not None:
            ends = (batch.base_timestamp if times is None else times[place]) + ttl_ms
        (expired if ends and ends <= now_ms else wanted).append(index)
    return Selection(wanted, foreign, expired)


def bytes_each(batch: Batch, indexes: Sequence[int]) -> int:
    """The average size of the records; it bounds what a member holds."""
    if batch.plain_bytes <= limits.LEASE_BYTES_MAX:
        return batch.plain_bytes // batch.count
    low, high = indexes[0], indexes[-1] + 1
    return batch.value_bytes(low, high) // (high - low)
