"""The text protocol's verbs. ``PUB`` is ``on_pub``, found in a table.

Publishes come as runs; a run is one entry in the log and one place among the answers. Everything that
has to wait for something else runs as a task and keeps its place in the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson

from headrace import limits
from headrace.broker.aio import split_start
from headrace.broker.delivery import Delivery
from headrace.broker.positions import news_in
from headrace.broker.publishing import idempotency_producer
from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    OffsetOutOfRange,
    StorageFull,
    Unauthenticated,
)
from headrace.log.columns import Columns, expiry_of, one, time_of
from headrace.log.interface import Append, ReadPending, completed
from headrace.model import Receipt
from headrace.server.members import Memberships, WireSink
from headrace.server.operations import parse_position
from headrace.server.tcp import UNAUTHENTICATED_BYTES_MAX, Connection, own_mistake
from headrace.server.turns import Turns
from headrace.wire import text
from headrace.wire.text import Command, Run, TextParser

HELP = (
    "PUB <topic> <size> [key=] [h.<name>=] [id=] [to=] [delay=] [ttl=] [partition=]  then the payload",
    "FETCH <topic> <offset> [partition=] [count=] [wait=<ms>]",
    "SUB <topic> [group=] [start=] [prefetch=] [ack=auto|manual]",
    "UNSUB <topic> [group=]",
    "ACK <delivery>   NACK <delivery> [delay=] [reason=]   EXTEND <delivery> [seconds=]",
    "CREATE <topic> [partitions=] [<setting>=]   DELETE <topic>",
    "TOPICS   GROUPS [topic]   STATS <topic>   INFO   PING   AUTH <token>   HELP   QUIT",
)


def number_of(text_: str, name: str) -> int:
    if text_.isascii() and text_.isdigit() and len(text_) <= 20:
        return int(text_)
    raise InvalidArgument(f"{name} is a whole number, not {text_[:40]!r}", code="bad_command")


def seconds_of(text_: str, name: str) -> float:
    try:
        value = float(text_)
    except ValueError:
        value = -1.0
    if not 0 <= value <= limits.DELAY_S_MAX:
        raise InvalidArgument(f"{name} is a number of seconds, not {text_[:40]!r}")
    return value


def publish_arguments(
    value: bytes, options: dict[str, str], engine: Any
) -> tuple[Columns, dict[str, Any]]:
    """A message with the options that text and binary publishes have in common."""
    now = engine.now_ms()
    headers: dict[str, str] = {}
    given: dict[str, str] = {}
    for name, content in options.items():
        if name.startswith("h."):
            headers[name[2:]] = content
        elif name in _PUBLISH_OPTIONS:
            given[name] = content
        else:
            headers[name] = content
    delay = seconds_of(given["delay"], "delay") if "delay" in given else None
    deliver_at = number_of(given["deliver_at"], "deliver_at") if "deliver_at" in given else None
    ttl = seconds_of(given["ttl"], "ttl") if "ttl" in given else None
    columns = one(
        value,
        bytes_max=engine.max_message_size,
        key=given.get("key"),
        headers=headers,
        id=given.get("id"),
        timestamp=number_of(given["timestamp"], "timestamp") if "timestamp" in given else None,
        expires_at=expiry_of(ttl, now),
        target=given.get("to"),
    )
    producer: tuple[int, int, int] | None = None
    if given.get("idempotency_key"):
        producer = idempotency_producer(given["idempotency_key"])
    elif "producer_id" in given:
        producer = (
            number_of(given["producer_id"], "producer_id"),
            number_of(given.get("producer_epoch", "0"), "producer_epoch"),
            number_of(given.get("producer_sequence", "0"), "producer_sequence"),
        )
    return columns, {
        "partition": number_of(given["partition"], "partition") if "partition" in given else None,
        "deliver_at": time_of(delay, deliver_at, now),
        "producer": producer,
    }


_PUBLISH_OPTIONS = {
    "key", "id", "partition", "to", "delay", "deliver_at", "ttl", "timestamp", "idempotency_key",
    "producer_id", "producer_epoch", "producer_sequence",
}  # fmt: skip


class TextSession:
    protocol = "text"

    def __init__(self, connection: Connection):
        self._connection = connection
        self._hub = connection.hub
        self._engine = connection.hub.engine
        self._outbox = connection.outbox
        self._parser = TextParser(self._engine.max_message_size)
        self._memberships = Memberships(
            self._engine, self._outbox, self._deliver, self._subscription_closed
        )
        self._turns: Turns[Run | Command | HeadraceError] = Turns(
            self._outbox, self._handle, _depends, patient=True
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # --- in ---------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        for item in self._parser.feed(data):
            self._turns.add(item)
        if self._parser.error is not None:
            self._turns.add(self._parser.error)
        elif (
            not self._connection.authenticated and self._parser.buffered > UNAUTHENTICATED_BYTES_MAX
        ):
            self._turns.add(Unauthenticated("say AUTH <token> first"))

    def _handle(self, item: Run | Command | HeadraceError) -> None:
        connection = self._connection
        if connection.closing:
            return
        if isinstance(item, HeadraceError):
            self._fail(item)
            connection.close()
            return
        if not connection.authenticated and not _is_open(item):
            self._fail(Unauthenticated("say AUTH <token> first"))
            connection.close()
            return
        try:
            if isinstance(item, Run):
                self._publish_run(item)
            else:
                self._command(item)
        except HeadraceError as error:
            count = len(item.values) if isinstance(item, Run) else 1
            self._outbox.send(text.error_run(error, count))

    def lost(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._memberships.leave_all()

    def _fail(self, error: HeadraceError) -> None:
        self._outbox.send(text.error(error))

    def _command(self, command: Command) -> None:
        handler = VERBS.get(command.verb)
        if handler is None:
            raise InvalidArgument(
                f"there is no command {command.verb[:40]!r}; HELP lists them",
                code="unknown_command",
            )
        handler(self, command)

    def _later(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Answer when the work is done, in the command's place."""
        slot = self._outbox.reserve()

        async def run() -> None:
            try:
                answer = await work
            except HeadraceError as error:
                answer = text.error(error)
            except Exception:
                answer = text.error(own_mistake(self._connection.peer))
            slot.fill(answer)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- publishing -------------------------------------------------------------------------
    def _publish_run(self, run: Run) -> None:
        engine = self._engine
        topic = engine.topic_for_publish(run.topic)
        number = topic.next_partition() if len(topic.partitions) > 1 else 0
        entry = Append(Columns(run.values), None, self._stored)
        entry.context = self._outbox.reserve(entry.bytes)
        engine.append(topic, number, entry)

    def _stored(self, entry: Append) -> None:
        if entry.error is None:
            answer = text.ok_run(entry.first_offset, entry.count)
        else:
            if isinstance(entry.error, StorageFull):
                self._engine.guard.hit_the_wall()
            answer = text.error_run(entry.error, entry.count)
        entry.context.fill(answer)  # type: ignore[attr-defined]

    def on_pub(self, command: Command) -> None:
        assert command.payload is not None
        columns, how = publish_arguments(command.payload, command.options, self._engine)
        slot = self._outbox.reserve(len(command.payload))

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(text.error(error))
            elif receipts[0].offset < 0:
                slot.fill(text.done(f"scheduled {receipts[0].id}"))
            else:
                slot.fill(text.ok(receipts[0].offset))

        try:
            self._engine.publish(command.words[0], columns, done, **how)
        except HeadraceError as error:
            slot.fill(text.error(error))

    # --- reading ----------------------------------------------------------------------------
    def on_fetch(self, command: Command) -> None:
        topic, where = _two(command, "FETCH <topic> <offset>")
        options = command.options
        partition = self._engine.partition(
            topic, number_of(options.get("partition", "0"), "partition")
        )
        count = number_of(options["count"], "count") if "count" in options else None
        wait = number_of(options.get("wait", "0"), "wait") / 1000
        position = parse_position(where)
        if isinstance(position, int) and not wait and count is None:
            try:
                self._outbox.send(self._one(partition, position))
                return
            except ReadPending:
                pass
        self._later(self._fetch(partition, position, count, min(wait, 3600.0)))

    async def _fetch(self, partition: Any, position: Any, count: int | None, wait: float) -> bytes:
        where, time_ms = split_start(position)
        log = partition.log
        if isinstance(where, int) and time_ms is None and where == log.end_offset:
            offset = where
        else:
            offset = await completed(
                lambda: self._engine.resolve(partition, where, time_ms=time_ms)
            )
        if wait and offset == log.end_offset:
            await news_in([partition], wait)
        if count is None:
            return await completed(lambda: self._one(partition, offset))
        parts: list[bytes] = []
        size = 0
        while len(parts) < min(count, limits.BATCH_RECORDS_MAX) and size < 8 << 20:
            if offset >= log.end_offset:
                break
            batch = await completed(partial(log.read_cached, offset))
            values = batch.values()[offset - batch.base_offset :]
            for value in values[: count - len(parts)]:
                parts.append(text.message(offset, value))
                size += len(value)
                offset += 1
        parts.append(f"END {offset}\r\n".encode())
        return b"".join(parts)

    def _one(self, partition: Any, offset: int) -> bytes:
        log = partition.log
        if offset >= log.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not there yet: the next one will be {log.end_offset}"
            )
        batch = log.read_cached(offset)
        return text.message(offset, batch.values()[offset - batch.base_offset])

    # --- subscribing ------------------------------------------------------------------------
    def on_sub(self, command: Command) -> None:
        topic = _word(command, "SUB <topic>")
        options = command.options
        group = options.get("group")
        if group is None:
            self._memberships.follow(topic)
            self._outbox.send(text.done())
            return
        prefetch = number_of(options.get("prefetch", "100"), "prefetch")
        auto = options.get("ack", "manual") == "auto"
        start = parse_position(options.get("start", "earliest"))

        async def join() -> bytes:
            await self._hub.operations.broker.create_subscription(group, topic, start=start)
            subscription = self._engine.subscription(group, topic)
            self._memberships.join(subscription, self._connection.peer, prefetch, auto)
            return text.done()

        self._later(join())

    def on_unsub(self, command: Command) -> None:
        self._memberships.leave(_word(command, "UNSUB <topic>"), command.options.get("group"))
        self._outbox.send(text.done())

    def _deliver(self, sink: WireSink, delivery: Delivery) -> None:
        lease, batch, attempts = delivery.lease, delivery.batch, delivery.attempts
        topic, partition = delivery.topic, delivery.partition
        values = batch.values()
        parts = []
        for place, index in enumerate(delivery.indexes):
            offset = batch.base_offset + index
            token = "-" if lease is None else f"{lease.id}.{offset}"
            attempt = attempts if isinstance(attempts, int) else attempts[place]
            parts.append(text.delivered(offset, values[index], topic, partition, token, attempt))
        self._outbox.deliver(b"".join(parts))

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        if error is not None:
            self._outbox.deliver(text.error(error))

    def on_ack(self, command: Command) -> None:
        lease_id, offset = _token(command)
        self._memberships.of_lease(lease_id).ack(lease_id, offset)
        self._outbox.send(text.done())

    def on_nack(self, command: Command) -> None:
        lease_id, offset = _token(command)
        options = command.options
        delay = seconds_of(options["delay"], "delay") if "delay" in options else None
        reason = options.get("reason", "nack")
        self._memberships.of_lease(lease_id).nack(lease_id, offset, delay, reason)
        self._outbox.send(text.done())

    def on_extend(self, command: Command) -> None:
        lease_id, _ = _token(command)
        options = command.options
        seconds = seconds_of(options["seconds"], "seconds") if "seconds" in options else None
        granted = self._memberships.of_lease(lease_id).extend(lease_id, seconds)
        self._outbox.send(text.done(f"{granted:g}"))

    # --- the rest ---------------------------------------------------------------------------
    def on_create(self, command: Command) -> None:
        topic = _word(command, "CREATE <topic>")
        settings = {name: _literal(value) for name, value in command.options.items()}

        async def create() -> bytes:
            await self._hub.operations.call("create_topic", {"topic": topic, "settings": settings})
            return text.done()

        self._later(create())

    def on_delete(self, command: Command) -> None:
        topic = _word(command, "DELETE <topic>")

        async def delete() -> bytes:
            await self._hub.operations.broker.delete_topic(topic)
            return text.done()

        self._later(delete())

    def on_topics(self, command: Command) -> None:
        async def listing() -> bytes:
            stats = await self._hub.operations.call("topics", {})
            return text.listing(
                f"{s['topic']} partitions={len(s['partitions'])} messages={s['messages']}"
                for s in stats
            )

        self._later(listing())

    def on_groups(self, command: Command) -> None:
        async def listing() -> bytes:
            arguments = {"topic": command.words[0]} if command.words else {}
            stats = await self._hub.operations.call("subscriptions", arguments)
            return text.listing(
                f"{s['name']} topic={s['topic']} lag={s['lag']} members={s['members']}"
                for s in stats
            )

        self._later(listing())

    def on_stats(self, command: Command) -> None:
        topic = _word(command, "STATS <topic>")

        async def stats() -> bytes:
            return text.document(
                orjson.dumps(await self._hub.operations.call("topic", {"topic": topic}))
            )

        self._later(stats())

    def on_info(self, command: Command) -> None:
        async def info() -> bytes:
            return text.document(orjson.dumps(await self._hub.operations.call("info", {})))

        self._later(info())

    def on_ping(self, command: Command) -> None:
        self._outbox.send(b"PONG\r\n")

    def on_help(self, command: Command) -> None:
        self._outbox.send(text.listing(HELP))

    def on_auth(self, command: Command) -> None:
        if not self._hub.is_token(_word(command, "AUTH <token>")):
            self._fail(Unauthenticated("this is not the token"))
            self._connection.close()
            return
        self._connection.authenticated = True
        self._outbox.send(text.done())

    def on_quit(self, command: Command) -> None:
        self._outbox.send(text.done("bye"))
        self._connection.close()


VERBS: dict[str, Callable[[TextSession, Command], None]] = {
    name.removeprefix("on_").upper(): handler
    for name, handler in vars(TextSession).items()
    if name.startswith("on_")
}


def _depends(item: Run | Command | HeadraceError) -> bool:
    """Whether what came before must be done first: so for all but publishes."""
    return not isinstance(item, Run) and not (isinstance(item, Command) and item.verb == "PUB")


def _is_open(item: Run | Command) -> bool:
    """What may be said before AUTH."""
    return isinstance(item, Command) and item.verb in ("AUTH", "PING", "HELP", "QUIT")


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
        raise InvalidArgument("a delivery is what stands behind MSG, as 12.34", code="bad_command")
    return number_of(lease, "the delivery"), number_of(offset, "the delivery")


def _literal(value: str) -> Any:
    """A setting's value as JSON would have it, or as text."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
