"""The processes: three Kafka nodes, three Headrace nodes, and the proxy between them; and how they are broken and mended.

Each Kafka node has a listener for each Headrace node, which it advertises at the proxy, so that every pair has a link of its own:
``n0-k2``. Other nodes reach node 0 by ``to-n0``, clients by ``c-n0``. Kafka nodes talk to each other directly.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from benchmarks.spark.kafka import Node as KafkaNode
from headrace import BrokerClient, HeadraceError
from headrace.testing import DidNotStart, ServerProcess, servers
from tests.faults.cluster.plan import KAFKAS, NODES, SESSION_S, Fault
from tests.faults.cluster.proxy import Proxy
from tests.fixtures.three_nodes import free_port

SLOTS = 6
UP_S = 240.0
"""How long it may take until a node runs again, when Kafka does."""
SLOW_S = 0.15
BY_ITSELF = 70
"""The exit code of a node that wants to be started again (docs/cluster.md)."""
KAFKA = (
    "auto.create.topics.enable=false\ngroup.initial.rebalance.delay.ms=0\n"
    "offsets.topic.replication.factor=3\nunclean.leader.election.enable=false\n"
    "broker.session.timeout.ms=6000\nbroker.heartbeat.interval.ms=500\n"
    "controller.quorum.election.timeout.ms=2000\ncontroller.quorum.fetch.timeout.ms=4000\n"
    "controlled.shutdown.enable=true\nnum.network.threads=2\nnum.io.threads=2\n"
    "background.threads=2\nlog.cleaner.enable=false\n"
)
JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class Stage:
    """Kafka runs from the beginning to the end; ``nodes`` belong to the cluster of one run."""

    def __init__(self, directory: Path):
        self._directory = directory
        servers.START_S = UP_S / 2  # a busy machine, and Kafka away: still no reason to kill it
        self.kafkas = [
            KafkaNode(directory / f"kafka{number}", heap="256m", options=JAVA)
            for number in range(KAFKAS)
        ]
        self._kafka_ports = [[free_port() for _ in range(NODES)] for _ in range(KAFKAS)]
        self.ports = [free_port() for _ in range(NODES)]
        targets = {
            f"n{n}-k{k}": self._kafka_ports[k][n] for n in range(NODES) for k in range(KAFKAS)
        }
        for number, port in enumerate(self.ports):
            targets |= {f"to-n{number}": port, f"c-n{number}": port}
        self._targets = list(targets)
        self.proxy = Proxy(targets)
        self.nodes: list[ServerProcess] = []
        self._broken: set[int] = set()
        """Nodes that a fault has in its hands."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._keeper: threading.Thread | None = None
        self.problems: list[str] = []
        self.ended_by_themselves = 0
        self.slowest_start_s = 0.0
        self._began = time.monotonic()

    # --- Kafka --------------------------------------------------------------------------------
    def start_kafka(self) -> None:
        voters = ",".join(
            f"{number}@127.0.0.1:{each.controller}" for number, each in enumerate(self.kafkas, 1)
        )
        for number, each in enumerate(self.kafkas):
            own = [(f"N{n}", port) for n, port in enumerate(self._kafka_ports[number])]
            listeners = [("INTERNAL", each.port), *own, ("CONTROLLER", each.controller)]
            told = [(name, self.proxy.ports[f"n{name[1:]}-k{number}"]) for name, _ in own]
            each.more = KAFKA + (
                f"node.id={number + 1}\ncontroller.quorum.voters={voters}\n"
                f"listeners={_listeners(listeners)}\n"
                f"advertised.listeners={_listeners([('INTERNAL', each.port), *told])}\n"
                f"listener.security.protocol.map={','.join(f'{n}:PLAINTEXT' for n, _ in listeners)}\n"
                "inter.broker.listener.name=INTERNAL\n"
            )
        with ThreadPoolExecutor(KAFKAS) as pool:
            list(pool.map(KafkaNode.start, self.kafkas))
        admin = AdminClient({"bootstrap.servers": self.kafkas[0].servers})
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline:
            with contextlib.suppress(KafkaException):
                if len(admin.list_topics(timeout=5).brokers) == KAFKAS:
                    return
            time.sleep(0.2)
        raise AssertionError("three Kafka nodes did not find each other")

    # --- nodes --------------------------------------------------------------------------------
    def address(self, number: int) -> str:
        """As the node advertises it."""
        return f"127.0.0.1:{self.proxy.ports[f'to-n{number}']}"

    @property
    def servers(self) -> list[str]:
        """As clients know them."""
        return [f"127.0.0.1:{self.proxy.ports[f'c-n{number}']}" for number in range(NODES)]

    def start_nodes(self, cluster: str) -> None:
        for number, port in enumerate(self.ports):
            links = [f"127.0.0.1:{self.proxy.ports[f'n{number}-k{k}']}" for k in range(KAFKAS)]
            settings: dict[str, Any] = {
                "engine": "kafka",
                "kafka_servers": ",".join(links),
                "cluster": cluster,
                "slots": SLOTS,
                "kafka_session": int(SESSION_S),
                "port": port,
                "advertise": self.address(number),
            }
            data = self._directory / cluster / f"node{number}"
            self.nodes.append(ServerProcess(data, False, settings))
        self.bring_up(0)  # it founds the cluster
        with ThreadPoolExecutor(NODES) as pool:
            list(pool.map(self.bring_up, range(1, NODES)))
        self._ending.clear()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def bring_up(self, number: int) -> None:
        """As a service manager does it: again and again."""
        node = self.nodes[number]
        began = time.monotonic()
        while True:
            with contextlib.suppress(DidNotStart, subprocess.TimeoutExpired):
                node.start()
                self.slowest_start_s = max(self.slowest_start_s, time.monotonic() - began)
                self.log(f"node {number} runs, pid {node.pid}")
                return
            if time.monotonic() - began > UP_S:
                self.problems.append(f"node {number} did not start within {UP_S:g} seconds")
                raise AssertionError(self.problems[-1])

    def _keep(self) -> None:
        """Start nodes that have ended by themselves."""
        while not self._ending.wait(0.3):
            for number, node in enumerate(self.nodes):
                with self._lock:
                    if number in self._broken or node.is_running:
                        continue
                    self._broken.add(number)
                code = node.wait()
                self.log(f"node {number} has ended by itself with code {code}")
                self.ended_by_themselves += 1
                if code != BY_ITSELF:
                    self.problems.append(f"node {number} ended by itself with code {code}")
                try:
                    self.bring_up(number)
                finally:
                    self._broken.discard(number)

    def _seize(self, number: int) -> None:
        """Wait until nobody else has the node in hand."""
        while True:
            with self._lock:
                if number not in self._broken and self.nodes[number].is_running:
                    self._broken.add(number)
                    return
            time.sleep(0.05)

    def stop_nodes(self) -> None:
        self._ending.set()
        if self._keeper is not None:
            self._keeper.join()
        for number, node in enumerate(self.nodes):
            node.kill()
            shutil.copy(node._directory / "stderr", self._directory / f"node{number}.log")
            shutil.rmtree(node._directory, ignore_errors=True)
        self.nodes = []

    def log(self, line: str) -> None:
        with (self._directory / "stage.log").open("a") as file:
            file.write(f"{time.monotonic() - self._began:8.2f} {time.strftime('%X')} {line}\n")

    def close(self) -> None:
        self.stop_nodes()
        for kafka in self.kafkas:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                kafka.stop(signal.SIGKILL)
        self.proxy.close()

    # --- breaking -----------------------------------------------------------------------------
    def break_for_a_while(self, fault: Fault) -> dict[str, Any]:
        """Break, wait, mend. What is to be said of it in the history."""
        time.sleep(fault.after)
        told: dict[str, Any] = {"what": fault.what, "who": list(fault.who), "how": fault.how}
        breaking = getattr(self, "_" + fault.what.replace(" ", "_"))
        told |= _now("at")
        self.log(f"begins: {fault}")
        breaking(fault, told)
        self.log(f"ends: {fault}")
        return told | _now("until") | {"holds": fault.holds}

    def _with_node(self, fault: Fault, told: dict[str, Any], end: Callable[[], object]) -> None:
        (number,) = fault.who
        self._seize(number)
        told |= _now("at")
        try:
            end()
            time.sleep(fault.seconds)
            self.bring_up(number)
        finally:
            self._broken.discard(number)

    def _node_killed(self, fault: Fault, told: dict[str, Any]) -> None:
        self._with_node(fault, told, lambda: self.nodes[fault.who[0]].kill())

    def _node_restarted(self, fault: Fault, told: dict[str, Any]) -> None:
        self._with_node(fault, told, lambda: self._terminate(fault.who[0]))

    def _terminate(self, number: int) -> None:
        try:
            code = self.nodes[number].terminate()
        except subprocess.TimeoutExpired:
            self.problems.append(f"node {number} did not end within 30 seconds")
            self.nodes[number].kill()
            return
        if code:
            self.log(f"node {number} was stopped and ended with code {code}")

    def _node_drained(self, fault: Fault, told: dict[str, Any]) -> None:
        """Drained through another node, then restarted, as an upgrade does it."""
        (number,) = fault.who

        def drain() -> None:
            asked = f"127.0.0.1:{self.ports[(number + 1) % NODES]}"
            try:
                with BrokerClient(asked, request_timeout=12) as client:
                    client.drain_node(self.address(number))
            except HeadraceError as error:
                self.log(f"node {number} is not drained: {error}")
            else:
                told["drained"] = time.monotonic_ns()
            time.sleep(fault.seconds)
            self._terminate(number)

        self._with_node(fault, told, drain)

    def _node_frozen(self, fault: Fault, told: dict[str, Any]) -> None:
        (number,) = fault.who
        self._seize(number)
        told |= _now("at")
        try:
            self.nodes[number].suspend()
            time.sleep(fault.seconds)
            self.nodes[number].resume()
        finally:
            self._broken.discard(number)

    def _kafka_node_killed(self, fault: Fault, told: dict[str, Any]) -> None:
        self._kafka_killed(fault.who, fault.seconds)

    def _kafka_node_frozen(self, fault: Fault, told: dict[str, Any]) -> None:
        self._kafka_frozen(fault.who, fault.seconds)

    def _two_kafka_nodes(self, fault: Fault, told: dict[str, Any]) -> None:
        broken = self._kafka_killed if fault.how == "SIGKILL" else self._kafka_frozen
        broken(fault.who, fault.seconds)

    def _kafka_killed(self, numbers: Iterable[int], seconds: float) -> None:
        for number in numbers:
            self.kafkas[number].stop(signal.SIGKILL)
        time.sleep(seconds)
        with ThreadPoolExecutor(KAFKAS) as pool:
            list(pool.map(KafkaNode.start, [self.kafkas[number] for number in numbers]))

    def _kafka_frozen(self, numbers: Iterable[int], seconds: float) -> None:
        for number in numbers:
            self.kafkas[number].send(signal.SIGSTOP)
        time.sleep(seconds)
        for number in numbers:
            self.kafkas[number].send(signal.SIGCONT)

    def _link(self, fault: Fault, links: list[str]) -> None:
        self.proxy.set(links, fault.how, SLOW_S)
        try:
            time.sleep(fault.seconds)
        finally:
            self.proxy.set(links, "open")

    def _node_and_kafka(self, fault: Fault, told: dict[str, Any]) -> None:
        self._link(fault, [f"n{fault.who[0]}-k{k}" for k in range(KAFKAS)])

    def _node_and_one_kafka_node(self, fault: Fault, told: dict[str, Any]) -> None:
        self._link(fault, [f"n{fault.who[0]}-k{fault.who[1]}"])

    def _nodes(self, fault: Fault, told: dict[str, Any]) -> None:
        self._link(fault, [f"to-n{fault.who[0]}"])

    def _clients(self, fault: Fault, told: dict[str, Any]) -> None:
        self._link(fault, [f"c-n{fault.who[0]}"])


def _now(name: str) -> dict[str, int]:
    return {name: time.monotonic_ns(), f"{name}_ms": time.time_ns() // 1_000_000}


def _listeners(names: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in names)
