"""A real standalone Spark cluster on loopback: a master and workers, each a process of its own.

``make cluster-spark`` (``python -m tests.spark.sessions.cluster``) starts one and keeps it until Ctrl-C, to try
pipelines on: ``headrace pipeline run FILE --master spark://127.0.0.1:7077 --checkpoint-dir DIR``. Tests
use :func:`spark_cluster`.

Everything listens on 127.0.0.1 alone. A worker and the executors that it starts are one group of processes,
so :meth:`Worker.kill` takes a whole "machine" away at once; an executor's Python processes end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark

from headrace.spark.sessions.java import find_java
from headrace.testing import wait_until

HOST = "127.0.0.1"
START_S = 90.0
STOP_S = 30.0
DAEMON = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Small and soon there: a master and a worker have little to do."""
_SPARK_HOME = Path(pyspark.__file__).parent
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Process:
    """One of Spark's own, in a group of its own."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str):
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(_SPARK_HOME / "bin" / "spark-class"), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The process and all that it has started, at once."""
        if self.is_running:
            os.killpg(self.process.pid, number)
        self.process.wait(STOP_S)

    def stop(self) -> None:
        try:
            self.kill(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.kill()


class Worker(Process):
    pass


@dataclass
class Cluster:
    url: str
    web: str
    master: Process
    workers: list[Worker] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """What the master says of itself."""
        with _direct.open(f"{self.web}/json/", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def count_workers(self) -> int:
        for each in (self.master, *self.workers):
            if not each.is_running:
                raise AssertionError(f"a process of Spark ended:\n{each.log.read_text()[-2000:]}")
        with suppress(OSError, ValueError):
            return int(self.state()["aliveworkers"])
        return 0


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _environment() -> dict[str, str]:
    """Without what belongs to a session of this process."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("PYSPARK_")}
    return kept | {
        "JAVA_HOME": str(find_java(os.environ).home),
        "SPARK_HOME": str(_SPARK_HOME),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": DAEMON,
    }


@contextmanager
def spark_cluster(
    directory: Path,
    workers: int = 2,
    *,
    port: int = 0,
    web_port: int = 0,
    cores: int = 1,
    memory: str = "1g",
) -> Iterator[Cluster]:
    """A master and workers, ready; all of them end with it."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    port, web_port = port or _free_port(), web_port or _free_port()
    with ExitStack() as stack:

        def started(process: Any) -> Any:
            stack.callback(process.stop)
            return process

        url, web = f"spark://{HOST}:{port}", f"http://{HOST}:{web_port}"
        master = started(
            Process(
                directory / "master.log", environment, "org.apache.spark.deploy.master.Master",
                "--host", HOST, "--port", str(port), "--webui-port", str(web_port),
            )
        )  # fmt: skip
        cluster = Cluster(url, web, master)
        for number in range(workers):
            cluster.workers.append(
                started(
                    Worker(
                        directory / f"worker-{number}.log", environment,
                        "org.apache.spark.deploy.worker.Worker", url, "--host", HOST,
                        "--cores", str(cores), "--memory", memory, "--webui-port", str(_free_port()),
                        "--work-dir", str(directory / f"worker-{number}"),
                    )
                )
            )  # fmt: skip
        wait_until(lambda: cluster.count_workers() == workers, START_S, "all workers are there")
        yield cluster


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.sessions.cluster",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each worker")
    parser.add_argument("--memory", default="1g", help="of each worker")
    parser.add_argument("--port", type=int, default=7077)
    parser.add_argument("--web-port", type=int, default=8090, help="the master's page")
    given = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="headrace-cluster-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with spark_cluster(
            directory, given.workers, port=given.port, web_port=given.web_port, cores=given.cores,
            memory=given.memory,
        ) as cluster:  # fmt: skip
            print(f"{cluster.url} with {given.workers} workers; its page is {cluster.web}")
            print(f"headrace pipeline run FILE --master {cluster.url} --checkpoint-dir {directory}")
            print("Ctrl-C ends it.", flush=True)
            cluster.master.process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
