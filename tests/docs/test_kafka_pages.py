"""The commands of the pages about Kafka and clusters are run: ``bridge``, ``cluster`` and ``serve --engine kafka``.

The reader's hosts, folders and cluster are replaced, and nothing else is. A bridge that would run for ever ends when it has
copied everything.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.testing import running_server
from tests.bridge.rig import PlainKafka, new_name
from tests.cli.conftest import command  # noqa: F401
from tests.cli.rig import Command as Run
from tests.cli.rig import start_script
from tests.docs.blocks import blocks, read
from tests.docs.terminal import commands_of
from tests.fixtures.three_nodes import ThreeNodes, free_port

pytestmark = pytest.mark.xdist_group("kafka")
PAGES = ("docs/cli.md", "docs/cluster.md", "docs/kafka.md")
SERVERS = re.compile(r"\bk1:9092(,k2:9092)?")
NODE = "node1:9999"


def lines(*beginning: str) -> list[str]:
    """The commands of the pages that begin with these words."""
    found = {
        shlex.join(each.words)
        for page in PAGES
        for block in blocks(read(page))
        if block.language == "sh"
        for line in commands_of(block.text)
        for each in line
        if each.words[: len(beginning)] == list(beginning)
    }
    assert found, beginning
    return sorted(found)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerClient]:
    """A single broker, which the commands use."""
    with running_server() as server, server.client() as client:
        monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
        yield client


def test_bridges(command: Run, alone: BrokerClient, kafka: str) -> None:  # noqa: F811
    """Each copies its topics: into Headrace, and into Kafka."""
    plain = PlainKafka(kafka)
    for direction in ("from-kafka", "to-kafka"):
        for line in lines("headrace", "bridge", direction):
            given = shlex.split(SERVERS.sub(kafka, line))[3:]
            routes = given[: given.index("--kafka-servers")]
            options = given[len(routes) :]
            options[options.index("--name") + 1] = new_name("page")
            made = []
            for route in routes:
                source, _, target = route.partition("=")
                if direction == "from-kafka":
                    topic = plain.create(1)
                    plain.fill(topic, 3, 1)
                    made.append(f"{topic}={target}" if target else topic)
                else:
                    topic = plain.create(1)
                    alone.publish_many(source, [b"a", b"b"])
                    made.append(f"{source}={topic}")
            endless = [] if "--until-caught-up" in options else ["--until-caught-up"]
            ran = command("bridge", direction, *made, *options, *endless)
            assert ran.code == 0, f"{line}: {ran.err}"
            assert "lag 0" in ran.out, line


def test_a_cluster_is_imported_served_and_exported(
    command: Run,  # noqa: F811
    kafka: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker's directory and its backup move in, a node serves them, and they come out again."""
    with running_server(tmp_path / "one") as server, server.client() as client:
        client.publish_many("orders", [b"1", b"2"])
        monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
        for _ in range(3):  # a page names the third generation
            assert command("backup", tmp_path / "backup").code == 0
    names = []
    for line in lines("headrace", "cluster", "import"):
        names.append(new_name("page"))
        line = SERVERS.sub(kafka, line).replace("/var/lib/headrace", str(tmp_path / "one"))
        given = shlex.split(line.replace("/backup/headrace", str(tmp_path / "backup")))[1:]
        given[given.index("--cluster") + 1] = names[-1]
        ran = command(*given)
        assert ran.code == 0, f"{line}: {ran.err}"
    (line,) = lines("headrace", "serve", "--engine", "kafka")
    given = shlex.split(SERVERS.sub(kafka, line))[1:]
    port = free_port()
    given[given.index("--cluster") + 1] = names[0]
    given[given.index("--advertise") + 1] = f"127.0.0.1:{port}"
    monkeypatch.chdir(tmp_path)
    process = start_script(*given, "--port", str(port), "--http-port", "0")
    try:
        assert process.stdout is not None
        for shown in process.stdout:
            if shown.startswith("Headrace is ready"):
                break
        for line in lines("headrace", "cluster", "export"):
            line = line.replace("/var/lib/headrace-alone", str(tmp_path / new_name("alone")))
            ran = command(*shlex.split(line.replace(NODE, f"127.0.0.1:{port}"))[1:])
            assert ran.code == 0, f"{line}: {ran.err}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_status_and_drain(
    command: Run,  # noqa: F811
    three_nodes: ThreeNodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They show the nodes, and one of them can be stopped."""
    first, *_, last = (f"127.0.0.1:{node.port}" for node in three_nodes.nodes)
    monkeypatch.setenv("HEADRACE_SERVER", first)
    for verb in ("status", "drain"):
        for line in lines("headrace", "cluster", verb):
            ran = command(*shlex.split(line.replace(NODE, last))[1:])
            assert ran.code == 0, f"{line}: {ran.err}"
            assert last in ran.out
    three_nodes.nodes[-1].restart()
    three_nodes.wait_until_ready()
