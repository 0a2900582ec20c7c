"""How the tests of the commands run them: in this process, or as a shell would."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.settings import SETTINGS
from headrace.testing import RunningServer

SCRIPT = Path(sys.executable).with_name("headrace")
"""The command as it is installed."""


class Ran(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]

    @property
    def rows(self) -> list[list[str]]:
        """A table, cell by cell, its titles first."""
        return [line.split() for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Ran]


def clean_environment() -> dict[str, str]:
    """The environment without the settings of the developer's own broker."""
    ours = {name for setting in SETTINGS for name in setting.environment}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("HEADRACE_")
    }


class Stdin(io.TextIOWrapper):
    """Standard input: a file, or a terminal at which somebody types."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


def stdin_of(text: str | bytes, *, terminal: bool = False) -> io.TextIOWrapper:
    stdin = Stdin(io.BytesIO(text.encode() if isinstance(text, str) else text))
    stdin.is_terminal = terminal
    return stdin


def run_script(*arguments: str, input: str | None = None, **environment: str) -> Ran:
    """As a process of its own, to its end."""
    ended = subprocess.run(
        [SCRIPT, *arguments],
        input="" if input is None else input,
        capture_output=True,
        text=True,
        env=clean_environment() | environment,
        timeout=60,
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def start_script(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command as a process; the caller stops it."""
    return subprocess.Popen(
        [SCRIPT, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | environment,
    )


def is_followed(server: RunningServer, pattern: str) -> bool:
    """Whether a client has a plain subscription on the pattern."""
    return server.call(lambda: pattern in [each.pattern for each in server.engine._followers])
