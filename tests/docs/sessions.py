r"""Conversations with a broker as they stand in a text, and how they are held for real.

A block ``text session`` is bytes: each line behind ``> `` is sent and each behind ``< `` is what must
come back, with ``\r``, ``\n``, ``\0`` and ``\xNN`` for what cannot be printed. A line has no end but the
one it shows. ``hex session`` is the same in hexadecimal digits, two blanks before a remark, ``..`` for
any byte. ``frames session`` shows binary frames: the type and ``#`` with the sequence number, then a
line for each property, and ``body:``. ``= closed`` says that the broker closes the connection.

``<name>`` in an answer stands for what cannot be known beforehand; the same name later stands for the
same thing again.
"""

import re
import socket
from collections.abc import Iterator

from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Frame, Type

TIMEOUT_S = 10.0
_NAME = re.compile(r"<([a-z_]+)>")
_ESCAPE = re.compile(r"\\(r|n|0|x[0-9a-f]{2})")


class Step:
    """Some lines of one direction."""

    def __init__(self, way: str, lines: list[str]):
        self.way = way
        self.lines = lines


def steps(text: str) -> Iterator[Step]:
    """Consecutive lines of one direction together; indented ones belong to the line above."""
    way, lines = "", []
    for line in text.splitlines():
        if not line.strip():
            continue
        if line.startswith(("> ", "< ", "= ")):
            if line[0] != way and lines:
                yield Step(way, lines)
                lines = []
            way = line[0]
            lines.append(line[2:])
        else:
            assert line.startswith("  "), f"neither > nor <: {line!r}"
            lines.append(line.strip())
    if lines:
        yield Step(way, lines)


class Conversation:
    """One connection, and what was learnt on it."""

    def __init__(self, address: tuple[str, int], timeout: float = TIMEOUT_S):
        self._socket = socket.create_connection(address, timeout)
        self._known: dict[str, str] = {}
        self._received = b""

    def close(self) -> None:
        self._socket.close()

    # --- words ------------------------------------------------------------------------------
    def _fill(self, text: str) -> str:
        return _NAME.sub(lambda found: self._known.get(found[1], found[0]), text)

    def _pattern(self, text: str) -> str:
        """A regular expression for a text with names in it."""
        parts = []
        at = 0
        for found in _NAME.finditer(text := self._fill(text)):
            parts.append(re.escape(text[at : found.start()]))
            named = f"?P<{found[1]}>" if f"?P<{found[1]}>" not in "".join(parts) else ""
            parts.append(f'({named}[^\\s"=]+?)' if named else f"(?P={found[1]})")
            at = found.end()
        parts.append(re.escape(text[at:]))
        return "".join(parts)

    # --- bytes ------------------------------------------------------------------------------
    def text(self, text: str) -> None:
        for step in steps(text):
            if step.way == ">":
                self._socket.sendall(_bytes("".join(map(self._fill, step.lines))))
            elif step.way == "<":
                self._expect(_bytes(self._pattern("".join(step.lines)), pattern=True))
            else:
                self._expect_end(step.lines)

    def hex(self, text: str) -> None:
        for step in steps(text):
            digits = "".join(line.split("  ")[0].replace(" ", "") for line in step.lines)
            if step.way == ">":
                self._socket.sendall(bytes.fromhex(digits))
            elif step.way == "<":
                pairs = re.findall("..", digits)
                self._expect(b"".join(b"." if p == ".." else _quoted(p) for p in pairs))
            else:
                self._expect_end(step.lines)

    def _expect(self, pattern: bytes) -> None:
        whole = re.compile(pattern, re.DOTALL)
        while not (found := whole.fullmatch(self._received)):
            self._more(f"expected {pattern!r}")
        self._known |= {name: value.decode() for name, value in found.groupdict().items()}
        self._received = b""

    def _more(self, wanted: str) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise AssertionError(f"{wanted}, got {self._received!r} and nothing more") from None
        if not data:
            raise AssertionError(f"{wanted}, got {self._received!r} and the connection was closed")
        self._received += data

    def _expect_end(self, lines: list[str]) -> None:
        assert lines == ["closed"], lines
        assert self._received == b""
        assert self._socket.recv(1 << 16) == b"", "the connection was not closed"

    # --- frames -----------------------------------------------------------------------------
    def frames(self, text: str) -> None:
        parser = BinaryParser()
        arrived: list[Frame] = []
        for step in steps(text):
            if step.way == "=":
                self._expect_end(step.lines)
                continue
            for head, properties, body in _frames(step.lines):
                kind, sequence = head.split(" #")
                if step.way == ">":
                    self._socket.sendall(self._frame(kind, sequence, properties, body))
                    continue
                while not arrived:
                    self._more(f"expected {head}")
                    arrived += parser.feed(self._received)
                    self._received = b""
                self._compare(arrived.pop(0), kind, sequence, properties, body)
        assert not arrived, f"and there came {arrived}"

    def _frame(self, kind: str, sequence: str, properties: dict[str, str], body: str) -> bytes:
        filled = {name: self._fill(value) for name, value in properties.items()}
        return binary.encode(Type[kind], int(sequence), filled, _body(self._fill(body)))

    def _compare(
        self, frame: Frame, kind: str, sequence: str, properties: dict[str, str], body: str
    ) -> None:
        assert (Type(frame.type).name, str(frame.sequence)) == (kind, sequence), frame
        assert set(frame.properties) == set(properties), frame
        for name, value in properties.items():
            self._learn(self._pattern(value), frame.properties[name])
        if body == "...":
            assert frame.body
        else:
            assert frame.body == _body(self._fill(body)), frame.body

    def _learn(self, pattern: str, value: str) -> None:
        found = re.fullmatch(pattern, value)
        assert found, f"{value!r} is not {pattern!r}"
        self._known |= found.groupdict()


def _frames(lines: list[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """(type and number, properties, body) of each frame."""
    head, properties, body = "", {}, ""
    for line in lines:
        if re.fullmatch(r"[A-Z_]+ #\d+", line):
            if head:
                yield head, properties, body
            head, properties, body = line, {}, ""
        elif line.startswith("body: "):
            body = line.removeprefix("body: ")
        else:
            name, _, value = line.partition("=")
            properties[name] = value
    yield head, properties, body


def _body(text: str) -> bytes:
    """Text, or hexadecimal digits behind ``hex``."""
    if text.startswith("hex "):
        return bytes.fromhex(text.removeprefix("hex "))
    return text.encode()


def _bytes(text: str, *, pattern: bool = False) -> bytes:
    """What a line stands for. In a pattern the backslashes of escapes are escaped themselves."""
    if pattern:
        text = re.sub(r"\\\\(r|n|0|x[0-9a-f]{2})", r"\\\1", text)
    return _ESCAPE.sub(_one, text).encode("latin-1") if text.isascii() else text.encode()


def _one(found: re.Match[str]) -> str:
    named = {"r": "\r", "n": "\n", "0": "\0"}
    return named.get(found[1]) or chr(int(found[1][1:], 16))


def _quoted(pair: str) -> bytes:
    return re.escape(bytes.fromhex(pair))
