"""Spans: publish, deliver and process, over threads, asyncio, the network and HTTP; and none without ``enable``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace import AsyncClient, Broker, BrokerClient, tracing
from headrace.errors import InvalidArgument
from headrace.model import Message
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import http_of

WAIT_S = 20
Api = Broker | BrokerClient


class Spans:
    """Spans that have ended, and a tracer for spans of the test itself."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("test")
        tracing.enable(self._provider)

    def named(self, name: str, count: int = 1) -> list[ReadableSpan]:
        def found() -> list[ReadableSpan]:
            return [s for s in self._exporter.get_finished_spans() if s.name == name]

        wait_until(lambda: len(found()) >= count)
        assert len(found()) == count
        return found()

    def one(self, name: str) -> ReadableSpan:
        return self.named(name)[0]


@pytest.fixture
def spans() -> Iterator[Spans]:
    yield Spans()
    tracing.disable()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(params=["embedded", "network"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    if request.param == "embedded":
        with Broker.open() as broker:
            yield broker
    else:
        with request.getfixturevalue("server").client() as client:
            yield client


def ids(span: Any) -> tuple[int, int]:
    """(trace, span) of a span or of a link."""
    return span.context.trace_id, span.context.span_id


def test_a_message_is_one_trace(api: Api, spans: Spans) -> None:
    """Publish is a child of the caller's span, process a child of publish; deliver is linked to it."""

    def handle(message: Message) -> None:
        with spans.tracer.start_as_current_span("mail"):
            pass

    with spans.tracer.start_as_current_span("checkout"):
        receipt = api.publish("orders", b"one", {"a": "b"})
    api.subscribe_to_subscription("email", handle, "orders")
    checkout, publish, process = (
        spans.one(name) for name in ("checkout", "publish orders", "process orders")
    )
    deliver, mail = spans.one("deliver orders"), spans.one("mail")
    assert publish.parent is not None
    assert process.parent is not None
    assert mail.parent is not None
    assert publish.parent.span_id == checkout.context.span_id
    assert process.parent.span_id == publish.context.span_id
    assert mail.parent.span_id == process.context.span_id
    assert process.context.trace_id == checkout.context.trace_id
    assert [ids(link) for link in deliver.links] == [ids(publish)]
    kinds = [span.kind for span in (publish, deliver, process)]
    assert kinds == [trace.SpanKind.PRODUCER, trace.SpanKind.CLIENT, trace.SpanKind.CONSUMER]
    assert publish.attributes == {
        "messaging.system": "headrace",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": str(receipt.id),
    }
    assert process.attributes is not None
    assert process.attributes["messaging.consumer.group.name"] == "email"
    assert process.attributes["messaging.message.id"] == str(receipt.id)
    assert process.attributes["messaging.message.body.size"] == 3


def test_many_messages_have_one_publish_span(api: Api, spans: Spans) -> None:
    """Each carries its context, whether headers are given for all, for each, or not at all."""
    consumer = api.subscription("email", "orders")
    for number, headers in enumerate((None, {"a": "b"}, [{"a": "b"}, None])):
        api.publish_many("orders", [b"x", b"y"], headers)
        publish = spans.named("publish orders", number + 1)[-1]
        assert publish.attributes is not None
        assert publish.attributes["messaging.batch.message_count"] == 2
        context = f"{publish.context.trace_id:032x}-{publish.context.span_id:016x}"
        found = [consumer.get(WAIT_S) for _ in range(2)]
        carried = [message.headers["traceparent"].rpartition("-")[0] for message in found]
        assert carried == [f"00-{context}"] * 2  # the flags after it are the SDK's
        assert found[0].headers.get("a") == (None if headers is None else "b")
    consumer.close()


def test_failures_are_on_the_spans(api: Api, spans: Spans) -> None:
    """A publish that is refused, and a handler that raises."""
    for publish in (api.publish, api.publish_nowait):
        with pytest.raises(InvalidArgument):
            publish("orders", b"x", key=5).result()  # type: ignore[union-attr, arg-type]
    [first, _] = spans.named("publish orders", 2)
    assert first.status.status_code is trace.StatusCode.ERROR
    assert first.attributes is not None
    assert first.attributes["error.type"] == "invalid_key"
    handled = threading.Event()

    def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no address")
        handled.set()

    api.publish("orders", b"x")
    api.subscribe_to_subscription("email", handle, "orders", backoff=0.0)
    assert handled.wait(WAIT_S)
    failed, again = spans.named("process orders", 2)
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "ValueError"
    assert again.status.status_code is not trace.StatusCode.ERROR


def test_asyncio_and_the_context_of_http(server: RunningServer, spans: Spans) -> None:
    """A traceparent that came over HTTP goes on to the handler of an asyncio worker, tracestate too."""
    parent, state = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1"
    http = http_of(server)
    http.ok("POST", "/publish/orders", {}, traceparent=parent, tracestate=state)
    http.close()

    async def main() -> str:
        async with AsyncClient(server.host, server.port) as client:
            handled: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def handle(message: Message) -> None:
                handled.set_result(message.headers["tracestate"])
                await client.publish("mails", b"x")

            await client.subscribe_to_subscription("email", handle, "orders")
            return await asyncio.wait_for(handled, WAIT_S)

    assert asyncio.run(main()) == state
    process, publish = spans.one("process orders"), spans.one("publish mails")
    assert f"{process.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert process.context.trace_state.to_header() == state
    assert publish.parent is not None
    assert publish.parent.span_id == process.context.span_id


def test_a_loop_of_its_own_and_a_request(api: Api, spans: Spans) -> None:
    """``tracing.process`` makes the span of a worker; a request has a span, and its handler is in the trace."""
    consumer = api.subscription("shout", "words")

    def work() -> None:
        message = consumer.get(WAIT_S)
        with tracing.process(message, "shout"):
            message.reply("HI")
        message.ack()

    thread = threading.Thread(target=work)
    thread.start()
    assert api.request("words", "hi", timeout=WAIT_S).text() == "HI"
    thread.join(WAIT_S)
    consumer.close()
    request, process = spans.one("request words"), spans.one("process words")
    assert process.parent is not None
    assert process.parent.span_id == request.context.span_id


def test_nothing_is_imported_or_sent_without_enable() -> None:
    """A program that does not ask for spans does not load OpenTelemetry, and its messages have no headers."""
    program = (
        "import sys; from headrace import Broker\n"
        "with Broker.open() as broker:\n"
        "    consumer = broker.subscription('email', 'orders')\n"
        "    broker.publish('orders', b'x'); message = consumer.get(10)\n"
        "    assert message.headers == {}, message.headers\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, ``enable`` names it."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidArgument, match=r"headrace\[otel\]"):
        tracing.enable()
    assert tracing.active is None
