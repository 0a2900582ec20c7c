"""Whole batches of a partition, over a plain blocking socket: how a Spark task reads.

A task is one thread that wants one range of one partition as fast as it can be had, and nothing else; an
event loop would only be in its way. So :class:`BatchReader` speaks the few frames it needs (``AUTH``,
``FETCH``) by itself:

- The next ``FETCH`` is sent as soon as the last batch of an answer begins: the broker reads and sends
  while the caller works, into the buffers of the sockets, with no thread here.
- A large batch is received into a ``bytes`` of its own and handed out before the next one is received:
  it is not copied, and still in the processor's cache when it is used. What is left of an answer when a
  small batch comes is received at once, and cut up; small neighbours become one batch (``log/run.py``).
- On the broker's own machine the bytes do not come through the socket at all, if we may read the broker's
  files (``direct.py``).
- A node of a cluster that does not own the partition says who does (``redirect``), and the reader goes on there; if that node
  cannot be reached, any other one has the same messages.
- The offset to go on from is always known, so when the connection breaks, the broker restarts or an
  answer arrives damaged, the same question is asked again, for up to ``timeout`` seconds without any
  progress; a batch is handed out once.

An error that the broker answers with is raised as it is, when it says that asking again is no use.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from headrace.client.address import Login, parse_address
from headrace.client.direct import OpenFile, open_file
from headrace.client.link import BACKOFF_S, error_of, login_of
from headrace.client.sockets import dial, wait_at_most
from headrace.errors import (
    ConnectionLost,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    OffsetOutOfRange,
    RequestTimeout,
)
from headrace.files import machine
from headrace.log.batch import APART_BYTES_MIN, HEADER_BYTES, Batch, complete, parse_header
from headrace.log.run import take_all
from headrace.wire import binary
from headrace.wire.binary import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    PROPERTIES_BYTES_MAX,
    Frame,
    Type,
)

logger = logging.getLogger("headrace.client")
FETCH_BYTES = 2 << 20
"""Asked for at once. Measured: above 4 MiB both sides spend more on fresh pages of memory than they
gain, below 2 MiB a request costs more than its answer."""
REDIRECTS_MAX = 10
"""Of one range: partitions move seldom."""
REDIRECT_S = 5.0
"""How long another node may take to be reached."""
_PIECE_BYTES = 1 << 20
_HEAD = struct.Struct(">IIQQI")
_LENGTH = struct.Struct(">I")
_BATCH = struct.Struct("<IQI")
"""From byte 12 of a batch's header: body_len, base_offset, count."""


class BatchReader:
    """Reads ranges of partitions, one after the other. Not for use by several threads."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        fetch_bytes: int = FETCH_BYTES,
        direct: bool = True,
    ):
        self._addresses = tuple(addresses)
        self._login, self._tls = login_of(Login(token, user, password)), tls
        self._timeout = timeout
        self._share = timeout / max(len(self._addresses), 1)
        """The most that one address may take: the others need time, too."""
        self._fetch_bytes = fetch_bytes
        self._direct = machine() if direct else None
        self._file: OpenFile | None = None
        self._failed_before: HeadraceError | None = None
        """Why the try before this one failed."""
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._next_address = 0
        self._redirects = 0
        """How often it may still go to another node."""
        self.reconnects = 0
        self.direct_bytes = 0
        """Read from the broker's files."""

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._close_file()
        found, self._socket = self._socket, None
        if found is not None:
            found.close()

    # --- reading ----------------------------------------------------------------------------
    def read(
        self, topic: str, partition: int, start: int, end: int, *, incarnation: int | None = None
    ) -> Iterator[list[Batch]]:
        """The batches that hold offsets ``start`` to ``end - 1``, in order, some at a time.

        Whole ones: the first and the last may hold more than was asked for, and each may begin before the end of
        the one before, because the broker joins small ones meanwhile. ``incarnation``: that topic and no later
        one of the same name.
        """
        where = {"topic": topic, "partition": str(partition), "max_bytes": str(self._fetch_bytes)}
        if incarnation is not None:
            where["incarnation"] = str(incarnation)
        offset = start
        deadline = time.monotonic() + self._timeout
        failures = 0
        is_done = False
        self._redirects = REDIRECTS_MAX
        try:
            while offset < end:
                try:
                    for batches in self._stream(where, offset, end, deadline):
                        yield batches
                        offset = batches[-1].end_offset
                        failures = 0
                        deadline = time.monotonic() + self._timeout
                except HeadraceError as error:
                    self._recover(error, failures, deadline)
                    failures += 1
            is_done = True
        finally:
            self._close_file()
            if not is_done:  # the caller has had enough; nobody is there for what still comes
                self.close()

    def _stream(
        self, where: dict[str, str], offset: int, end: int, deadline: float
    ) -> Iterator[list[Batch]]:
        """The same over one connection; whatever goes wrong is raised."""
        asked = self._fetch(where, offset, deadline)
        while offset < end:
            properties, left = self._receive_start(asked, deadline)
            if "file" in properties:
                before, holds = offset, self._holds(properties)
                if holds:
                    for batches in self._from_file(properties, offset, end):
                        yield batches
                        offset = batches[-1].end_offset
                deadline = time.monotonic() + self._timeout
                if offset < end:
                    # Nothing there that could be used: then the socket has to bring it.
                    is_direct = not holds or offset > before
                    asked = self._fetch(where, offset, deadline, direct=is_direct)
                continue
            if not left and self._redirects and "owner" in properties:
                self._go_to(properties["owner"], deadline)
                asked = self._fetch(where, offset, deadline)
                continue
            if not left:
                raise OffsetOutOfRange(
                    f"offset {offset} is not there: {where['topic']}/{where['partition']} ends at "
                    f"{properties['end_offset']}"
                )
            while left:
                header = self._receive_bytes(min(left, HEADER_BYTES))
                parsed = parse_header(header)
                if parsed is None or HEADER_BYTES + parsed[1] > left:
                    raise _damaged()
                batch, size = parsed
                rest = b""
                following = batch.end_offset
                left -= HEADER_BYTES + size
                if size < APART_BYTES_MIN:
                    rest = self._receive_bytes(size + left)
                    following = max(following, _end_of(rest, size))
                    left = 0
                if following <= offset:
                    raise _damaged()
                if not left and following < end:
                    asked = self._fetch(where, following, deadline)
                if size < APART_BYTES_MIN:
                    batches = _parse(header + rest, end)
                elif complete(batch, size, self._receive_bytes(size)) is None:
                    raise _damaged()
                else:
                    batches = [batch]
                yield batches
                offset = batches[-1].end_offset
                deadline = time.monotonic() + self._timeout
                if offset >= end and left:  # the answer has more than was wanted
                    self.close()
                    return

    def _fetch(
        self, where: dict[str, str], offset: int, deadline: float, *, direct: bool = True
    ) -> int:
        question = {**where, "offset": str(offset)}
        if direct and self._direct is not None:
            question["direct"] = self._direct
        if self._redirects:
            question["redirect"] = "true"
        return self._ask(Type.FETCH, question, deadline)

    def _holds(self, answer: dict[str, str]) -> bool:
        """Whether the file that the answer names was open when it was named.

        If not it is opened, for the next answer to name it; if that cannot be, no file is asked for any
        more.
        """
        if self._file is not None and self._file.identity == answer["inode"]:
            return True
        self._close_file()
        self._file = open_file(answer)
        if self._file is None:
            self._direct = None
        return False

    def _from_file(self, answer: dict[str, str], offset: int, end: int) -> Iterator[list[Batch]]:
        """The batches that the answer points at, and that the broker has promised."""
        assert self._file is not None
        for batches in self._file.batches(answer, offset, min(end, int(answer["end_offset"]))):
            self.direct_bytes += sum(batch.stored_bytes for batch in batches)
            yield batches

    def _close_file(self) -> None:
        found, self._file = self._file, None
        if found is not None:
            found.close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset and the end of a partition."""
        question = {
            "topic": topic, "partition": str(partition), "offset": "earliest", "max_bytes": "1",
        }  # fmt: skip
        answer = self.ask(Type.FETCH, question)
        return int(answer["start_offset"]), int(answer["end_offset"])

    def ask(self, type: int, properties: dict[str, str]) -> dict[str, str]:
        """One question and what its answer says; again, when the connection breaks."""
        deadline = time.monotonic() + self._timeout
        failures = 0
        while True:
            try:
                return self._receive(self._ask(type, properties, deadline), deadline)
            except HeadraceError as error:
                self._recover(error, failures, deadline)
                failures += 1

    def _recover(self, error: HeadraceError, failures: int, deadline: float) -> None:
        """Pause before the next try, or raise when there is no use or no time for one."""
        if self._socket is not None:
            self._next_address += 1  # it is not good any more, or has fallen silent
        self.close()  # what else is under way on it belongs to a question that is given up
        pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(0.5, 1.0)
        if not error.retryable:
            raise error
        now = time.monotonic()
        if failures and now >= deadline and self._failed_before is not None:
            error = (
                self._failed_before
            )  # the deadline has cut the last try off, so it does not know why
        self._failed_before = error
        if now + pause >= deadline:
            raise RequestTimeout(
                f"no answer from {self._names()} within {self._timeout:g} seconds: {error.message}"
            ) from error
        logger.debug("asking again: %s", error)
        self.reconnects += 1
        time.sleep(pause)

    def _left(self, deadline: float) -> float:
        return max(min(deadline - time.monotonic(), self._share), 0.001)

    def _names(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._addresses)

    # --- the connection ---------------------------------------------------------------------
    def _ask(self, type: int, properties: dict[str, str], deadline: float) -> int:
        """Send a question; returns the number that its answer will carry."""
        found = self._socket
        if found is None:
            found = self._connect(deadline)
        return self._send(found, type, properties, deadline)

    def _send(
        self, found: socket.socket, type: int, properties: dict[str, str], deadline: float
    ) -> int:
        self._sequence += 1
        wait_at_most(found, self._left(deadline))
        try:
            found.sendall(binary.encode(type, self._sequence, properties))
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker broke: {error}") from None
        return self._sequence

    def _connect(self, deadline: float) -> socket.socket:
        host, port = self._addresses[self._next_address % len(self._addresses)]
        self._next_address += 1
        found = dial(host, port, self._tls, self._left(deadline))
        self._socket = found
        self._next_address -= 1  # this one is good
        self._log_in(found, deadline)
        return found

    def _log_in(self, found: socket.socket, deadline: float) -> None:
        if self._login is not None:
            number = self._send(found, Type.AUTH, self._login, deadline)
            self._receive(number, deadline)

    def _go_to(self, address: str, deadline: float) -> None:
        """Go on at the node that owns the partition; stay here if it cannot be reached."""
        self._redirects -= 1
        before = self._socket
        try:
            place = parse_address(address)
            seconds = min(self._left(deadline), REDIRECT_S)
            self._socket = dial(place.host, place.port, self._tls, seconds)
            self._log_in(self._socket, time.monotonic() + seconds)
        except HeadraceError as error:
            logger.info("node %s is not reached, so another one is read from: %s", address, error)
            self._redirects = 0
            before, self._socket = self._socket, before
            if before is self._socket:
                return
        if before is not None:
            before.close()

    def _receive(self, number: int, deadline: float) -> dict[str, str]:
        """The answer to a question, without its body; an error that it carries is raised."""
        properties, left = self._receive_start(number, deadline)
        self._receive_bytes(left)
        return properties

    def _receive_start(self, number: int, deadline: float) -> tuple[dict[str, str], int]:
        """An answer up to its body: its properties, and how long the body is."""
        if self._socket is not None:
            wait_at_most(self._socket, self._left(deadline))
        head = self._receive_bytes(_HEAD.size)
        total, type_, sequence, timestamp, size = _HEAD.unpack(head)
        if not FRAME_BYTES_MIN + size <= total <= FRAME_BYTES_MAX or size > PROPERTIES_BYTES_MAX:
            raise InvalidArgument(f"a frame says that it has {total} bytes", code="bad_frame")
        rest = self._receive_bytes(size + _LENGTH.size)
        properties = binary.decode_properties(rest[:size])
        length = _LENGTH.unpack_from(rest, size)[0]
        if FRAME_BYTES_MIN + size + length != total:
            raise InvalidArgument("the body's length and the frame's differ", code="bad_frame")
        is_error = properties.get("status") == "error"
        if sequence != number and not (is_error and sequence == 0):
            raise InvalidArgument(
                f"the broker answers {sequence} instead of {number}", code="bad_frame"
            )
        if is_error:
            body = self._receive_bytes(length)
            raise error_of(Frame(type_, sequence, properties, body, timestamp))
        return properties, length

    def _receive_bytes(self, size: int) -> bytes:
        found = self._socket
        if found is None:
            raise ConnectionLost("the connection to the broker broke")
        try:
            return _receive(found, size)
        except (TimeoutError, BlockingIOError):
            raise ConnectionLost("the broker has fallen silent") from None
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker broke: {error}") from None


def _damaged() -> DataCorrupt:
    return DataCorrupt("a fetched batch arrived damaged", retryable=True)


# --- bytes ------------------------------------------------------------------------------------------
def _receive(found: socket.socket, size: int) -> bytes:
    """So many bytes. As a rule one call of the system puts them where they stay."""
    if not size:
        return b""
    flags = 0 if isinstance(found, ssl.SSLSocket) else socket.MSG_WAITALL
    data = found.recv(size, flags)
    if len(data) == size:
        return data
    pieces, left = [data], size - len(data)
    while left:
        if not data:
            raise ConnectionResetError("it was closed")
        data = found.recv(min(left, _PIECE_BYTES), flags)
        pieces.append(data)
        left -= len(data)
    return b"".join(pieces)


def _end_of(body: bytes, at: int) -> int:
    """The offset behind the last batch from ``at`` on, by the headers alone; -1 when there is none."""
    end = -1
    while at + HEADER_BYTES <= len(body):
        length, base, count = _BATCH.unpack_from(body, at + 12)
        at += HEADER_BYTES + length
        end = base + count
    return end


def _parse(body: bytes, end: int) -> list[Batch]:
    """The batches that begin before ``end``, small ones joined, each with its checksums looked at once."""
    found, at = take_all(body, 0, end)
    if at < len(body) and (not found or found[-1].end_offset < end):
        raise _damaged()
    return found
