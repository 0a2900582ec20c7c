"""Options of a source, a sink or a table, read by name and checked, with errors that name the option.

Names of options are not case-sensitive, as everywhere in Spark. Any name that is not known is an error:
a misspelt option that is silently ignored is how a job reads the wrong thing for a year.

So that jobs written for Kafka port by changing the format's name, ``subscribe`` is ``topic`` and
``kafka.bootstrap.servers`` is ``servers``. Other options that begin with ``kafka.``, or only tune Kafka's
consumers, have no meaning here and are named in a warning. Where an option of Kafka's means something,
the error says what to write instead.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace import limits
from headrace.errors import InvalidArgument

logger = logging.getLogger("headrace.spark")
SECONDS_MAX = 86_400.0
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

    def seconds(self, name: str, default: float, high: float = SECONDS_MAX) -> float:
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
