"""Reading a broker's files instead of its socket, where client and broker share a machine.

A client that says which running system it is on (``FETCH`` with ``direct``) is told *where* records lie,
by a broker on the same one: a file, a position in it, and how far the records go. Opening that file is
up to the operating system: who may not read it goes on over the socket, as before. What the broker does
for a gigabyte then is to answer a few questions; records go from the page cache to the reader, once.

Everything that is promised over the socket is promised here:

- The broker decides what there is. It names only what it has stored as durably as the topic wants it,
  of the topic that was asked for. Device and inode say which file is meant; but the numbers of files that
  are gone are given to new ones, so a file counts only when the broker names it *while it is open*
  here: after opening one, the same question is asked again.
- Retention may delete the file: who has it open reads on; who comes too late asks the broker again.
- Every batch is checked by its sums, and has to begin where the one before it ends. At the first that
  does not the broker is asked, which knows more about damage.

Rejected: mapping the file (a disk that fails would kill the process with SIGBUS instead of an error),
and passing file descriptors over a Unix socket (it would get around the permissions that are wanted
here, and needs a second port).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.files import Files, Handle
from headrace.log.batch import APART_BYTES_MIN, HEADER_BYTES, Batch, complete, parse_header
from headrace.log.run import take_all

CHUNK_BYTES = 1 << 20
"""Read at once where batches are smaller."""
_FILES = Files()


class OpenFile:
    """A file of the broker's, held open so that its identity cannot become another's."""

    def __init__(self, handle: Handle):
        self._handle = handle
        self.identity = _FILES.identity(handle)

    def close(self) -> None:
        self._handle.close()

    def batches(self, answer: Mapping[str, str], offset: int, end: int) -> Iterator[list[Batch]]:
        """What the answer points at: the batches that hold offsets from ``offset`` on and begin before
        ``end``, some at a time.

        Fewer when one is damaged, or the file cannot be read: the broker can say why.
        """
        position = int(answer["position"])
        stop = position + int(answer["length"])
        while offset < end and position < stop:
            try:
                found, position = self._some(position, stop, offset, end)
            except OSError:
                return
            if not found:
                return
            if found[-1].end_offset > offset:
                yield found
                offset = found[-1].end_offset

    def _some(self, position: int, stop: int, offset: int, end: int) -> tuple[list[Batch], int]:
        """The next batches, and the position behind them; none when the bytes are not what they
        should be."""
        parsed = parse_header(self._bytes(position, min(HEADER_BYTES, stop - position)))
        if parsed is None or parsed[0].base_offset > offset:
            return [], position
        batch, size = parsed
        if HEADER_BYTES + size >= APART_BYTES_MIN:
            if batch.end_offset > offset:
                body = self._bytes(position + HEADER_BYTES, size)
                if complete(batch, size, body) is None:
                    return [], position
            return [batch], position + HEADER_BYTES + size
        data = self._bytes(position, min(CHUNK_BYTES, stop - position))
        found, at = take_all(data, 0, end)
        needed = [each for each in found if each.end_offset > offset]
        return needed or found[-1:], position + at

    def _bytes(self, position: int, size: int) -> bytes:
        return _FILES.read_at(self._handle, position, size)


def open_file(answer: Mapping[str, str]) -> OpenFile | None:
    """The file that the answer to a ``FETCH`` names; None when it is not there for us."""
    path = Path(answer["file"])
    try:
        # Whatever else has that path here, a pipe even, is not waited for.
        handle = Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)
        found = OpenFile(handle)
    except (OSError, ValueError):
        return None
    if found.identity != answer["inode"]:
        found.close()
        return None
    return found
