"""The README of the Simple Message Broker, followed to the letter.

Its endpoints, ``curl`` lines, variables, message formats, metrics and JavaScript are here as it has them;
only the port is another one, because 8080 may be taken.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.settings import SETTINGS
from tests.server.http_rig import Answer, Http, RawHttp
from tests.server.http_websocket import WebSocket

PUBLISH = """\
curl -X POST http://localhost:8080/publish/user.events \\
  -H "Content-Type: application/json" \\
  -d '{
    "userId": 123,
    "action": "login",
    "timestamp": "2023-01-01T00:00:00Z"
  }'"""
PUBLISH_BATCH = """\
curl -X POST http://localhost:8080/publish/batch/user.events \\
  -H "Content-Type: application/json" \\
  -d '[
    {"userId": 123, "action": "login"},
    {"userId": 124, "action": "logout"}
  ]'"""
CONSUME = "curl http://localhost:8080/consume/user.events"
CONSUME_BATCH = "curl http://localhost:8080/consume/user.events/batch?limit=10"
CONNECT = "const ws = new WebSocket('ws://localhost:8080/ws');"
SEND = """\
// Subscribe to topic
ws.send(JSON.stringify({
  type: 'subscribe',
  topic: 'user.events'
}));

// Publish message
ws.send(JSON.stringify({
  type: 'publish',
  topic: 'user.events',
  data: {
    userId: 123,
    action: 'login'
  }
}));"""
RECEIVE = """\
// Handle messages
ws.onmessage = (event) => {
  const message = JSON.parse(event.data);
  console.log('Received:', message);
};"""
METRICS = [
    "message_broker_messages_published_total",
    "message_broker_messages_consumed_total",
    "message_broker_active_connections",
    "message_broker_queue_size",
    "message_broker_processing_duration",
]
MAIN = "from headrace.cli import main; main()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Broker:
    """``headrace serve`` in a directory of its own, told by variables alone."""

    def __init__(self, directory: Path, port: int, **variables: str):
        ours = {name for setting in SETTINGS for name in setting.environment}
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in ours and not name.startswith("HEADRACE_")
        }
        self.port = port
        self._errors = (directory / "stderr").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "serve"],
            cwd=directory,
            env=clean | {"HEADRACE_PORT": "0", "PORT": str(port), **variables},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdout is not None
        self.ready_line = self._process.stdout.readline()

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(20) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def running(directory: Path, **variables: str) -> Iterator[tuple[Broker, Http]]:
    broker = Broker(directory, free_port(), **variables)
    client = Http(broker.address)
    try:
        yield broker, client
    finally:
        client.close()
        broker.stop()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Broker, Http]]:
    """A broker as the README starts it, but for the port."""
    with running(tmp_path) as both:
        yield both


def run(line: str, broker: Broker) -> str:
    """A line of the README in a shell."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    command = line.replace("localhost:8080", f"localhost:{broker.port}")
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


# --- endpoints ------------------------------------------------------------------------------------
def test_every_endpoint_is_there(started: tuple[Broker, Http]) -> None:
    """By its method and path."""
    _, client = started
    body = {"a": 1}
    steps: list[tuple[str, str, Any, int]] = [
        ("POST", "/publish/user.events", body, 200),
        ("POST", "/publish/batch/user.events", [body, body], 200),
        ("GET", "/consume/user.events", None, 200),
        ("GET", "/consume/user.events/batch", None, 200),
        ("GET", "/consume/user.events", None, 204),
        ("POST", "/subscribe/user.events", None, 200),
        ("POST", "/subscribe/user.events", {"group": "mail"}, 201),
        ("GET", "/topics", None, 200),
        ("GET", "/topics/user.events/stats", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/metrics", None, 200),
        ("DELETE", "/topics/user.events", None, 200),
        ("GET", "/topics/user.events/stats", None, 404),
    ]
    for method, path, content, status in steps:
        answer = client.ask(method, path, content)
        assert answer.status == status, (method, path, answer.body)
    with WebSocket(("127.0.0.1", started[0].port)) as ws:
        assert ws.ok("ping")["type"] == "pong"


def test_the_curl_lines(started: tuple[Broker, Http]) -> None:
    """Published, published as a batch, consumed, consumed as a batch."""
    broker, _ = started
    receipt = json.loads(run(PUBLISH, broker))
    assert (receipt["topic"], receipt["offset"]) == ("user.events", 0)
    assert json.loads(run(PUBLISH_BATCH, broker))["published"] == 2
    message = json.loads(run(CONSUME, broker))
    assert message["id"] == receipt["id"]
    assert message["data"] == {
        "userId": 123,
        "action": "login",
        "timestamp": "2023-01-01T00:00:00Z",
    }
    batch = json.loads(run(CONSUME_BATCH, broker))
    assert [item["data"] for item in batch] == [
        {"userId": 123, "action": "login"},
        {"userId": 124, "action": "logout"},
    ]
    assert run(CONSUME, broker) == ""
    assert json.loads(run(CONSUME_BATCH, broker)) == []


def test_the_message_format(started: tuple[Broker, Http]) -> None:
    """The same fields over HTTP and over a WebSocket, with the types of the README."""
    broker, client = started
    with WebSocket(broker.address) as ws:
        ws.ok("subscribe", topic="user.events")
        data = {"userId": 123, "action": "login", "timestamp": "2023-01-01T00:00:00Z"}
        headers = {"X-Header-Source": "auth-service", "X-Header-Version": "1.0"}
        client.ask("POST", "/publish/user.events", data, headers)
        for message in (client.consume("user.events"), ws.message()):
            assert UUID(message["id"])
            assert message["topic"] == "user.events"
            assert message["data"] == data
            assert message["headers"] == {"source": "auth-service", "version": "1.0"}
            assert message["timestamp"].endswith("Z")
            assert message["retryCount"] == 0
        assert message["type"] == "message"


def test_consumer_groups_and_dead_letters(started: tuple[Broker, Http]) -> None:
    """Two of its features: what a group shares, and what it gives up."""
    _, client = started
    client.ask("POST", "/subscribe/jobs", {"group": "workers", "max_deliveries": 1})
    client.ask("POST", "/publish/batch/jobs", [1, 2])
    first = client.consume("jobs", group="workers", ack="manual")
    assert client.consume("jobs", group="workers")["data"] == 2
    body = {"delivery": first["delivery"], "group": "workers", "reason": "cannot do that"}
    assert client.ask("POST", "/nack/jobs", body).status == 200
    letters = client.consume_batch("workers.dlq", wait=10_000)
    assert letters[0]["data"] == 1
    assert client.get("/dead-letters/workers").json[0]["reason"] == "cannot do that"


def test_the_five_metrics(started: tuple[Broker, Http]) -> None:
    """By their names, with numbers that are right."""
    broker, client = started
    for number in range(5):
        client.publish("user.events", number)
    client.consume("user.events")
    with WebSocket(broker.address) as ws:
        ws.ok("ping")
        text = client.get("/metrics").body.decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels in ({}, {"topic": "user.events"})
    }
    for name in METRICS:
        assert f"# TYPE {name} " in text
    values = [samples.get(name, samples.get(f"{name}_count")) for name in METRICS]
    assert values == [5, 1, 1, 4, 5]


# --- variables ------------------------------------------------------------------------------------
def test_port(tmp_path: Path) -> None:
    """It listens where PORT says, and says so."""
    with running(tmp_path) as (broker, client):
        assert f"http://127.0.0.1:{broker.port}" in broker.ready_line
        assert client.get("/health").status == 200


def test_persistence_is_on_by_default_and_can_be_switched_off(tmp_path: Path) -> None:
    """What was published is there after a restart, or is not."""
    for name, value, kept in (("on", None, 1), ("said", "true", 1), ("off", "false", 0)):
        directory = tmp_path / name
        directory.mkdir()
        variables = {} if value is None else {"PERSISTENCE_ENABLED": value}
        with running(directory, **variables) as (_, client):
            client.publish("user.events", 1)
        with running(directory, **variables) as (_, client):
            assert len(client.ok("GET", "/topics")) == kept
        assert (directory / "data").exists() == bool(kept)


def test_retention_sizes_and_queues(tmp_path: Path) -> None:
    """RETENTION_HOURS, MAX_MESSAGE_SIZE and MAX_QUEUE_SIZE do what they say."""
    variables = {"RETENTION_HOURS": "48", "MAX_MESSAGE_SIZE": "100", "MAX_QUEUE_SIZE": "2"}
    with running(tmp_path, **variables) as (_, client):
        client.publish("user.events", 1)
        stats = client.ok("GET", "/topics/user.events/stats")
        assert stats["settings"]["retention_hours"] == 48
        too_large = client.ask("POST", "/publish/user.events", ["x" * 100])
        assert (too_large.status, too_large.code) == (413, "message_too_large")
        client.publish("user.events", 2)
        full: Answer = client.ask("POST", "/publish/user.events", 3)
        assert (full.status, full.code) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        client.consume("user.events")
        client.publish("user.events", 3)


def test_the_defaults(tmp_path: Path) -> None:
    """A day, a megabyte; ten thousand unread messages where they are kept in memory."""
    with running(tmp_path, PERSISTENCE_ENABLED="false") as (_, client):
        client.ok("POST", "/subscribe/user.events")
        stats = client.ok("GET", "/topics/user.events/stats")
        assert stats["settings"]["retention_hours"] == 24
        assert client.ask("POST", "/publish/user.events", "x" * (1 << 20)).status == 400
        assert client.ask("POST", "/publish/user.events", ["x" * ((1 << 20) - 4)]).status == 200
        assert client.ask("POST", "/publish/user.events", ["x" * ((1 << 20) - 3)]).status == 413
        client.consume("user.events")
        client.ok("POST", "/publish/batch/user.events", [0] * 10_000)
        assert client.ask("POST", "/publish/user.events", 0).status == 429


# --- JavaScript -----------------------------------------------------------------------------------
def script(broker: Broker) -> str:
    """The example; a browser's WebSocket cannot send before it is open, so the sending waits."""
    connect = CONNECT.replace("localhost:8080", f"localhost:{broker.port}")
    return f"{connect}\nws.onopen = () => {{\n{SEND}\n}};\n{RECEIVE}\n"


def test_the_javascript_in_node(started: tuple[Broker, Http]) -> None:
    """With the WebSocket that Node brings along."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node on this machine")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major = int(version.strip().removeprefix("v").split(".")[0])
    if major < 20:
        pytest.skip(f"Node {version.strip()} has no WebSocket")
    flags = ["--experimental-websocket"] if major < 22 else []
    ending = "ws.addEventListener('message', () => ws.close());\n"
    done = subprocess.run(
        [node, *flags, "-e", script(started[0]) + ending],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Received: {")
    for part in ("type: 'message'", "topic: 'user.events'", "userId: 123", "action: 'login'"):
        assert part in done.stdout
    assert started[1].consume("user.events")["data"] == {"userId": 123, "action": "login"}


class Pages:
    """A web site on a port of its own: one page, and a place to report to."""

    def __init__(self) -> None:
        self.page = ""
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(site.page.encode())

            def do_POST(self) -> None:
                site.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.origin = f"http://localhost:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@contextlib.contextmanager
def browser(directory: Path, address: str) -> Iterator[None]:
    """A real one, without a window, that knows nothing but this machine."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no Chromium on this machine (apt-get install chromium)")
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [
                found, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update",
                "--disable-sync", "--disable-dev-shm-usage", "--disable-breakpad",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
                f"--user-data-dir={directory / 'profile'}", address,
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


OWN_PAGE = """<!doctype html><script>
const report = (what) => fetch('/report', {method: 'POST', body: JSON.stringify(what)});
const broker = 'http://localhost:PORT';
SCRIPT
ws.addEventListener('message', (event) => report({websocket: JSON.parse(event.data)}));
const stream = new EventSource(broker + '/stream/shop.events');
stream.onopen = async () => {
  const answer = await fetch(broker + '/publish/shop.events', {
    method: 'POST',
    headers: {'Content-Type': 'application/json', 'X-Header-Source': 'page'},
    body: JSON.stringify({cart: 7}),
  });
  report({published: await answer.json()});
};
stream.onmessage = (event) => report({event: JSON.parse(event.data)});
</script><iframe src="FOREIGN"></iframe>"""
FOREIGN_PAGE = """<!doctype html><script>
const report = (what) => fetch('/report', {method: 'POST', body: JSON.stringify(what)});
const ws = new WebSocket('ws://localhost:PORT/ws');
ws.onopen = () => report({websocket: 'open'});
ws.onclose = async (event) => {
  let read = 'refused';
  try {
    const how = {method: 'POST', body: 'smuggled', mode: 'no-cors'};
    await fetch('http://localhost:PORT/publish/user.events', how);
    await fetch('http://localhost:PORT/consume/user.events', {mode: 'no-cors'});
    read = (await fetch('http://localhost:PORT/topics')).status;
  } catch (error) {}
  report({websocket: event.code, read});
};
</script>"""


def test_the_javascript_in_a_browser(tmp_path: Path) -> None:
    """The example on a page that is allowed, with fetch and EventSource; a foreign page gets nowhere."""
    ours, theirs = Pages(), Pages()
    try:
        with running(tmp_path, HEADRACE_ALLOWED_ORIGINS=ours.origin) as (broker, client):
            client.ok("POST", "/subscribe/user.events")
            fill = str(broker.port)
            ours.page = (
                OWN_PAGE.replace("SCRIPT", script(broker))
                .replace("PORT", fill)
                .replace("FOREIGN", theirs.origin)
            )
            theirs.page = FOREIGN_PAGE.replace("PORT", fill)
            with browser(tmp_path, ours.origin):
                found: dict[str, Any] = {}
                while len(found) < 3:
                    found |= ours.reports.get(timeout=30)
                refused = theirs.reports.get(timeout=30)
            assert found["websocket"]["data"] == {"userId": 123, "action": "login"}
            assert found["published"]["topic"] == "shop.events"
            assert found["event"]["data"] == {"cart": 7}
            assert found["event"]["headers"] == {"source": "page"}
            assert refused == {"websocket": 1006, "read": "refused"}
            assert client.consume("user.events")["data"] == {"userId": 123, "action": "login"}
            assert client.consume("user.events") is None
    finally:
        ours.close()
        theirs.close()


def test_it_ends_in_good_order(tmp_path: Path) -> None:
    """SIGTERM is enough, and the port is free again."""
    with running(tmp_path) as (broker, client):
        client.publish("user.events", 1)
        with RawHttp(broker.address) as idle:
            idle.request("GET", "/health")
            assert idle.answer().status == 200
    with socket.socket() as probe:
        assert probe.connect_ex(broker.address) != 0
