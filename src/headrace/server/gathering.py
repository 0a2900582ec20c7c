"""Single messages that arrive in the same turn of the loop become one entry in the log.

HTTP and WebSocket bring messages one at a time, each from a client of its own that waits for its answer.
Under load a turn of the loop reads from many of them; what they publish to the same topic, when it is a
value and nothing else, is checked, counted and appended once for all.

Rules: a topic with a queue limit is not gathered for, because there each message is accepted or refused
by itself. Whatever else a connection publishes goes behind what was gathered: :meth:`Gathering.flush` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from headrace.broker.engine import Engine
from headrace.broker.topic import Topic
from headrace.errors import HeadraceError, StorageFull
from headrace.log.columns import Columns
from headrace.log.interface import Append

Stored = Callable[[Topic, int, int, int, HeadraceError | None], None]
"""Called with (topic, partition, offset, timestamp, error)."""


class Gathering:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._waiting: dict[Topic, tuple[list[bytes], list[Stored]]] = {}

    def add(self, topic: Topic, value: bytes, done: Stored) -> None:
        """Publish a checked value; ``done`` hears of it."""
        waiting = self._waiting.get(topic)
        if waiting is not None:
            waiting[0].append(value)
            waiting[1].append(done)
        elif self._engine.publishing.queue_limit(topic) is not None:
            self._append(topic, [value], [done])
        else:
            if not self._waiting:
                self._engine.call_soon(self.flush)
            self._waiting[topic] = ([value], [done])

    def flush(self) -> None:
        """Into the log with what has been gathered."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for topic, (values, dones) in waiting.items():
                self._append(topic, values, dones)

    def _append(self, topic: Topic, values: list[bytes], dones: list[Stored]) -> None:
        number = topic.next_partition() if len(topic.partitions) > 1 else 0
        entry = Append(Columns(values), None, self._stored, context=(topic, number, dones))
        self._engine.append(topic, number, entry)

    def _stored(self, entry: Append) -> None:
        topic, number, dones = cast(tuple[Topic, int, list[Stored]], entry.context)
        offset, timestamp, error = entry.first_offset, entry.timestamp, entry.error
        if isinstance(error, StorageFull):
            self._engine.guard.hit_the_wall()
        for done in dones:
            done(topic, number, offset, timestamp, error)
            offset += 1
