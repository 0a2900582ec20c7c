"""Headrace: a message broker in Python.

``Broker`` and ``AsyncBroker`` run inside your process; ``headrace serve`` runs the same engine as a
server, and ``BrokerClient`` and ``AsyncClient`` talk to it. Every error is a ``HeadraceError`` with a
stable ``code``.
"""

from headrace.broker.aio import AsyncBroker
from headrace.broker.embedded import Broker
from headrace.client.aio import AsyncClient
from headrace.client.threads import BrokerClient
from headrace.errors import HeadraceError, RequestTimeout
from headrace.model import (
    DeadLetter,
    Message,
    Receipt,
    Scheduled,
    SubscriptionSettings,
    TopicSettings,
)
from headrace.publication import Publication

__all__ = [
    "AsyncBroker",
    "AsyncClient",
    "Broker",
    "BrokerClient",
    "DeadLetter",
    "HeadraceError",
    "Message",
    "Publication",
    "Receipt",
    "RequestTimeout",
    "Scheduled",
    "SubscriptionSettings",
    "TopicSettings",
]
