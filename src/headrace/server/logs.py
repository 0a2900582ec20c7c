"""The log of a server: lines of text, or a JSON object on each line (``log_format``).

What a line is about is passed as ``extra=``; in JSON it has fields of its own, so that a collector can
search for a connection, a client, a user or a topic::

    {"time": "2026-01-31T12:00:00.000Z", "level": "warning", "logger": "headrace.server",
     "message": "…", "connection": 17, "peer": "10.0.0.7:51234", "client": "worker-3",
     "user": "user:alice", "topic": "orders"}

Rejected: context variables that are set for each connection. Timers and commits that many connections share
would carry the fields of whoever started them.
"""

from __future__ import annotations

import json
import logging

import orjson

from headrace.operations.views import iso

TEXT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"
FIELDS = (
    "connection", "peer", "client", "user", "topic", "subscription", "cause", "action", "target",
    "arguments", "outcome", "missing",
)  # fmt: skip
"""That a line may have, in this order."""


class JsonLines(logging.Formatter):
    """One JSON object for each line; a traceback is its field ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": iso(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value not in (None, ""):
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:  # the name of a file that is not text
            return json.dumps(line, default=str)


_handler = logging.StreamHandler()


def set_up(level: str, log_format: str) -> None:
    """Log to standard error from now on; called again, it changes level and format."""
    root = logging.getLogger()
    _handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(TEXT))
    if _handler not in root.handlers:
        root.addHandler(_handler)
    root.setLevel(level.upper())
