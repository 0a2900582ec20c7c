"""The connections to other nodes: the binary protocol, as a client that has logged in with the cluster's secret.

One connection to each node carries everything: publishes, operations, deliveries and their settlements. So what was sent
first is done first: a flush comes after the acks that were given before it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from headrace.client.address import parse_address
from headrace.client.link import Link, Wire, error_of
from headrace.errors import (
    ConnectionLost,
    HeadraceError,
    OutcomeUnknown,
    RequestTimeout,
    StorageFailed,
)
from headrace.wire import binary
from headrace.wire.binary import Frame, Type

logger = logging.getLogger("headrace.cluster")
Answer = Callable[[Frame | None, HeadraceError | None], None]
"""The answer, or an error that the node gave, or neither: the connection broke."""
NO_ANSWER = (ConnectionLost, RequestTimeout)
"""Whether the node has done it is not known."""


def unanswered(what: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the node that has it went away during {what}: it may or may not have been done"
    )


def address_of(node: str) -> str:
    """A node's name in claims is its address and a number of its process."""
    return node.partition("/")[0]


class Peer:
    """Another node."""

    def __init__(self, address: str, link: Link, on_lost_acks: Callable[[], None]):
        self.address = address
        self._on_lost_acks = on_lost_acks
        self.acks_sent = self.acks_stored = 0
        """How many acks were passed on, and how many of them a flush has covered."""
        self.link = link
        self.channels: dict[str, Callable[[Frame], None]] = {}
        """Who gets deliveries, by the name that we gave it."""
        self.on_up: dict[object, Callable[[], None]] = {}
        self.on_down: dict[object, Callable[[], None]] = {}
        self._runs: list[tuple[int, int, int]] = []
        link.on_frame = self._deliver
        link.on_up = self._up
        link.on_down = self._down

    async def _up(self, wire: Wire) -> None:
        for told in tuple(self.on_up.values()):
            told()

    def _down(self) -> None:
        self._runs.clear()
        if self.acks_sent > self.acks_stored:
            self.acks_stored = self.acks_sent
            self._on_lost_acks()
        for told in tuple(self.on_down.values()):
            told()

    def _deliver(self, frame: Frame) -> None:
        told = self.channels.get(frame.properties.get("member", ""))
        if told is not None:
            told(frame)

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    def send(self, type: int, properties: Mapping[str, str], body: bytes, answer: Answer) -> None:
        """``answer`` is called once, also if there is no connection."""
        wire = self.link.wire

        def answered(frame: Frame | None) -> None:
            if frame is not None and frame.properties.get("status") == "error":
                answer(None, error_of(frame))
            else:
                answer(frame, None)

        if wire is None:
            answered(None)
        else:
            wire.send(type, properties, body, answered)

    def settle(self, lease: int, first: int, last: int) -> None:
        """Acks; those of one turn of the loop go together."""
        if not self._runs:
            asyncio.get_running_loop().call_soon(self.send_settlements)
        self._runs.append((lease, first, last))
        self.acks_sent += 1

    def send_settlements(self) -> None:
        runs, self._runs = self._runs, []
        if runs:
            self.send(Type.SETTLE, {}, binary.encode_runs(runs), self._settled)

    def _settled(self, frame: Frame | None, error: HeadraceError | None) -> None:
        if error is not None or (frame is not None and "stale" in frame.properties):
            self._on_lost_acks()  # the owner has lost the slot, or they came too late

    async def ask(
        self, type: int, properties: Mapping[str, str], body: bytes = b"", *, timeout: float
    ) -> Frame:
        self.send_settlements()
        return await self.link.ask(type, properties, body, timeout=timeout)


class Peers:
    def __init__(
        self,
        own: str,
        tls: ssl.SSLContext | None,
        timeout: float,
        on_lost_acks: Callable[[], None] = lambda: None,
    ):
        self._own, self._tls, self._timeout = own, tls, timeout
        self._on_lost_acks = on_lost_acks
        self.secret = ""
        self._peers: dict[str, Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.channel_numbers = itertools.count(1)

    def __iter__(self) -> Any:
        return iter(tuple(self._peers.values()))

    def get(self, address: str) -> Peer:
        """The node at an address; it is connected to, and again when it is lost.

        When this node stops, subscriptions may still look for owners. They get a node that is never connected to.
        """
        peer = self._peers.get(address)
        if peer is None:
            try:
                place = parse_address(address)
            except HeadraceError as error:
                raise StorageFailed(
                    f"node {address!r} cannot be reached: {error}; each node's --advertise is host:port",
                    code="node_unreachable",
                ) from None
            link = Link(
                [(place.host, place.port, self._tls)],
                client_id=f"node {self._own}",
                login={"node": self._own, "secret": self.secret},
                request_timeout=self._timeout,
                heartbeat_interval=5.0,
            )
            peer = self._peers[address] = Peer(address, link, self._on_lost_acks)
            if self._is_closed:
                self._close(link)
            else:
                link.start()
        return peer

    def _close(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def forget(self, address: str) -> None:
        """It is not a node any more."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._close(peer.link)

    async def close(self) -> None:
        self._is_closed = True
        for peer in self._peers.values():
            self._close(peer.link)
        while self._closing:
            await asyncio.wait(tuple(self._closing))
