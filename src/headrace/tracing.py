"""Spans for OpenTelemetry: publish, deliver and process (the extra ``headrace[otel]``).

::

    publish orders (PRODUCER) ── traceparent, tracestate ──▶ the headers of the message
         │                                                           │
         │ parent                                     deliver orders (CLIENT), linked to each message
         └──▶ process orders (CONSUMER): the handler runs in it

Nothing happens before :func:`enable`: each hook looks at one global name. OpenTelemetry is imported there, and
only there. Names and attributes follow OpenTelemetry's conventions for messaging systems.

A message that has a ``traceparent`` keeps it: it came from elsewhere, over HTTP for example, and goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from headrace.errors import HeadraceError, InvalidArgument
from headrace.model import Message

TRACEPARENT = "traceparent"
LINKS_MAX = 128
"""Of one delivery; OpenTelemetry keeps no more by default."""
active: Tracing | None = None
"""None: there are no spans."""


def enable(tracer_provider: Any = None) -> None:
    """Make spans from now on, with the provider of the program or with this one.

    Example::

        from headrace import tracing

        tracing.enable()
    """
    global active
    active = Tracing(tracer_provider)


def disable() -> None:
    """Make no spans any more."""
    global active
    active = None


class Tracing:
    def __init__(self, tracer_provider: Any = None):
        try:
            from opentelemetry import context, propagate, trace
        except ImportError:
            raise InvalidArgument(
                "OpenTelemetry is not installed: pip install 'headrace[otel]'",
                code="tracing_unavailable",
            ) from None
        self._context, self._propagate, self._trace = context, propagate, trace
        self._tracer = trace.get_tracer("headrace", tracer_provider=tracer_provider)

    # --- publishing -------------------------------------------------------------------------
    def begin(self, what: str, topic: str, count: int) -> Any:
        """A span around a publish."""
        attributes = _attributes(what, "send", topic)
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        kind = self._trace.SpanKind.PRODUCER
        return self._tracer.start_span(f"{what} {topic}", kind=kind, attributes=attributes)

    def inject(self, span: Any, headers: Any) -> Any:
        """The headers of one message or of many, with the span's context in each."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, context=self._trace.set_span_in_context(span))
        if headers is not None and not isinstance(headers, Mapping):
            return [_with(carrier, each) for each in headers]
        return _with(carrier, headers)

    def end(self, span: Any, receipt: Any = None, error: BaseException | None = None) -> None:
        if error is not None:
            span.record_exception(error)
            code = error.code if isinstance(error, HeadraceError) else type(error).__qualname__
            span.set_attribute("error.type", code)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        elif receipt is not None:
            span.set_attribute("messaging.message.id", str(receipt.id))
            if receipt.partition is not None and receipt.partition >= 0:
                span.set_attribute("messaging.destination.partition.id", str(receipt.partition))
        span.end()

    # --- receiving --------------------------------------------------------------------------
    def delivered(self, messages: Sequence[Message], subscription: str | None) -> None:
        """Messages have arrived: one span, with a link to each of them."""
        contexts = [self._span_context(each) for each in messages[:LINKS_MAX]]
        links = [self._trace.Link(each) for each in contexts if each.is_valid]
        topic = messages[0].topic
        attributes = _attributes("deliver", "receive", topic, subscription)
        attributes["messaging.batch.message_count"] = len(messages)
        self._tracer.start_span(
            f"deliver {topic}",
            context=self._context.Context(),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            links=links,
        ).end()

    def _span_context(self, message: Message) -> Any:
        return self._trace.get_current_span(self._extract(message)).get_span_context()

    def _extract(self, message: Message) -> Any:
        return self._propagate.extract(message.headers, context=self._context.Context())

    @contextlib.contextmanager
    def processing(self, message: Message, subscription: str | None) -> Iterator[None]:
        attributes = _attributes("process", "process", message.topic, subscription)
        attributes |= {
            "messaging.message.id": str(message.id),
            "messaging.destination.partition.id": str(message.partition),
            "messaging.message.body.size": len(message.value or b""),
            "messaging.headrace.message.attempt": message.attempt,
        }
        with self._tracer.start_as_current_span(
            f"process {message.topic}",
            context=self._extract(message),
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
        ) as span:
            try:
                yield
            except BaseException as error:
                code = error.code if isinstance(error, HeadraceError) else type(error).__qualname__
                span.set_attribute("error.type", code)
                raise


def _attributes(
    what: str, kind: str, topic: str, subscription: str | None = None
) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "messaging.system": "headrace",
        "messaging.operation.name": what,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }
    if subscription is not None:
        found["messaging.consumer.group.name"] = subscription
    return found


def _with(carrier: Mapping[str, str], headers: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(headers or {})
    return given if TRACEPARENT in given else {**given, **carrier}


# --- hooks ------------------------------------------------------------------------------------------
def published(
    publish: Callable[..., Any], topic: Any, value: Any, headers: Any, options: Any
) -> Any:
    """Call ``publish``, whose result is a future or a publication, in a span."""
    tracing = active
    if tracing is None:
        return publish(topic, value, headers, options)
    span = tracing.begin("publish", str(topic), 1)
    try:
        pending = publish(topic, value, tracing.inject(span, headers), options)
    except BaseException as error:
        tracing.end(span, error=error)
        raise

    def done(pending: Any) -> None:  # a look at the error must not count as waiting for it
        error = getattr(pending, "_error", None) or getattr(pending, "_exception", None)
        is_lost = error is not None or (hasattr(pending, "cancelled") and pending.cancelled())
        tracing.end(span, None if is_lost else pending.result(), error)

    pending.add_done_callback(done)
    return pending


def sending(
    what: str, topic: Any, headers: Any, count: int = 1
) -> contextlib.AbstractContextManager[Any]:
    """A span around the block, which gets the headers to send."""
    if active is None:
        return contextlib.nullcontext(headers)
    return _span(active, what, topic, headers, count)


@contextlib.contextmanager
def _span(tracing: Any, what: str, topic: Any, headers: Any, count: int) -> Iterator[Any]:
    span = tracing.begin(what, str(topic), count)
    try:
        yield tracing.inject(span, headers)
    except BaseException as error:
        tracing.end(span, error=error)
        raise
    tracing.end(span)


def delivered(messages: Iterable[Message], subscription: str | None) -> Sequence[Message]:
    """Called only while spans are made."""
    found = list(messages)
    if found and active is not None:
        active.delivered(found, subscription)
    return found


def process(message: Message, subscription: str | None = None) -> AbstractContextManager[None]:
    """A span around the processing of a message. Workers use it; a loop of your own may, too.

    Example::

        for message in consumer:
            with tracing.process(message, "email"):
                send_mail(message)
            message.ack()
    """
    return _NOTHING if active is None else active.processing(message, subscription)


_NOTHING = contextlib.nullcontext()
