r"""The binary protocol: frames of properties and a body, big-endian.

::

    [4 total_length, its own four bytes included][4 message_type][8 sequence_number][8 timestamp ms]
    [4 properties_length][properties: key=value\x00 ...][4 body_length][body]

A request carries the client's own sequence number; the ACK that answers it carries the same one, with
``status=success`` or ``status=error``, ``code=`` and ``error=``. In DATA the sequence number is the
offset. ``docs/protocol.md`` has every type and property.

Lengths are checked before anything is allocated for them. A total that exceeds the limit, or parts that
do not add up to it, end the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

from headrace import limits
from headrace.errors import HeadraceError, InvalidArgument, TooLarge

_HEAD = struct.Struct(">IIQQI")
_LENGTH = struct.Struct(">I")
HEAD_BYTES = _HEAD.size
FRAME_BYTES_MIN = HEAD_BYTES + 4
PROPERTIES_BYTES_MAX = 256 << 10
_SMALL_BYTES = 16 << 10
FRAME_BYTES_MAX = limits.BATCH_BYTES_MAX + PROPERTIES_BYTES_MAX + 4096


class Type(IntEnum):
    CREATE_TOPIC = 1
    PUBLISH = 2
    CREATE_SUBSCRIPTION = 3
    DELETE_SUBSCRIPTION = 4
    SUBSCRIBE = 5
    UNSUBSCRIBE = 6
    HEARTBEAT = 7
    ACK = 8
    DATA = 9
    PUBLISH_BATCH = 16
    FETCH = 17
    BATCHES = 18
    NACK = 19
    EXTEND = 20
    AUTH = 21
    ADMIN = 22
    DELIVER = 23
    SETTLE = 24
    CLOSED = 25
    CREDIT = 26
    STAGE = 27


class Frame:
    __slots__ = ("body", "properties", "sequence", "timestamp", "type")

    def __init__(
        self,
        type: int,
        sequence: int,
        properties: Mapping[str, str] | None = None,
        body: bytes = b"",
        timestamp: int = 0,
    ):
        self.type = type
        self.sequence = sequence
        self.properties: Mapping[str, str] = properties or {}
        self.body = body
        self.timestamp = timestamp

    def __repr__(self) -> str:
        name = Type(self.type).name if self.type in Type._value2member_map_ else str(self.type)
        return f"<Frame {name} #{self.sequence} {dict(self.properties)} {len(self.body)} bytes>"


def encode_properties(properties: Mapping[str, str]) -> bytes:
    text = "".join([f"{name}={value}\0" for name, value in properties.items()])
    if text.count("\0") != len(properties):  # the rest would be read as a separate property
        raise InvalidArgument("a property cannot hold a NUL character", code="invalid_property")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("a property is not valid Unicode", code="invalid_property") from None


def decode_properties(raw: bytes) -> dict[str, str]:
    if not raw:
        return {}
    if raw[-1] != 0:
        raise InvalidArgument("the properties do not end with a NUL byte", code="bad_frame")
    try:
        text = raw[:-1].decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the properties are not UTF-8 text", code="bad_frame") from None
    properties = {}
    for item in text.split("\0"):
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"the property {item[:40]!r} is not name=value", code="bad_frame")
        properties[name] = value
    return properties


def encode_start(
    type: int,
    sequence: int,
    properties: Mapping[str, str] | None,
    body_bytes: int,
    timestamp: int = 0,
) -> bytes:
    """A frame without its body, for a large body that is sent without a copy."""
    raw = encode_properties(properties) if properties else b""
    return start(type, sequence, raw, body_bytes, timestamp)


def start(
    type: int, sequence: int, properties: bytes, body_bytes: int, timestamp: int = 0
) -> bytes:
    """The same with properties that are encoded."""
    total = FRAME_BYTES_MIN + len(properties) + body_bytes
    head = _HEAD.pack(total, type, sequence, timestamp, len(properties))
    return b"".join((head, properties, _LENGTH.pack(body_bytes)))


def encode(
    type: int,
    sequence: int,
    properties: Mapping[str, str] | None = None,
    body: bytes = b"",
    timestamp: int = 0,
) -> bytes:
    start = encode_start(type, sequence, properties, len(body), timestamp)
    return start + body if body else start


_PLACE = struct.Struct(">IQ")
PLACE_BYTES = _PLACE.size


def encode_places(places: Iterable[tuple[int, int]]) -> bytes:
    """Partitions, each with an offset."""
    return b"".join([_PLACE.pack(partition, offset) for partition, offset in places])


def decode_places(body: bytes, count: int | None = None) -> Iterator[tuple[int, int]]:
    """The places at the beginning of a body, or all of it."""
    size = len(body) if count is None else PLACE_BYTES * count
    if size % PLACE_BYTES or size > len(body):
        raise InvalidArgument(
            f"places have {PLACE_BYTES} bytes each: a partition and an offset", code="bad_frame"
        )
    return _PLACE.iter_unpack(body[:size])


class BinaryParser:
    """Feed it bytes; it returns frames. After an error it returns nothing more.

    A large frame arrives in many chunks. The parser keeps them, gathers small ones, and joins the body once,
    when the last chunk has arrived.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX):
        self._max = frame_bytes_max
        self._chunks: list[bytes | bytearray] = []
        """The bytes of an incomplete frame."""
        self._held = 0
        self._needed = 4
        self.error: HeadraceError | None = None

    @property
    def buffered(self) -> int:
        return self._held

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. If the stream is invalid, ``error`` is set."""
        if self.error is not None:
            return []
        if self._held + len(data) < self._needed:
            self._hold(data)
            return []
        frames: list[Frame] = []
        try:
            at = 0
            if self._held and self._needed > _SMALL_BYTES:
                at = self._needed - self._held
                frames.append(self._assemble(memoryview(data)[:at]))
            elif self._held:
                data = b"".join((*self._chunks, data))
            self._chunks, self._held = [], 0
            self._take(data, at, frames)
        except HeadraceError as error:
            self.error = error
            self._chunks, self._held = [], 0
        return frames

    def _hold(self, data: bytes) -> None:
        chunks = self._chunks
        self._held += len(data)
        if len(data) >= _SMALL_BYTES:
            chunks.append(data)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += data
        elif data:
            chunks.append(bytearray(data))

    def _take(self, data: bytes, at: int, frames: list[Frame]) -> None:
        """Parse the frames that begin at ``at``, and keep an incomplete one."""
        while True:
            left = len(data) - at
            if left < 4:
                self._needed = 4
                break
            total = _LENGTH.unpack_from(data, at)[0]
            self._check_total(total)
            if left < total:
                self._needed = total
                break
            frames.append(self._frame(data, at, total))
            at += total
        if left:
            self._hold(data[at:])

    def _assemble(self, last: memoryview) -> Frame:
        """Complete the kept frame with its last bytes. Its body is copied once."""
        first, *middle = self._chunks
        if len(first) >= HEAD_BYTES:
            _, type_, sequence, timestamp, size = _HEAD.unpack_from(first)
            start = HEAD_BYTES + size + 4
            if size <= PROPERTIES_BYTES_MAX and start <= len(first):
                properties = decode_properties(bytes(first[HEAD_BYTES : start - 4]))
                body = b"".join((memoryview(first)[start:], *middle, last))
                if _LENGTH.unpack_from(first, start - 4)[0] != len(body):
                    raise _wrong_length()
                return Frame(type_, sequence, properties, body, timestamp)
        whole = b"".join((*self._chunks, last))
        return self._frame(whole, 0, len(whole))

    def _check_total(self, total: int) -> None:
        if total > self._max:
            raise TooLarge(
                f"a frame has at most {self._max} bytes, this one says {total}",
                code="frame_too_large",
            )
        if total < FRAME_BYTES_MIN:
            raise InvalidArgument(
                f"a frame has at least {FRAME_BYTES_MIN} bytes, this one says {total}",
                code="bad_frame",
            )

    def _frame(self, buffer: bytes, at: int, total: int) -> Frame:
        _, type_, sequence, timestamp, size = _HEAD.unpack_from(buffer, at)
        if size > PROPERTIES_BYTES_MAX or FRAME_BYTES_MIN + size > total:
            raise InvalidArgument("the properties are longer than the frame", code="bad_frame")
        start = at + HEAD_BYTES
        properties = decode_properties(buffer[start : start + size])
        start += size
        body_size = _LENGTH.unpack_from(buffer, start)[0]
        start += 4
        if start + body_size != at + total:
            raise _wrong_length()
        return Frame(type_, sequence, properties, buffer[start : start + body_size], timestamp)


def _wrong_length() -> InvalidArgument:
    return InvalidArgument("the body's length and the frame's differ", code="bad_frame")


# --- bulk settling ------------------------------------------------------------------------------
_RUN = struct.Struct(">QQQ")
RUNS_MAX = 10_000
"""In one SETTLE: each run is looked up, and while that lasts nobody else is served."""


def encode_runs(runs: list[tuple[int, int, int]]) -> bytes:
    """Runs of acknowledged messages: (lease, first offset, last offset)."""
    return b"".join([_RUN.pack(*run) for run in runs])


def decode_runs(raw: bytes) -> list[tuple[int, int, int]]:
    if len(raw) % _RUN.size:
        raise InvalidArgument("a SETTLE body is made of 24-byte entries", code="bad_frame")
    if len(raw) > RUNS_MAX * _RUN.size:
        raise TooLarge(
            f"a SETTLE has at most {RUNS_MAX} entries, this one {len(raw) // _RUN.size}: send several",
            code="frame_too_large",
        )
    return list(_RUN.iter_unpack(raw))
