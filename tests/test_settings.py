"""Settings: where a value comes from, and what is said of one that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.settings import BY_NAME, SETTINGS, load

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads a config.json that lies about."""
    monkeypatch.chdir(tmp_path)


def config_of(tmp_path: Path, content: object, name: str = "other.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- precedence -----------------------------------------------------------------------------------
def test_without_anything_the_defaults_hold() -> None:
    """Every setting has a default, and says that it is one."""
    settings = load()
    assert settings.as_dict() == {setting.name: setting.default for setting in SETTINGS}
    assert {settings.source(setting.name) for setting in SETTINGS} == {"default"}
    assert (settings.host, settings.port, settings.http_port) == ("127.0.0.1", 9999, 8080)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    """Each source hides the weaker ones, and the source of a value is known."""
    config = config_of(tmp_path, {"server": {"port": 1}})
    environment = {"HEADRACE_PORT": "2"}
    flags = {"port": 3}
    assert (load().port, load().source("port")) == (9999, "default")
    from_file = load(None, None, config)
    assert (from_file.port, from_file.source("port")) == (1, str(config))
    from_environment = load(None, environment, config)
    assert from_environment.port == 2
    assert from_environment.source("port") == "environment HEADRACE_PORT"
    from_flag = load(flags, environment, config)
    assert (from_flag.port, from_flag.source("port")) == (3, "flag --port")


def test_a_flag_that_was_not_given_hides_nothing() -> None:
    """None is how a command line says that a flag was left out."""
    assert load({"port": None}, {"HEADRACE_PORT": "2"}).port == 2


def test_our_own_variable_beats_the_one_of_another_broker() -> None:
    """HEADRACE_PORT is meant for us alone, QB_SERVER_PORT may be left over."""
    settings = load(None, {"HEADRACE_PORT": "1", "QB_SERVER_PORT": "2"})
    assert settings.port == 1


def test_an_empty_variable_is_none_at_all() -> None:
    """Container set-ups pass variables on even when they are empty."""
    settings = load(None, {"HEADRACE_PORT": "", "PORT": ""})
    assert (settings.port, settings.source("port")) == (9999, "default")
    assert settings.http_port == 8080


def service_links(service: str, address: str, **ports: int) -> dict[str, str]:
    """What Kubernetes puts into the environment of every container for a Service, as its
    documentation of discovering services lists it; the first port is also the Service's own."""
    name = service.upper().replace("-", "_")
    first = next(iter(ports.values()))
    links = {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(first),
        f"{name}_PORT": f"tcp://{address}:{first}",
    }
    for port_name, port in ports.items():
        links |= {
            f"{name}_SERVICE_PORT_{port_name.upper()}": str(port),
            f"{name}_PORT_{port}_TCP": f"tcp://{address}:{port}",
            f"{name}_PORT_{port}_TCP_PROTO": "tcp",
            f"{name}_PORT_{port}_TCP_PORT": str(port),
            f"{name}_PORT_{port}_TCP_ADDR": address,
        }
    return links


@pytest.mark.parametrize("address", ["10.0.0.11", "[fd00::11]"])
@pytest.mark.parametrize("service", ["headrace", "headrace-http", "qb-server"])
def test_variables_of_a_kubernetes_service_are_no_settings(service: str, address: str) -> None:
    """A Service called headrace, or headrace-http, changes nothing and stops nothing."""
    links = service_links(service, address, tcp=9999, http=8080)
    assert load(None, links).as_dict() == load().as_dict()


def test_a_port_beside_those_of_kubernetes_counts() -> None:
    """A number is a setting, also where other variables come from Kubernetes."""
    links = service_links("headrace", "10.0.0.11", tcp=9999, http=8080)
    assert load(None, links | {"HEADRACE_PORT": "7000"}).port == 7000
    with pytest.raises(InvalidArgument):
        load(None, links | {"HEADRACE_PORTS": "7000"})


def test_config_json_in_the_working_directory_is_read(tmp_path: Path) -> None:
    """The seed's config.json works as it stands."""
    content = {"server": {"host": "127.0.0.1", "port": 7000}, "storage": {"data_dir": "./data"}}
    config_of(tmp_path, content, "config.json")
    settings = load()
    assert (settings.host, settings.port, settings.data_dir) == ("127.0.0.1", 7000, "./data")
    assert settings.source("port") == "config.json"


def test_a_named_config_file_is_read_instead(tmp_path: Path) -> None:
    """The one in the working directory does not count then."""
    config_of(tmp_path, {"server": {"port": 1, "host": "127.0.0.9"}}, "config.json")
    settings = load(None, None, config_of(tmp_path, {"server": {"port": 2}}))
    assert (settings.port, settings.host) == (2, "127.0.0.1")


@pytest.mark.parametrize("key", ["path", "dir", "directory", "data_dir"])
def test_the_data_directory_has_the_names_that_people_give_it(tmp_path: Path, key: str) -> None:
    """storage.path, storage.dir and storage.directory mean the same."""
    assert load(None, None, config_of(tmp_path, {"storage": {key: "/x"}})).data_dir == "/x"


def test_a_setting_may_stand_without_its_section(tmp_path: Path) -> None:
    """A flat file works too."""
    assert load(None, None, config_of(tmp_path, {"port": 5, "durability": "never"})).port == 5


# --- every variable of the seeds ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PORT", "8081", "http_port", 8081),
        ("PERSISTENCE_ENABLED", "false", "persistence_enabled", False),
        ("PERSISTENCE_ENABLED", "true", "persistence_enabled", True),
        ("RETENTION_HOURS", "48", "retention_hours", 48.0),
        ("MAX_MESSAGE_SIZE", "2048", "max_message_size", 2048),
        ("MAX_MESSAGE_SIZE", "1MB", "max_message_size", MIB),
        ("MAX_QUEUE_SIZE", "500", "max_queue_size", 500),
        ("QB_SERVER_HOST", "127.0.0.2", "host", "127.0.0.2"),
        ("QB_SERVER_PORT", "9998", "port", 9998),
        ("QB_DATA_DIR", "./qb", "data_dir", "./qb"),
        ("QB_LOG_LEVEL", "DEBUG", "log_level", "debug"),
    ],
)
def test_the_variables_of_the_seeds_work(
    variable: str, text: str, name: str, value: object
) -> None:
    """Users of other brokers can keep their environment variables."""
    settings = load(None, {variable: text})
    assert getattr(settings, name) == value
    assert settings.source(name) == f"environment {variable}"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_has_its_own_variable(setting: Any) -> None:
    """HEADRACE_<NAME> is read for each of them."""
    examples = {"tls_cert": "cert.pem", "tls_key": "key.pem", "fsync_on_write": "true"}
    examples["memory_limit"] = "1GB"
    text = examples.get(setting.name) or str(setting.default or 7).lower()
    environment = {f"HEADRACE_{setting.name.upper()}": text}
    if setting.name.startswith("tls_"):
        environment |= {"HEADRACE_TLS_CERT": "cert.pem", "HEADRACE_TLS_KEY": "key.pem"}
    if setting.default is False:
        environment = dict.fromkeys(environment, "true")
    settings = load(None, environment)
    assert settings.source(setting.name) == f"environment HEADRACE_{setting.name.upper()}"


def test_the_seeds_defaults_are_ours() -> None:
    """Retention of 24 hours, messages of 1 MB, port 9999 for TCP and 8080 for HTTP."""
    settings = load()
    assert settings.retention_hours == 24
    assert settings.max_message_size == MIB
    assert settings.persistence_enabled is True
    assert limits.QUEUE_SIZE_MEMORY_DEFAULT == 10_000


# --- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1MB", MIB),
        ("1mb", MIB),
        ("1 MB", MIB),
        ("1MiB", MIB),
        ("1M", MIB),
        ("0.5MB", MIB // 2),
        ("512KB", 512 << 10),
        ("512k", 512 << 10),
        ("100B", 100),
        (" 64KB ", 64 << 10),
    ],
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    """A number, with or without a unit."""
    assert load(None, {"MAX_MESSAGE_SIZE": text}).max_message_size == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_message_size", "0"),
        ("max_message_size", "65MB"),
        ("max_message_size", "-1"),
        ("max_message_size", "1XB"),
        ("max_message_size", "MB"),
        ("max_message_size", "9" * 400),
        ("max_message_size", "9" * 400 + "TB"),
        ("max_message_size", "1e3"),
        ("port", "65536"),
        ("port", "-1"),
        ("port", "ninety"),
        ("port", "9" * 5000),
        ("port", "1.5"),
        ("http_port", "eighty"),
        ("heartbeat_interval", "0"),
        ("heartbeat_interval", "nan"),
        ("heartbeat_interval", "inf"),
        ("retention_hours", "-1"),
        ("retention_hours", "soon"),
        ("max_queue_size", "0"),
        ("max_queue_size", "many"),
        ("max_connections", "0"),
        ("persistence_enabled", "maybe"),
        ("insecure", "2"),
        ("durability", "sometimes"),
        ("compression", "gzip"),
        ("log_level", "loud"),
        ("segment_bytes", "1KB"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: str) -> None:
    """The complaint names the setting, where it stood, and what would be right."""
    variable = f"HEADRACE_{name.upper()}"
    with pytest.raises(InvalidArgument) as caught:
        load(None, {variable: value})
    assert caught.value.code == "invalid_setting"
    assert caught.value.message.startswith(f"{name} (environment {variable}) must be ")
    assert ", not " in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", True),
        ("port", 1.5),
        ("port", [9999]),
        ("port", None),
        ("host", ""),
        ("host", 5),
        ("max_message_size", 1.5),
        ("max_message_size", False),
        ("persistence_enabled", 1),
        ("durability", None),
        ("heartbeat_interval", True),
    ],
)
def test_a_value_of_another_type_in_the_file_is_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    """JSON has types, and ours are told apart: true is no number."""
    with pytest.raises(InvalidArgument, match=key):
        load(None, None, config_of(tmp_path, {BY_NAME[key].section: {key: value}}))


def test_none_switches_a_limit_off() -> None:
    """Where none is possible, it can be said: none, or null in the file."""
    settings = load(None, {"RETENTION_HOURS": "none", "MAX_QUEUE_SIZE": "none"})
    assert settings.retention_hours is None
    assert settings.max_queue_size is None


def test_a_secret_is_not_shown_in_a_complaint() -> None:
    """Not even a wrong one."""
    with pytest.raises(InvalidArgument) as caught:
        load({"token": 12345})
    assert "12345" not in caught.value.message
    assert "(hidden)" in caught.value.message


# --- unknown and unreadable -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"server": {"prot": 1}}, "server.prot"),
        ({"serve": {"port": 1}}, "serve.port"),
        ({"prot": 1}, "prot"),
        ({"storage": {"fsync": True}}, "storage.fsync"),
        ({"server": 1}, "server"),
        ({"server": {"path": "/x"}}, "server.path"),
    ],
)
def test_an_unknown_key_in_the_file_is_named(tmp_path: Path, content: Any, key: str) -> None:
    """A misspelt setting is an error, with the file, the key and those that are known."""
    config = config_of(tmp_path, content)
    with pytest.raises(InvalidArgument, match="known are") as caught:
        load(None, None, config)
    assert caught.value.code == "unknown_setting"
    assert f"{config}: unknown key {key!r}" in caught.value.message


def test_an_unknown_variable_of_ours_is_named() -> None:
    """HEADRACE_PROT would otherwise be silently ignored; other people's variables are not ours."""
    with pytest.raises(InvalidArgument, match="HEADRACE_PROT") as caught:
        load(None, {"HEADRACE_PROT": "1"})
    assert caught.value.code == "unknown_setting"
    load(None, {"PATH": "/bin", "QB_SOMETHING": "1", "HEADRACE_CA": "x"})


def test_an_unknown_flag_is_named() -> None:
    """Programs that start a server pass settings by name, and mistype them too."""
    with pytest.raises(InvalidArgument, match="'prot'") as caught:
        load({"prot": 1})
    assert caught.value.code == "unknown_setting"


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """Only the config.json of the working directory may be missing."""
    with pytest.raises(InvalidArgument, match="no-such"):
        load(None, None, tmp_path / "no-such.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "1", '{"server": {"port": }}'])
def test_a_file_that_is_not_an_object_of_json_is_refused(tmp_path: Path, content: str) -> None:
    """The complaint names the file."""
    config = config_of(tmp_path, content)
    with pytest.raises(InvalidArgument, match="other") as caught:
        load(None, None, config)
    assert caught.value.code == "invalid_config"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A directory is no file, and bytes are no text."""
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(None, None, tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="is not text"):
        load(None, None, binary)


def test_a_certificate_and_its_key_go_together() -> None:
    """One without the other cannot work, and is refused before anything starts."""
    with pytest.raises(InvalidArgument, match="tls_cert and tls_key"):
        load({"tls_cert": "cert.pem"})
    assert load({"tls_cert": "cert.pem", "tls_key": "key.pem"}).tls_key == "key.pem"


@given(
    st.dictionaries(
        st.sampled_from([f"HEADRACE_{name.upper()}" for name in BY_NAME]),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    )
)
def test_whatever_the_environment_holds_only_typed_errors_come(environment: dict[str, str]) -> None:
    """No value ends in a traceback from somewhere below."""
    try:
        settings = load(None, environment)
    except InvalidArgument:
        return
    assert set(settings.as_dict()) == set(BY_NAME)


# --- what they mean for topics --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given_", "durability"),
    [
        ({}, "always"),
        ({"fsync_on_write": True}, "always"),
        ({"fsync_on_write": False}, "interval"),
        ({"fsync_on_write": False, "durability": "always"}, "always"),
        ({"durability": "never"}, "never"),
    ],
)
def test_fsync_on_write_is_another_word_for_durability(
    given_: dict[str, Any], durability: str
) -> None:
    """The seed's storage.fsync_on_write counts unless durability itself is set."""
    assert load(given_).topic_defaults().durability == durability


def test_topics_get_the_defaults_of_the_server() -> None:
    """The settings of the server are the defaults of a new topic."""
    flags = {
        "persistence_enabled": False,
        "retention_hours": 5,
        "retention_bytes": "1GB",
        "max_queue_size": 7,
        "compression": "zstd",
        "segment_bytes": "16MB",
        "retain_unread": False,
    }
    topic = load(flags).topic_defaults()
    assert topic.durable is False
    assert topic.retention_hours == 5
    assert topic.retention_bytes == 1 << 30
    assert topic.max_queue_size == 7
    assert topic.compression == "zstd"
    assert topic.segment_bytes == 16 * MIB
    assert topic.retain_unread is False


def test_an_unknown_attribute_is_one() -> None:
    """Settings do not make up values."""
    with pytest.raises(AttributeError, match="prot"):
        _ = load().prot
