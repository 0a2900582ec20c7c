"""Headrace: a message broker in Python.

``Broker`` and ``AsyncBroker`` run inside your process; every error is a ``HeadraceError`` with a
stable ``code``. ``headrace serve`` runs the same engine as a server.
"""

from headrace.broker.aio import AsyncBroker
from headrace.broker.embedded import Broker
from headrace.errors import HeadraceError
from headrace.model import (
    DeadLetter,
    Message,
    Receipt,
    Scheduled,
    SubscriptionSettings,
    TopicSettings,
)

__all__ = [
    "AsyncBroker",
    "Broker",
    "DeadLetter",
    "HeadraceError",
    "Message",
    "Receipt",
    "Scheduled",
    "SubscriptionSettings",
    "TopicSettings",
]
