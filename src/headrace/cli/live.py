"""A screen that is drawn again and again, for ``headrace top`` and ``headrace groups --watch``.

If the broker goes away, the screen says so, keeps its last numbers, and goes on when the broker is back. An
error that another try does not change (a right that is missing) ends the command. Where there is no
terminal, nothing is drawn: the command prints once.
"""

from __future__ import annotations

import logging
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Generic, TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from headrace.cli.printing import console
from headrace.cli.values import duration_option
from headrace.errors import Forbidden, HeadraceError, InvalidArgument, NotFound, Unauthenticated

INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 3600.0
PATIENCE_S = 5.0
"""How long one question may take while somebody watches."""
Interval = Annotated[
    float,
    duration_option(
        "--interval",
        "-i",
        help="Time between two refreshes: seconds, or 1m.",
        low=INTERVAL_S_MIN,
        high=INTERVAL_S_MAX,
    ),
]
FOR_GOOD = (Unauthenticated, Forbidden, InvalidArgument, NotFound)
Seen = TypeVar("Seen")


class Screen(Generic[Seen]):
    """``ask`` the broker, ``draw`` the answer and the one before it; until somebody quits."""

    def __init__(
        self,
        ask: Callable[[], Seen],
        draw: Callable[[Seen, Seen | None, float], RenderableType],
        interval: float,
    ):
        self._ask, self._draw = ask, draw
        self._interval = interval
        self._last: Seen | None = None
        self._before: Seen | None = None
        self._problem = ""

    def run(self) -> None:
        with (
            _silent_client(),
            _keys() as wait,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                self.look()
                live.update(self.picture(), refresh=True)
                until = time.monotonic() + self._interval
                while (key := wait(until - time.monotonic())) is not None:
                    if key in "qQ\x04":
                        return
                    if key in "+-":
                        factor = 2 if key == "+" else 0.5
                        changed = self._interval * factor
                        self._interval = min(max(changed, INTERVAL_S_MIN), INTERVAL_S_MAX)
                    live.update(self.picture(), refresh=True)
                    if key == " ":
                        break

    def look(self) -> None:
        try:
            seen = self._ask()
        except FOR_GOOD:
            raise
        except HeadraceError as error:
            self._problem = f"{error.message.rstrip('.')}. Trying again"
            self._before = None  # rates would be those of the pause
        else:
            self._before, self._last, self._problem = self._last, seen, ""
            if not self._is_fresh:
                self._before = None
            self._is_fresh = True
            return
        self._is_fresh = False

    _is_fresh = True

    def picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._problem:
            parts.append(Text(self._problem, style="bold red"))
        if self._last is not None:
            parts.append(self._draw(self._last, self._before, self._interval))
        return Group(*parts)


@contextmanager
def _silent_client() -> Iterator[None]:
    """The client's own lines about the connection would spoil the screen."""
    logger = logging.getLogger("headrace.client")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """Wait for a key, for some seconds; None if there was none."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(max(seconds, 0.0))
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> str | None:
        ready, _, _ = select.select([descriptor], [], [], max(seconds, 0.0))
        return (sys.stdin.read(1) or "q") if ready else None

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
