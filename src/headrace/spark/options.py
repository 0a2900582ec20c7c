"""Options of a source, a sink or a table, read by name and checked, with errors that name the option.

Names of options are not case-sensitive, as everywhere in Spark. Any name that is not known is an error:
a misspelt option that is silently ignored is how a job reads the wrong thing for a year.

So that jobs written for Kafka port by changing the format's name, ``subscribe`` is ``topic`` and
``kafka.bootstrap.servers`` is ``servers``. Other options that begin with ``kafka.``, or only tune Kafka's
consumers, have no meaning here and are named in a warning. Kafka's options for security are an error that
says what to write instead: a job must not connect with less protection than it asked for.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta

from headrace import limits, notation
from headrace.checking import check
from headrace.errors import InvalidArgument
from headrace.notation import BYTES, SECONDS

logger = logging.getLogger("headrace.spark")
Seconds = Annotated[float, Meta(gt=0, le=86_400), SECONDS]
Count = Annotated[int, Meta(ge=1, le=limits.OFFSET_MAX)]
ByteCount = Annotated[int, Meta(ge=1, le=limits.OFFSET_MAX), BYTES]
ValueFormat = Literal["binary", "text", "json"]
ALIASES = {"subscribe": "topic", "kafka.bootstrap.servers": "servers"}
MEANINGLESS = {
    "kafkaconsumer.polltimeoutms", "fetchoffset.numretries", "fetchoffset.retryintervalms",
    "groupidprefix",
}  # fmt: skip
"""Of Kafka's source: they change no row."""
SECURITY = ("kafka.security.", "kafka.sasl.", "kafka.ssl.")
"""How the names of Kafka's options for TLS and logins begin."""


def wrong(name: str, why: str) -> InvalidArgument:
    """The error for an option that cannot be."""
    return InvalidArgument(f"option {name}: {why}", code="invalid_option")


def suggestion(given: str, known: Iterable[str]) -> str:
    """Which of the known names a user may have meant."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), names, 1)
    return f"is it {names[close[0]]}?" if close else "there are " + ", ".join(names.values())


class Given:
    """The options that were given, read by name."""

    def __init__(self, options: Mapping[str, Any]):
        self._values: dict[str, str] = {}
        for name, value in options.items():
            lower = str(name).lower()
            self._values[ALIASES.get(lower, lower)] = str(value)

    def check_names(self, known: Iterable[str]) -> None:
        """Every name is one of ``known``, or the error says which was meant."""
        names = {name.lower() for name in known}
        for given in self._values:
            if given.startswith(SECURITY):
                raise InvalidArgument(
                    f"option {given} is for Kafka's security. Here servers with tls:// (tls://host:9999) "
                    "is TLS, ca is the certificate to trust, and token, or user and password, log in",
                    code="unknown_option",
                )
            if given.startswith("kafka.") or given in MEANINGLESS:
                logger.warning("option %s is for Kafka and has no meaning here", given)
            elif given not in names:
                hint = suggestion(given, known)
                raise InvalidArgument(f"there is no option {given}; {hint}", code="unknown_option")

    def text(self, name: str) -> str | None:
        """None when it was not given, or is empty."""
        return self._values.get(name.lower(), "").strip() or None

    def read(self, kind: type) -> dict[str, Any]:
        """The values of a dataclass's fields that were given: ``min_partitions`` is minPartitions."""
        found: dict[str, Any] = {}
        for field, annotation in get_type_hints(kind, include_extras=True).items():
            name = option_name(field)
            text = self.text(name)
            kinds = {annotation, *get_args(annotation)}
            if text is None:
                continue
            if tuple[str, ...] in kinds:
                found[field] = self.names(name)
            elif str in kinds:
                found[field] = text
            else:
                named, value = f"option {name}", text.lower()
                found[field] = check(named, value, annotation, code="invalid_option", strict=False)
        return found

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list with commas between."""
        given = self.text(name)
        if given is None:
            return None
        found = tuple(part.strip() for part in given.split(","))
        if not all(found):
            raise wrong(name, f"there is nothing between two commas in {given!r}")
        return found


def option_name(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))


def parse_time(option: str, text: str) -> int:
    """Milliseconds since 1970."""
    return notation.parse_time(f"option {option}", text, code="invalid_option")
