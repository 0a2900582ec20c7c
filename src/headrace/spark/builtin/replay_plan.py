"""What a replay is to do, cut into numbered steps, and the file that remembers it.

A :class:`Request` is what a user said, read and checked. A :class:`Plan` is what that came to when it was
first run: exact offsets, and into how many steps they are cut. Which offsets a step has follows from the
plan alone, so a replay that is resumed has the same steps, whatever has been published meanwhile.

The plan lies in ``<state>/<name>.json`` with the number of steps that are done. That number only saves
work: it is the broker that knows which steps are committed. The name is claimed in the broker before the
file is there, so a name that was used by a replay whose file is elsewhere is refused, and not taken for
"all done".

Rejected: the plan in the broker, which would need a place there for what is one user's affair; a plan
from the arguments alone, because "until now" is another place every time.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from headrace import limits
from headrace.errors import Conflict, DataCorrupt, InvalidArgument
from headrace.files import Files, Handle
from headrace.model import check_pattern, check_subscription_name, check_topic_name, is_pattern
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.table import directory_of
from headrace.spark.sql.text import moment_ms

STEP_OFFSETS_MAX = 50_000
STEP_BYTES_MAX = 16 << 20
"""A step is one commit; what it may have at most, by what the records have on average."""
VERSION = 1
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([km]?)(?:\s*/\s*(s|m|min|h))?\Z", re.IGNORECASE)
_UNIT_S = {"s": 1, "m": 60, "min": 60, "h": 3600}
_RANGE = re.compile(r"(?:([^/:]+)/)?(\d+):(?:(\d*)-(\d*)|(\d+))\Z")
Arguments = dict[str, Any]
Selection = list[tuple[str | None, int, int, int]]
"""(topic, partition, start, end): topic None is the only one there is; a large end is "all"."""


def parse_rate(text: str) -> float:
    """Rows a second: ``1000/s``, ``5k/s``, ``60/m``; a number alone is a second's."""
    found = _RATE.match(text.strip())
    if found is None:
        raise InvalidArgument(f"--rate {text!r} is no rate: write 1000/s, 5k/s, 60/m or 100/h")
    number = float(found[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[2].lower()]
    rate = number / _UNIT_S[(found[3] or "s").lower()]
    if not rate > 0:
        raise InvalidArgument("--rate 0 would never end; leave it out for as fast as it goes")
    return rate


def parse_offsets(text: str) -> Selection:
    """``0:100-200,1:5-``, ``orders/0:7``, or ``{"orders": {"0": [[100, 201]]}}``.

    In text, both ends are meant, as in everything that Headrace prints; JSON is what ``archive show
    --json`` has, where the end is the next offset.
    """
    if text.lstrip().startswith("{"):
        return _json_offsets(text)
    found: Selection = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise _bad_offsets(f"{part.strip()!r} is no range")
        topic, partition, first, last, single = match.groups()
        if single is not None:
            first = last = single
        start = int(first or 0)
        end = int(last) + 1 if last else limits.OFFSET_MAX
        found.append(_checked(topic, int(partition), start, end))
    return found


def _json_offsets(text: str) -> Selection:
    try:
        document = Offsets.of_text(text)
    except (ValueError, TypeError, AttributeError):
        raise _bad_offsets(f"{text[:80]!r} is not such JSON") from None
    return [_checked(*span) for span in document]


def _checked(
    topic: str | None, partition: int, start: int, end: int
) -> tuple[str | None, int, int, int]:
    if not 0 <= start < end <= limits.OFFSET_MAX:
        raise _bad_offsets(f"{partition}:{start}-{end - 1} has nothing in it")
    if topic is not None:
        check_topic_name(topic, internal=True)
    return topic, partition, start, end


def _bad_offsets(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--offsets: {why}; write 0:100-200,1:5- or orders/0:100-200, or JSON as in "
        '{"orders": {"0": [[100, 201]]}}',
        code="invalid_offsets",
    )


def is_table(source: str) -> bool:
    """A path has a slash in it, and the name of a topic never has."""
    return "/" in source or source.startswith((".", "~", "file:"))


# --- what a user said -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """What is to be replayed, and how."""

    source: str
    """A topic, several with commas, a wildcard; or the absolute path of a table."""
    to: str
    since: str | None = None
    until: str | None = None
    offsets: str | None = None
    where: str | None = None
    keep_timestamps: bool = False
    partition: str = "key"
    """``key``: as any client would place the record. ``same``: the partition it was in."""

    @classmethod
    def of(cls, source: str, to: str, **given: Any) -> Request:
        """Everything that can be told without asking anybody is checked here."""
        source = str(directory_of(source)) if is_table(source) else source.strip()
        request = cls(source, check_topic_name(to), **given)
        if not request.is_table:
            for topic in request.topics:
                if is_pattern(topic):
                    check_pattern(topic)
                else:
                    check_topic_name(topic, internal=True)
        if request.partition not in ("key", "same"):
            raise InvalidArgument(f"--partition is same or key, not {request.partition!r}")
        if request.offsets is not None:
            parse_offsets(request.offsets)
            if request.since is not None or request.until is not None:
                raise InvalidArgument("give --offsets, or --since and --until, not both")
        request.times(0)
        return request

    @property
    def is_table(self) -> bool:
        return is_table(self.source)

    @property
    def topics(self) -> list[str]:
        return list(dict.fromkeys(each.strip() for each in self.source.split(",")))

    def times(self, now_ms: int) -> tuple[int | None, int | None]:
        since = None if self.since is None else moment_ms("--since", self.since, now_ms)
        until = None if self.until is None else moment_ms("--until", self.until, now_ms)
        return since, until

    def chosen(self, there: Offsets) -> Offsets:
        """What is there, or those of ``--offsets``, which all have to be there."""
        if self.offsets is None:
            return there
        topics = sorted({topic for topic, _ in there.partitions()})
        wanted = Offsets()
        for named, partition, start, end in parse_offsets(self.offsets):
            topic = named if named is not None else topics[0] if len(topics) == 1 else None
            if topic is None:
                raise _bad_offsets(f"which topic? There are {', '.join(topics) or 'none'}")
            ranges = there.of(topic, partition)
            if not ranges:
                raise _bad_offsets(f"there is nothing in {topic}/{partition}")
            wanted.add(
                topic,
                partition,
                ranges[0][0] if start == 0 else start,
                ranges[-1][1] if end == limits.OFFSET_MAX else end,
            )
        missing = list(wanted.without(there))
        if missing:
            raise _bad_offsets(f"{', '.join(map(str, missing[:5]))} is not there")
        return wanted


def step_offsets(rate: float | None, bytes_per_record: float) -> int:
    """How many offsets a step has: those of a second, and neither too many nor too large."""
    most = STEP_OFFSETS_MAX
    if bytes_per_record > 0:
        most = min(most, int(STEP_BYTES_MAX / bytes_per_record))
    if rate is not None:
        most = min(most, int(rate))
    return max(1, most)


# --- what that came to ------------------------------------------------------------------------------
class StepSpan(NamedTuple):
    """Offsets ``start`` to ``end - 1`` that belong to a step."""

    start: int
    end: int
    step: int


@dataclass
class Plan:
    """Offsets, and in how many steps. A step has the same share of every partition."""

    request: Arguments
    offsets: Offsets
    steps: int
    since_ms: int | None = None
    until_ms: int | None = None
    incarnations: dict[str, int] = field(default_factory=dict)
    """Of the topics that are read; a topic that was made anew is another one."""
    target: int = 0
    """The incarnation of the topic that is written."""
    weight: float = 0.0
    """Bytes of a record, about."""
    done: int = 0
    rows: int = 0
    """Written up to now; fewer than offsets where a condition was given."""

    @classmethod
    def of(
        cls, request: Request, offsets: Offsets, step: int, times: tuple[int | None, int | None]
    ) -> Plan:
        return cls(asdict(request), offsets, -(-offsets.count // step), *times)

    @property
    def count(self) -> int:
        return self.offsets.count

    @property
    def is_finished(self) -> bool:
        return self.done >= self.steps

    def steps_of(
        self, topic: str, partition: int, first: int | None = None, last: int | None = None
    ) -> list[StepSpan]:
        """What steps ``first`` to ``last - 1`` have of a partition, in order of offsets."""
        ranges = self.offsets.of(topic, partition)
        length = sum(end - start for start, end in ranges)
        found = []
        for step in range(first or 0, self.steps if last is None else last):
            low, high = length * step // self.steps, length * (step + 1) // self.steps
            for start, end in ranges:
                size = end - start
                if low < size and high > 0 and low < high:
                    found.append(StepSpan(start + max(low, 0), start + min(high, size), step))
                low, high = low - size, high - size
        return found

    def spans(self, first: int, last: int) -> dict[tuple[str, int], list[StepSpan]]:
        """What steps ``first`` to ``last - 1`` have, by partition."""
        found = {
            (topic, partition): self.steps_of(topic, partition, first, last)
            for topic, partition in self.offsets.partitions()
        }
        return {key: some for key, some in found.items() if some}

    def done_offsets(self) -> int:
        """How many offsets the steps have that are done."""
        total = 0
        for topic, partition in self.offsets.partitions():
            length = sum(end - start for start, end in self.offsets.of(topic, partition))
            total += length * self.done // max(1, self.steps)
        return total

    def as_text(self) -> bytes:
        document = {**asdict(self), "version": VERSION, "offsets": self.offsets.as_document()}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)

    @classmethod
    def of_text(cls, text: bytes) -> Plan:
        document = orjson.loads(text)
        if document.pop("version") != VERSION:
            raise ValueError("another version")
        return cls(**{**document, "offsets": Offsets.of_document(document["offsets"])})


# --- the file -----------------------------------------------------------------------------------------
def default_state() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "headrace" / "replays"


def new_name() -> str:
    return f"replay-{secrets.token_hex(4)}"


class State:
    """The plan of one name, on disk, held by whoever runs it."""

    def __init__(self, directory: str | os.PathLike[str] | None, name: str):
        self.name = check_subscription_name(name)
        self.directory = Path(directory) if directory is not None else default_state()
        self.path = self.directory / f"{name}.json"
        self._files = Files()
        self._lock: Handle | None = None

    def __enter__(self) -> State:
        try:
            self._files.make_directory(self.directory)
            handle = self._files.open(self.directory / f"{self.name}.lock", write=True, create=True)
        except OSError as error:
            raise InvalidArgument(
                f"{self.directory} cannot keep the plan of a replay: {error.strerror}; give another "
                "directory with --state",
                code="invalid_path",
            ) from None
        if not self._files.lock(handle):
            handle.close()
            raise Conflict(f"the replay {self.name} is running already", code="replay_running")
        self._lock = handle
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load(self, request: Request) -> Plan | None:
        """The plan that is there, if it is for this request; None if there is none."""
        try:
            plan = Plan.of_text(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataCorrupt(
                f"{self.path} is not the plan of a replay; move it away and use another --name",
                code="invalid_plan",
            ) from None
        for name, now in asdict(request).items():
            before = plan.request.get(name)
            if now != before:
                raise Conflict(
                    f"the replay {self.name} was begun with {_option(name)} {before!r}, not {now!r}: "
                    "repeat it as it was, or give another --name",
                    code="replay_differs",
                )
        return plan

    def begin(self, plan: Plan) -> Path:
        """Write it down under another name, before the name is claimed."""
        return self._files.write_temporary(self.path, [plan.as_text()])

    def begun(self, temporary: Path) -> None:
        self._files.rename(temporary, self.path)
        self._files.sync_directory(self.directory)

    def drop(self, temporary: Path) -> None:
        self._files.remove(temporary)

    def save(self, plan: Plan) -> None:
        self._files.replace(self.path, [plan.as_text()])


def _option(name: str) -> str:
    return "--from" if name == "source" else f"--{name.replace('_', '-')}"


def offsets_of(rows: Iterable[Mapping[str, Any]]) -> Offsets:
    """From the lowest and highest offset of each partition."""
    return Offsets(
        Span(row["topic"], row["partition"], row["lowest"], row["highest"] + 1) for row in rows
    )
