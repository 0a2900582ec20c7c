"""The text protocol's verbs. ``PUB`` is ``on_pub``, found in a table.

Publishes come as runs; a run is one entry in the log and one place among the answers. A command that has
to wait for something runs as a task and keeps its place in the order.

The first command of a connection must be one of ours. A web page can make the browser of somebody on this
machine send an HTTP request to this port, with commands in its body; if the lines before them were answered
as mistakes, the broker would carry the commands out. So a connection ends at a first line that is HTTP, or
whose verb is unknown. Later a mistake is only answered: a person is typing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import orjson

from headrace import limits
from headrace.broker.browsing import browse
from headrace.broker.delivery import Delivery
from headrace.broker.positions import news_in
from headrace.broker.publishing import Publish
from headrace.budget import Share
from headrace.errors import DataCorrupt, HeadraceError, InvalidArgument, OffsetOutOfRange
from headrace.log.columns import Columns
from headrace.log.interface import ReadPending, completed
from headrace.model import Receipt, parse_position, split_position
from headrace.paging import Asked, cursor_text, parse_cursor
from headrace.server.arguments import milliseconds_of, number_of, publish_arguments, seconds_of
from headrace.server.connection import Connection
from headrace.server.logins import Credentials
from headrace.server.members import WireSink
from headrace.server.session import RequestSession
from headrace.server.subscribing import SubscribingSession
from headrace.wire import http, text
from headrace.wire.text import Command, PublishRun, TextParser, is_http

FETCHED_AT_ONCE = 1_000
"""Messages of one fetch that are made in one turn of the loop."""
FETCHED_BYTES_MAX = 8 << 20
"""Of all messages of one fetch, besides the last one."""
LATEST_BYTES_MAX = 64 << 10
"""A larger delivery is not kept for the next connection."""
FETCH_WAIT_S_MAX = 3_600.0
_CURSOR = re.compile("[0-9]+:")
"""The start of the positions after a page of several partitions: ``0:17,1:4``."""
HELP = (
    "PUB <topic> <size> [key=] [h.<name>=] [id=] [to=] [delay=] [ttl=] [partition=]  then the payload",
    "FETCH <topic> <position> [partition=] [count=] [wait=<ms>]",
    "SUB <topic> [group=] [start=] [prefetch=] [ack=auto|manual]",
    "UNSUB <topic> [group=]",
    "ACK <delivery>   NACK <delivery> [delay=] [reason=]   EXTEND <delivery> [seconds=]",
    "CREATE <topic> [partitions=] [<setting>=]   DELETE <topic>",
    "TOPICS   GROUPS [topic]   STATS <topic>   INFO   PING   HELLO <client id>   AUTH <token>   AUTH <user> <password>   HELP   QUIT",
)


class TextSession(SubscribingSession, RequestSession[PublishRun | Command]):
    protocol = "text"
    login = "say AUTH <token>, or AUTH <user> <password>, first"
    _latest: ClassVar[tuple[Any, ...]] = (None, None, None, b"")
    """A small delivery without a lease, and its bytes: often the next connection gets the same."""

    def __init__(self, connection: Connection):
        super().__init__(connection, TextParser(connection.hub.engine.max_message_size))

    # --- in ---------------------------------------------------------------------------------
    def depends(self, item: PublishRun | Command) -> bool:
        return isinstance(item, Command) and item.verb != "PUB"

    def topics_in(self, item: PublishRun | Command) -> tuple[str, ...]:
        return () if isinstance(item, PublishRun) else self.known_topics(item.words)

    def may_be_long(self, item: PublishRun | Command) -> bool:
        return isinstance(item, Command) and item.verb not in _BRIEF

    def is_open(self, item: PublishRun | Command) -> bool:
        return isinstance(item, Command) and (item.verb in _OPEN or self._is_http(item))

    def requests_in(self, item: PublishRun | Command) -> int:
        return len(item.values) if isinstance(item, PublishRun) else 1

    def begin(self, item: PublishRun | Command) -> None:
        if self.connection.is_stranger and not self._meet(item):
            return
        if isinstance(item, PublishRun):
            self._publish_run(item)
        else:
            handler = VERBS.get(item.verb)
            if handler is None:
                raise _unknown(item)
            handler(self, item)

    def _meet(self, item: PublishRun | Command) -> bool:
        """The first command: whether the connection goes on."""
        if isinstance(item, Command):
            if self._is_http(item):
                self.connection.unread = True  # a body may follow; the answer must arrive
                self.outbox.send(_HTTP_REFUSED.encode(keep_alive=False))
                self.connection.close()
                return False
            if item.verb not in VERBS:
                self.end(_unknown(item))
                return False
        if self.connection.authenticated:
            self.connection.meet()
        return True

    def _is_http(self, item: Command) -> bool:
        """Somebody took this port for the one of HTTP: the answer is HTTP, with a login or without."""
        return self.connection.is_stranger and is_http(item)

    def fail(self, item: PublishRun | Command, error: HeadraceError) -> None:
        self.outbox.send(text.error_run(error, self.requests_in(item)))

    def end(self, error: HeadraceError) -> None:
        self.outbox.send(text.error(error))
        self.connection.close()

    def expel(self, error: HeadraceError) -> None:
        self.end(error)

    def _later(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Answer when the work is done, in the command's place."""
        self.connection.answer_later(work, self.outbox.reserve().fill, text.error)

    # --- publishing -------------------------------------------------------------------------
    def _publish_run(self, run: PublishRun) -> None:
        count = len(run.values)
        slot = self.outbox.reserve(run.bytes + 64 * count)

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(text.error_run(error, count))
            else:
                slot.fill(text.ok_run(_offset(receipts), count))

        # The parser has checked the sizes of the values.
        records = run.values[0] if count == 1 else Columns(run.values)
        self.connection.publish(Publish(run.topic, records), done)

    def on_pub(self, command: Command) -> None:
        assert command.payload is not None
        headers, options = publish_arguments(command.options)
        topic, payload = command.words[0], command.payload
        publish = self.publishing.message(topic, payload, headers, options)
        slot = self.outbox.reserve(len(payload))

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(text.error(error))
            elif receipts[0].is_delayed:
                slot.fill(text.done(f"scheduled {receipts[0].id}"))
            else:
                slot.fill(text.ok(_offset(receipts)))

        self.connection.publish(publish, done)

    # --- reading ----------------------------------------------------------------------------
    def on_fetch(self, command: Command) -> None:
        topic, where = _two(command, "FETCH <topic> <position>")
        options = command.options
        self.connection.permissions.need("browse", topic)
        count = number_of(options["count"], "count") if "count" in options else None
        given = options.get("wait", "0")
        wait = milliseconds_of(given, "wait", limits.OFFSET_MAX, "bad_command") / 1000
        wait = min(wait, FETCH_WAIT_S_MAX)
        position: Any = parse_cursor(where) if _CURSOR.match(where) else parse_position(where)
        if "partition" not in options and len(self.engine.topics.find(topic).partitions) > 1:
            self._later(self._fetch_merged(topic, position, count, wait))
            return
        number = number_of(options.get("partition", "0"), "partition")
        partition = self.engine.partition(topic, number)
        if isinstance(position, Mapping):
            position = position.get(number, "earliest")
        if isinstance(position, int) and not wait and count is None:
            try:
                self.outbox.send(self._one(partition, position))
                return
            except ReadPending:
                pass
        self._later(self._fetch(partition, position, count, wait))

    async def _fetch(self, partition: Any, position: Any, count: int | None, wait: float) -> bytes:
        where, time_ms = split_position(position)
        log = partition.log
        if isinstance(where, int) and time_ms is None and where == log.end_offset:
            offset = where
        else:
            offset = await completed(lambda: self.engine.resolve(partition, where, time_ms=time_ms))
        if wait and offset == log.end_offset:
            await news_in([partition], wait)
            self.connection.permissions.need("browse", partition.topic)
            # One answer after the other: a publish may wake a thousand of these at once.
            await self.engine.pace.turn()
            await self.outbox.when_writable()
            self.engine.budget.check(FETCHED_BYTES_MAX)
        if count is None:
            return await completed(lambda: self._one(partition, offset))
        held = Share(self.engine.budget)
        try:
            return await self._many(log, offset, count, held)
        finally:
            held.clear()

    async def _fetch_merged(self, topic: str, start: Any, count: int | None, wait: float) -> bytes:
        """Messages of all partitions in the order of time, each with its partition."""
        limit = 1 if count is None else min(count, limits.LISTED_MAX)
        asked = Asked(topic, start, None, FETCHED_BYTES_MAX, wait, limit)
        page = await browse(
            self.engine, asked, lambda: self.connection.permissions.need("browse", topic)
        )
        await self.outbox.when_writable()
        if count is None and not page:
            raise OffsetOutOfRange(f"there is no message in {topic!r} at this position yet")
        held = Share(self.engine.budget)
        try:
            held.take(2 * sum(len(message.value or b"") for message in page))
            parts = []
            for number, each in enumerate(page):
                parts.append(text.merged(each.offset, each.value or b"", topic, each.partition))
                if number % FETCHED_AT_ONCE == FETCHED_AT_ONCE - 1:
                    await self.engine.pace.turn()
            if count is not None:
                parts.append(f"END {cursor_text(page.next)}\r\n".encode())
            return b"".join(parts)
        finally:
            held.clear()

    async def _many(self, log: Any, offset: int, count: int, held: Share) -> bytes:
        parts: list[bytes] = []
        size = 0
        while len(parts) < min(count, limits.BATCH_RECORDS_MAX) and size < FETCHED_BYTES_MAX:
            if offset >= log.end_offset:
                break
            try:
                batch = await completed(partial(log.read_cached, offset))
                start = offset - batch.base_offset
                stop = min(batch.count, start + count - len(parts), start + FETCHED_AT_ONCE)
                values = batch.values(start, batch.fitting(start, stop, FETCHED_BYTES_MAX))
            except DataCorrupt as error:
                if not parts:
                    raise
                parts.append(text.error(error))  # in place of END: what lies before it is good
                return b"".join(parts)
            more = sum(map(len, values))
            held.take(2 * more)  # once in parts, and once more when they are joined
            for value in values:
                parts.append(text.message(offset, value))
                offset += 1
            size += more
            del values  # it would wait with the others that have their turn
            await self.engine.pace.turn()
        parts.append(f"END {offset}\r\n".encode())
        return b"".join(parts)

    def _one(self, partition: Any, offset: int) -> bytes:
        log = partition.log
        if offset >= log.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} does not exist yet: the next message gets {log.end_offset}"
            )
        batch = log.read_cached(offset)
        index = offset - batch.base_offset
        return text.message(offset, batch.values(index, index + 1)[0])

    # --- subscribing ------------------------------------------------------------------------
    def on_sub(self, command: Command) -> None:
        topic = _word(command, "SUB <topic>")
        options = command.options
        group = options.get("group")
        if group is None:
            sink = self._memberships.follow(topic)
            self.outbox.send(text.done("topic_created" if sink.topic_created else ""))
            return
        prefetch = number_of(options.get("prefetch", "100"), "prefetch")
        auto = options.get("ack", "manual") == "auto"
        start = options.get("start", "earliest")

        async def join() -> bytes:
            arguments = {"subscription": group, "topic": topic, "start": start}
            made = await self.connection.call("create_subscription", arguments)
            subscription = self.engine.subscription(group, topic)
            name = self.connection.client_id or self.connection.peer
            self._memberships.join(subscription, name, prefetch, auto)
            return text.done("topic_created" if made.get("topic_created") else "")

        self._later(join())

    def on_unsub(self, command: Command) -> None:
        self._memberships.leave(_word(command, "UNSUB <topic>"), command.options.get("group"))
        self.outbox.send(text.done())

    def _delivered(self, sink: WireSink, delivery: Delivery) -> bytes:
        lease, batch, attempts = delivery.lease, delivery.batch, delivery.attempts
        topic, partition = delivery.topic, delivery.partition
        latest = TextSession._latest
        if lease is None and batch is latest[0] and (delivery.indexes, attempts) == latest[1:3]:
            return cast(bytes, latest[3])
        values = batch.some(batch.values, delivery.indexes) or ()
        parts = []
        for place, (index, value) in enumerate(zip(delivery.indexes, values, strict=True)):
            offset = batch.base_offset + index
            token = "-" if lease is None else f"{lease.id}.{offset}"
            attempt = attempts if isinstance(attempts, int) else attempts[place]
            parts.append(text.delivered(offset, value, topic, partition, token, attempt))
        raw = b"".join(parts)
        if lease is None and len(raw) <= LATEST_BYTES_MAX:
            TextSession._latest = (batch, delivery.indexes, attempts, raw)
        return raw

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        if error is not None:
            self.outbox.deliver(text.error(error))

    def on_ack(self, command: Command) -> None:
        lease_id, offset = _token(command)
        self._memberships.of_lease(lease_id).ack(lease_id, offset)
        self.outbox.send(text.done())

    def on_nack(self, command: Command) -> None:
        lease_id, offset = _token(command)
        options = command.options
        delay = seconds_of(options["delay"], "delay") if "delay" in options else None
        reason = options.get("reason", "nack")
        self._memberships.of_lease(lease_id).nack(lease_id, offset, delay, reason)
        self.outbox.send(text.done())

    def on_extend(self, command: Command) -> None:
        lease_id, _ = _token(command)
        options = command.options
        seconds = seconds_of(options["seconds"], "seconds") if "seconds" in options else None
        granted = self._memberships.of_lease(lease_id).extend(lease_id, seconds)
        self.outbox.send(text.done(f"{granted:g}"))

    # --- the rest ---------------------------------------------------------------------------
    def on_create(self, command: Command) -> None:
        topic = _word(command, "CREATE <topic>")
        settings = {name: _literal(value) for name, value in command.options.items()}

        async def create() -> bytes:
            await self.connection.call("create_topic", {"topic": topic, "settings": settings})
            return text.done()

        self._later(create())

    def on_delete(self, command: Command) -> None:
        topic = _word(command, "DELETE <topic>")

        async def delete() -> bytes:
            await self.connection.call("delete_topic", {"topic": topic})
            return text.done()

        self._later(delete())

    def on_topics(self, command: Command) -> None:
        async def listing() -> bytes:
            stats = await self.connection.call("topics", {})
            return text.listing(
                f"{s['topic']} partitions={len(s['partitions'])} messages={s['messages']}"
                for s in stats
            )

        self._later(listing())

    def on_groups(self, command: Command) -> None:
        async def listing() -> bytes:
            arguments = {"topic": command.words[0]} if command.words else {}
            stats = await self.connection.call("subscriptions", arguments)
            return text.listing(
                f"{s['name']} topic={s['topic']} lag={s['lag']} members={s['members']}"
                for s in stats
            )

        self._later(listing())

    def on_stats(self, command: Command) -> None:
        topic = _word(command, "STATS <topic>")

        async def stats() -> bytes:
            return text.document(
                orjson.dumps(await self.connection.call("topic", {"topic": topic}))
            )

        self._later(stats())

    def on_info(self, command: Command) -> None:
        async def info() -> bytes:
            return text.document(orjson.dumps(await self.connection.call("info", {})))

        self._later(info())

    def on_hello(self, command: Command) -> None:
        self.connection.named(_word(command, "HELLO <client id>"))
        self.outbox.send(text.done())

    def on_ping(self, command: Command) -> None:
        self.outbox.send(b"PONG\r\n")

    def on_help(self, command: Command) -> None:
        self.outbox.send(text.listing(HELP))

    def on_auth(self, command: Command) -> None:
        self.log_in(command, Credentials.of_words(command.words), text.done(), self._later)

    def on_quit(self, command: Command) -> None:
        self.outbox.send(text.done("bye"))
        self.connection.close()


_OPEN = ("AUTH", "HELLO", "PING", "HELP", "QUIT")
"""Before the login."""
_BRIEF = (*_OPEN, "PUB", "ACK", "NACK", "EXTEND")
"""All others may take long, however small they are."""
VERBS: dict[str, Callable[[TextSession, Command], None]] = {
    name.removeprefix("on_").upper(): handler
    for name, handler in vars(TextSession).items()
    if name.startswith("on_")
}


_HTTP_REFUSED = http.error_answer(
    InvalidArgument(
        "this port has the text and the binary protocol; HTTP has a port of its own (http_port, 8080 by "
        "default)",
        code="not_http",
    ),
    "invalid_argument",
)


def _unknown(command: Command) -> InvalidArgument:
    return InvalidArgument(
        f"there is no command {command.verb[:40]!r}; HELP lists them", code="unknown_command"
    )


def _word(command: Command, usage: str) -> str:
    if len(command.words) != 1:
        raise InvalidArgument(f"it is {usage}", code="bad_command")
    return command.words[0]


def _two(command: Command, usage: str) -> tuple[str, str]:
    if len(command.words) != 2:
        raise InvalidArgument(f"it is {usage}", code="bad_command")
    return command.words[0], command.words[1]


def _token(command: Command) -> tuple[int, int]:
    lease, dot, offset = _word(command, f"{command.verb} <delivery>").partition(".")
    if not dot:
        raise InvalidArgument("a delivery looks like 12.34; it comes with MSG", code="bad_command")
    return number_of(lease, "the delivery"), number_of(offset, "the delivery")


def _literal(value: str) -> Any:
    """The value of a setting: JSON, or else a string."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _offset(receipts: list[Receipt]) -> int:
    offset = receipts[0].offset
    assert offset is not None
    return offset
