"""Every command of every page is run, against a real broker; all that is not run is in :data:`NOT_RUN`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.access import hashing
from headrace.broker.audit import TOPIC as AUDIT
from headrace.errors import HeadraceError
from headrace.testing import running_server
from tests.docs.blocks import PAGES, ROOT, Block, blocks, read, section
from tests.docs.tables import COMMANDS
from tests.docs.terminal import PASSWORD, Command, Terminal, commands_of
from tests.docs.world import QUICK, World, world  # noqa: F401
from tests.faults.__main__ import parse as parse_faults
from tests.spark.conftest import spark  # noqa: F401, the one session of all tests

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
    "make demo": "takes two minutes; tests/docs/test_demo.py runs its program",
    "make spark": "is installed before any test of Spark can run",
    "make faults": "takes hours; tests/faults/test_scenarios.py runs a little of each scenario",
    "make bench-peers": "takes 40 minutes and other brokers; tests/benchmarks/test_peers.py runs its parts",
    "pip install": "tests/deploy/test_distribution.py installs the package in a new environment",
    "headrace pipeline run orders.py --master": "needs a cluster; tests/spark/sessions/test_cluster.py has one",
    "headrace serve --engine kafka": "tests/docs/test_kafka_pages.py runs it with a Kafka",
    "headrace cluster": "so it does, with a cluster",
    "headrace bridge": "so it does",
    "kafka-acls.sh": "tests/engine/kafka/test_secured.py gives exactly these rights, and each one is needed",
    "spark-submit": "needs a cluster; tests/spark/sessions/test_spark_submit.py has one",
    "python3 -m venv packed": "needs the index of packages; that test packs an environment by itself",
    "packed/bin/venv-pack": "so it does",
    "packed/bin/pip": "so it does",
    "mkdir environment": "so it does",
    "tar -xzf environment": "so it does",
    "spark-pipelines": "takes half a minute each; tests/spark/test_examples.py runs both in a copy",
    "cd examples/declarative": "so it does",
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
    return next((why for first, why in NOT_RUN.items() if line.startswith(first)), None)


def of_page(page: str) -> list[Block]:
    return [block for block in blocks(read(page)) if block.language == "sh"]


def is_in_a_store(command: Command) -> bool:
    """It needs an object store: ``test_spark_page.py`` has one, and runs it."""
    return any("s3://" in word or word.startswith("AWS_") for word in command.words)


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


LATER = [
    command
    for page in PAGES
    for block in of_page(page)
    for line in commands_of(block.text)
    for command in line
    if why_not_run(command)
]
RUN = (
    "docs/cli.md",
    "docs/cluster.md",
    "docs/operations.md",
    "docs/security.md",
    "examples/declarative/README.md",
)
"""The pages whose commands are run here."""
ELSEWHERE = (
    "docs/http.md",
    "docs/spark.md",
    *sorted(p for p in PAGES if p.startswith("docs/from-")),
)
"""The pages whose commands are run by ``test_blocks``, ``test_spark_page`` and ``test_coming_from``."""


def test_every_command_is_run_or_listed() -> None:
    """On a page that no test runs, and in README.md outside of the tour, every command is in the list."""
    forgotten = []
    for page in set(PAGES) - {*RUN, *ELSEWHERE}:
        tour = section(read(page), "A tour of five minutes") if page == "README.md" else ""
        for block in of_page(page):
            for line in commands_of("" if block.text in tour else block.text):
                forgotten += [(page, command.words) for command in line if not why_not_run(command)]
    assert forgotten == [], "run them, or say in NOT_RUN why no test can"


@pytest.mark.parametrize("command", LATER, ids=lambda command: shlex.join(command.words)[:60])
def test_what_is_not_run_is_understood(command: Command) -> None:
    """The targets of make, the files and the arguments of ``headrace`` exist."""
    check_parts(command)


def test_nothing_is_left_out_for_a_reason_that_is_gone() -> None:
    """Every entry of the list is about a command of a page."""
    lines = [" ".join(command.words) for command in LATER]
    for first, why in NOT_RUN.items():
        assert any(line.startswith(first) for line in lines), first
        for file in re.findall(r"\btests/[\w/.]+", why):
            assert (ROOT / file).exists(), f"{first}: there is no {file}"


# --- the pages ----------------------------------------------------------------------------------------
def run_all(world: World, page: str, choose: Callable[[Command], bool]) -> int:  # noqa: F811
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
def test_cli(world: World) -> None:  # noqa: F811
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
def test_the_commands_that_do_not_end(world: World) -> None:  # noqa: F811
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
            with world.terminal.following(command) as shown:
                assert shown
    finally:
        stop.set()
        publisher.join()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page", "lines"), [("docs/operations.md", 11), ("docs/cluster.md", 2)])
def test_operations(world: World, page: str, lines: int) -> None:  # noqa: F811
    """Servers, certificates, backups, the doctor, the first user."""
    assert run_all(world, page, lambda c: not why_not_run(c)) >= lines


def test_declarative(world: World) -> None:  # noqa: F811
    """The commands around ``spark-pipelines``; those that prepare Spark are those of docs/spark.md."""
    page = "examples/declarative/README.md"
    [block] = of_page(page)
    exports = [line for line in block.text.splitlines() if line.startswith("export")]
    assert "\n".join(exports) in read("docs/spark.md")
    world.client.publish("orders.large", b"{}")
    chosen = lambda c: not why_not_run(c) and c.words[0] != "export"  # noqa: E731
    assert run_all(world, page, chosen) == 3


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
        outputs, audit = [], server.engine.audit

        def is_stored() -> bool:
            recorded = audit.recorded
            return not recorded or server.engine.partition(AUDIT).log.end_offset >= recorded

        for block in others:
            server.call(audit.close)  # it gathers records for a moment
            server.wait_until(is_stored)
            outputs += terminal.run(block)
    records = [json.loads(line) for line in outputs[-1].splitlines()]
    assert "change_quotas" in {record["data"]["action"] for record in records}
    [shown] = [json.loads(b.text) for b in blocks(read("docs/security.md")) if b.language == "json"]
    changed = next(r["data"] for r in records if r["data"]["action"] == "change_user")
    assert set(shown) == set(changed)


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
def test_cli_with_spark(world: World) -> None:  # noqa: F811
    """The commands of docs/cli.md that need Spark, in one session."""
    chosen = lambda c: is_spark(c) and not (why_not_run(c) or is_in_a_store(c))  # noqa: E731
    assert run_all(world, "docs/cli.md", chosen) >= 26
