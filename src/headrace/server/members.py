"""The subscriptions of a connection: its members, its followers, and the deliveries they hold.

Protocols differ in how a delivery looks on the wire; everything else about subscriptions is here.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace import limits
from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.engine import Engine
from headrace.broker.follower import Follower
from headrace.broker.subscription import Subscription
from headrace.errors import (
    Conflict,
    HeadraceError,
    InvalidArgument,
    NotFound,
    QueueFull,
    StaleDelivery,
)
from headrace.server.flow import Outbox

FOLLOW_AT_ONCE = 1000
SUBSCRIPTIONS_PER_CONNECTION_MAX = 10_000


class WireSink:
    """One subscription's deliveries into a connection."""

    def __init__(
        self,
        outbox: Outbox,
        write: Callable[[WireSink, Delivery], None],
        on_closed: Callable[[WireSink, HeadraceError | None], None],
    ):
        self._outbox = outbox
        self._write = write
        self._on_closed = on_closed
        self.follower: Follower | None = None
        self.subscription: Subscription | None = None
        self.member: Member | None = None
        self.channel = ""
        """The client's own name for it, when one connection follows a topic more than once."""
        self.credit: int | None = None
        """How many messages of a plain subscription the client has room for; None: no limit."""

    def room(self) -> int:
        if not self._outbox.writable or self._outbox.closed:
            return 0
        return FOLLOW_AT_ONCE if self.credit is None else min(self.credit, FOLLOW_AT_ONCE)

    def deliver(self, delivery: Delivery) -> None:
        if self.credit is not None:
            self.credit -= len(delivery)
        self._write(self, delivery)

    def closed(self, error: HeadraceError | None) -> None:
        self._on_closed(self, error)

    def wake(self) -> None:
        if self.follower is not None:
            self.follower.wake()
        if self.subscription is not None:
            self.subscription.wake()


class Memberships:
    __slots__ = ("_engine", "_leases", "_notify", "_outbox", "_sinks", "_write")

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        write: Callable[[WireSink, Delivery], None],
        on_closed: Callable[[WireSink, HeadraceError | None], None],
    ):
        self._engine = engine
        self._outbox = outbox
        self._write = write
        self._notify = on_closed
        self._sinks: dict[tuple[str, str | None, str], WireSink] = {}
        self._leases: dict[int, Lease] = {}
        """By id, what this connection's members hold."""
        outbox.on_writable = self._on_writable

    def __len__(self) -> int:
        return len(self._sinks)

    def _on_writable(self) -> None:
        for sink in tuple(self._sinks.values()):
            sink.wake()

    def follow(self, pattern: str, channel: str = "", credit: int | None = None) -> WireSink:
        """A plain subscription: every message from now on."""
        key = (pattern, None, channel)
        if key in self._sinks:
            raise Conflict(f"this connection follows {pattern!r} already", code="subscribed")
        sink = self._new()
        sink.channel, sink.credit = channel, credit
        self._sinks[key] = sink
        try:
            sink.follower = self._engine.follow(pattern, sink)
        except HeadraceError:
            del self._sinks[key]
            raise
        return sink

    def grant(self, pattern: str, channel: str, count: int) -> None:
        """The client has room for this many more."""
        sink = self._sinks.get((pattern, None, channel))
        if sink is not None and sink.credit is not None:
            sink.credit += count
            sink.wake()

    def join(
        self, subscription: Subscription, name: str, prefetch: int, auto_ack: bool
    ) -> WireSink:
        """Become a member of a subscription."""
        key = (subscription.pattern, subscription.name, "")
        if key in self._sinks:
            raise Conflict(
                f"this connection is a member of {subscription.name!r} already", code="subscribed"
            )
        if not 1 <= prefetch <= limits.PREFETCH_MAX:
            raise InvalidArgument(f"prefetch is from 1 to {limits.PREFETCH_MAX}, not {prefetch}")
        sink = self._new()
        sink.subscription = subscription
        sink.member = Member(name, sink, prefetch, auto_ack, self._leases)
        self._sinks[key] = sink
        subscription.join(sink.member)
        return sink

    def _new(self) -> WireSink:
        if len(self._sinks) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            raise QueueFull(
                f"this connection has {SUBSCRIPTIONS_PER_CONNECTION_MAX} subscriptions already; "
                "use a wildcard, or another connection",
                code="too_many_on_connection",
            )
        return WireSink(self._outbox, self._write, self._closed)

    def _closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        for key, known in list(self._sinks.items()):
            if known is sink:
                del self._sinks[key]
                self._notify(sink, error)

    def leave(self, pattern: str | None, name: str | None, channel: str = "") -> None:
        """End one of them: by topic, by subscription name, or by both."""
        for key, sink in list(self._sinks.items()):
            if pattern in (None, key[0]) and key[1:] == (name, channel):
                del self._sinks[key]
                self._end(sink)
                return
        raise NotFound("this connection has no such subscription", code="not_subscribed")

    def pause(self, pattern: str | None, name: str | None) -> None:
        """Deliver nothing more to a member; its messages stay with it until it leaves."""
        for key, sink in self._sinks.items():
            if pattern in (None, key[0]) and key[1] == name and sink.member is not None:
                sink.member.prefetch = 0
                return
        raise NotFound("this connection has no such subscription", code="not_subscribed")

    def leave_all(self) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            self._end(sink)

    def _end(self, sink: WireSink) -> None:
        if sink.follower is not None:
            self._engine.unfollow(sink.follower)
        if sink.subscription is not None and sink.member is not None:
            # A member that goes because the broker stops has done nothing wrong.
            sink.subscription.leave(sink.member, count_attempt=not self._engine.stopping)

    def of_lease(self, lease_id: int) -> Subscription:
        """The subscription whose delivery this connection holds."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleDelivery("this delivery has ended: it was settled, or it timed out")
        return lease.subscription
