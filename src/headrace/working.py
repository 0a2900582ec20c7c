"""Workers: they call a handler for each message of a subscription, in threads or in tasks.

A message is acknowledged when the handler returns. It is given back with the reason when the handler raises or
takes longer than ``timeout``. Its lease is extended while it waits here and while the handler runs.

::

    running ──stop──▶ stopping: no further message, unread ones go back at once ──▶ handlers return ──▶ left
                          │                                                             ▲
                          └── a handler that does not return within STOP_S: its message goes back ──┘

Rules:
- Any thread (task) may stop a worker, and so may a signal: :func:`stopped_by_signals`.
- A thread cannot be interrupted. When its handler takes too long, the message goes back, another thread takes
  its place, and what the handler returns is ignored. If as many handlers hang as may run at once, the worker
  stops with an error: it would only collect threads.
- An error that is no ``Exception`` (``SystemExit``, for example) stops the worker and is raised by ``run``.
- The broker keeps the order of a key (``ordering="key"``): it delivers the next message of a key when the one
  before is settled. So concurrency does not change that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from headrace.channels import LOOK_S, AsyncConsumer, Consumer, check_count
from headrace.errors import Closed, HeadraceError, InvalidArgument, RequestTimeout
from headrace.model import Message
from headrace.times import check_seconds
from headrace.tracing import process

logger = logging.getLogger("headrace.worker")
Handler = Callable[[Message], None]
"""Of the classes for threads. It returns nothing, so mypy finds a coroutine function that nobody would await."""
AsyncHandler = Callable[[Message], Awaitable[object] | None]
STOP_S = 30.0
"""How long to wait for a handler to finish its message when its worker is stopped."""
HANDLER_S_MAX = 24 * 3600.0


def check_worker(
    handler: object, concurrency: object, timeout: object, *, is_async: bool
) -> float | None:
    """Refuse what cannot work before anything is joined; returns the timeout in seconds."""
    check_handler(handler, is_async=is_async)
    check_count("concurrency", concurrency)
    return None if timeout is None else check_seconds("timeout", timeout, HANDLER_S_MAX)


def check_handler(handler: object, *, is_async: bool) -> None:
    if not callable(handler):
        raise InvalidArgument(f"a handler is a function that takes a message, not {handler!r}")
    parts = (handler, getattr(handler, "__call__", None))  # noqa: B004 - an object may have one
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in parts):
        raise InvalidArgument(f"the handler {_name(handler)} has a yield: its code would never run")
    if not is_async and any(map(inspect.iscoroutinefunction, parts)):
        raise InvalidArgument(
            f"the handler {_name(handler)} is a coroutine function, which threads cannot await: make it a "
            "plain function, or use AsyncBroker or AsyncClient"
        )


def _name(handler: object) -> str:
    return getattr(handler, "__qualname__", None) or repr(handler)


def refuse_awaitable(result: object) -> None:
    """In a thread: what the handler returned was never run, so its message is not done."""
    if not inspect.isawaitable(result):
        return
    end = getattr(result, "close", None) or getattr(result, "cancel", None)
    if end is not None:
        end()
    raise InvalidArgument(
        f"the handler returned a {type(result).__name__}, which threads cannot await: the message is not "
        "handled; use AsyncBroker or AsyncClient"
    )


def _too_long(timeout: float) -> str:
    return f"the handler did not return within {timeout:g} seconds"


@contextlib.contextmanager
def log_failure(name: str) -> Iterator[None]:
    """For a worker in the background: nobody waits for its error."""
    try:
        yield
    except HeadraceError as error:
        logger.error("the worker of %s ends: %s", name, error)


def failed(message: Message, error: BaseException) -> None:
    """Give a message back after its handler failed."""
    logger.error("the handler failed for %r, attempt %d", message, message.attempt, exc_info=error)
    with contextlib.suppress(HeadraceError):  # if the delivery has ended, it is delivered again
        message.nack(reason=f"{type(error).__name__}: {error}")


# --- threads ----------------------------------------------------------------------------------------
class Worker:
    """Calls a handler in threads. ``retire`` gives back what no thread has taken."""

    def __init__(
        self,
        consumer: Consumer,
        handler: Handler,
        name: str,
        retire: Callable[[], None],
        concurrency: int = 1,
        timeout: float | None = None,
    ):
        self.consumer = self._consumer = consumer
        self._handler: Callable[[Message], object] = handler
        self._name = name
        self._retire = retire
        self._concurrency = concurrency
        self._timeout = timeout
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._busy: dict[threading.Thread, tuple[Message, float]] = {}
        """What each thread handles, and since when."""
        self._stuck: set[threading.Thread] = set()
        """Threads whose handlers took too long. Others have taken their places."""
        self._events: SimpleQueue[str] = SimpleQueue()
        """A signal handler may put something in it, whatever the thread does at that moment."""
        self._error: BaseException | None = None

    def start(self) -> None:
        for _ in range(self._concurrency):
            self._add_thread()
        if self._timeout is not None:
            self._spawn(self._watch, "watch").start()

    def _spawn(self, target: Callable[[], None], what: str) -> threading.Thread:
        return threading.Thread(target=target, name=f"headrace-{what}-{self._name}", daemon=True)

    def _add_thread(self) -> None:
        thread = self._spawn(self._work, "worker")
        self._threads.add(thread)
        thread.start()

    def run(self) -> None:
        """Handle messages until the worker is stopped or the subscription ends; raises why it ended."""
        try:
            with stopped_by_signals(partial(self._events.put, "stop")):
                self.start()
                while self._threads - self._stuck:
                    with contextlib.suppress(Empty):
                        if self._events.get(timeout=LOOK_S) == "stop":
                            break
        finally:
            self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Take no further message, give back those that no handler has, and wait for the handlers."""
        self._consumer.halt()
        with contextlib.suppress(Closed):
            self._retire()
        deadline = time.monotonic() + STOP_S
        for thread in list(self._threads - self._stuck):
            # A handler may stop the worker while its last threads are still being started.
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _work(self) -> None:
        thread = threading.current_thread()
        try:
            for message in self._consumer:
                if self._consumer.is_halted:
                    self._consumer.give_back(message)
                    return
                self._handle(thread, message)
                if thread in self._stuck:
                    return
        except HeadraceError as error:
            logger.error("the worker of %s ends: %s", self._name, error)
            self._error = error
        except BaseException as error:
            self._error = error
        finally:
            if self._error is not None:
                self._consumer.halt()
            with self._lock:
                self._threads.discard(thread)
                self._stuck.discard(thread)
            self._events.put("ended")

    def _handle(self, thread: threading.Thread, message: Message) -> None:
        with self._lock:
            self._busy[thread] = message, time.monotonic()
        error: BaseException | None = None
        try:
            with process(message, self._name):
                refuse_awaitable(self._handler(message))
        except BaseException as raised:
            error = raised
        with self._lock:  # the watch may have given the message back in the meantime
            is_ours = self._busy.pop(thread, None) is not None
        if is_ours and error is None:
            with contextlib.suppress(HeadraceError):
                message.ack()
        elif is_ours and error is not None:
            failed(message, error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _watch(self) -> None:
        """In a thread of its own: give back messages whose handlers take too long."""
        assert self._timeout is not None
        pause = threading.Event()
        while self._threads - self._stuck:
            now = time.monotonic()
            with self._lock:
                late = {
                    t: m for t, (m, since) in self._busy.items() if since + self._timeout <= now
                }
                for thread in late:
                    del self._busy[thread]
                    self._stuck.add(thread)
                too_many = len(self._stuck) > self._concurrency
                next_at = min((since for _, since in self._busy.values()), default=now)
            for message in late.values():
                failed(message, RequestTimeout(_too_long(self._timeout), code="handler_timeout"))
                if too_many:
                    self._error = RequestTimeout(
                        f"{_too_long(self._timeout)}, {self._concurrency} times: the worker of "
                        f"{self._name} stops. Give the handler's own calls a timeout",
                        code="handler_timeout",
                    )
                    self._consumer.halt()
                elif not self._consumer.is_halted:
                    self._add_thread()
            pause.wait(min(max(next_at + self._timeout - now, 0.001), self._timeout, LOOK_S))


# --- asyncio ----------------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class AsyncWorker:
    """Calls a handler in tasks. ``retire`` gives back what no task has taken."""

    _consumer: AsyncConsumer
    _handler: AsyncHandler
    _name: str
    _retire: Callable[[], Coroutine[Any, Any, None]]
    _leave: Callable[[], Coroutine[Any, Any, None]]
    _concurrency: int = 1
    _timeout: float | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _retiring: asyncio.Task[None] | None = None

    async def run(self, *, signals: bool = True) -> None:
        """Handle messages until the worker is stopped or the subscription ends; raises why it ended.

        When this is cancelled, the handlers are cancelled, too, and their messages go back.
        """
        loop = asyncio.get_running_loop()
        stop = partial(loop.call_soon_threadsafe, self.halt)
        try:
            with stopped_by_signals(stop) if signals else contextlib.nullcontext():
                self._tasks = [loop.create_task(self._work()) for _ in range(self._concurrency)]
                _, left = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            if left:
                self.halt()
                await asyncio.wait(left, timeout=STOP_S)
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._retiring is not None:
                await self._retiring
            await self._leave()

    def halt(self) -> None:
        """Take no further message; the handlers finish theirs."""
        if not self._consumer.is_halted:
            self._consumer.halt()
            self._retiring = asyncio.get_running_loop().create_task(self._retire())

    async def stop(self) -> None:
        """Take no further message, give back those that no handler has, and wait for the handlers."""
        self.halt()
        mine = asyncio.current_task()
        others = [task for task in self._tasks if task is not mine]
        if others:
            _, left = await asyncio.wait(others, timeout=STOP_S)
            for task in left:
                task.cancel()

    async def _work(self) -> None:
        async for message in self._consumer:
            if self._consumer.is_halted:
                self._consumer.give_back(message)
                return
            await self._handle(message)

    async def _handle(self, message: Message) -> None:
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                with process(message, self._name):
                    result = self._handler(message)
                    if inspect.isawaitable(result):
                        await result
        except TimeoutError as error:
            mine = deadline.expired() and self._timeout is not None
            late = RequestTimeout(_too_long(self._timeout or 0), code="handler_timeout")
            failed(message, late if mine else error)
        except Exception as error:
            failed(message, error)
        except asyncio.CancelledError as error:
            failed(message, error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # not by the handler itself
                raise
        except BaseException as error:
            failed(message, error)
            raise
        else:
            with contextlib.suppress(HeadraceError):
                message.ack()


# --- signals ----------------------------------------------------------------------------------------
_stops: list[Callable[[], object]] = []
"""Stop the workers that run now and listen to signals."""
_before: dict[int, Any] = {}
"""The handlers of signals that ours have replaced."""


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``stop``, a second one does what it did before.

    Only in the main thread, and only if the program has no handler of its own for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stops.append(stop)
    if len(_stops) == 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            if _is_default(signal.getsignal(number)):
                _before[number] = signal.signal(number, _signalled)
    try:
        yield
    finally:
        _stops.remove(stop)
        if not _stops:
            _restore()


def _is_default(handler: Any) -> bool:
    """Also that of ``asyncio.run``, which would cancel the handlers."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(owner, asyncio.Runner)


def _signalled(number: int, frame: object) -> None:
    _restore()
    for stop in list(_stops):
        stop()


def _restore() -> None:
    for number, handler in list(_before.items()):
        if signal.getsignal(number) is _signalled:
            signal.signal(number, handler)
        _before.pop(number, None)
