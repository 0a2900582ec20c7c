"""Every block of code of every page is run, or at least understood, by a test.

The table says how. A block of a new kind, or on a new page, fails here until somebody decides.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.access.rights import parse_grant
from headrace.testing import RunningServer, running_server
from tests.docs.blocks import ROOT, Block, blocks, read
from tests.server.http_rig import http_of

FOLDERS = (".github", "benchmarks", "deploy", "docs", "examples")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.md"),
        *[page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")],
    ]
)
HOW: dict[tuple[str, str], str] = {
    ("README.md", "python"): "test_readme",
    ("README.md", "sh"): "test_readme",
    ("CONTRIBUTING.md", "sh"): "test_commands",
    ("benchmarks/REPORT.md", "sh"): "test_commands",
    ("docs/architecture.md", "python"): "test_architecture",
    ("docs/cli.md", "sh"): "test_commands",
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
    ("docs/pipelines.md", "python"): "test_commands",
    ("docs/pipelines.md", "toml"): "test_commands",
    ("docs/protocol.md", "text"): "test_protocol",
    ("docs/protocol.md", "frames"): "test_protocol",
    ("docs/protocol.md", "hex"): "test_protocol",
    ("docs/python.md", "python"): "test_python",
    ("docs/reliability.md", "sh"): "test_commands",
    ("docs/security.md", "json"): "test_commands",
    ("docs/security.md", "sh"): "test_commands",
    ("docs/security.md", "text"): "grants",
    ("docs/spark.md", "python"): "test_commands",
    ("docs/spark.md", "sh"): "test_commands",
    ("docs/spark.md", "toml"): "test_commands",
    ("docs/spark.md", "yaml"): "catalogs",
    ("examples/declarative/README.md", "sh"): "test_examples",
}
"""(page, language) -> the test file that runs them, or what is checked here.

``test_commands`` has the list of the few commands that no test can run, each with its reason.
"""


def found(how: str) -> list[tuple[str, Block]]:
    return [
        (page, block)
        for page in PAGES
        for block in blocks(read(page))
        if HOW.get((page, block.language)) == how
    ]


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


@named("grants")  # type: ignore[operator]
def test_grants_are_grants(block: Block) -> None:
    """Each line begins with a grant that the broker understands."""
    for line in block.text.splitlines():
        parse_grant(line.split()[0])


@named("catalogs")  # type: ignore[operator]
def test_catalogs_are_configured_as_pyiceberg_reads_them(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each catalog of the file is of a type that pyiceberg has."""
    config = pytest.importorskip("pyiceberg.utils.config")
    catalog = pytest.importorskip("pyiceberg.catalog")
    (tmp_path / ".pyiceberg.yaml").write_text(block.text)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    known = config.Config()
    names = [line.split(":")[0].strip() for line in block.text.splitlines() if line[2:3].isalpha()]
    assert names[1:] == ["prod", "sql", "glue", "unity"]
    for name in names[1:]:
        catalog.CatalogType(known.get_catalog_config(name)["type"])


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


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_scripts_run(server: RunningServer) -> None:
    """In node, with what a browser has: each prints the message that the second one publishes."""
    at = f"localhost:{server.http_address.port}"
    script = "\n".join(block.text for _, block in found("js"))
    script = script.replace("localhost:8080", at).replace('"/stream', f'"http://{at}/stream')
    script += "\nsetTimeout(() => process.exit(1), 20000);\n"
    has = subprocess.run(
        ["node", "--experimental-eventsource", "-p", "typeof EventSource + typeof WebSocket"],
        capture_output=True,
        text=True,
    )
    if has.stdout.strip() != "functionfunction":
        pytest.skip("this node has no WebSocket or EventSource")
    process = subprocess.Popen(
        ["node", "--experimental-eventsource", "-e", script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = ""
        while not ("Received:" in lines and lines.count("userId: 123") >= 2):
            line = process.stdout.readline()
            assert line, lines
            lines += line
    finally:
        process.kill()
        process.communicate()
