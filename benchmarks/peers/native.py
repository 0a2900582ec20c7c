"""Load without Python: each peer's own tool, and wrk for those that take HTTP."""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
from pathlib import Path

from benchmarks._loopback import JSON_VALUE, VALUE, Load
from benchmarks.peers import fetching
from benchmarks.peers.fetching import CACHE, debian, java, maven
from benchmarks.peers.server import Server, output_of
from benchmarks.spark.kafka import KAFKA
from headrace.testing import Address

PERF_TEST = "2.22.1"
TOOL_S = 120.0
CONNECTIONS = 4
"""Each with 1,000 in flight, for the tools that have both."""
TOOLS = {
    "headrace": "`benchmarks/native/load.c`: text `PUB`, 4 connections, 1,000 in flight on each",
    "redis": "`redis-benchmark`: `XADD`, 50 connections, pipelines of 64",
    "nats": f"`nats bench js pub async` {fetching.NATS_CLI}: 4 clients, 1,000 in flight on each",
    "rabbitmq": f"PerfTest {PERF_TEST}: 4 producers, 1,000 unconfirmed on each",
    "kafka": f"`ProducerPerformance` {KAFKA}: `acks=all`, batches of up to 64 KB, 5 ms of linger",
}


SHARES = {
    ("nats", "fsync"): 0.2,
    ("rabbitmq", "fsync"): 0.5,
    ("rabbitmq", "default"): 0.5,
    ("kafka", "default"): 4,
}
"""Of the amount: less for the slow, more for Java's fast one, which has to be compiled first."""


def load(peer: str, server: Server, topic: str, count: int) -> float:
    """Messages a second, each answered."""
    count = int(count * SHARES.get((peer, server.mode), 1))
    tools = {
        "headrace": _headrace, "redis": _redis, "nats": _nats, "rabbitmq": _rabbitmq, "kafka": _kafka,
    }  # fmt: skip
    return tools[peer](server, topic, count)


def _number(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    if not found:
        raise RuntimeError(f"the load tool printed no rate: {text[-400:]}")
    return float(found[-1].replace(",", ""))


def _make_topic(peer: str, server: Server, topic: str) -> None:
    client = importlib.import_module(f"benchmarks.peers.{peer}").Client
    client(server.address, server.mode, topic).close()


def _headrace(server: Server, topic: str, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        _make_topic("headrace", server, topic)
        command = b"PUB %b %d\r\n%b" % (topic.encode(), len(VALUE), VALUE)
        return Load(Path(folder)).publish(
            Address("127.0.0.1", server.port), "lines", command * 1000,
            each=1000, rounds=max(count // (1000 * CONNECTIONS), 1), connections=CONNECTIONS,
        )  # fmt: skip


def _redis(server: Server, topic: str, count: int) -> float:
    command = [
        debian("redis-benchmark", "redis-tools"), "-p", str(server.port), "-c", "50", "-P", "64",
        "-n", str(count), "--csv", "XADD", topic, "*", "v", VALUE.decode(),
    ]  # fmt: skip
    return _number(r'"[^"]*XADD[^"]*","([\d.]+)"', output_of(command, TOOL_S))


def _nats(server: Server, topic: str, count: int) -> float:
    command = [
        fetching.nats_cli(), "--no-context", "--timeout", "60s", "--server", f"nats://{server.address}", "bench", "js", "pub", "async", topic,
        "--create", "--stream", topic, "--msgs", str(count), "--size", "100", "--clients", str(CONNECTIONS),
        "--batch", "1000", "--no-progress", "--storage", "file",
    ]  # fmt: skip
    return _number(r"([\d,]+) msgs/sec", output_of(command, TOOL_S, HOME=str(CACHE)))


def _rabbitmq(server: Server, topic: str, count: int) -> float:
    jars = maven(f"perf-test-{PERF_TEST}", f"com.rabbitmq:perf-test:{PERF_TEST}")
    _make_topic("rabbitmq", server, topic)
    command = [
        java(), "-cp", os.pathsep.join(jars), "com.rabbitmq.perf.PerfTest",
        "--uri", f"amqp://guest:guest@{server.address}", "--producers", str(CONNECTIONS), "--consumers", "0",
        "--size", "100", "--queue", topic, "--predeclared", "--confirm", "1000", "--flag", "persistent",
        "--pmessages", str(count // CONNECTIONS),
    ]  # fmt: skip
    return _number(r"sending rate avg: ([\d,]+)", output_of(command, TOOL_S))


def _kafka(server: Server, topic: str, count: int) -> float:
    jars = maven(f"kafka-tools-{KAFKA}", f"org.apache.kafka:kafka-tools:{KAFKA}")
    _make_topic("kafka", server, topic)
    command = [
        java(), "-cp", os.pathsep.join(jars),
        "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(count),
        "--record-size", "100", "--throughput", "-1", "--producer-props", f"bootstrap.servers={server.address}",
        "acks=all", "batch.size=65536", "linger.ms=5",
    ]  # fmt: skip
    return _number(r"([\d.]+) records/sec", output_of(command, TOOL_S))


# --- HTTP -------------------------------------------------------------------------------------------
def http(peer: str, server: Server, topic: str, seconds: int) -> float:
    """Messages a second by wrk with 50 connections, one a request."""
    headers, body = "", JSON_VALUE.decode()
    if peer == "headrace":
        path = f"/publish/{topic}"
    elif peer == "rabbitmq":
        path = "/api/exchanges/%2F/amq.default/publish"
        message = {
            "properties": {"delivery_mode": 2},
            "routing_key": topic,
            "payload_encoding": "string",
            "payload": body,
        }
        body = json.dumps(message).replace("\\", "\\\\")  # it stands in a string of Lua
        headers = 'wrk.headers["Authorization"] = "Basic Z3Vlc3Q6Z3Vlc3Q="\n'
    else:
        raise NotImplementedError
    _make_topic(peer, server, topic)
    return post(server.http_port, path, body, seconds, headers)


def post(port: int, path: str, body: str, seconds: int, headers: str = "") -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
            f"{headers}wrk.body = '{body}'\n"
        )
        command = [
            debian("wrk", "wrk"), "-t1", "-c50", f"-d{seconds}s", "-s", str(script),
            f"http://127.0.0.1:{port}{path}",
        ]  # fmt: skip
        text = output_of(command, TOOL_S)
    if "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(text)
    return _number(r"Requests/sec:\s+([\d.]+)", text)
