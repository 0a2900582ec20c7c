"""A blocking shell around an asyncio core: ``Broker`` around ``AsyncBroker``, ``BrokerClient`` around
``AsyncClient``.

The core runs on an event loop in a thread of its own; the shell passes calls to it. The shell's methods are
derived from those of the core (:func:`blocking`), so both have the same arguments and results.

Rules:
- Any method may be called from any thread, except from the shell's own.
- To close, the shell first lets no further call through (``_gate``), then answers every call that came
  through before. So a call that races with closing succeeds or raises ``Closed``, and never waits for a loop
  that has ended.
- A shell that is open when the program ends is closed then, so that nothing that was published is lost.
- In a forked child the thread does not exist (``forking.py``): the shell raises an error instead of waiting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from headrace.clock import new_loop
from headrace.errors import Closed, HeadraceError, InvalidArgument
from headrace.forking import put_aside, watch
from headrace.publication import Pending

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Shell:
    _core: Any
    """The core, which runs on the loop."""
    _kind = "broker"
    """The name of the core in error messages."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        self._is_forked = False
        watch(self)

    def close(self) -> None:
        raise NotImplementedError

    def _not_open(self) -> Closed:
        """Why a call is refused."""
        raise NotImplementedError

    # --- the thread -------------------------------------------------------------------------
    def _start(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Start the thread and run ``begin`` in it. Returns False if the thread already runs."""
        with self._gate:
            if self._loop is not None:
                return False
            self._is_forked = False
            self._loop = new_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name=f"headrace-{self._kind}", daemon=True
            )
            self._thread.start()
        try:
            self._run(begin())
        except BaseException:
            self._stop()
            raise
        _open.add(self)
        return True

    def _stop(self) -> None:
        """End the thread. Calls that still wait in it raise ``Closed``."""
        _open.discard(self)
        with self._gate:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def forked(self) -> None:
        """In a child process: the thread stays with the parent."""
        self._gate = threading.Lock()
        if self._loop is None:
            return
        put_aside(self._loop, self._thread, self._core)
        _open.discard(self)
        self._loop = self._thread = None
        self._is_forked = True

    # --- crossing over ----------------------------------------------------------------------
    def _call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback on the loop, soon. If the shell is closed, do nothing."""
        if self._is_forked:
            raise self._not_open()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *args)

    def _begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop, without waiting for it."""
        with self._gate:
            if self._loop is None:
                coroutine.close()
                raise self._not_open()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for its result."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgument(
                f"this would wait for the thread that it runs in; do not call the {self._kind} from a "
                "callback of its own thread"
            )
        future = self._begin(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise Closed(f"the {self._kind} was closed during this call") from None
        except BaseException:  # Ctrl-C: nobody has what it would open, or could close it
            future.cancel()
            raise


def documented_as(
    method: Callable[..., Any],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Give a method of a shell the documentation of the core's, without ``async`` and ``await``."""

    def document(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        text = method.__doc__ or ""
        function.__doc__ = text.replace("async with", "with").replace("async for", "for")
        function.__doc__ = function.__doc__.replace("await ", "")
        return function

    return document


def blocking(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """A method of a core as a method of its shell: the same arguments, the same result, blocking."""
    name = method.__name__

    @documented_as(method)
    @functools.wraps(method)
    def forward(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = self._run(getattr(self._core, name)(*args, **kwargs))
        return result

    return forward


def nowait(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Pending[Result]]:
    """A method of a core as a method of its shell that does not wait, so that many calls can run at once."""
    name = method.__name__

    @documented_as(method)
    @functools.wraps(method)
    def forward(
        self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Pending[Result]:
        pending = Pending[Result](self._core._failures)

        async def run() -> None:
            task = cast(asyncio.Task[None], asyncio.current_task())
            self._core._background.add(task)  # flush and close wait for it
            task.add_done_callback(self._core._background.discard)
            try:
                pending.settle(await getattr(self._core, name)(*args, **kwargs), None)
            except asyncio.CancelledError:
                fail(Closed(f"the {self._kind} was closed during this call"))
                raise
            except Exception as error:
                fail(error if isinstance(error, HeadraceError) else HeadraceError(repr(error)))

        def fail(error: HeadraceError) -> None:
            pending.settle(None, error)
            self._core._failures.add(error, pending)

        self._begin(run())
        return pending

    forward.__name__ = f"{name}_nowait"
    forward.__doc__ = (forward.__doc__ or "").replace(f".{name}(", f".{name}_nowait(")
    return forward


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _cancel_all() -> None:
    """End every call that still waits on this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_open: set[Shell] = set()


@atexit.register
def _close_all() -> None:
    for shell in list(_open):
        with contextlib.suppress(HeadraceError):
            shell.close()
