"""What a history says about deliveries, and what is wrong with them: see ``checker.py``."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.crash.history import Event, key_of

Place = tuple[str, int]
"""Topic and partition."""

SLACK_NS = 10_000_000
"""The broker's loop reads its clock once a turn, in milliseconds."""
RACE_NS = 300_000_000
"""An ack so close before its deadline may come too late, on a busy machine."""
SETTLED_NS = 12_000_000_000
"""With several nodes: so long after a fault, slots may still move (a session of the group, and some)."""
TRANSIT_NS = 3_000_000_000
"""How long a delivery may be under way from the broker to its member, on a busy machine."""
MS = 1_000_000


class Faults:
    """When something was broken in a cluster: nothing else explains what would be wrong on a quiet day.

    A fault that *holds* (a node sleeps, a link is slow or cut) keeps deliveries back, and lets an owner hand them out that has
    lost its slot and does not know it yet. So a delivery may have begun when the fault did.
    """

    def __init__(self) -> None:
        self._all: list[tuple[int, int]] = []
        self._holding: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, at: int, until: int, *, holds: bool) -> None:
        self._all = _joined([*self._all, (at, until + SETTLED_NS)])
        if holds:
            self._holding = _joined([*self._holding, (at, until + TRANSIT_NS)])

    def touch(self, begin: int, end: int) -> bool:
        """Whether slots may have moved in this time."""
        number = bisect_right(self._all, (end, 1 << 63)) - 1
        return number >= 0 and self._all[number][1] >= begin

    def begun(self, at: int) -> int:
        """When a delivery that a member gets now may have been handed out at the earliest."""
        begin = at - TRANSIT_NS
        number = bisect_right(self._holding, (at, 1 << 63)) - 1
        if number >= 0 and self._holding[number][1] >= begin:
            return min(begin, self._holding[number][0] - TRANSIT_NS)
        return begin


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that overlap as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


@dataclass(slots=True)
class _Delivery:
    group: str
    member: str
    life: int
    place: Place
    offset: int
    key: str | None
    attempt: int
    at: int
    deadline: int
    acked: int | None = None
    nacked: int | None = None
    stale: bool = False
    durable: int | None = None
    """When it was known that the ack is stored."""

    @property
    def is_done(self) -> bool:
        return self.acked is not None and not self.stale

    @property
    def timeout_ns(self) -> int:
        return self.deadline - self.at

    def stored(self, at: int) -> None:
        """Everything that the broker had got is stored. If the deadline has passed by then, nobody knows
        whether the ack came in time: it was called, but a broker that gets no time may have seen it late."""
        if at < self.deadline:
            self.durable = at

    @property
    def in_time(self) -> bool:
        return self.is_done and self.acked is not None and self.acked < self.deadline - RACE_NS


def ranges(offsets: Iterable[int]) -> str:
    """``3, 7 to 12``: for people, and not too long."""
    runs: list[list[int]] = []
    for offset in sorted(offsets):
        if runs and runs[-1][1] == offset - 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:5]]
    return ", ".join(texts) + (" …" if len(runs) > 5 else "")


class DeliveryChecks:
    """The part of the checker that is about groups."""

    _partitions: dict[Place, Any]
    _ops: dict[str, Any]
    _wrong: Callable[[str, str], None]
    _see: Callable[[Place, int, str], None]

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults = Faults()
        self._groups: dict[str, Event] = {}
        self._deliveries: dict[str, _Delivery] = {}
        self._acked: dict[tuple[str, int], list[_Delivery]] = defaultdict(list)
        self._left: dict[tuple[str, int], int] = {}
        self._dead: dict[tuple[str, Place, int], list[int]] = defaultdict(list)
        self._crashes_ms: list[tuple[int, int]] = []
        """From when to when a dead letter may have been stored again."""
        self._closed_lives: set[int] = set()
        self._uncounted_lives: set[int] = set()

    def _on_group(self, event: Event) -> None:
        self._groups[event["name"]] = event

    def _on_fault(self, event: Event) -> None:
        """One of several nodes, or what is between them, was broken for a while."""
        self.counts["faults"] += 1
        self.counts[f"faults: {event['what']}"] += 1
        self.faults.add(event["at"], event["until"], holds=event["holds"])
        self._crashes_ms.append((event["at_ms"], event["until_ms"] + SETTLED_NS // MS))

    # --- groups -----------------------------------------------------------------------------
    def _on_deliver(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        self.counts["deliveries"] += 1
        self._partitions[place].reach(event["at"], event["offset"] + 1)
        self._see(place, event["offset"], event["value"])
        self._deliveries[event["delivery"]] = _Delivery(
            event["group"],
            event["member"],
            event["life"],
            place,
            event["offset"],
            event["key"],
            event["attempt"],
            event["at"],
            event["deadline"],
        )

    def _on_ack(self, event: Event) -> None:
        delivery = self._deliveries[event["delivery"]]
        delivery.acked = event["at"]
        self._acked[(delivery.member, delivery.life)].append(delivery)

    def _on_nack(self, event: Event) -> None:
        self._deliveries[event["delivery"]].nacked = event["at"]

    def _on_stale(self, event: Event) -> None:
        delivery = self._deliveries[event["delivery"]]
        delivery.stale = True
        self.counts["stale settlements"] += 1

    def _on_flushed(self, event: Event) -> None:
        who = (event["member"], event["life"])
        waiting, self._acked[who] = self._acked[who], []
        for delivery in waiting:
            if delivery.acked is not None and delivery.acked < event["since"]:
                delivery.stored(event["at"])
            else:
                self._acked[who].append(delivery)

    def _on_unflushed(self, event: Event) -> None:
        """A flush said that some acks are lost, or may be, and not which."""
        self._acked[(event["member"], event["life"])].clear()
        self.counts["flushes that failed"] += 1

    def _on_left(self, event: Event) -> None:
        self._left.setdefault((event["member"], event["life"]), event["at"])

    def _on_dead(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        self._see(place, event["offset"], event["value"])
        self._dead[(event["group"], place, event["offset"])].append(event["stored_ms"])
        self.counts["dead letters"] += 1

    # --- the end ----------------------------------------------------------------------------
    def check_deliveries(self) -> None:
        by_message: dict[tuple[str, Place, int], list[_Delivery]] = defaultdict(list)
        # In the order in which they were handed out, which their deadlines tell: one may lie in its
        # member's channel until another member has had the next.
        for delivery in sorted(self._deliveries.values(), key=lambda d: (d.life, d.deadline, d.at)):
            by_message[(delivery.group, delivery.place, delivery.offset)].append(delivery)
        self._check_redeliveries(by_message)
        self._check_limit(by_message)
        for name, group in self._groups.items():
            self._check_skipped(name, group, by_message)
            if group["ordering"] == "key":
                self._check_turns(name, group)
        self._check_dead()

    def _check_redeliveries(
        self, by_message: dict[tuple[str, Place, int], list[_Delivery]]
    ) -> None:
        for (group, place, offset), deliveries in by_message.items():
            where = f"{group} got {place[0]}/{place[1]} offset {offset} again"
            for number, (earlier, later) in enumerate(pairwise(deliveries)):
                if any(self._is_over(d, later) for d in deliveries[: number + 1]):
                    self._wrong("unexplained", f"{where} after an ack that was durable")
                    break
                why = self._explanation(earlier, later)
                if why is None:
                    self._wrong(
                        "unexplained",
                        f"{where}, {(later.at - earlier.at) // 1_000_000} ms after {earlier.member} had it",
                    )
                else:
                    self.counts[f"redelivered: {why}"] += 1

    def _is_over(self, earlier: _Delivery, later: _Delivery) -> bool:
        """Its ack was stored before the later delivery began."""
        if earlier.durable is None or not earlier.in_time:
            return False
        return not self.faults or earlier.durable < self.faults.begun(later.at)

    def _explanation(self, earlier: _Delivery, later: _Delivery) -> str | None:
        if later.life != earlier.life:
            return "restart"
        if self.faults.touch(earlier.at, later.at):
            return "a fault"
        if earlier.in_time and not (later.at >= earlier.deadline and self._was_starved(earlier)):
            return None
        if earlier.nacked is not None and not earlier.stale:
            return "nack"
        if later.at >= earlier.deadline - SLACK_NS:
            return "deadline"
        left = self._left.get((earlier.member, earlier.life))
        if left is not None and left < later.at and not earlier.is_done:
            return "left"
        return None

    def _was_starved(self, delivery: _Delivery) -> bool:
        """Whether no call that began after the ack was answered before the deadline: a broker that gets no time
        sees the ack too late."""
        assert delivery.acked is not None
        return not any(
            delivery.acked <= op.invoked and op.acked is not None and op.acked < delivery.deadline
            for op in self._ops.values()
        )

    def _check_skipped(
        self,
        name: str,
        group: Event,
        by_message: dict[tuple[str, Place, int], list[_Delivery]],
    ) -> None:
        for place, partition in self._partitions.items():
            if place[0] != group["topic"]:
                continue
            never, undone = [], []
            for offset in range(partition.end):
                if (name, place, offset) in self._dead:
                    continue
                deliveries = by_message.get((name, place, offset))
                if deliveries is None:
                    never.append(offset)
                elif not (
                    any(d.is_done for d in deliveries) if self.faults else deliveries[-1].is_done
                ):
                    undone.append(offset)
            where = f"{place[0]}/{place[1]} offsets"
            if never:
                self._wrong("skipped", f"{name} never got {where} {ranges(never)}")
            if undone:
                self._wrong(
                    "skipped",
                    f"{name} did not finish {where} {ranges(undone)}, nor get them again",
                )

    def _check_turns(self, name: str, group: Event) -> None:
        """One key, one message at a time, in order."""
        offsets: dict[str, list[int]] = defaultdict(list)
        # A broker that is killed may give a message up whose last delivery nobody has seen.
        given_up = self._given_up_unseen(name, group)
        for place, partition in self._partitions.items():
            if place[0] == group["topic"]:
                for offset, value in partition.known.items():
                    if (key := key_of(value)) is not None and (place, offset) not in given_up:
                        offsets[key].append(offset)
        for them in offsets.values():
            them.sort()
        steps: list[tuple[int, bool, _Delivery]] = []
        for delivery in self._deliveries.values():
            if delivery.group == name and delivery.key is not None:
                steps.append((delivery.at, False, delivery))
                if delivery.acked is not None:
                    steps.append((delivery.acked, True, delivery))
        steps.sort(key=lambda step: step[0])
        settled: dict[str, set[int]] = defaultdict(set)
        low: Counter[str] = Counter()
        busy: dict[tuple[int, str], int] = {}
        since: dict[tuple[int, str], int] = {}
        for _, is_ack, delivery in steps:
            key, offset = delivery.key, delivery.offset
            assert key is not None
            if is_ack:
                settled[key].add(offset)
                if busy.get((delivery.life, key)) == offset:
                    del busy[(delivery.life, key)]
                continue
            of_key = offsets[key]
            while low[key] < len(of_key) and of_key[low[key]] in settled[key]:
                low[key] += 1
            first = of_key[low[key]] if low[key] < len(of_key) else offset
            under_way = busy.get((delivery.life, key), offset)
            if under_way != offset and self.faults.touch(since[delivery.life, key], delivery.at):
                under_way = offset  # another node goes on from what is stored
            if first < offset or under_way != offset:
                other = first if first < offset else under_way
                self._wrong(
                    "out of turn", f"{name} got {offset} of {key} while {other} was not done"
                )
            if group["max_deliveries"] and delivery.attempt >= group["max_deliveries"]:
                settled[key].add(offset)  # whatever becomes of it, it is the last time
                busy.pop((delivery.life, key), None)
            else:
                busy[(delivery.life, key)] = offset
                since[(delivery.life, key)] = delivery.at

    def _given_up_unseen(self, name: str, group: Event) -> set[tuple[Place, int]]:
        dead = {(place, offset) for owner, place, offset in self._dead if owner == name}
        return dead - {
            (delivery.place, delivery.offset)
            for delivery in self._deliveries.values()
            if delivery.group == name and delivery.attempt >= group["max_deliveries"]
        }

    def _check_dead(self) -> None:
        for (group, place, offset), stored_ms in self._dead.items():
            stored_ms.sort()
            for first, second in pairwise(stored_ms):
                if not any(begin <= second and end >= first for begin, end in self._crashes_ms):
                    self._wrong(
                        "unexplained",
                        f"{group} has two dead letters of {place[0]}/{place[1]} offset {offset} "
                        "and no restart between them",
                    )
                self.counts["dead letters doubled"] += 1

    def _check_limit(self, by_message: dict[tuple[str, Place, int], list[_Delivery]]) -> None:
        """A delivery counts unless its member, or the broker, ended in good order while it was out, or the
        journal had no room for it before a kill."""
        for (name, place, offset), deliveries in by_message.items():
            limit = self._groups[name]["max_deliveries"]
            moved = self.faults.touch(deliveries[0].at, deliveries[-1].at)
            counted = [
                d
                for d in deliveries
                if d.life not in self._uncounted_lives
                if d.acked is not None
                or d.nacked is not None
                or d.at + d.timeout_ns < self._left.get((d.member, d.life), d.at)
                or ((d.member, d.life) not in self._left and d.life not in self._closed_lives)
            ]
            if limit and (
                (len(counted) > limit and not moved) or any(d.attempt > limit for d in deliveries)
            ):
                attempts = [d.attempt for d in deliveries]
                self._wrong(
                    "too often",
                    f"{name} got {place[0]}/{place[1]} offset {offset} {len(counted)} times, "
                    f"max_deliveries is {limit}; attempts {attempts}",
                )
