"""The examples for Spark run, and print what they are there to show."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import BrokerClient
from headrace.spark.sink.writers import SinkOptions
from headrace.spark.source.options import SourceOptions
from headrace.testing import RunningServer

pytestmark = pytest.mark.xdist_group("spark")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DECLARATIVE = EXAMPLES / "declarative"


@pytest.fixture
def address(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
    return f"{server.host}:{server.port}"


@pytest.fixture
def example(
    spark: object, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Runs a script as if from the command line, in the one session of all tests."""

    def run(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / "spark" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run  # type: ignore[return-value]


def test_every_example_has_a_test() -> None:
    """And each says at its head how it is run."""
    tested = Path(__file__).read_text(encoding="utf-8")
    paths = list((EXAMPLES / "spark").glob("*.py"))
    assert len(paths) == 3
    for path in paths:
        assert f'"{path.name}"' in tested
        assert f"python examples/spark/{path.name}" in path.read_text(encoding="utf-8")


def test_batch(example: Any) -> None:
    """Revenue by country, and the record that is none."""
    assert example("batch.py") == [
        "de: 100 orders, 14900.00",
        "fr: 100 orders, 15000.00",
        "it: 100 orders, 15100.00",
        "no order, at offset 300: this is no JSON",
    ]


def test_word_count(
    example: Any, client: BrokerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where it ended."""
    monkeypatch.setenv("WORD_COUNT_DIR", str(tmp_path))
    client.publish_many("sentences", [b"to be or not", b"to be!"])
    assert example("word_count.py", "--once") == [
        "batch 0: be 2",
        "batch 0: to 2",
        "batch 0: not 1",
        "batch 0: or 1",
    ]
    client.publish_many("sentences", [b"To be."])
    assert example("word_count.py", "--once") == ["batch 1: be 3", "batch 1: to 3"]


def test_topic_to_topic(example: Any, client: BrokerClient, tmp_path: Path) -> None:
    """Twice over the same payments, and each large one is there once."""

    def written() -> list[tuple[bytes | None, bytes]]:
        return [
            (message.key, message.value) for message in client.fetch("payments.large", limit=100)
        ]

    client.create_topic("payments.large")
    payments = [b'{"id": "p%d", "amount": %d}' % (n, n) for n in range(500, 1003)]
    client.publish_many("payments", payments, keys=["k"] * len(payments))
    assert example("topic_to_topic.py", tmp_path) == ["503 payments looked at"]
    large = [(b"k", b'{"id":"p%d","amount":%d.0}' % (n, n)) for n in range(1000, 1003)]
    assert written() == large
    assert example("topic_to_topic.py", tmp_path) == ["0 payments looked at"]
    client.publish_many("payments", [b'{"id": "new", "amount": 5000}'])
    example("topic_to_topic.py", tmp_path)
    assert written() == [*large, (None, b'{"id":"new","amount":5000.0}')]
    assert client.subscription_stats("large-payments")["lag"] == 0


def test_notebook(
    spark: object,
    address: str,
    client: BrokerClient,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every cell of examples/notebook.ipynb runs, in order, and shows what its text says; nothing is left over."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell("".join(each["source"]), names) for each in cells]
    out = capsys.readouterr().out
    assert "4997 orders, 3 records that are none" in out
    assert "shop.orders looks like JSON" in out
    assert shown[4].columns.tolist() == ["de", "fr", "it"]
    assert re.search(r"unknown country: it\|shop.orders\|\d+", out)
    assert "unknown country" not in out[out.rindex("|reason") :]
    found = re.search(r"(\d+) records, (\d+) of them", out)
    assert found is not None
    assert int(found[1]) > 5_001  # the redriven ones are records, too
    assert shown[-2][0].keys() == {"country", "method", "orders", "revenue"}
    assert not [topic for topic in client.topics() if topic in ("shop.orders", "shop.revenue")]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """As a notebook does it: the value of the last expression is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    )


# --- Declarative Pipelines ----------------------------------------------------------------------------
def test_the_declarative_project_is_well_formed() -> None:
    """What can be seen without Spark's own command, which takes half a minute."""
    spec = yaml.safe_load((DECLARATIVE / "spark-pipeline.yml").read_text(encoding="utf-8"))
    assert spec.keys() == {"name", "storage", "libraries", "configuration"}
    assert spec["storage"].startswith("file:///")
    assert all(isinstance(value, str) for value in spec["configuration"].values())
    tree = ast.parse((DECLARATIVE / "transformations" / "orders.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    [reading] = [node for node in calls if getattr(node.func, "attr", "") == "options"]
    SourceOptions.of({word.arg: ast.literal_eval(word.value) for word in reading.keywords})
    [sink] = [node for node in calls if getattr(node.func, "attr", "") == "create_sink"]
    SinkOptions.of(ast.literal_eval(sink.args[2]))


def test_nothing_else_needs_what_this_example_needs() -> None:
    """pandas and numpy are installed for it alone: Headrace must run without them."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {name.split(".")[0] for name in names}
            assert not tops & {"pandas", "numpy", "grpc", "yaml"}, path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_declarative(server: RunningServer, client: BrokerClient, tmp_path: Path) -> None:
    """Validated, and run twice: the second time takes what has come since, and doubles nothing."""
    from headrace.spark.sessions.java import find_java

    project = tmp_path / "project"
    shutil.copytree(DECLARATIVE, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text(encoding="utf-8")
    spec.write_text(
        text.replace("file:///tmp/headrace-declarative", (tmp_path / "storage").as_uri()),
        encoding="utf-8",
    )

    def pipelines(word: str) -> None:
        loopback = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]
        settings = ["spark.sql.catalogImplementation=hive", "spark.ui.enabled=false", *loopback]
        ended = subprocess.run(
            [
                Path(sys.executable).with_name("spark-pipelines"),
                *(part for setting in settings for part in ("--conf", setting)),
                word,
            ],
            cwd=project,
            env={
                **os.environ,
                "HEADRACE_SERVERS": f"{server.host}:{server.port}",
                "JAVA_HOME": str(find_java(os.environ).home),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        assert "Run is COMPLETED" in ended.stdout

    def large() -> list[tuple[bytes | None, object]]:
        messages = client.fetch("orders.large", limit=100)
        return [(each.key, json.loads(each.value)) for each in messages]

    client.create_topic("orders.large")
    client.publish_many(
        "orders",
        [b'{"id": "o%d", "country": "%s", "amount": %d}' % (n, (b"de", b"fr")[n % 2], n) for n in range(101)]
        + [b"bad"],
    )  # fmt: skip
    pipelines("dry-run")
    pipelines("run")
    first = (b"de", {"id": "o100", "country": "de", "amount": 100})
    assert large() == [first]
    client.publish_many("orders", [b'{"id": "new", "country": "it", "amount": 500}'])
    pipelines("run")
    assert large() == [first, (b"it", {"id": "new", "country": "it", "amount": 500})]
    assert _table(project, "revenue") == [("de", 51, 2550.0), ("fr", 50, 2500.0), ("it", 1, 500.0)]
    assert len(_table(project, "orders")) == 102


def _table(project: Path, name: str) -> list[tuple[object, ...]]:
    import pyarrow.parquet as pq

    rows: list[tuple[object, ...]] = []
    for path in (project / "spark-warehouse" / name).glob("*.parquet"):
        rows += [tuple(row.values()) for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=str)
