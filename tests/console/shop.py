"""A shop on a real broker, for the browser to look at: made by real clients over the network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.testing import RunningServer, wait_until

SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
COUNT = 60


@contextmanager
def shop(server: RunningServer, **login: Any) -> Iterator[Any]:
    """Orders with subscriptions that are idle, stuck and paused, dead letters, a delayed message, a pipeline."""
    with ExitStack() as stack:
        client = stack.enter_context(server.client(client_id="shop", **login))
        client.create_topic("orders", partitions=3)
        client.create_topic("payments")
        for name, options in (
            ("billing", {"ack_timeout": 600}),
            ("email", {"max_deliveries": 1}),
            ("warehouse", {"ordering": "key"}),
            ("reports", {}),
        ):
            client.create_subscription(name, "orders", **options)
        for number in range(COUNT):
            order = {
                "order": number,
                "customer": {"id": f"c{number % 7}"},
                "total": number * 1.5,
                "currency": "USD",
            }
            client.publish(
                "orders", json.dumps(order).encode(), key=f"c{number % 7}",
                headers={"content-type": "application/json", "source": "web" if number % 2 else "app"},
            )  # fmt: skip
        client.publish("payments", SCRIPT.encode(), headers={"content-type": "text/html"})
        client.publish("payments", bytes(range(256)))
        client.publish(
            "payments",
            b'{"big": 90071992547409931234}',
            headers={"content-type": "application/json"},
        )
        client.publish("payments", b"later", delay=3600)
        client.publish("payments", b"sooner", delay=1800)
        mail = stack.enter_context(server.client(client_id="mail-worker", **login))
        with mail.subscription("email", "orders", prefetch=COUNT) as messages:
            for _ in range(8):
                message = messages.get(timeout=10)
                message.nack(
                    reason=SCRIPT if message.offset == 0 else "the mail server refused the address"
                )
            wait_until(lambda: len(client.dead_letters("email")) == 8)
            for _ in range(COUNT - 8):
                messages.get(timeout=10).ack()
        ledger = stack.enter_context(server.client(client_id="ledger-1", **login))
        held = stack.enter_context(ledger.subscription("billing", "orders", prefetch=5))
        for _ in range(5):
            held.get(timeout=10)
        client.pause_subscription("reports")
        query = {
            "name": "totals", "sink": "delta:/lake/totals", "batch_id": 17, "input_rows_total": 5120,
            "processed_rows_per_second": 812.5, "trigger_ms": 640.0, "lag": 12, "last_progress_at": server.server.engine.now_ms(),
        }  # fmt: skip
        run = {"run_id": "r", "started_at": server.server.engine.now_ms(), "queries": [query]}
        client.report_pipeline("totals", {"state": "running", **run})
        broken = {**query, "name": "copy", "error": "the table was deleted"}
        client.report_pipeline("copies", {"state": "failed", **run, "queries": [broken]})
        yield client
