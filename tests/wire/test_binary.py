"""The binary parser: one table of cases, fed in every way; lengths; whatever bytes there are."""

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.wire import binary
from headrace.wire.binary import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    PROPERTIES_BYTES_MAX,
    BinaryParser,
    Frame,
    Type,
)
from tests.wire import streams
from tests.wire.streams import (
    CUTS,
    FEEDINGS,
    PROPERTIES,
    U64,
    binary_streams,
    byte_by_byte,
    cut_at,
    mutated,
    read_binary,
    whole,
)


def raw_frame(
    type_: int = 2,
    sequence: int = 1,
    properties: bytes = b"",
    body: bytes = b"",
    *,
    timestamp: int = 0,
    total: int | None = None,
    properties_length: int | None = None,
    body_length: int | None = None,
) -> bytes:
    """A frame put together by hand, so that each of its lengths can lie."""
    right = 32 + len(properties) + len(body)
    return (
        struct.pack(
            ">IIQQI",
            right if total is None else total,
            type_,
            sequence,
            timestamp,
            len(properties) if properties_length is None else properties_length,
        )
        + properties
        + struct.pack(">I", len(body) if body_length is None else body_length)
        + body
    )


MOST = streams.FRAME_BYTES_MAX
FULL = b"x" * (MOST - 32)

# name -> (stream, frames)
COMPLETE: dict[str, tuple[bytes, list[Any]]] = {
    "the smallest": (raw_frame(7, 1), [(7, 1, {}, b"", 0)]),
    "the seed's publish": (
        raw_frame(2, 1, b"topic=events\0custom_property=value\0", b"Another message", timestamp=5),
        [(2, 1, {"topic": "events", "custom_property": "value"}, b"Another message", 5)],
    ),
    "the largest": (raw_frame(2, 1, b"", FULL), [(2, 1, {}, FULL, 0)]),
    "several": (
        raw_frame(2, 1, b"", b"a") + raw_frame(3, 2, b"x=1\0") + raw_frame(4, 3),
        [(2, 1, {}, b"a", 0), (3, 2, {"x": "1"}, b"", 0), (4, 3, {}, b"", 0)],
    ),
    "the largest numbers": (
        raw_frame((1 << 32) - 1, (1 << 64) - 1, timestamp=(1 << 64) - 1),
        [((1 << 32) - 1, (1 << 64) - 1, {}, b"", (1 << 64) - 1)],
    ),
    "a type that nobody knows": (raw_frame(15, 1), [(15, 1, {}, b"", 0)]),
    "an empty value, and one with a sign": (
        raw_frame(2, 1, b"a=\0b=c=d\0"),
        [(2, 1, {"a": "", "b": "c=d"}, b"", 0)],
    ),
    "the last of two properties counts": (
        raw_frame(2, 1, b"a=1\0a=2\0"),
        [(2, 1, {"a": "2"}, b"", 0)],
    ),
    "text beyond ASCII": (
        raw_frame(2, 1, "ort=Köln\0".encode()),
        [(2, 1, {"ort": "Köln"}, b"", 0)],
    ),
    "a body that looks like a frame": (
        raw_frame(2, 1, b"", raw_frame(2, 9)),
        [(2, 1, {}, raw_frame(2, 9), 0)],
    ),
    "a body of text commands": (raw_frame(2, 1, b"", b"PUB a 1\n"), [(2, 1, {}, b"PUB a 1\n", 0)]),
}

# name -> (stream, frames before it breaks, the error's code)
BROKEN: dict[str, tuple[bytes, list[Any], str]] = {
    "no length at all": (raw_frame(total=0), [], "bad_frame"),
    "shorter than its own head": (raw_frame(total=31), [], "bad_frame"),
    "one byte too long": (raw_frame(total=MOST + 1), [], "frame_too_large"),
    "2^31": (raw_frame(total=1 << 31), [], "frame_too_large"),
    "2^32 - 1": (raw_frame(total=(1 << 32) - 1), [], "frame_too_large"),
    "properties behind the frame": (raw_frame(properties_length=1), [], "bad_frame"),
    "properties of 2^31": (raw_frame(properties_length=1 << 31), [], "bad_frame"),
    "properties of 2^32 - 1": (raw_frame(properties_length=(1 << 32) - 1), [], "bad_frame"),
    "a body behind the frame": (raw_frame(body=b"abc", body_length=4), [], "bad_frame"),
    "a body shorter than the frame": (raw_frame(body=b"abc", body_length=2), [], "bad_frame"),
    "a body of 2^32 - 1": (raw_frame(body=b"abc", body_length=(1 << 32) - 1), [], "bad_frame"),
    "properties without an end": (raw_frame(properties=b"a=1"), [], "bad_frame"),
    "a property without a sign": (raw_frame(properties=b"a\0"), [], "bad_frame"),
    "a property without a name": (raw_frame(properties=b"=1\0"), [], "bad_frame"),
    "an empty property": (raw_frame(properties=b"\0"), [], "bad_frame"),
    "an empty property between others": (raw_frame(properties=b"a=1\0\0b=1\0"), [], "bad_frame"),
    "properties that are no text": (raw_frame(properties=b"a=\xff\0"), [], "bad_frame"),
    "a surrogate": (raw_frame(properties=b"a=\xed\xa0\x80\0"), [], "bad_frame"),
    "what was there before counts": (
        raw_frame(2, 1, b"", b"a") + raw_frame(total=0),
        [(2, 1, {}, b"a", 0)],
        "bad_frame",
    ),
}

RUBBISH = b"\xff\xff\xff\xff rubbish"


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_stream(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """Every case gives the same frames however its bytes arrive, and leaves nothing behind."""
    stream, frames = COMPLETE[name]
    parser = BinaryParser(MOST)
    assert read_binary(feeding(stream), parser) == (frames, None)
    assert parser.buffered == 0


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", COMPLETE)
def test_rubbish_behind_it(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """What was complete before the rubbish counts; then the stream ends with a typed error."""
    stream, frames = COMPLETE[name]
    assert read_binary(feeding(stream + RUBBISH)) == (frames, "frame_too_large")


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """Every case breaks in the same place with the same code; nothing behind it is looked at."""
    stream, frames, code = BROKEN[name]
    parser = BinaryParser(MOST)
    assert read_binary(feeding(stream), parser) == (frames, code)
    assert read_binary([raw_frame()], parser) == ([], code)
    assert parser.buffered == 0


@pytest.mark.parametrize("name", COMPLETE)
def test_nothing_comes_before_the_last_byte(name: str) -> None:
    """Without its last byte, the last frame is not there yet and nothing is wrong."""
    stream, frames = COMPLETE[name]
    assert read_binary([stream[:-1]]) == (frames[:-1], None)


# --- lengths --------------------------------------------------------------------------------------
@pytest.mark.parametrize("total", [FRAME_BYTES_MAX + 1, 1 << 31, (1 << 32) - 1, 0, 31])
def test_a_length_that_cannot_be_is_refused_by_its_four_bytes(total: int) -> None:
    """Before the rest has arrived, and before any memory is set aside for it."""
    parser = BinaryParser()
    tracemalloc.start()
    try:
        found = parser.feed(struct.pack(">I", total))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == []
    assert parser.error is not None
    assert parser.buffered == 0
    assert peak < 64 << 10


@pytest.mark.parametrize("total", [FRAME_BYTES_MIN, FRAME_BYTES_MAX - 1, FRAME_BYTES_MAX])
def test_a_length_that_can_be_sets_no_memory_aside(total: int) -> None:
    """A frame costs what has arrived of it, not what it says of itself."""
    parser = BinaryParser()
    tracemalloc.start()
    try:
        parser.feed(struct.pack(">I", total))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parser.error is None
    assert parser.buffered == 4
    assert peak < 64 << 10


LARGE = raw_frame(27, 9, b"topic=lake\0", bytes(range(256)) * 300, timestamp=5)
LARGE_FLAT = (27, 9, {"topic": "lake"}, bytes(range(256)) * 300, 5)


@given(st.lists(st.integers(0, 2 * len(LARGE)), max_size=12))
def test_a_large_frame_however_it_is_cut(places: list[int]) -> None:
    """It is put together from its chunks; what stands before and behind it is not touched."""
    small = raw_frame(2, 1, b"a=1\0", b"x")
    stream = small + LARGE + small + LARGE
    parser = BinaryParser()
    found = [(2, 1, {"a": "1"}, b"x", 0), LARGE_FLAT]
    assert read_binary(cut_at(stream, places), parser) == (found * 2, None)
    assert parser.buffered == 0


@given(st.integers(1, 200), st.integers(1, 40_000))
def test_a_large_frame_in_chunks_of_any_size(first: int, size: int) -> None:
    """Also when its head arrives in pieces."""
    cuts = range(first, len(LARGE), size)
    assert read_binary(cut_at(LARGE, cuts), BinaryParser()) == ([LARGE_FLAT], None)


@pytest.mark.parametrize(
    "lies",
    [{"body_length": 5}, {"body_length": 1 << 31}, {"properties_length": 1 << 31},
     {"properties_length": 3}, {"properties_length": 70_000}],
)  # fmt: skip
@pytest.mark.parametrize("cut", [3, 20, 30, 300, 17_000, 60_000])
def test_a_large_frame_that_lies_is_refused(lies: dict[str, int], cut: int) -> None:
    """The same error as when it arrives in one piece, and nothing is kept of it."""
    stream = raw_frame(2, 1, b"a=1\0", bytes(70_000), **lies)  # type: ignore[arg-type]
    parser = BinaryParser()
    assert read_binary([stream[:cut], stream[cut:]], parser) == ([], "bad_frame")
    assert parser.buffered == 0


def test_a_large_frame_byte_by_byte_costs_what_it_weighs() -> None:
    """Small chunks are gathered: a slow sender does not cost many times what it sends."""
    parser = BinaryParser()
    tracemalloc.start()
    try:
        for at in range(len(LARGE) - 1):
            parser.feed(LARGE[at : at + 1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parser.buffered == len(LARGE) - 1
    assert peak < 3 * len(LARGE)


def test_more_properties_than_the_limit_are_refused() -> None:
    """Their limit is below the frame's."""
    most = PROPERTIES_BYTES_MAX
    name = b"a" * (most - 2) + b"=\0"
    assert len(name) == most
    (frame,) = BinaryParser().feed(raw_frame(properties=name))
    assert len(frame.properties) == 1
    parser = BinaryParser()
    assert parser.feed(raw_frame(properties=b"a" + name)) == []
    assert parser.error is not None
    assert parser.error.code == "bad_frame"


def test_the_largest_batch_fits_into_a_frame() -> None:
    """What the log takes, the wire carries."""
    assert FRAME_BYTES_MAX >= limits.BATCH_BYTES_MAX + 64 + FRAME_BYTES_MIN


def test_the_first_byte_of_a_frame_is_never_a_letter() -> None:
    """How text and binary share a port: the longest frame's first byte is below every letter."""
    assert struct.pack(">I", FRAME_BYTES_MAX)[0] < min(b"A\t\r\n ")


def test_a_large_frame_in_small_pieces_is_not_copied_for_each_of_them() -> None:
    """A frame of 16 MiB in 1,000 pieces is put together once."""
    body = bytes(16 << 20)
    raw = binary.encode(Type.PUBLISH, 1, {"topic": "a"}, body)
    step = len(raw) // 1000
    parser = BinaryParser()
    tracemalloc.start()
    try:
        frames = [f for at in range(0, len(raw), step) for f in parser.feed(raw[at : at + step])]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(frame.body) for frame in frames] == [len(body)]
    assert peak < 4 * len(body)


def test_pieces_of_one_byte_cost_about_one_byte() -> None:
    """A sender of single bytes does not make the parser keep an object for each."""
    parser = BinaryParser()
    parser.feed(raw_frame(total=1 << 20))
    tracemalloc.start()
    try:
        for _ in range(100_000):
            parser.feed(b"x")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300_000


# --- there and back ---------------------------------------------------------------------------------
@given(PROPERTIES)
def test_properties_come_back_as_they_went(properties: dict[str, str]) -> None:
    """Any text but NUL, and '=' only in values."""
    assert binary.decode_properties(binary.encode_properties(properties)) == properties


@pytest.mark.parametrize(
    "properties",
    [{"topic": "a\0to=b"}, {"topic\0to": "b"}, {"topic": "\ud800"}, {"a": "1", "b": "\0"}],
)
def test_a_property_that_would_arrive_as_another_is_refused(properties: dict[str, str]) -> None:
    """A NUL in a value would begin a property of its own; half a character cannot travel."""
    with pytest.raises(InvalidArgument):
        binary.encode_properties(properties)


@given(
    st.integers(0, (1 << 32) - 1), U64, PROPERTIES, st.binary(max_size=200), U64
)  # fmt: skip
def test_frames_come_back_as_they_went(
    type_: int, sequence: int, properties: dict[str, str], body: bytes, timestamp: int
) -> None:
    """Every field of a frame, over its whole range."""
    raw = binary.encode(type_, sequence, properties, body, timestamp)
    (frame,) = BinaryParser().feed(raw)
    assert (frame.type, frame.sequence, frame.timestamp) == (type_, sequence, timestamp)
    assert frame.properties == properties
    assert frame.body == body


def test_encoding_gives_the_bytes_of_the_seed() -> None:
    """Big-endian, the length with its own four bytes, properties as key=value and NUL."""
    raw = binary.encode(Type.PUBLISH, 3, {"topic": "events"}, b"hi", 5)
    assert raw == raw_frame(2, 3, b"topic=events\0", b"hi", timestamp=5)
    assert raw[:4] == struct.pack(">I", len(raw))


@given(st.lists(st.tuples(U64, U64, U64), max_size=20))
def test_runs_come_back_as_they_went(runs: list[tuple[int, int, int]]) -> None:
    """(lease, first, last) of what is acknowledged together."""
    assert binary.decode_runs(binary.encode_runs(runs)) == runs


@given(st.binary(max_size=100))
def test_runs_of_arbitrary_bytes_are_runs_or_a_typed_error(raw: bytes) -> None:
    """24 bytes each, or refused."""
    if len(raw) % 24:
        with pytest.raises(InvalidArgument, match="24-byte"):
            binary.decode_runs(raw)
    else:
        assert binary.encode_runs(binary.decode_runs(raw)) == raw


# --- whatever bytes there are -----------------------------------------------------------------------
@given(binary_streams(), CUTS)
def test_valid_streams_are_understood_however_they_are_cut(
    stream: tuple[bytes, list[Any]], cuts: list[int]
) -> None:
    """What was sent is what arrives, for every cutting."""
    raw, frames = stream
    assert read_binary(cut_at(raw, cuts)) == (frames, None)


@given(st.binary(max_size=300), CUTS)
def test_arbitrary_bytes_give_frames_or_a_typed_error(raw: bytes, cuts: list[int]) -> None:
    """Nothing else is ever raised, and the cutting makes no difference."""
    outcome = read_binary(whole(raw))
    assert read_binary(cut_at(raw, cuts)) == outcome
    assert read_binary(byte_by_byte(raw)) == outcome


@given(mutated(binary_streams()), CUTS)
def test_damaged_streams_give_frames_or_a_typed_error(raw: bytes, cuts: list[int]) -> None:
    """Nearly right is where parsers break: no difference, nothing else raised."""
    outcome = read_binary(whole(raw))
    assert read_binary(cut_at(raw, cuts)) == outcome
    assert read_binary(byte_by_byte(raw)) == outcome


def test_a_frame_shows_itself() -> None:
    """In logs: the type by name where it has one."""
    assert "PUBLISH #3" in repr(Frame(Type.PUBLISH, 3, {"topic": "a"}, b"hi"))
    assert "15 #3" in repr(Frame(15, 3))


def test_the_types_of_the_seed_have_the_numbers_of_the_design() -> None:
    """1 to 9 are fixed; our own begin at 16."""
    names = ["CREATE_TOPIC", "PUBLISH", "CREATE_SUBSCRIPTION", "DELETE_SUBSCRIPTION", "SUBSCRIBE",
             "UNSUBSCRIBE", "HEARTBEAT", "ACK", "DATA"]  # fmt: skip
    assert [Type[name].value for name in names] == list(range(1, 10))
    assert all(type_ >= 16 for type_ in Type if type_.name not in names)
