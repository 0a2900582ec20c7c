"""A disk in memory that can lose power.

It implements all of :class:`headrace.files.Files` and keeps the page cache apart from the platter.
``crash(random)`` keeps everything that was synced and a random part of the rest::

    written since the last sync    each sector of the file is as it was after any of those writes
    the length of the file         as it was after any of the writes, allocations and truncations
    names since the last           each create, rename and remove survives or not; with ``ordered`` a
      sync_directory               prefix of them survives, as on a journaling file system
    a directory whose own name     gone with its content
      is lost

Sectors are independent of each other and of the length, so a file may be long and full of zeros,
or have its end and not its middle. A sector is never worse than before: what was synced in it stays
(disks write sectors whole). The smaller the sector, the harsher the test.

``kill()`` ends only the process: it loses its handles and locks, and nothing else.

A failed sync (``lose_unsynced``, which :class:`~tests.fakes.FaultyFiles` calls) does what Linux
does: the pages read well, count as clean, the next sync succeeds, and they never reach the disk.

``capacity`` bounds the bytes of all files together; beyond it, a write ends short with ``ENOSPC``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from headrace.files import Files, Handle, NotAtHand

SECTOR_BYTES = 512
_Write = tuple[int, bytes]
_Change = _Write | int  # bytes at a position, or a new length
_KEEP = (0.0, 0.1, 0.5, 0.9, 1.0)
"""A crash is sometimes kind and sometimes cruel: how likely what was not synced is kept."""


IN_ORDER = 0.3
"""How likely a file is, after a crash, exactly as it was at some moment since its last sync."""


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


def _parts(path: Path) -> tuple[str, ...]:
    """The names on the way to a path; there is one root, and relative paths begin there too."""
    return path.parts[1:] if path.is_absolute() else path.parts


class _File:
    """``data`` is what the system sees; ``stored`` with all of ``changes`` applied would be it."""

    def __init__(self, content: bytes | bytearray = b""):
        self.data = bytearray(content)
        self.stored = bytearray(content)
        self.changes: list[_Change] = []
        self.locked_by: Handle | None = None

    def change(self, change: _Change) -> None:
        _apply(self.data, change)
        self.changes.append(change)

    def sync(self) -> None:
        for change in self.changes:
            _apply(self.stored, change)
        self.changes.clear()

    def crash(self, random: Random, sector: int, garbage: bool) -> None:
        """Choose, for the length and for each sector, after how many changes it was written."""
        if self.changes:
            steps = len(self.changes)
            keep = random.choice(_KEEP)
            # Now and then the disk has simply written in order, up to some point.
            point = random.randint(0, steps) if random.random() < IN_ORDER else None
            lengths = _lengths(len(self.stored), self.changes)
            length = lengths[_pick(random, steps, keep) if point is None else point]
            chosen: dict[int, list[int]] = {}
            for number in _touched(lengths, self.changes, sector):
                step = _pick(random, steps, keep) if point is None else point
                chosen.setdefault(step, []).append(number)
            result = bytearray(max(lengths))
            result[: len(self.stored)] = self.stored
            state = bytearray(self.stored)
            for step in range(steps + 1):
                if step:
                    _apply(state, self.changes[step - 1])
                for number in chosen.get(step, ()):
                    low, high = number * sector, min(number * sector + sector, len(result))
                    part = bytes(state[low:high])
                    if garbage and not part:  # a new block, in which somebody else's bytes lay
                        part = random.randbytes(high - low)
                    result[low:high] = part + bytes(high - low - len(part))
            self.stored = result[:length]
        self.data = bytearray(self.stored)
        self.changes.clear()
        self.locked_by = None


def _apply(data: bytearray, change: _Change) -> None:
    if isinstance(change, int):
        if change < len(data):
            del data[change:]
        else:
            data.extend(bytes(change - len(data)))
        return
    position, content = change
    if position > len(data):
        data.extend(bytes(position - len(data)))
    data[position : position + len(content)] = content


def _lengths(length: int, changes: list[_Change]) -> list[int]:
    lengths = [length]
    for change in changes:
        if not isinstance(change, int):
            change = max(lengths[-1], change[0] + len(change[1]))
        lengths.append(change)
    return lengths


def _touched(lengths: list[int], changes: list[_Change], sector: int) -> list[int]:
    """The sectors that are not the same after all changes as before."""
    found: set[int] = set()
    for number, change in enumerate(changes):
        low, high = sorted(lengths[number : number + 2])
        if not isinstance(change, int):
            low, high = min(low, change[0]), max(change[0] + len(change[1]), high)
        found.update(range(low // sector, -(-high // sector)))
    return sorted(found)


def _pick(random: Random, steps: int, keep: float) -> int:
    """After how many of the steps: all of them with the chance ``keep``, else any number."""
    return steps if random.random() < keep else random.randint(0, steps)


class _Directory:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Directory] = {}
        self.stored: dict[str, _File | _Directory] = {}
        self.changes: list[dict[str, _File | _Directory | None]] = []

    def change(self, change: dict[str, _File | _Directory | None]) -> None:
        _rename(self.entries, change)
        self.changes.append(change)

    def sync(self) -> None:
        for change in self.changes:
            _rename(self.stored, change)
        self.changes.clear()

    def crash(self, random: Random, ordered: bool) -> None:
        keep = random.choice(_KEEP)
        prefix = _pick(random, len(self.changes), keep)
        for number, change in enumerate(self.changes):
            if number < prefix if ordered else random.random() < keep:
                _rename(self.stored, change)
        self.entries = dict(self.stored)
        self.changes.clear()


def _rename(
    entries: dict[str, _File | _Directory], change: dict[str, _File | _Directory | None]
) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


_Node = TypeVar("_Node", _File, _Directory)


class SimulatedHandle(Handle):
    """An open file of a :class:`SimulatedFiles`; it has no descriptor."""

    __slots__ = ("file", "generation", "writable")

    def __init__(self, file: _File, path: Path, generation: int, writable: bool):
        super().__init__(-1, path)
        self.file = file
        self.generation = generation
        self.writable = writable

    def close(self) -> None:
        if self.file.locked_by is self:
            self.file.locked_by = None
        self.generation = -1


class SimulatedFiles(Files):
    """See :class:`headrace.files.Files`."""

    def __init__(self, *, capacity: int | None = None):
        self.capacity = capacity
        self.is_at_hand: Callable[[], bool] = lambda: True
        """Whether the next read finds its bytes in the page cache."""
        self._root = _Directory()
        self._generation = 0

    # --- for the test -----------------------------------------------------------------------
    def crash(
        self,
        random: Random,
        *,
        sector: int = SECTOR_BYTES,
        ordered: bool = False,
        garbage: bool = False,
    ) -> None:
        """The power fails. With ``garbage``, blocks that were new and not written hold any bytes."""
        self._generation += 1
        for directory in self._directories(self._root, lambda one: one.crash(random, ordered)):
            for node in directory.entries.values():
                if isinstance(node, _File):
                    node.crash(random, sector, garbage)

    def kill(self) -> None:
        """The process ends and the machine goes on: only the handles and locks are lost."""
        self._generation += 1
        for file in self._files():
            file.locked_by = None

    def lose_unsynced(self, handle: Handle) -> None:
        """Drop the unsynced changes without an error from any later sync."""
        self._of(handle).file.changes.clear()

    def put(self, path: Path, content: bytes | bytearray) -> None:
        """The file has this content, durably and since ever; its directories are made as needed."""
        self.make_directory(path.parent)
        directory = self._directory(path.parent)
        directory.entries[path.name] = directory.stored[path.name] = _File(content)

    def copy(self) -> SimulatedFiles:
        """Another disk with the same content, all of it durable."""
        other = SimulatedFiles(capacity=self.capacity)
        other._root = _copy(self._root)
        return other

    def clone(self) -> SimulatedFiles:
        """Another disk in the same state: what is not synced here is not synced there either."""
        other = SimulatedFiles(capacity=self.capacity)
        other._root = _clone(self._root, {})
        return other

    def _directories(
        self, top: _Directory, first: Callable[[_Directory], None] = lambda one: None
    ) -> Iterator[_Directory]:
        """``top`` and all below it; ``first`` is called before a directory is looked into."""
        first(top)
        yield top
        for node in list(top.entries.values()):
            if isinstance(node, _Directory):
                yield from self._directories(node, first)

    def _files(self) -> Iterator[_File]:
        for directory in self._directories(self._root):
            for node in directory.entries.values():
                if isinstance(node, _File):
                    yield node

    # --- finding ----------------------------------------------------------------------------
    def _find(self, path: Path) -> _File | _Directory | None:
        node: _File | _Directory | None = self._root
        for part in _parts(path):
            node = node.entries.get(part) if isinstance(node, _Directory) else None
        return node

    def _existing(self, path: Path, kind: type[_Node], if_other: int) -> _Node:
        """The file or directory at ``path``; ``if_other`` is the error number for the other kind."""
        node = self._find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(node, kind):
            raise _error(if_other, path)
        return node

    def _directory(self, path: Path) -> _Directory:
        return self._existing(path, _Directory, errno.ENOTDIR)

    def _file(self, path: Path) -> _File:
        return self._existing(path, _File, errno.EISDIR)

    def _of(self, handle: Handle, *, write: bool = False) -> SimulatedHandle:
        assert isinstance(handle, SimulatedHandle), "a handle of another file system"
        if handle.generation != self._generation or (write and not handle.writable):
            raise _error(errno.EBADF, handle.path)
        return handle

    # --- files -----------------------------------------------------------------------------
    def open(self, path: Path, *, write: bool = False, create: bool = False) -> Handle:
        if create and self._find(path) is None:
            self._directory(path.parent).change({path.name: _File()})
        return SimulatedHandle(self._file(path), path, self._generation, write)

    def size(self, handle: Handle) -> int:
        return len(self._of(handle).file.data)

    def identity(self, handle: Handle) -> str:
        return f"0:{id(self._of(handle).file)}"

    def read_at(self, handle: Handle, position: int, length: int) -> bytes:
        return bytes(self._of(handle).file.data[position : position + length])

    def read_at_once(self, handle: Handle, position: int, length: int) -> bytes:
        if not self.is_at_hand():
            raise NotAtHand
        return self.read_at(handle, position, length)

    def write_at(self, handle: Handle, position: int, buffers: Sequence[bytes]) -> int:
        file = self._of(handle, write=True).file
        content = b"".join(buffers)
        room = self._room(file, position + len(content))
        if room < position + len(content):
            if room > position:
                file.change((position, content[: room - position]))
            raise _error(errno.ENOSPC, handle.path)
        if content:
            file.change((position, content))
        return len(content)

    def _room(self, file: _File, end: int) -> int:
        """The length that the file can have, up to ``end``."""
        grow = end - len(file.data)
        if self.capacity is None or grow <= 0:
            return end
        return end - grow + max(0, min(grow, self.free_bytes(Path())))

    def sync(self, handle: Handle) -> None:
        self._of(handle).file.sync()

    def allocate(self, handle: Handle, position: int, length: int) -> None:
        file = self._of(handle, write=True).file
        end = position + length
        if self._room(file, end) < end:
            raise _error(errno.ENOSPC, handle.path)
        if end > len(file.data):
            file.change(end)

    def truncate(self, handle: Handle, size: int) -> None:
        file = self._of(handle, write=True).file
        if size != len(file.data):
            file.change(size)

    def lock(self, handle: Handle) -> bool:
        file = self._of(handle).file
        if file.locked_by is None:
            file.locked_by = handle
        return file.locked_by is handle

    # --- directories -----------------------------------------------------------------------
    def exists(self, path: Path) -> bool:
        return self._find(path) is not None

    def is_directory(self, path: Path) -> bool:
        return isinstance(self._find(path), _Directory)

    def make_directory(self, path: Path) -> None:
        directory = self._root
        for part in _parts(path):
            if part not in directory.entries:
                directory.change({part: _Directory()})
                directory.sync()
            node = directory.entries[part]
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR, path)
            directory = node

    def make_directories(self, parent: Path, names: Iterable[str]) -> set[str]:
        directory = self._directory(parent)
        made = {name for name in names if name not in directory.entries}
        for name in sorted(made):
            directory.change({name: _Directory()})
        directory.sync()
        return made

    def make_private(self, path: Path) -> int:
        return 0  # there are no other users here

    def names(self, path: Path) -> list[str]:
        return sorted(self._directory(path).entries)

    def file_size(self, path: Path) -> int:
        return len(self._file(path).data)

    def rename(self, source: Path, target: Path) -> None:
        node = self._find(source)
        if node is None:
            raise _error(errno.ENOENT, source)
        if source.parent == target.parent:
            self._directory(source.parent).change({source.name: None, target.name: node})
        else:
            self._directory(target.parent).change({target.name: node})
            self._directory(source.parent).change({source.name: None})

    def remove(self, path: Path) -> None:
        self._file(path)
        self._directory(path.parent).change({path.name: None})

    def remove_tree(self, path: Path) -> None:
        self._directory(path)
        self._directory(path.parent).change({path.name: None})

    def sync_directory(self, path: Path) -> None:
        self._directory(path).sync()

    def free_bytes(self, path: Path) -> int:
        if self.capacity is None:
            return 1 << 40
        return self.capacity - sum(len(file.data) for file in self._files())


def _copy(directory: _Directory) -> _Directory:
    other = _Directory()
    for name, node in directory.entries.items():
        other.entries[name] = _copy(node) if isinstance(node, _Directory) else _File(node.data)
    other.stored = dict(other.entries)
    return other


def _clone(node: _Node, known: dict[int, _File | _Directory]) -> _Node:
    """A deep copy; one node may be known under several names, before and after a rename."""
    found = known.get(id(node))
    if found is not None:
        assert isinstance(found, type(node))
        return found
    if isinstance(node, _File):
        file = known[id(node)] = _File(node.stored)
        file.data = bytearray(node.data)
        file.changes = list(node.changes)
        return file
    directory = known[id(node)] = _Directory()

    def some(
        entries: dict[str, _File | _Directory | None],
    ) -> dict[str, _File | _Directory | None]:
        return {n: None if each is None else _clone(each, known) for n, each in entries.items()}

    directory.entries = some(node.entries)  # type: ignore[arg-type, assignment]
    directory.stored = some(node.stored)  # type: ignore[arg-type, assignment]
    directory.changes = [some(change) for change in node.changes]
    return directory
