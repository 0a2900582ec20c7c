"""The commands, run in the process that has the session."""

from tests.cli.conftest import command, headrace

__all__ = ["command", "headrace"]
