"""A session that has subscriptions: what text, binary and WebSocket share of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.broker.delivery import Delivery
from headrace.errors import HeadraceError
from headrace.operations.results import HeldSubscription
from headrace.server.members import Memberships, WireSink
from headrace.server.session import Session


class SubscribingSession(Session):
    """A session whose client may have subscriptions."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._memberships = Memberships(self.connection, self._delivered, self._subscription_closed)

    def lost(self) -> None:
        self._memberships.leave_all()

    def held(self) -> Iterator[HeldSubscription]:
        return self._memberships.held()

    def access_changed(self) -> None:
        self._memberships.review()

    def _delivered(self, sink: WireSink, delivery: Delivery) -> bytes:
        """The delivery, as the protocol writes it."""
        raise NotImplementedError

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        """Tell the client that a subscription has ended."""
        raise NotImplementedError
