"""How long publishes had to wait, from the history: failover after a kill, and the pause of a drain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from tests.crash.history import Event


class Pauses:
    """By partition: when the calls of its probe began and were answered."""

    def __init__(self, events: Iterable[Event]):
        self.answers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Probe -> (began, answered), in order."""
        self.faults: list[Event] = []
        began: dict[str, int] = {}
        for event in events:
            if event["event"] == "fault":
                self.faults.append(event)
            elif not event.get("op", "").startswith("p"):
                continue
            elif event["event"] == "invoke":
                began[event["op"]] = event["at"]
            elif event["event"] == "ok":
                probe = event["op"].partition("-")[0]
                self.answers[probe].append((began[event["op"]], event["at"]))

    def failover(self, at: int) -> float | None:
        """Seconds until every partition had answered a call that began after this moment."""
        found = []
        for answers in self.answers.values():
            later = [answered for began, answered in answers if began >= at]
            if not later:
                return None
            found.append(min(later) - at)
        return max(found) / 1e9 if found else None

    def longest(self, begin: int, end: int) -> float:
        """The longest time between two answers of a partition, in seconds; those count that begin in this time."""
        found = 0
        for answers in self.answers.values():
            times = [answered for _, answered in answers]
            for earlier, later in pairwise(times):
                if later > begin and earlier < end:
                    found = max(found, later - max(earlier, begin))
        return found / 1e9

    def _alone(self, what: str) -> list[Event]:
        """Faults of a kind with no other one at the same time, or just before."""
        return [
            one
            for one in self.faults
            if one["what"] == what
            and not any(
                other is not one
                and other["at"] < one["until"]
                and other["until"] + 3_000_000_000 > one["at"]
                for other in self.faults
            )
        ]

    def failovers(self) -> list[float]:
        found = [self.failover(fault["at"]) for fault in self._alone("node killed")]
        return [each for each in found if each is not None]

    def drains(self) -> list[float]:
        return [
            self.longest(fault["at"], fault["drained"])
            for fault in self._alone("node drained")
            if "drained" in fault
        ]
