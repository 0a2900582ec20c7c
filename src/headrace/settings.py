"""The settings of a server, and the source of each value.

Strongest first: flags, environment, config file, defaults. In the environment every setting is
``HEADRACE_<NAME>``; the names that other small brokers use (``PORT``, ``QB_SERVER_HOST``…) work, too. The
config file is JSON, ``config.json`` in the working directory unless another one is named::

    {"server": {"host": "127.0.0.1", "port": 9999}, "storage": {"data_dir": "./data"}}

An unknown key or an invalid value is an error that names it: if a misspelt setting were ignored, data
could be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.model import TopicSettings

DEFAULT_CONFIG = "config.json"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


# --- reading one value ------------------------------------------------------------------------
def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it is a text that is not empty")
    return value


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError("it is true or false")


def _whole(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ValueError(f"it is a whole number from {low} to {high}")
        return number

    return read


def _number(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        try:
            number = float(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"it is a number from {low:g} to {high:g}")
        if not low <= number <= high:
            raise ValueError(f"it is a number from {low:g} to {high:g}")
        return float(number)

    return read


def _size(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number: object = value
        if isinstance(value, str):
            found = _SIZE.match(value.strip())
            size = float(found[1]) * _UNITS[found[2].lower()] if found else -1.0
            number = int(size) if size <= high else None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ValueError(f"it is a size in bytes from {low} to {high}, such as 512KB or 1MB")
        return number

    return read


def _one_of(*choices: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"it is one of {', '.join(choices)}")
        return value.lower()

    return read


def _origins(value: object) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("it is a list of origins such as https://app.example.com")
    return [item.strip().rstrip("/") for item in items if item.strip()]


def _maybe(read: Callable[[object], Any]) -> Callable[[object], Any]:
    def read_maybe(value: object) -> Any:
        if value is None or value in ("", "none", "None"):
            return None
        return read(value)

    return read_maybe


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    section: str
    default: Any
    read: Callable[[object], Any]
    help: str
    environment: tuple[str, ...] = ()
    """Names besides ``HEADRACE_<NAME>``."""
    aliases: tuple[str, ...] = ()
    """Other keys in the config file."""


_PORT = _whole(0, 65535)
_LEVELS = ("debug", "info", "warning", "error")

SETTINGS: tuple[Setting, ...] = (
    Setting("host", "server", "127.0.0.1", _text, "address to listen on", ("QB_SERVER_HOST",)),
    Setting("port", "server", 9999, _PORT, "TCP port; 0 picks a free one", ("QB_SERVER_PORT",), ("tcp_port",)),
    Setting("http_port", "server", 8080, _PORT, "HTTP and WebSocket port; 0 picks a free one", ("PORT",)),
    Setting("heartbeat_interval", "server", 30.0, _number(0.1, 3600), "seconds of silence after which a peer that sends heartbeats is dropped"),
    Setting("max_connections", "server", 15_000, _whole(1, 1_000_000), "connections at once; further ones are refused"),
    Setting("token", "server", None, _maybe(_text), "secret that clients must present"),
    Setting("tls_cert", "server", None, _maybe(_text), "certificate chain (PEM); with tls_key, TLS on every port"),
    Setting("tls_key", "server", None, _maybe(_text), "private key (PEM)"),
    Setting("allowed_origins", "server", None, _maybe(_origins), "web origins that may call HTTP (CORS) and open WebSockets, separated by commas; * for all"),
    Setting("insecure", "server", False, _flag, "listen beyond this machine without a token"),
    Setting("data_dir", "storage", "./data", _text, "where topics are kept", ("QB_DATA_DIR",), ("path", "dir", "directory")),
    Setting("persistence_enabled", "storage", True, _flag, "false: everything in memory", ("PERSISTENCE_ENABLED",)),
    Setting("durability", "storage", "always", _one_of("always", "interval", "never"), "when a publish counts: after fdatasync, or before"),
    Setting("fsync_on_write", "storage", None, _maybe(_flag), "true: durability always; false: interval"),
    Setting("compression", "storage", "none", _one_of("none", "zstd"), "of stored batches"),
    Setting("segment_bytes", "storage", limits.SEGMENT_BYTES_DEFAULT, _size(4096, 1 << 31), "size at which a log file is closed"),
    Setting("retention_hours", "storage", 24.0, _maybe(_number(0, 24 * 366_000)), "age at which messages may be deleted; none: never", ("RETENTION_HOURS",)),
    Setting("retention_bytes", "storage", None, _maybe(_size(0, 1 << 60)), "size of a partition above which the oldest are deleted"),
    Setting("retain_unread", "storage", True, _flag, "never delete what a subscription has not finished"),
    Setting("max_message_size", "storage", limits.MESSAGE_BYTES_DEFAULT, _size(1, limits.MESSAGE_BYTES_CEILING), "bytes of one message", ("MAX_MESSAGE_SIZE",)),
    Setting("max_queue_size", "storage", None, _maybe(_whole(1, limits.OFFSET_MAX)), "unread messages per topic; past it publishes are refused", ("MAX_QUEUE_SIZE",)),
    Setting("auto_create_topics", "storage", True, _flag, "a publish makes its topic"),
    Setting("disk_reserve_bytes", "storage", limits.DISK_RESERVE_BYTES_DEFAULT, _size(0, 1 << 50), "free space below which publishes are refused"),
    Setting("events_interval", "storage", limits.EVENTS_INTERVAL_S_DEFAULT, _number(0, limits.EVENTS_INTERVAL_S_MAX), "seconds between the broker's own events about deliveries, in the topic __events; 0: none"),
    Setting("log_level", "log", "info", _one_of(*_LEVELS), "how much is logged", ("QB_LOG_LEVEL",), ("level",)),
    Setting("request_timeout", "client", 30.0, _number(0.001, 86_400), "seconds a client waits for an answer"),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


class Settings:
    """The values in force, as attributes; ``source`` returns the source of each."""

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

    def topic_defaults(self) -> TopicSettings:
        durability = self.durability
        if self.fsync_on_write is not None and self._sources["durability"] == "default":
            durability = "always" if self.fsync_on_write else "interval"
        return TopicSettings(
            durable=self.persistence_enabled,
            durability=durability,
            compression=self.compression,
            segment_bytes=self.segment_bytes,
            retention_hours=self.retention_hours,
            retention_bytes=self.retention_bytes,
            retain_unread=self.retain_unread,
            max_queue_size=self.max_queue_size,
        )


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Combine the settings of all sources. If ``config`` is given, the file must exist."""
    values = {setting.name: setting.default for setting in SETTINGS}
    sources = {setting.name: "default" for setting in SETTINGS}

    def take(setting: Setting, value: object, source: str) -> None:
        try:
            values[setting.name] = setting.read(value)
        except ValueError as error:
            shown = "(hidden)" if setting.name == "token" else repr(value)
            raise InvalidArgument(
                f"{setting.name} ({source}) cannot be {shown}: {error}", code="invalid_setting"
            ) from None
        sources[setting.name] = source

    for setting, value, source in _from_file(config):
        take(setting, value, source)
    for setting, value, source in _from_environment(environment or {}):
        take(setting, value, source)
    for name, value in (flags or {}).items():
        if name not in BY_NAME:
            raise InvalidArgument(
                f"there is no setting {name!r}; there are {', '.join(BY_NAME)}",
                code="unknown_setting",
            )
        if value is not None:
            take(BY_NAME[name], value, f"flag --{name.replace('_', '-')}")
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        raise InvalidArgument("tls_cert and tls_key go together", code="invalid_setting")
    return Settings(values, sources)


def _from_environment(environment: Mapping[str, str]) -> list[tuple[Setting, object, str]]:
    found: list[tuple[Setting, object, str]] = []
    for setting in SETTINGS:
        own = f"HEADRACE_{setting.name.upper()}"
        for name in (*setting.environment, own):  # HEADRACE_<NAME> is stronger, so it comes last
            if environment.get(name, "") != "":
                found.append((setting, environment[name], f"environment {name}"))
    for name in environment:
        if name.startswith("HEADRACE_") and name not in _KNOWN_VARIABLES:
            raise InvalidArgument(
                f"the environment has {name}, which is no setting; "
                "'headrace config' lists them all",
                code="unknown_setting",
            )
    return found


_KNOWN_VARIABLES = {f"HEADRACE_{setting.name.upper()}" for setting in SETTINGS} | {
    "HEADRACE_CONFIG",
    "HEADRACE_SERVER",
    "HEADRACE_SERVERS",
    "HEADRACE_CA",
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
        raise InvalidArgument(f"there is no config file {path}", code="no_config") from None
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
