"""A file system in which a chosen call fails.

Stands in front of another one (the real one, or :class:`~tests.fakes.SimulatedFiles`), counts
every call, and lets some of them fail before they reach it::

    files = FaultyFiles()
    files.fail("sync", 3)                              # the third sync from now on: EIO
    files.fail("write_at", 1, errno.ENOSPC, short=100) # writes 100 bytes, then fails
    files.fail(None, 17)                               # the 17th call that changes anything

So a test runs a scenario once without faults, reads ``len(files.changes)``, and then once for each N.

What fails are the calls that change something or may wait for the disk: ``CHANGES``, and ``open``.
Composite operations (``replace``, ``make_directory``) are taken apart into the calls they are made
of, so that each step of them can fail too.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.files import Files, Handle, NotAtHand
from tests.fakes.simulated import SimulatedFiles

CHANGES = frozenset(
    {
        "allocate",
        "create",
        "mkdir",
        "remove",
        "remove_tree",
        "rename",
        "sync",
        "sync_directory",
        "truncate",
        "write_at",
    }
)
"""The kinds of calls that change the disk. ``create`` is an ``open`` that makes the file."""


def _error(fault: Fault, path: Path) -> OSError:
    return OSError(fault.errno, os.strerror(fault.errno), str(path))


class Call(NamedTuple):
    """One call that reached this file system, whether it failed or not."""

    kind: str
    path: Path


@dataclass
class Fault:
    """The ``countdown``-th call of a kind fails; None: the ``countdown``-th that changes anything."""

    kind: str | None
    countdown: int
    errno: int = errno.EIO
    short: int | None = None
    """For ``write_at``: this many bytes are written before the failure."""
    repeat: bool = False
    """From then on every such call fails: the disk stays full, or broken."""
    name: str = ""
    """Only calls on files whose name contains this."""
    hits: int = 0

    def meets(self, call: Call) -> bool:
        if self.kind is None:
            right = call.kind in CHANGES
        else:
            right = call.kind == self.kind or (self.kind == "open" and call.kind == "create")
        if not right or self.name not in call.path.name:
            return False
        self.countdown -= 1
        hit = self.countdown == 0 or (self.repeat and self.countdown < 0)
        self.hits += hit
        return hit


class FaultyFiles(Files):
    """``inner`` (the real file system unless another is given) with faults in front of it."""

    def __init__(self, inner: Files | None = None):
        self.inner = inner if inner is not None else Files()
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.refused: list[tuple[Call, int]] = []
        """The calls that a fault met, and its error number."""

    # --- for the test -----------------------------------------------------------------------
    def fail(
        self,
        kind: str | None,
        number: int = 1,
        code: int = errno.EIO,
        *,
        short: int | None = None,
        repeat: bool = False,
        name: str = "",
    ) -> Fault:
        """Plan a fault; the count begins now. See :class:`Fault`."""
        fault = Fault(kind, number, code, short, repeat, name)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults."""
        self.faults.clear()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """No fault meets, nor counts, what is done meanwhile."""
        faults, self.faults = self.faults, []
        try:
            yield
        finally:
            self.faults = faults

    def count(self, kind: str, name: str = "") -> int:
        """How often a kind of call was made, on files whose name contains ``name``."""
        return sum(call.kind == kind and name in call.path.name for call in self.calls)

    @property
    def counts(self) -> Counter[str]:
        return Counter(call.kind for call in self.calls)

    @property
    def changes(self) -> list[Call]:
        """The calls that changed something, or were to."""
        return [call for call in self.calls if call.kind in CHANGES]

    def _meet(self, kind: str, path: Path) -> Fault | None:
        call = Call(kind, path)
        self.calls.append(call)
        # Every fault counts every call, so that two planned faults do not shift each other.
        hits = [fault for fault in self.faults if fault.meets(call)]
        if not hits:
            return None
        self.refused.append((call, hits[0].errno))
        return hits[0]

    def _pass(self, kind: str, path: Path) -> None:
        fault = self._meet(kind, path)
        if fault is not None:
            raise _error(fault, path)

    # --- files -----------------------------------------------------------------------------
    def open(self, path: Path, *, write: bool = False, create: bool = False) -> Handle:
        self._pass("create" if create and not self.inner.exists(path) else "open", path)
        return self.inner.open(path, write=write, create=create)

    def size(self, handle: Handle) -> int:
        return self.inner.size(handle)

    def identity(self, handle: Handle) -> str:
        return self.inner.identity(handle)

    def read_at(self, handle: Handle, position: int, length: int) -> bytes:
        self._pass("read_at", handle.path)
        return self.inner.read_at(handle, position, length)

    def read_at_once(self, handle: Handle, position: int, length: int) -> bytes:
        self._pass("read_at_once", handle.path)
        if any(
            fault.kind == "read_at" for fault in self.faults
        ):  # what cannot be read is in no cache
            raise NotAtHand
        return self.inner.read_at_once(handle, position, length)

    def write_at(self, handle: Handle, position: int, buffers: Sequence[bytes]) -> int:
        fault = self._meet("write_at", handle.path)
        if fault is None:
            return self.inner.write_at(handle, position, buffers)
        if fault.short:
            self.inner.write_at(handle, position, [b"".join(buffers)[: fault.short]])
        raise _error(fault, handle.path)

    def sync(self, handle: Handle) -> None:
        fault = self._meet("sync", handle.path)
        if fault is not None:
            if isinstance(self.inner, SimulatedFiles):
                self.inner.lose_unsynced(handle)
            raise _error(fault, handle.path)
        self.inner.sync(handle)

    def allocate(self, handle: Handle, position: int, length: int) -> None:
        self._pass("allocate", handle.path)
        self.inner.allocate(handle, position, length)

    def truncate(self, handle: Handle, size: int) -> None:
        self._pass("truncate", handle.path)
        self.inner.truncate(handle, size)

    def lock(self, handle: Handle) -> bool:
        self._pass("lock", handle.path)
        return self.inner.lock(handle)

    # --- directories -----------------------------------------------------------------------
    def exists(self, path: Path) -> bool:
        return self.inner.exists(path)

    def is_directory(self, path: Path) -> bool:
        return self.inner.is_directory(path)

    def make_directory(self, path: Path) -> None:
        for directory in (*reversed(path.parents), path):
            if not self.inner.exists(directory):
                self._pass("mkdir", directory)
                self.inner.make_directory(directory)
                self._pass("sync_directory", directory.parent)

    def make_directories(self, parent: Path, names: Iterable[str]) -> set[str]:
        wanted = list(names)
        for name in wanted:
            if not self.inner.exists(parent / name):
                self._pass("mkdir", parent / name)
        made = self.inner.make_directories(parent, wanted)
        self._pass("sync_directory", parent)
        return made

    def make_private(self, path: Path) -> int:
        return self.inner.make_private(path)

    def names(self, path: Path) -> list[str]:
        return self.inner.names(path)

    def file_size(self, path: Path) -> int:
        return self.inner.file_size(path)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename", target)
        self.inner.rename(source, target)

    def remove(self, path: Path) -> None:
        self._pass("remove", path)
        self.inner.remove(path)

    def remove_tree(self, path: Path) -> None:
        self._pass("remove_tree", path)
        self.inner.remove_tree(path)

    def sync_directory(self, path: Path) -> None:
        self._pass("sync_directory", path)
        self.inner.sync_directory(path)

    def free_bytes(self, path: Path) -> int:
        return self.inner.free_bytes(path)
