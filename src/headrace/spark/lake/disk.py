"""The disk of lake tables: :class:`headrace.files.Files`, with second names for files.

Everything that decides what is in a table goes through it, so that tests can cut the power at every
step. Only the rows themselves are written by pyarrow (``writing``), and counted after they were synced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from headrace.files import Files


class Disk(Files):
    """The real file system."""

    def link(self, source: Path, target: Path) -> None:
        """A second name for the same file."""
        os.link(source, target)

    def is_same(self, one: Path, other: Path) -> bool:
        """Whether both names are there, and of one file."""
        try:
            return os.path.samefile(one, other)
        except FileNotFoundError:
            return False

    def touch(self, path: Path) -> None:
        """Changed now."""
        os.utime(path)

    def modified(self, path: Path) -> float:
        return path.stat().st_mtime

    def walk(self, path: Path) -> Iterator[Path]:
        """Every file below."""
        for directory, _, names in os.walk(path):
            for name in names:
                yield Path(directory) / name
