"""What is broken, when and for how long: everything follows from the seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

NODES = KAFKAS = 3
SESSION_S = 6.0
"""Of the nodes' group. A node that sleeps for longer wakes up as a zombie."""


@dataclass(frozen=True)
class Fault:
    what: str
    who: tuple[int, ...]
    """Numbers of nodes, or of Kafka nodes."""
    seconds: float
    after: float = 0.0
    """How long after the step has begun."""
    how: str = ""
    """Of a link: cut, silent or slow. Of Kafka: SIGKILL or SIGSTOP."""

    @property
    def holds(self) -> bool:
        """Whether it keeps messages back (see ``tests/crash/deliveries.py``)."""
        return self.what not in ("node killed", "node restarted", "node drained")

    def __str__(self) -> str:
        who = ",".join(map(str, self.who))
        return f"{self.what} {who} {self.how} {self.seconds:g} s".replace("  ", " ")


@dataclass
class Step:
    """Faults that are there together. ``rests``: after them, everything has to work again before the next step."""

    faults: list[Fault] = field(default_factory=list)
    pause: float = 0.0
    rests: bool = False


KINDS = {
    "node killed": 5,
    "node frozen": 5,
    "node restarted": 2,
    "node drained": 3,
    "kafka node killed": 1,
    "kafka node frozen": 3,
    "two kafka nodes": 1,
    "node and kafka": 3,
    "node and one kafka node": 2,
    "nodes": 3,
    "clients": 2,
}
"""What can be broken, and how often that is chosen. The last four are links."""
SECONDS = (0.5, 1.0, 3.0, 6.0, SESSION_S + 4.0)


def _fault(random: Random) -> Fault:
    what = random.choices(list(KINDS), list(KINDS.values()))[0]
    seconds, how = random.choice(SECONDS), ""
    who: tuple[int, ...] = (random.randrange(NODES),)
    if what == "node frozen":
        seconds = random.choice((1.0, 3.0, SESSION_S + 2.0, SESSION_S + 6.0))
    elif what == "two kafka nodes":
        how = random.choice(("SIGKILL", "SIGSTOP", "SIGSTOP"))
        who = tuple(sorted(random.sample(range(KAFKAS), 2)))
    elif what == "node and one kafka node":
        who = (*who, random.randrange(KAFKAS))
    if what in ("node and kafka", "node and one kafka node", "nodes", "clients"):
        how = random.choice(("cut", "silent", "slow"))
    return Fault(what, who, seconds, round(random.random(), 3), how)


def _uses(fault: Fault) -> set[str]:
    """What cannot be broken twice at the same time. Links are apart from what they link."""
    if fault.what.startswith(("node killed", "node frozen", "node restarted", "node drained")):
        return {f"node {number}" for number in fault.who}
    if "kafka node" in fault.what and "and" not in fault.what:
        return {"kafka"}
    return {f"link {fault.what[:8]} {fault.who[0]}"}


def plan(seed: int, amount: int) -> list[Step]:
    random = Random(f"{seed}/plan")
    steps: list[Step] = []
    left = amount
    while left > 0:
        step = Step(pause=round(random.random() * 2, 3), rests=random.random() < 0.4)
        used: set[str] = set()
        for _ in range(min(left, random.choices((1, 2, 3), (4, 3, 3))[0])):
            fault = _fault(random)
            while _uses(fault) & used:
                fault = _fault(random)
            used |= _uses(fault)
            step.faults.append(fault)
        left -= len(step.faults)
        steps.append(step)
    steps[-1].rests = True
    return steps
