"""``headrace pipeline``: run, list, validate, status, stop."""

import json
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, wait_until
from tests.cli.rig import Command, run_script, start_script

PATIENCE_S = 100.0
"""Far more than it takes; a machine may be busy."""
FILE = """
    [pipeline.large]
    from = "orders"
    format = "json"
    schema = "id STRING, amount DOUBLE"
    sql = "SELECT id, amount FROM orders WHERE amount > 100"
    to = { topic = "large", key = "id" }
    failed = true

    [pipeline.copy]
    from = ["orders", "returns.*"]
    to = { table = "lake/all", format = "delta" }
    trigger = "5 minutes"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.toml"
    path.write_text(textwrap.dedent(FILE))
    return path


def report(state: str = "running", run: str = "r1", **query: Any) -> dict[str, Any]:
    return {
        "state": state,
        "run_id": run,
        "started_at": 1_767_225_600_000,
        "queries": [{"name": "large", "sink": "large", **query}],
    }


# --- without Spark --------------------------------------------------------------------------------
def test_the_pipelines_of_a_file(command: Command, file: Path) -> None:
    """Where from, where to, and where rows go that fail; no broker is asked."""
    ran = command("pipeline", "list", file)
    assert ran.code == 0
    assert ran.rows[0] == ["name", "from", "through", "to", "failed", "trigger"]
    assert ran.rows[1] == ["large", "orders", "sql", "large", "large.dlq", "at", "once"]
    assert ran.rows[2][:3] == ["copy", "orders,", "returns.*"]
    found = command("pipeline", "list", file, "--json").json
    assert [each["checkpoint"] for each in found] == [
        f"{file}.state/large",
        f"{file}.state/copy",
    ]


@pytest.mark.parametrize("verb", ["run", "list"])
def test_a_file_that_is_wrong(command: Command, file: Path, verb: str) -> None:
    """One line that names the place, and exit code 2: it could not be begun."""
    file.write_text(file.read_text().replace("trigger", "tigger"))
    ran = command("pipeline", verb, file)
    assert ran.code == 2
    assert ran.err.endswith(
        "shop.toml:13, pipeline copy: tigger: there is no such key; is it trigger? [invalid_pipeline]\n"
    )


def test_a_pipeline_that_is_not_there(command: Command, file: Path) -> None:
    ran = command("pipeline", "run", file, "larg")
    assert ran.code == 2
    assert "has no pipeline 'larg'; it has large, copy" in ran.err


def test_no_broker(command: Command, file: Path) -> None:
    """It is said before Spark is started."""
    ran = command("pipeline", "run", file, "--server", "127.0.0.1:1")
    assert ran.code == 2
    assert "no broker answers at 127.0.0.1:1" in ran.err


def test_a_cluster_needs_a_shared_place(command: Command, file: Path) -> None:
    """Beside the file is no place that executors on other machines could reach."""
    ran = command("pipeline", "run", file, "--master", "spark://10.0.0.5:7077")
    assert ran.code == 2
    assert "give --checkpoint-dir" in ran.err


def test_status(headrace: Command, client: BrokerClient) -> None:
    """The reports of pipelines, as a table and as JSON; a failed one has its error."""
    assert "No pipeline has reported" in headrace("pipeline", "status").out
    client.report_pipeline(
        "large",
        report(
            batch_id=3, input_rows_total=1200, input_rows_per_second=99.6, lag=7, dead_letters=2,
            processed_rows_per_second=200, trigger_ms=812.4, oldest_unread_at=0,
            watermark=1_767_225_600_000, state_rows=1200, state_bytes=3 << 20, last_error="was down",
            last_error_at=1_767_225_600_000,
        ),
    )  # fmt: skip
    ran = headrace("pipeline", "status")
    assert ran.rows[1] == [
        *(
            "large",
            "running",
            "2026-01-01",
            "00:00:00",
            "3",
            "1,200",
            "100",
            "200",
            "7",
            "0",
            "812",
            "2",
        ),
        "large",
    ]
    assert ran.lines[-2:] == [
        "large: watermark 2026-01-01 00:00:00 UTC; state 1,200 rows, 3.0 MiB",
        "large (2026-01-01 00:00:00 UTC, recovered): was down",
    ]
    client.report_pipeline("large", report("failed", error="no \x1b[31mluck"))
    ran = headrace("pipeline", "status", "large")
    assert ran.rows[1][1] == "failed"
    assert ran.lines[-1] == "large: no \\x1b[31mluck"
    assert headrace("pipeline", "status", "large", "--json").json["state"] == "failed"
    assert headrace("pipeline", "status", "--json").json[0]["name"] == "large"
    ran = headrace("pipeline", "status", "unheard")
    assert ran.code == 2
    assert "[pipeline_not_found]" in ran.err


def test_stop(headrace: Command, client: BrokerClient) -> None:
    """It is told with its next report; the command waits for its end, or does not."""
    client.report_pipeline("halted", report())
    assert headrace("pipeline", "stop", "halted", "--wait", "0").lines == [
        "Asked pipeline halted to stop."
    ]
    assert client.report_pipeline("halted", report())["stop"]
    assert headrace("pipeline", "status", "halted", "--json").json["stopping"]

    assert not client.report_pipeline("halted", report(run="r2"))["stop"]  # meant for the other

    def obey() -> None:
        wait_until(lambda: client.report_pipeline("halted", report(run="r2"))["stop"])
        client.report_pipeline("halted", report("stopped", run="r2"))

    thread = threading.Thread(target=obey)
    thread.start()
    ran = headrace("pipeline", "stop", "halted")
    thread.join()
    assert (ran.code, ran.lines) == (0, ["Pipeline halted stopped."])
    ran = headrace("pipeline", "stop", "halted")
    assert ran.code == 2
    assert "[pipeline_not_running]" in ran.err


# --- with Spark, as a process -----------------------------------------------------------------------
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_run(server: RunningServer, client: BrokerClient, file: Path) -> None:
    """It follows a topic until SIGTERM, finishes its batch, and ends with 0."""
    where = {"HEADRACE_SERVER": f"{server.host}:{server.port}"}
    orders = [{"id": str(number), "amount": 60.0 * number} for number in range(4)]
    client.publish_many("orders", [json.dumps(order).encode() for order in orders] + [b"rubbish"])
    process = start_script("pipeline", "run", str(file), "large", **where)
    try:
        wait_until(lambda: "large" in client.topics(), PATIENCE_S)
        wait_until(lambda: len(client.fetch("large")) == 2, PATIENCE_S)
        assert run_script("pipeline", "status", **where).out.count("running") == 1
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    assert out.splitlines()[0] == "large: orders to large"
    assert out.splitlines()[-1] == "large stopped: 5 rows, 1 dead letter"
    assert [letter.message.value for letter in client.dead_letters("large")] == [b"rubbish"]
