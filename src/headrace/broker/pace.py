"""Long work in short turns of the loop: no delivery may keep everybody else waiting.

A broker has one loop. A subscriber that reads fast can be sent a million messages without a pause, and as
long as that lasts nobody else is answered. So work that may be long is done in *pieces* of a few
milliseconds, and between the turns in which they run the loop looks after its sockets::

    turn of the loop:  sockets, timers │ pieces │ sockets, timers │ pieces │ ...

Rules:
- Work is a callable that does one piece and, if there is more to do, calls ``soon`` with itself again. The
  queue is first in, first out, so everybody advances at the same rate.
- All pieces of a turn share its time. A thousand subscribers with five milliseconds each would be five
  seconds. The time is short where the loop has little else to do, because a publish needs several turns: a message
  that goes to hundreds of subscriptions must not keep the next one waiting, which they then get with it. Where the
  loop has more to do, pieces have a share of its time, so deliveries keep up with publishes.
- The requests that come from all connections in one turn share its time, too: once it ``is_over``, a request that
  may take long begins as a piece of a later turn.
- Work that is known to be long (``late``) comes after all other pieces, but one of it runs whenever these have had
  ``TURN_S``. So a client with a small request does not wait for hundreds that ask for much.
- ``deadline`` and ``is_past`` are for a loop inside of one piece; ``turn`` and ``each`` are for a
  coroutine. It goes on after the pieces of its turn, where nobody measures it, so one turn wakes one coroutine only.

Rejected: a number of messages as the bound (a message may have ten bytes or a thousand headers).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TypeVar

from headrace.clock import Clock, Loop

Item = TypeVar("Item")
PIECE_S = 0.004
"""How long one piece of work goes on, besides its last step."""
TURN_S_MIN, TURN_S = 0.0005, 0.010
"""How long pieces run in one turn of the loop, all together."""
SHARE = 0.25
"""Between these bounds: this part of the time that everything else took since the last turn."""
REQUESTS_S = 0.010
"""How long requests begin as they come in one turn of the loop, all connections together; for a connection that
has not asked for much lately, twice as long."""


class Pace:
    def __init__(self, loop: Loop, clock: Clock):
        self._loop = loop
        self.seconds = clock.seconds
        self._queue: deque[Callable[[], object]] = deque()
        self._late: deque[Callable[[], object]] = deque()
        self._scheduled = False
        self._ended = 0.0
        """When the pieces of the last turn had ended, if there were more."""
        self._since_late = 0.0
        """How long other pieces have run since the last one that is known to be long."""
        self._turn_began = 0.0
        """When the first request of this turn began; 0: none has."""

    def deadline(self) -> float:
        """When a piece of work that begins now should end."""
        return self.seconds() + PIECE_S

    def is_past(self, deadline: float) -> bool:
        return self.seconds() >= deadline

    def is_over(self, is_heavy: bool = True) -> bool:
        """Whether this turn has done enough for requests, whichever connections they came from."""
        if not self._turn_began:
            self._turn_began = self.seconds()
            self._loop.call_soon(self._next_turn)
            return False
        return self.seconds() - self._turn_began >= (REQUESTS_S if is_heavy else 2 * REQUESTS_S)

    def _next_turn(self) -> None:
        self._turn_began = 0.0

    def soon(self, work: Callable[[], object], *, late: bool = False) -> None:
        """Run a piece of work in one of the next turns."""
        (self._late if late else self._queue).append(work)
        if not self._scheduled:
            self._scheduled = True
            self._ended = self.seconds()
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        queue, late, began = self._queue, self._late, self.seconds()
        end = began + min(max(SHARE * (began - self._ended), TURN_S_MIN), TURN_S)
        try:
            while queue:
                queue.popleft()()
                if self.seconds() >= end:
                    break
            self._since_late += self.seconds() - began
            if late and (not queue or self._since_late >= TURN_S):
                self._since_late = 0.0
                while late:
                    if late.popleft()() is _WOKEN or queue or self.seconds() >= end:
                        break
        finally:  # also after an error, which is the loop's to report
            self._scheduled = bool(queue or late)
            if self._scheduled:
                self._ended = self.seconds()
                self._loop.call_soon(self._run)

    def go_through(
        self, items: Iterable[Item], do: Callable[[Item], object], done: Callable[[], object]
    ) -> None:
        """``do`` it for each item: the first of them now, unless this turn has done enough, and the rest in
        later turns. Then ``done``."""
        left = iter(items)

        def step() -> None:
            deadline = self.deadline()
            for item in left:
                do(item)
                if self.is_past(deadline):
                    self.soon(step)
                    return
            done()

        if self.is_over():
            self.soon(step)
        else:
            step()

    async def each(self, items: Iterable[Item]) -> AsyncIterator[Item]:
        """The items; others have their turn in between whenever a piece has lasted long enough."""
        deadline = self.deadline()
        for item in items:
            yield item
            if self.is_past(deadline):
                await self.turn()
                deadline = self.deadline()

    async def turn(self) -> None:
        """Let the others have their turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.soon(partial(_settle, future), late=True)
        await future


_WOKEN = object()


def _settle(future: asyncio.Future[None]) -> object:
    if future.done():
        return None
    future.set_result(None)
    return _WOKEN
