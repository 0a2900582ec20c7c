"""The subscriptions of a connection: its members, its followers, and the deliveries they hold.

Protocols differ in how a delivery looks on the wire; everything else about subscriptions is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.broker.attaching import refollow
from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.follower import Follower
from headrace.broker.subscription import Subscription
from headrace.clock import Timer
from headrace.errors import (
    Conflict,
    HeadraceError,
    InvalidArgument,
    NotFound,
    QueueFull,
    StaleDelivery,
)
from headrace.model import is_pattern
from headrace.operations.results import HeldSubscription
from headrace.server.writing import PIECE_MESSAGES, DeliveryWriter

if TYPE_CHECKING:
    from headrace.server.connection import Connection

FOLLOW_AT_ONCE = 1000
SUBSCRIPTIONS_PER_CONNECTION_MAX = 10_000
WILDCARDS_PER_CONNECTION_MAX = 100
"""Each of them is compared with every topic."""
PLACES_PER_CONNECTION_MAX = 100_000
"""Partitions that the plain subscriptions of one connection follow, all together: a wildcard over thousands
of topics follows each of them."""
GATHERED_BYTES_MAX = 64 << 10
"""Of deliveries that are sent together."""
GATHERED_S = 0.002
"""How long deliveries are gathered at most."""
MEMORY_FULL_S = 0.25
"""How long deliveries pause while the broker has no memory for them."""


class WireSink:
    """One subscription's deliveries into a connection."""

    def __init__(self, memberships: Memberships):
        self._memberships = memberships
        self._outbox = memberships.outbox
        self._is_starved = False
        """It had no room when messages were there for it."""
        self.follower: Follower | None = None
        self.subscription: Subscription | None = None
        self.member: Member | None = None
        self.topic_created = False
        self.channel = ""
        """The client's own name for it, when one connection follows a topic more than once."""
        self.batched = False
        """Whether a delivery is one frame with a batch, which is made in one step."""
        self.credit: int | None = None
        """How many messages of a plain subscription the client has room for; None: no limit."""
        self.review: Callable[[], None] = lambda: None
        """End it if the client has not the right for it any more."""
        self.source = b""
        """What every delivery says about it, in the protocol's form, once it was made."""

    def room(self) -> int:
        if not self._memberships.has_room():
            self._is_starved = True
            return 0
        return FOLLOW_AT_ONCE if self.credit is None else min(self.credit, FOLLOW_AT_ONCE)

    def deliver(self, delivery: Delivery) -> None:
        if self.credit is not None:
            self.credit -= len(delivery)
        self._memberships.write(self, delivery)

    def closed(self, error: HeadraceError | None) -> None:
        self._memberships.closed(self, error)

    def about(self) -> dict[str, Any]:
        """Who the member is, for operators."""
        connection = self._memberships._connection
        return {
            "client_id": connection.client_id,
            "connection": connection.number,
            "address": connection.peer,
        }

    def wake_if_starved(self) -> None:
        if self._is_starved:
            self._is_starved = False
            self.wake()

    def wake(self) -> None:
        if self.follower is not None:
            self.follower.wake()
        if self.subscription is not None:
            self.subscription.wake()


class Memberships:
    __slots__ = (
        "_connection", "_encode", "_engine", "_gathered", "_gathered_bytes", "_gathering", "_is_waiting", "_leases",
        "_notify", "_sinks", "_writer", "outbox",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        encode: Callable[[WireSink, Delivery], bytes],
        on_closed: Callable[[WireSink, HeadraceError | None], None],
    ):
        self._connection = connection
        self._engine = engine = connection.hub.engine
        self.outbox = outbox = connection.outbox
        self._encode = encode
        self._notify = on_closed
        self._writer = DeliveryWriter(outbox, engine.pace, self._wake)
        self._gathered: list[bytes] | None = None
        """Deliveries after the first one: several subscriptions of a connection often get the same message, and
        one system call sends all."""
        self._gathering: Timer | None = None
        self._gathered_bytes = 0
        self._is_waiting = False
        """For memory."""
        self._sinks: dict[tuple[str, str | None, str], WireSink] = {}
        self._leases: dict[int, Lease] = {}
        """By id, what this connection's members hold."""
        outbox.on_writable = self._wake

    def __len__(self) -> int:
        return len(self._sinks)

    def held(self) -> Iterator[HeldSubscription]:
        """Each of them, and how many messages it holds."""
        for (pattern, name, _), sink in self._sinks.items():
            in_flight = 0 if sink.member is None else sink.member.in_flight
            yield {"topic": pattern, "subscription": name, "in_flight": in_flight}

    def _wake(self) -> None:
        for sink in tuple(self._sinks.values()):
            sink.wake_if_starved()

    # --- what sinks need ----------------------------------------------------------------------
    def has_room(self) -> bool:
        """Whether this connection takes another delivery now."""
        outbox = self.outbox
        if not outbox.may_deliver or self._writer.is_busy:
            return False
        if outbox.requests.has_room():
            return True
        if not self._is_waiting:
            self._is_waiting = True
            self._engine.call_later(MEMORY_FULL_S, self._look_again)
        return False

    def _look_again(self) -> None:
        self._is_waiting = False
        self._wake()

    def write(self, sink: WireSink, delivery: Delivery) -> None:
        if sink.batched or (len(delivery.indexes) <= PIECE_MESSAGES and not self._writer.is_busy):
            data = self._encode(sink, delivery)
            if self._gathered is not None:
                self._gathered.append(data)
                self._gathered_bytes += len(data)
                if self._gathered_bytes > GATHERED_BYTES_MAX:
                    self._send_gathered()
                return
            if len(self._sinks) > 1:
                self._gathered = []
                self._engine.pace.soon(self._end_gathering)
                self._gathering = self._engine.call_later(GATHERED_S, self._end_gathering)
            self.outbox.deliver(data)
        else:
            self._send_gathered()
            self._writer.write(delivery, partial(self._encode, sink))

    def _end_gathering(self) -> None:
        """All who waited when it began have had their turn, or it has lasted long enough."""
        self._send_gathered()
        self._gathered = None
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _send_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
            self.outbox.deliver(b"".join(gathered))

    def _flush(self) -> None:
        """Write all that is on its way, now: before the client is told that no more comes."""
        self._send_gathered()
        self._writer.flush()

    def closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        """The broker ends it, and the client hears why."""
        self._flush()
        for key, known in list(self._sinks.items()):
            if known is sink:
                del self._sinks[key]
                self._notify(sink, error)

    # --- what clients ask for -----------------------------------------------------------------
    def follow(self, pattern: str, channel: str = "", credit: int | None = None) -> WireSink:
        """A plain subscription: every message from now on."""
        key = (pattern, None, channel)
        if key in self._sinks:
            raise Conflict(f"this connection follows {pattern!r} already", code="subscribed")
        self._connection.permissions.need_to_follow(pattern)
        sink = self._new()
        sink.channel, sink.credit = channel, credit
        self._sinks[key] = sink
        try:
            left = self._places_left(pattern)
            with self._connection.permissions.owning():
                follower = self._engine.follow(pattern, sink, self._may_follow, places_max=left)
            sink.follower, sink.review = follower, lambda: self._review_follower(follower)
            sink.topic_created = follower.topic_created
        except HeadraceError:
            del self._sinks[key]
            raise
        return sink

    def _places_left(self, pattern: str) -> int | None:
        if not is_pattern(pattern):
            return None  # SUBSCRIPTIONS_PER_CONNECTION_MAX bounds these
        wildcards = sum(1 for key in self._sinks if key[1] is None and is_pattern(key[0]))
        if wildcards > WILDCARDS_PER_CONNECTION_MAX:
            raise QueueFull(
                f"this connection follows {WILDCARDS_PER_CONNECTION_MAX} wildcards already; use "
                "another connection",
                code="too_many_on_connection",
            )
        followers = [sink.follower for sink in self._sinks.values() if sink.follower is not None]
        return PLACES_PER_CONNECTION_MAX - sum(map(len, followers))

    def _may_follow(self, topic: str) -> bool:
        return self._connection.permissions.may("consume", topic)

    def review(self) -> None:
        """The rights of the client may have changed: end what it may not have any more."""
        for sink in list(self._sinks.values()):
            sink.review()

    def _review_follower(self, follower: Follower) -> None:
        pattern = follower.pattern
        if not is_pattern(pattern) and not self._may_follow(pattern):
            error = self._connection.permissions.refusal("consume", pattern)
            self._engine.unfollow(follower, error)
        else:
            refollow(self._engine, follower)

    def _review_member(self, subscription: Subscription) -> None:
        permissions = self._connection.permissions
        key = (subscription.pattern, subscription.name, "")
        if key in self._sinks and not permissions.may_use("consume", subscription):
            sink = self._sinks.pop(key)
            self._end(sink)
            self._notify(sink, permissions.refusal("consume", *subscription.key))

    def grant(self, pattern: str, channel: str, count: int) -> None:
        """The client has room for this many more."""
        sink = self._sinks.get((pattern, None, channel))
        if sink is not None and sink.credit is not None:
            sink.credit += count
            sink.wake()

    def join(
        self,
        subscription: Subscription,
        name: str,
        prefetch: int,
        auto_ack: bool,
        channel: str = "",
    ) -> WireSink:
        """Become a member of a subscription. With a ``channel``, another node has many members here."""
        key = (subscription.pattern, subscription.name, channel)
        if key in self._sinks:
            raise Conflict(
                f"this connection is a member of {subscription.name!r} already", code="subscribed"
            )
        self._connection.permissions.need_to_use("consume", subscription)
        if not 1 <= prefetch <= limits.PREFETCH_MAX:
            raise InvalidArgument(f"prefetch is from 1 to {limits.PREFETCH_MAX}, not {prefetch}")
        sink = self._new()
        sink.subscription = subscription
        sink.member = Member(name, sink, prefetch, auto_ack, self._leases)
        sink.channel, sink.member.elsewhere = channel, bool(channel)
        self._sinks[key] = sink
        sink.review = lambda: self._review_member(subscription)
        subscription.join(sink.member)
        return sink

    def _new(self) -> WireSink:
        if len(self._sinks) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            raise QueueFull(
                f"this connection has {SUBSCRIPTIONS_PER_CONNECTION_MAX} subscriptions already; "
                "use a wildcard, or another connection",
                code="too_many_on_connection",
            )
        return WireSink(self)

    def leave(self, pattern: str | None, name: str | None, channel: str = "") -> None:
        """End one of them: by topic, by subscription name, or by both."""
        for key, sink in list(self._sinks.items()):
            if pattern in (None, key[0]) and key[1:] == (name, channel):
                self._flush()
                del self._sinks[key]
                self._end(sink)
                return
        raise NotFound("this connection has no such subscription", code="not_subscribed")

    def pause(self, pattern: str | None, name: str | None, channel: str = "") -> None:
        """Deliver nothing more to a member; its messages stay with it until it leaves."""
        for key, sink in self._sinks.items():
            if pattern in (None, key[0]) and key[1:] == (name, channel) and sink.member is not None:
                sink.member.prefetch = 0
                return
        raise NotFound("this connection has no such subscription", code="not_subscribed")

    def leave_all(self) -> None:
        """End all of them: at once, or in later turns of the loop if they are many."""
        self._flush()
        sinks, self._sinks = list(self._sinks.values()), {}
        sinks.sort(key=lambda sink: sink.subscription is None)  # the messages of members go first
        end = partial(self._end, stopping=self._engine.stopping)
        self._engine.pace.go_through(sinks, end, lambda: None)

    def _end(self, sink: WireSink, stopping: bool | None = None) -> None:
        if sink.follower is not None:
            self._engine.unfollow(sink.follower)
        if sink.subscription is not None and sink.member is not None:
            # A member that goes because the broker stops has done nothing wrong.
            stopping = self._engine.stopping if stopping is None else stopping
            sink.subscription.leave(sink.member, count_attempt=not stopping)

    def of_lease(self, lease_id: int) -> Subscription:
        """The subscription whose delivery this connection holds."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleDelivery("this delivery has ended: it was settled, or it timed out")
        return lease.subscription
