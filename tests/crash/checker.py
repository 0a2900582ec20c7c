"""Says what is wrong with a history (``history.py``). Pure: events in, anomalies out.

================  ==================================================================================
``lost``          acknowledged, or once seen, and not there; a topic or subscription that is gone
``invented``      seen, but never sent; or its send definitely failed, or it was cancelled
``unstable``      one offset, two values; or an answer that changed when it was asked for again
``gap``           offsets are not exactly start..end-1
``duplicate``     one value at two offsets
``reordered``     A was acknowledged before B was sent, and A stands behind B
``torn``          part of a batch of an idempotent producer is there
``early``         a delayed message was there before its time
``moved key``     one key in two partitions
``skipped``       a group missed one: never delivered, or never done and still not delivered again
``unexplained``   a group got one again with no nack, deadline, leaving or restart in between; or
                  after an ack that was durable; or a dead letter stands twice with no restart
``too often``     a group got one more often than ``max_deliveries`` says, restarts or not
``out of turn``   an ordered group got a message while an earlier one of its key was not done
``stuck``         not delivered within the recovery window; or, after the drain, still in flight, an
                  open file, or a segment that retention should have deleted
``problem``       the broker, or the test, did what it should never do
================  ==================================================================================

What can be seen at once is reported at once, so that a run can stop at the first anomaly; the rest
waits for :meth:`Checker.finish`. Everything is linear in the history but for two sorts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.crash.history import Event, key_of, op_of, value_of

Place = tuple[str, int]
"""Topic and partition."""

SLACK_NS = 10_000_000
"""The broker's loop reads its clock once a turn, in milliseconds."""
RACE_NS = 300_000_000
"""An ack so close before its deadline may come too late, on a busy machine."""
REFUSALS = {
    "broker_failed",
    "closed",
    "not_scheduled",
    "overloaded",
    "producer_fenced",
    "storage_failed",
    "storage_full",
}
"""What a call may be refused with. ``sequence_gap``, say, would be a producer forgotten."""


@dataclass(frozen=True)
class Anomaly:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class _Op:
    """A call that was made once, or more often with the same meaning."""

    what: str
    topic: str
    count: int
    invoked: int
    atomic: bool
    due: int
    calls: int = 1
    failed: int = 0
    acked: int | None = None
    receipts: list[list[int]] = field(default_factory=list)

    @property
    def is_failed(self) -> bool:
        """Every call of it failed for certain."""
        return self.failed == self.calls


@dataclass(slots=True)
class _Partition:
    known: dict[int, str] = field(default_factory=dict)
    """Offset -> value, as acknowledged, delivered or read."""
    acked_end: int = 0
    start: int = 0
    end: int = 0


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
    durable: bool = False

    @property
    def is_done(self) -> bool:
        return self.acked is not None and not self.stale

    @property
    def timeout_ns(self) -> int:
        return self.deadline - self.at

    def stored(self, at: int) -> None:
        """Everything that the broker had got is stored. If the deadline has passed by then, nobody knows
        whether the ack came in time: it was called, but a broker that gets no time may have seen it late."""
        self.durable = at < self.deadline

    @property
    def in_time(self) -> bool:
        return self.is_done and self.acked is not None and self.acked < self.deadline - RACE_NS


def _ranges(offsets: Iterable[int]) -> str:
    """``3, 7 to 12``: for people, and not too long."""
    runs: list[list[int]] = []
    for offset in sorted(offsets):
        if runs and runs[-1][1] == offset - 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:5]]
    return ", ".join(texts) + (" …" if len(runs) > 5 else "")


class Checker:
    def __init__(self) -> None:
        self.anomalies: list[Anomaly] = []
        self.counts: Counter[str] = Counter()
        self._topics: dict[str, Event] = {}
        self._groups: dict[str, Event] = {}
        self._ops: dict[str, _Op] = {}
        self._partitions: dict[Place, _Partition] = defaultdict(_Partition)
        self._places: dict[str, tuple[Place, int]] = {}
        self._final: dict[Place, dict[int, str]] | None = None
        self._names: dict[str, bool] = {}
        """Topic or subscription -> whether it must be there (True) or must not (False)."""
        self._cancelled: dict[str, str] = {}
        self._deliveries: dict[str, _Delivery] = {}
        self._acked: dict[tuple[str, int], list[_Delivery]] = defaultdict(list)
        self._left: dict[tuple[str, int], int] = {}
        self._dead: dict[tuple[str, Place, int], list[int]] = defaultdict(list)
        self._kills_ms: list[int] = []
        self._closed_lives: set[int] = set()
        self._uncounted_lives: set[int] = set()

    def add(self, event: Event) -> None:
        getattr(self, "_on_" + event["event"])(event)

    def _wrong(self, kind: str, text: str) -> None:
        self.counts["anomalies"] += 1
        if len(self.anomalies) < 1000:
            self.anomalies.append(Anomaly(kind, text))

    # --- the stage --------------------------------------------------------------------------
    def _on_topic(self, event: Event) -> None:
        self._topics[event["name"]] = event

    def _on_group(self, event: Event) -> None:
        self._groups[event["name"]] = event

    def _on_start(self, event: Event) -> None:
        self.counts["starts"] += 1

    def _on_opened(self, event: Event) -> None:
        self.counts["opened"] += 1

    def _on_killed(self, event: Event) -> None:
        self.counts["kills"] += 1
        self._kills_ms.append(event["at_ms"])
        if event.get("uncounted"):
            self._uncounted_lives.add(event["life"])

    def _on_closed(self, event: Event) -> None:
        """In good order: every ack of this life is stored."""
        self.counts["closed in good order"] += 1
        self._closed_lives.add(event["life"])
        if event.get("files_open", 0) > 0:
            self._wrong("stuck", f"life {event['life']} left {event['files_open']} files open")
        for (_, life), deliveries in self._acked.items():
            if life == event["life"]:
                for delivery in deliveries:
                    delivery.stored(event["at"])
                deliveries.clear()

    def _on_rest(self, event: Event) -> None:
        """After the drain nothing may be left over."""
        for name, count in event["left"].items():
            if count:
                self._wrong("stuck", f"after the drain: {name} {count}")

    def _on_final(self, event: Event) -> None:
        self._final = defaultdict(dict)

    def _on_stuck(self, event: Event) -> None:
        self._wrong("stuck", event["what"])

    def _on_problem(self, event: Event) -> None:
        self._wrong("problem", event["what"])

    # --- calls ------------------------------------------------------------------------------
    def _on_invoke(self, event: Event) -> None:
        name = event["op"]
        known = self._ops.get(name)
        if known is not None:
            known.calls += 1
            self.counts["calls repeated"] += 1
            return
        op = self._ops[name] = _Op(
            event["what"],
            event["topic"],
            event.get("count", 0),
            event["at"],
            event.get("atomic", False),
            event.get("due", 0),
        )
        self.counts[f"{op.what} called"] += 1
        if op.what == "cancel":
            self._cancelled[event["of"]] = name
        elif op.what in ("define", "drop"):
            self._names.pop(op.topic, None)  # under way: it may be there or not

    def _on_ok(self, event: Event) -> None:
        name = event["op"]
        op = self._ops[name]
        receipts = sorted(event.get("receipts", ()))
        if op.acked is not None:
            if receipts != op.receipts:
                self._wrong("unstable", f"{name} was answered {op.receipts}, then {receipts}")
            return
        op.acked = event["at"]
        op.receipts = receipts
        self.counts[f"{op.what} ok"] += 1
        if op.what == "define":
            self._names[op.topic] = True
        elif op.what == "drop":
            self._names[op.topic] = False
        elif op.what == "publish":
            self._acknowledged(name, op)

    def _acknowledged(self, name: str, op: _Op) -> None:
        self.counts["messages acknowledged"] += op.count
        stored = sum(count for _, _, count in op.receipts)
        if stored != op.count:
            self._wrong("lost", f"{name}: {op.count} messages sent, receipts for {stored}")
            return
        for partition, offset, count in op.receipts:
            place = (op.topic, partition)
            known = self._partitions[place]
            known.acked_end = max(known.acked_end, offset + count)
            if len(op.receipts) == 1:
                for index in range(count):
                    self._see(place, offset + index, value_of(name, index))

    def _on_fail(self, event: Event) -> None:
        self._ops[event["op"]].failed += 1
        self.counts[f"refused: {event['code']}"] += 1
        if event["code"] not in REFUSALS:
            self._wrong("problem", f"{event['op']} was refused with {event['code']}")

    def _on_unknown(self, event: Event) -> None:
        self.counts[f"unknown: {event['code']}"] += 1

    # --- what is there ------------------------------------------------------------------------
    def _see(self, place: Place, offset: int, value: str) -> None:
        """The value stands, or is said to stand, at the offset."""
        known = self._partitions[place].known
        before = known.get(offset)
        if before == value:
            return
        where = f"{place[0]}/{place[1]} offset {offset}"
        if before is not None:
            self._wrong("unstable", f"{where} was {before} and is {value}")
            return
        known[offset] = value
        op_name, index = op_of(value)
        op = self._ops.get(op_name)
        if op is None or not 0 <= index < op.count or op.topic != place[0]:
            self._wrong("invented", f"{where} holds {value}, which nobody sent there")
            return
        other = self._places.setdefault(value, (place, offset))
        if other != (place, offset):
            self._wrong(
                "duplicate",
                f"{value} at {other[0][0]}/{other[0][1]} offset {other[1]} and at {where}",
            )

    def _on_bounds(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        partition = self._partitions[place]
        start, end = event["start"], event["end"]
        if start and not self._topics[place[0]]["retention"]:
            self._wrong(
                "gap", f"{place[0]}/{place[1]} begins at {start} and nothing was to be dropped"
            )
        highest = max(partition.acked_end, partition.end)
        if end < highest:
            self._wrong("lost", f"{place[0]}/{place[1]} ends at {end} and had reached {highest}")
        partition.start, partition.end = start, max(end, partition.end)

    def _on_read(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        partition = self._partitions[place]
        first = event["offset"]
        partition.end = max(partition.end, first + len(event["values"]))
        for offset, value in enumerate(event["values"], first):
            self._see(place, offset, value)
            op = self._ops.get(op_of(value)[0])
            if op is not None and op.what == "delay" and event["at"] < op.due - SLACK_NS:
                self._wrong("early", f"{value} {(op.due - event['at']) // 1_000_000} ms too early")
            if self._final is not None:
                self._final[place][offset] = value

    def _on_defined(self, event: Event) -> None:
        names = set(event["names"])
        for name, expected in self._names.items():
            if expected != (name in names):
                kind = "lost" if expected else "invented"
                self._wrong(
                    kind, f"{name} was {'made' if expected else 'deleted'}, and that is undone"
                )

    # --- groups -----------------------------------------------------------------------------
    def _on_deliver(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        self.counts["deliveries"] += 1
        partition = self._partitions[place]
        partition.end = max(partition.end, event["offset"] + 1)
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

    def _on_left(self, event: Event) -> None:
        self._left[(event["member"], event["life"])] = event["at"]

    def _on_dead(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        self._see(place, event["offset"], event["value"])
        self._dead[(event["group"], place, event["offset"])].append(event["stored_ms"])
        self.counts["dead letters"] += 1

    # --- the end ----------------------------------------------------------------------------
    def finish(self) -> list[Anomaly]:
        """All anomalies of a history that ended with a drain and a final reading."""
        if self._final is None:
            self._wrong("problem", "the history has no final reading")
            return self.anomalies
        self._check_final(self._final)
        for name, op in self._ops.items():
            if op.what in ("publish", "delay"):
                self._check_op(name, op)
        self._check_order()
        self._check_keys()
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
        self.counts["messages"] = len(self._places)
        return self.anomalies

    def _check_limit(self, by_message: dict[tuple[str, Place, int], list[_Delivery]]) -> None:
        """A delivery counts unless its member, or the broker, ended in good order while it was out, or the
        journal had no room for it before a kill."""
        for (name, place, offset), deliveries in by_message.items():
            limit = self._groups[name]["max_deliveries"]
            counted = [
                d
                for d in deliveries
                if d.life not in self._uncounted_lives
                if d.acked is not None
                or d.nacked is not None
                or d.at + d.timeout_ns < self._left.get((d.member, d.life), d.at)
                or ((d.member, d.life) not in self._left and d.life not in self._closed_lives)
            ]
            if limit and (len(counted) > limit or any(d.attempt > limit for d in deliveries)):
                attempts = [d.attempt for d in deliveries]
                self._wrong(
                    "too often",
                    f"{name} got {place[0]}/{place[1]} offset {offset} {len(counted)} times, "
                    f"max_deliveries is {limit}; attempts {attempts}",
                )

    def _check_final(self, final: dict[Place, dict[int, str]]) -> None:
        for place, partition in self._partitions.items():
            there = final.get(place, {})
            where = f"{place[0]}/{place[1]}"
            missing = [
                offset for offset in range(partition.start, partition.end) if offset not in there
            ]
            known = [offset for offset in missing if offset in partition.known]
            if known:
                self._wrong("lost", f"{where} offsets {_ranges(known)} were there and are not")
            if len(known) < len(missing):
                nothing = set(missing) - set(known)
                self._wrong(
                    "gap",
                    f"{where} has nothing at {_ranges(nothing)}, before its end {partition.end}",
                )
            for offset in there.keys() - range(partition.start, partition.end):
                self._wrong("gap", f"{where} has offset {offset}, outside of its bounds")

    def _check_op(self, name: str, op: _Op) -> None:
        found = [self._places.get(value_of(name, index)) for index in range(op.count)]
        there = sum(1 for place in found if place is not None)
        if op.is_failed:
            if there:
                self._wrong(
                    "invented", f"{name} was refused for certain, and {there} of it are there"
                )
            return
        if op.what == "delay":
            self._check_delay(name, op, there)
            return
        if op.acked is None:
            self.counts["messages unknown"] += op.count
            self.counts["messages unknown, and there"] += there
            if op.atomic and 0 < there < op.count:
                self._wrong("torn", f"{name}: {there} of {op.count} are there")
            return
        if len(op.receipts) > 1:
            self._check_receipts(name, op)

    def _check_delay(self, name: str, op: _Op, there: int) -> None:
        cancel = self._ops.get(self._cancelled.get(name, ""))
        if cancel is not None and cancel.acked is not None:
            if there:
                self._wrong("invented", f"{name} was cancelled, and is there")
        elif not there and op.acked is not None and (cancel is None or cancel.is_failed):
            self._wrong("lost", f"{name} was to come later and never came")

    def _check_receipts(self, name: str, op: _Op) -> None:
        """Each part holds its messages in their order; all parts together hold every one once."""
        indexes: list[int] = []
        for partition, offset, count in op.receipts:
            known = self._partitions[(op.topic, partition)]
            part = []
            for at in range(offset, offset + count):
                value = known.known.get(at)
                if value is None:
                    if at < known.start:
                        return  # retention took it before anybody had read it
                    continue
                other, index = op_of(value)
                if other == name:
                    part.append(index)
            if part != sorted(part):
                self._wrong(
                    "reordered", f"{name} in {op.topic}/{partition} stands in another order"
                )
            indexes += part
        if sorted(indexes) != list(range(op.count)):
            lost = set(range(op.count)) - set(indexes)
            self._wrong(
                "lost", f"{name} has receipts {op.receipts}, where {_ranges(lost)} of it are not"
            )

    def _parts(self) -> Iterator[tuple[Place, int, int, int, int | None, str]]:
        """(place, invoked, first offset, last offset, acked, name) of all that was published."""
        for name, op in self._ops.items():
            if op.what != "publish":
                continue
            if op.acked is not None:
                for partition, offset, count in op.receipts:
                    yield (
                        (op.topic, partition),
                        op.invoked,
                        offset,
                        offset + count - 1,
                        op.acked,
                        name,
                    )
                continue
            offsets: dict[Place, list[int]] = defaultdict(list)
            for index in range(op.count):
                if (found := self._places.get(value_of(name, index))) is not None:
                    offsets[found[0]].append(found[1])
            for place, them in offsets.items():
                yield place, op.invoked, min(them), max(them), None, name

    def _check_order(self) -> None:
        by_place: dict[Place, list[tuple[int, int, int, int | None, str]]] = defaultdict(list)
        for place, *part in self._parts():
            by_place[place].append(tuple(part))  # type: ignore[arg-type]
        for place, parts in by_place.items():
            acked = sorted((part[3], part[2], part[4]) for part in parts if part[3] is not None)
            highest, by, at = -1, "", 0
            for invoked, first, _, _, name in sorted(parts, key=lambda part: part[0]):
                while at < len(acked) and acked[at][0] < invoked:
                    if acked[at][1] > highest:
                        _, highest, by = acked[at]
                    at += 1
                if highest > first:
                    self._wrong(
                        "reordered",
                        f"{place[0]}/{place[1]}: {by} was acknowledged before {name} was sent, "
                        f"and stands at {highest}, behind {first}",
                    )

    def _check_keys(self) -> None:
        homes: dict[tuple[str, str], int] = {}
        for value, ((topic, partition), offset) in self._places.items():
            key = key_of(value)
            if key is not None and homes.setdefault((topic, key), partition) != partition:
                self._wrong(
                    "moved key",
                    f"{key} of {topic} is in partition {homes[(topic, key)]}, and at {offset} in {partition}",
                )

    # --- the end, for groups ------------------------------------------------------------------
    def _check_redeliveries(
        self, by_message: dict[tuple[str, Place, int], list[_Delivery]]
    ) -> None:
        for (group, place, offset), deliveries in by_message.items():
            where = f"{group} got {place[0]}/{place[1]} offset {offset} again"
            for number, (earlier, later) in enumerate(pairwise(deliveries)):
                if any(d.durable and d.in_time for d in deliveries[: number + 1]):
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

    def _explanation(self, earlier: _Delivery, later: _Delivery) -> str | None:
        if later.life != earlier.life:
            return "restart"
        if earlier.in_time:
            return None
        if earlier.nacked is not None and not earlier.stale:
            return "nack"
        if later.at >= earlier.deadline - SLACK_NS:
            return "deadline"
        left = self._left.get((earlier.member, earlier.life))
        if left is not None and left < later.at and not earlier.is_done:
            return "left"
        return None

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
                elif not deliveries[-1].is_done:
                    undone.append(offset)
            where = f"{place[0]}/{place[1]} offsets"
            if never:
                self._wrong("skipped", f"{name} never got {where} {_ranges(never)}")
            if undone:
                self._wrong(
                    "skipped",
                    f"{name} did not finish {where} {_ranges(undone)}, nor get them again",
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
                if not any(first <= kill <= second for kill in self._kills_ms):
                    self._wrong(
                        "unexplained",
                        f"{group} has two dead letters of {place[0]}/{place[1]} offset {offset} "
                        "and no restart between them",
                    )
                self.counts["dead letters doubled"] += 1
