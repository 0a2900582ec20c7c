"""The checkpoint knows the query that it belongs to.

A checkpoint holds offsets by the number of a source, and state by the number of an operator. Spark does not
record what the query was, so it continues with any query that looks alike: windows of 20 seconds beside those of
10. Here each checkpoint holds a description of its query (``headrace.json``), and a changed query is compared
with it before anything starts:

=================================  ==================================================================
goes on                            trigger, rates and other options, ``failed``, ``group``, ``restarts``,
                                   columns of the message, another delay of a watermark, more topics in
                                   ``from``; without state also SQL, function, schema and conditions;
                                   with state, what comes after the state
is refused                         topics that are not read any more, other inputs, another output, another
                                   ``mode`` or ``merge_on``; a change in or before the state
=================================  ==================================================================

*State* is read off Spark's physical plan: each stateful operator (aggregate, join of two streams,
deduplication, …) with everything below it, without names and numbers that change from run to run. So two
spellings of the same SQL are the same query, and what comes after the state is not part of it. Two versions of Spark may write plans differently: after a
change of the version, only the declaration is compared. The code of Python functions is not part of a plan.

The description of a checkpoint outside of the local file system is read and written by Spark, as text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pyspark
from pyspark.errors import AnalysisException

from headrace.files import SharedFiles
from headrace.model import is_pattern, pattern_matches
from headrace.spark.checkpoints import has_begun, local_path
from headrace.spark.pipelines.declaration import Pipeline, TableOutput, TopicInput
from headrace.spark.pipelines.inputs import schema_of
from headrace.spark.pipelines.sections import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE = "headrace.json"
FORMAT_VERSION = 1
FIXED = ("to", "to.format", "to.merge_on", "mode")
"""A query that writes elsewhere, or in another way, is another query."""
STATEFUL = (
    "StateStoreSave", "SessionWindowStateStoreSave", "Streaming", "FlatMapGroups", "TransformWithState",
    "Aggregate", "Deduplicate", "GlobalLimit",
)  # fmt: skip
"""How the names of operators begin that keep state: those of a physical plan, and those of a logical one. A join
of a logical plan keeps state if both sides are streams."""
ADVICE = (
    "Run it under a new name; or with --from checkpoint, which begins without state where the old query "
    "stopped; or with --reset, which reads and writes everything again"
)
_WORDS_MAX = 160


class QueryChanged(InvalidPipeline, code="query_changed"):
    """A query that cannot continue from its checkpoint."""


@dataclass(frozen=True)
class SourceIdentity:
    """A source of a query; its number is its place in the list."""

    input: str
    topics: tuple[str, ...]


@dataclass(frozen=True)
class QueryIdentity:
    """What is compared of a query."""

    declaration: Mapping[str, Any]
    """The keys of the file that change what the query does."""
    sources: tuple[SourceIdentity, ...] = ()
    state: tuple[str, ...] = ()
    """The stateful parts of the plan. None: a query without state."""
    spark: str = field(default_factory=lambda: ".".join(pyspark.__version__.split(".")[:2]))
    version: int = FORMAT_VERSION

    def as_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    @classmethod
    def of_bytes(cls, content: bytes) -> QueryIdentity | None:
        """None if another version of Headrace, or nobody, wrote it."""
        try:
            document = orjson.loads(content)
            if document["version"] != FORMAT_VERSION:
                return None
            sources = tuple(
                SourceIdentity(each["input"], tuple(each["topics"])) for each in document["sources"]
            )
            return cls(
                document["declaration"], sources, tuple(document["state"]), document["spark"]
            )
        except (ValueError, KeyError, TypeError):
            return None


def identify(pipeline: Pipeline, rows: DataFrame) -> QueryIdentity:
    """The identity of a planned query."""
    plans = explained(rows)
    names = {",".join(each.topics): each.name for each in pipeline.topics}
    types = {
        ",".join(each.topics): {f.name: f.dataType.simpleString() for f in schema_of(each).fields}
        for each in pipeline.topics
    }
    sources = tuple(
        SourceIdentity(names.get(topics, topics), tuple(topics.split(",")))
        for topics in source_topics(plans.get("Analyzed Logical Plan", ""))
    )
    return QueryIdentity(declared(pipeline), sources, state_of(plans, types))


def declared(pipeline: Pipeline) -> dict[str, Any]:
    """The keys that change what a query does, as the file would name them."""
    found: dict[str, Any] = {}
    for each in pipeline.inputs:
        prefix = "" if len(pipeline.inputs) == 1 else f"inputs.{each.name}."
        values: dict[str, Any] = {"format": each.format, "schema": _joined(each.schema)}
        if isinstance(each, TopicInput):
            values |= {
                "from": list(each.topics),
                "watermark": str(each.watermark.column) if each.watermark else None,
                "deduplicate": list(each.deduplicate),
                "expect": [_joined(text) for text in each.expect],
            }
        else:
            values["table"] = each.path
        found |= {prefix + key: value for key, value in values.items() if value}
    values = {"sql": _joined(pipeline.sql), "mode": pipeline.mode, "to": str(pipeline.to)}
    if pipeline.function is not None:
        values["function"] = pipeline.way
    if isinstance(pipeline.to, TableOutput):
        values |= {"to": pipeline.to.path, "to.format": pipeline.to.format}
        values["to.merge_on"] = list(pipeline.to.merge_on)
    return found | {key: value for key, value in values.items() if value}


def _joined(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())


# --- comparing ------------------------------------------------------------------------------------
def check_continues(
    pipeline: Pipeline, checkpoint: str, old: QueryIdentity, new: QueryIdentity
) -> list[str]:
    """The keys that have changed and go on; :class:`QueryChanged` if the query cannot."""
    keys = [*new.declaration, *(key for key in old.declaration if key not in new.declaration)]
    changed = [key for key in keys if old.declaration.get(key) != new.declaration.get(key)]

    def refused(key: str, why: str) -> QueryChanged:
        difference = ""
        if old.declaration.get(key) != new.declaration.get(key):
            difference = f" ({_difference(old.declaration.get(key), new.declaration.get(key))})"
        where = pipeline.section.place(key)
        return QueryChanged(
            f"{where}: {key}: it has changed{difference}, and the checkpoint {checkpoint} {why}. {ADVICE}"
        )

    for number, (was, now) in enumerate(zip(old.sources, new.sources, strict=False)):
        for topic in was.topics:
            if not any(_includes(each, topic) for each in now.topics):
                key = "from" if len(pipeline.inputs) == 1 else f"inputs.{now.input}.from"
                raise refused(key, f"holds positions of {topic} for this input (source {number})")
    if len(old.sources) != len(new.sources):
        raise refused(
            "inputs", f"is of a query with {len(old.sources)} sources, not {len(new.sources)}"
        )
    for key in FIXED:
        if key in changed:
            raise refused(key, "is of a query that wrote in another way, or to another place")
    if old.state != new.state and _is_comparable(old, new, changed):
        default = "function" if pipeline.function is not None else "sql"
        key = next((key for key in changed if not key.endswith("from")), default)
        raise refused(key, _state_sentence(old, new))
    return changed


def _is_comparable(old: QueryIdentity, new: QueryIdentity, changed: Sequence[str]) -> bool:
    """Whether different states mean different queries.

    The same SQL has the same state, whatever the plans look like. A function may have changed inside.
    """
    if old.spark != new.spark:
        return bool(changed)
    return bool(changed) or "function" in new.declaration


def _state_sentence(old: QueryIdentity, new: QueryIdentity) -> str:
    if not old.state:
        return "is of a query without state, which this one needs"
    if not new.state:
        return "holds state of groups or rows that would never be written"
    if old.spark != new.spark:
        return f"holds state that Spark {old.spark} wrote: change Spark and the query one after the other"
    return "holds state that the old query made"


def _includes(one: str, other: str) -> bool:
    """Whether a topic or a pattern is read by a topic or a pattern."""
    return one == other or (not is_pattern(other) and pattern_matches(one, other))


def _difference(old: Any, new: Any) -> str:
    """The part that differs: ``'10 seconds' was '20 seconds'``."""
    if not isinstance(old, str) or not isinstance(new, str):
        return f"it was {_shown(old)}, it is {_shown(new)}"
    was, now = old.split(), new.split()
    start = 0
    while start < min(len(was), len(now)) and was[start] == now[start]:
        start += 1
    end = 0
    while end < min(len(was), len(now)) - start and was[-1 - end] == now[-1 - end]:
        end += 1
    parts = [" ".join(words[start : len(words) - end]) for words in (was, now)]
    return f"it was {_shown(parts[0])}, it is {_shown(parts[1])}"


def _shown(value: Any) -> str:
    if value in (None, "", []):
        return "absent"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _WORDS_MAX else text[: _WORDS_MAX - 1] + "…"


# --- plans ----------------------------------------------------------------------------------------
_HEADING = re.compile(r"^== (.+) ==$", re.MULTILINE)
_LINE = re.compile(r"^((?:[:| ] {2})*(?:[:+]- )?)(?:\*\(\d+\) |[!'~])*(\S.*)$")
_TOPIC = re.compile(r"\btopic=([^\s\]]*?)(?:, |\]|$)")
_ATTRIBUTE = re.compile(r"`?([^\s(),\[\]`]*)`?#(\d+)L?(?:-T\d+ms)?")
_NOISE = re.compile(
    r"@[0-9a-f]{4,}\b|\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
    r"|(?<=\b(?:rand|uuid)\()-?\d+|(?<=\b(?:randn)\()-?\d+"
    r"|\[plan_id=\d+\]|, output=\[[^\]]*\]|state info \[[^\]]*\]|, \d+(?=\), )"
)
_NOW = re.compile(r"current_(?:timestamp|date|time)\(|\bnow\(|localtimestamp\(|unix_timestamp\(\)")
_DELAY = re.compile(r"^(EventTimeWatermark\b.*?),[^,]*$")


def explained(rows: DataFrame) -> dict[str, str]:
    """The logical plans by their headings."""
    taken = io.StringIO()
    with redirect_stdout(taken):  # the only public way to them
        rows.explain("extended")
    parts = _HEADING.split(taken.getvalue())
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=False))


@dataclass
class _Node:
    text: str
    children: list[_Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        return re.split(r"[\s(\[]", self.text, maxsplit=1)[0]

    @property
    def is_stream(self) -> bool:
        return self.name.startswith("StreamingRelation") or any(
            child.is_stream for child in self.children
        )

    @property
    def keeps_state(self) -> bool:
        if self.name == "Join":
            return len(self.children) == 2 and all(child.is_stream for child in self.children)
        return bool(self.children) and self.name.startswith(STATEFUL) and self.is_stream

    def lines(self, depth: int = 0) -> Iterator[tuple[int, _Node]]:
        yield depth, self
        for child in self.children:
            yield from child.lines(depth + 1)


def _tree(plan: str) -> _Node:
    """The operators of a plan, from Spark's drawing of it."""
    root = _Node("")
    path = [root]
    for line in plan.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        depth = len(found[1]) // 3 + 1
        if depth > len(path) or (depth == 1 and root.children):
            (
                path[-1] if len(path) > 1 else root
            ).text += f" {line.strip()}"  # a text with line breaks
            continue
        node = _Node(found[2])
        del path[depth:]
        path[-1].children.append(node)
        path.append(node)
    return root


def source_topics(plan: str) -> list[str]:
    """The topics of each source of a query, in the order in which Spark numbers them."""
    leaves = dict.fromkeys(
        node.text for _, node in _tree(plan).lines() if node.name.startswith("StreamingRelation")
    )
    return [found[1] for leaf in leaves if (found := _TOPIC.search(leaf))]


def state_of(plans: Mapping[str, str], types: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """The stateful parts of a plan, each with everything below it. ``types``: of columns, by topics."""
    analysed = plans.get("Analyzed Logical Plan", "").partition("\n")[2]  # after the columns
    # The optimizer replaces the current time by a constant.
    plan = analysed if _NOW.search(analysed) else plans.get("Physical Plan", "")
    known: dict[str, str] = {}
    for _, leaf in _tree(analysed).lines():
        if leaf.name.startswith("StreamingRelation") and (topics := _TOPIC.search(leaf.text)):
            of_topics = types.get(topics[1], {})
            known |= {f[2]: of_topics.get(f[1], "") for f in _ATTRIBUTE.finditer(leaf.text)}
    return tuple(_plain(node, known) for node in _topmost(_tree(plan)))


def _topmost(node: _Node) -> Iterable[_Node]:
    if node.keeps_state:
        return [node]
    return [found for child in node.children for found in _topmost(child)]


def _plain(root: _Node, types: Mapping[str, str]) -> str:
    """A part of a plan as text that is the same in every run.

    Columns are numbered in the order in which they appear. Of a source, only the columns that are used count.
    """
    nodes = [(depth, node) for depth, node in root.lines()]
    if (
        "Deduplicate" in root.name
    ):  # its state holds the keys alone: columns that pass are none of it
        for _, node in nodes:
            if node.name == "Project":
                node.text = f"Project {[each for each in _items(node.text) if ' AS ' in each]}"
    used = {
        found[2] for _, node in nodes if node.children for found in _ATTRIBUTE.finditer(node.text)
    }
    numbers: dict[str, str] = {}
    lines = []
    for depth, node in nodes:
        if node.children:
            text = _NOISE.sub("", _DELAY.sub(r"\1", node.text))
            text = _ATTRIBUTE.sub(lambda f: numbers.setdefault(f[2], f"#{len(numbers)}"), text)
        else:
            columns = sorted({(f[1], f[2]) for f in _ATTRIBUTE.finditer(node.text) if f[2] in used})
            named = (
                f"{name} {numbers[number]} {types.get(number, '')}" for name, number in columns
            )
            text = f"{'stream' if node.is_stream else 'table'} {', '.join(named)}"
        lines.append(f"{'  ' * depth}{text}")
    return "\n".join(lines)


def _items(text: str) -> list[str]:
    """The items of the list in brackets at the end of an operator's text."""
    found, depth = [""], 0
    for char in text.partition("[")[2].removesuffix("]"):
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return [each.strip() for each in found]


# --- the file -------------------------------------------------------------------------------------
def stored(spark: SparkSession, checkpoint: str) -> QueryIdentity | None:
    """The identity in a checkpoint from which a query would continue; None if there is none."""
    home = local_path(checkpoint)
    if home is not None:
        path = home / FILE
        if not has_begun(home) or not path.exists():
            return None
        return QueryIdentity.of_bytes(path.read_bytes())
    try:
        rows = spark.read.text(f"{checkpoint}/{FILE}", wholetext=True).collect()
    except AnalysisException:
        return None  # it does not exist
    return QueryIdentity.of_bytes(rows[0][0].encode()) if rows else None


def store(spark: SparkSession, checkpoint: str, identity: QueryIdentity) -> None:
    """Before the query starts, so that no checkpoint is without it."""
    home = local_path(checkpoint)
    if home is None:
        rows = spark.createDataFrame([(identity.as_bytes().decode(),)], "value STRING")
        rows.coalesce(1).write.mode("overwrite").text(f"{checkpoint}/{FILE}")
        return
    disk = SharedFiles()
    disk.make_directory(home)
    disk.replace(home / FILE, [identity.as_bytes()])
