"""A fork copies objects and not the threads that they need.

A client or a broker inside a program runs on a loop in a thread of its own. In a child that was forked
(``multiprocessing``, gunicorn, Celery) nobody runs that loop: a call would wait for ever. So whatever
needs a thread is told in the child, before anything else runs there, and refuses with a sentence.

Rules: ``forked`` calls nothing of a loop, which may have been in the midst of anything, and makes its
locks anew, which another thread may have held. Loops are put aside and never freed: freeing one would
take its sockets out of the epoll instance, which is the parent's, too.

Rejected: connecting again in the child by itself. What was on its way, and the subscriptions, are the
parent's; a child that is to have its own says so with ``connect()``.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def forked(self) -> None:
        """In the child: what was shared with a thread is not any more."""


_watched: WeakSet[Forkable] = WeakSet()
_aside: list[object] = []


def watch(it: Forkable) -> None:
    _watched.add(it)


def put_aside(*things: object) -> None:
    """Keep what must not be freed here."""
    _aside.extend(things)


def _tell() -> None:
    for it in list(_watched):
        it.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_tell)
