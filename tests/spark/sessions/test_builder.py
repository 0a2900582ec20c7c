"""``session()``: its settings, what goes to executors, and checkpoints that survive a kill."""

import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.spark import package_zip, session
from headrace.spark.sessions.builder import (
    FORMATS,
    PACKAGES,
    is_local,
    is_loopback,
    settings,
    worker_python,
)

ONCE_PER_KILL = 40_000
"""Bytes of a file: enough for a kill to come in mid-write."""


# --- settings -------------------------------------------------------------------------------------
def test_settings_of_a_local_session() -> None:
    """Tasks may fail and be tried again; nothing listens beyond this machine."""
    found = settings()
    cores = len(os.sched_getaffinity(0))
    assert found["spark.master"] == f"local[{cores},4]"
    assert found["spark.driver.bindAddress"] == found["spark.driver.host"] == "127.0.0.1"
    assert found["spark.ui.enabled"] == "false"
    assert found["spark.sql.session.timeZone"] == "UTC"
    assert 1024 <= int(found["spark.driver.memory"].removesuffix("m")) <= 4096
    assert "FileSystemBased" in found["spark.sql.streaming.checkpointFileManagerClass"]
    assert settings(ui=True)["spark.ui.enabled"] == "true"


def test_settings_for_a_cluster() -> None:
    """Its memory, addresses, number of partitions and checkpoints are its own business."""
    found = settings("spark://10.0.0.5:7077", app_name="nightly")
    assert found["spark.app.name"] == "nightly"
    ours = {"spark.driver.host", "spark.driver.memory", "spark.sql.shuffle.partitions"}
    assert not ours & found.keys()
    assert not [name for name in found if "checkpoint" in name or "hadoop" in name]
    assert settings("spark://127.0.0.1:7077")["spark.driver.host"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("master", "local", "loopback"),
    [
        ("local", True, True),
        ("local[2]", True, True),
        ("local[*,4]", True, True),
        ("local-cluster[2,1,1024]", False, True),
        ("spark://localhost:7077", False, True),
        ("spark://127.0.0.1:1,[::1]:2", False, True),
        ("spark://127.0.0.1:1,10.0.0.5:2", False, False),
        ("spark://master.example:7077", False, False),
        ("yarn", False, False),
        ("k8s://https://10.0.0.1", False, False),
    ],
)
def test_kinds_of_masters(master: str, local: bool, loopback: bool) -> None:
    assert (is_local(master), is_loopback(master)) == (local, loopback)


@pytest.mark.parametrize("name", ["executor.memory", "shuffle"])
def test_what_is_no_setting(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no setting of Spark"):
        session(**{name: 1})


def test_workers_use_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the zip that Spark puts in front of it; elsewhere, the Python that is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    code = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:], sys.executable)"
    paths = "/x/lib/pyspark.zip:/x/lib/py4j-0.10-src.zip:/my own/path:/x/core.jar"
    ran = subprocess.run(
        [worker_python("local[2]"), "-c", code, "a b", "*"],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == f"/my own/path:/x/core.jar ['a b', '*'] {sys.executable}\n"
    assert worker_python("spark://10.0.0.5:7077") == sys.executable
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert worker_python("local[2]") == sys.executable


@pytest.mark.xdist_group("spark")
def test_a_session_that_is_there(spark: Any) -> None:
    """It is the one; what can still be set is set, with underscores or points."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        again = session("other", "local[7]", spark_sql_shuffle_partitions=3, spark_ui_enabled=True)
        assert again.sparkContext is spark.sparkContext
        assert again.conf.get("spark.sql.shuffle.partitions") == "3"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)


def test_every_format_is_found() -> None:
    """Spark looks for ``DefaultSource``, and for nothing else."""
    modules = [importlib.import_module(name) for name in FORMATS]
    names = [module.DefaultSource.name() for module in modules]
    assert names == ["headrace", "headrace_lake", "headrace_archive"]
    assert not any(hasattr(module, "AnotherSource") for module in modules)


# --- what goes to executors -----------------------------------------------------------------------
def test_the_package_as_a_zip(tmp_path: Path) -> None:
    """A Python that has no Headrace of its own runs the source and the sink from it."""
    path = package_zip(tmp_path)
    names = zipfile.ZipFile(path).namelist()
    assert "headrace/spark/source/data_source.py" in names
    assert {f"{package}/__init__.py" for package in PACKAGES} <= set(names)
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]
    code = """
        import sys
        sys.path = [p for p in sys.path if not p.endswith("/src")]
        sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
        sys.path.insert(0, sys.argv[1])
        import headrace.client.threads, headrace.spark.source.data_source, headrace.spark.sink.writers
        import importlib.metadata, pyspark_headrace
        print(headrace.__file__)
        print(importlib.metadata.version("headrace"))
        print(pyspark_headrace.DefaultSource.__name__)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        f"{path}/headrace/__init__.py",
        importlib.metadata.version("headrace"),
        "HeadraceDataSource",
    ]


def test_the_zip_depends_on_the_source_alone(tmp_path: Path) -> None:
    one, other = package_zip(tmp_path / "a"), package_zip(tmp_path / "b")
    assert one.read_bytes() == other.read_bytes()


# --- checkpoints ------------------------------------------------------------------------------------
WRITER = """
    import sys
    from headrace.spark import session

    folder, size = sys.argv[1], int(sys.argv[2])
    spark = session("w", "local[1]", log_file=folder + ".log", spark_driver_memory="512m")
    jvm = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path
    streaming = jvm.org.apache.spark.sql.execution.streaming.checkpointing
    managers = getattr(getattr(streaming, "CheckpointFileManager$"), "MODULE$")
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    manager = managers.create(path(folder), conf)
    print(manager.getClass().getSimpleName(), spark.sparkContext._gateway.proc.pid, flush=True)
    number = 0
    while True:
        number += 1
        overwrites = number % 3 == 0
        out = manager.createAtomic(path(folder, "same" if overwrites else str(number)), overwrites)
        out.write(bytes([number % 251]) * size)
        out.close()
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_checkpoint_survives_a_kill(tmp_path: Path) -> None:
    """Spark is killed while it writes: every file that has its name is whole.

    Repeat it with ``for i in $(seq 40)`` to believe it; 36 of 40 kills came in mid-write.
    """
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(ONCE_PER_KILL)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        kind, pid = process.stdout.readline().split()
        assert kind == "FileSystemBasedCheckpointFileManager"
        for line in process.stdout:
            if int(line) == 50:
                os.kill(int(pid), signal.SIGKILL)
                break
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    whole = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert len(whole) > 30
    for path in whole:
        content = path.read_bytes()
        assert len(content) == ONCE_PER_KILL
        assert len(set(content)) == 1
        if path.name != "same":
            assert content[0] == int(path.name) % 251
