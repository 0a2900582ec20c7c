"""The demo: four services, one broker, a worker that is killed, a poison message, and Spark.

    make demo                           or: python examples/demo
    make demo ARGS="--no-spark"         the services only, in half a minute
    make demo ARGS="--patience 300"     on a busy machine, where Spark takes longer to start
    make demo ARGS="--stay 600"         the broker stays up for ten minutes afterwards

The services (services.py) and the broker are processes; Spark runs the pipelines of pipelines.toml. All of them
use free ports and a temporary directory, and end with this program: at its end, after three minutes at the latest
(without options), or on Ctrl-C. It opens nothing by itself: it prints where to look. The exit code is 1 if a message
was lost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services import RATE

from headrace import BrokerClient, Message
from headrace.errors import HeadraceError, SubscriptionNotFound
from headrace.testing import server_process

HERE = Path(__file__).resolve().parent
LIMIT_S = 165.0
"""The story ends after so many seconds, finished or not."""
PATIENCE_S = 135.0
"""Until then Spark must have begun: the end of the story needs some time, too."""
STAY_S = 30.0
WHOLE_S = 172.0
"""Without --stay, the demo ends before three minutes have passed, as soon as that may be."""
STOP_S = 15.0
REDRIVEN = "headrace-origin-timestamp"
"""The header of a message that was published again after it was a dead letter."""
TOPICS = {"orders": 2, "payments": 2, "reservations": 1, "mails": 1, "revenue": 1}


class Failed(Exception):
    """Something did not happen that should have."""


class Interruption:
    """Ctrl-C and the like. Only ``check`` raises, so that no signal can come between a start and its record."""

    def __init__(self) -> None:
        self._asked = False
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, self._heard)

    def _heard(self, *_: object) -> None:
        self._asked = True

    def check(self) -> None:
        if self._asked:
            raise KeyboardInterrupt


class Output:
    """Lines with the time in front, and on a terminal a last line that shows the progress."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self._is_open = False
        self._told = 0.0

    def passed(self) -> float:
        return time.monotonic() - self._begun

    def say(self, text: str = "", *, timed: bool = True) -> None:
        self.end_line()
        seconds = int(self.passed())
        front = f"{seconds // 60}:{seconds % 60:02}  " if timed else "      "
        print((front + text).rstrip(), flush=True)
        self._told = time.monotonic()

    def progress(self, text: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + f"      {text}"[:width].ljust(width), end="", flush=True)
            self._is_open = True
        elif time.monotonic() - self._told >= 5:
            self.say(text, timed=False)

    def end_line(self) -> None:
        if self._is_open:
            print(flush=True)
        self._is_open = False


class Demo:
    def __init__(self, out: Output, speed: float, patience: float, interruption: Interruption):
        self.out, self.speed, self.interruption = out, speed, interruption
        self.patience, self.limit = patience, max(LIMIT_S, patience + LIMIT_S - PATIENCE_S)
        self.folder, self.server, self.console = Path(), "", ""
        self.client: BrokerClient
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def world(self) -> Iterator[None]:
        """A directory, and a broker on free ports. At the end, everything that was started ends."""
        with ExitStack() as stack:
            directory = tempfile.TemporaryDirectory(prefix="headrace-demo-")
            self.folder = Path(stack.enter_context(directory))
            broker = stack.enter_context(server_process(self.folder / "data"))
            stack.callback(broker.stop)
            self.server = f"{broker.host}:{broker.port}"
            self.console = f"http://{broker.host}:{broker.http_address.port}/"
            self.client = stack.enter_context(broker.client(client_id="demo"))
            stack.callback(self.stop_all)
            yield

    # --- processes --------------------------------------------------------------------------------
    def start(self, name: str, *command: str | Path) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=clean | {"HEADRACE_SERVER": self.server},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours; we end them in the right order
            )

    def start_service(self, name: str) -> None:
        self.start(name, HERE / "services.py", name, str(self.speed))

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop_all(self) -> None:
        for name in ("orders", *self.running):
            if name in self.running:
                self.stop(name)

    def _check_processes(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise Failed(f"{name} ended with code {process.returncode}:\n{log[-2000:]}")

    # --- looking ----------------------------------------------------------------------------------
    def count(self, topic: str) -> int:
        return sum(each["end_offset"] for each in self.client.topic_stats(topic)["partitions"])

    def lag(self, subscription: str) -> int:
        """Messages of a subscription that are not done; 0 before its service has joined it."""
        try:
            return self.client.subscription_stats(subscription)["lag"]
        except SubscriptionNotFound:
            return 0

    def counts(self) -> str:
        count, behind = self.count, self.lag("email")
        text = (
            f"{count('orders')} orders · {count('payments')} paid · {count('reservations')} reserved · "
            f"{count('mails')} mails"
        )
        return text + (f" · e-mail is {behind} behind" if behind > 3 else "")

    def wait(
        self,
        condition: Callable[[], object],
        what: str,
        timeout: float = 60.0,
        progress: Callable[[], str] | None = None,
    ) -> None:
        """Wait until the condition holds, and show how far things are."""
        end = min(self.out.passed() + timeout, self.limit)
        while not condition():
            self.interruption.check()
            self._check_processes()
            if self.out.passed() > end:
                raise Failed(f"not in time: {what}")
            self.out.progress((progress or self.counts)())
            time.sleep(0.2)

    def watch(self, seconds: float, progress: Callable[[], str] | None = None) -> None:
        """Let the services work, and show how far they are."""
        end = self.out.passed() + seconds / self.speed
        self.wait(lambda: self.out.passed() >= end, "time passes", progress=progress)

    # --- the story --------------------------------------------------------------------------------
    def services(self, with_spark: bool) -> None:
        say = self.out.say
        for topic, partitions in TOPICS.items():
            self.client.create_topic(topic, partitions=partitions)
        say(
            f"Four services start. The order service publishes {RATE * self.speed:.0f} orders a second to the topic orders;"
        )
        say("payment and inventory read them, and e-mail confirms each payment.", timed=False)
        if with_spark:  # it takes the longest to start, so it comes first
            shutil.copy(HERE / "pipelines.toml", self.folder)
            self.start("pipelines", "-m", "headrace", "pipeline", "run", "pipelines.toml")
            say("Spark starts in the background; it takes a while, and nobody waits for it.")
        for name in ("payment", "inventory", "email", "orders"):
            self.start_service(name)
        self.wait(lambda: self.count("mails"), "the first e-mail")
        self.watch(5)
        say(
            "We kill the e-mail worker (kill -9). The others go on; its messages wait in the broker."
        )
        self.stop("email", signal.SIGKILL)
        say(f"Look: {self.console}#/subscriptions/email", timed=False)
        self.watch(8)
        finding = self.client.explain_subscription("email")["findings"][0]["text"]
        say(f"“Why is this stuck?” The broker says: {finding}")
        self.start_service("email")
        say("The e-mail worker is back, and works off what has waited.")
        self.wait(lambda: self.lag("email") < RATE * self.speed / 2, "e-mail catches up")

    def poison(self) -> None:
        say = self.out.say
        self.wait(lambda: self.client.dead_letters("email"), "the dead letter")
        letter = self.client.dead_letters("email")[0]
        order = letter.message.json()
        say(
            f"Order {order['order']} was poison: {letter.attempts} attempts, then it became a dead letter."
        )
        say(f"Reason: {letter.reason}", timed=False)
        say(f"Look: {self.console}#/dead-letters/email", timed=False)
        self.watch(6)
        address = f"{order['email']}@example.org"
        correction = [{"op": "replace", "path": "/email", "value": address}]
        self.client.redrive("email", offsets=[letter.offset], transform=correction)
        say(f"We correct the address to {address} and redrive it: published again, to e-mail only.")
        self.wait(
            lambda: any(mail.json()["order"] == order["order"] for mail in self.messages("mails")),
            "the redriven message becomes an e-mail",
        )

    def messages(self, topic: str) -> Iterator[Message]:
        """Every message of a topic, read without consuming it."""
        page = self.client.fetch(topic)
        while page:
            yield from page
            page = self.client.fetch(topic, page.next)

    def spark(self) -> bool:
        """False: it is not ready yet, and the time is up."""
        say = self.out.say
        say("Now Spark: two pipelines read the same orders, into a topic and into a Delta table.")
        say(f"Look: {self.console}#/pipelines", timed=False)
        self.wait(
            lambda: self.spark_runs() or self.out.passed() > self.patience,
            "Spark's first batches", self.limit,
            lambda: f"Spark has been starting for {self.out.passed():.0f} s",
        )  # fmt: skip
        if not self.spark_runs():
            self.stop("pipelines")
            say("Spark has not started in time: this machine is too busy for it. Try again later,")
            say('with --patience 300, or without it: make demo ARGS="--no-spark"', timed=False)
            return False
        say("Both pipelines run, while orders still come in.")
        self.watch(8, self.spark_counts)
        return True

    def spark_runs(self) -> bool:
        return bool(self.rows("revenue") and self.rows("orders-table"))

    def rows(self, pipeline: str) -> int:
        """Rows that a pipeline has read."""
        try:
            found = self.client.pipeline_stats(pipeline)
        except HeadraceError:  # it has not reported yet
            return 0
        if found["state"] == "failed":
            raise Failed(f"the pipeline {pipeline} failed: {found}")
        return sum(query.get("input_rows_total") or 0 for query in found["queries"])

    def spark_counts(self) -> str:
        return f"{self.count('orders')} orders · {self.rows('revenue')} in revenue · {self.rows('orders-table')} in the table"

    def result(self, with_spark: bool) -> None:
        say = self.out.say
        self.stop("orders")
        orders = [message.json() for message in self.messages("orders")]
        say(f"The order service has stopped, after {len(orders)} orders. The others finish.")
        self.wait(lambda: not any(map(self.lag, ("payment", "inventory", "email"))), "all is done")
        numbers = sorted(order["order"] for order in orders)
        for topic, what in (
            ("payments", "paid"),
            ("reservations", "reserved"),
            ("mails", "e-mails"),
        ):
            done = sorted(
                message.json()["order"]
                for message in self.messages(topic)
                if REDRIVEN not in message.headers  # the same payment, published again for e-mail
            )
            self.check(done == numbers, f"{len(done)} {what}: none is missing, none is there twice")
        if with_spark:
            self.spark_result(orders)

    def spark_result(self, orders: list[dict[str, object]]) -> None:
        say = self.out.say
        self.wait(
            lambda: all(self.rows(each) >= len(orders) for each in ("revenue", "orders-table")),
            "Spark has read all orders", 60, self.spark_counts,
        )  # fmt: skip
        self.stop("pipelines")
        from deltalake import DeltaTable

        rows = DeltaTable(str(self.folder / "lake/orders")).to_pyarrow_table().num_rows
        self.check(rows == len(orders), f"{rows} rows in the table lake/orders: each order once")
        last = {m.key: m.json() for m in self.messages("revenue")}
        total = sum(each["revenue"] for each in last.values())
        self.check(
            total == sum(order["amount"] for order in orders),  # type: ignore[misc]
            f"{total:,.2f} of revenue in the topic revenue: as much as the orders say",
        )
        for each in sorted(last.values(), key=lambda found: -found["revenue"]):
            say(f"  {each['product']:8}{each['pieces']:6}{each['revenue']:14,.2f}", timed=False)

    def check(self, is_so: bool, text: str) -> None:
        self.out.say(f"{'✓' if is_so else '✗ NOT SO:'} {text}", timed=False)
        if not is_so:
            raise Failed("messages were lost or came twice")

    def stay(self, seconds: float) -> None:
        if seconds <= 0:
            return
        say = self.out.say
        say(
            f"That was it. The broker stays up for {seconds:.0f} seconds: look around, or press Ctrl-C."
        )
        say(f"{self.console}   or: .venv/bin/headrace top -s {self.server}", timed=False)
        end = self.out.passed() + seconds
        while self.out.passed() < end:
            self.interruption.check()
            self.out.progress(f"{end - self.out.passed():.0f} s left")
            time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Four services, one broker, and Spark.")
    parser.add_argument("--no-spark", action="store_true", help="without the Spark pipelines")
    parser.add_argument("--stay", type=float, metavar="SECONDS",
                        help=f"how long the broker stays up afterwards (default: {STAY_S:.0f})")  # fmt: skip
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="SECONDS",
                        help=f"when Spark must have started, at the latest (default: {PATIENCE_S:.0f})")  # fmt: skip
    parser.add_argument("--speed", type=float, default=1.0, metavar="TIMES",
                        help="the services are so many times as fast (default: 1)")  # fmt: skip
    given = parser.parse_args()
    out = Output()
    demo = Demo(out, max(given.speed, 0.1), given.patience, Interruption())
    try:
        with demo.world():
            out.say(f"A broker runs on free ports. Its console: {demo.console}")
            demo.services(not given.no_spark)
            demo.poison()
            has_spark = not given.no_spark and demo.spark()
            demo.result(has_spark)
            left = min(STAY_S, WHOLE_S - out.passed())
            demo.stay(left if given.stay is None else given.stay)
    except KeyboardInterrupt:
        out.end_line()
        print("Interrupted. Everything has ended.")
        return 130
    except (Failed, HeadraceError) as error:
        out.end_line()
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    out.end_line()
    print("Done. Nothing is left running.")
    return 0 if has_spark or given.no_spark else 1


if __name__ == "__main__":
    sys.exit(main())
