"""Headrace: a message broker in Python.

``Broker`` and ``AsyncBroker`` run inside your process; ``headrace serve`` runs the same engine as a
server, and ``BrokerClient`` and ``AsyncClient`` talk to it. Every error is a ``HeadraceError`` with a
stable ``code``.

A name is imported when it is first used: a program that has only a client does not load the broker.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_ROOMS = {
    "AsyncBroker": "broker.aio",
    "AsyncClient": "client.aio",
    "Broker": "broker.embedded",
    "BrokerClient": "client.threads",
    "HeadraceError": "errors",
    "Publication": "publication",
    "RequestTimeout": "errors",
}
"""Where a name is; the others are in the model."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'model')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
