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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.crash.deliveries import SLACK_NS, DeliveryChecks, Place, ranges
from tests.crash.history import Event, key_of, op_of, value_of

REFUSALS = {
    "broker_failed",
    "closed",
    "kafka_unavailable",
    "no_owner",
    "not_scheduled",
    "overloaded",
    "partition_moved",
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
    start: int = 0
    end: int = 0
    """The highest that was acknowledged, delivered or read."""
    reached: list[tuple[int, int]] = field(default_factory=list)
    """(when, end), each time that it grew."""

    def reach(self, at: int, end: int) -> None:
        if end > self.end:
            self.end = end
            self.reached.append((max(at, self.reached[-1][0]) if self.reached else at, end))

    def end_before(self, at: int) -> int:
        """What a question that is asked then must find."""
        found = bisect_left(self.reached, (at, 0))
        return self.reached[found - 1][1] if found else 0


class Checker(DeliveryChecks):
    def __init__(self) -> None:
        super().__init__()
        self.anomalies: list[Anomaly] = []
        self._topics: dict[str, Event] = {}
        self._ops: dict[str, _Op] = {}
        self._partitions: dict[Place, _Partition] = defaultdict(_Partition)
        self._places: dict[str, tuple[Place, int]] = {}
        self._final: dict[Place, dict[int, str]] | None = None
        self._names: dict[str, tuple[bool, int]] = {}
        """Topic or subscription -> whether it must be there (True) or must not (False), and since when."""
        self._cancelled: dict[str, str] = {}
        self._doubled: list[tuple[_Op, str]] = []
        """Delayed messages that are there twice."""

    def add(self, event: Event) -> None:
        getattr(self, "_on_" + event["event"])(event)

    def _wrong(self, kind: str, text: str) -> None:
        self.counts["anomalies"] += 1
        if len(self.anomalies) < 1000:
            self.anomalies.append(Anomaly(kind, text))

    # --- the stage --------------------------------------------------------------------------
    def _on_topic(self, event: Event) -> None:
        self._topics[event["name"]] = event

    def _on_start(self, event: Event) -> None:
        self.counts["starts"] += 1

    def _on_opened(self, event: Event) -> None:
        self.counts["opened"] += 1

    def _on_killed(self, event: Event) -> None:
        self.counts["kills"] += 1
        self._crashes_ms.append((event["at_ms"], event["at_ms"]))
        if event.get("uncounted"):
            self._uncounted_lives.add(event["life"])

    def _on_failed(self, event: Event) -> None:
        """It stopped itself, which is a crash for everybody else."""
        self._crashes_ms.append((event["at_ms"], event["at_ms"]))

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
            self._names[op.topic] = True, event["at"]
        elif op.what == "drop":
            self._names[op.topic] = False, event["at"]
        elif op.what == "publish":
            self._acknowledged(name, op, event["at"])

    def _acknowledged(self, name: str, op: _Op, at: int) -> None:
        self.counts["messages acknowledged"] += op.count
        stored = sum(count for _, _, count in op.receipts)
        if stored != op.count:
            self._wrong("lost", f"{name}: {op.count} messages sent, receipts for {stored}")
            return
        for partition, offset, count in op.receipts:
            place = (op.topic, partition)
            self._partitions[place].reach(at, offset + count)
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
            text = f"{value} at {other[0][0]}/{other[0][1]} offset {other[1]} and at {where}"
            if op.what == "delay":
                self._doubled.append((op, text))
            else:
                self._wrong("duplicate", text)

    def _on_bounds(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        partition = self._partitions[place]
        start, end = event["start"], event["end"]
        if start and not self._topics[place[0]]["retention"]:
            self._wrong(
                "gap", f"{place[0]}/{place[1]} begins at {start} and nothing was to be dropped"
            )
        highest = partition.end_before(event.get("since", event["at"] + 1))
        if end < highest:
            self._wrong("lost", f"{place[0]}/{place[1]} ends at {end} and had reached {highest}")
        partition.start = start
        partition.reach(event["at"], end)

    def _on_read(self, event: Event) -> None:
        place = (event["topic"], event["partition"])
        partition = self._partitions[place]
        first = event["offset"]
        self.counts["reads"] += 1
        partition.reach(event["at"], first + len(event["values"]))
        for offset, value in enumerate(event["values"], first):
            self._see(place, offset, value)
            op = self._ops.get(op_of(value)[0])
            if op is not None and op.what == "delay" and event["at"] < op.due - SLACK_NS:
                self._wrong("early", f"{value} {(op.due - event['at']) // 1_000_000} ms too early")
            if self._final is not None:
                self._final[place][offset] = value

    def _on_defined(self, event: Event) -> None:
        names = set(event["names"])
        for name, (expected, since) in self._names.items():
            if expected != (name in names) and since < event.get("since", event["at"]):
                kind = "lost" if expected else "invented"
                self._wrong(
                    kind, f"{name} was {'made' if expected else 'deleted'}, and that is undone"
                )

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
        self._check_doubled()
        self.check_deliveries()
        self.counts["messages"] = len(self._places)
        return self.anomalies

    def _check_final(self, final: dict[Place, dict[int, str]]) -> None:
        for place, partition in self._partitions.items():
            there = final.get(place, {})
            where = f"{place[0]}/{place[1]}"
            missing = [
                offset for offset in range(partition.start, partition.end) if offset not in there
            ]
            known = [offset for offset in missing if offset in partition.known]
            if known:
                self._wrong("lost", f"{where} offsets {ranges(known)} were there and are not")
            if len(known) < len(missing):
                nothing = set(missing) - set(known)
                self._wrong(
                    "gap",
                    f"{where} has nothing at {ranges(nothing)}, before its end {partition.end}",
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

    def _check_doubled(self) -> None:
        """A client sends a delayed message again if it had no answer. If its time has come meanwhile, nobody knows
        it any more (docs/guarantees.md): that needs a fault, and an answer that came after its time."""
        for op, text in self._doubled:
            if (op.acked is None or op.acked > op.due) and self.faults.touch(op.invoked, op.due):
                self.counts["delayed messages doubled"] += 1
            else:
                self._wrong("duplicate", text)

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
                "lost", f"{name} has receipts {op.receipts}, where {ranges(lost)} of it are not"
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
