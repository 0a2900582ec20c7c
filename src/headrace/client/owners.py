"""Where to go in a cluster of several nodes: which node serves which partition, and the connections to these nodes.

A broker that is a node says so when the client connects (``Link.node``). Then publishes and fetches go straight to the owner of
their partition. Everything else goes to the node that the client is connected to, the *main* one, and so does this whenever
there is no connection to the owner: any node answers any request. So a map that is wrong costs time, and is never an error::

    topic_map, once for each topic that is published to ──▶ the map
    an answer of a node that is not the owner says owner=… ──▶ the map
    the map names a node ──▶ a connection to it is opened; meanwhile the main node forwards
    the connection breaks ──▶ what was under way goes to the main node, which finds the next owner

Rules:
- No round trip is added to learn something, except that ``topic_map`` takes the place of the question for the number of partitions.
- A node that cannot be reached is tried again after a growing pause. There are at most ``OWNER_LINKS_MAX`` connections, and one that nobody
  has used for a minute is closed.
- The order within a partition stays: a lane of the producer, or a series of batches, changes its connection when nothing is under way.
- TLS and the login are the main connection's. A certificate has to be valid for the address that the node advertises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from headrace import limits
from headrace.client.address import parse_address
from headrace.client.link import Link
from headrace.errors import BrokerFailed, Closed, ConnectFailed, ConnectionLost, HeadraceError
from headrace.wire.binary import Frame

logger = logging.getLogger("headrace.client")
SILENCE_S = 5.0
"""A node that is silent for longer is taken for dead: the others take its partitions after ten seconds."""
REACH_S = 1.0
"""How long a first publish waits for the connections to owners."""
AGAIN_S_MAX = 60.0
IDLE_S = 60.0
ELSEWHERE = (ConnectionLost, Closed, BrokerFailed)
"""A node that stops, or is gone: another one has the partition, or will have it."""


class Question(NamedTuple):
    """A frame that is sent to one node or another."""

    type: int
    properties: Mapping[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class _Series:
    """Batches to one partition that are under way over one connection."""

    link: Link
    users: int = 0
    under_way: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Owners:
    def __init__(self, main: Link, changed: Callable[[], None]):
        self._main = main
        self._changed = changed
        """Called when a connection to an owner has come or gone."""
        self._owners: dict[tuple[str, int], str] = {}
        self._links: dict[str, Link] = {}
        self._used: set[str] = set()
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """Address -> how often it could not be reached, and when it is tried again."""
        self._series: dict[tuple[str, int], _Series] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_active(self) -> bool:
        """Whether there are several nodes."""
        return self._main.node is not None

    # --- the map ----------------------------------------------------------------------------
    def link(self, topic: str, partition: int) -> Link:
        """The connection for a partition: its owner's, or the main one."""
        address = self._owners.get((topic, partition)) if self._owners else None
        if address is None or address == self._main.node:
            return self._main
        link = self._links.get(address)
        if link is None:
            self._open(address)
            return self._main
        self._used.add(address)
        return link

    def is_main(self, topic: str, partition: int) -> bool:
        """Whether no other node than the main one is known to serve it; any thread may ask."""
        address = self._owners.get((topic, partition))
        return address is None or address == self._main.node

    def heard(self, topic: str, partition: int, answer: Mapping[str, str], link: Link) -> None:
        """A node has answered: it serves the partition, or says who does."""
        owner = answer.get("owner", link.node)
        if owner is not None:
            self._know(topic, partition, owner)

    def _know(self, topic: str, partition: int, owner: str) -> None:
        if len(self._owners) >= limits.OWNERS_KNOWN_MAX:
            self._owners.clear()  # answers name them again
        self._owners[topic, partition] = owner

    def forget(self, topic: str, partition: int) -> None:
        """Its owner has refused, or is gone: the main node finds the next one."""
        self._owners.pop((topic, partition), None)

    def refused(self, topic: str, partition: int, error: HeadraceError) -> HeadraceError:
        """A node has refused a batch. If it only stops, another one takes it."""
        if self.is_active:
            self.forget(topic, partition)
            error.retryable |= isinstance(error, ELSEWHERE)
        return error

    async def learn(self, topic: str, owners: Sequence[str | None]) -> None:
        """A topic's map; returns when its owners are reached, or soon."""
        for number, owner in enumerate(owners):
            if owner is not None:
                self._know(topic, number, owner)
        for address in set(owners) - {None, self._main.node}:
            self._open(str(address))
        if self._opening:
            await asyncio.wait(list(self._opening.values()), timeout=REACH_S)

    # --- connections ------------------------------------------------------------------------
    def _open(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        if (
            address in self._links
            or address in self._opening
            or loop.time() < self._failures.get(address, (0, 0.0))[1]
            or len(self._links) + len(self._opening) >= limits.OWNER_LINKS_MAX
            or self._closed
        ):
            return
        self._opening[address] = loop.create_task(self._connect(address))

    async def _connect(self, address: str) -> None:
        main = self._main
        try:
            place = parse_address(address)
            link = Link(
                [(place.host, place.port, main.broker[2])],
                client_id=main.client_id,
                login=main.login,
                request_timeout=main.request_timeout,
                heartbeat_interval=SILENCE_S,
            )
            await link.open()
            if link.node != address:
                await link.close()
                raise ConnectFailed(f"{address} leads to {link.node or 'another broker'}")
        except HeadraceError as error:
            count = self._failures.get(address, (0, 0.0))[0]
            pause = min(2.0**count, AGAIN_S_MAX)
            again = asyncio.get_running_loop().time() + pause
            self._failures[address] = (min(count + 1, 10), again)
            level = logging.DEBUG if count else logging.INFO
            logger.log(level, "other nodes forward to %s for %g seconds: %s", address, pause, error)
            return
        finally:
            self._opening.pop(address, None)
        self._failures.pop(address, None)
        self._links[address] = link
        link.on_down = partial(self._lost, address)
        self._used.add(address)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)
        self._changed()

    def _lost(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            self._close_soon(link)
            self._changed()

    def _close_soon(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _close_idle(self) -> None:
        self._timer = None
        used, self._used = self._used, set()
        for address in set(self._links) - used:
            wire = self._links[address].wire
            if wire is not None and wire.is_idle:
                self._close_soon(self._links.pop(address))
        if self._links:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        links, self._links = self._links, {}
        closing = [link.close() for link in links.values()]
        await asyncio.gather(*opening, *self._closing, *closing, return_exceptions=True)

    # --- asking -----------------------------------------------------------------------------
    async def ask(self, place: tuple[str, int], question: Question, timeout: float) -> Frame:
        """Ask the owner of a partition, or the main node; it does no harm to ask twice."""
        link = self.link(*place)
        if link is not self._main:
            try:
                frame = await link.ask(*question, timeout=timeout)
            except ELSEWHERE as error:
                self.forget(*place)
                logger.debug("asking another node: %s", error)
            else:
                self.heard(*place, frame.properties, link)
                return frame
        frame = await self._main.ask(*question, again=True, timeout=timeout)
        self.heard(*place, frame.properties, self._main)
        return frame

    async def send(self, place: tuple[str, int], question: Question, timeout: float) -> Frame:
        """Send a batch when there is room: those of one partition in the order of the calls, also when the owner changes."""
        series = self._series.get(place)
        if series is None:
            series = self._series[place] = _Series(self._main)
        series.users += 1
        try:
            while True:
                link = await self._turn(place, series)
                is_main = link is self._main
                try:
                    wire = await link.ready()
                    await wire.writable()
                    frame = await link.ask(*question, again=is_main, timeout=timeout)
                except ELSEWHERE:
                    if is_main:
                        raise
                    self.forget(*place)
                else:
                    self.heard(*place, frame.properties, link)
                    return frame
                finally:
                    series.under_way -= 1
                    if not series.under_way:
                        series.idle.set()
        finally:
            series.users -= 1
            if not series.users:
                del self._series[place]

    async def _turn(self, place: tuple[str, int], series: _Series) -> Link:
        async with series.turn:  # they get it in the order in which they asked
            while series.under_way and self.link(*place) is not series.link:
                series.idle.clear()
                await series.idle.wait()
            series.link = self.link(*place)
            series.under_way += 1
            return series.link
