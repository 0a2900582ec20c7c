"""Publishing, consuming and reading over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson

from headrace import limits
from headrace.broker.aio import fetch_messages
from headrace.broker.delivery import Delivery
from headrace.broker.publishing import idempotency_producer
from headrace.broker.pull import Pull
from headrace.broker.subscription import Subscription
from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    StaleDelivery,
    StorageFull,
    SubscriptionNotFound,
)
from headrace.log.columns import Columns, many
from headrace.log.interface import Append
from headrace.model import Receipt
from headrace.server import schemas
from headrace.server.http import HttpConnection
from headrace.server.operations import parse_position
from headrace.server.routing import Parameter, Route
from headrace.server.text import number_of, publish_arguments, seconds_of
from headrace.server.views import (
    CONTENT_TYPE,
    delivery_views,
    is_json_type,
    iso,
    message_view,
    receipt_view,
)
from headrace.wire import http
from headrace.wire.http import Request

HEADER_PREFIX = "x-header-"
CARRIED = ("traceparent", "tracestate")
"""Of the request, carried with the message as they are."""
_PUBLISH_QUERY = ("key", "partition", "id", "to", "delay", "deliver_at", "ttl", "timestamp")
UNSAID = "application/x-www-form-urlencoded"
"""What curl says when it was told nothing: JSON where it is JSON, else text."""
WAIT_MS_MAX = 60_000


# --- publishing ---------------------------------------------------------------------------------
def on_publish(connection: HttpConnection, request: Request, topic: str) -> None:
    """One message: the body. JSON is kept as it is; other types keep their bytes."""
    engine = connection.hub.engine
    body = request.body
    headers = message_headers(request)
    content_type = request.headers.get("content-type")
    if is_json_type(content_type):
        check_json(body)
    elif content_type != UNSAID:
        headers[CONTENT_TYPE] = content_type or ""
    if not headers and not request.query and "idempotency-key" not in request.headers:
        _publish_plain(connection, request, topic, body)
        return
    options = check_query(request, *_PUBLISH_QUERY)
    options |= {f"h.{name}": value for name, value in headers.items()}
    if "idempotency-key" in request.headers:
        options["idempotency_key"] = request.headers["idempotency-key"]
    columns, how = publish_arguments(body, options, engine)
    slot = connection.reserve(request)

    def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
        if error is not None:
            connection.publish_failed(request, slot, error)
            return
        status = 202 if receipts[0].offset < 0 else 200
        content = orjson.dumps(receipt_view(receipts[0]))
        connection.published(request, slot, http.json_answer(status, content, request.keep_alive))

    try:
        engine.publish(topic, columns, done, **how)
    except HeadraceError as error:
        connection.publish_failed(request, slot, error)


def _publish_plain(connection: HttpConnection, request: Request, name: str, body: bytes) -> None:
    """The common case: a JSON body and nothing else."""
    engine = connection.hub.engine
    if len(body) > engine.max_message_size:
        publish_arguments(body, {}, engine)  # raises, with the words that all use
    topic = engine.topic_for_publish(name)
    number = topic.next_partition() if len(topic.partitions) > 1 else 0
    slot = connection.reserve(request)

    def stored(entry: Append) -> None:
        if entry.error is not None:
            if isinstance(entry.error, StorageFull):
                engine.guard.hit_the_wall()
            connection.publish_failed(request, slot, entry.error)
            return
        offset = entry.first_offset
        low = f"{0b10 << 62 | offset:016x}"
        content = (
            f'{{"id":"{_id_head(topic.hash, number)}-{low[:4]}-{low[4:]}","topic":"{name}",'
            f'"partition":{number},"offset":{offset},"timestamp":"{_iso(entry.timestamp)}"}}'
        )
        connection.published(
            request, slot, http.json_answer(200, content.encode(), request.keep_alive)
        )

    engine.append(topic, number, Append(Columns([body]), None, stored))


@lru_cache(maxsize=4096)
def _id_head(topic_hash: int, partition: int) -> str:
    text = f"{topic_hash:012x}"
    return f"{text[:8]}-{text[8:]}-{0x8000 | partition:04x}"


_iso = lru_cache(maxsize=64)(iso)


def on_publish_batch(connection: HttpConnection, request: Request, topic: str) -> None:
    """Many messages: a JSON array, or a line each (application/x-ndjson)."""
    engine = connection.hub.engine
    query = check_query(request, "key", "partition", "to", "ttl")
    values = _batch_values(request)
    headers = message_headers(request)
    ttl = seconds_of(query["ttl"], "ttl") if "ttl" in query else None
    columns = many(
        values,
        bytes_max=engine.max_message_size,
        keys=[query["key"]] * len(values) if "key" in query else None,
        headers=headers or None,
        expires_at=None if ttl is None else engine.now_ms() + int(ttl * 1000),
        target=query.get("to"),
    )
    partition = number_of(query["partition"], "partition") if "partition" in query else None
    producer = None
    if "idempotency-key" in request.headers:
        producer = idempotency_producer(request.headers["idempotency-key"])
    slot = connection.reserve(request)

    def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
        if error is not None:
            connection.publish_failed(request, slot, error)
            return
        content = orjson.dumps(
            {
                "published": sum(receipt.count for receipt in receipts),
                "receipts": [
                    {**receipt_view(receipt), "count": receipt.count} for receipt in receipts
                ],
            }
        )
        connection.published(request, slot, http.json_answer(200, content, request.keep_alive))

    try:
        engine.publish(topic, columns, done, partition=partition, producer=producer)
    except HeadraceError as error:
        connection.publish_failed(request, slot, error)


def _batch_values(request: Request) -> list[bytes]:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in ("application/x-ndjson", "application/jsonl"):
        lines = [line for line in request.body.split(b"\n") if line.strip()]
        for line in lines:
            check_json(line)
        return lines
    if not is_json_type(content_type):
        raise InvalidArgument(
            "a batch is a JSON array (application/json) or lines of JSON (application/x-ndjson)",
            code="unsupported_media_type",
        )
    items = read_json(request.body)
    if not isinstance(items, list):
        raise InvalidArgument("a batch is a JSON array of messages", code="invalid_json")
    return list(map(orjson.dumps, items))


def message_headers(request: Request) -> dict[str, str]:
    found = {}
    for name, value in request.headers.items():
        if name.startswith(HEADER_PREFIX):
            found[name[len(HEADER_PREFIX) :]] = value
        elif name in CARRIED:
            found[name] = value
    return found


def check_json(body: bytes) -> None:
    read_json(body)


def read_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(
            f"the body is not JSON: {error}; send another Content-Type for other data",
            code="invalid_json",
        ) from None


def read_object(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    value = read_json(body)
    if not isinstance(value, dict):
        raise InvalidArgument("the body is a JSON object", code="invalid_json")
    return value


def check_query(request: Request, *known: str) -> dict[str, str]:
    for name in request.query:
        if name not in known and name != "token":
            raise InvalidArgument(
                f"unknown parameter {name!r}; known are {', '.join(known) or 'none'}",
                code="unknown_parameter",
            )
    return {name: value for name, value in request.query.items() if name in known}


# --- consuming ----------------------------------------------------------------------------------
async def on_consume(connection: HttpConnection, request: Request, topic: str) -> bytes:
    """The next message of a group; 204 when there is none."""
    views = await _pull(connection, request, topic, limit=1)
    if not views:
        return http.answer(204, keep_alive=request.keep_alive)
    return http.json_answer(200, orjson.dumps(views[0]), request.keep_alive)


async def on_consume_batch(connection: HttpConnection, request: Request, topic: str) -> bytes:
    """Up to ``limit`` messages of a group, perhaps none."""
    limit = number_of(request.query.get("limit", "10"), "limit")
    if not 1 <= limit <= 10_000:
        raise InvalidArgument("limit is from 1 to 10000")
    views = await _pull(connection, request, topic, limit=limit)
    return http.json_answer(200, orjson.dumps(views), request.keep_alive)


async def _pull(
    connection: HttpConnection, request: Request, topic: str, *, limit: int
) -> list[dict[str, Any]]:
    query = check_query(request, "group", "wait", "ack", "limit")
    wait = number_of(query.get("wait", "0"), "wait")
    ack = query.get("ack", "auto")
    if ack not in ("auto", "manual"):
        raise InvalidArgument("ack is 'auto' or 'manual'")
    if wait > WAIT_MS_MAX:
        raise InvalidArgument(f"wait is at most {WAIT_MS_MAX} milliseconds")
    subscription = await group_of(connection, topic, query.get("group", "default"))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Delivery]] = loop.create_future()

    def done(deliveries: list[Delivery], error: HeadraceError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(deliveries)

    pull = Pull(subscription, loop, limit, auto_ack=ack == "auto", done=done)
    pull.start(wait / 1000)
    try:
        deliveries = await future
    except asyncio.CancelledError:
        pull.cancel()
        raise
    return [view for delivery in deliveries for view in delivery_views(delivery)]


async def group_of(connection: HttpConnection, topic: str, group: str) -> Subscription:
    """The group over the topic, made at the earliest message if it is not there."""
    engine = connection.hub.engine
    found = engine.subscription_or_none(group, topic)
    if found is not None:
        return found
    await connection.hub.operations.broker.create_subscription(group, topic, start="earliest")
    return engine.subscription(group, topic)


def _settle(
    connection: HttpConnection,
    request: Request,
    topic: str,
    settle: Callable[[Subscription, int, int, dict[str, Any]], None],
    *known: str,
) -> bytes:
    query = check_query(request, "group")
    body = read_object(request.body)
    group = query.get("group", body.pop("group", "default"))
    deliveries = body.pop("deliveries", None) or [body.pop("delivery", None)]
    for name in body:
        if name not in known:
            raise InvalidArgument(f"unknown field {name!r}", code="unknown_argument")
    subscription = connection.hub.engine.subscription_or_none(str(group), topic)
    if subscription is None:
        raise SubscriptionNotFound(f"there is no group {group!r} over {topic!r}")
    settled, stale = 0, []
    for delivery in deliveries:
        lease, offset = parse_delivery(delivery)
        try:
            settle(subscription, lease, offset, body)
            settled += 1
        except StaleDelivery:
            stale.append(delivery)
    if stale and not settled:
        raise StaleDelivery("the delivery has ended: it was settled already, or its time was up")
    content = orjson.dumps({"settled": settled, "stale": stale})
    return http.json_answer(200, content, request.keep_alive)


def parse_delivery(delivery: object) -> tuple[int, int]:
    if isinstance(delivery, str):
        lease, dot, offset = delivery.partition(".")
        if dot and lease.isdigit() and offset.isdigit() and len(delivery) < 50:
            return int(lease), int(offset)
    raise InvalidArgument(
        "give 'delivery' (or a list 'deliveries') as it came with the message",
        code="invalid_delivery",
    )


def number_in(body: dict[str, Any], name: str, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
        raise InvalidArgument(f"{name} is a number of seconds up to {high:g}")
    return float(value)


def on_ack(connection: HttpConnection, request: Request, topic: str) -> bytes:
    return _settle(connection, request, topic, lambda s, lease, offset, _: s.ack(lease, offset))


def on_nack(connection: HttpConnection, request: Request, topic: str) -> bytes:
    def nack(subscription: Subscription, lease: int, offset: int, body: dict[str, Any]) -> None:
        delay = number_in(body, "delay", limits.DELAY_S_MAX)
        subscription.nack(lease, offset, delay, str(body.get("reason", "nack"))[:1000])

    return _settle(connection, request, topic, nack, "delay", "reason")


def on_extend(connection: HttpConnection, request: Request, topic: str) -> bytes:
    def extend(subscription: Subscription, lease: int, offset: int, body: dict[str, Any]) -> None:
        seconds = number_in(body, "seconds", limits.ACK_TIMEOUT_S_MAX)
        if not subscription.lease(lease).is_out(offset):
            raise StaleDelivery("the delivery has ended")
        subscription.extend(lease, seconds)

    return _settle(connection, request, topic, extend, "seconds")


# --- reading ------------------------------------------------------------------------------------
def on_fetch(connection: HttpConnection, request: Request, topic: str) -> bytes:
    """Messages from an offset or a time on; nothing is consumed."""
    query = check_query(request, "from", "limit", "partition")
    limit = number_of(query.get("limit", "100"), "limit")
    if not 1 <= limit <= 10_000:
        raise InvalidArgument("limit is from 1 to 10000")
    partition = number_of(query.get("partition", "0"), "partition")
    start = parse_position(query.get("from", "earliest"))
    engine = connection.hub.engine
    found = fetch_messages(engine, topic, start, limit, partition, 4 << 20)
    content = orjson.dumps([message_view(message) for message in found])
    return http.json_answer(200, content, request.keep_alive)


async def on_find(connection: HttpConnection, request: Request, message_id: str) -> bytes:
    check_query(request)
    message = await connection.hub.operations.broker.find(message_id)
    return http.json_answer(200, orjson.dumps(message_view(message)), request.keep_alive)


_DATA = {"description": "Any JSON; other content types keep their bytes."}
_ANY_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": _DATA},
        "text/plain": {"schema": schemas.STRING},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
_SETTLE = {
    "delivery": schemas.DELIVERY,
    "deliveries": schemas.array(schemas.DELIVERY),
    "group": schemas.GROUP,
}
_SETTLED = schemas.answers("200", schemas.ref("Settled"))

ROUTES = [
    Route(
        "POST", "/publish/{topic}", on_publish, "Publish a message", "publishing",
        schemas.PUBLISH_PARAMETERS, _ANY_BODY,
        {**schemas.answers("200", schemas.ref("Receipt")),
         **schemas.answers("202", schemas.ref("Receipt"), "Scheduled.")},
    ),
    Route(
        "POST", "/publish/batch/{topic}", on_publish_batch, "Publish many messages", "publishing",
        tuple(p for p in schemas.PUBLISH_PARAMETERS
              if p.name in ("key", "partition", "to", "ttl", "Idempotency-Key")),
        {"required": True, "content": {
            "application/json": {"schema": schemas.array(_DATA)},
            "application/x-ndjson": {"schema": schemas.STRING}}},
        schemas.answers("200", schemas.obj(
            {"published": schemas.WHOLE, "receipts": schemas.array(schemas.ref("Receipt"))},
            ["published", "receipts"])),
    ),
    Route(
        "GET", "/consume/{topic}", on_consume, "Consume a message", "consuming",
        (schemas.GROUP_PARAMETER, schemas.WAIT, schemas.ACK), None,
        {**schemas.answers("200", schemas.ref("Message")), **schemas.NOTHING},
    ),
    Route(
        "GET", "/consume/{topic}/batch", on_consume_batch, "Consume many messages", "consuming",
        (schemas.GROUP_PARAMETER, schemas.LIMIT, schemas.WAIT, schemas.ACK), None,
        schemas.answers("200", schemas.array(schemas.ref("Message"))),
    ),
    Route(
        "POST", "/ack/{topic}", on_ack, "Acknowledge deliveries", "consuming",
        (schemas.GROUP_PARAMETER,), schemas.json_body(schemas.obj(_SETTLE)), _SETTLED,
    ),
    Route(
        "POST", "/nack/{topic}", on_nack, "Give deliveries back", "consuming",
        (schemas.GROUP_PARAMETER,),
        schemas.json_body(schemas.obj(
            {**_SETTLE, "delay": {"type": "number", "minimum": 0}, "reason": schemas.STRING})),
        _SETTLED,
    ),
    Route(
        "POST", "/extend/{topic}", on_extend, "Ask for more time", "consuming",
        (schemas.GROUP_PARAMETER,),
        schemas.json_body(schemas.obj({**_SETTLE, "seconds": {"type": "number", "minimum": 0}})),
        _SETTLED,
    ),
    Route(
        "GET", "/topics/{topic}/messages", on_fetch, "Read messages by offset or time", "reading",
        (Parameter("from", "An offset, earliest, latest, or a time.", schemas.STRING),
         schemas.LIMIT, schemas.PARTITION), None,
        schemas.answers("200", schemas.array(schemas.ref("Message"))),
    ),
    Route(
        "GET", "/messages/{id}", on_find, "Find a message by its id", "reading", (), None,
        schemas.answers("200", schemas.ref("Message")),
    ),
]  # fmt: skip
