"""What a member gets from partitions that other nodes own.

A member joins its subscription on its own node, which has the cursors of the partitions that it owns. For those of others, the node
joins there on its behalf: a :class:`ForeignShare` for each member and each owner. The member counts at the owner as any other: its turn, its
deadlines, attempts and order by key are decided there. What is delivered to it there comes over the connection between the
nodes, as a batch, and goes to the member as a lease whose *subscription* is the share; so every protocol settles it as it always does,
and the share passes that on.

The prefetch is divided among the owners. What comes when the member has no room (the owners do not know of each other) waits here.

When the connection breaks or the partition moves, what the member holds of it is stale, and the next owner delivers it again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.broker.cursor import Cursor
from headrace.broker.delivery import Delivery, Lease, Leases, Member
from headrace.broker.subscription import Subscription
from headrace.cluster.peers import Peer
from headrace.errors import HeadraceError, QueueFull
from headrace.log.batch import parse
from headrace.model import SubscriptionSettings
from headrace.wire.binary import Frame, Type

if TYPE_CHECKING:
    from headrace.cluster.node import Node

logger = logging.getLogger("headrace.cluster")
LOOK_AGAIN_S = 0.02
LOOK_AGAIN_S_MAX = 1.0
"""The pauses grow to this while an owner does not take a member."""
REFUSALS_TOLD = 8
ENDED_S = 1.0
FULL = "too_many_on_connection"
"""The owner has the maximum of members of this node: all of them come over one connection."""


def too_many_members(owner: str) -> QueueFull:
    return QueueFull(
        f"this node of the cluster has too many members: node {owner}, which serves some of the messages, takes no "
        "more from it. Connect to another node, or close members",
        code="too_many_members",
    )


class ForeignShare(Leases):
    """See the head of this file. To sessions, it is the subscription of its leases."""

    def __init__(
        self, node: Node, subscription: Subscription, member: Member, peer: Peer, prefetch: int
    ):
        self._node, self._peer = node, peer
        self.of, self.member, self._prefetch = subscription, member, prefetch
        self.name, self.pattern = subscription.name, subscription.pattern
        self.leases: dict[int, Lease] = {}
        self._remote: dict[int, int] = {}
        """Lease here -> lease at the owner."""
        self._waiting: deque[Frame] = deque()
        self._timer: Any = None
        self._joining: Any = None
        """It joins again when this is due."""
        self._refusals = 0
        """How often the owner has not taken the member."""
        self._channel = str(next(node.peers.channel_numbers))
        self.is_pending = True
        """The owner has not said yet what it has."""
        self._withdrawn = self._ended = False
        peer.channels[self._channel] = self._arrived
        peer.on_up[self] = self._join
        peer.on_down[self] = self._lost
        self._join()

    # --- as a subscription ----------------------------------------------------------------------
    @property
    def key(self) -> tuple[str, str]:
        return self.of.key

    @property
    def settings(self) -> SubscriptionSettings:
        return self.of.settings

    @property
    def owner(self) -> str | None:
        return self.of.owner

    @property
    def cursors(self) -> dict[tuple[str, int], Cursor]:
        return self.of.cursors

    def ack(self, lease_id: int, offset: int) -> None:
        lease = self.lease(lease_id)
        self._settle(lease, offset)
        self._peer.settle(self._remote[lease_id], offset, offset)
        self._settled(lease, 1)

    def _ack_bits(self, lease: Lease, bits: int) -> int:
        count = bits.bit_count()
        if count:
            lease.mask ^= bits
            low, high = (bits & -bits).bit_length() - 1, bits.bit_length()
            remote = self._remote[lease.id]
            if high - low == count:
                self._peer.settle(remote, lease.offsets[low], lease.offsets[high - 1])
            else:
                for at in range(low, high):
                    if bits >> at & 1:
                        self._peer.settle(remote, lease.offsets[at], lease.offsets[at])
            self._settled(lease, count)
        return count

    def _nack(self, lease: Lease, offset: int, delay: float | None, reason: str) -> None:
        more = {"reason": reason}
        if delay is not None:
            more["delay"] = f"{delay:.3f}"
        self._give_back(lease, offset, more)

    def release(self, lease_id: int, offset: int) -> None:
        self._give_back(self.lease(lease_id), offset, {"release": "true"})

    def _give_back(self, lease: Lease, offset: int, more: dict[str, str]) -> None:
        self._settle(lease, offset)
        given = {"lease": str(self._remote[lease.id]), "offset": str(offset), **more}
        self._tell(Type.NACK, given)
        self._settled(lease, 1)

    def _extend(self, lease: Lease, seconds: float | None) -> float:
        granted = self.settings.ack_timeout if seconds is None else seconds
        lease.deadline = self._node.loop.time() + self._patience(granted)
        self._tell(Type.EXTEND, {"lease": str(self._remote[lease.id]), "seconds": f"{granted:.3f}"})
        self._look_later()
        return granted

    def _settled(self, lease: Lease, count: int) -> None:
        self.member.settled(lease, count)
        if not lease.mask:
            self.leases.pop(lease.id, None)
            self._remote.pop(lease.id, None)
            if self._withdrawn and not self.leases:
                self.end()
        if self._waiting:
            self._hand_out()

    def _tell(self, type: int, properties: dict[str, str]) -> None:
        self._peer.send_settlements()
        self._peer.send(type, properties, b"", lambda frame, error: None)

    # --- joining ------------------------------------------------------------------------------
    def _about(self) -> dict[str, str]:
        return {"subscription": self.name, "topic": self.pattern, "channel": self._channel}

    def _join(self) -> None:
        if self._joining is not None:  # once for each connection: a second time is refused
            self._joining.cancel()
            self._joining = None
        if self._ended or self._withdrawn or not self._peer.is_up:
            return
        given = {
            **self._about(),
            "mode": "batch",
            "prefetch": str(self._prefetch),
            "ack": "auto" if self.member.auto_ack else "manual",
            "member": self.member.name[:200],
            "forwarded": "true",
        }
        self._peer.send(Type.SUBSCRIBE, given, b"", self._joined)

    def _joined(self, frame: Frame | None, error: HeadraceError | None) -> None:
        if self._ended:
            return
        if frame is None:
            if error is not None and self._peer.is_up:
                self._refused(error)
            return
        self._refusals = 0
        # What it had when we joined comes before the answer to this.
        self._peer.send(Type.HEARTBEAT, {}, b"", lambda frame, error: self._said_all())

    def _refused(self, error: HeadraceError) -> None:
        """As a rule it does not have the subscription yet."""
        if error.code == FULL:
            self._node.expel(self.of, self.member, too_many_members(self._peer.address))
            return
        self._refusals += 1
        if self._refusals == REFUSALS_TOLD:
            logger.warning(
                "node %s does not take a member of subscription %s: %s",
                self._peer.address, self.name, error,
            )  # fmt: skip
        pause = min(LOOK_AGAIN_S * 2 ** min(self._refusals - 1, 10), LOOK_AGAIN_S_MAX)
        self._joining = self._node.loop.call_later(pause, self._join)

    def _said_all(self) -> None:
        if self.is_pending:
            self.is_pending = False
            self._node.nothing_comes(self.of, self.member)

    def withdraw(self) -> None:
        """Nothing more; what is out stays out."""
        self._withdrawn = True
        self._return_waiting()
        if not self.leases:
            self.end()
        else:
            self._tell(Type.UNSUBSCRIBE, {**self._about(), "pause": "true"})

    def end(self, *, tells: bool = True) -> None:
        """The member is gone: the owner gives what it held to others."""
        if self._ended:
            return
        self._ended = True
        self.is_pending = False
        if self._timer is not None:
            self._timer.cancel()
        if tells:
            self._return_waiting()
            self._tell(Type.UNSUBSCRIBE, self._about())
        self._peer.channels.pop(self._channel, None)
        self._peer.on_up.pop(self, None)
        self._peer.on_down.pop(self, None)
        self._forget_leases()
        self._node.share_ended(self)

    def _return_waiting(self) -> None:
        """What came and was never handed out was not a delivery."""
        waiting, self._waiting = self._waiting, deque()
        for frame in waiting:
            lease = frame.properties.get("lease")
            if lease is None:
                continue
            for offset in _offsets(frame):
                self._tell(Type.NACK, {"lease": lease, "offset": str(offset), "release": "true"})

    def _lost(self) -> None:
        self._waiting.clear()
        self._forget_leases()
        if self._withdrawn:
            self.end(tells=False)

    def _forget_leases(self) -> None:
        leases, self.leases = list(self.leases.values()), {}
        self._remote.clear()
        for lease in leases:
            out, lease.mask = lease.mask.bit_count(), 0
            self.member.settled(lease, out)

    # --- deliveries ---------------------------------------------------------------------------
    def _arrived(self, frame: Frame) -> None:
        if frame.type == Type.CLOSED:
            self.end(tells=False)
        elif frame.type == Type.DELIVER and not self._ended:
            self._waiting.append(frame)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and not self._withdrawn:
            count = len(_offsets(self._waiting[0]))
            room = self.member.room()
            if room <= 0 or (room < count and self.member.in_flight):
                self._look_later()
                return
            self._give(self._waiting.popleft())

    def _give(self, frame: Frame) -> None:
        properties = frame.properties
        topic = self._node.engine.topics.get(properties["topic"])
        batch = parse(frame.body)
        if topic is None or batch is None:
            return
        partition = topic.partition(int(properties["partition"]))
        offsets = _offsets(frame)
        base = batch.base_offset
        indexes: Sequence[int] = (
            range(offsets.start - base, offsets.stop - base, offsets.step)
            if isinstance(offsets, range)
            else [offset - base for offset in offsets]
        )
        numbers = [int(each) for each in properties.get("attempts", "1").split(",")]
        attempts: int | list[int] = numbers[0] if len(numbers) == 1 else numbers
        lease = None
        if "lease" in properties:
            now, count = self._node.loop.time(), len(offsets)
            lease = Lease(
                self._node.engine.next_lease_id(),
                self,  # type: ignore[arg-type]
                self.member,
                Cursor(0, partition, 0),
                offsets,
                attempts,
                now + self._patience(self.settings.ack_timeout),
                len(frame.body) * count // max(batch.count, 1),
                count,
                (1 << count) - 1,
                now,
            )
            self.leases[lease.id] = lease
            self._remote[lease.id] = int(properties["lease"])
            self.member.took(lease)
            self._look_later()
        self.member.sink.deliver(
            Delivery(topic.name, partition.number, batch, indexes, lease, attempts)
        )

    # --- time ---------------------------------------------------------------------------------
    @staticmethod
    def _patience(seconds: float) -> float:
        """A little less than the owner has: what it has taken back cannot be settled here."""
        return seconds - min(0.05 * seconds, 0.25)

    def _look_later(self) -> None:
        if self._timer is None and not self._ended:
            pause = LOOK_AGAIN_S
            if not self._waiting:
                due = min((lease.deadline for lease in self.leases.values()), default=None)
                if due is None:
                    return
                pause = max(due - self._node.loop.time(), LOOK_AGAIN_S)
            self._timer = self._node.loop.call_later(min(pause, 1.0), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._node.loop.time()
        for lease in [lease for lease in self.leases.values() if lease.deadline <= now]:
            out, lease.mask = lease.mask.bit_count(), 0  # the owner takes them back now
            self.member.settled(lease, out)
            del self.leases[lease.id], self._remote[lease.id]
            if (
                self._withdrawn and not self.leases
            ):  # not at once: it has timed out, and has not left
                self._node.loop.call_later(ENDED_S, self.end)
        self._hand_out()
        self._look_later()


def _offsets(frame: Frame) -> Sequence[int]:
    text = frame.properties["offsets"]
    if ":" in text:
        return range(*map(int, text.split(":")))
    return [int(each) for each in text.split(",")]
