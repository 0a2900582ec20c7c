"""Coverage-guided fuzzing of everything that reads bytes from a stranger.

    python -m tests.wire.fuzz --seconds 60 [--corpus DIRECTORY]

The first byte chooses the reader: the text parser, the binary parser, the check of a batch, the HTTP parser, or
the cutter of WebSocket frames. Each may
find something or refuse it with a typed error, and nothing else; and how the bytes are cut must make no
difference. It needs ``atheris`` (``make fuzz`` installs it). A finding is written to the working directory
as ``crash-…``; handing that file over as an argument runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

atheris: Any
try:
    import atheris
except ImportError:
    atheris = None

# What is imported in here tells atheris which of its lines an input reaches.
with atheris.instrument_imports(["headrace"]) if atheris else contextlib.nullcontext():
    from headrace.errors import DataCorrupt, HeadraceError, InvalidArgument
    from headrace.log.admission import check
    from headrace.log.batch import HEADER_BYTES, crc32c, encode
    from headrace.log.columns import Columns
    from headrace.wire import binary
    from headrace.wire.binary import BinaryParser, Type
    from headrace.wire.http import HttpParser
    from headrace.wire.text import PublishRun, TextParser
    from headrace.wire.websocket import PlainFrames

BYTES_MAX = 4096
LENGTH_MAX = 2048
"""Of one input: long enough for several commands, short enough for many tries."""


def _text(pieces: list[bytes]) -> object:
    parser = TextParser(BYTES_MAX)
    found: list[object] = []
    for piece in pieces:
        for item in parser.feed(piece):
            if isinstance(item, PublishRun):
                found += [(item.topic, value) for value in item.values]
            elif item.verb == "PUB" and not item.options:
                found.append((item.words[0], item.payload))
            else:
                found.append((item.verb, item.words, item.options, item.payload))
    assert parser.buffered <= sum(map(len, pieces))
    return found, _code(parser.error)


def _binary(pieces: list[bytes]) -> object:
    parser = BinaryParser(BYTES_MAX)
    found = [
        (frame.type, frame.sequence, dict(frame.properties), frame.body, frame.timestamp)
        for piece in pieces
        for frame in parser.feed(piece)
    ]
    for type_, sequence, properties, body, timestamp in found:
        again = BinaryParser().feed(binary.encode(type_, sequence, properties, body, timestamp))
        assert [dict(frame.properties) for frame in again] == [properties]
    return found, _code(parser.error)


def _code(error: HeadraceError | None) -> str | None:
    assert error is None or isinstance(error, HeadraceError)
    return None if error is None else error.code


def _summed(raw: bytes) -> bytes:
    """The same with right checksums: without them nothing behind the first look is ever reached."""
    body = raw[HEADER_BYTES:]
    rest = struct.pack("<II", crc32c(body), len(body)) + raw[16:30] + b"\1\0" + raw[32:HEADER_BYTES]
    return raw[:4] + struct.pack("<I", crc32c(rest)) + rest + body


def _batch(raw: bytes) -> None:
    try:
        batch = check(raw, message_bytes_max=BYTES_MAX)
    except (DataCorrupt, InvalidArgument):
        return
    columns = batch.columns()
    assert len(columns.values) == batch.count
    assert len(batch.messages("a", 0)) == batch.count


def _http(pieces: list[bytes]) -> object:
    parser = HttpParser(BYTES_MAX)
    found = [
        (
            request.method,
            request.path,
            tuple(request.words),
            dict(request.query),
            dict(request.headers),
            request.body,
            request.keep_alive,
            request.upgrade,
            None if request.refusal is None else request.refusal.code,
        )
        for piece in pieces
        for request in parser.feed(piece)
    ]
    return found, _code(parser.error)


def _websocket(pieces: list[bytes]) -> object:
    """Texts, and between them what is left to the library, however that is cut."""
    frames = PlainFrames()
    found: list[tuple[bytes, bool]] = []
    for piece in pieces:
        for content, is_text in frames.cut(piece):
            if not is_text and found and not found[-1][1]:
                content = found.pop()[0] + content
            found.append((content, is_text))
    return found


READERS = ("text", "binary", "batch", "http", "websocket")
"""The first byte of an input, modulo their number, chooses one of these."""


def one_input(data: bytes) -> None:
    """What is tried with each input. Raises only when something is wrong with us."""
    if not data:
        return
    choice, rest = data[0], data[1:]
    reader = READERS[choice % len(READERS)]
    if reader == "batch":
        _batch(rest)
        if len(rest) > HEADER_BYTES:
            _batch(_summed(rest))
        return
    read = {"text": _text, "binary": _binary, "http": _http, "websocket": _websocket}[reader]
    expected = read([rest])
    cut = choice % (len(rest) + 1)
    assert read([rest[:cut], rest[cut:]]) == expected, f"the cut at {cut} made a difference"
    assert read([rest[at : at + 7] for at in range(0, len(rest), 7)]) == expected


def seeds() -> list[bytes]:
    """Valid inputs to begin with."""
    columns = [
        Columns([b"one", b"two"]),
        Columns([b"one"], [b"key"], [{"a": "b"}], [5], [bytes(range(16))], [7], [b"group"]),
        Columns([b"x" * 400] * 3, [b"k", None, b""]),
    ]
    batches = [encode(each) for each in columns]
    batches[2].pack()
    return [
        b'\0PUB orders 16\r\n{"order_id":101}\r\nFETCH orders 50\r\n',
        b"\0PUB a 1\nxPUB a 1\nyPUB a 1 key=k h.a=b\nz\nSUB a group=g start=0\n\r\nPING\n",
        b"\1" + binary.encode(Type.PUBLISH, 1, {"topic": "a", "h.x": "y"}, b"body", 5),
        b"\1" + binary.encode(Type.HEARTBEAT, 1) + binary.encode(Type.SETTLE, 2, {}, bytes(24)),
        *(b"\2" + batch.raw() for batch in batches),
        b"\3POST /publish/orders?key=a%20b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
        b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\3POST /publish/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
        b"\4\x81\x85abcd" + bytes(5) + b"\x89\x80abcd" + b"\x81\xfe\x00\x80abcd" + bytes(128),
        b"\4\x01\x83abcdxyz\x80\x82abcdxy\x88\x82abcd\x03\xe8",
    ]


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.wire.fuzz")
    options.add_argument("--seconds", type=int, default=60, help="how long to try")
    options.add_argument("--corpus", type=Path, help="keeps what was learnt from run to run")
    options.add_argument("again", nargs="*", help="files of earlier findings, each tried once")
    given = options.parse_args()
    if atheris is None:
        print("atheris is not installed; 'make fuzz' does that", file=sys.stderr)
        return 2
    corpus = given.corpus or Path(tempfile.gettempdir(), "headrace-fuzz")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={given.seconds}", f"-max_len={LENGTH_MAX}"]
    atheris.Setup([sys.argv[0], *limits, *(given.again or [str(corpus)])], one_input)
    atheris.Fuzz()  # ends the process: 0 if nothing was found
    return 0


if __name__ == "__main__":
    sys.exit(main())
