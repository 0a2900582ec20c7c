"""Publishing, consuming and reading over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from headrace import limits
from headrace.broker.aio import fetch_page
from headrace.broker.browsing import browse
from headrace.broker.delivery import Delivery
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish
from headrace.broker.pull import Pull
from headrace.broker.subscription import Subscription
from headrace.budget import Share
from headrace.errors import (
    Conflict,
    HeadraceError,
    InvalidArgument,
    StaleDelivery,
    SubscriptionNotFound,
    TooLarge,
)
from headrace.log.header_columns import check_count
from headrace.log.interface import ReadPending, completed
from headrace.model import (
    PublishManyOptions,
    PublishOptions,
    Receipt,
    check_pattern,
    check_subscription_name,
    parse_position,
)
from headrace.notation import SECONDS
from headrace.operations import exact_json
from headrace.operations.arguments import PLACE
from headrace.operations.catalog import OPERATIONS
from headrace.operations.views import CONTENT_TYPE, is_json_type, message_view, receipt_view
from headrace.paging import Asked, cursor_text, parse_cursor
from headrace.server import schemas
from headrace.server.arguments import milliseconds_of, publish_options, seconds_of
from headrace.server.http import HttpSession
from headrace.server.routing import Parameter, Route
from headrace.server.settling import (
    Settle,
    deliveries_in,
    owner_among,
    settle_each,
    settling,
    text_in,
)
from headrace.server.views import delivery_array, json_array, message_array, receipt_json
from headrace.wire.http import Answer, Request

HEADER_PREFIX = "x-header-"
CREATED = "Headrace-Created"
"""What did not exist: ``topic, group`` on the first use of both. A topic that is new has no messages."""
CARRIED = ("traceparent", "tracestate")
"""Request headers that become headers of the message."""
_PUBLISH_QUERY = (
    "key", "key64", "partition", "id", "to", "delay", "deliver_at", "ttl", "timestamp",
)  # fmt: skip
_OTHER_TYPE = "; send another Content-Type for other data"
UNSAID = "application/x-www-form-urlencoded"
"""What ``curl -d`` sends by default: the body is JSON if it parses as JSON, else text."""
WAIT_MS_MAX = 60_000
CURSOR = "X-Cursor"
"""The place after a page. It is accepted as a header too: that of a thousand partitions is long."""
PAGE_BYTES = 4 << 20
BODY_BYTES_SPARE = 64 << 10
"""A message that is a little too large is read, so that the connection goes on after its error."""
BATCH_BYTES_MAX = 4 << 20
"""Of an array of messages: to cut it into its items takes 10 ms for a megabyte."""


# --- publishing ---------------------------------------------------------------------------------
def on_publish(session: HttpSession, request: Request, topic: str) -> None:
    """One message: the body. JSON is kept as it is; other types keep their bytes."""
    from_head = request.memo.get("publish")
    if from_head is None:
        from_head = request.memo["publish"] = _publish_head(request)
    is_json, headers, options = from_head
    body = request.body
    if is_json:
        exact_json.check(body, _OTHER_TYPE)
    publish = session.publishing.message(topic, body, headers, options, gather=True)
    slot = session.outbox.reserve(len(body) + 256)

    def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
        if error is not None:
            session.fail(request, error, slot)
        else:
            with_first_receipts(session.engine, receipts, published)

    def published(receipts: list[Receipt]) -> None:
        status = 202 if receipts[0].is_delayed else 200
        session.finish(request, Answer(status, receipt_json(receipts[0])), slot)

    session.connection.publish(publish, done)


def _publish_head(request: Request) -> tuple[bool, dict[str, str], PublishOptions]:
    """(whether the body is JSON, the message's headers, its options)"""
    is_json, headers = _content(request)
    options = publish_options(check_query(request, *_PUBLISH_QUERY))
    if "idempotency-key" in request.headers:
        options["idempotency_key"] = request.headers["idempotency-key"]
    return is_json, headers, options


def _content(request: Request) -> tuple[bool, dict[str, str]]:
    """Whether the body is JSON, and the headers of the message."""
    headers = message_headers(request)
    content_type = request.headers.get("content-type")
    is_json = is_json_type(content_type)
    if not is_json and content_type != UNSAID:
        headers[CONTENT_TYPE] = content_type or ""
    return is_json, headers


def with_first_receipts(
    engine: Engine, receipts: list[Receipt], then: Callable[[list[Receipt]], object]
) -> None:
    """Give ``then`` the receipts; for a repetition that of the first publish, once it is read."""
    if any(receipt.duplicate for receipt in receipts):
        try:
            receipts = [
                _first_receipt(engine, each) if each.duplicate else each for each in receipts
            ]
        except ReadPending as pending:
            pending.then(lambda: with_first_receipts(engine, receipts, then))
            return
    then(receipts)


def _first_receipt(engine: Engine, receipt: Receipt) -> Receipt:
    """The log does not say when the first publish was."""
    partition, offset = receipt.partition, receipt.offset
    if partition is None or offset is None:
        return receipt
    try:
        batch = engine.partition(receipt.topic, partition).log.read_cached(offset)
        index = offset - batch.base_offset
        first = batch.messages(receipt.topic, partition, index, index + 1)[0]
    except (HeadraceError, OSError):  # retention dropped it, or it cannot be read
        return receipt
    return Receipt(
        receipt.topic,
        partition,
        offset,
        first.timestamp,
        receipt.count,
        True,
        first.id.bytes,
    )


def on_publish_batch(session: HttpSession, request: Request, topic: str) -> None:
    """Many messages: a JSON array, or a line each (application/x-ndjson)."""
    publish = _batch(session, request, topic)
    slot = session.reserve(request)

    def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
        if error is not None:
            session.fail(request, error, slot)
        else:
            with_first_receipts(
                session.engine,
                receipts,
                lambda firsts: session.finish(request, _batch_published(firsts), slot),
            )

    session.connection.publish(publish, done)


def _batch(session: HttpSession, request: Request, topic: str) -> Publish:
    query = check_query(request, "key", "partition", "to", "ttl")
    values = _batch_values(request)
    headers, key, target = message_headers(request), query.get("key"), query.get("to")
    _check_shared(len(values), headers, (key or "", target or ""))
    options: PublishManyOptions = {
        "keys": None if key is None else [key] * len(values),
        "partition": whole_in(query, "partition") if "partition" in query else None,
        "to": target,
        "ttl": seconds_of(query["ttl"], "ttl") if "ttl" in query else None,
    }
    identity = request.headers.get("idempotency-key")
    return session.publishing.messages(topic, values, headers, options, idempotency_key=identity)


def _batch_published(receipts: list[Receipt]) -> Answer:
    content = {
        "published": sum(receipt.count for receipt in receipts),
        "receipts": [{**receipt_view(receipt), "count": receipt.count} for receipt in receipts],
    }
    return Answer(200, orjson.dumps(content))


def _batch_values(request: Request) -> list[bytes]:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in ("application/x-ndjson", "application/jsonl"):
        if request.body.count(b"\n") > limits.CLIENT_BATCH_RECORDS_MAX:
            raise exact_json.too_many(limits.CLIENT_BATCH_RECORDS_MAX)
        lines = [line for line in map(bytes.strip, request.body.split(b"\n")) if line]
        for line in lines:
            exact_json.check(line, _OTHER_TYPE)
        return lines
    if not is_json_type(content_type) and content_type != UNSAID:
        raise InvalidArgument(
            "a batch is a JSON array (application/json) or lines of JSON (application/x-ndjson)",
            code="unsupported_media_type",
        )
    return exact_json.split(request.body, limits.CLIENT_BATCH_RECORDS_MAX)


def _check_shared(count: int, headers: Mapping[str, str], others: Iterable[str]) -> None:
    """What the request has once is stored with each message: together it must fit in a batch."""
    check_count(count * len(headers), limits.BATCH_HEADERS_MAX)
    size = count * sum(map(len, (*headers, *headers.values(), *others)))
    if size > limits.CLIENT_BATCH_BYTES_MAX:
        raise TooLarge(
            f"the key and the headers are stored with each of the {count} messages, which makes "
            f"{size >> 10} KiB; publish fewer at once",
            code="batch_too_large",
        )


def message_headers(request: Request) -> dict[str, str]:
    found = {}
    for name, value in request.headers.items():
        if name.startswith(HEADER_PREFIX):
            found[name[len(HEADER_PREFIX) :]] = value
        elif name in CARRIED:
            found[name] = value
    return found


# --- requests -----------------------------------------------------------------------------------
async def on_request(session: HttpSession, request: Request, topic: str) -> Answer:
    """Publish a request and wait for its reply."""
    query = check_query(request, "key", "key64", "wait")
    wait = whole_in(query, "wait", 30_000, 0, int(limits.REQUEST_S_MAX * 1000)) / 1000
    query.pop("wait", None)
    given = {"topic": topic, **_message(request), "key": publish_options(query).get("key")}
    given["wait"] = wait
    reply = await session.connection.run(OPERATIONS["request"], given)
    return Answer(200, orjson.dumps(message_view(reply)))


async def on_reply(session: HttpSession, request: Request, to: str) -> Answer:
    """Answer a request: the body, as in a publish."""
    check_query(request)
    given = {"to": to, **_message(request)}
    delivered = await session.connection.run(OPERATIONS["reply"], given)
    return Answer(200, orjson.dumps({"delivered": delivered}))


def _message(request: Request) -> dict[str, Any]:
    is_json, headers = _content(request)
    if is_json:
        exact_json.check(request.body, _OTHER_TYPE)
    return {"value": request.body, "headers": headers}


def read_json(body: bytes) -> Any:
    exact_json.check_cost(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not JSON: {error}", code="invalid_json") from None


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


def whole_in(
    query: dict[str, str], name: str, default: int = 0, low: int = 0, high: int = limits.OFFSET_MAX
) -> int:
    """A whole number of the query."""
    text = query.get(name)
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else -1
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is a whole number from {low} to {high}, not {text[:40]!r}")
    return number


# --- consuming ----------------------------------------------------------------------------------
async def on_consume(session: HttpSession, request: Request, topic: str) -> Answer:
    """The next message of a group, or 204."""
    query = check_query(request, "group", "wait", "ack")
    views, headers = await _pull(session, query, topic, limit=1)
    if not views:
        return Answer(204, headers=headers)
    return Answer(200, views[0], headers=headers)


async def on_consume_batch(session: HttpSession, request: Request, topic: str) -> Answer:
    """Up to ``limit`` messages of a group; the list may be empty."""
    query = check_query(request, "group", "wait", "ack", "limit")
    limit = whole_in(query, "limit", 10, 1, 10_000)
    views, headers = await _pull(session, query, topic, limit=limit)
    return Answer(200, json_array(views), headers=headers)


async def _pull(
    session: HttpSession, query: dict[str, str], topic: str, *, limit: int
) -> tuple[list[bytes], dict[str, str]]:
    """The JSON of each message, and headers that say what was created for it."""
    wait = milliseconds_of(query.get("wait", "0"), "wait", WAIT_MS_MAX)
    ack = query.get("ack", "auto")
    if ack not in ("auto", "manual"):
        raise InvalidArgument("ack is 'auto' or 'manual'")
    subscription, headers = await group_of(session, topic, query.get("group", "default"))
    _check_running(subscription)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Delivery]] = loop.create_future()

    def done(deliveries: list[Delivery], error: HeadraceError | None) -> None:
        if not future.done() and error is not None:
            future.set_exception(error)
        elif not future.done():
            future.set_result(deliveries)

    name = session.connection.client_id or session.connection.peer
    pull = Pull(subscription, loop, limit, done, session.hub.pulled, name)
    held = Share(session.engine.budget)
    # It ends early when the client closes its sending half, or when the broker stops.
    session.connection.long_polls[pull.finish] = None
    try:
        pull.start(0 if session.connection.leaving else wait / 1000)
        deliveries = await future
        session.connection.permissions.need_to_use("consume", subscription)  # it has waited
        if not deliveries:
            _check_running(subscription)
        views = await delivery_array(deliveries, session.engine.pace, held, settle=ack == "manual")
        if ack == "auto":
            pull.ack()  # from here to the socket nothing is awaited
        return views, headers
    except BaseException:  # most of all CancelledError: the client is gone
        pull.cancel()
        raise
    finally:
        session.connection.long_polls.pop(pull.finish, None)
        held.clear()


def _check_running(subscription: Subscription) -> None:
    if subscription.paused:
        raise Conflict(
            f"subscription {subscription.name!r} is paused, so nothing is delivered; an operator "
            f"resumes it (POST /subscriptions/{subscription.name}/resume)",
            code="subscription_paused",
            retryable=True,
        )


async def group_of(
    session: HttpSession, topic: str, group: str
) -> tuple[Subscription, dict[str, str]]:
    """The group; if it does not exist, it is created at the earliest message, and the headers say so."""
    found = known_group(session, topic, group)
    if found is not None:
        session.connection.permissions.need_to_use("consume", found)
        return found, {}
    arguments = {"subscription": group, "topic": topic}
    made = await session.connection.call("create_subscription", arguments)
    created = "topic, group" if made.get("topic_created") else "group"
    return session.engine.subscription(group, topic), {CREATED: created}


def known_group(session: HttpSession, topic: str, group: str) -> Subscription | None:
    check_subscription_name(group)
    check_pattern(topic)
    session.connection.permissions.need_group(group, topic)
    return session.engine.subscription_or_none(group, topic)


def _settler(verb: str, *, of_topic: bool) -> Callable[..., Any]:
    """``POST /ack`` and the like: a delivery says itself which group and topic it is of."""

    def settle(session: HttpSession, request: Request, topic: str | None = None) -> Any:
        query = check_query(request, *(("group",) if of_topic else ()))
        body = read_object(request.body)
        asked = dict(body)
        each = settling(verb, body)
        is_named = of_topic and body.get("group") is not None
        group = query.get("group", text_in(body, "group", "") if is_named else None)
        deliveries = deliveries_in(body)
        refuse_the_rest(body)
        if session.engine.cluster is not None:
            if group is not None and topic is not None:
                _group(session, topic, group)
            return _settle_anywhere(session, verb, asked, topic, deliveries, each)
        if group is None or topic is None:
            owner = owner_among(session.hub.pulled, session.connection.permissions, topic)
            stale = settle_each(deliveries, each, owner)
        else:
            subscription = _group(session, topic, group)
            stale = settle_each(deliveries, each, lambda lease: subscription)
        return Answer(200, orjson.dumps({"settled": len(deliveries) - len(stale), "stale": stale}))

    settle.__name__ = f"on_{verb}" if of_topic else f"on_{verb}_delivery"
    return settle


async def _settle_anywhere(
    session: HttpSession,
    verb: str,
    asked: dict[str, Any],
    topic: str | None,
    deliveries: list[tuple[int, int]],
    each: Settle,
) -> Answer:
    """With several nodes: another one may have handed the messages out."""
    owner = owner_among(session.hub.pulled, session.connection.permissions, topic)
    stale, elsewhere = [], []
    for lease, offset in deliveries:
        if lease not in session.hub.pulled:
            elsewhere.append(f"{lease}.{offset}")
            continue
        try:
            each(owner(lease), lease, offset)
        except StaleDelivery:
            stale.append(f"{lease}.{offset}")
    cluster = session.engine.cluster
    if elsewhere and cluster is not None:
        asked = {name: asked[name] for name in ("delay", "reason", "seconds") if name in asked}
        caller = session.connection.caller
        name = None if caller.unlimited else caller.name
        stale += await cluster.settle(verb, elsewhere, {**asked, "topic": topic}, name)
    if len(stale) == len(deliveries):
        raise StaleDelivery("the delivery has ended: it was settled already, or it timed out")
    return Answer(200, orjson.dumps({"settled": len(deliveries) - len(stale), "stale": stale}))


def _group(session: HttpSession, topic: str, group: str) -> Subscription:
    subscription = known_group(session, topic, group)
    if subscription is None:
        raise SubscriptionNotFound(f"there is no group {group!r} on {topic!r}")
    session.connection.permissions.need_to_use("consume", subscription)
    return subscription


def refuse_the_rest(body: dict[str, Any]) -> None:
    for name in body:
        raise InvalidArgument(f"unknown field {name[:40]!r}", code="unknown_argument")


# --- reading ------------------------------------------------------------------------------------
async def on_fetch(session: HttpSession, request: Request, topic: str) -> Answer:
    """Messages of all partitions, or of one, from a place on. Nothing is consumed."""
    query = check_query(request, "from", "limit", "partition", "cursor")
    limit = whole_in(query, "limit", 100, 1, 10_000)
    partition = whole_in(query, "partition") if "partition" in query else None
    cursor = query.get("cursor", request.headers.get(CURSOR.lower()))
    if cursor is None:
        start = parse_position(query.get("from", "earliest"))
    elif "from" in query:
        raise InvalidArgument("from and cursor both say where to begin; give one of them")
    else:
        start = parse_cursor(cursor)
    engine = session.engine
    session.connection.permissions.need("browse", topic)
    asked = Asked(topic, start, partition, PAGE_BYTES, 0.0, limit)
    if partition is None and len(engine.topics.find(topic).partitions) > 1:
        page = await browse(engine, asked)
    else:
        page = await completed(lambda: fetch_page(engine, asked))
    held = Share(engine.budget)
    try:
        content = json_array(await message_array(page, engine.pace, held))
        return Answer(200, content, headers={CURSOR: cursor_text(page.next)})
    finally:
        held.clear()


async def on_find(session: HttpSession, request: Request, message_id: str) -> Answer:
    check_query(request)
    message = await session.connection.run(OPERATIONS["find"], {"id": message_id})
    return Answer(200, orjson.dumps(message_view(message)))


_DATA = {"description": "Any JSON; other content types keep their bytes."}
_ANY_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": _DATA},
        "text/plain": {"schema": schemas.STRING},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
_DELIVERIES = {**schemas.array(schemas.DELIVERY), "minItems": 1}


def _settle_routes(verb: str, summary: str, **fields: dict[str, Any]) -> Iterator[Route]:
    """With a body that names one delivery, or several; with and without the topic."""
    names = (("delivery", schemas.DELIVERY), ("deliveries", _DELIVERIES))
    for of_topic in (False, True):
        more = {"group": schemas.GROUP, **fields} if of_topic else fields
        bodies = [schemas.body({name: schema, **more}, [name]) for name, schema in names]
        yield Route(
            "POST",
            f"/{verb}/{{topic}}" if of_topic else f"/{verb}",
            _settler(verb, of_topic=of_topic),
            summary,
            "consuming",
            (schemas.SETTLED_GROUP,) if of_topic else (),
            schemas.json_body({"oneOf": bodies}),
            schemas.answers("200", schemas.ref("Settled")),
        )


ROUTES = [
    Route(
        "POST", "/publish/{topic}", on_publish, "Publish a message", "publishing",
        schemas.PUBLISH_PARAMETERS, _ANY_BODY,
        {**schemas.answers("200", schemas.ref("Receipt")),
         **schemas.answers("202", schemas.ref("Receipt"), "Scheduled.")},
        body_bytes_max=lambda message: message + BODY_BYTES_SPARE,
    ),
    Route(
        "POST", "/publish/batch/{topic}", on_publish_batch, "Publish many messages", "publishing",
        tuple(p for p in schemas.PUBLISH_PARAMETERS
              if p.name in ("key", "partition", "to", "ttl", "Idempotency-Key")),
        {"required": True, "content": {
            "application/json": {"schema": {**schemas.array(_DATA), "minItems": 1}},
            "application/x-ndjson": {"schema": schemas.STRING}}},
        schemas.answers("200", schemas.obj(
            {"published": schemas.WHOLE, "receipts": schemas.array(schemas.ref("Receipt"))},
            ["published", "receipts"])),
        body_bytes_max=lambda message: max(BATCH_BYTES_MAX, message + BODY_BYTES_SPARE),
    ),
    Route(
        "POST", "/request/{topic}", on_request, "Publish a request and wait for its reply", "requests",
        (*[p for p in schemas.PUBLISH_PARAMETERS if p.name in ("key", "key64")],
         schemas.REQUEST_WAIT),
        _ANY_BODY,
        {**schemas.answers("200", schemas.ref("Message")),
         **schemas.answers("504", schemas.ref("Error"), "Nobody replied in time.")},
        body_bytes_max=lambda message: message + BODY_BYTES_SPARE,
    ),
    Route(
        "POST", "/reply/{id}", on_reply, "Reply to a request", "requests", (), _ANY_BODY,
        schemas.answers("200", schemas.obj({"delivered": {"type": "boolean"}}, ["delivered"])),
        body_bytes_max=lambda message: message + BODY_BYTES_SPARE,
    ),
    Route(
        "GET", "/consume/{topic}", on_consume, "Consume a message", "consuming",
        (schemas.GROUP_PARAMETER, schemas.WAIT, schemas.ACK), None,
        {**schemas.answers("200", schemas.ref("Message")), **schemas.NOTHING}, safe=False,
    ),
    Route(
        "GET", "/consume/{topic}/batch", on_consume_batch, "Consume many messages", "consuming",
        (schemas.GROUP_PARAMETER, schemas.LIMIT, schemas.WAIT, schemas.ACK), None,
        schemas.answers("200", schemas.array(schemas.ref("Message"))), safe=False,
    ),
    *_settle_routes("ack", "Acknowledge deliveries"),
    *_settle_routes("nack", "Give deliveries back",
                    delay=schemas.duration(SECONDS, limits.DELAY_S_MAX), reason=schemas.STRING),
    *_settle_routes("extend", "Ask for more time",
                    seconds=schemas.duration(SECONDS, limits.ACK_TIMEOUT_S_MAX)),
    Route(
        "GET", "/topics/{topic}/messages", on_fetch, "Read messages by offset or time", "reading",
        (Parameter("from", "Where to begin.", PLACE),
         schemas.LIMIT, schemas.ONE_PARTITION, schemas.CURSOR), None,
        schemas.answers("200", schemas.array(schemas.ref("Message"))),
    ),
    Route(
        "GET", "/messages/{id}", on_find, "Find a message by its id", "reading", (), None,
        schemas.answers("200", schemas.ref("Message")),
    ),
]  # fmt: skip
