"""``headrace export`` and ``import``: messages of a topic as JSON lines.

An exported line loses nothing (``operations/documents.py``): its ``data`` is always a text, so that the value is known
byte by byte, and it has ``to`` and ``expires`` where a message has them. The import also reads messages as HTTP and
``--json`` show them (``operations/views.py``). So a topic goes to another broker, another name or another program and back without a
loss, except for one thing: times never run backwards in a partition. A message that is older than the last one
of its partition gets that one's time, and its own in the header ``headrace-time``, in milliseconds.

An import doubles nothing, however often it is killed and repeated. The file is cut into chunks, by its content
alone. Each chunk is staged and committed under a name that is made of topic, file content and ``--producer``,
with its number: the broker knows the last number of a name, and continues there. A file is read twice: first to
check every line, so that nothing is imported if one is wrong. Standard input can only be read once, and needs
``--producer``.

Rejected: an idempotent producer (its sequences are remembered by partition, and only the last few batches); a
file beside the import that says how far it came (it is lost, or on another machine, when it is needed).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import time
import zlib
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple
from uuid import UUID

import msgspec
import orjson
import typer

from headrace.cli.backup import batch_reader, disk_errors
from headrace.cli.connecting import BrokerPlace, Topic, connected, with_broker_place
from headrace.cli.printing import (
    AsJson,
    complain,
    count_of,
    json_text,
    print_json,
    progress_bar,
    say,
)
from headrace.cli.values import repartition_option
from headrace.client.own_times import OwnTimes
from headrace.client.threads import BrokerClient
from headrace.contents import TOMBSTONE_HEADER, TOMBSTONE_TEXT, check_headers, check_key
from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.batch import LOST, Batch, encode
from headrace.log.columns import NO_ID, Columns, pieces
from headrace.model import (
    check_subscription_name,
    check_topic_name,
    derive_id,
    parse_position,
    topic_hash,
)
from headrace.notation import parse_time
from headrace.operations import documents
from headrace.partitioning import partition_of_key

CHUNK_LINES = 5_000
CHUNK_BYTES = 4 << 20
LINE_BYTES_MAX = 256 << 20
FIELDS = frozenset(
    {
        *("id", "topic", "partition", "offset", "timestamp", "key", "headers", "attempt", "data"),
        *("encoding", "to", "expires", "key64", "retryCount"),
    }
)
FROM = Annotated[
    str, typer.Option("--from", metavar="POSITION", help="An offset, a time, or earliest.")
]
TO = Annotated[
    str, typer.Option("--to", metavar="POSITION", help="End before this offset or time.")
]


# --- export ---------------------------------------------------------------------------------------
@with_broker_place
def export(
    place: BrokerPlace,
    topic: Topic,
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", help="The file; .gz is compressed; - is standard output."),
    ] = "-",
    first: FROM = "earliest",
    last: TO = "latest",
    partition: Annotated[
        int | None, typer.Option(min=0, help="Only this partition; default: all.")
    ] = None,
) -> None:
    """Write the messages of a topic as JSON lines.

    The command writes one partition after the other, each in order. No subscription moves. Messages
    that are published meanwhile are not written.

    \b
    Examples:
      headrace export orders > orders.jsonl
      headrace export orders orders.jsonl.gz --from 2026-01-31T12:00:00Z --to 2026-02-01T00:00:00Z
      headrace export orders --partition 0 --from 1000 --to 2000

    Exit code 1: some messages are missing, because the broker has lost them.
    """
    lost = done = 0
    with (
        disk_errors(),
        connected(place) as client,
        batch_reader(place) as reader,
        _written(file) as out,
        progress_bar("exporting", hidden=file == "-" and sys.stdout.isatty()) as bar,
    ):
        spans = _spans(client, topic, partition, first, last)
        total = sum(end - start for _, start, end in spans)
        for number, start, end in spans:
            for batches in reader.read(topic, number, start, end):
                for batch in batches:
                    low, high = max(batch.base_offset, start), min(batch.end_offset, end)
                    if batch.flags & LOST:
                        lost += high - low
                    else:
                        out.writelines(_lines(batch, topic, number, low, high))
                    done += high - low
                    start = high  # the next one may begin earlier
                bar.show(done, total, "message")
    if file != "-":
        say(f"Exported {count_of(done - lost, 'message')} of {topic} to {file}.")
    if lost:
        complain(
            f"{count_of(lost, 'message')} were destroyed and given up earlier; they are missing"
        )
        raise typer.Exit(1)


def _spans(
    client: BrokerClient, topic: str, partition: int | None, first: str, last: str
) -> list[tuple[int, int, int]]:
    """(partition, start, end) of what is to be exported."""
    low, high = parse_position(first), parse_position(last)
    spans = []
    for place in client.positions([topic])[topic]:
        number, start, end = place["partition"], place["start"], place["end"]
        if partition not in (None, number):
            continue

        def at(position: Any, number: int = number, start: int = start, end: int = end) -> int:
            if isinstance(position, int):
                return min(max(position, start), end)
            if position in ("earliest", "latest"):
                return start if position == "earliest" else end
            return client.offset_at(topic, position, partition=number)

        spans.append((number, at(low), max(at(low), at(high))))
    if not spans:
        raise InvalidArgument(f"{topic} has no partition {partition}", code="invalid_partition")
    return spans


def _lines(batch: Batch, topic: str, partition: int, low: int, high: int) -> Iterator[bytes]:
    first, stop = low - batch.base_offset, high - batch.base_offset
    targets, expiry = batch.targets(first, stop), batch.expiry(first, stop)
    for index, message in enumerate(batch.messages(topic, partition, first, stop)):
        document = documents.message(message)
        if targets is not None and targets[index]:
            document["to"] = targets[index].decode()
        if expiry is not None and expiry[index]:
            document["expires"] = expiry[index]
        yield orjson.dumps(document) + b"\n"


class _TerminalLines(io.RawIOBase):
    """Standard output that is a terminal: what others wrote must not control it."""

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            sys.stdout.write(json_text(orjson.loads(line)) + "\n")


@contextmanager
def _written(file: str) -> Iterator[Any]:
    """The file, complete or not at all."""
    if file == "-":
        yield _TerminalLines() if sys.stdout.isatty() else sys.stdout.buffer
        sys.stdout.flush()
        return
    path = Path(file)
    temporary = path.with_name(path.name + ".tmp")
    try:
        if not path.parent.is_dir():
            raise InvalidArgument(f"{file} cannot be written: there is no directory {path.parent}")
        with temporary.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(path.stem, "wb", 6, raw, mtime=0) as packed:
                    yield packed
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --- import ---------------------------------------------------------------------------------------
class Line(NamedTuple):
    """A message of a file."""

    topic: str | None
    value: bytes
    key: bytes | None
    headers: dict[str, str] | None
    timestamp: int | None
    partition: int | None
    id: bytes
    target: bytes
    expires: int


@with_broker_place
def import_lines(
    place: BrokerPlace,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[TOPIC] FILE",
            help="The topic (default: that of the first line) and the file. A .gz file is unpacked; - is standard input.",
        ),
    ],
    producer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The import's name; under another name, the same file is imported again.",
        ),
    ] = None,
    repartition: Annotated[bool, repartition_option("the file")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish JSON lines, as export writes them, to a topic.

    If it is killed, run it again: it continues, and nothing is published twice. For 30 days the same file is
    not imported into the same topic again, unless --producer differs. Only "data" is required in a line.

    \b
    Examples:
      headrace import orders.jsonl.gz
      headrace import orders-test orders.jsonl --repartition
      zcat orders.jsonl.gz | headrace import orders - --producer restore-1
    """
    if len(names) > 2:
        raise InvalidArgument("import takes a topic and one file")
    topic, file = names[0] if len(names) == 2 else None, names[-1]
    if file == "-" and producer is None:
        raise InvalidArgument(
            "standard input is read once, so the import needs a name to be continued by: add --producer NAME"
        )
    base = check_subscription_name(producer or "import")
    with (
        disk_errors(),
        connected(place) as client,
        progress_bar("importing", hidden=as_json) as bar,
    ):
        chunks = _chunks(file)
        first = next(chunks, [])
        name = check_topic_name(topic if topic is not None else _topic_of(file, first))
        work = _Import(client, name, file, base, repartition, is_named=topic is not None)
        total = 0 if file == "-" else work.check_all()
        work.open()
        for number, chunk in enumerate(chain([first] if first else [], chunks)):
            work.add(number, chunk)
            if total:
                bar.show(work.done + work.skipped, total, "message")
            else:
                bar.show_count(work.done + work.skipped, "message")
    if as_json:
        print_json({"imported": work.done, "skipped": work.skipped, "topic": name})
    else:
        earlier = f"; already there: {count_of(work.skipped, 'message')}" if work.skipped else ""
        say(f"Imported {count_of(work.done, 'message')} into {name}{earlier}.")


def _topic_of(file: str, chunk: list[tuple[int, bytes]]) -> str:
    if not chunk:
        raise InvalidArgument(f"{file} is empty; name the topic, too")
    topic = _line(file, *chunk[0]).topic
    if topic is None:
        raise _bad(file, chunk[0][0], "it names no topic; give it before the file")
    return topic


class _Import:
    def __init__(
        self,
        client: BrokerClient,
        topic: str,
        file: str,
        base: str,
        repartition: bool,
        *,
        is_named: bool,
    ):
        self._client, self._topic, self._file = client, topic, file
        self._base, self._repartition, self._is_named = base, repartition, is_named
        self._partitions = 0
        """0: not known yet."""
        self._highest = (0, 0)
        """(partition, line): the highest one in the file."""
        self._bytes_max = client.info()["max_message_size"]
        self._digest = b""
        self._name = ""
        self._last = -1
        self._times = OwnTimes(client)
        self.done = self.skipped = 0

    def check_all(self) -> int:
        """How many messages the file has; an error if one of them cannot be published."""
        count, digest = 0, hashlib.sha256()
        for number, raw in _numbered(self._file):
            self._checked(number, raw)
            digest.update(raw)
            count += 1
        self._digest = digest.digest()
        return count

    def open(self) -> None:
        """Create the topic if it does not exist: not before the file is known to be good."""
        self._partitions = len(self._client.topic_stats(self._topic, create=True)["partitions"])
        partition, number = self._highest
        if partition >= self._partitions:
            raise self._no_partition(number, partition)

    def _no_partition(self, number: int, partition: int) -> InvalidArgument:
        return _bad(
            self._file,
            number,
            f"partition {partition} does not exist: {self._topic} has 0 to {self._partitions - 1}. Add "
            f"partitions (headrace alter-topic {self._topic} --set partitions={partition + 1}), or let keys "
            "decide (--repartition)",
        )

    def _checked(self, number: int, raw: bytes) -> Line:
        line = _line(self._file, number, raw)
        topic = self._topic
        if line.topic not in (None, topic) and not self._is_named:
            why = f"it is a message of {line.topic}, and the first of {topic}; name the topic to import to"
        elif len(line.value) > self._bytes_max:
            why = (
                f"it has {len(line.value):,} bytes, and the broker takes {self._bytes_max:,} (the setting "
                "max_message_size)"
            )
        else:
            if line.partition is not None and not self._repartition:
                if self._partitions and line.partition >= self._partitions:
                    raise self._no_partition(number, line.partition)
                self._highest = max(self._highest, (line.partition, number))
            return line
        raise _bad(self._file, number, why)

    def add(self, number: int, chunk: list[tuple[int, bytes]]) -> None:
        if not self._name:
            # Of standard input only the beginning is known.
            digest = self._digest or hashlib.sha256(chunk[0][1]).digest()
            name = hashlib.sha256(self._topic.encode() + b"\0" + digest).hexdigest()[:24]
            self._name = f"{self._base[:160]}-{name}"
            self._last = self._client.last_commit(self._name)
        if number <= self._last:
            self.skipped += len(chunk)
            return
        by_partition: dict[int, list[Line]] = {}
        for at, raw in chunk:
            line = self._checked(at, raw)
            by_partition.setdefault(self._place(line, at), []).append(line)
        staged = [
            self._client.stage(
                self._topic, encode(part), partition=place, name=self._name, number=number
            )
            for place, some in by_partition.items()
            for part in pieces(self._columns(place, some))
        ]
        self._client.commit_staged(self._name, number, staged)
        self.done += len(chunk)

    def _place(self, line: Line, index: int) -> int:
        if line.partition is not None and not self._repartition:
            return line.partition
        if line.key is not None:
            return partition_of_key(line.key, self._partitions)
        return index % self._partitions

    def _columns(self, partition: int, lines: list[Line]) -> Columns:
        now = time.time_ns() // 1_000_000
        times = [now if line.timestamp is None else line.timestamp for line in lines]
        headers = self._times.kept(self._topic, partition, times, [line.headers for line in lines])
        return Columns(
            [line.value for line in lines],
            _or_none([line.key for line in lines], None),
            _or_none(headers, None),
            times,
            _or_none([line.id for line in lines], NO_ID),
            _or_none([line.expires for line in lines], 0),
            _or_none([line.target for line in lines], b""),
        )


def _or_none(column: list[Any], absent: Any) -> list[Any] | None:
    return column if any(item != absent for item in column) else None


# --- lines ----------------------------------------------------------------------------------------
@contextmanager
def _opened(file: str) -> Iterator[Any]:
    if file == "-":
        yield sys.stdin.buffer
        return
    with Path(file).open("rb") as raw:
        stream: BinaryIO = raw
        yield gzip.GzipFile(fileobj=stream) if file.endswith(".gz") else stream


def _numbered(file: str) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not empty."""
    with _opened(file) as stream:
        number = 0
        try:
            while line := stream.readline(LINE_BYTES_MAX):
                number += 1
                if len(line) >= LINE_BYTES_MAX:
                    raise _bad(file, number, "the line is too long")
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _bad(file, number + 1, f"the file cannot be unpacked: {error}") from None


def _chunks(file: str) -> Iterator[list[tuple[int, bytes]]]:
    """The lines, cut in the same way whenever the file is read."""
    chunk: list[tuple[int, bytes]] = []
    size = 0
    for item in _numbered(file):
        chunk.append(item)
        size += len(item[1])
        if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _bad(file: str, number: int, why: str) -> InvalidArgument:
    name = "standard input" if file == "-" else file
    return InvalidArgument(f"{name}:{number}: {why}", code="invalid_line")


def _line(file: str, number: int, raw: bytes) -> Line:
    try:
        document = orjson.loads(raw)
        if not isinstance(document, dict):
            raise InvalidArgument("it is not a JSON object")
        return _read(document, raw)
    except orjson.JSONDecodeError as error:
        raise _bad(file, number, f"it is not JSON: {error}") from None
    except HeadraceError as error:
        raise _bad(file, number, error.message) from None


class _Exact(msgspec.Struct):
    """The part of a line whose bytes count."""

    data: msgspec.Raw


def _read(document: dict[str, Any], raw: bytes) -> Line:
    unknown = document.keys() - FIELDS
    if unknown:
        raise InvalidArgument(
            f"{', '.join(sorted(unknown))} is not known; a message has {', '.join(sorted(FIELDS))}"
        )
    key = document.get("key")
    if "key64" in document:
        key = {"data": document["key64"], "encoding": "base64"}
    if key is not None:
        key = check_key(key if isinstance(key, str) else _bytes("key", key))
    headers = document.get("headers")
    if headers is not None:
        headers = dict(check_headers(headers))
    data = document.get("data", "")
    if data is None and (headers or {}).get(TOMBSTONE_HEADER) == TOMBSTONE_TEXT:
        value = b""
    elif not isinstance(data, str) and "encoding" not in document:  # JSON, byte for byte
        value = bytes(msgspec.json.decode(raw, type=_Exact).data)
    else:
        value = _bytes("the message", document)
    target, topic = document.get("to"), document.get("topic")
    return Line(
        None if topic is None else check_topic_name(topic, internal=True),
        value,
        key,
        headers or None,
        _time(document, "timestamp"),
        _number(document, "partition"),
        _own_id(document),
        b"" if target is None else check_subscription_name(target).encode(),
        _number(document, "expires") or 0,
    )


def _bytes(what: str, document: Any) -> bytes:
    try:
        if document.get("encoding") not in (None, "base64"):
            raise InvalidArgument(f"{what}: the encoding is base64, or left out")
        text = document["data"]
        return b64decode(text, validate=True) if document.get("encoding") else text.encode()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgument(
            f'{what} has no "data": a text, or base64 with "encoding": "base64"'
        ) from None


def _time(document: dict[str, Any], name: str) -> int | None:
    found = document.get(name)
    return parse_time(name, found) if isinstance(found, str) else _number(document, name)


def _number(document: dict[str, Any], name: str) -> int | None:
    found = document.get(name)
    if found is not None and (type(found) is not int or not 0 <= found < 1 << 53):
        raise InvalidArgument(f"{name} is a whole number, not {found!r:.40}")
    return found


def _own_id(document: dict[str, Any]) -> bytes:
    """The id that a client gave the message; an id that follows from its place is not kept."""
    text = document.get("id")
    if text is None:
        return NO_ID
    try:
        found = UUID(text)
        place = (topic_hash(document["topic"]), document["partition"], document["offset"])
        is_derived = derive_id(*place) == found
    except KeyError:
        is_derived = False
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(f"id is a UUID, not {text!r:.60}") from None
    return NO_ID if is_derived else found.bytes
