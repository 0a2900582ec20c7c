"""A topic that the broker writes by itself: events, the audit, reports of pipelines.

The first record creates the topic. If a write is refused, that is logged once, not each time; it never
stops the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine


@dataclass(slots=True, eq=False)
class OwnTopic:
    _engine: Engine
    _name: str
    _settings: TopicSettings
    _records: str
    """What they are, for the line in the log: "<records> not stored"."""
    _logger: logging.Logger
    _level: int = logging.WARNING
    _refused: bool = False
    """The last records could not be stored, and that was logged."""

    def append(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Store records, each a key and a value."""
        keys: list[bytes | None] = []
        values: list[bytes] = []
        for key, value in records:
            keys.append(key.encode())
            values.append(value)
        try:
            topic = self._engine.topics.get(self._name)
            if topic is None:
                topic = self._engine.create_topic(self._name, self._settings, internal=True)
        except (HeadraceError, OSError) as error:
            self._stored(error)
            return
        stored = Append(Columns(values, keys), None, lambda entry: self._stored(entry.error))
        self._engine.append(topic, 0, stored)

    def _stored(self, error: Exception | None) -> None:
        if error is not None and not self._refused:
            self._logger.log(self._level, "%s not stored: %s", self._records, error)
        self._refused = error is not None
