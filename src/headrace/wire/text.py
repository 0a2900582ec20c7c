r"""The text protocol, for people with netcat and for simple clients.

::

    PUB <topic> <size> [name=value ...]\r\n<payload>      ->  OK <offset>\r\n
    FETCH <topic> <position> [name=value ...]\r\n         ->  MSG <offset> <size>\r\n<payload>
    <VERB> <word> ... [name=value ...]\r\n                ->  as docs/protocol.md says
                                          any failure     ->  ERR <code> <sentence>\r\n

A bare ``\n`` ends a line too. A line end after a payload is skipped, so that netcat works.

:class:`TextParser` turns bytes into :class:`PublishRun` (consecutive publishes to one topic) and
:class:`Command`. Runs make it fast: a client that pipelines sends the same first line again and again,
so the parser compares it instead of parsing it. A protocol error ends the stream, because after an
invalid size the parser cannot know where the next command begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import HeadraceError, InvalidArgument, TooLarge

LINE_BYTES_MAX = 80 << 10
"""Verb, topic and headers; a header may have 64 KiB."""


class PublishRun:
    """Publishes without options to one topic, in order."""

    __slots__ = ("bytes", "topic", "values")

    def __init__(self, topic: str, values: list[bytes], size: int):
        self.topic = topic
        self.values = values
        self.bytes = size
        """The size of all values together."""


class Command:
    """Any other command; ``payload`` only with PUB."""

    __slots__ = ("options", "payload", "verb", "words")

    def __init__(
        self, verb: str, words: list[str], options: dict[str, str], payload: bytes | None = None
    ):
        self.verb = verb
        self.words = words
        self.options = options
        self.payload = payload


class TextParser:
    """Feed it bytes; it returns commands. After an error it returns nothing more."""

    def __init__(self, message_bytes_max: int):
        self._message_bytes_max = message_bytes_max
        self._held = bytearray()
        """The bytes of an incomplete command."""
        self._skip_line_end = False
        self._needed = 0
        self.error: HeadraceError | None = None

    @property
    def buffered(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> list[PublishRun | Command]:
        """The commands that are complete now. If the stream is invalid, ``error`` is set."""
        if self.error is not None:
            return []
        held = self._held
        if len(held) + len(data) < self._needed:  # a large payload: do not parse after every piece
            held += data
            return []
        buffer = b"".join((held, data)) if held else data
        found: list[PublishRun | Command] = []
        try:
            at = self._parse(buffer, found)
        except HeadraceError as error:
            self.error = error
            at = len(buffer)
        self._held = bytearray(memoryview(buffer)[at:])
        return found

    def _parse(self, buffer: bytes, found: list[PublishRun | Command]) -> int:
        """Parse complete commands; returns where the incomplete one begins."""
        at, end = 0, len(buffer)
        self._needed = 0
        while at < end:
            if self._skip_line_end:
                after = _after_line_end(buffer, at)
                if after < 0:  # a CR that may be half of a line end
                    break
                self._skip_line_end = False
                at = after
                if at >= end:
                    break
            line_end = buffer.find(b"\n", at, at + LINE_BYTES_MAX)
            if line_end < 0:
                if end - at >= LINE_BYTES_MAX:
                    raise TooLarge(
                        f"a command line has at most {LINE_BYTES_MAX} bytes", code="line_too_long"
                    )
                break
            words, options = _words(buffer[at:line_end])
            start = line_end + 1
            if not words:
                at = start
                continue
            verb = words[0].upper()
            if verb != "PUB":
                found.append(Command(verb, words[1:], options))
                at = start
                continue
            topic, size = self._publish_line(words)
            if end - start < size:
                self._needed = (start - at) + size
                break
            payload = buffer[start : start + size]
            head = buffer[at:start]
            at = start + size
            self._skip_line_end = True
            if options:
                found.append(Command("PUB", [topic], options, payload))
                continue
            values = [payload]
            at = self._same_again(buffer, at, head, size, values)
            last = found[-1] if found else None
            if isinstance(last, PublishRun) and last.topic == topic:
                last.values += values
                last.bytes += size * len(values)
            else:
                found.append(PublishRun(topic, values, size * len(values)))
        return at

    def _same_again(
        self, buffer: bytes, at: int, head: bytes, size: int, values: list[bytes]
    ) -> int:
        """The fast path: further publishes with the same first line."""
        end = len(buffer)
        step = len(head) + size
        width = len(head)
        append = values.append
        starts_with = buffer.startswith
        count = (end - at) // step
        if count > 1 and starts_with(head, at) and starts_with(head, at + (count - 1) * step):
            places = range(at, at + count * step, step)
            if b"".join([buffer[place : place + width] for place in places]) == head * count:
                values += [buffer[place + width : place + step] for place in places]
                at += count * step
        while at + step <= end:
            if starts_with(head, at):
                append(buffer[at + width : at + step])
                at += step
            elif starts_with(b"\r\n" + head, at) and at + 2 + step <= end:
                append(buffer[at + 2 + width : at + 2 + step])
                at += 2 + step
            elif starts_with(b"\n" + head, at) and at + 1 + step <= end:
                append(buffer[at + 1 + width : at + 1 + step])
                at += 1 + step
            else:
                break
        return at

    def _publish_line(self, words: list[str]) -> tuple[str, int]:
        if len(words) != 3:
            raise InvalidArgument("it is PUB <topic> <size>, then the payload", code="bad_command")
        text = words[2]
        if not (text.isascii() and text.isdigit()) or len(text) > 20:
            raise InvalidArgument(f"{text[:40]!r} is not a payload size", code="bad_command")
        size = int(text)
        if size > self._message_bytes_max:
            raise TooLarge(
                f"the message has {size} bytes, the limit is {self._message_bytes_max} "
                "(max_message_size)",
                code="message_too_large",
            )
        return words[1], size


def is_http(command: Command) -> bool:
    """Whether the line is the first one of an HTTP request, with whatever method."""
    last = command.words[-1] if command.words else ""
    return last[:5].upper() == "HTTP/" and last[5:6].isdigit()


def _after_line_end(buffer: bytes, at: int) -> int:
    """The position after a line end, or ``at`` if there is none; -1 if that is not known yet."""
    if buffer[at : at + 1] == b"\n":
        return at + 1
    if buffer[at : at + 1] == b"\r":
        if at + 1 == len(buffer):
            return -1
        if buffer[at + 1 : at + 2] == b"\n":
            return at + 2
    return at


def _words(line: bytes) -> tuple[list[str], dict[str, str]]:
    """The words of a line, and its options: the words after the first that are ``name=value``."""
    try:
        words = line.decode().split()
    except UnicodeDecodeError:
        raise InvalidArgument("a command line is UTF-8 text", code="bad_command") from None
    options: dict[str, str] = {}
    if words and words[0].upper() == "AUTH":  # a secret may have any form
        return words, options
    plain = []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if number and equals and name:
            options[name] = value
        else:
            plain.append(word)
    return plain, options


# --- answers ------------------------------------------------------------------------------------
_OK = b"OK %d\r\n"


def ok(offset: int) -> bytes:
    return _OK % offset


def ok_run(first: int, count: int) -> bytes:
    """The answers to ``count`` publishes with consecutive offsets."""
    return b"".join(map(_OK.__mod__, range(first, first + count)))


def done(text: str = "") -> bytes:
    return f"OK {text}\r\n".encode() if text else b"OK\r\n"


def error(failure: HeadraceError) -> bytes:
    sentence = " ".join(failure.message.split())
    return f"ERR {failure.code} {sentence}\r\n".encode()


def error_run(failure: HeadraceError, count: int) -> bytes:
    return error(failure) * count


def message(offset: int, value: bytes) -> bytes:
    return b"MSG %d %d\r\n%b" % (offset, len(value), value)


def merged(offset: int, value: bytes, topic: str, partition: int) -> bytes:
    """A message of a FETCH of all partitions: ``MSG`` with its topic and partition."""
    return f"MSG {offset} {len(value)} {topic} {partition}\r\n".encode() + value


def delivered(
    offset: int, value: bytes, topic: str, partition: int, delivery: str, attempt: int
) -> bytes:
    """A message for a SUB: ``MSG`` with its topic, partition, delivery and attempt."""
    head = f"MSG {offset} {len(value)} {topic} {partition} {delivery} {attempt}\r\n"
    return head.encode() + value


def listing(lines: Iterable[str]) -> bytes:
    rows = list(lines)
    return "".join([f"LIST {len(rows)}\r\n", *(f"{row}\r\n" for row in rows)]).encode()


def document(content: bytes) -> bytes:
    return b"JSON %d\r\n%b\r\n" % (len(content), content)
