"""A node over a Kafka with TLS, logins and access rules: what works, and what is said when something is wrong."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.engine.kafka.topics import GROUP_RIGHTS, RIGHTS
from headrace.errors import HeadraceError
from headrace.testing import DidNotStart, running_server, server_process, wait_until
from tests.docs.blocks import blocks, read, section
from tests.fixtures.secured_kafka import PASSWORD, PLAIN_USER, Right, SecuredKafka

pytestmark = pytest.mark.xdist_group("kafka")
Settings = dict[str, Any]
WRONG = "wrong-horse-battery-staple"


def documented() -> list[Right]:
    """The rights that docs/cluster.md gives to the user of a node, with its own commands."""
    text = section(read("docs/cluster.md"), "TLS, logins and rights in Kafka")
    commands = next(block.text for block in blocks(text) if "kafka-acls.sh" in block.text)
    return [
        (kind, operation)
        for command in commands.split("kafka-acls.sh")[1:]
        for kind in re.findall(r"--(topic|group) shop\.", command)
        for operation in re.findall(r"--operation (\w+)", command)
    ]


RIGHTS_NEEDED = documented()


@pytest.fixture(scope="module")
def user(secured_kafka: SecuredKafka) -> str:
    """Who logs in with SCRAM, and has no rights yet."""
    secured_kafka.add_user("headrace")
    return "headrace"


@pytest.fixture
def secured(cluster: Settings, secured_kafka: SecuredKafka, user: str) -> Settings:
    """Settings of the only node of a cluster, with the rights that the documents name, for both users."""
    for name in (user, PLAIN_USER):
        secured_kafka.allow(name, cluster["cluster"], RIGHTS_NEEDED)
    return {
        **cluster,
        "kafka_servers": secured_kafka.servers,
        "kafka_config": secured_kafka.config(user),
    }


def as_admin_names_it(operation: str) -> str:
    """DescribeConfigs is DESCRIBE_CONFIGS there."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()


def test_the_documents_name_the_rights_that_a_start_checks() -> None:
    """No more and no less."""
    checked = {("topic", each.name) for each in RIGHTS} | {("group", e.name) for e in GROUP_RIGHTS}
    assert {(kind, as_admin_names_it(each)) for kind, each in documented()} == checked


# --- what works -----------------------------------------------------------------------------------
def test_a_node_with_a_login_works(secured: Settings) -> None:
    """The rights of the documents are enough for all that a node does, also after a restart."""
    with running_server(**secured) as server:
        with server.client() as client:
            client.create_topic("orders", partitions=2, segment_bytes=4096, retention_bytes=0)
            client.create_subscription("email", "orders")
            for number in range(40):
                client.publish("orders", b"%d" % number * 500, partition=number % 2)
            with client.subscription("email", "orders") as inbox:
                for _ in range(40):
                    inbox.get(10).ack()
            client.flush()
            client.publish("old", b"x")
            client.delete_topic("old")
            client.change_topic("orders", partitions=3)
            server.call(server.engine.retention.run)
            wait_until(lambda: client.positions("orders")["orders"][0]["start"] > 0)
            client.publish("kept", b"one")
        server.restart()
        with server.client() as client:
            assert client.fetch("kept")[0].value == b"one"
            assert client.publish("kept", b"two").offset == 1
            [subscription] = client.subscriptions("orders")
            assert subscription["lag"] == 0
            assert len(client.positions("orders")["orders"]) == 3
            assert "old" not in client.topics()


def test_plain_is_a_login_too(secured: Settings, secured_kafka: SecuredKafka) -> None:
    """A cluster does not care which of its users a node is."""
    with running_server(**secured) as server:
        with server.client() as client:
            client.publish("orders", b"one")
        server.restart(kafka_config=secured_kafka.config(PLAIN_USER))
        with server.client() as client:
            assert client.publish("orders", b"two").offset == 1
            assert [message.value for message in client.fetch("orders")] == [b"one", b"two"]


def test_an_import_logs_in_as_well(
    secured: Settings, secured_kafka: SecuredKafka, user: str, tmp_path: Path
) -> None:
    """``headrace cluster import`` takes the same file, and refuses the same mistakes."""
    with running_server(tmp_path / "alone") as server, server.client() as client:
        client.publish("orders", b"one")
    command = ["cluster", "import", str(tmp_path / "alone")]
    command += ["--kafka-servers", secured["kafka_servers"], "--cluster", secured["cluster"]]
    wrong = secured_kafka.config(user, sasl_password=WRONG)
    began = time.monotonic()
    ran = CliRunner().invoke(app, [*command, "--kafka-config", wrong, "--kafka-timeout", "60"])
    assert time.monotonic() - began < 30, "it does not wait for what cannot change"
    assert isinstance(ran.exception, HeadraceError)
    assert ran.exception.code == "kafka_login_failed"
    assert WRONG not in ran.output + ran.exception.message
    ran = CliRunner().invoke(app, [*command, "--kafka-config", secured["kafka_config"]])
    assert (ran.exit_code, ran.exception) == (0, None), ran.output
    assert PASSWORD not in ran.output
    with running_server(**secured) as server, server.client() as client:
        assert client.fetch("orders")[0].value == b"one"


# --- what is wrong at the start -------------------------------------------------------------------
LOGIN = "check sasl.mechanism, sasl.username and sasl.password in the file of kafka_config"
TLS = "check security.protocol and ssl.ca.location in the file of kafka_config"
ANSWER = (
    "check kafka_servers, whether Kafka runs, and security.protocol in the file of kafka_config"
)


@pytest.mark.parametrize(
    ("changes", "code", "exit_code", "sentence"),
    [
        ({"sasl_password": WRONG}, "kafka_login_failed", 2, LOGIN),
        ({"ssl_ca_location": "stranger"}, "kafka_tls_failed", 2, TLS),
        ({"sasl_username": "nothing"}, "kafka_forbidden", 2, "the rights that docs/cluster.md lists"),
        ({"security_protocol": "PLAINTEXT"}, "kafka_unavailable", 69, ANSWER),
        ({"sasl_passwort": WRONG}, "invalid_setting", 2, 'property: "sasl.passwort"; correct the file'),
    ],
    ids=["password", "authority", "rights", "no TLS", "unknown property"],
)  # fmt: skip
def test_a_start_that_cannot_work_ends_with_a_sentence(
    secured: Settings,
    secured_kafka: SecuredKafka,
    user: str,
    changes: dict[str, str],
    code: str,
    exit_code: int,
    sentence: str,
) -> None:
    """``headrace serve`` exits, and its last line says what is wrong and what to do. It does not say the password."""
    if "ssl_ca_location" in changes:
        changes = {"ssl_ca_location": str(secured_kafka.other_ca)}
    if changes.get("sasl_username") == "nothing":
        secured_kafka.add_user("nothing")
    secured["kafka_config"] = secured_kafka.config(user, **changes)
    with (
        pytest.raises(DidNotStart) as caught,
        server_process(**secured, kafka_timeout=1 if exit_code == 69 else 10),
    ):
        pass
    errors = caught.value.errors
    assert caught.value.code == exit_code, errors
    last = errors.splitlines()[-1]
    assert last.startswith("headrace: ")
    assert last.endswith(f"[{code}]")
    assert sentence in last
    assert "Traceback" not in errors
    assert PASSWORD not in errors
    assert WRONG not in errors


def refused(settings: Settings) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught, running_server(**settings):
        pass
    assert not caught.value.retryable
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"sasl_username": "nobody"},
        {"sasl_mechanism": "SCRAM-SHA-256"},
        {"sasl_mechanism": "PLAIN", "sasl_username": PLAIN_USER, "sasl_password": WRONG},
    ],
    ids=["user", "mechanism", "password of PLAIN"],
)
def test_a_login_that_kafka_refuses(
    secured: Settings, secured_kafka: SecuredKafka, user: str, changes: dict[str, str]
) -> None:
    """The start ends at once, and does not wait for ``kafka_timeout``."""
    secured["kafka_config"] = secured_kafka.config(user, **changes)
    error = refused({**secured, "kafka_timeout": 60})
    assert error.code == "kafka_login_failed"
    assert LOGIN in error.message


def test_a_certificate_for_another_address(secured: Settings, secured_kafka: SecuredKafka) -> None:
    """Kafka's is for 127.0.0.1 alone."""
    elsewhere = f"localhost:{secured_kafka.port}"
    error = refused({**secured, "kafka_servers": elsewhere, "kafka_timeout": 60})
    assert error.code == "kafka_tls_failed"
    assert TLS in error.message


def test_tls_where_kafka_has_none(secured: Settings, kafka: str) -> None:
    """Kafka ends the connection, as it does when it is stopped: so it may be tried again."""
    with (
        pytest.raises(HeadraceError) as caught,
        running_server(**{**secured, "kafka_servers": kafka, "kafka_timeout": 1}),
    ):
        pass
    assert (caught.value.code, caught.value.retryable) == ("kafka_unavailable", True)
    assert "SSL connection closed by peer" in caught.value.message
    assert ANSWER in caught.value.message


@pytest.mark.parametrize("right", RIGHTS_NEEDED, ids=" ".join)
def test_each_right_is_checked_at_the_start(
    cluster: Settings, secured_kafka: SecuredKafka, right: Right
) -> None:
    """Also those that a node needs much later; the error names the operation and the resource."""
    kind, operation = right
    user = f"without-{kind}-{operation}".lower()
    secured_kafka.add_user(user)
    secured_kafka.allow(user, cluster["cluster"], set(RIGHTS_NEEDED) - {right})
    login = {"kafka_servers": secured_kafka.servers, "kafka_config": secured_kafka.config(user)}
    error = refused({**cluster, **login})
    assert error.code == "kafka_forbidden"
    missing = f"{as_admin_names_it(operation)} on {kind} {cluster['cluster']}."
    assert f"do not allow it: {missing}" in error.message


# --- while it runs --------------------------------------------------------------------------------
def test_a_right_that_is_taken_away_while_a_node_runs(
    secured: Settings, secured_kafka: SecuredKafka, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As if Kafka did not answer; the log says why; the node goes on by itself when it gets the right back."""
    write = [("topic", "Write")]
    with (
        running_server(**secured, kafka_timeout=2.0, events_interval=0) as server,
        server.client() as client,
    ):
        client.publish("orders", b"before")
        secured_kafka.forbid(user, secured["cluster"], write)
        with pytest.raises(HeadraceError) as caught:
            client.publish("orders", b"meanwhile")
        assert caught.value.code in ("outcome_unknown", "kafka_unavailable")
        assert "TOPIC_AUTHORIZATION_FAILED" in caplog.text
        secured_kafka.allow(user, secured["cluster"], write)

        def published() -> bool:
            try:
                client.publish("orders", b"after")
            except HeadraceError:
                return False
            return True

        wait_until(published, 30.0)
        values = [message.value for message in client.fetch("orders")]
        assert (values[0], values[-1]) == (b"before", b"after")


# --- secrets --------------------------------------------------------------------------------------
def test_the_password_is_nowhere_to_be_seen(
    secured: Settings, secured_kafka: SecuredKafka, user: str
) -> None:
    """Not in the log, however much it says, and not in what a command or the HTTP interface prints."""
    secured["kafka_config"] = secured_kafka.config(user, debug="conf,security,broker")
    with server_process(**secured, log_level="debug") as server:
        with server.client() as client:
            client.publish("orders", b"one")
        place = f"127.0.0.1:{server.port}"
        environment = {f"HEADRACE_{name.upper()}": str(value) for name, value in secured.items()}
        shown = []
        for command in (
            "cluster", "cluster status --slots", "cluster status --json", "config", "config --json",
            "serve --help", "cluster import --help",
        ):  # fmt: skip
            ran = CliRunner().invoke(
                app, command.split(), env={**environment, "HEADRACE_SERVER": place}
            )
            assert (ran.exit_code, ran.exception) == (0, None), ran.output
            shown.append(ran.output)
        host, port = server.http_address
        for path in ("cluster", "metrics", "health/ready"):
            with urllib.request.urlopen(f"http://{host}:{port}/{path}") as answer:
                assert PASSWORD not in answer.read().decode()
        assert server.terminate() == 0
        log = server.errors
    assert "sasl.username" in log, "librdkafka has said what it was told"
    assert PASSWORD not in log
    assert PASSWORD not in "".join(shown)
