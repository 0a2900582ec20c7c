"""A real Kafka and Spark's own connector for it, here for the comparison alone.

Both come as Maven packages that Spark's own ``--packages`` fetches (and checks), into ``.cache/ivy`` of
the checkout, once. What cannot be fetched is said, and then Kafka is not measured. The connector of
exactly this Spark is taken when it is published; else the newest older one, which is said too. Its part
for delegation tokens, which nothing here uses, may be older still.

The broker is one node in KRaft mode, on loopback, with its default settings.
"""

from __future__ import annotations

import fcntl
import glob
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import ROOT, console
from headrace.spark import use_java

KAFKA = "4.1.1"
SCALA = "2.13"
CONNECTORS = ((pyspark.__version__, pyspark.__version__), ("4.2.0", "4.0.0"))
"""Versions of the connector and of its part for tokens, the best first."""
CACHE = ROOT / ".cache" / "ivy"
START_S = 180.0
FETCH_S = 600.0
_TOKENS = f"org.apache.spark:spark-token-provider-kafka-0-10_{SCALA}"
_NEEDED = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
_SPARK_HOME = Path(pyspark.__file__).parent


class NotFetched(Exception):
    pass


# --- packages -------------------------------------------------------------------------------------
def fetch_jars(name: str, package: str, without: str = "") -> list[Path]:
    """The jars of a package and of all it needs but what Spark has itself. Ivy cannot share a folder
    with another Ivy, so the second of two that ask at once waits for the first."""
    folder = CACHE / name
    done = folder / ".done"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _fetch(folder, package, without)
            done.touch()
    return [Path(path) for path in sorted(glob.glob(f"{folder}/jars/*.jar"))]


def _fetch(folder: Path, package: str, without: str) -> None:
    with tempfile.TemporaryDirectory() as empty:
        script = Path(empty) / "nothing.py"
        script.touch()
        command = [
            str(_SPARK_HOME / "bin" / "spark-submit"), "--packages", package,
            "--conf", f"spark.jars.ivy={folder}", "--conf", "spark.ui.enabled=false",
            *(("--exclude-packages", without) if without else ()), str(script),
        ]  # fmt: skip
        with console.status(f"fetching {package}"):
            found = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
    if found.returncode:
        why = [line for line in found.stderr.splitlines() if "Exception" in line]
        raise NotFetched(f"{package}: {why[0] if why else found.stderr[-300:]}")


@dataclass
class Packages:
    broker: list[Path]
    connector: list[Path]
    text: str


def packages() -> Packages | None:
    """Everything that Kafka needs, or None when it cannot be had, which is said."""
    use_java()
    try:
        broker = fetch_jars(f"kafka-{KAFKA}", f"org.apache.kafka:kafka_{SCALA}:{KAFKA}")
        connector, text = _connector()
    except (NotFetched, OSError, subprocess.TimeoutExpired) as error:
        console.print(f"[yellow]Kafka is not measured, it cannot be fetched: {error}[/yellow]")
        return None
    return Packages(broker, connector, f"Kafka {KAFKA}, {text}")


def _connector() -> tuple[list[Path], str]:
    errors = []
    for version, tokens in CONNECTORS:
        package = f"org.apache.spark:spark-sql-kafka-0-10_{SCALA}:{version}"
        try:
            jars = fetch_jars(f"connector-{version}", package, _TOKENS)
            jars += fetch_jars(
                f"tokens-{tokens}", f"{_TOKENS}:{tokens}", "org.apache.kafka:kafka-clients"
            )
        except NotFetched as error:
            errors.append(str(error))
            continue
        text = f"connector {version}"
        if version != pyspark.__version__:
            text += f", as that of Spark {pyspark.__version__} is not to be had"
            console.print(f"[yellow]Kafka: {text}[/yellow]")
        return [jar for jar in jars if any(name in jar.name for name in _NEEDED)], text
    raise NotFetched("; ".join(errors))


# --- the broker -----------------------------------------------------------------------------------
def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Kafka:
    servers: str
    text: str

    def frame(self, spark: SparkSession, topic: str, **options: str) -> DataFrame:
        return (
            spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", topic)
            .options(**options)
            .load()
        )

    def fill(self, frame: DataFrame, topic: str) -> None:
        """The records of a Headrace topic, in the same partitions, in batches of up to 1 MB."""
        (
            frame.select("value", "partition")
            .write.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("kafka.linger.ms", "50")
            .option("kafka.batch.size", str(1 << 20))
            .option("topic", topic)
            .save()
        )


def broker_jars() -> list[Path]:
    """Kafka, and the Scala library that Spark brings. Raises :class:`NotFetched`."""
    use_java()
    jars = fetch_jars(f"kafka-{KAFKA}", f"org.apache.kafka:kafka_{SCALA}:{KAFKA}")
    return [*jars, next((_SPARK_HOME / "jars").glob("scala-library-*.jar"))]


def _java() -> str:
    return str(use_java().home / "bin" / "java")


def _command(
    directory: Path,
    port: int,
    controller: int,
    *,
    heap: str = "1g",
    more: str = "",
    options: Sequence[str] = (),
) -> list[str]:
    """The command of a node whose data are in the directory; formats it first, if that is needed."""
    settings = directory / "server.properties"
    settings.write_text(
        "process.roles=broker,controller\nnode.id=1\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\n"
        "controller.listener.names=CONTROLLER\n"
        f"log.dirs={directory / 'data'}\n"
        "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=4\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "share.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
        f"{more}"
    )
    program = [
        _java(),
        f"-Xmx{heap}",
        *options,
        "-cp",
        os.pathsep.join(str(jar) for jar in broker_jars()),
    ]
    if not (directory / "data").exists():
        subprocess.run(
            [*program, "kafka.tools.StorageTool", "format", "-t", "SGVhZHJhY2UtYmVuY2hfMQ", "-c", str(settings)],
            check=True, capture_output=True,
        )  # fmt: skip
    return [*program, "kafka.Kafka", str(settings)]


class Node:
    """One Kafka in a process of its own. It keeps its port and its data over a restart.

    ``more`` are lines of its settings, which win over the others; ``options`` are Java's.
    """

    def __init__(
        self, directory: Path, *, heap: str = "1g", more: str = "", options: Sequence[str] = ()
    ):
        self._directory, self._heap, self.more, self._options = directory, heap, more, options
        self.port, self.controller = _free_port(), _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        program = _command(
            self._directory,
            self.port,
            self.controller,
            heap=self._heap,
            more=self.more,
            options=self._options,
        )
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(program, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise SystemExit(f"Kafka did not start within {START_S:g} seconds")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def kafka(found: Packages, directory: Path, partitions: int) -> Iterator[Kafka]:
    """A Kafka in a process of its own, ready; it makes topics of so many partitions by itself."""
    node = Node(directory / "kafka", more=f"num.partitions={partitions}\n")
    try:
        node.start()
        yield Kafka(node.servers, found.text)
    finally:
        node.stop()
