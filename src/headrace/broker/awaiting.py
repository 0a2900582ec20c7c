"""Awaiting calls that answer through a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.log.interface import completed
from headrace.publication import settle


async def done(call: Callable[..., Any], *args: Any) -> None:
    """Await a call that answers ``done(error)``, its last argument."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await completed(lambda: call(*args, partial(settle, future, None)))
    await future


async def answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a call that answers ``done(value, error)``."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    await completed(lambda: call(*args, partial(settle, future), **kwargs))
    return await future
