"""The settings of the Kafka engine: what is refused before anything is opened, and that nobody else pays for it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.kafka import make_storage, read_options
from headrace.errors import HeadraceError, InvalidArgument
from headrace.settings import load
from headrace.testing import running_server


def settings(tmp_path: Path, **flags: Any) -> Any:
    config = tmp_path / "config.json"
    config.write_text("{}")
    return load({"engine": "kafka", **flags}, {}, config)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "needs kafka_servers"),
        ({"kafka_servers": "k:1", "persistence_enabled": False}, "start without --memory"),
        ({"kafka_servers": "k:1", "kafka_config": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, flags: dict[str, Any], sentence: str
) -> None:
    """Each refusal says what to do."""
    with pytest.raises(InvalidArgument, match=sentence):
        make_storage(settings(tmp_path, **flags))


@pytest.mark.parametrize("cluster", ["", "a.b", "a b", "x" * 41])
def test_the_name_of_a_cluster_is_checked(tmp_path: Path, cluster: str) -> None:
    """It becomes the beginning of topics' names in Kafka."""
    with pytest.raises(InvalidArgument, match="cluster"):
        make_storage(settings(tmp_path, cluster=cluster, kafka_servers="k:1"))


def test_librdkafka_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The same message of several clients is said once a minute."""
    from headrace.engine.kafka.link import librdkafka

    for number in range(20):
        librdkafka.error("FAIL [client-%d] no broker (after %dms in state CONNECT)", number, number)
    librdkafka.error("FAIL [client-1] something else")
    assert len(caplog.records) == 2


def test_properties_of_librdkafka_come_from_a_file(tmp_path: Path) -> None:
    """One on each line; a line that is none is named."""
    file = tmp_path / "kafka.properties"
    file.write_text("# TLS\nsecurity.protocol = ssl\n\nssl.ca.location=/ca.pem\n")
    assert read_options(str(file)) == {"security.protocol": "ssl", "ssl.ca.location": "/ca.pem"}
    file.write_text("a=b\nrubbish\n")
    with pytest.raises(InvalidArgument, match="line 2"):
        read_options(str(file))
    file.write_text("sasl.password hunter2=x\n")
    with pytest.raises(InvalidArgument, match=r"line 1: write name=value$"):
        read_options(str(file))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("sasl.passwort=hunter2", 'No such configuration property: "sasl.passwort"'),
        ("security.protocol=TLS", 'Invalid value "TLS" for configuration property "security.protocol"'),
        ("security.protocol=SSL\nssl.ca.location=/nowhere", "ssl.ca.location failed"),
    ],
)  # fmt: skip
def test_a_property_that_librdkafka_refuses_is_named(
    tmp_path: Path, line: str, sentence: str
) -> None:
    """The start fails with a sentence, which names the file and no secret."""
    file = tmp_path / "kafka.properties"
    file.write_text(line)
    with (
        pytest.raises(InvalidArgument) as caught,
        running_server(engine="kafka", kafka_servers="127.0.0.1:1", kafka_config=str(file)),
    ):
        pass
    assert caught.value.code == "invalid_setting"
    assert sentence in caught.value.message
    assert str(file) in caught.value.message
    assert "hunter2" not in caught.value.message


def test_without_the_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import fails, and the sentence names the extra."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(InvalidArgument, match=r"pip install confluent-kafka"):
        make_storage(settings(tmp_path, kafka_servers="k:1"))


def test_nobody_else_imports_it() -> None:
    """A program that uses Headrace, or a server on disk, does not load librdkafka."""
    code = (
        "import sys, headrace, headrace.cli, headrace.server.server; "
        "sys.exit('confluent_kafka' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_start_without_kafka_fails_with_a_sentence(tmp_path: Path) -> None:
    """Nothing listens there: the start ends after ``kafka_timeout``, and may be tried again."""
    with (
        pytest.raises(HeadraceError) as caught,
        running_server(engine="kafka", kafka_servers="127.0.0.1:1", kafka_timeout=0.5),
    ):
        pass
    assert caught.value.code == "kafka_unavailable"
    assert caught.value.retryable
