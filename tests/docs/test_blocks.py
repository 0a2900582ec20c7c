"""Every block of code of every page is run by a test, or is in a list with the reason why not.

The tables say how. A block of a new kind, on a new page, or without a language fails here until somebody decides.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.access.rights import parse_grant
from headrace.engine.kafka import read_options
from headrace.errors import TopicNotFound
from headrace.testing import RunningServer, running_server, server_process, wait_until
from tests.docs.blocks import PAGES, ROOT, Block, blocks, read
from tests.server.http_rig import http_of

HOW: dict[tuple[str, str], str] = {
    ("README.md", "python"): "test_readme",
    ("README.md", "sh"): "test_readme",
    ("CONTRIBUTING.md", "sh"): "test_commands",
    ("benchmarks/REPORT.md", "sh"): "test_commands",
    ("docs/architecture.md", "python"): "test_architecture",
    ("docs/cli.md", "sh"): "test_commands",
    ("docs/cluster.md", "properties"): "kafka_config",
    ("docs/cluster.md", "sh"): "test_commands",
    ("docs/kafka.md", "sh"): "test_commands",
    ("docs/format.md", "json"): "stopped",
    ("docs/from-celery.md", "python"): "test_coming_from",
    ("docs/from-celery.md", "sh"): "test_coming_from",
    ("docs/from-kafka.md", "python"): "test_coming_from",
    ("docs/from-kafka.md", "sh"): "test_coming_from",
    ("docs/from-rabbitmq.md", "python"): "test_coming_from",
    ("docs/from-rabbitmq.md", "sh"): "test_coming_from",
    ("docs/from-redis.md", "python"): "test_coming_from",
    ("docs/from-redis.md", "sh"): "test_coming_from",
    ("docs/http.md", "json"): "answers",
    ("docs/http.md", "js"): "node",
    ("docs/http.md", "sh"): "curl",
    ("docs/operations.md", "json"): "test_operations",
    ("docs/operations.md", "sh"): "test_commands",
    ("docs/spark.md", "dockerfile"): "test_spark_page",
    ("docs/pipelines.md", "python"): "test_spark_page",
    ("docs/pipelines.md", "toml"): "test_spark_page",
    ("docs/protocol.md", "text"): "test_protocol",
    ("docs/protocol.md", "frames"): "test_protocol",
    ("docs/protocol.md", "hex"): "test_protocol",
    ("docs/python.md", "python"): "test_python",
    ("docs/reliability.md", "sh"): "test_commands",
    ("docs/security.md", "json"): "test_commands",
    ("docs/security.md", "sh"): "test_commands",
    ("docs/security.md", "text"): "grants",
    ("docs/spark.md", "python"): "test_spark_page",
    ("docs/spark.md", "sh"): "test_spark_page",
    ("docs/spark.md", "toml"): "test_spark_page",
    ("docs/spark.md", "yaml"): "test_spark_page",
    ("examples/declarative/README.md", "sh"): "test_commands",
}
"""(page, language) -> the test file that runs them, or what is checked here.

``test_commands`` has the list of the few commands that no test can run, each with its reason.
"""
SHOWN = {
    (
        "CONTRIBUTING.md",
        "src/headrace/",
    ): "the house; test_architecture checks the same of docs/architecture.md",
    ("README.md", "Headrace is ready: "): "output; test_readme compares it",
    ("docs/operations.md", "Headrace is ready: "): "output; test_commands waits for it",
    ("docs/reliability.md", "seed 1390: Violation"): "output of a bug that is mended",
    ("docs/architecture.md", ""): "drawings",
    (
        "docs/format.md",
        "",
    ): "layouts of files and records; tests/log/test_format_text.py reads by them",
    ("docs/protocol.md", ""): "a drawing, and the layout of a frame",
}
"""(page, how it begins) -> what a block without a language shows, which nobody can run."""
PROGRAMS = ("$", "cd", "curl", "docker", "export", "headrace", "java", "kafka-", "kubectl", "make", "openssl", "pip", "python",
            "spark-", "systemctl")  # fmt: skip


def found(how: str) -> list[tuple[str, Block]]:
    cases = [
        (page, block)
        for page in PAGES
        for block in blocks(read(page))
        if HOW.get((page, block.language)) == how
    ]
    assert cases, f"nothing is checked as {how}"
    return cases


def named(how: str) -> object:
    cases = found(how)
    ids = [f"{page}:{block.line}" for page, block in cases]
    return pytest.mark.parametrize("block", [block for _, block in cases], ids=ids)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_every_block_has_a_test() -> None:
    """Each language of each page is in the table; drawings and output have no language."""
    here = {(page, b.language) for page in PAGES for b in blocks(read(page)) if b.language}
    assert here == set(HOW)
    for how in HOW.values():
        assert not how.startswith("test_") or list((ROOT / "tests").rglob(f"{how}.py")), how


def test_a_block_without_a_language_is_nothing_to_run() -> None:
    """Each is in the list of drawings and output, and no line of it begins as a command does."""
    bare = [(page, block) for page in PAGES for block in blocks(read(page)) if not block.language]
    unknown = [
        (page, block.line)
        for page, block in bare
        if not any(page == p and block.text.startswith(begin) for p, begin in SHOWN)
    ]
    assert unknown == [], "give it a language, or say in SHOWN what it is"
    for page, begin in SHOWN:
        assert any(page == p and block.text.startswith(begin) for p, block in bare), (page, begin)
    commands = [
        (page, line)
        for page, block in bare
        for line in block.text.splitlines()
        if line.startswith(tuple(f"{each} " if each.isalpha() else each for each in PROGRAMS))
    ]
    assert commands == [], "a command belongs into a block sh"


def test_no_block_is_hidden() -> None:
    """A fence that is indented, or made of ~, would be seen by readers and by no test."""
    for page in PAGES:
        fences = [
            line for line in read(page).splitlines() if line.lstrip().startswith(("```", "~~~"))
        ]
        assert len(fences) == 2 * len(blocks(read(page))), page


@named("grants")  # type: ignore[operator]
def test_grants_are_grants(block: Block) -> None:
    """Each line begins with a grant that the broker understands."""
    for line in block.text.splitlines():
        parse_grant(line.split()[0])


@named("kafka_config")  # type: ignore[operator]
def test_the_properties_of_kafka_are_those_of_librdkafka(block: Block, tmp_path: Path) -> None:
    """The broker reads the file, and librdkafka takes every property of it."""
    kafka = pytest.importorskip("confluent_kafka")
    certifi = pytest.importorskip("certifi")
    path = tmp_path / "kafka.properties"
    path.write_text(block.text.replace("/etc/headrace/kafka-ca.pem", certifi.where()))
    options = read_options(str(path))
    assert options["sasl.username"] == "headrace"
    kafka.Producer(
        {"bootstrap.servers": "127.0.0.1:9", **options}, logger=logging.getLogger("no log")
    )
    with pytest.raises(kafka.KafkaException, match="No such configuration property"):
        kafka.Producer({"bootstrap.servers": "127.0.0.1:9", "sasl.usernam": "x"})


def shape(value: object) -> object:
    """Which fields a document has, at every level."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(inner) for inner in value[:1]] if isinstance(value, list) else None


def test_answers_look_as_shown(server: RunningServer) -> None:
    """An error, a receipt, a message and a pipeline have the fields of docs/http.md, and no others."""
    error, receipt, message, pipeline = [json.loads(block.text) for _, block in found("answers")]
    with closing(http_of(server)) as http, server.client() as client:
        assert shape(json.loads(http.get("/topics/x/messages").body)) == shape(error)
        http.ok("POST", "/subscribe/user.events")
        made = http.publish(message["topic"], message["data"], key=message["key"])
        assert shape(made) == shape(receipt)
        client.publish(message["topic"], message["data"], message["headers"], key=message["key"])
        given = http.consume_batch(message["topic"], limit=2)[1]
        assert shape(given) == shape(message)
        known = ("name", "stale", "stopping", "reported_at")
        report = {name: value for name, value in pipeline.items() if name not in known}
        client.report_pipeline(pipeline["name"], report)
        assert shape(http.ok("GET", f"/pipelines/{pipeline['name']}")) == shape(pipeline)


def test_the_file_of_the_last_stop_looks_as_shown() -> None:
    """docs/format.md shows the fields of the file that a clean stop leaves."""
    [(_, block)] = found("stopped")
    with running_server() as server:
        with server.client() as client:
            client.publish("orders", b"x")
        server.stop()
        files = [path.read_bytes() for path in server.data_dir.glob("@*") if path.is_file()]
    assert shape(json.loads(block.text)) in [
        shape(json.loads(content)) for content in files if content.startswith(b"{")
    ]


def documents(text: str) -> list[dict[str, object]]:
    """JSON objects, one after the other."""
    found, at = [], 0
    while at < len(text.rstrip()):
        value, at = json.JSONDecoder().raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        found.append(value)
    return found


def test_events_look_as_shown() -> None:
    """docs/operations.md: the statistics of a subscription and of a topic have these fields, and no others."""
    shown = next(b for b in blocks(read("docs/operations.md")) if '"latency_ms"' in b.text)
    wanted = {each["type"]: each for each in documents(shown.text)}
    with running_server(events_interval=1) as server, server.client() as client:
        client.create_subscription("billing", "orders", max_deliveries=1)
        client.publish_many("orders", [b"x"] * 2)
        with client.subscription("billing", "orders") as consumer:
            consumer.ack(consumer.get(20))
            consumer.nack(consumer.get(20), reason="no stock")
        wait_until(lambda: {"deliveries", "topic"} <= {e["type"] for e in events(client)}, 20)
        happened = {event["type"]: event for event in events(client)}
    by_name = ("attempts", "dead_letters")  # their fields are numbers and reasons
    for kind, document in wanted.items():
        for name in by_name:
            document.pop(name, None)
        got = {k: v for k, v in happened[kind].items() if k not in by_name}
        assert shape(got) == shape(document)
    assert set(by_name) <= set(happened["deliveries"])


def events(client: BrokerClient) -> list[dict[str, object]]:
    try:
        return [json.loads(message.value) for message in client.fetch("__events", limit=1000)]
    except TopicNotFound:
        return []


def test_a_line_of_the_log_looks_as_shown() -> None:
    """docs/operations.md: what an operation of a user logs in JSON."""
    [shown] = [b for b in blocks(read("docs/operations.md")) if '"headrace.audit"' in b.text]
    with server_process(token="root-token-of-16", log_format="json") as server:
        with server.client(client_id="worker-3") as client:
            client.create_topic("orders")
            client.delete_topic("orders")
        server.terminate()
        lines = [json.loads(line) for line in server.errors.splitlines()]
    [line] = [each for each in lines if each.get("action") == "delete_topic"]
    assert shape(line) == shape(json.loads(shown.text))
    assert list(line) == list(json.loads(shown.text))


def test_the_commands_with_curl_run(server: RunningServer, tmp_path: Path) -> None:
    """One after the other, against a broker; none fails."""
    curl = tmp_path / "curl"
    curl.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("curl.py")}" "$@"\n'
    )
    curl.chmod(0o755)
    outputs = []
    for page, block in found("curl"):
        at = f"localhost:{server.http_address.port}"
        ran = subprocess.run(
            ["bash", "-e", "-c", block.text.replace("localhost:8080", at)],
            env={
                **os.environ,
                "PATH": f"{os.environ['PATH']}{os.pathsep}{tmp_path}",
                "NO_PROXY": "*",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, (page, block.line, ran.stderr)
        outputs.append(ran.stdout)
    assert json.loads(outputs[0])["topic"] == "user.events"
    assert outputs[1].startswith("{")
    assert outputs[1].endswith("[]")
    assert "x-cursor: 0:1" in outputs[2].lower()


@pytest.mark.skipif(
    shutil.which("node") is None,
    reason="NOT TRIED: the scripts of docs/http.md: node is not installed",
)
def test_the_scripts_run(server: RunningServer) -> None:
    """In node, with what a browser has: each prints the message that the second one publishes."""
    at = f"localhost:{server.http_address.port}"
    # Newer ones have WebSocket without being asked for it, and take the flag all the same.
    node = ["node", "--no-warnings", "--experimental-eventsource", "--experimental-websocket"]
    asked = [*node, "-p", "typeof EventSource + typeof WebSocket"]
    if subprocess.run(asked, capture_output=True, text=True).stdout.strip() != "functionfunction":
        pytest.skip(
            "NOT TRIED: the scripts of docs/http.md: this node has no WebSocket or EventSource"
        )
    processes = []
    with server.client() as client:
        try:
            for _, block in found("node"):
                script = block.text.replace("localhost:8080", at)
                script = script.replace('"/stream', f'"http://{at}/stream')
                script += "\nsetTimeout(() => process.exit(1), 20000);\n"
                process = subprocess.Popen([*node, "-e", script], stdout=subprocess.PIPE, text=True)
                processes.append(process)
                wait_until(lambda: "user.events" in client.topics())  # the first one follows it
            for process in processes:
                assert process.stdout is not None
                lines = ""
                while "userId: 123" not in lines:
                    line = process.stdout.readline()
                    assert line, lines
                    lines += line
            assert lines.startswith("Received: ")
        finally:
            for process in processes:
                process.kill()
                process.communicate()
