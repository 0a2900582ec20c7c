"""Load without Python: each peer's own tool, and wrk for those that take HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks._loopback import JSON_VALUE, VALUE, Load
from benchmarks.peers import headrace, kafka, nats, rabbitmq, redis
from benchmarks.peers.fetching import CACHE, Missing, debian, nats_cli
from benchmarks.peers.server import Server
from benchmarks.spark.kafka import KAFKA, NotFetched, _fetch
from headrace.testing import Address

PERF_TEST = "2.22.1"
TOOL_S = 300.0
TOOLS = {
    "Headrace": "benchmarks/native/load.c: text PUB, 4 connections, 1,000 in flight on each",
    "Redis": "redis-benchmark: XADD, 50 connections, pipelines of 64",
    "NATS JetStream": "nats bench js pub async: 4 clients, 1,000 in flight on each",
    "RabbitMQ": "PerfTest: 4 producers, 1,000 unconfirmed on each",
    "Kafka": "ProducerPerformance: batches of up to 16 KB, lingering 5 ms (the defaults)",
}


def load(server: Server, topic: str, count: int) -> float:
    """Messages a second, each answered."""
    return _TOOLS[type(server)](server, topic, count)


def _run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TOOL_S, env={**os.environ, **environment}
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout)[-400:]}")
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    if not found:
        raise RuntimeError(f"the load tool printed no rate: {text[-400:]}")
    return float(found[-1].replace(",", ""))


def _headrace(server: Server, topic: str, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        headrace.Client(server.address, server.mode, topic).close()
        command = b"PUB %b %d\r\n%b" % (topic.encode(), len(VALUE), VALUE)
        return Load(Path(folder)).publish(
            Address("127.0.0.1", server.port), "lines", command * 1000,
            each=1000, rounds=max(count // 4000, 1), connections=4,
        )  # fmt: skip


def _redis(server: Server, topic: str, count: int) -> float:
    command = [
        debian("redis-benchmark", "redis-tools"), "-p", str(server.port), "-c", "50", "-P", "64",
        "-n", str(count), "--csv", "XADD", topic, "*", "v", VALUE.decode(),
    ]  # fmt: skip
    return _number(r'"[^"]*XADD[^"]*","([\d.]+)"', _run(command))


def _nats(server: Server, topic: str, count: int) -> float:
    command = [
        nats_cli(), "--no-context", "--server", f"nats://{server.address}", "bench", "js", "pub", "async", topic,
        "--create", "--stream", topic, "--msgs", str(count), "--size", "100", "--clients", "4", "--batch", "1000",
        "--no-progress", "--storage", "file",
    ]  # fmt: skip
    return _number(r"([\d,]+) msgs/sec", _run(command, HOME=str(CACHE)))


def _rabbitmq(server: Server, topic: str, count: int) -> float:
    try:
        jars = _fetch(f"perf-test-{PERF_TEST}", f"com.rabbitmq:perf-test:{PERF_TEST}")
    except NotFetched as error:
        raise Missing(str(error)) from None
    command = [
        str(kafka.java()), "-cp", os.pathsep.join(map(str, jars)), "com.rabbitmq.perf.PerfTest",
        "--uri", f"amqp://guest:guest@{server.address}", "--producers", "4", "--consumers", "0", "--size", "100",
        "--queue", topic, "--confirm", "1000", "--flag", "persistent", "--pmessages", str(count // 4),
        *(("--quorum-queue",) if server.mode == "fsync" else ("--auto-delete", "false")),
    ]  # fmt: skip
    return _number(r"sending rate avg: ([\d,]+)", _run(command))


def _kafka(server: Server, topic: str, count: int) -> float:
    kafka.Client(server.address, server.mode, topic).close()
    try:
        jars = _fetch(f"kafka-tools-{KAFKA}", f"org.apache.kafka:kafka-tools:{KAFKA}")
    except NotFetched as error:
        raise Missing(str(error)) from None
    command = [
        str(kafka.java()), "-cp", os.pathsep.join([*map(str, jars), *kafka.jars()]),
        "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(count),
        "--record-size", "100", "--throughput", "-1", "--producer-props", f"bootstrap.servers={server.address}",
    ]  # fmt: skip
    return _number(r"([\d.]+) records/sec", _run(command))


_TOOLS = {
    headrace.Broker: _headrace,
    redis.Broker: _redis,
    nats.Broker: _nats,
    rabbitmq.Broker: _rabbitmq,
    kafka.Broker: _kafka,
}


# --- HTTP -------------------------------------------------------------------------------------------
def http(server: Server, topic: str, count: int) -> float:
    """Messages a second by wrk with 50 connections, one a request, for as long as the count suggests."""
    if isinstance(server, headrace.Broker):
        headrace.Client(server.address, server.mode, topic).close()
        path, body, headers = f"/publish/{topic}", JSON_VALUE.decode(), ""
    elif isinstance(server, rabbitmq.Broker):
        rabbitmq.Client(server.address, server.mode, topic).close()
        path = "/api/exchanges/%2F/amq.default/publish"
        message = {
            "properties": {"delivery_mode": 2},
            "routing_key": topic,
            "payload_encoding": "string",
            "payload": JSON_VALUE.decode(),
        }
        body = json.dumps(message).replace("\\", "\\\\")  # it stands in a string of Lua
        headers = 'wrk.headers["Authorization"] = "Basic Z3Vlc3Q6Z3Vlc3Q="\n'
    else:
        raise NotImplementedError
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
            f"{headers}wrk.body = '{body}'\n"
        )
        command = [
            debian("wrk", "wrk"), "-t1", "-c50", f"-d{max(count // 10_000, 1)}s", "-s", str(script),
            f"http://127.0.0.1:{server.http_port}{path}",
        ]  # fmt: skip
        text = _run(command)
    if "Non-2xx" in text:
        raise RuntimeError(text)
    return _number(r"Requests/sec:\s+([\d.]+)", text)
