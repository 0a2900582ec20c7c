"""How the tests of this room feed a parser, and what they make of its answer."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Frame, Type
from headrace.wire.text import Command, PublishRun, TextParser

MESSAGE_BYTES_MAX = 1000
FRAME_BYTES_MAX = 4096

Outcome = tuple[list[Any], str | None]
"""What was found, flat, and the code of the error that ended the stream."""


# --- feeding --------------------------------------------------------------------------------------
def whole(stream: bytes) -> list[bytes]:
    return [stream]


def byte_by_byte(stream: bytes) -> list[bytes]:
    return [stream[at : at + 1] for at in range(len(stream))]


def in_halves(stream: bytes) -> list[bytes]:
    middle = len(stream) // 2
    return [stream[:middle], stream[middle:]]


FEEDINGS: list[Callable[[bytes], list[bytes]]] = [whole, byte_by_byte, in_halves]


def cut_at(stream: bytes, places: Iterable[int]) -> list[bytes]:
    marks = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in pairwise(marks)]


def read_text(pieces: Iterable[bytes], parser: TextParser | None = None) -> Outcome:
    parser = parser or TextParser(MESSAGE_BYTES_MAX)
    found: list[Any] = []
    for piece in pieces:
        for item in parser.feed(piece):
            if isinstance(item, PublishRun):
                found += [("PUB", [item.topic], {}, value) for value in item.values]
            else:
                assert isinstance(item, Command)
                found.append((item.verb, item.words, item.options, item.payload))
    return found, code_of(parser.error)


def read_binary(pieces: Iterable[bytes], parser: BinaryParser | None = None) -> Outcome:
    parser = parser or BinaryParser(FRAME_BYTES_MAX)
    found = [flat(frame) for piece in pieces for frame in parser.feed(piece)]
    return found, code_of(parser.error)


def flat(frame: Frame) -> tuple[Any, ...]:
    return (frame.type, frame.sequence, dict(frame.properties), frame.body, frame.timestamp)


def code_of(error: HeadraceError | None) -> str | None:
    assert error is None or isinstance(error, HeadraceError)
    return None if error is None else error.code


# --- making ---------------------------------------------------------------------------------------
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=12)
PAYLOADS = st.binary(max_size=60)
LINE_ENDS = st.sampled_from([b"\n", b"\r\n"])
LATE_LINE_ENDS = st.sampled_from([b"", b"\n", b"\r\n"])
WORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x24F, exclude_characters="=\x7f\x85\xa0"),
    min_size=1,
    max_size=8,
)
PROPERTY_NAMES = st.text(
    st.characters(exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1, max_size=10
)
PROPERTY_VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
PROPERTIES = st.dictionaries(PROPERTY_NAMES, PROPERTY_VALUES, max_size=5)
U64 = st.integers(0, (1 << 64) - 1)


@st.composite
def publishes(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    topic, payload = draw(NAMES), draw(PAYLOADS)
    options = draw(st.dictionaries(NAMES, WORDS, max_size=2))
    words = " ".join(["PUB", topic, str(len(payload)), *(f"{n}={v}" for n, v in options.items())])
    raw = words.encode() + draw(LINE_ENDS) + payload + draw(LATE_LINE_ENDS)
    return raw, [("PUB", [topic], options, payload)]


@st.composite
def runs_of_publishes(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    """The same first line again and again, which the parser takes a short way with."""
    topic, size = draw(NAMES), draw(st.integers(0, 20))
    payloads = draw(st.lists(st.binary(min_size=size, max_size=size), min_size=2, max_size=6))
    head = f"PUB {topic} {size}".encode() + draw(LINE_ENDS)
    behind = draw(LATE_LINE_ENDS)
    raw = b"".join(head + payload + behind for payload in payloads)
    return raw, [("PUB", [topic], {}, payload) for payload in payloads]


@st.composite
def commands(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    verb = draw(st.sampled_from(["FETCH", "SUB", "PING", "ACK", "NOSUCH"]))
    words = draw(st.lists(WORDS, max_size=3))
    options = draw(st.dictionaries(NAMES, WORDS, max_size=2))
    line = " ".join([verb, *words, *(f"{n}={v}" for n, v in options.items())])
    return line.encode() + draw(LINE_ENDS), [(verb, words, options, None)]


@st.composite
def text_streams(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    """A valid stream and what is said in it."""
    parts = draw(st.lists(st.one_of(publishes(), runs_of_publishes(), commands()), max_size=6))
    return b"".join(raw for raw, _ in parts), [item for _, said in parts for item in said]


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    type_ = draw(st.one_of(st.sampled_from([int(t) for t in Type]), st.integers(0, (1 << 32) - 1)))
    sequence, timestamp = draw(U64), draw(U64)
    properties, body = draw(PROPERTIES), draw(PAYLOADS)
    raw = binary.encode(type_, sequence, properties, body, timestamp)
    return raw, [(type_, sequence, properties, body, timestamp)]


@st.composite
def binary_streams(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    parts = draw(st.lists(frames(), max_size=5))
    return b"".join(raw for raw, _ in parts), [item for _, said in parts for item in said]


@st.composite
def mutated(draw: st.DrawFn, streams: st.SearchStrategy[tuple[bytes, list[Any]]]) -> bytes:
    """A valid stream to which something was done: bytes changed, cut out, doubled or put in."""
    raw = bytearray(draw(streams)[0])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert"]))
        if kind == "flip" and at < len(raw):
            raw[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 8))]
        elif kind == "double":
            raw[at:at] = raw[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(raw)


CUTS: st.SearchStrategy[Sequence[int]] = st.lists(st.integers(0, 10_000), max_size=12)
