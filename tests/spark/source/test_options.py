"""Options: what is understood, and what an error says of the rest."""

import pickle
from pathlib import Path

import pytest

from headrace.errors import InvalidArgument
from headrace.spark.connection import ConnectionOptions
from headrace.spark.source.options import Place, SourceOptions, parse_place


def source(**options: object) -> SourceOptions:
    return SourceOptions.of({"topic": "orders", **options})


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HEADRACE_SERVERS",
        "HEADRACE_SERVER",
        "HEADRACE_TOKEN",
        "HEADRACE_CA",
        "HEADRACE_USER",
        "HEADRACE_PASSWORD",
    ):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    """A topic is all that has to be said."""
    options = source()
    assert options.topics == ("orders",)
    assert options.connection == ConnectionOptions((("127.0.0.1", 9999),))
    assert options.fail_on_data_loss
    assert options.value_format == "binary"
    assert options.starting is options.ending is None
    assert pickle.loads(pickle.dumps(options)) == options


def test_names_are_not_case_sensitive_and_values_are_checked() -> None:
    """As Spark hands them over: texts, in any case."""
    options = SourceOptions.of(
        {
            "TOPIC": "orders, invoices.* ,orders",
            "servers": "a:1, tls://b:2,[::1]",
            "maxoffsetspertrigger": "1000",
            "MaxBytesPerTrigger": "64m",
            "minPartitions": "8",
            "failOnDataLoss": "FALSE",
            "group": "spark",
            "columns": "value,offset",
            "timeout": "5",
        }
    )
    assert options.topics == ("orders", "invoices.*")
    assert options.connection is not None
    assert options.connection.addresses == (("a", 1), ("b", 2), ("::1", 9999))
    assert options.connection.tls
    assert options.connection.timeout == 5.0
    assert options.max_offsets_per_trigger == 1000
    assert options.max_bytes_per_trigger == 64 << 20
    assert options.min_partitions == 8
    assert not options.fail_on_data_loss
    assert options.columns == ("value", "offset")


def test_a_job_for_kafka_needs_few_changes(caplog: pytest.LogCaptureFixture) -> None:
    """Two of Kafka's names mean the same here; others of its client are named in a warning."""
    options = SourceOptions.of(
        {
            "subscribe": "a,b",
            "kafka.bootstrap.servers": "h:1",
            "kafka.fetch.max.bytes": "5",
            "kafkaConsumer.pollTimeoutMs": "100",
        }
    )
    assert options.topics == ("a", "b")
    assert options.connection is not None
    assert options.connection.addresses == (("h", 1),)
    assert "kafka.fetch.max.bytes" in caplog.text
    assert "kafkaconsumer.polltimeoutms" in caplog.text


@pytest.mark.parametrize(
    "name", ["kafka.security.protocol", "kafka.sasl.jaas.config", "kafka.ssl.truststore.location"]
)
def test_the_security_of_kafka_is_not_left_out_in_silence(name: str) -> None:
    """A job that asked for TLS or a login does not run without; the error says what to write."""
    with pytest.raises(
        InvalidArgument, match=r"tls://.* ca .* token, or user and password"
    ) as failed:
        SourceOptions.of({"topic": "a", name: "x"})
    assert failed.value.code == "unknown_option"


def test_what_is_read_may_be_said_as_kafka_says_it() -> None:
    """A regular expression, partitions, times of partitions, and the least records of a batch."""
    found = SourceOptions.of({"subscribePattern": "a|b", "minOffsetsPerTrigger": "5"})
    assert (found.topics, found.subscribe_pattern, found.min_offsets_per_trigger) == ((), "a|b", 5)
    assert found.max_trigger_delay == 900
    assert SourceOptions.of({"topic": "a", "maxTriggerDelay": "90s"}).max_trigger_delay == 90
    found = SourceOptions.of({"assign": '{"a": [0, 2], "b": [1]}'})
    assert (found.topics, found.assigned) == (("a", "b"), {"a": {0, 2}, "b": {1}})
    times = SourceOptions.of(
        {"topic": "a", "startingOffsetsByTimestamp": '{"a": {"0": 5}}'}
    ).starting
    assert times == Place("times", "startingOffsetsByTimestamp", times={"a": {0: 5}})
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_environment_of_the_driver_goes_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Executors need neither its variables nor its files."""
    monkeypatch.setenv("HEADRACE_SERVERS", "broker:7777")
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    found = source().connection
    assert found is not None
    assert (found.addresses, found.token, found.tls) == ((("broker", 7777),), "secret", False)
    assert source(servers="other:1").connection != found
    text = "-----BEGIN CERTIFICATE-----\nnot looked at\n-----END CERTIFICATE-----"
    given = source(ca=text).connection
    assert given is not None
    assert (given.ca, given.tls) == (text, True)
    with pytest.raises(InvalidArgument, match="option ca"):
        source(ca=str(tmp_path / "missing.pem"))


def test_a_user_logs_in_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is stronger than the environment, and a token than a user; no secret is shown."""

    def login(**options: str) -> tuple[str | None, ...]:
        found = source(**options).connection
        assert found is not None
        assert "hunter" not in repr(found)
        return found.token, found.user, found.password

    given = {"user": "alice", "password": "hunter2"}
    assert login(**given) == (None, "alice", "hunter2")
    monkeypatch.setenv("HEADRACE_USER", "bob")
    monkeypatch.setenv("HEADRACE_PASSWORD", "hunter3")
    assert login() == (None, "bob", "hunter3")
    assert login(user="carol") == (None, "carol", "hunter3")
    assert login(token="hunter-token") == ("hunter-token", None, None)
    monkeypatch.setenv("HEADRACE_TOKEN", "hunter-token")
    assert login() == ("hunter-token", None, None)
    assert login(**given) == (None, "alice", "hunter2")
    monkeypatch.delenv("HEADRACE_PASSWORD")
    for wrong in ({"user": "alice"}, {"password": "x"}, {**given, "token": "t"}):
        with pytest.raises(InvalidArgument, match=r"option (user|password)"):
            source(**wrong)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"topc": "x"}, "there is no option topc; is it topic?"),
        ({"zzz": "x"}, "there is no option zzz; there are servers"),
        ({"topic": "a,,b"}, "option topic: there is nothing between two commas"),
        ({"topic": "or ders"}, "not a valid name"),
        ({"topic": "a.*b"}, "is not valid"),
        ({"topic": ""}, "option topic: say what to read"),
        ({"servers": "http://x:1"}, "option servers: 'http://x:1' is not the address of a broker"),
        ({"servers": "x:y"}, "option servers: 'x:y' is not the address of a broker"),
        ({"servers": "x:99999"}, "option servers"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss must be true or false"),
        ({"minPartitions": "0"}, "option minPartitions must be a whole number from 1"),
        ({"maxOffsetsPerTrigger": "1.5"}, "option maxOffsetsPerTrigger"),
        ({"maxBytesPerTrigger": "much"}, "option maxBytesPerTrigger must be a whole number"),
        ({"timeout": "-1"}, "option timeout must be a number from 0 to 86400"),
        ({"valueFormat": "xml"}, "option valueFormat must be one of binary"),
        ({"group": "a b"}, "not a valid name"),
        ({"schema": "a INT"}, "option schema: it is for valueFormat=json"),
        ({"path": "/x", "servers": "h:1"}, "option servers: it is for a broker"),
        ({"path": "/x", "group": "g"}, "option group: it is for a broker"),
        ({"startingOffsets": "first"}, "option startingOffsets: it is earliest"),
        ({"endingOffsets": "group"}, "option endingOffsets: it is earliest"),
        ({"startingOffsets": "{"}, "option startingOffsets: this is not JSON"),
        ({"startingOffsets": '{"a": 5}'}, "option startingOffsets: 'a' needs offsets by partition"),
        ({"startingOffsets": '{"a": {"x": 5}}'}, "'x' of 'a' is not the number of a partition"),
        ({"endingOffsets": '{"a": {"0": -3}}'}, "option endingOffsets: -3 for a/0 is not"),
        ({"endingOffsets": '{"a": {"0": true}}'}, "True for a/0 is not an offset"),
        ({"startingTimestamp": "soon"}, "option startingTimestamp: 'soon' is not a time"),
        ({"startingOffsets": "@1960-01-01"}, "is before 1970"),
        ({"startingTimestamp": "5", "startingOffsets": "earliest"}, "give this or startingOffsets"),
        ({"startingOffsets": "[1]"}, "option startingOffsets: it is earliest"),
        ({"endingOffsetsByTimestamp": "[1]"}, "it is a JSON object with the names of topics"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "-1 for a/0 is not a time"),
        ({"subscribePattern": "x"}, "option topic: give this, subscribePattern or assign"),
        ({"topic": "", "subscribePattern": "("}, "option subscribePattern: '(' is no regular"),
        ({"topic": "", "assign": '{"a": 5}'}, "option assign: 'a' needs a list of partitions"),
        ({"topic": "", "assign": '{"a": [-1]}'}, "option assign: 'a' needs a list of partitions"),
        ({"topic": "", "assign": '{"a": []}'}, "option assign: it names no partition"),
        ({"topic": "", "assign": '{"a": [0]}', "group": "g"}, "cannot go with assign"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, str], complaint: str) -> None:
    """Every error says which option it is about."""
    with pytest.raises(InvalidArgument) as failed:
        SourceOptions.of({"topic": "orders", **options})
    assert complaint in str(failed.value)


def test_places() -> None:
    """Every way to say where to begin."""
    name = "startingOffsets"
    assert parse_place(name, "Earliest") == Place("earliest", name)
    assert parse_place(name, "latest") == Place("latest", name)
    assert parse_place(name, "group") == Place("group", name)
    offsets = {"a": {0: 23, 1: -2}, "b": {0: -1}}
    assert parse_place(name, '{"a": {"0": 23, "1": -2}, "b": {"0": -1}}').offsets == offsets
    for text in ("1767225600000", "2026-01-01T00:00:00Z", "2026-01-01", "2026-01-01T01:00+01:00"):
        assert parse_place(name, f"@{text}").time_ms == 1767225600000
    # A millisecond is the finest there is: what is at or after the time is at the next one.
    assert parse_place(name, "@2026-01-01T00:00:00.000001Z").time_ms == 1767225600001


def test_sizes() -> None:
    """With a unit or without."""
    for text, size in (("100", 100), ("1k", 1024), ("2MB", 2 << 20), ("1.5 GiB", 3 << 29)):
        assert source(maxBytesPerTrigger=text).max_bytes_per_trigger == size
