"""Every command of every page is run, against a real broker; all that is not run is in :data:`NOT_RUN`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from headrace import Broker, BrokerClient
from headrace.access import hashing
from headrace.errors import Conflict, HeadraceError, SubscriptionNotFound, TopicNotFound
from headrace.testing import RunningServer, running_server, wait_until
from tests.cli.rig import SCRIPT
from tests.docs.blocks import ROOT, Block, blocks, read
from tests.docs.tables import COMMANDS
from tests.docs.terminal import PASSWORD, Command, Terminal, commands_of
from tests.faults.__main__ import parse as parse_faults
from tests.spark.conftest import spark  # noqa: F401, the one session of all tests

TOKEN = "correct-horse-battery-staple"
QUICK = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
"""The real parameters take a tenth of a second for each hash."""

NOT_RUN = {
    "systemctl": "a test has no service manager; tests/deploy/test_systemd.py starts the unit's command",
    "journalctl": "so it has no journal",
    "useradd": "a test makes no users of the system",
    "python3 -m venv /opt": "tests/deploy/test_distribution.py installs the package in a new environment",
    "/opt/headrace/.venv/bin/pip": "so it does",
    "cp /opt": "the folder of the service manager",
    "docker": "needs a daemon; tests/deploy/test_image.py runs the steps of the Dockerfile",
    "kubectl": "needs a cluster; tests/deploy/test_kubernetes.py validates the manifests",
    "make run": "tests/docs/test_readme.py runs its command",
    "make test": "this is it",
    "make faults": "takes hours; tests/faults/test_scenarios.py runs a little of each scenario",
    "make bench-peers": "takes 40 minutes and other brokers; tests/benchmarks/test_peers.py runs its parts",
    "pip install": "tests/deploy/test_distribution.py installs the package in a new environment",
    "headrace pipeline run orders.toml": "does not end; tests/cli/test_pipeline.py runs and stops one",
    "headrace pipeline run orders.py": "needs a cluster; benchmarks/spark_cluster.py has one",
    "headrace archive run orders --to /lake/orders": "does not end; the same with --once is run",
    "headrace archive run shop.> payments": "does not end; tests/spark/builtin runs and stops one",
    "headrace serve --engine kafka": "needs Kafka; tests/contract/test_cluster.py has three nodes with one",
    "headrace cluster": "needs a cluster; tests/cli/test_cluster.py and tests/moving have one",
    "headrace bridge": "needs Kafka; tests/bridge runs both directions with one",
    "headrace sql --schema": "is a prompt; tests/cli/test_sql.py types into one",
}
"""The first words of the only commands that no test of the pages runs, and why. Their parts are checked."""
ENDLESS = (
    "tail -f", "subscribe orders.>", "subscribe events --offset", "groups --watch", "top",
    "top --interval 10s", "join-subscription my-group",
)  # fmt: skip
"""Commands that end when the reader presses Ctrl-C."""
SPARK = ("sql", "report", "archive", "replay", "pipeline run", "pipeline validate")


def why_not_run(command: Command) -> str | None:
    line = " ".join(command.words)
    for first, why in NOT_RUN.items():
        if line.startswith(first):
            ends = "--once" in command.words and first.startswith("headrace")
            return None if ends else why
    return None


def of_page(page: str) -> list[Block]:
    return [block for block in blocks(read(page)) if block.language == "sh"]


def is_spark(command: Command) -> bool:
    return command.is_ours and " ".join(command.words[1:]).startswith(SPARK)


# --- what is not run --------------------------------------------------------------------------------
def check_parts(command: Command) -> None:
    """What can be checked of a command that is not run."""
    words = command.words
    for number, word in enumerate(words):
        if word.startswith(("/opt/headrace/", "deploy/")) and ".venv" not in word:
            assert (ROOT / word.removeprefix("/opt/headrace/")).exists(), word
        if word == "headrace" and (number == 0 or words[number - 1] == "--"):
            understand(words[number + 1 :])
    match words:
        case ["make", target, *variables]:
            assert f"\n{target}:" in read("Makefile"), target
            if target == "faults":
                given = dict(each.split("=", 1) for each in variables)
                parse_faults(given.get("ARGS", "").split())
        case ["systemctl", _, *units] if units:
            assert (ROOT / "deploy" / f"{units[-1]}.service").is_file()
        case ["docker", "compose", *_]:
            assert (ROOT / "docker-compose.yml").is_file()
        case ["docker", "build", *_]:
            assert (ROOT / "Dockerfile").is_file()


def understand(words: list[str]) -> None:
    """The command exists and takes these arguments."""
    name = next(each for each in COMMANDS if words[: len(each.split())] == each.split())
    COMMANDS[name].make_context(name, words[len(name.split()) :])


PAGES = [p for p in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/REPORT.md", "examples/declarative/README.md",
                     *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
         if of_page(p)]  # fmt: skip
LATER = [
    command
    for page in PAGES
    for block in of_page(page)
    for line in commands_of(block.text)
    for command in line
    if why_not_run(command)
]


@pytest.mark.parametrize("command", LATER, ids=lambda command: shlex.join(command.words)[:60])
def test_what_is_not_run_is_understood(command: Command) -> None:
    """The targets of make, the files and the arguments of ``headrace`` exist."""
    check_parts(command)


def test_nothing_is_left_out_for_a_reason_that_is_gone() -> None:
    """Every entry of the list is about a command of a page."""
    lines = [" ".join(command.words) for command in LATER]
    for first in NOT_RUN:
        assert any(line.startswith(first) for line in lines), first


# --- the world that the pages speak of -----------------------------------------------------------------
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
        for folder in ("/var/lib", "/state"):
            text = text.replace(f'"{folder}', f'"{self.folder}{folder}')
        return self.terminal.mine(text)

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
            "archive verify /lake/shop": lambda: self._run(
                "archive run shop.> payments --to /lake/shop --format iceberg --once"
            ),
            "archive verify /lake/orders --path": self._copy,
            "sql --path": self._copy,
            "sql --history": lambda: self._run("archive run orders --to /lake/orders --once"),
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

    def _run(self, line: str) -> None:
        self.terminal.headrace([self.terminal.mine(word) for word in line.split()])

    def _copy(self) -> None:
        """A data directory with what the broker has."""
        shutil.rmtree(self.folder / "backup/data", ignore_errors=True)
        self._run("backup /backup/copy")
        self._run("restore /backup/copy /backup/data")

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


# --- the pages ----------------------------------------------------------------------------------------
def run_all(world: World, page: str, choose: Callable[[Command], bool]) -> int:
    """Run the chosen commands of a page, in its order; the number of lines. All that fails is told at once."""
    count, failed = 0, []
    for block in of_page(page):
        lines = [line for line in commands_of(block.text) if choose(line[-1])]
        text = "\n".join(rebuilt(line) for line in lines)
        try:
            count += len(world.terminal.run(Block("sh", text, block.line), world.prepare))
        except (AssertionError, HeadraceError, OSError, subprocess.SubprocessError) as error:
            failed.append(f"{page}:{block.line}: {error}")
    assert not failed, "\n".join(failed)
    return count


def rebuilt(line: list[Command]) -> str:
    parts = []
    for command in line:
        environment = " ".join(f"{name}={value}" for name, value in command.environment.items())
        joined = f"{environment} {shlex.join(command.words)}".strip()
        parts += ["|" if command.piped else "&&"] * bool(parts) + [joined]
    return " ".join(parts)


@pytest.mark.timeout(300)
def test_cli(world: World) -> None:
    """docs/cli.md, without what needs Spark or does not end."""
    ran = run_all(
        world,
        "docs/cli.md",
        lambda c: not (is_spark(c) or why_not_run(c) or is_endless(c)),
    )
    assert ran > 80


def is_endless(command: Command) -> bool:
    line = " ".join(command.words[1:])
    return any(line == each or (each != "top" and line.startswith(each)) for each in ENDLESS) and (
        "--count" not in command.words
    )


@pytest.mark.timeout(300)
def test_the_commands_that_do_not_end(world: World) -> None:
    """They show something, and Ctrl-C ends them."""
    found = [
        command
        for block in of_page("docs/cli.md")
        for line in commands_of(block.text)
        for command in line
        if command.is_ours and is_endless(command)
    ]
    assert len(found) == len(ENDLESS)
    stop = threading.Event()

    def publish() -> None:
        with world.server.client() as client:
            while not stop.wait(0.05):
                for topic in ("events", "orders.eu"):
                    client.publish_text(topic, "news")

    world.prepare("")
    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for command in found:
            with world.terminal.following(command) as process:
                assert process.stdout is not None
                assert process.stdout.read(1)
    finally:
        stop.set()
        publisher.join()


@pytest.mark.timeout(300)
def test_operations(world: World) -> None:
    """docs/operations.md: servers, certificates, backups, the doctor."""
    assert run_all(world, "docs/operations.md", lambda c: not why_not_run(c)) >= 11


def test_security(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/security.md, from the first user on, who is made before the broker runs."""
    monkeypatch.setattr(hashing, "_hasher", QUICK)
    folder = tmp_path / "reader"
    folder.mkdir()
    first, *others = of_page("docs/security.md")
    terminal = Terminal(folder, monkeypatch, capsys, ("0", "0"))
    assert "Added" in terminal.run(first)[0]
    monkeypatch.setenv("HEADRACE_PASSWORD", PASSWORD)
    with running_server(folder / "data") as server:
        monkeypatch.setenv("HEADRACE_SERVER", f"127.0.0.1:{server.port}")
        outputs = []
        for block in others:
            server.call(server.engine.audit.close)  # it gathers records for a moment
            outputs += terminal.run(block)
    records = [json.loads(line) for line in outputs[-1].splitlines()]
    assert "change_quotas" in {record["data"]["action"] for record in records}
    [shown] = [json.loads(b.text) for b in blocks(read("docs/security.md")) if b.language == "json"]
    changed = next(r["data"] for r in records if r["data"]["action"] == "change_user")
    assert set(shown) == set(changed)


def test_spark_environment() -> None:
    """docs/spark.md: what ``spark-submit`` needs, found by Python."""
    [block] = [each for each in of_page("docs/spark.md") if "PYSPARK_PYTHON" in each.text]
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-e", "-c", block.text + '"$JAVA_HOME/bin/java" -version; echo "$PYSPARK_PYTHON"'],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.strip() == str(SCRIPT.with_name("python"))


# --- with Spark ---------------------------------------------------------------------------------------
WITH_SPARK = [
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("spark"),
    pytest.mark.timeout(600),
]


def with_spark(test: Callable[..., None]) -> Callable[..., None]:
    for mark in WITH_SPARK:
        test = mark(test)
    return test


@pytest.mark.slow
@with_spark
def test_cli_with_spark(world: World) -> None:
    """The commands of docs/cli.md that need Spark, in one session."""
    chosen = lambda c: is_spark(c) and not why_not_run(c)  # noqa: E731
    assert run_all(world, "docs/cli.md", chosen) >= 22


PROGRAM = """
query.processAllAvailable()
query.stop()
for _ in range(2):
    write(spark.sql("SELECT 'k' AS key, 'v' AS value"), 7)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(600)
def test_spark_programs(world: World) -> None:
    """The programs of docs/spark.md, one after the other, as one program that a reader starts."""
    found = [b.text for b in blocks(read("docs/spark.md")) if b.language == "python"]
    # These need dead letters and an archive: tests/spark/test_letters.py and tests/spark/history have them.
    found = [text for text in found if not re.search("deadLetters|history|lake.write", text)]
    assert len(found) == 5
    rows = 'df = spark.range(3).selectExpr("CAST(id AS STRING) AS id", "id AS amount")\n'
    program = world.folder / "program.py"
    program.write_text(world.here("\n".join([found[0], rows, *found[1:], PROGRAM])))
    command = [str(SCRIPT.with_name("python")), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    copied = world.client.topic_stats("billed")["messages"]
    assert copied == world.client.topic_stats("orders")["messages"]
    assert world.client.topic_stats("out")["messages"] == 3 + 1


@with_spark
@pytest.mark.parametrize("page", ["docs/spark.md", "docs/pipelines.md"])
def test_pipeline_files(world: World, page: str) -> None:
    """The files are read, planned against the topics and found valid."""
    for topic in ("shipments.eu", "shipments.us", "revenue.dlq", "customers", "accounts"):
        world.client.publish(topic, b"{}")
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    assert active is not None
    customers = active.sql("SELECT 'c' AS id, 'de' AS country")
    customers.write.parquet(str(world.folder / "customers.parquet"))
    for number, block in enumerate(blocks(read(page))):
        if block.language in ("toml", "python") and "pipeline" in block.text:
            ending = {"toml": "toml", "python": "py"}[block.language]
            path = world.folder / f"pipelines{number}.{ending}"
            path.write_text(world.here(block.text))
            world.terminal.headrace(["pipeline", "list", str(path)])
            world.terminal.headrace(["pipeline", "validate", str(path)])
