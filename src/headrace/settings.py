"""The settings of a server: their names, their bounds, and where each value came from.

Strongest first: flags, environment, config file, defaults. In the environment every setting is
``HEADRACE_<NAME>``; for some, the names that other small brokers use (``PORT``, ``QB_SERVER_HOST``…) work,
too. The config file is JSON; it is ``config.json`` in the working directory unless another file is named::

    {"server": {"host": "127.0.0.1", "port": 9999}, "storage": {"data_dir": "./data"}}

An unknown key or an invalid value is an error that names it: if a misspelt setting were ignored, data
could be lost. Only variables that Kubernetes makes are ignored (``without_service_links``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta

from headrace import limits
from headrace.checking import check, shown
from headrace.errors import InvalidArgument
from headrace.files import DiskMethod
from headrace.model import TopicSettings
from headrace.notation import BYTES, SECONDS

DEFAULT_CONFIG = "config.json"
_FLAGS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


# --- notations: words and lists as people write them (sizes and durations: notation.py) -----------
def _plain(value: object) -> object:
    return value


def _word(value: object) -> object:
    """Flags and choices, in lower or upper case."""
    return _FLAGS.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _origins(value: object) -> object:
    """A list, or text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        return value
    return [item.strip().rstrip("/") for item in items if item.strip()]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    section: str
    default: Any
    annotation: Any
    """The type and the bounds, as ``headrace.checking`` checks them."""
    help: str
    environment: tuple[str, ...] = ()
    """Names besides ``HEADRACE_<NAME>``."""
    aliases: tuple[str, ...] = ()
    """Other keys in the config file."""
    notation: Callable[[object], object] = _plain

    def read(self, value: object, source: str) -> Any:
        """The value of this setting, or :class:`InvalidArgument`."""
        is_text = isinstance(value, str)
        if is_text and value in ("", "none", "None") and type(None) in get_args(self.annotation):
            return None
        try:
            # Flags and variables are text; the config file has types, where true is not a number.
            return check(
                f"{self.name} ({source})",
                self.notation(value),
                self.annotation,
                code="invalid_setting",
                strict=not is_text,
            )
        except InvalidArgument as error:
            if self.name == "token":
                error.message = error.message.replace(shown(value), "(hidden)")
            raise


_TOPIC = get_type_hints(TopicSettings, include_extras=True)
"""A default for topics has the bounds of the topic's own setting."""
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Level = Literal["debug", "info", "warning", "error"]
_LogFormat = Literal["text", "json"]
_Heartbeat = Annotated[float, Meta(ge=0.1, le=3600), SECONDS]
_Connections = Annotated[int, Meta(ge=1, le=1_000_000)]
_MessageBytes = Annotated[int, Meta(ge=1, le=limits.MESSAGE_BYTES_CEILING), BYTES]
_MemoryBytes = Annotated[int, Meta(ge=limits.MEMORY_BYTES_MIN, le=1 << 50), BYTES]
_DiskBytes = Annotated[int, Meta(ge=0, le=1 << 50), BYTES]
_Deadline = Annotated[float, Meta(ge=0.1, le=86_400), SECONDS]
_Rate = Annotated[int, Meta(ge=1, le=1 << 30), BYTES]
_EventsInterval = Annotated[float, Meta(ge=0, le=limits.EVENTS_INTERVAL_S_MAX), SECONDS]
_Engine = Literal["disk", "kafka"]
_Cluster = Annotated[str, Meta(min_length=1, max_length=40)]
_KafkaSession = Annotated[float, Meta(ge=6, le=1800), SECONDS]
_Slots = Annotated[int, Meta(ge=1, le=256)]
_KafkaTimeout = Annotated[float, Meta(ge=0.1, le=600), SECONDS]
_Timeout = Annotated[float, Meta(ge=0.001, le=86_400), SECONDS]

SETTINGS: tuple[Setting, ...] = (
    Setting("host", "server", "127.0.0.1", _Text, "address to listen on", ("QB_SERVER_HOST",)),
    Setting("port", "server", 9999, _Port, "TCP port; 0 picks a free one", ("QB_SERVER_PORT",), ("tcp_port",)),
    Setting("http_port", "server", 8080, _Port, "HTTP and WebSocket port; 0 picks a free one", ("PORT",)),
    Setting("heartbeat_interval", "server", 30.0, _Heartbeat, "seconds of silence after which a client that sends heartbeats is disconnected"),
    Setting("max_connections", "server", 15_000, _Connections, "maximum number of open connections; further ones are refused"),
    Setting("handshake_timeout", "server", 10.0, _Deadline, "seconds that a TLS handshake may take"),
    Setting("head_timeout", "server", 20.0, _Deadline, "seconds in which the head of an HTTP request must arrive"),
    Setting("body_rate", "server", 1024, _Rate, "minimum bytes per second at which the body of an HTTP request must arrive"),
    Setting("idle_timeout", "server", 75.0, _Deadline, "seconds after which an HTTP connection without a request is closed"),
    Setting("token", "server", None, _Text | None, "secret of an administrator, for clients without a user or a token of their own"),
    Setting("tls_cert", "server", None, _Text | None, "certificate chain (PEM); together with tls_key it turns on TLS on every port"),
    Setting("tls_key", "server", None, _Text | None, "private key of the certificate (PEM)"),
    Setting("tls_client_ca", "server", None, _Text | None, "certificate authority (PEM) of client certificates; a client can log in with such a certificate"),
    Setting("allowed_origins", "server", None, list[str] | None, "web origins that may call HTTP (CORS) and open WebSockets, separated by commas; * allows all", notation=_origins),
    Setting("insecure", "server", False, bool, "allow other machines to connect without a token", notation=_word),
    Setting("data_dir", "storage", "./data", _Text, "directory in which topics are stored", ("QB_DATA_DIR",), ("path", "dir", "directory")),
    Setting("persistence_enabled", "storage", True, bool, "false: keep everything in memory", ("PERSISTENCE_ENABLED",), notation=_word),
    Setting("durability", "storage", "always", _TOPIC["durability"], "when a publish is confirmed: always (after fsync), interval or never", notation=_word),
    Setting("fsync_on_write", "storage", None, bool | None, "true: durability always; false: durability interval", notation=_word),
    Setting("compression", "storage", "none", _TOPIC["compression"], "compression of stored batches: none or zstd", notation=_word),
    Setting("segment_bytes", "storage", limits.SEGMENT_BYTES_DEFAULT, _TOPIC["segment_bytes"], "size at which a log file is closed"),
    Setting("retention_hours", "storage", 24.0, _TOPIC["retention_hours"], "age after which messages may be deleted; none: never", ("RETENTION_HOURS",)),
    Setting("retention_bytes", "storage", None, _TOPIC["retention_bytes"], "size of a partition above which its oldest messages may be deleted"),
    Setting("retain_unread", "storage", True, bool, "never delete messages that a subscription has not finished", notation=_word),
    Setting("max_message_size", "storage", limits.MESSAGE_BYTES_DEFAULT, _MessageBytes, "largest message, in bytes", ("MAX_MESSAGE_SIZE",)),
    Setting("max_queue_size", "storage", None, _TOPIC["max_queue_size"], "maximum number of unread messages per topic; further publishes are refused", ("MAX_QUEUE_SIZE",)),
    Setting("memory_limit", "storage", None, _MemoryBytes | None, "maximum memory for requests, answers, queues and caches; further requests are refused; none: a quarter of the machine's memory"),
    Setting("auto_create_topics", "storage", True, bool, "true: the first publish creates its topic", notation=_word),
    Setting("disk_reserve_bytes", "storage", limits.DISK_RESERVE_BYTES_DEFAULT, _DiskBytes, "free disk space below which publishes are refused"),
    Setting("rewrite_segments", "storage", True, bool, "true: closed log files with many small batches are rewritten with large ones", notation=_word),
    Setting("disk", "storage", "auto", DiskMethod, "how commits are written: io_uring, threads, or auto (io_uring where the system permits it)", notation=_word),
    Setting("events_interval", "storage", limits.EVENTS_INTERVAL_S_DEFAULT, _EventsInterval, "seconds between the broker's own events in the topic __events; 0: no events"),
    Setting("engine", "kafka", "disk", _Engine, "where messages are stored: disk, or kafka (a replicated log; needs headrace[kafka])", notation=_word),
    Setting("kafka_servers", "kafka", None, _Text | None, "with engine kafka: addresses of Kafka, host:port, separated by commas"),
    Setting("cluster", "kafka", "headrace", _Cluster, "with engine kafka: name of the cluster; its topics in Kafka begin with it"),
    Setting("slots", "kafka", 16, _Slots, "with engine kafka: number of slots of a new cluster; its nodes divide them, and nodes beyond this number only forward"),
    Setting("advertise", "kafka", None, _Text | None, "with engine kafka: this node's name, the address that clients and other nodes use; default: the machine's name and the port"),
    Setting("kafka_timeout", "kafka", 10.0, _KafkaTimeout, "with engine kafka: seconds that a publish waits for Kafka before it fails"),
    Setting("kafka_session", "kafka", 10.0, _KafkaSession, "with engine kafka: seconds after which other nodes take over from a node that died"),
    Setting("kafka_config", "kafka", None, _Text | None, "with engine kafka: file with properties of librdkafka, name=value on each line, for example for TLS and SASL"),
    Setting("kafka_unsafe", "kafka", False, bool, "with engine kafka: start even if settings of Kafka may lose messages", notation=_word),
    Setting("log_level", "log", "info", _Level, "least severe level that is logged: debug, info, warning or error", ("QB_LOG_LEVEL",), ("level",), _word),
    Setting("log_format", "log", "text", _LogFormat, "lines of the log: text, or json (one object on each line)", (), ("format",), _word),
    Setting("request_timeout", "client", 30.0, _Timeout, "seconds that a client waits for an answer"),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


class Settings:
    """The values in force, as attributes; ``source`` says where each came from."""

    def __init__(self, values: dict[str, Any], sources: dict[str, str]):
        self._values = values
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def source(self, name: str) -> str:
        return self._sources[name]

    def as_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def but(self, values: dict[str, Any]) -> Settings:
        return Settings({**self._values, **values}, self._sources)

    def topic_defaults(self) -> TopicSettings:
        names = {field.name for field in fields(TopicSettings)} & self._values.keys()
        given = {name: self._values[name] for name in names}
        if self.fsync_on_write is not None and self._sources["durability"] == "default":
            given["durability"] = "always" if self.fsync_on_write else "interval"
        return TopicSettings(durable=self.persistence_enabled, **given)


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Combine all sources. If ``config`` is given, the file must exist."""
    values = {setting.name: setting.default for setting in SETTINGS}
    sources = {setting.name: "default" for setting in SETTINGS}

    def take(setting: Setting, value: object, source: str) -> None:
        values[setting.name] = setting.read(value, source)
        sources[setting.name] = source

    for setting, value, source in _from_file(config):
        take(setting, value, source)
    for setting, value, source in _from_environment(environment or {}):
        take(setting, value, source)
    for name, value in (flags or {}).items():
        if name not in BY_NAME:
            raise InvalidArgument(
                f"unknown setting {name!r}; known are {', '.join(BY_NAME)}",
                code="unknown_setting",
            )
        if value is not None:
            take(BY_NAME[name], value, f"flag --{name.replace('_', '-')}")
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        raise InvalidArgument("tls_cert and tls_key must be set together", code="invalid_setting")
    return Settings(values, sources)


_SERVICE_LINK = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)


def without_service_links(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that Kubernetes gives a container for each Service.

    For a Service ``headrace`` they are ``HEADRACE_SERVICE_HOST``, ``HEADRACE_PORT=tcp://10.0.0.1:9999``,
    ``HEADRACE_PORT_9999_TCP_ADDR`` and so on; for ``headrace-http``, ``HEADRACE_HTTP_PORT=tcp://…``. They look
    like settings and are none. A port that is a number is a setting.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _SERVICE_LINK.fullmatch(name)
        and not (name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://")))
    }


def _from_environment(environment: Mapping[str, str]) -> list[tuple[Setting, object, str]]:
    environment = without_service_links(environment)
    found: list[tuple[Setting, object, str]] = []
    for setting in SETTINGS:
        own = f"HEADRACE_{setting.name.upper()}"
        for name in (*setting.environment, own):  # the last one wins
            if environment.get(name, "") != "":
                found.append((setting, environment[name], f"environment {name}"))
    for name in environment:
        if name.startswith("HEADRACE_") and name not in _KNOWN_VARIABLES:
            raise InvalidArgument(
                f"the environment variable {name} is not a setting; 'headrace config' lists all",
                code="unknown_setting",
            )
    return found


_KNOWN_VARIABLES = {f"HEADRACE_{setting.name.upper()}" for setting in SETTINGS} | {
    "HEADRACE_CONFIG",
    "HEADRACE_SERVER",
    "HEADRACE_SERVERS",
    "HEADRACE_CA",
    "HEADRACE_USER",
    "HEADRACE_PASSWORD",
    "HEADRACE_SPARK_MASTER",
    "HEADRACE_CHECKPOINT_DIR",
}


def _from_file(config: Path | None) -> list[tuple[Setting, object, str]]:
    path = config or Path(DEFAULT_CONFIG)
    try:
        raw = path.read_text()
    except FileNotFoundError:
        if config is None:
            return []
        raise InvalidArgument(f"the config file {path} does not exist", code="no_config") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", code="no_config") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not text", code="invalid_config") from None
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", code="invalid_config") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} must hold a JSON object", code="invalid_config")
    found: list[tuple[Setting, object, str]] = []
    for section, items in content.items():
        if section in BY_NAME and not isinstance(items, dict):
            found.append((BY_NAME[section], items, str(path)))
            continue
        if not isinstance(items, dict):
            raise _unknown(path, section, [*_SECTIONS, *BY_NAME])
        for key, value in items.items():
            setting = _setting_of(section, key)
            if setting is None:
                known = [s.name for s in SETTINGS if s.section == section] or list(_SECTIONS)
                raise _unknown(path, f"{section}.{key}", known)
            found.append((setting, value, str(path)))
    return found


_SECTIONS = tuple(dict.fromkeys(setting.section for setting in SETTINGS))


def _setting_of(section: str, key: str) -> Setting | None:
    for setting in SETTINGS:
        if key == setting.name or (setting.section == section and key in setting.aliases):
            return setting if section in _SECTIONS else None
    return None


def _unknown(path: Path, key: str, known: list[str]) -> InvalidArgument:
    return InvalidArgument(
        f"{path}: unknown key {key!r}; known are {', '.join(known)}", code="unknown_setting"
    )
