"""WebSocket frames without I/O: this module parses plain frames, the library parses all others.

::

    [1: 0x81 (final, text)] [1: 0x80 | size] [2: size, if the size before it is 126] [4: mask] [content]

A client that publishes sends small text frames, each in one piece. They are parsed here, in a third of
the time that the library takes. Whole control frames are passed to the library, in their order. After the
first frame of another kind (fragmented, large, binary, or invalid) the library gets everything: it
implements all the rules.
"""

from __future__ import annotations

try:
    from websockets.speedups import apply_mask
except ImportError:
    from websockets.utils import apply_mask

_TEXT = 0x81
_PLAIN = frozenset((_TEXT, 0x88, 0x89, 0x8A))
"""Text, close, ping and pong, each final."""


class PlainFrames:
    """Cuts a stream into the contents of plain text frames and pieces for the library."""

    def __init__(self) -> None:
        self._held = b""
        """The beginning of an incomplete frame: less than 64 KiB."""
        self._is_plain = True

    def cut(self, data: bytes) -> list[tuple[bytes, bool]]:
        """(content, True) for a text; (bytes, False) for the library."""
        if not self._is_plain:
            return [(data, False)]
        if self._held:
            data = self._held + data
        found: list[tuple[bytes, bool]] = []
        at, end = 0, len(data)
        while end - at >= 6:
            first, size, start = data[at], data[at + 1] ^ 0x80, at + 6
            if size == 126 and first == _TEXT:
                size, start = data[at + 2] << 8 | data[at + 3], at + 8
            elif size > 125 or first not in _PLAIN:  # large, not masked, in pieces, or wrong
                self._is_plain = False
                self._held = b""
                found.append((data[at:], False))
                return found
            stop = start + size
            if stop > end:
                break
            if first == _TEXT:
                found.append((apply_mask(data[start:stop], data[start - 4 : start]), True))
            else:
                found.append((data[at:stop], False))
            at = stop
        self._held = data[at:]
        return found
