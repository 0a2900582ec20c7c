"""Commands in order: one that depends on those before it waits until they are answered.

Publishes follow each other without waiting; that is what makes pipelining fast. A fetch behind a
publish must see it, so it waits, and everything behind it waits with it. What takes its time, such as
making or deleting a topic, lets nothing pass before it is answered. While something waits, the socket is
not read, so a waiting line is never longer than what had arrived.

``patient`` turns also wait until the client reads: what it asks for is not put together before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.server.flow import Outbox

Item = TypeVar("Item")


class Turns(Generic[Item]):
    def __init__(
        self,
        outbox: Outbox,
        handle: Callable[[Item], None],
        depends: Callable[[Item], bool],
        *,
        patient: bool = False,
    ):
        self._outbox = outbox
        self._handle = handle
        self._depends = depends
        self._patient = patient
        self._line: deque[Item] = deque()
        self._barrier = False
        """Something that others may depend on is under way."""
        self._going = False
        outbox.before_idle = self._go_on

    def add(self, item: Item) -> None:
        if self._line or self._must_wait(item):
            self._line.append(item)
            self._outbox.hold(True)
        else:
            self._begin(item)

    @property
    def are_free(self) -> bool:
        """Whether something that depends on nothing may begin at once."""
        return not self._line and not (self._barrier and self._outbox.unanswered)

    def _must_wait(self, item: Item) -> bool:
        outbox = self._outbox
        busy = outbox.unanswered or (self._patient and not outbox.writable)
        return bool(busy) and (self._barrier or self._depends(item))

    def _begin(self, item: Item) -> None:
        self._handle(item)
        self._barrier = bool(self._outbox.unanswered) and self._depends(item)

    def _go_on(self) -> None:
        """Everything so far is answered: the next ones, up to one that has to wait again."""
        if (
            self._going or not self._line
        ):  # going: one was answered at once; the loop is at it already
            return
        self._going = True
        try:
            while self._line and not self._must_wait(self._line[0]):
                self._begin(self._line.popleft())
        finally:
            self._going = False
        if not self._line:
            self._outbox.hold(False)
