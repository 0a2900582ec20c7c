"""The text parser: one table of cases, fed in every way; sizes; whatever bytes there are."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Conflict, HeadraceError, InvalidArgument, QueueFull
from headrace.wire import text
from headrace.wire.text import LINE_BYTES_MAX, PublishRun, TextParser
from tests.wire.streams import (
    CUTS,
    FEEDINGS,
    MESSAGE_BYTES_MAX,
    byte_by_byte,
    cut_at,
    mutated,
    read_text,
    text_streams,
    whole,
)


def pub(topic: str, payload: bytes, **options: str) -> tuple[Any, ...]:
    return ("PUB", [topic], options, payload)


def command(verb: str, *words: str, **options: str) -> tuple[Any, ...]:
    return (verb, list(words), options, None)


# name -> (stream, what is said in it)
COMPLETE: dict[str, tuple[bytes, list[Any]]] = {
    "the seed's publish": (
        b'PUB orders 16\r\n{"order_id":101}',
        [pub("orders", b'{"order_id":101}')],
    ),
    "the seed's fetch": (b"FETCH orders 50\r\n", [command("FETCH", "orders", "50")]),
    "a bare line end": (b"FETCH orders 50\n", [command("FETCH", "orders", "50")]),
    "netcat adds a line end to the payload": (
        b"PUB a 2\nhi\nPING\n",
        [pub("a", b"hi"), command("PING")],
    ),
    "so does telnet": (b"PUB a 2\r\nhi\r\nPING\r\n", [pub("a", b"hi"), command("PING")]),
    "no line end behind the payload": (b"PUB a 2\nhiPING\n", [pub("a", b"hi"), command("PING")]),
    "one line end is skipped, the next ends an empty line": (
        b"PUB a 2\nhi\n\r\n\nPING\n",
        [pub("a", b"hi"), command("PING")],
    ),
    "nothing in the payload": (b"PUB a 0\r\nPUB a 0\r\n\r\n", [pub("a", b""), pub("a", b"")]),
    "line ends in the payload": (b"PUB a 4\n\r\n\r\nPING\n", [pub("a", b"\r\n\r\n"), command("PING")]),
    "a command in the payload": (b"PUB a 5\nPING\nPING\n", [pub("a", b"PING\n"), command("PING")]),
    "any bytes in the payload": (b"PUB a 4\n\x00\xff\xfe\x80", [pub("a", b"\x00\xff\xfe\x80")]),
    "the largest payload": (
        b"PUB a 1000\n" + b"x" * 1000,
        [pub("a", b"x" * 1000)],
    ),
    "a run": (
        b"PUB a 1\nxPUB a 1\nyPUB a 1\nz",
        [pub("a", b"x"), pub("a", b"y"), pub("a", b"z")],
    ),
    "a run with line ends of both kinds": (
        b"PUB a 1\nx\nPUB a 1\ny\r\nPUB a 1\nz\r\n",
        [pub("a", b"x"), pub("a", b"y"), pub("a", b"z")],
    ),
    "a run that changes its topic and its size": (
        b"PUB a 1\nxPUB b 1\nyPUB b 2\nzz",
        [pub("a", b"x"), pub("b", b"y"), pub("b", b"zz")],
    ),
    "a run with another topic of the same length in the middle": (
        b"PUB a 1\nxPUB b 1\nyPUB a 1\nzPUB a 1\nw",
        [pub("a", b"x"), pub("b", b"y"), pub("a", b"z"), pub("a", b"w")],
    ),
    "a run of which each payload looks like the next first line": (
        b"PUB a 8\nPUB a 8\nPUB a 8\nPUB a 8\n",
        [pub("a", b"PUB a 8\n"), pub("a", b"PUB a 8\n")],
    ),
    "options": (
        b"PUB a 1 key=k h.source=api\nx",
        [("PUB", ["a"], {"key": "k", "h.source": "api"}, b"x")],
    ),
    "a run broken by options": (
        b"PUB a 1\nxPUB a 1 key=k\nyPUB a 1\nz",
        [pub("a", b"x"), pub("a", b"y", key="k"), pub("a", b"z")],
    ),
    "an option without a value, and one with two signs": (
        b"SUB a group= start=a=b\n",
        [command("SUB", "a", group="", start="a=b")],
    ),
    "the last of two options counts": (b"SUB a x=1 x=2\n", [command("SUB", "a", x="2")]),
    "an option without a name is a word": (b"SUB =x\n", [command("SUB", "=x")]),
    "small letters": (b"pub a 1\nxfetch a 0\n", [pub("a", b"x"), command("FETCH", "a", "0")]),
    "blanks and tabs": (b"  FETCH \t orders   50  \r\n", [command("FETCH", "orders", "50")]),
    "empty lines": (b"\r\n\n  \nPING\n", [command("PING")]),
    "text beyond ASCII": ("PUB ä 1 h.ort=Köln\nx".encode(), [("PUB", ["ä"], {"h.ort": "Köln"}, b"x")]),
    "a verb that nobody knows": (b"MAKE coffee\n", [command("MAKE", "coffee")]),
    "a size with zeros before it": (b"PUB a 0002\nhi", [pub("a", b"hi")]),
    "a line that is as long as it may be": (
        b"X" * (LINE_BYTES_MAX - 1) + b"\n",
        [command("X" * (LINE_BYTES_MAX - 1))],
    ),
}  # fmt: skip

# name -> (stream, what is said before it breaks, the error's code)
BROKEN: dict[str, tuple[bytes, list[Any], str]] = {
    "no size": (b"PUB orders\n", [], "bad_command"),
    "nothing but the verb": (b"PUB\n", [], "bad_command"),
    "a word too many": (b"PUB orders 1 2\nx", [], "bad_command"),
    "a negative size": (b"PUB orders -1\n", [], "bad_command"),
    "a size with a sign": (b"PUB orders +1\nx", [], "bad_command"),
    "a size that is no number": (b"PUB orders ten\n", [], "bad_command"),
    "a size in another script": ("PUB orders ١\nx".encode(), [], "bad_command"),
    "a size with a superscript": ("PUB orders ²\nx".encode(), [], "bad_command"),
    "a size in scientific notation": (b"PUB orders 1e1\n", [], "bad_command"),
    "bytes that are no text": (b"PING\n\xff\xfe\nPING\n", [("PING", [], {}, None)], "bad_command"),
    "what was said before counts": (b"PUB a 1\nxPUB a\n", [pub("a", b"x")], "bad_command"),
    "one byte too much": (b"PUB a 1001\n" + b"x" * 1001, [], "message_too_large"),
    "a line without an end": (b"X" * LINE_BYTES_MAX, [], "line_too_long"),
    "a line that is one byte too long": (b"X" * LINE_BYTES_MAX + b"\n", [], "line_too_long"),
}

RUBBISH = b"\xff\x00 rubbish \xfe\n"


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_stream(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """Every case gives the same commands however its bytes arrive, and leaves nothing behind."""
    stream, said = COMPLETE[name]
    parser = TextParser(MESSAGE_BYTES_MAX)
    assert read_text(feeding(stream), parser) == (said, None)
    assert parser.buffered == 0


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", COMPLETE)
def test_rubbish_behind_it(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """What was complete before the rubbish counts; then the stream ends with a typed error."""
    stream, said = COMPLETE[name]
    assert read_text(feeding(stream + RUBBISH)) == (said, "bad_command")


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream(name: str, feeding: Callable[[bytes], list[bytes]]) -> None:
    """Every case breaks in the same place with the same code; nothing behind it is looked at."""
    stream, said, code = BROKEN[name]
    parser = TextParser(MESSAGE_BYTES_MAX)
    assert read_text(feeding(stream), parser) == (said, code)
    assert read_text([b"PING\n", b"PUB a 1\nx"], parser) == ([], code)
    assert parser.buffered == 0


@pytest.mark.parametrize("name", COMPLETE)
def test_nothing_comes_before_the_last_byte(name: str) -> None:
    """Without its last byte, the last command is not there yet and nothing is wrong."""
    stream, said = COMPLETE[name]
    stream = stream.rstrip(b"\r\n") if said[-1][3] is not None else stream
    found, error = read_text([stream[:-1]])
    assert error is None
    assert found == said[:-1] or (said[-1][3] == b"" and found == said)


# --- sizes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [1, 1000, 1 << 20, 64 << 20])
@pytest.mark.parametrize(
    "size", ["max + 1", 1 << 31, (1 << 31) + 1, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**20 - 1]
)
def test_a_size_beyond_the_limit_is_refused_before_anything_is_kept(most: int, size: Any) -> None:
    """The line alone is enough to refuse it, and refusing it costs no memory."""
    number = most + 1 if size == "max + 1" else size
    parser = TextParser(most)
    line = b"PUB a %d\r\n" % number
    tracemalloc.start()
    try:
        found = parser.feed(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == []
    assert parser.error is not None
    assert parser.error.code == "message_too_large"
    assert parser.buffered == 0
    assert peak < 64 << 10


def test_a_size_of_more_digits_than_any_number_needs_is_not_even_read() -> None:
    """Turning a million digits into a number would take a while."""
    parser = TextParser(1000)
    parser.feed(b"PUB a " + b"9" * 70_000 + b"\n")
    assert parser.error is not None
    assert parser.error.code == "bad_command"


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_a_size_up_to_the_limit_is_taken(size: int) -> None:
    """Zero and the limit itself are sizes like any other."""
    stream = b"PUB a %d\n" % size + b"x" * size
    assert read_text([stream]) == ([pub("a", b"x" * size)], None)


def test_what_is_kept_is_bounded() -> None:
    """An incomplete command never holds more than a line and a payload."""
    parser = TextParser(MESSAGE_BYTES_MAX)
    read_text([b"PUB a 1000\n" + b"x" * 999], parser)
    assert parser.buffered == len(b"PUB a 1000\n") + 999
    parser = TextParser(MESSAGE_BYTES_MAX)
    read_text([b"X" * (LINE_BYTES_MAX - 1)], parser)
    assert parser.buffered == LINE_BYTES_MAX - 1


def test_a_large_payload_in_small_pieces_is_not_copied_for_each_of_them() -> None:
    """16 MiB in 1,000 pieces: were all of it copied for each piece, that would be 8 GiB."""
    size = 16 << 20
    piece = bytes(size // 1000 + 1)
    parser = TextParser(size)
    tracemalloc.start()
    try:
        parser.feed(b"PUB a %d\n" % size)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(999):
            assert parser.feed(piece) == []
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held - before < size * 1.2
    assert peak - before < size * 2.5
    (run,) = parser.feed(piece)
    assert isinstance(run, PublishRun)
    assert len(run.values[0]) == size


def test_pieces_of_one_byte_cost_about_one_byte() -> None:
    """A sender of single bytes does not make the parser keep an object for each."""
    parser = TextParser(1 << 20)
    parser.feed(b"PUB a 100001\n")
    tracemalloc.start()
    try:
        for _ in range(100_000):
            parser.feed(b"x")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300_000


# --- whatever bytes there are -----------------------------------------------------------------------
@given(text_streams(), CUTS)
def test_valid_streams_are_understood_however_they_are_cut(
    stream: tuple[bytes, list[Any]], cuts: list[int]
) -> None:
    """What was said is what is heard, for every cutting."""
    raw, said = stream
    assert read_text(cut_at(raw, cuts)) == (said, None)


@given(st.binary(max_size=300), CUTS)
def test_arbitrary_bytes_give_commands_or_a_typed_error(raw: bytes, cuts: list[int]) -> None:
    """Nothing else is ever raised, and the cutting makes no difference."""
    outcome = read_text(whole(raw))
    assert read_text(cut_at(raw, cuts)) == outcome
    assert read_text(byte_by_byte(raw)) == outcome


@given(mutated(text_streams()), CUTS)
def test_damaged_streams_give_commands_or_a_typed_error(raw: bytes, cuts: list[int]) -> None:
    """Nearly right is where parsers break: no difference, nothing else raised."""
    outcome = read_text(whole(raw))
    assert read_text(cut_at(raw, cuts)) == outcome
    assert read_text(byte_by_byte(raw)) == outcome


@given(
    st.lists(st.sampled_from([b"PUB a 1\n", b"PUB a 0\n", b"\r", b"\n", b"x", b"P", b" "])), CUTS
)
def test_streams_of_telling_pieces_do_not_depend_on_the_cutting(
    pieces: list[bytes], cuts: list[int]
) -> None:
    """Line ends and first lines in every order, where the short way must agree with the long one."""
    raw = b"".join(pieces)
    outcome = read_text(whole(raw))
    assert read_text(byte_by_byte(raw)) == outcome
    assert read_text(cut_at(raw, cuts)) == outcome


# --- answers --------------------------------------------------------------------------------------
def test_answers_look_as_the_seed_says() -> None:
    """OK <offset>, MSG <offset> <size> and the payload, ERR <code> <text>."""
    assert text.ok(50) == b"OK 50\r\n"
    assert text.message(50, b'{"order_id":101}') == b'MSG 50 16\r\n{"order_id":101}'
    assert text.error(QueueFull("it is full")) == b"ERR queue_full it is full\r\n"
    assert text.done() == b"OK\r\n"
    assert text.done("bye") == b"OK bye\r\n"


def test_the_answers_to_a_run_are_one_for_each() -> None:
    """Offsets one behind the other; or the same refusal for each."""
    assert text.ok_run(7, 3) == b"OK 7\r\nOK 8\r\nOK 9\r\n"
    assert text.error_run(Conflict("no"), 2) == b"ERR conflict no\r\n" * 2


@given(st.text(max_size=200))
def test_an_error_is_one_line_whatever_its_sentence(sentence: str) -> None:
    """A sentence with line ends in it cannot pass for an answer."""
    try:
        line = text.error(InvalidArgument(sentence))
    except UnicodeEncodeError:
        assert any(0xD800 <= ord(character) < 0xE000 for character in sentence)
        return
    assert line.startswith(b"ERR invalid_argument ")
    assert line.endswith(b"\r\n")
    assert b"\n" not in line[:-2]
    assert b"\r" not in line[:-2]


def test_a_delivery_says_where_it_is_from_and_what_to_acknowledge() -> None:
    """MSG <offset> <size> <topic> <partition> <delivery> <attempt>, then the payload."""
    assert text.delivered(3, b"hi", "orders", 1, "12.3", 2) == b"MSG 3 2 orders 1 12.3 2\r\nhi"


def test_listings_and_documents_say_how_long_they_are() -> None:
    """A client knows where they end."""
    assert text.listing(["a", "b"]) == b"LIST 2\r\na\r\nb\r\n"
    assert text.listing([]) == b"LIST 0\r\n"
    assert text.document(b"{}") == b"JSON 2\r\n{}\r\n"


def test_the_error_of_a_parser_is_a_headrace_error() -> None:
    """So that every front end can answer with its code."""
    parser = TextParser(10)
    parser.feed(b"PUB\n")
    assert isinstance(parser.error, HeadraceError)
