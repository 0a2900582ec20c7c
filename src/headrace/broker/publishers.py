"""Who has published lately: to a topic, and this very message. For eyes only, and only in memory.

::

    Connection.publish ──▶ Publish.by ──▶ Publishing._stored ──▶ note(), once for each entry of a log

    runs       orders/0  0 … 4999    shop            the last RUNS_MAX stretches of offsets, of all partitions
               orders/0  5000        checkout
    gathered   orders/0  5001 … 5080 [web-1, …]      entries of single messages of many clients
    lately     (orders, shop) ──▶ when               the last LATELY_MAX pairs

Rules:
- A client that goes on publishing to a partition makes its run longer: one comparison for each entry, which may
  hold thousands of messages. Single messages that were gathered into one entry are one list.
- All are bounded for the whole broker, whatever is published by whomever. The oldest make room.
- A topic is known by its name and its incarnation: one that is deleted and created again is another.
- The broker's own records (delayed messages that are due, redriven dead letters) are nobody's.

Rejected: a header in each message (bytes that stay on disk, and that every consumer reads); a counter for each
client and topic (it costs for each entry, and the rates of a topic are known).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.broker.publishing import Publish
    from headrace.broker.topic import Topic
    from headrace.log.interface import Append

RUNS_MAX = 20_000
NAMED_MAX = 200_000
"""Messages of gathered entries whose publishers are remembered one by one."""
LATELY_MAX = 20_000
AGAIN_MS = 1_000
"""How exactly it is known when a client published last."""
TopicIdentity = tuple[str, int]


class Publisher:
    """A client on a connection, as it named itself, and where it came from."""

    __slots__ = ("address", "client_id", "login", "noted_in", "noted_ms", "protocol")

    def __init__(self, client_id: str | None, login: str, address: str, protocol: str):
        self.client_id, self.login = client_id, login
        self.address, self.protocol = address, protocol
        self.noted_in: TopicIdentity | None = None
        self.noted_ms = 0

    @property
    def about(self) -> tuple[str | None, str, str, str]:
        """A client that connects again is the same for people."""
        return self.client_id, self.login, self.address, self.protocol


class RecentPublishers:
    def __init__(self, runs_max: int = RUNS_MAX) -> None:
        # A ring of runs, in columns: a new run writes to its place, and nothing is allocated.
        self._at = -1
        """The place of the last run."""
        self._topics: list[TopicIdentity | None] = [None] * runs_max
        self._numbers = [0] * runs_max
        self._firsts = [0] * runs_max
        self._ends = [0] * runs_max
        self._times = [0] * runs_max
        self._by: list[Publisher | None] = [None] * runs_max
        self._gathered: deque[tuple[TopicIdentity, int, int, int, list[Publisher | None]]] = deque()
        """Topic, partition, first offset, time."""
        self._named = 0
        self._lately: OrderedDict[tuple[TopicIdentity, Publisher], int] = OrderedDict()

    # --- noting -----------------------------------------------------------------------------------
    def note(self, topic: Topic, number: int, entry: Append, by: Publisher) -> None:
        """The entry of one publish is stored."""
        first, time_ms, partition = entry.first_offset, entry.timestamp, topic.partitions[number]
        at = partition.run
        if (
            self._by[at] is by
            and self._ends[at] == first
            and self._topics[at] is topic.identity
            and self._numbers[at] == number
        ):
            self._ends[at], self._times[at] = first + entry.count, time_ms
            return
        at = self._at + 1
        if at == len(self._by):
            at = 0
        self._at = partition.run = at
        self._by[at], self._topics[at], self._numbers[at] = by, topic.identity, number
        self._firsts[at], self._ends[at], self._times[at] = first, first + entry.count, time_ms
        if time_ms - by.noted_ms >= AGAIN_MS or by.noted_in is not topic.identity:
            by.noted_ms, by.noted_in = time_ms, topic.identity
            lately, key = self._lately, (topic.identity, by)
            lately[key] = time_ms
            lately.move_to_end(key)
            if len(lately) > LATELY_MAX:
                lately.popitem(last=False)

    def note_gathered(
        self, topic: Topic, number: int, entry: Append, publishes: list[Publish]
    ) -> None:
        """The entry of several publishes, one message each, is stored."""
        by = publishes[0].by
        several = [publish.by for publish in publishes]
        if several.count(by) == len(several):
            if by is not None:
                self.note(topic, number, entry, by)
            return
        self._gathered.append(
            (topic.identity, number, entry.first_offset, entry.timestamp, several)
        )
        self._named += len(several)
        while self._named > NAMED_MAX:
            self._named -= len(self._gathered.popleft()[-1])

    # --- asking -----------------------------------------------------------------------------------
    def of_topic(self, topic: Topic) -> list[tuple[Publisher, int]]:
        """The clients that published to it lately, and when they last did; the last one first."""
        found: dict[tuple[str | None, str, str, str], tuple[Publisher, int]] = {}

        def add(by: Publisher, time_ms: int) -> None:
            known = found.get(by.about)
            if known is None or known[1] < time_ms:
                found[by.about] = by, time_ms

        identity = topic.identity
        for (each, by), time_ms in self._lately.items():
            if each == identity:
                add(by, time_ms)
        for each, _, _, time_ms, several in self._gathered:
            if each == identity:
                for one in set(several):
                    if one is not None:
                        add(one, time_ms)
        for one, known, time_ms in zip(self._by, self._topics, self._times, strict=True):
            if known == identity and one is not None:
                add(one, time_ms)
        return sorted(found.values(), key=lambda pair: -pair[1])

    def of_message(self, topic: Topic, number: int, offset: int) -> Publisher | None:
        """Who published a message, if that is still known."""
        identity = topic.identity
        for at, (first, end) in enumerate(zip(self._firsts, self._ends, strict=True)):
            if (
                first <= offset < end
                and self._numbers[at] == number
                and self._topics[at] == identity
            ):
                return self._by[at]
        for each, partition, first, _, several in self._gathered:
            if first <= offset < first + len(several) and partition == number and each == identity:
                return several[offset - first]
        return None
