"""The members of a subscription, and whose turn it is."""

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
        return any(member.room() > 0 for member in self._members)

    def room(self) -> int:
        return sum(max(member.room(), 0) for member in self._members)

    def next(self, wanted: int, bytes_each: int) -> tuple[list[Member], int]:
        """Members with room in their turn, at most ``wanted``, and how much each of them takes."""
        count = len(self._members)
        chosen: list[Member] = []
        room = limits.LEASE_RECORDS_MAX
        first = self._turn % count if count else 0
        for step in range(count):
            at = (first + step) % count
            member = self._members[at]
            free = member.room_for(bytes_each)
            if free > 0:
                chosen.append(member)
                room = min(room, free)
                self._turn = at + 1
                if len(chosen) == wanted:
                    break
        rounds = -(-wanted // len(chosen)) if chosen else 0
        if chosen and room >= rounds and wanted % len(chosen):
            # The last round does not reach every member: the turn continues after the last one reached.
            self._turn = self._members.index(chosen[wanted % len(chosen) - 1]) + 1
        return chosen, room

    def one(self, room: dict[int, int], bytes_each: int) -> Member | None:
        for _ in range(len(self._members)):
            member = self._members[self._turn % len(self._members)]
            self._turn = self._turn % len(self._members) + 1
            free = room.setdefault(id(member), member.room_for(bytes_each))
            if free > 0:
                room[id(member)] = free - 1
                return member
        return None
