"""A broker with all that the pages speak of: topics, subscriptions, dead letters, files."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from headrace import Broker, BrokerClient
from headrace.access import hashing
from headrace.errors import Conflict, SubscriptionNotFound, TopicNotFound
from headrace.testing import RunningServer, running_server, wait_until
from tests.docs.blocks import blocks, read
from tests.docs.terminal import PASSWORD, Terminal

TOKEN = "correct-horse-battery-staple"
QUICK = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
"""The real parameters take a tenth of a second for each hash."""
PIPELINES = """
servers = "127.0.0.1:9999"
[pipeline.revenue]
from = "orders"
format = "json"
schema = "id STRING, amount DOUBLE"
sql = "SELECT id, amount FROM orders WHERE amount > 100"
to = { topic = "revenue", key = "id" }
"""
ORDER = '{"id": "o%d", "order_id": %d, "amount": %d, "country": "de", "region": "eu", "debug": 1}'


class World:
    """A broker with the topics, subscriptions and files that the examples name."""

    def __init__(self, server: RunningServer, client: BrokerClient, terminal: Terminal):
        self.server, self.terminal = server, terminal
        self.client = client
        self.folder = terminal.folder
        self._threads: list[threading.Thread] = []
        for topic in ("orders", "orders.eu", "shop.eu", "shop.orders", "payments"):
            self.client.publish_many(topic, [ORDER % (n, n, n) for n in range(150)])
        self.client.publish_many("logs", ["a line"] * 5)
        self.client.publish_many("images", [b"image"] * 8)
        self.client.publish_many("events", ["an event"] * 5)
        (self.folder / "photo.jpg").write_bytes(b"\xff\xd8\x00picture")
        (self.folder / "lines.txt").write_text("one\ntwo\n")
        (self.folder / "staging.json").write_text('{"server": {"port": 9998}}')
        (self.folder / "orders.toml").write_text(terminal.mine(PIPELINES))
        [declared] = [b for b in blocks(read("docs/pipelines.md")) if b.language == "python"]
        (self.folder / "orders.py").write_text(declared.text.replace("/var/lib", str(self.folder)))
        for home in ("data", "backup/data", "var/lib/headrace"):
            with Broker(data_dir=self.folder / home, auto_create_topics=True) as broker:
                broker.publish("orders", ORDER % (1, 1, 1))
                broker.publish("logs", "a line")
        self._letters()

    def here(self, text: str) -> str:
        """A program or a file with the reader's folders and the broker's port."""
        # Python workers have the environment in which Spark was started, long before this broker.
        here = f'servers="127.0.0.1:{self.server.port}", token="{TOKEN}"'
        text = text.replace('.format("headrace")', f'.format("headrace").options({here})')
        text = text.replace(
            "sqlite:////lake/", f"sqlite:///{self.folder}/new/"
        )  # the one in Iceberg
        for folder in ("/var/lib", "/state", "/lake", "/new"):
            text = text.replace(f'"{folder}', f'"{self.folder}{folder}')
        return self.terminal.mine(text)

    def publish_orders(self) -> None:
        """Two of one hour, and one so much later that the hour is over."""
        for number, at in ((1, "08:00"), (2, "08:30"), (3, "12:00")):
            order = (
                f'{{"id": "{number}", "customer": "ann", "amount": 5, "at": "2026-01-01T{at}:00Z"}}'
            )
            self.client.publish("orders", order)

    def prepare(self, line: str) -> None:
        """Before every line: what it speaks of is there again."""
        self._stop.set()
        client = self.client
        for name, topic in (("my-group", "events"), ("email", "orders")):
            client.create_subscription(name, topic, backoff=0)
        for prefix, work in self._before().items():
            if line.startswith(f"headrace {prefix}"):
                work()

    def _before(self) -> dict[str, Callable[[], object]]:
        client = self.client
        return {
            "backup /backup/headrace --data": lambda: shutil.rmtree(
                self.folder / "backup/headrace"
            ),
            "backup /backup/headrace --list": self._generations,
            "restore": self._generations,
            "verify": self._generations,
            "fetch events latest": self._news,
            "subscribe events --group": lambda: client.publish_many("events", ["x"] * 100),
            "join-subscription my-group": lambda: client.publish_many("events", ["x"] * 10),
            "export orders --partition": lambda: client.publish_many(
                "orders", [ORDER % (1, 1, 1)] * 2000
            ),
            "import": lambda: self.terminal.headrace(["export", "orders", "orders.jsonl.gz"]),
            "create-topic events": lambda: client.delete_topic("events"),
            "create-topic logs": lambda: client.delete_topic("logs"),
            "delete-subscription email": self._two_of_a_name,
            "pause email --topic": self._two_of_a_name,
            "explain email --topic": self._two_of_a_name,
            "resume": self._one_of_a_name,
            "seek my-group latest --partition": lambda: client.change_topic("events", partitions=4),
            "dlq": self._letters,
            "scheduled cancel": self._delayed,
            "scheduled publish": self._delayed,
            "users change": self._alice,
            "users delete": self._alice,
            "tokens create laptop": self._alice,
            "tokens revoke": lambda: self._token("ci"),
            "access quotas": self._alice,
            "archive verify /lake/shop": lambda: self.run(
                "archive run shop.> payments --to /lake/shop --format iceberg --once"
            ),
            "archive verify /lake/orders --path": self._copy,
            "sql --path": self._copy,
            "sql --history": lambda: self.run("archive run orders --to /lake/orders --once"),
            "sql SELECT date_trunc": lambda: wait_until(lambda: "__events" in self._internal(), 30),
            "pipeline st": self._report,
            "pipeline stop revenue": lambda: self._start(
                threading.Timer(1.0, self._report, ["stopped"])
            ),
        }

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Nothing of it may outlive the client."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    _stop = threading.Event()
    _scheduled = "6d6f7468-6572-4c20-a973-206269727468"

    def _generations(self) -> None:
        while (
            self.terminal.headrace(
                ["backup", self.terminal.mine("/backup/headrace"), "--list", "--json"]
            ).count(b'"generation"')
            < 3
        ):
            self.terminal.headrace(["backup", self.terminal.mine("/backup/headrace")])

    def _delayed(self) -> None:
        self.client.publish("events", "later", delay=3600, id=self._scheduled)

    def _two_of_a_name(self) -> None:
        self.client.create_subscription("email", "invoices")

    def _one_of_a_name(self) -> None:
        for each in self.client.subscriptions("invoices"):
            self.client.delete_subscription(each["name"], "invoices")

    def _letters(self) -> None:
        """Ten dead letters of ``email``, with the reason that the examples look for."""
        client = self.client
        self._one_of_a_name()
        with suppress(SubscriptionNotFound):
            if {7, 9} <= {letter.offset for letter in client.dead_letters("email")}:
                return
        for name in [each["name"] for each in client.subscriptions("orders")]:
            if name == "email":
                client.delete_subscription("email", "orders")
        with suppress(TopicNotFound):
            client.delete_topic("email.dlq")
        client.create_subscription("email", "orders", "latest", max_deliveries=1)
        client.publish_many("orders", [ORDER % (n, n, n) for n in range(10)])
        with client.subscription("email", "orders") as consumer:
            for _ in range(10):
                consumer.nack(consumer.get(20), reason="timeout")
        wait_until(lambda: len(client.dead_letters("email")) >= 10)

    def _alice(self) -> None:
        with suppress(Conflict):
            self.client.create_user("alice", password=PASSWORD)

    def _token(self, name: str) -> None:
        with suppress(Conflict):
            self.client.create_token(name, grants=["publish:builds.>"])

    def run(self, line: str) -> None:
        self.terminal.headrace([self.terminal.mine(word) for word in line.split()])

    def _copy(self) -> None:
        """A data directory with what the broker has."""
        shutil.rmtree(self.folder / "backup/data", ignore_errors=True)
        self.run("backup /backup/copy")
        self.run("restore /backup/copy /backup/data")

    def _internal(self) -> list[str]:
        return [topic.name for topic in self.server.call(lambda: list(self.server.engine.topics))]

    def _report(self, state: str = "running") -> None:
        run = {"state": state, "run_id": "r", "started_at": 1, "queries": []}
        self.client.report_pipeline("revenue", run)

    def _news(self) -> None:
        """A message every half second, until the line after this one."""

        def publish() -> None:
            while not self._stop.wait(0.5):
                self.client.publish_text("events", "news")

        self._stop.clear()
        self._start(threading.Thread(target=publish))


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[World]:
    settings = {"token": TOKEN, "events_interval": 1}
    with running_server(tmp_path / "broker", **settings) as server, server.client() as client:
        monkeypatch.setattr(hashing, "_hasher", QUICK)
        folder = tmp_path / "reader"
        folder.mkdir()
        ports = (str(server.port), str(server.http_address.port))
        terminal = Terminal(folder, monkeypatch, capsys, ports)
        monkeypatch.setenv("HEADRACE_SERVER", f"127.0.0.1:{server.port}")
        monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
        made = World(server, client, terminal)
        yield made
        made.close()
