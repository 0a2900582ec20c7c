"""Which columns of a record a pipeline really uses.

Spark asks a Python source for all columns that it said it has, whatever the query does with them. A JSON
pipeline that sums up a field would carry every record's bytes, headers and id along. So a pipeline is
planned twice: with all columns first, of which Spark's optimizer tells which are used; then with those,
and nulls in the place of the others, which nobody looks at.

A column that is wrongly thought to be unused would be null, so this is careful: it only knows the kinds of
nodes in :data:`KNOWN`, in which a column keeps its number from where it is made to where it is used. A
plan with any other node, or with a subquery, gets all columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Used = dict[str, frozenset[str]]
"""The option ``topic`` of a source -> the columns of it that are used."""


KNOWN = frozenset(
    {
        "Aggregate", "ArrowEvalPython", "BatchEvalPython", "CollectMetrics", "Deduplicate",
        "DeduplicateWithinWatermark", "EventTimeWatermark", "Expand", "Filter", "Generate",
        "GlobalLimit", "Join", "LocalLimit", "LocalRelation", "LogicalRelation", "OneRowRelation",
        "Project", "RepartitionByExpression", "Sort", "StreamingRelationV2", "Union", "Window",
    }
)  # fmt: skip


def used_columns(frames: Iterable[DataFrame]) -> Used | None:
    """What is used of each source, all of these frames together; None: that cannot be told."""
    found: dict[str, set[str]] = {}
    for frame in frames:
        session: Any = frame.sparkSession
        analyzed = frame._jdf.queryExecution().analyzed()
        plan = session._jsparkSession.sessionState().optimizer().execute(analyzed)
        nodes = list(_nodes(session._jvm, plan))
        if not all(_kind(node) in KNOWN and node.subqueries().isEmpty() for node in nodes):
            return None
        used = {attribute.exprId().id() for attribute in _seq(session._jvm, plan.output())}
        for node in nodes:
            used |= _needs(session._jvm, node)
        for node in nodes:
            if _kind(node) == "StreamingRelationV2":
                names = found.setdefault(str(node.extraOptions().get("topic")), set())
                for attribute in _seq(session._jvm, node.output()):
                    if attribute.exprId().id() in used:
                        names.add(str(attribute.name()))
    return {topic: frozenset(names) for topic, names in found.items()}


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _needs(jvm: Any, node: Any) -> set[int]:
    """What a node of the plan takes from those below it, by their numbers."""
    found = {each.exprId().id() for each in _seq(jvm, node.references().toSeq())}
    if (
        node.nodeName() == "Union"
    ):  # it takes all that its children have, and names only the first's
        for child in _seq(jvm, node.children()):
            found |= {each.exprId().id() for each in _seq(jvm, child.output())}
    return found


def _nodes(jvm: Any, plan: Any) -> Iterator[Any]:
    yield plan
    for child in _seq(jvm, plan.children()):
        yield from _nodes(jvm, child)


def _seq(jvm: Any, sequence: Any) -> Any:
    return jvm.scala.jdk.javaapi.CollectionConverters.asJava(sequence)
