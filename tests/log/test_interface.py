"""Reads that take time: what a caller of a slow log has to do, and what it costs one of a fast log."""

import asyncio
from collections.abc import Callable

import pytest

from headrace.errors import DataCorrupt, HeadraceError
from headrace.log.interface import ReadPending, completed


def test_a_read_that_is_complete_is_not_awaited() -> None:
    """The loop does not turn for it."""
    reading = completed(lambda: 7)
    with pytest.raises(StopIteration) as ended:
        reading.send(None)
    assert ended.value.value == 7


def test_a_pending_read_is_called_again() -> None:
    """As often as the log asks for it; then with the result, or with the log's error."""

    async def read(errors: list[Exception]) -> tuple[int, int]:
        calls = 0
        loop = asyncio.get_running_loop()

        def then(callback: Callable[[], None]) -> None:
            loop.call_later(0.001, callback)

        def attempt() -> int:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise ReadPending(then)
            if errors:
                raise errors.pop()
            return 7

        return await completed(attempt), calls

    assert asyncio.run(read([])) == (7, 3)
    with pytest.raises(DataCorrupt):
        asyncio.run(read([DataCorrupt("it is damaged")]))


def test_pending_is_no_error() -> None:
    """Code that handles errors of the broker or the disk does not take it for one."""
    assert not issubclass(ReadPending, (HeadraceError, OSError))
