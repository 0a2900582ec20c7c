"""The members of a subscription, and whose turn it is.

A member that let a deadline pass and has settled nothing since (``Member.stalled``) may be frozen: every
message that it gets costs an attempt. So it is passed over while another member has room, and otherwise gets
one message at a time. If all are stalled, none is passed over. The last attempt of a message goes to another member than the one before, and alone,
so that a frozen member does not make dead letters of healthy messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace import limits
from headrace.broker.delivery import Member


class Members:
    """Round-robin over the members that have room; the turn continues where the last deal ended."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def add(self, member: Member) -> None:
        self._members.append(member)

    def remove(self, member: Member) -> None:
        at = self._members.index(member)
        del self._members[at]
        if at < self._turn:  # the turn stays with the same member
            self._turn -= 1

    def clear(self) -> None:
        self._members.clear()

    def have_room(self) -> bool:
        for member in self._members:  # not a generator: it is asked for each delivery
            if (self._room(member) if member.stalled else member.room()) > 0:
                return True
        return False

    def room(self) -> int:
        return sum(max(self._room(member), 0) for member in self._members)

    def _room(self, member: Member) -> int:
        room = member.room()
        return min(room, 1 - member.in_flight) if self._is_avoided(member) else room

    def _is_avoided(self, member: Member) -> bool:
        return member.stalled and not all(other.stalled for other in self._members)

    def _avoided(self) -> Member | None:
        """A member that is avoided, has nothing and can take something."""
        for member in self._members:
            if self._is_avoided(member) and self._room(member) > 0:
                return member
        return None

    def for_last_attempt(self, before: Member | None) -> tuple[Member | None, bool]:
        """Who gets the last attempt of a message, and whether it is worth waiting for somebody better.

        ``before`` had the attempt before. Best is another one that has nothing to do.
        """
        others = [member for member in self._members if member is not before and not member.stalled]
        able = [member for member in others if member.room() > 0]
        if able:
            return min(able, key=lambda member: member.in_flight), False
        if others:
            return None, True
        able = [member for member in self._members if self._room(member) > 0]
        return min(able, key=lambda member: (member.stalled, member.in_flight), default=None), False

    def next(self, wanted: int, bytes_each: int) -> tuple[list[Member], int]:
        """Members with room in their turn, at most ``wanted``, and how much each of them takes."""
        count = len(self._members)
        room = limits.LEASE_RECORDS_MAX
        if count == 1:  # as most subscriptions have
            free = self._members[0].room_for(bytes_each)
            return (self._members[:1], min(free, room)) if free > 0 else ([], room)
        chosen: list[Member] = []
        first = self._turn % count if count else 0
        for step in range(count):
            at = (first + step) % count
            member = self._members[at]
            if member.stalled and self._is_avoided(member):
                continue
            free = member.room_for(bytes_each)
            if free > 0:
                chosen.append(member)
                room = min(room, free)
                self._turn = at + 1
                if len(chosen) == wanted:
                    break
        if not chosen:
            avoided = self._avoided()
            return ([], room) if avoided is None else ([avoided], 1)
        rounds = -(-wanted // len(chosen))
        if room >= rounds and wanted % len(chosen):
            # The last round does not reach every member: the turn continues after the last one reached.
            self._turn = self._members.index(chosen[wanted % len(chosen) - 1]) + 1
        return chosen, room

    def one(self, room: dict[int, int], bytes_each: int) -> Member | None:
        for _ in range(len(self._members)):
            member = self._members[self._turn % len(self._members)]
            self._turn = self._turn % len(self._members) + 1
            if member.stalled and self._is_avoided(member):
                continue
            free = room.setdefault(id(member), member.room_for(bytes_each))
            if free > 0:
                room[id(member)] = free - 1
                return member
        avoided = self._avoided()
        if avoided is not None and room.setdefault(id(avoided), 1) > 0:
            room[id(avoided)] = 0
            return avoided
        return None
