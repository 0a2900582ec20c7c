"""Reading a broker's files instead of its socket, where client and broker share a machine.

A client that says which running system it is on (``FETCH`` with ``direct``) is told *where* records lie,
by a broker on the same one: a file, a position in it, and how far the records go. Opening that file is
up to the operating system: who may not read it goes on over the socket, as before. What the broker does
for a gigabyte then is to answer a few questions; records go from the page cache to the reader, once.

Everything that is promised over the socket is promised here:

- The broker decides what there is. It names only what it has stored as durably as the topic wants it,
  of the topic that was asked for; the device and inode that it names with the path prove that the file
  that was opened is the one that was meant, and not one of another container, or of a later topic.
- Retention may delete the file: who has it open reads on; who comes too late asks the broker again.
- Every batch is checked by its sums. At the first that fails them the reader gives this way up, and asks
  the broker, which knows more about damage.

Rejected: mapping the file (a disk that fails would kill the process with SIGBUS instead of an error),
and passing file descriptors over a Unix socket (it would get around the permissions that are wanted
here, and needs a second port).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType

from headrace.log.batch import HEADER_BYTES, Batch, complete, parse, parse_header

APART_BYTES_MIN = 64 << 10
"""A batch of this size is read by itself, into bytes that it keeps."""
CHUNK_BYTES = 1 << 20
"""Read at once where batches are smaller."""


class Stretch:
    """A part of a file that holds batches, one behind the other."""

    def __init__(self, fd: int, position: int, stop: int):
        self._fd = fd
        self._position, self._stop = position, stop

    def __enter__(self) -> Stretch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def batches(self, offset: int, end: int) -> Iterator[list[Batch]]:
        """Those that hold offsets from ``offset`` on and begin before ``end``, some at a time.

        Fewer when one is damaged, or the file cannot be read: the broker can say why.
        """
        while offset < end and self._position < self._stop:
            try:
                found = self._some(offset, end)
            except OSError:
                return
            if not found:
                return
            if found[-1].end_offset > offset:
                yield found
                offset = found[-1].end_offset

    def _some(self, offset: int, end: int) -> list[Batch]:
        """The next batches; none when those bytes are not what they should be."""
        head = self._bytes(HEADER_BYTES)
        parsed = parse_header(head)
        if parsed is None or parsed[0].base_offset > offset:
            return []
        batch, size = parsed
        if HEADER_BYTES + size >= APART_BYTES_MIN:
            if batch.end_offset > offset:
                body = os.pread(self._fd, size, self._position + HEADER_BYTES)
                if complete(batch, size, body) is None:
                    return []
            self._position += HEADER_BYTES + size
            return [batch]
        data = self._bytes(CHUNK_BYTES)
        found: list[Batch] = []
        at = 0
        while at < len(data):
            following = parse(data, at)
            if following is None or following.base_offset >= end:
                break
            at += following.stored_bytes
            found.append(following)
        self._position += at
        needed = [each for each in found if each.end_offset > offset]
        return needed or found[-1:]

    def _bytes(self, size: int) -> bytes:
        return os.pread(self._fd, min(size, self._stop - self._position), self._position)


def open_stretch(answer: Mapping[str, str]) -> Stretch | None:
    """What the answer to a ``FETCH`` points at; None when it is not there for us."""
    try:
        fd = os.open(answer["file"], os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if f"{status.st_dev}:{status.st_ino}" != answer["inode"]:
        os.close(fd)
        return None
    position = int(answer["position"])
    return Stretch(fd, position, position + int(answer["length"]))
