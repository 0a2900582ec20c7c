"""The servers: how each is fetched, configured and started. Their clients are in modules of their own, which a
process that drives one peer imports without the rest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import ClassVar

import pyspark

from benchmarks.harness import ROOT, commit_of
from benchmarks.peers.fetching import debian, go, java, maven
from benchmarks.peers.server import Missing, Server, child, end, free_port, output_of
from benchmarks.spark.kafka import KAFKA, SCALA

_NATS = "github.com/nats-io/nats-server/v2@latest"
# Those of Kafka's own start script.
_JAVA_OPTIONS = (
    "-Xms1g", "-Xmx1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
)  # fmt: skip


class Headrace(Server):
    name = "Headrace"
    modes: ClassVar = {
        "fsync": "`durability=always`, the default: each answer comes after fdatasync; waiting publishes share one",
        "default": "`durability=interval`: synced every 100 ms",
    }
    clients = ("headrace", "uvloop")

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self.http_port = free_port()

    @classmethod
    def version(cls) -> str:
        return f"commit {commit_of(ROOT)}"

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "headrace", "serve", "--data-dir", str(self.directory / "data"),
            "--port", str(self.port), "--http-port", str(self.http_port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"HEADRACE_RETENTION_HOURS": "none"}


class Redis(Server):
    name = "Redis"
    modes: ClassVar = {
        "fsync": "`appendonly yes`, `appendfsync always`",
        "default": "`appendonly yes`, `appendfsync everysec`: the setting that Redis's documentation advises",
    }
    clients = ("redis", "hiredis")

    @classmethod
    def fetch(cls) -> None:
        debian("redis-server", "redis-server")

    @classmethod
    def version(cls) -> str:
        return output_of([debian("redis-server", "redis-server"), "--version"], 30).split()[2][2:]

    def command(self) -> list[str]:
        return [
            debian("redis-server", "redis-server"), "--bind", "127.0.0.1", "--port", str(self.port),
            "--dir", str(self.directory), "--save", "", "--appendonly", "yes",
            "--appendfsync", "always" if self.mode == "fsync" else "everysec",
        ]  # fmt: skip

    def serves(self) -> bool:
        """After a restart the port is open before the data is loaded."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100).startswith(b"+PONG")
        except OSError:
            return False


class Nats(Server):
    name = "NATS JetStream"
    modes: ClassVar = {
        "fsync": "file storage, `sync_interval: always`",
        "default": "file storage, `sync_interval` of 2 minutes (the default)",
    }
    clients = ("nats-py", "uvloop")

    @classmethod
    def fetch(cls) -> None:
        go("nats-server", _NATS)

    @classmethod
    def version(cls) -> str:
        return output_of([go("nats-server", _NATS), "--version"], 30).split()[-1]

    def command(self) -> list[str]:
        sync = "sync_interval: always" if self.mode == "fsync" else ""
        config = self.directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.directory / "data"}", {sync} }}\n'
        )
        return [go("nats-server", _NATS), "-c", str(config)]


class RabbitMq(Server):
    name = "RabbitMQ"
    modes: ClassVar = {
        "fsync": "quorum queue of one node, publisher confirms: each confirm after fsync",
        "default": "durable classic queue, persistent messages, publisher confirms; as a log: a stream",
    }
    clients = ("pika",)
    is_one_store = False

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self.http_port, self._distribution, self._names = free_port(), free_port(), free_port()
        self._epmd: Popen[bytes] | None = None

    @classmethod
    def fetch(cls) -> None:
        debian("rabbitmq-server", "rabbitmq-server")
        debian("epmd", "erlang-base")
        _rabbitmq()

    @classmethod
    def version(cls) -> str:
        return _rabbitmq().parent.parent.name.rpartition("-")[2]

    def prepare(self) -> None:
        (self.directory / "plugins").write_text("[rabbitmq_management].\n")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\nmanagement.tcp.ip = 127.0.0.1\n"
            f"management.tcp.port = {self.http_port}\nloopback_users = none\n"
            "vm_memory_high_watermark.relative = 0.6\ndisk_free_limit.absolute = 1GB\n"
        )

    def launch(self) -> None:
        """With a port mapper of its own: Erlang would start a daemon that outlives it."""
        command = [
            debian("epmd", "erlang-base"),
            "-port",
            str(self._names),
            "-address",
            "127.0.0.1",
        ]
        self._epmd = child(command, {}, None, DEVNULL)
        super().launch()

    def kill(self) -> None:
        super().kill()
        epmd, self._epmd = self._epmd, None
        if epmd is not None:
            end(epmd)

    def command(self) -> list[str]:
        return [str(_rabbitmq())]

    def environment(self) -> dict[str, str]:
        home = self.directory
        return {
            "HOME": str(home),
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._names),
        }

    def serves(self) -> bool:
        """The port is open before clients are served."""
        import pika

        if not super().serves():
            return False
        try:
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port)).close()
        except Exception:
            return False
        return True


def _rabbitmq() -> Path:
    """Debian's wrapper changes to the user rabbitmq, who may not write here; the server itself does not."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if not found:
        raise Missing("the server of Debian's package rabbitmq-server is not in /usr/lib/rabbitmq")
    return found[-1]


class Kafka(Server):
    name = "Kafka"
    modes: ClassVar = {
        "fsync": "`acks=all`, `flush.messages=1`: each batch is synced before its answer",
        "default": "`acks=all` on one node, never synced by itself (the default)",
    }
    clients = ("confluent-kafka",)

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self._controller = free_port()

    @classmethod
    def fetch(cls) -> None:
        _kafka_jars()

    @classmethod
    def version(cls) -> str:
        return KAFKA

    def _program(self) -> list[str]:
        return [java(), *_JAVA_OPTIONS, "-cp", os.pathsep.join(_kafka_jars())]

    @property
    def _settings(self) -> Path:
        return self.directory / "server.properties"

    def prepare(self) -> None:
        self._settings.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.voters=1@127.0.0.1:{self._controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller}\n"
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{self.port}\n"
            "controller.listener.names=CONTROLLER\n"
            f"log.dirs={self.directory / 'data'}\n"
            "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=4\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
            "share.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
            "group.initial.rebalance.delay.ms=0\nauto.create.topics.enable=false\n"
            "log.segment.delete.delay.ms=1000\n"
        )
        subprocess.run(
            [*self._program(), "kafka.tools.StorageTool", "format", "-t", "SGVhZHJhY2UtYmVuY2hfMQ",
             "-c", str(self._settings)],
            check=True, capture_output=True,
        )  # fmt: skip

    def command(self) -> list[str]:
        return [*self._program(), "kafka.Kafka", str(self._settings)]

    def serves(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if not super().serves():
            return False
        try:
            AdminClient({"bootstrap.servers": self.address, "log_level": 0}).list_topics(timeout=2)
        except KafkaException:
            return False
        return True


def _kafka_jars() -> list[str]:
    found = maven(f"kafka-{KAFKA}", f"org.apache.kafka:kafka_{SCALA}:{KAFKA}")
    scala = (Path(pyspark.__file__).parent / "jars").glob("scala-library-*.jar")
    return [*found, *map(str, scala)]


BROKERS: dict[str, type[Server]] = {
    "headrace": Headrace,
    "redis": Redis,
    "nats": Nats,
    "rabbitmq": RabbitMq,
    "kafka": Kafka,
}
