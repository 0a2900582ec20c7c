"""What every test may use, and how random ones are run.

``make test`` tries the same examples each time, so that what fails there is what was changed.
``HYPOTHESIS_PROFILE=explore`` tries others, more of them, and prints what reproduces a failure
(``@reproduce_failure``, the smallest example); ``=thorough`` is for a night.
"""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from headrace.testing import RunningServer
from tests.fakes.steady import Steadiness

_COMMON = settings(
    deadline=None,  # a slow machine is not a bug
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("default", _COMMON, max_examples=60, derandomize=True)
settings.register_profile("explore", _COMMON, max_examples=200)
settings.register_profile("thorough", _COMMON, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def steady() -> Iterator[Callable[[RunningServer], None]]:
    """``steady(server)``: the test fails if something keeps the server's loop for too long."""
    steadiness = Steadiness()
    gc.freeze()  # as a server does: else the collector walks over everything that pytest has loaded
    yield steadiness.watch
    gc.unfreeze()
    steadiness.check()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was not tried, because a program is missing that the tests could not get."""
    reasons = [str(r.longrepr[-1]) for r in terminalreporter.stats.get("skipped", [])]
    for reason in sorted({r[r.index("NOT TRIED") :] for r in reasons if "NOT TRIED" in r}):
        terminalreporter.write_line(reason, red=True, bold=True)
