"""Pipelines on a real cluster: executors read by themselves, and one that is lost changes nothing."""

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.testing import ServerProcess, server_process, wait_until
from tests.spark.sessions.cluster import Cluster, spark_cluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(400)]

PARTITIONS = 4
RECORDS = 600
"""Of each partition."""
HELD_AT = 400
"""From this offset on a task waits, in the middle of its batch."""
WITH_RECORD = "{:06d}" + "." * 5_000
START_S = 200.0
MAIN = "from headrace.cli import main; main()"
TRAVELS_NOT = ("pyarrow", "google_crc32c", "orjson", "zstandard")
"""What executors need besides Spark and Python: compiled, so no zip can carry it."""
FILE = """
    import os, time
    from pathlib import Path
    from headrace.spark.pipelines import pipeline

    FOLDER = Path({folder!r})

    @pipeline(from_="orders", to="copy")
    def copied(rows):
        import pyarrow as pa
        from pyspark.sql.pandas.functions import arrow_udf

        def note(values, partitions, offsets):
            # An executor's working directory has the executor's number for its name.
            mark = f"{{partitions[0]}}-{{Path.cwd().name}}"
            (FOLDER / f"read-{{mark}}").touch()
            if offsets[-1].as_py() >= {held_at} and (FOLDER / "hold").exists():
                (FOLDER / f"held-{{mark}}").touch()
                while (FOLDER / "hold").exists():
                    time.sleep(0.02)
            return values

        note.__annotations__ = dict.fromkeys(("values", "partitions", "offsets", "return"), pa.Array)
        noted = arrow_udf(note, "binary")
        return rows.select("key", noted("value", "partition", "offset").alias("value"))
"""
CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
    "spark.driver.memory": "512m",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BrokerClient]:
    """A client of a broker with a topic that is full."""
    with server.client(request_timeout=30) as found:
        found.create_topic("orders", partitions=PARTITIONS)
        found.create_topic("copy", partitions=PARTITIONS)
        for partition in range(PARTITIONS):
            for start in range(0, RECORDS, 100):
                values = [
                    WITH_RECORD.format(partition * RECORDS + number).encode()
                    for number in range(start, start + 100)
                ]
                found.publish_many("orders", values, partition=partition)
        yield found


class Driver:
    """``headrace pipeline run`` on a cluster, and what its tasks have noted."""

    def __init__(self, server: ServerProcess, cluster: Cluster, folder: Path, **environment: str):
        self.folder = folder
        file = folder / "orders.py"
        file.write_text(textwrap.dedent(FILE.format(folder=str(folder), held_at=HELD_AT)))
        self._log = folder / "log"
        conf = [word for name, each in CONF.items() for word in ("--conf", f"{name}={each}")]
        clean = {name: each for name, each in os.environ.items() if not name.startswith("PYSPARK_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, "pipeline", "run", str(file), "--once",
                 "--master", cluster.url, "--checkpoint-dir", str(folder / "checkpoints"),
                 "--server", f"{server.host}:{server.port}", *conf],
                env=clean | environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def noted(self, what: str) -> dict[int, set[str]]:
        """Partition → the executors that have noted this."""
        found: dict[int, set[str]] = {}
        for path in self.folder.glob(f"{what}-*"):
            _, partition, executor = path.name.split("-")
            found.setdefault(int(partition), set()).add(executor)
        return found

    def executors(self, what: str) -> set[str]:
        if self.process.poll() is not None:
            raise AssertionError(f"the driver has ended:\n{self.text}")
        return {each for executors in self.noted(what).values() for each in executors}

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")[-5000:]

    def finish(self) -> None:
        assert self.process.wait(START_S) == 0, self.text

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def values_of(client: BrokerClient, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for each in client.positions(topic)[topic]:
        offset = each["start"]
        while offset < each["end"]:
            messages = client.fetch(topic, offset, 1000, partition=each["partition"])
            found.update(message.value for message in messages)
            offset = messages[-1].offset + 1
    return found


def test_executors_need_nothing_of_ours_installed(
    server: ServerProcess, client: BrokerClient, cluster: Cluster, tmp_path: Path
) -> None:
    """The package travels with the job; what cannot travel is pyarrow and three small libraries."""
    driver = Driver(server, cluster, tmp_path, PYSPARK_PYTHON=str(bare_python(tmp_path)))
    try:
        driver.finish()
    finally:
        driver.kill()
    assert values_of(client, "copy") == values_of(client, "orders")


def test_losing_a_worker_in_mid_batch_loses_and_doubles_nothing(
    server: ServerProcess, client: BrokerClient, cluster: Cluster, tmp_path: Path
) -> None:
    """Both executors read, each its own partitions; one is killed with half of a task staged, and its
    work is done again by the other, once."""
    (tmp_path / "hold").touch()
    driver = Driver(server, cluster, tmp_path)
    try:
        wait_until(lambda: len(driver.executors("held")) == 2, START_S, "both are in mid-batch")
        held = driver.noted("held")
        assert all(len(executors) == 1 for executors in held.values()), held
        wait_until(
            lambda: client.positions("__staged")["__staged"][0]["end"] > 0,
            60,
            "something is staged",
        )
        assert values_of(client, "copy") == Counter()
        cluster.workers[0].kill()
        (tmp_path / "hold").unlink()
        driver.finish()
    finally:
        driver.kill()
    read = driver.noted("read")
    assert set(read) == set(range(PARTITIONS))
    assert any(len(executors) == 2 for executors in read.values()), read  # one did another's work
    copied = values_of(client, "copy")
    assert copied == values_of(client, "orders")
    assert sum(copied.values()) == PARTITIONS * RECORDS


def bare_python(folder: Path) -> Path:
    """A Python that has what cannot travel, and no site-packages."""
    site = folder / "site"
    site.mkdir()
    for name in TRAVELS_NOT:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        for path in (package, package.with_name(f"{name}.libs")):
            if path.exists():
                (site / path.name).symlink_to(path)
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH"\nexport PYTHONPATH\nexec {sys.executable} -S "$@"\n'
    )
    program.chmod(0o755)
    for module, there in (("headrace", False), ("pyarrow", True)):
        found = subprocess.run([str(program), "-c", f"import {module}"], capture_output=True)
        assert (found.returncode == 0) is there, found.stderr
    return program
