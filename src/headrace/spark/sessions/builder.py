"""``session()``: a Spark session in one line, set up for Headrace::

    from headrace.spark import session

    spark = session()                                              # all cores of this machine
    spark = session("nightly", master="spark://10.0.0.5:7077")     # a cluster
    spark = session(ui=True, **{"spark.sql.shuffle.partitions": 8})
    spark = session(master="sc://10.0.0.5:15002")                  # a server of Spark Connect

What it does, beyond ``SparkSession.builder.getOrCreate()``:

- **Python and Java.** Workers run the Python that calls this; Java is found (:mod:`headrace.spark.sessions.java`).
  On this machine workers use PySpark as it is installed. Spark would have them use a copy of it in a
  zip, which each of them compiles anew: with it, a query starts in 1.4 seconds, without it in 0.8.
- **Local masters** (the default is ``local[cores,4]``; the 4 lets a task fail and be tried again, Spark's
  own default does not) listen on loopback alone, and keep checkpoints the fast way, see below.
- **Other masters** get this package by themselves: :func:`package_zip` is sent to the executors, so
  that they run the same version as the driver and nothing must be installed there but what cannot
  travel in a zip (``pyarrow``, ``google-crc32c``, ``msgspec``, ``orjson``, ``zstandard``). A master or driver on
  loopback is bound there too.
- **Under spark-submit** what was decided there stays: master, memory, Java, and every setting given.

Settings of the caller win over all of it. If a session exists, its context cannot be changed any more:
SQL settings are set, and the session is returned.

Checkpoints on a local disk
===========================
Spark's default (``FileContextBasedCheckpointFileManager``) forks a ``chmod`` for each of the files that a
batch writes, because Hadoop's native library is missing: 200 to 280 ms a batch where the work is
90. ``FileSystemBasedCheckpointFileManager`` over ``RawLocalFileSystem`` does not. Is it as safe?

- Both write a hidden temporary file in the same directory, close it, and rename it. In the raw file
  system that is ``rename(2)``: a process that is killed leaves the old file or the new one, never
  half of one. Killed 40 times, 36 of them in mid-write, all of 3,910 files were whole (``make slow``
  has one such kill: tests/spark/sessions/test_builder.py).
- Both look whether the target exists before they rename, which two drivers at once could trick. So
  neither is a lock, and two drivers must not share a checkpoint in either case.
- *Neither* syncs to disk. After a power cut the last files of a checkpoint may be empty or gone, with
  either. So Headrace's own sinks sync the offsets of a batch before they commit it.
- The raw one keeps no ``.crc`` files beside what it writes. The default does not either for checkpoints.

So it is as safe, and it is on for local masters. Elsewhere (HDFS, object stores) the default's rename
has properties of its own, and it is left alone.

Rejected: a session that is a class of its own (everything else takes a plain SparkSession);
RocksDB for state by default (it pays from millions of keys on, and costs each small batch; say
``spark.sql.streaming.stateStore.providerClass``).
"""

from __future__ import annotations

import atexit
import importlib.metadata
import ipaddress
import os
import shlex
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import limits
from headrace.errors import HeadraceError, InvalidArgument
from headrace.spark.sessions import arrow_batches
from headrace.spark.sessions.connect import connected
from headrace.spark.sessions.java import use_java
from headrace.spark.sessions.shell_scripts import kept

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS = ("pyspark_headrace", "pyspark_headrace_lake", "pyspark_headrace_archive")
PACKAGES = ("headrace", *FORMATS)
TASK_FAILURES_MAX = 4
DRIVER_MEMORY_MAX_MB = 4096
DRIVER_MEMORY_MIN_MB = 1024
_STREAMING = "org.apache.spark.sql.execution.streaming"
_CHECKPOINT_MANAGERS = (
    f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    f"{_STREAMING}.FileSystemBasedCheckpointFileManager",  # in Spark 4.0
)
_EPOCH = (1980, 1, 1, 0, 0, 0)


class NoSpark(HeadraceError, code="no_spark"):
    """PySpark is not installed, or it could not be started."""


def session(
    app_name: str = "headrace",
    master: str | None = None,
    *,
    ui: bool = False,
    log_level: str = "WARN",
    log_file: str | os.PathLike[str] | None = None,
    **conf: Any,
) -> SparkSession:
    """A Spark session that is set up for Headrace.

    ``ui`` serves Spark's web page; ``log_file`` takes what Spark would write to the terminal. All
    other keywords are Spark's own settings (``**{"spark.executor.memory": "4g"}``, or with
    underscores for points: ``spark_executor_memory="4g"``).
    """
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NoSpark(
            f"PySpark cannot be imported ({error}): pip install 'headrace[spark]', or make spark in a checkout"
        ) from None
    given = {_key(name): _text(value) for name, value in conf.items()}
    remote = master or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith("sc://"):
        try:
            return connected(remote, settings(app_name=app_name) | given)
        except ImportError as error:
            raise NoSpark(f"{error}: pip install 'pyspark[connect]'") from None
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # the JVM runs already
    if is_active():
        spark = SparkSession.builder.getOrCreate()
        for name, value in given.items():
            if spark.conf.isModifiable(name):
                spark.conf.set(name, value)
        return spark
    if submitted:
        SparkContext._ensure_initialized()
        decided = dict(SparkConf().getAll())
        master = master or decided.get("spark.master")
        given = decided | given
    else:
        use_java()
    wanted = settings(master, app_name=app_name, ui=ui, log_level=log_level) | given
    if "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = worker_python(wanted["spark.master"])
    if is_loopback(wanted["spark.master"]):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if is_local(wanted["spark.master"]):
        return _start(wanted, None if submitted else log_file)
    archive = package_zip()
    atexit.register(shutil.rmtree, archive.parent, ignore_errors=True)  # executors fetch it
    with _on_path(archive):
        spark = _start(wanted, None if submitted else log_file)
    spark.sparkContext.addPyFile(str(archive))
    if submitted:
        for name in FORMATS:
            spark.dataSource.register(import_module(name).DefaultSource)
    return spark


@contextmanager
def _on_path(archive: Path) -> Iterator[None]:
    """The JVM that starts here looks for formats with ``PYSPARK_PYTHON``, and not in the files that are
    sent to executors. That Python may be another one without Headrace, so it gets the path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(archive), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def is_active() -> bool:
    """Whether this process has a session."""
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote
    except ImportError:
        return False
    if is_remote():  # Spark Connect
        return SparkSession.getActiveSession() is not None
    return SparkContext._active_spark_context is not None


def _start(wanted: Mapping[str, str], log_file: str | os.PathLike[str] | None) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf()
    for name, value in wanted.items():
        conf.set(name, value)
    try:
        if log_file is not None and SparkContext._gateway is None:
            with open(log_file, "ab") as log:
                gateway = launch_gateway(conf, {"stdout": log, "stderr": log})  # type: ignore[no-untyped-call]
            SparkContext(conf=conf, gateway=gateway)
        return SparkSession.builder.config(conf=conf).getOrCreate()
    except PySparkRuntimeError as error:
        where = "above" if log_file is None else f"in {os.fspath(log_file)}"
        raise NoSpark(f"Spark did not start: {error}. What it says itself stands {where}") from None


# --- Python ---------------------------------------------------------------------------------------
_WORKER = """#!/bin/sh
# PySpark is installed here: what Spark puts on the path in front of it is the same, but not compiled.
paths=
IFS=:
for path in $PYTHONPATH; do
    case $path in
    */pyspark.zip | */py4j-*-src.zip) ;;
    *) paths=$paths${{paths:+:}}$path ;;
    esac
done
unset IFS
PYTHONPATH=$paths
export PYTHONPATH
exec {python} "$@"
"""


def worker_python(master: str) -> str:
    """The program that Spark starts as its Python."""
    import pyspark

    installed = Path(pyspark.__file__).parent
    home = os.environ.get("SPARK_HOME", str(installed))
    if not is_local(master) or Path(home).resolve() != installed.resolve():
        return sys.executable  # it runs on other machines, or another Spark is meant
    return str(kept("python/python", _WORKER.format(python=shlex.quote(sys.executable))))


# --- settings -------------------------------------------------------------------------------------
def settings(
    master: str | None = None,
    *,
    app_name: str = "headrace",
    ui: bool = False,
    log_level: str = "WARN",
) -> dict[str, str]:
    """The settings of a session, as Spark takes them."""
    cores = limits.cores()
    master = master or f"local[{cores},{TASK_FAILURES_MAX}]"
    found = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.api.mode": "classic",
        "spark.log.level": log_level,
        "spark.ui.enabled": _text(ui),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # Spark and Python on one machine talk over a Unix socket: faster, and nothing listens.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # An Arrow batch on its way to Python is bounded by rows alone: arrow_batches.py says why.
        arrow_batches.ROWS: str(arrow_batches.ROWS_MAX),
        arrow_batches.BYTES: str(arrow_batches.UNMEASURED),
        "spark.sql.streaming.metricsEnabled": "true",
    }
    if is_loopback(master):
        found |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if is_local(master):
        found |= {
            "spark.driver.memory": f"{_driver_memory_mb()}m",
            # Small batches are shuffled, and state is kept, in as many parts as there are cores.
            "spark.sql.shuffle.partitions": str(max(cores, 2)),
            "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        }
        manager = _checkpoint_manager()
        if manager is not None:
            found["spark.sql.streaming.checkpointFileManagerClass"] = manager
    return found


@cache
def _checkpoint_manager() -> str | None:
    """The class that this Spark has; None if its jars are not found."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    for jar in home.glob("jars/spark-sql_*.jar"):
        with zipfile.ZipFile(jar) as archive:
            names = set(archive.namelist())
        for name in _CHECKPOINT_MANAGERS:
            if f"{name.replace('.', '/')}.class" in names:
                return name
    return None


def is_local(master: str) -> bool:
    """Driver and executors are one process."""
    return master == "local" or master.startswith("local[")


def is_loopback(master: str) -> bool:
    """Nothing of it is on another machine."""
    if master.startswith("local"):  # local-cluster[…] too
        return True
    if not master.startswith("spark://"):
        return False
    hosts = [part.rpartition(":")[0].strip("[]") for part in master[8:].split(",")]
    return all(_is_loopback_host(host) for host in hosts)


def _is_loopback_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _driver_memory_mb() -> int:
    """A quarter of the machine, within bounds: in local mode the driver does all the work."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return min(max(total // 4, DRIVER_MEMORY_MIN_MB), DRIVER_MEMORY_MAX_MB)


def _key(name: str) -> str:
    name = name if "." in name else name.replace("_", ".")
    if not name.startswith("spark."):
        raise InvalidArgument(
            f"{name!r} is no setting of Spark: they begin with 'spark.', "
            'as in session(**{"spark.executor.memory": "4g"})'
        )
    return name


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- for executors --------------------------------------------------------------------------------
def package_zip(folder: str | os.PathLike[str] | None = None) -> Path:
    """This package as a zip for ``addPyFile`` or ``spark-submit --py-files``; returns its path.

    The bytes depend on the source alone. Without a folder it goes into a temporary one.
    """
    target = Path(folder or tempfile.mkdtemp(prefix="headrace-")) / "headrace.zip"
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_suffix(f".{os.getpid()}.tmp")
    with zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_contents()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    os.replace(half, target)
    return target


def _contents() -> Iterator[tuple[str, bytes]]:
    source = Path(__file__).parents[3]
    for package in PACKAGES:
        for path in (source / package).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield str(path.relative_to(source)), path.read_bytes()
    try:
        distribution = importlib.metadata.distribution("headrace")
    except importlib.metadata.PackageNotFoundError:
        return  # it runs from a zip itself
    metadata = distribution.read_text("METADATA") or ""
    yield f"headrace-{distribution.version}.dist-info/METADATA", metadata.encode()
