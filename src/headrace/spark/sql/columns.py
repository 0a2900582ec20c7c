"""Which columns of which topics a query needs.

Spark asks a source that is written in Python for all of its columns, and a JSON topic of thirty fields is
parsed into thirty columns to be counted. So a query is planned twice. First over *stand-ins*: tables with
the topics' columns and no rows, of which the optimizer knows nothing, so that what is left of their
columns in its plan is what the query needs. Then over the topics, of which only that is read.

An attribute is needed when an operator refers to it, or when the whole plan returns it. That holds for
operators that hand their input's attributes on as they are; of any other kind (``UNION``) everything
beneath it is needed. To need too much is slow, to need too little would be wrong.

Planning never runs anything: commands are skipped (``CommandExecutionMode.SKIP``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

MARK = "headrace"
"""In the metadata of a stand-in's columns: the name of its view."""
_ATTRIBUTE = re.compile(r"#(\d+)L?(?=\||$)")
_HAND_ON = {
    *("Project", "Filter", "Aggregate", "Join", "Sort", "GlobalLimit", "LocalLimit", "Offset"),
    *("Window", "Generate", "Expand", "Sample", "Repartition", "RepartitionByExpression"),
    *("RebalancePartitions", "SubqueryAlias", "Distinct", "Tail", "WithCTE", "CTERelationDef"),
}


class Planned(NamedTuple):
    """What is known of a statement before it runs."""

    is_query: bool
    needed: dict[str, set[str]]
    """The columns, by the name of the view. A view that is not there was not found in the plan."""


def stand_in(spark: SparkSession, name: str, columns: StructType) -> DataFrame:
    """A table with these columns, marked with the name of the view."""
    marked = [
        StructField(each.name, each.dataType, each.nullable, {MARK: name})
        for each in columns.fields
    ]
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), StructType(marked))


def plan(spark: SparkSession, text: str) -> Planned:
    """Analyze and optimize a statement; an ``AnalysisException`` if that cannot be done."""
    state = spark._jsparkSession.sessionState()
    jvm: Any = spark.sparkContext._jvm
    modes = getattr(jvm, "org.apache.spark.sql.execution.CommandExecutionMode")
    execution = state.executePlan(state.sqlParser().parsePlan(text), modes.SKIP())
    if _is_command(jvm, execution.analyzed()):
        return Planned(False, {})
    return Planned(True, _needed(execution.optimizedPlan()))


def _is_command(jvm: Any, root: Any) -> bool:
    command = jvm.java.lang.Class.forName(
        "org.apache.spark.sql.catalyst.plans.logical.Command",
        False,
        jvm.java.lang.Thread.currentThread().getContextClassLoader(),
    )
    return bool(command.isInstance(root))


def _needed(root: Any) -> dict[str, set[str]]:
    numbers = _numbers(root.output())
    leaves = []
    for node in _nodes(root):
        numbers |= _numbers(node.references().toSeq())
        for subquery in _each(node.subqueries()):
            numbers |= _numbers(subquery.output())
        children = list(_each(node.children()))
        if not children:
            leaves.append(node)
        elif node.nodeName() not in _HAND_ON:
            for child in children:
                numbers |= _numbers(child.output())
    found: dict[str, set[str]] = {}
    for leaf in leaves:
        for attribute in _each(leaf.output()):
            metadata = attribute.metadata()
            if metadata.contains(MARK):
                names = found.setdefault(metadata.getString(MARK), set())
                if attribute.exprId().id() in numbers:
                    names.add(attribute.name())
    return found


def _nodes(root: Any) -> Iterator[Any]:
    """All operators, those of subqueries too."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _each(node.children())
        waiting += _each(node.subqueries())


def _each(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(number) for number in range(sequence.size()))


def _numbers(attributes: Any) -> set[int]:
    """The numbers that tell attributes apart, by one call for all of them."""
    return {int(number) for number in _ATTRIBUTE.findall(attributes.mkString("|"))}
