"""One protocol on one connection: bytes become requests, and answers become bytes.

A :class:`Session` is what ``connection.py`` feeds. :class:`RequestSession` is one whose parser returns requests
(text, binary, HTTP): it has them begin in order, checks the login, waits in a cluster until this node knows what others
have answered, and answers for errors, ours included.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headrace import limits
from headrace.errors import HeadraceError, QueueFull, Unauthenticated
from headrace.limits import COUNTED_BYTES_MIN
from headrace.operations.results import HeldSubscription
from headrace.server.flow import RequestQueue
from headrace.server.logins import Credentials

if TYPE_CHECKING:
    from headrace.server.connection import Connection

MEASURED_EVERY = 100
"""Requests that arrived together and begin together: after so many the time is looked at."""
Item = TypeVar("Item")


class Session:
    """One protocol on one connection."""

    protocol = ""
    hears_goodbye = False
    """Whether it still reads after our side has closed."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.hub = connection.hub
        self.engine = connection.hub.engine
        self.publishing = self.engine.publishing
        self.outbox = connection.outbox

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def lost(self) -> None:
        """The connection is gone: give back everything it held."""

    def check_deadline(self, now: float) -> None:
        """About once a second, while the connection is watched: is the client too slow?"""
        if now - self.connection.since > self.hub.idle_s:
            self.connection.overdue()

    def held(self) -> Iterable[HeldSubscription]:
        """The subscriptions of the client, and how many messages it holds of each."""
        return ()

    def access_changed(self) -> None:
        """The rights of the client may have changed: end what it may not have any more."""

    def expel(self, error: HeadraceError) -> None:
        """The login is not valid any more: say so, and close."""

    def say_goodbye(self) -> bool:
        """The server closes. True if the protocol has a last word, and the client answers it."""
        return False


class Parser(Protocol[Item]):
    """Bytes to requests, without I/O (``headrace/wire``)."""

    error: HeadraceError | None
    """Set when the stream makes no sense any more."""

    @property
    def buffered(self) -> int:
        """Bytes of a request that is not complete."""

    def feed(self, data: bytes) -> list[Item]: ...


class RequestSession(Session, Generic[Item]):
    """A session whose parser gives requests. They begin in order, and each is answered."""

    login = ""
    """What a client must send first where a token is needed; empty: each request authenticates."""

    def __init__(self, connection: Connection, parser: Parser[Item]):
        super().__init__(connection)
        self._parser = parser
        self._requests: RequestQueue[Item | HeadraceError] = RequestQueue(
            self.outbox, self._handle, self.engine.pace
        )

    def feed(self, data: bytes) -> None:
        add, depends = self._requests.add, self.depends
        self._requests.begin_turn()
        items, incomplete = self._parser.feed(data), self.outbox.incomplete
        if items and incomplete.size:
            incomplete.clear()  # it is complete now, and counts as a request
        for number, item in enumerate(items):
            add(item, depends(item), not number % MEASURED_EVERY, self.may_be_long(item))
        held = self._parser.buffered
        if held >= COUNTED_BYTES_MIN or incomplete.size:
            refusal = incomplete.refusal(held - incomplete.size) if held > incomplete.size else None
            incomplete.set(held if held >= COUNTED_BYTES_MIN and not self.outbox.closed else 0)
            if refusal is not None:
                add(refusal, True)
                return
        if self._parser.error is not None:
            add(self._parser.error, True)
        elif (
            not self.connection.authenticated
            and not self.connection.logging_in
            and self.login
            and self._parser.buffered > limits.UNAUTHENTICATED_BYTES_MAX
        ):
            add(Unauthenticated(self.login), True)

    def _handle(self, item: Item | HeadraceError) -> None:
        connection = self.connection
        if connection.closing or connection.session is not self:
            return
        if isinstance(item, HeadraceError):
            self.end(item)
            return
        if not connection.authenticated and self.login and not self.is_open(item):
            self.fail(item, Unauthenticated(self.login))
            connection.close()
            return
        cluster = self.engine.cluster
        if cluster is None or connection.is_node or not self.depends(item) or self.is_fresh(item):
            self._begin(item)
        else:
            self._begin_later(item, cluster.fresh(self.topics_in(item)))

    def _begin_later(self, item: Item, fresh: Awaitable[None]) -> None:
        """When this node knows all that others have answered before. Its answer has its place meanwhile."""
        slot = self.outbox.reserve()

        async def begin() -> None:
            try:
                await fresh
            except HeadraceError as error:
                self.fail(item, error)
            except Exception:
                self.fail(item, self.connection.bug())
            else:
                if not self.connection.closing and self.connection.session is self:
                    self._begin(item)
            finally:  # its answer has a place of its own by now, and others wait for this one
                slot.fill(b"")

        self.connection.start(begin())

    def is_fresh(self, item: Item) -> bool:
        """Whether this node of a cluster knows all that the request is about."""
        return False

    def topics_in(self, item: Item) -> tuple[str, ...]:
        """The topics that a request is about to read, as far as that can be told."""
        return ()

    def known_topics(self, words: list[str]) -> tuple[str, ...]:
        return tuple(word for word in words if self.engine.topics.get(word) is not None)

    def _begin(self, item: Item) -> None:
        connection = self.connection
        try:
            self.begin(item)
        except HeadraceError as error:
            missing = error.missing_topic if isinstance(error, QueueFull) else ""
            if missing and self.engine.cluster is not None:
                self._begin_later(item, self.engine.cluster.ensure(missing))
            else:
                self.fail(item, error.with_traceback(None))
        except Exception:
            self.fail(item, connection.bug())
        if connection.is_metered:  # after it: now it is known who has sent an HTTP request
            connection.charge(requests=self.requests_in(item))

    def log_in(
        self,
        item: Item,
        credentials: Credentials,
        answer: bytes,
        later: Callable[[Coroutine[Any, Any, bytes]], None],
    ) -> None:
        """Carry out a login; ``later`` answers it if that takes time. One that fails is the last request."""
        connection = self.connection
        try:
            if connection.log_in_at_once(credentials):
                self.outbox.send(answer)
                return
        except HeadraceError as error:
            self.fail(item, error)
            connection.close()
            return

        async def log_in() -> bytes:
            try:
                await connection.log_in(credentials)
            except HeadraceError:
                connection.close()
                raise
            return answer

        later(log_in())

    def requests_in(self, item: Item) -> int:
        """How many requests these are, for the quotas."""
        return 1

    def depends(self, item: Item) -> bool:
        """Whether everything before the request must be answered first."""
        raise NotImplementedError

    def may_be_long(self, item: Item) -> bool:
        """Whether the time of the turn, which all connections share, is looked at before it begins."""
        return self.depends(item)

    def is_open(self, item: Item) -> bool:
        """Whether the request is allowed before the login."""
        return False

    def begin(self, item: Item) -> None:
        """Answer the request, now or later, or raise why not."""
        raise NotImplementedError

    def fail(self, item: Item, error: HeadraceError) -> None:
        """Answer the request with an error."""
        raise NotImplementedError

    def end(self, error: HeadraceError) -> None:
        """Say why the stream cannot be read any further, and close the connection."""
        raise NotImplementedError
