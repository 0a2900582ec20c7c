"""What a user may say to ``format("headrace")``, read once and checked, with errors that name the option.

Names of options are not case-sensitive, as everywhere in Spark. :class:`Given` reads single values;
:class:`Connection` is how a broker is reached, for the source and the sink alike;
:class:`SourceOptions` is everything that reading knows. All of them are small values that are pickled to
executors: what the driver's environment says (``HEADRACE_SERVERS``, ``HEADRACE_TOKEN``,
``HEADRACE_CA``) and the certificate's own text are put into them there, so that an executor needs
neither the environment nor the file.

Reading knows these options::

    servers              host:port of the broker (127.0.0.1:9999); tls:// in front of it for TLS
    token  ca  tls       how to be let in, and whom to trust
    path                 a data directory, read with no broker, instead of servers
    topic                a name, several with commas between, wildcards (orders.*  orders.>)
    startingOffsets      earliest, latest, group, @time, or {"topic": {"0": 23, "1": -2}}
    endingOffsets        the same, for a batch (-2 is earliest, -1 latest)
    startingTimestamp    a time in ISO 8601 or in milliseconds; as startingOffsets=@time
    endingTimestamp      the same, for a batch: what is older is read
    maxOffsetsPerTrigger, maxBytesPerTrigger     how much one batch of a stream takes
    minPartitions        split until there are so many tasks
    failOnDataLoss       true: records that are gone are an error; false: a warning
    group                the subscription that shows, in the broker, how far a stream has come
    valueFormat          binary, text or json
    schema               the fields of JSON values, as DDL ("id INT, name STRING")
    columns              only these columns, with commas between
    includeHeaders       false: no column headers (it is there by default)
    directReads          false: through the socket even on the broker's own machine (true)
    timeout              seconds for which a broker that does not answer is waited for

So that jobs written for Kafka port by changing the format's name, ``subscribe`` is ``topic`` and
``kafka.bootstrap.servers`` is ``servers``; what else begins with ``kafka.``, or only tunes Kafka's
consumers, has no meaning here and is named in a warning. Any other name is an error: a misspelt option
that is silently ignored is how a job reads the wrong thing for a year. Where it is one of Kafka's that
means something, the error says what to write instead.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from headrace import limits
from headrace.errors import InvalidArgument
from headrace.model import check_pattern, check_subscription_name, check_topic_name, is_pattern
from headrace.spark.notation import parse_time

logger = logging.getLogger("headrace.spark")
PORT_DEFAULT = 9999
TIMEOUT_S_DEFAULT = 60.0
TIMEOUT_S_MAX = 86_400.0
ValueFormat = Literal["binary", "text", "json"]

CONNECTION = ("servers", "token", "ca", "tls", "timeout")
READING = (
    *CONNECTION, "path", "topic", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minPartitions",
    "failOnDataLoss", "group", "valueFormat", "schema", "columns", "includeHeaders",
    "directReads",
)  # fmt: skip
ALIASES = {"subscribe": "topic", "kafka.bootstrap.servers": "servers"}
MEANINGLESS = {
    "kafkaconsumer.polltimeoutms", "fetchoffset.numretries", "fetchoffset.retryintervalms",
    "groupidprefix", "maxtriggerdelay",
}  # fmt: skip
"""Of Kafka's source: they change no row."""
INSTEAD = {
    "subscribepattern": "topic takes wildcards (orders.*  orders.>) instead of a regular expression",
    "assign": "topic reads all partitions; filter by the column partition",
    "startingoffsetsbytimestamp": "startingTimestamp is one time for all partitions",
    "endingoffsetsbytimestamp": "endingTimestamp is one time for all partitions",
    "startingoffsetsbytimestampstrategy": "where nothing is newer, reading begins at the end",
    "minoffsetspertrigger": "a longer trigger gathers more (trigger(processingTime=…))",
}
"""Of Kafka's source: they would change which rows there are, and when."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def wrong(name: str, why: str) -> InvalidArgument:
    """The error for an option that cannot be."""
    return InvalidArgument(f"option {name}: {why}", code="invalid_option")


class Given:
    """The options that were given, read by name."""

    def __init__(self, options: Mapping[str, Any]):
        self._values: dict[str, str] = {}
        for name, value in options.items():
            lower = str(name).lower()
            self._values[ALIASES.get(lower, lower)] = str(value)

    def check_names(self, known: Iterable[str]) -> None:
        """Every name is one of ``known``, or the error says which was meant."""
        names = {name.lower(): name for name in known}
        for given in self._values:
            if given.startswith("kafka.") or given in MEANINGLESS:
                logger.warning("option %s is for Kafka and has no meaning here", given)
            elif given in INSTEAD:
                raise InvalidArgument(
                    f"option {given} is Kafka's; {INSTEAD[given]}", code="unknown_option"
                )
            elif given not in names:
                close = difflib.get_close_matches(given, names, 1)
                hint = f"is it {names[close[0]]}?" if close else "there are " + ", ".join(known)
                raise InvalidArgument(f"there is no option {given}; {hint}", code="unknown_option")

    def text(self, name: str) -> str | None:
        """None when it was not given, or is empty."""
        return self._values.get(name.lower(), "").strip() or None

    def flag(self, name: str, default: bool) -> bool:
        given = self.text(name)
        if given is None:
            return default
        if given.lower() not in ("true", "false"):
            raise wrong(name, f"it is true or false, not {given!r}")
        return given.lower() == "true"

    def whole(self, name: str, low: int = 1, high: int = limits.OFFSET_MAX) -> int | None:
        given = self.text(name)
        if given is None:
            return None
        if not given.isascii() or not given.isdigit() or not low <= int(given) <= high:
            raise wrong(name, f"it is a whole number from {low} to {high}, not {given!r}")
        return int(given)

    def size(self, name: str) -> int | None:
        """Bytes: a number, or one with a unit (64m, 1GB)."""
        given = self.text(name)
        if given is None:
            return None
        found = _SIZE.match(given)
        size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
        if size < 1:
            raise wrong(name, f"it is a size in bytes, such as 1000000 or 64MB, not {given!r}")
        return size

    def seconds(self, name: str, default: float, high: float = TIMEOUT_S_MAX) -> float:
        given = self.text(name)
        if given is None:
            return default
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= high:
            raise wrong(name, f"it is a number of seconds up to {high:g}, not {given!r}")
        return seconds

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str:
        given = self.text(name)
        if given is None:
            return default
        if given.lower() not in choices:
            raise wrong(name, f"it is one of {', '.join(choices)}, not {given!r}")
        return given.lower()

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list with commas between."""
        given = self.text(name)
        if given is None:
            return None
        found = tuple(part.strip() for part in given.split(","))
        if not all(found):
            raise wrong(name, f"there is nothing between two commas in {given!r}")
        return found


# --- how a broker is reached ----------------------------------------------------------------------
@dataclass(frozen=True)
class Connection:
    """Everything that is needed to reach a broker, on any machine."""

    addresses: tuple[tuple[str, int], ...]
    token: str | None = None
    tls: bool = False
    ca: str | None = None
    """The text of the certificate to trust (PEM), not its path."""
    timeout: float = TIMEOUT_S_DEFAULT

    @classmethod
    def of(cls, given: Given) -> Connection:
        environment = os.environ
        servers = (
            given.text("servers")
            or environment.get("HEADRACE_SERVERS")
            or environment.get("HEADRACE_SERVER")
            or f"127.0.0.1:{PORT_DEFAULT}"
        )
        found = [_address(each.strip()) for each in servers.split(",")]
        ca = given.text("ca") or environment.get("HEADRACE_CA")
        return cls(
            tuple((host, port) for host, port, _ in found),
            given.text("token") or environment.get("HEADRACE_TOKEN") or None,
            given.flag("tls", False) or ca is not None or any(tls for _, _, tls in found),
            None if ca is None else _certificate(ca),
            given.seconds("timeout", TIMEOUT_S_DEFAULT),
        )

    def tls_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cadata=self.ca) if self.tls else None

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.addresses)


def _address(text: str) -> tuple[str, int, bool]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if scheme not in ("tcp", "tls"):
        raise wrong("servers", f"{text!r} is neither tcp:// nor tls://; it takes host:port")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):  # no port; or an IPv6 address without one
        host, port = rest, str(PORT_DEFAULT)
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise wrong("servers", f"{text!r} is not host:port")
    return host.strip("[]"), int(port), scheme == "tls"


def _certificate(ca: str) -> str:
    """The certificate's text. What is given as text already is left as it is."""
    if ca.lstrip().startswith("-----BEGIN"):
        return ca
    try:
        text = Path(ca).read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise wrong("ca", f"the certificate {ca} cannot be used: {error}") from None
    return text


# --- where to begin and to end --------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A position as a user says it, not yet offsets."""

    kind: Literal["earliest", "latest", "group", "offsets", "time"]
    option: str
    """The option that said so, for errors."""
    offsets: Mapping[str, Mapping[int, int]] | None = None
    time_ms: int | None = None


EARLIEST_OFFSET = -2
LATEST_OFFSET = -1


def parse_place(option: str, text: str) -> Place:
    """``startingOffsets`` or ``endingOffsets``."""
    lower = text.lower()
    if lower in ("earliest", "latest"):
        return Place(lower, option)  # type: ignore[arg-type]
    if lower == "group" and option == "startingOffsets":
        return Place("group", option)
    if text.startswith("@"):
        return Place("time", option, time_ms=parse_time(option, text[1:]))
    if text.startswith("{"):
        return Place("offsets", option, offsets=_parse_offsets(option, text))
    raise wrong(
        option,
        f"it is earliest, latest, a time (@2026-01-31T12:00:00Z) or JSON such as "
        f'{{"orders": {{"0": 23}}}}, not {text!r}',
    )


def _parse_offsets(option: str, text: str) -> dict[str, dict[int, int]]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise wrong(option, f"this is not JSON ({error}): {text[:80]}") from None
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, dict):
            raise wrong(option, f'{topic!r} needs offsets by partition, such as {{"0": 23}}')
        found[topic] = {}
        for number, offset in partitions.items():
            if not number.isascii() or not number.isdigit():
                raise wrong(option, f"{number!r} of {topic!r} is not the number of a partition")
            if type(offset) is not int or not EARLIEST_OFFSET <= offset <= limits.OFFSET_MAX:
                raise wrong(
                    option,
                    f"{offset!r} for {topic}/{number} is not an offset (-2 is earliest, -1 latest)",
                )
            found[topic][int(number)] = offset
    return found


# --- everything that reading knows ------------------------------------------------------------------
@dataclass(frozen=True)
class SourceOptions:
    topics: tuple[str, ...]
    connection: Connection | None = None
    path: str | None = None
    starting: Place | None = None
    """None: earliest for a batch, latest for a stream, as Kafka's source has it."""
    ending: Place | None = None
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    group: str | None = None
    value_format: ValueFormat = "binary"
    schema: str | None = None
    columns: tuple[str, ...] | None = None
    include_headers: bool = True
    direct_reads: bool = True
    timeout: float = TIMEOUT_S_DEFAULT

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SourceOptions:
        given = Given(options)
        given.check_names(READING)
        path = given.text("path")
        if path is not None:
            for name in ("servers", "token", "ca", "tls", "group"):
                if given.text(name) is not None:
                    raise wrong(name, "it is for a broker, and path reads without one; give one")
        group = given.text("group")
        schema = given.text("schema")
        value_format: Any = given.one_of("valueFormat", ("binary", "text", "json"), "binary")
        if schema is not None and value_format != "json":
            raise wrong("schema", "it is for valueFormat=json; use .schema(…) to choose columns")
        return cls(
            topics=_topics(given),
            connection=None if path is not None else Connection.of(given),
            path=None if path is None else str(Path(path.removeprefix("file://")).absolute()),
            starting=_place(given, "starting"),
            ending=_place(given, "ending"),
            max_offsets_per_trigger=given.whole("maxOffsetsPerTrigger"),
            max_bytes_per_trigger=given.size("maxBytesPerTrigger"),
            min_partitions=given.whole("minPartitions", high=1_000_000),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            group=None if group is None else check_subscription_name(group),
            value_format=value_format,
            schema=schema,
            columns=given.names("columns"),
            include_headers=given.flag("includeHeaders", True),
            direct_reads=given.flag("directReads", True),
            timeout=given.seconds("timeout", TIMEOUT_S_DEFAULT),
        )


def _topics(given: Given) -> tuple[str, ...]:
    topics = given.names("topic")
    if topics is None:
        raise wrong("topic", "say what to read: a name, several with commas, or orders.*")
    for topic in topics:
        if is_pattern(topic):
            check_pattern(topic)
        else:
            check_topic_name(topic, internal=True)
    return tuple(dict.fromkeys(topics))


def _place(given: Given, which: str) -> Place | None:
    by_offset, by_time = f"{which}Offsets", f"{which}Timestamp"
    offsets, time = given.text(by_offset), given.text(by_time)
    if offsets is not None and time is not None:
        raise wrong(by_time, f"give this or {by_offset}, not both")
    if time is not None:
        return Place("time", by_time, time_ms=parse_time(by_time, time))
    return None if offsets is None else parse_place(by_offset, offsets)
