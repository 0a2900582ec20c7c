"""What every front end of the broker must do, in words that none of them owns.

A :class:`FrontEnd` is one way to the broker: embedded, over text, over frames, through a client. It opens
:class:`Session` objects (a program that uses the broker), and these open :class:`Inbox` objects (where
messages arrive). The contract is written once, against these three.

To add a front end: subclass the three in a file of your own and put the class into ``FRONT_ENDS`` in
``conftest.py``. What it cannot do by its nature stands in ``cannot``, with the reason; a test that needs it
is skipped with that reason, so that it is seen (``pytest -rs``), and ``test_abilities.py`` has the list.

Rules for adapters: everything waits with a timeout; when a call returns, the broker has done it; an error
is a ``HeadraceError`` with the broker's code.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from headrace.model import DeadLetter, Message, Scheduled

Result = TypeVar("Result")
WAIT_S = 15.0
"""Long enough for a busy machine; a test that holds does not wait for it."""

# What a front end may lack.
HEADERS = "show headers, keys and ids"
DEAD_LETTERS = "list and redrive dead letters"
SCHEDULE = "list and cancel delayed messages"
SEEK = "move a subscription"
DUPLICATE = "say that a publish was a repetition"
CLASSES = "say of which class an error is"
STAY = "stay connected over a restart"
MEMBERSHIP = "be a member while it is not asking for a message"
CAPITALS = "tell capitals in the names of headers"
JOBS = "stage and commit batches, and follow positions"
ABILITIES = (
    HEADERS, DEAD_LETTERS, SCHEDULE, SEEK, DUPLICATE, CLASSES, STAY, MEMBERSHIP, CAPITALS, JOBS,
)  # fmt: skip


@dataclass
class Got:
    """A message as it arrived."""

    value: bytes | None
    offset: int
    topic: str = ""
    partition: int = 0
    attempt: int = 1
    key: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    id: UUID | None = None
    timestamp: int = 0
    handle: Any = None
    """What the adapter needs to settle it."""

    @classmethod
    def of(cls, message: Message) -> Got:
        return cls(
            message.value,
            message.offset,
            message.topic,
            message.partition,
            message.attempt,
            message.key,
            dict(message.headers),
            message.id,
            message.timestamp,
            message,
        )


@dataclass
class Stored:
    """What a publish was answered with."""

    offset: int | None
    id: UUID | None = None
    duplicate: bool = False


class Inbox(ABC):
    """Where the messages of one subscription arrive."""

    @abstractmethod
    def get(self, timeout: float = WAIT_S) -> Got:
        """The next message; ``RequestTimeout`` without one, ``Closed`` when there are no more."""

    @abstractmethod
    def ack(self, got: Got) -> None:
        """``StaleDelivery`` if the broker does not take it."""

    @abstractmethod
    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None: ...

    @abstractmethod
    def extend(self, got: Got, seconds: float | None = None) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Leave; what was not settled goes back."""

    def take(self, count: int) -> list[Got]:
        return [self.get() for _ in range(count)]

    def values(self, count: int) -> list[bytes]:
        return [got.value for got in self.take(count)]


class Session(ABC):
    """One user of the broker. Settings and options have the names of the API everywhere."""

    @abstractmethod
    def create_topic(self, name: str, **settings: Any) -> None: ...

    @abstractmethod
    def delete_topic(self, name: str) -> None: ...

    @abstractmethod
    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored: ...

    @abstractmethod
    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]: ...

    @abstractmethod
    def subscribe(self, topic: str) -> Inbox:
        """A plain subscription: everything from now on."""

    @abstractmethod
    def create_subscription(self, name: str, topic: str, **settings: Any) -> None: ...

    @abstractmethod
    def delete_subscription(self, name: str, topic: str) -> None: ...

    @abstractmethod
    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        """Become a member of a subscription; made with defaults if it is not there."""

    @abstractmethod
    def stats(self, name: str, topic: str) -> dict[str, Any]: ...

    @abstractmethod
    def close(self) -> None: ...

    # What some cannot do.
    def seek(self, name: str, topic: str, to: Any) -> None:
        raise NotImplementedError

    def dead_letters(self, name: str) -> list[DeadLetter]:
        raise NotImplementedError

    def redrive(self, name: str) -> int:
        raise NotImplementedError

    def scheduled(self, topic: str) -> list[Scheduled]:
        raise NotImplementedError

    def cancel(self, id: UUID) -> None:
        raise NotImplementedError

    def job(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """``stage``, ``commit_staged``, ``abort_staged``, ``positions``, ``wait_for``, ``advance``."""
        raise NotImplementedError


class FrontEnd(ABC):
    """A broker with one way to it."""

    name: ClassVar[str]
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, directory: Path):
        self.directory = directory
        self._sessions: list[Session] = []

    def open(self) -> Session:
        session = self.make_session()
        self._sessions.append(session)
        return session

    @abstractmethod
    def make_session(self) -> Session: ...

    @abstractmethod
    def restart(self) -> None:
        """Stop the broker and start it again on the same directory."""

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self.stop()

    @abstractmethod
    def stop(self) -> None: ...


class LoopThread:
    """An event loop in a thread, for front ends that speak asyncio."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], timeout: float = WAIT_S) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()
