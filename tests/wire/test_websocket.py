"""Plain frames cut by hand: what comes out is what the library makes of the same stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, Protocol, Side

from headrace.wire.websocket import PlainFrames

SIZE_MAX = 1 << 20


def masked(
    opcode: int, content: bytes, *, fin: bool = True, mask: bytes = b"abcd", wide: bool = False
) -> bytes:
    size = len(content)
    first = (0x80 if fin else 0) | opcode
    if size < 126 and not wide:
        head = bytes((first, 0x80 | size))
    elif size < 65536:
        head = bytes((first, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, 0xFF)) + size.to_bytes(8, "big")
    return head + mask + bytes(b ^ mask[n % 4] for n, b in enumerate(content))


class Library:
    """All frames through the library, from wherever it is handed the stream."""

    def __init__(self) -> None:
        self._protocol = Protocol(Side.SERVER, state=OPEN, max_size=SIZE_MAX)

    @property
    def is_open(self) -> bool:
        return self._protocol.state is OPEN

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._protocol.receive_data(data)
        events = self._protocol.events_received()
        found = [(int(e.opcode), bytes(e.data)) for e in events if isinstance(e, Frame)]
        if self._protocol.close_sent is not None and self._protocol.close_rcvd is None:
            found.append((-1, str(self._protocol.close_sent.code).encode()))
        return found


def by_library(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    library = Library()
    return [frame for piece in pieces for frame in library.feed(piece)]


def by_hand(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    frames, library = PlainFrames(), Library()
    found: list[tuple[int, bytes]] = []
    for piece in pieces:
        for content, is_text in frames.cut(piece):
            if not is_text:
                found += library.feed(content)
            elif library.is_open:  # as the session does it
                found.append((int(Opcode.TEXT), content))
    return found


FRAMES = [
    masked(1, b""),
    masked(1, b"hello"),
    masked(1, b"x" * 125),
    masked(1, b"y" * 126, mask=b"\0\0\0\0"),
    masked(1, b"z" * 300),
    masked(1, b"wide", wide=True),
    masked(9, b""),
    masked(10, b"pong"),
    masked(2, b"binary"),
]
OTHERS = [
    masked(1, b"piece", fin=False),
    masked(0, b"rest"),
    masked(1, b"large" * 20_000),
    b"\x81\x05hello",  # not masked
    masked(3, b"unknown"),
    b"\xc1" + masked(1, b"reserved")[1:],
    masked(9, b"p" * 126),  # a control frame is short
    masked(8, b"\x03\xe8"),
]


@given(st.lists(st.sampled_from(FRAMES), max_size=12), st.data())
def test_good_frames_mean_the_same_however_they_are_cut(
    frames: list[bytes], data: st.DataObject
) -> None:
    """Texts, pings, pongs and binary ones, in pieces of any size."""
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert by_hand(pieces) == by_library(pieces) == by_library([stream])


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_what_is_not_plain_is_for_the_library(other: bytes, step: int) -> None:
    """Frames in pieces, large ones, mistakes and goodbyes: the library's verdict, in its place."""
    stream = masked(1, b"before") + other + masked(1, b"after")
    pieces = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert [f for f in by_hand(pieces) if f[0] >= 0] == [f for f in by_library(pieces) if f[0] >= 0]
    assert [f for f in by_hand(pieces) if f[0] < 0][:1] == [
        f for f in by_library(pieces) if f[0] < 0
    ][:1]


def test_an_empty_pong_does_not_wait_for_more() -> None:
    """Six bytes are a frame."""
    assert PlainFrames().cut(masked(10, b"")) == [(masked(10, b""), False)]


def test_what_is_held_is_bounded() -> None:
    """Only a plain frame that is not all there is kept, and such a frame is small."""
    frames = PlainFrames()
    whole = masked(1, b"x" * 65535)
    assert frames.cut(whole[:-1]) == []
    assert frames.cut(whole[-1:]) == [(b"x" * 65535, True)]
    assert frames.cut(masked(1, b"x" * 65536)[:20]) == [(masked(1, b"x" * 65536)[:20], False)]
