"""A fork copies objects, but not the threads that they need.

A client or an embedded broker runs on a loop in a thread of its own. In a forked child
(``multiprocessing``, gunicorn, Celery) that thread does not exist: a call would wait for ever. So every
object that needs a thread is told in the child, before anything else runs there, and refuses calls with
an error.

Rules: ``forked`` calls no method of a loop, because the fork may have interrupted the loop at any point.
It creates its locks again, because another thread may have held them. Loops are put aside and never freed:
to free one would remove its sockets from the epoll instance, which the parent uses, too.

Rejected: an automatic reconnect in the child. Requests under way and subscriptions belong to the parent; a
child that wants its own calls ``connect()``.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def forked(self) -> None:
        """Called in the child: the thread that this object used does not exist here."""


_watched: WeakSet[Forkable] = WeakSet()
_aside: list[object] = []


def watch(it: Forkable) -> None:
    _watched.add(it)


def put_aside(*things: object) -> None:
    """Keep objects that must not be freed in this process."""
    _aside.extend(things)


def _tell() -> None:
    for it in list(_watched):
        it.forked()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_tell)
