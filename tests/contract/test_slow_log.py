"""The contract over logs whose reads complete later, as those of an engine over a network do.

Nothing of it may depend on a read that answers at once. Every front end has its own way of waiting for
one, so each takes part; the tests that read most are enough.
"""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker import engine
from headrace.log.storage import DiskStorage, MemoryStorage
from tests.contract import test_publishing, test_settling, test_subscribing
from tests.fakes import SlowStorage

DELAY_S = 0.002
"""Long enough that a read is not there in the same turn of the loop."""

globals().update(
    {
        f"{name}__{module.__name__.rpartition('.test_')[2]}": test
        for module in (test_publishing, test_settling, test_subscribing)
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowed(kind: Callable[..., Any]) -> Callable[..., SlowStorage]:
        def make(*args: Any, loop: Any, **more: Any) -> SlowStorage:
            return SlowStorage(kind(*args, loop=loop, **more), loop, DELAY_S)

        return make

    monkeypatch.setattr(engine, "DiskStorage", slowed(DiskStorage))
    monkeypatch.setattr(engine, "MemoryStorage", slowed(MemoryStorage))
