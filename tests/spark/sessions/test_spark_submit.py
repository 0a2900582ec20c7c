"""The commands of docs/spark.md for jobs of your own: ``spark-submit``, and executors with a Python of their own."""

import os
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from headrace.spark import package_zip, use_java
from headrace.testing import ServerProcess, server_process
from tests.spark.sessions.cluster import HOST, Cluster, spark_cluster
from tests.spark.sessions.test_cluster import bare_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(400)]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
SMALL = ("--driver-memory", "512m", "--executor-memory", "512m", "--executor-cores", "1")
JOB = """
    import sys

    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    orders = spark.read.format("headrace").option("topic", "orders").option("servers", sys.argv[1])

    def where(rows):
        import headrace

        for row in rows:
            yield (headrace.__file__, sys.executable)

    places = orders.load().rdd.mapPartitions(where).distinct().collect()
    count = orders.load().count()
    copied = orders.load().select("value").write.format("headrace").option("topic", "copy")
    copied.option("servers", sys.argv[1]).mode("append").save()
    print("READ", count)
    for file, python in places:
        print("PLACE", file, python)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with spark_cluster(tmp_path_factory.mktemp("cluster"), 1) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the tests find the package only where the job brings it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        with process.client() as client:
            client.publish_many("orders", [b"%d" % number for number in range(50)])
            client.create_topic("copy")
        yield process


def submit(
    cluster: Cluster, server: ServerProcess, folder: Path, *options: str, python: str
) -> list[str]:
    """Run the job in another process; returns its lines."""
    job = folder / "job.py"
    job.write_text(textwrap.dedent(JOB))
    clean = {name: each for name, each in os.environ.items() if not name.startswith("PYSPARK_")}
    home = {"JAVA_HOME": str(use_java().home), "SPARK_LOCAL_IP": HOST}
    pythons = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": sys.executable}
    ended = subprocess.run(
        [str(SUBMIT), "--master", cluster.url, *SMALL, *options, str(job), f"{server.host}:{server.port}"],
        env=clean | home | pythons, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, told(ended.stdout + ended.stderr)
    with server.client() as client:
        assert len(list(client.fetch("copy", 0, 100))) == 50
    return ended.stdout.splitlines()


def told(log: str) -> str:
    """What a log says, without the stacks of Java."""
    return "\n".join(line for line in log.splitlines() if not line.startswith("\tat "))[-6000:]


def places(lines: list[str]) -> list[tuple[str, str]]:
    """(file of the package, Python) of each executor."""
    words = [line.split() for line in lines]
    return [(each[1], each[2]) for each in words if each and each[0] == "PLACE"]


def test_py_files_bring_the_package_to_executors(
    server: ServerProcess, cluster: Cluster, tmp_path: Path
) -> None:
    """Their Python has only what is compiled; the driver's has everything."""
    zipped = package_zip(tmp_path)
    python = bare_python(tmp_path)
    lines = submit(
        cluster, server, tmp_path, "--py-files", str(zipped), python=str(python)
    )  # fmt: skip
    assert "READ 50" in lines
    [(file, _)] = places(lines)
    assert "headrace.zip" in file


def test_executors_have_a_python_of_their_own(
    server: ServerProcess, cluster: Cluster, tmp_path: Path
) -> None:
    """A packed environment comes with the job (``--archives``), and the package in it is the one that is used."""
    environment = tmp_path / "packed"
    (environment / "bin").mkdir(parents=True)
    bare_python(environment)
    (environment / "python").unlink()
    package = Path(package_zip.__globals__["__file__"]).parents[3]
    for name in (
        "headrace",
        "pyspark_headrace",
        "pyspark_headrace_archive",
        "pyspark_headrace_lake",
    ):
        (environment / "site" / name).symlink_to(package / name)
    program = environment / "bin" / "python"
    program.write_text(
        '#!/bin/sh\nPYTHONPATH="$(dirname "$(dirname "$0")")/site:$PYTHONPATH"\nexport PYTHONPATH\n'
        f'exec {sys.executable} -S "$@"\n'
    )
    program.chmod(0o755)
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        for path in environment.iterdir():
            packed.add(path, path.name)
    (tmp_path / "environment").symlink_to(environment)  # the driver plans with it, too
    lines = submit(
        cluster, server, tmp_path, "--archives", f"{archive}#environment",
        python="./environment/bin/python",
    )  # fmt: skip
    assert "READ 50" in lines
    [(file, _)] = places(lines)
    assert "/environment/site/headrace/" in file
