"""mypy finds a mistake in the use of Headrace where it is made.

Each line below that ends with a comment has one mistake, and mypy has to report it with that code. All other
lines have to pass, so the types are not too strict either.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
from datetime import datetime, timedelta

import headrace.testing
from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient, Message, Receipt


def handle(message: Message) -> None:
    order = message.json()["order"]
    message.nack(delay=timedelta(minutes=1), reason=f"not yet: {order}")


async def handle_async(message: Message) -> None:
    message.extend(timedelta(seconds=5))


def threads(client: BrokerClient, broker: Broker) -> None:
    client.publish("orders", b"x", key="a", delay=5, ttl=timedelta(hours=1))
    client.publish("orders", {"order": 7}, deliver_at=datetime.now())
    client.publish("orders", [1, 2])
    client.publish("orders", 5)  # arg-type
    client.publish("orders", b"x", dealy=5)  # call-arg
    client.publish("orders", b"x", delay="5")  # arg-type
    client.publish_nowait("orders", b"x", tll=5)  # call-arg
    client.publish_many("orders", [b"x", {"order": 7}], key=["a"])  # call-arg
    receipt: Receipt = client.publish("orders", b"x")
    after = receipt.offset + 1  # operator
    if receipt.offset is not None:
        after = receipt.offset + 1
    client.create_topic("orders", partitions=4, durability="interval", retention_hours=timedelta(3))
    client.create_topic("orders", durability="sometimes")  # arg-type
    broker.create_topic("orders", retention_huors=1)  # call-arg
    broker.change_topic("orders", compression="zip")  # arg-type
    client.create_subscription("email", "orders", ack_timeout=timedelta(minutes=5), ordering="key")
    client.create_subscription("email", "orders", ack_timeot=60)  # call-arg
    broker.create_subscription("email", "orders", ordering="kye")  # arg-type
    client.subscription("email", "orders", ack_timeot=60)  # call-arg
    client.subscription("email", "orders", ordering="kye")  # arg-type
    client.consume("email", handle, "orders", concurrency=4, ordering="key", prefetch=10)
    client.consume("email", handle_async, "orders")  # arg-type
    broker.subscribe_to_subscription("email", handle_async, "orders")  # arg-type
    client.consume("email", handle, "orders", ack_timeot=60)  # call-arg
    broker.consume("email", handle, "orders", ordering="kye")  # arg-type
    client.redrive("email", to="subscribers")  # arg-type
    client.subscribe("orders", capcity=5)  # call-arg
    client.wait_for({"orders": {0: 5}}, timout=1)  # call-arg
    client.subscribe("orders").get(timeout=timedelta(seconds=1)).ack()
    client.seek("email", datetime.now() - timedelta(hours=1))
    client.publish_nowait("orders", b"x").result(timedelta(seconds=5))


def opening() -> None:
    BrokerClient("localhost:9999", token="t", request_timeout=timedelta(seconds=5))
    BrokerClient(servers=["a:1", "tls://b:2"])
    BrokerClient("localhost", "9999")  # arg-type
    BrokerClient("localhost", tokne="t")  # call-arg
    AsyncClient("localhost", pasword="t")  # call-arg
    Broker("./data", durability="interval", auto_create_topics=False, partitions=4)
    Broker("./data", durability="sometimes")  # arg-type
    Broker.open("./data", auto_create_topic=False)  # call-arg
    AsyncBroker("./data", max_mesage_size=5)  # call-arg
    AsyncBroker.open("./data", compression="zip")  # arg-type
    with headrace.testing.running_server() as server:
        server.client(tokne="t")  # call-arg


async def tasks(client: AsyncClient, broker: AsyncBroker) -> None:
    await client.publish("orders", {"order": 7}, delay=timedelta(seconds=5))
    await client.publish("orders", b"x", dealy=5)  # call-arg
    await broker.create_topic("orders", durability="sometimes")  # arg-type
    await client.consume("email", handle_async, "orders", ordering="key")
    await client.consume("email", handle, "orders")
    await client.consume("email", handle_async, "orders", ack_timeot=60)  # call-arg
    async with client.subscription("email", "orders", prefetch=5) as consumer:
        async for message in consumer:
            message.ack()
    consumer = await broker.subscription("email", "orders", start=datetime.now())
    async for message in client.subscribe("orders"):
        message.nakc()  # attr-defined
    async with client.subscription("email", "orders", ack_timeot=60) as consumer:  # call-arg
        pass
    await client.subscription("email", "orders", ordering="kye")  # arg-type
    client.subscribe("orders").get()  # attr-defined
"""


@pytest.mark.timeout(600)  # the first time, without mypy's cache, on a busy machine
def test_mypy_finds_each_mistake(tmp_path: Path) -> None:
    """And nothing else."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)],
        cwd=ROOT,  # with our own settings and cache
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(ROOT / "src")},
        timeout=500,
    )
    found = re.findall(r"program\.py:(\d+): error: .*\[(\S+)\]$", ran.stdout, re.MULTILINE)
    planted = [
        (str(number), line.rpartition("# ")[2])
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if re.search(r"  # [a-z-]+$", line)
    ]
    assert len(planted) > 30
    assert sorted(found, key=lambda each: int(each[0])) == planted, ran.stdout + ran.stderr
