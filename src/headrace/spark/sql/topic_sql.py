"""Topics as views by name: ``SELECT … FROM orders`` over a broker or a data directory.

::

    from headrace.spark import session
    from headrace.spark.sql import TopicSql

    topics = TopicSql(session(), {"servers": "127.0.0.1:9999"})
    topics.query("SELECT country, sum(amount) FROM orders GROUP BY country").show()

A view is created when a statement names it: Spark says which name it does not know, and if a topic has this
name, it becomes a view. So quoting, common table expressions, subqueries and the user's own views are left to
Spark, and a topic costs nothing until a statement names it. A topic's name may have dots (```orders.eu```);
without the quotes Spark takes them for parts of a name, so the quotes are added. A wildcard in quotes
(```orders.*```) is a view over all topics that it matches.

The columns are the fields of the JSON values (``schema.py``), or ``value``, and those of the record:
``_key _topic _partition _offset _timestamp _headers _id``, and for JSON ``_corrupt``. Only columns that the
statement mentions are read (``mentioned_columns.py``), so a record is bad only for the fields that it mentions;
with ``_corrupt`` that is all of them. Filters on ``_offset``, ``_partition``, ``_topic`` and ``_timestamp`` narrow
what is read.

Every statement sees the records that exist when it begins: its views are dropped when it has been planned, since
Spark plans a view's partitions once and would never see a later record. A user's own view may read topics, too,
and sees the records that exist when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, is_remote
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.clock import Clock
from headrace.model import is_pattern
from headrace.spark.error_sentences import InvalidSql, be_quiet, in_words
from headrace.spark.mentioned_columns import mentioned_columns
from headrace.spark.notation import RecordRange
from headrace.spark.sessions.connect import cores_of
from headrace.spark.source.positions import Known
from headrace.spark.source.rows import CORRUPT, PREFIX
from headrace.spark.sql.catalog import Catalog
from headrace.spark.sql.schema import Shape, columns
from headrace.spark.sql.text import Schemas, names, quote_name, quoted, unquoted

VIEWS_MAX = 100
TASK_RECORDS = 250_000
"""A task reads about this number of records, or fewer where cores would idle."""
SMALL = 20_000
"""A topic with fewer records is not split."""
_EXPLAIN = re.compile(
    r"\s*EXPLAIN\s+(?:(?:EXTENDED|CODEGEN|COST|FORMATTED|LOGICAL)\s+)?", re.IGNORECASE
)
_CHANGE = re.compile(
    r"\s*(?:INSERT\s+(?:INTO|OVERWRITE)(?:\s+TABLE)?|UPDATE|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE\s+TABLE"
    r"|ALTER\s+(?:TABLE|VIEW)|DROP\s+(?:TABLE|VIEW)(?:\s+IF\s+EXISTS)?)\s+(?!(?:LOCAL\s+)?DIRECTORY\b)",
    re.IGNORECASE,
)
_CREATE_FUNCTION = re.compile(r"\s*CREATE\b.*\bFUNCTION\b", re.IGNORECASE | re.DOTALL)
_HAS_FUNCTIONS = "headrace.sql.hasFunctions"
"""A setting of the session: it has functions of the user's own, which may read topics."""
_NOT_FOUND = {
    "TABLE_OR_VIEW_NOT_FOUND": "relationName",
    "REQUIRES_SINGLE_PART_NAMESPACE": "identifier",
}


class _View(NamedTuple):
    """A topic that a statement names."""

    topic: str
    known: Known
    shape: Shape
    columns: StructType


class TopicSql:
    """Statements over topics, in a Spark session.

    ``options`` say where the topics are, as the source takes them: servers, token, ca, … or path.
    ``note`` is called with the schema that was inferred for a topic, once.
    """

    def __init__(
        self,
        spark: SparkSession,
        options: Mapping[str, str],
        *,
        schemas: Schemas | Mapping[str, str] | None = None,
        bounds: RecordRange | None = None,
        note: Callable[[str], None] | None = None,
        catalog: Catalog | None = None,
    ):
        if not isinstance(schemas, Schemas):
            schemas = Schemas(schemas)
        self.spark = spark
        self.catalog = catalog or Catalog(options, schemas)
        self._bounds = bounds or RecordRange()
        self._note = note or (lambda text: None)
        self._views: dict[str, _View] = {}
        self._clock = Clock()
        be_quiet()

    def close(self) -> None:
        self.catalog.close()

    # --- statements -------------------------------------------------------------------------
    def query(self, text: str) -> DataFrame:
        """A statement's result. A query runs when its result is asked for, anything else at once."""
        self._forget()
        try:
            with in_words():
                return self._query(text)
        finally:
            if not is_remote():  # Spark Connect plans a query only when its result is asked for
                self._forget()

    def _query(self, text: str) -> DataFrame:
        explained = _EXPLAIN.match(text)
        head = explained[0] if explained else ""
        text = text[len(head) :]
        self._check_target(text)
        if head:  # Spark puts the error into the result of an EXPLAIN
            text = self._view_all_topics(text)
        if _CREATE_FUNCTION.match(text):
            self.spark.conf.set(_HAS_FUNCTIONS, "true")
        for _ in range(VIEWS_MAX):
            try:
                frame = self.spark.sql(head + text)
                frame.schema  # noqa: B018  # Spark Connect looks at the statement only now
            except AnalysisException as error:
                parts = self._missing(error)
                if parts is None:
                    raise
                text = self._create_view(text, parts)
            else:
                return frame
        raise InvalidSql(f"a statement can name at most {VIEWS_MAX} topics")

    def _create_view(self, text: str, parts: tuple[str, ...]) -> str:
        """A view of the topic; and the text, in which its name is quoted where it has dots."""
        name = ".".join(parts)
        view = self._views[name] = self._view(name)
        if len(parts) > 1:
            text = quote_name(text, parts)
        self._check_case(text)
        is_whole = name.lower() in text.lower() and not self._uses_other_text(text)
        needed = mentioned_columns(text, view.columns.names) if is_whole else None
        self._read(view, needed).createOrReplaceTempView(quoted(name))
        return text

    def _uses_other_text(self, text: str) -> bool:
        """Whether a view or function of the user's own may read columns that this text does not mention."""
        lower = text.lower()
        views = [each.name for each in self.spark.catalog.listTables() if each.isTemporary]
        return (
            self.spark.conf.get(_HAS_FUNCTIONS, "false") == "true"
            or "global_temp" in lower
            or any(name.lower() in lower for name in views if name not in self._views)
        )

    def _view_all_topics(self, text: str) -> str:
        known = {name.lower() for name in self.catalog.names()}
        for parts in dict.fromkeys(parts for parts, _, _ in names(text)):
            name = ".".join(parts)
            is_topic = name.lower() in known or (is_pattern(name) and self.catalog.known(name))
            if is_topic and name not in self._views:
                text = self._create_view(text, parts)
        return text

    def _check_target(self, text: str) -> None:
        """Spark's own words for an INSERT into one of these views are about operators of its plan."""
        change = _CHANGE.match(text)
        name = next(names(text[change.end() :]), None) if change else None
        if name is None or self.spark.catalog.tableExists(".".join(map(quoted, name[0]))):
            return
        topic = self.catalog.find(".".join(name[0]))
        if topic is not None:
            raise InvalidSql(
                f"topics are read here, not changed: to write into {topic}, publish to it, or use "
                'format("headrace") in a Spark job'
            )

    def _missing(self, error: AnalysisException) -> tuple[str, ...] | None:
        """The name that Spark does not know."""
        parameter = _NOT_FOUND.get(error.getCondition() or "")
        given = (error.getMessageParameters() or {}).get(parameter or "")
        if not given:
            return None
        parts = unquoted(given)
        # The same again: it is in a place where a view does not help, such as INSERT INTO.
        return None if not parts or ".".join(parts) in self._views else parts

    def _check_case(self, text: str) -> None:
        """Spark does not tell ``Orders`` from ``orders``; topics are two."""
        spelt = {part for parts, _, _ in names(text) for part in (*parts, ".".join(parts))}
        for name, view in self._views.items():
            for other in spelt:
                is_close = other.lower() == name.lower() and other not in (name, view.topic)
                if is_close and self.catalog.known(other):
                    raise InvalidSql(
                        f"the topics {view.topic} and {other} differ only in case, and SQL does "
                        "not tell them apart: query them one by one"
                    )

    def _forget(self) -> None:
        for name in self._views:
            self.spark.catalog.dropTempView(name)
        self._views.clear()

    # --- views --------------------------------------------------------------------------------
    def columns(self, name: str) -> StructType:
        """The columns of a topic or a wildcard."""
        return self._view(name).columns

    def _view(self, name: str) -> _View:
        """A topic and its columns; only a sample of it is read."""
        topic = self.catalog.find(name)
        if topic is None:
            raise self.catalog.no_such(name)
        known = self.catalog.known(topic)
        shape, is_news = self.catalog.shape(topic, known)
        if is_news:
            self._tell(topic, shape)
        return _View(topic, known, shape, columns(shape))

    def _tell(self, topic: str, shape: Shape) -> None:
        if not shape.seen:
            self._note(f"{topic} is empty: its values are taken for text")
            return
        records = f"{shape.seen:,} of {shape.total:,}" if shape.seen < shape.total else "all"
        kind = {"json": "JSON", "text": "text", "binary": "bytes"}[shape.values]
        self._note(f"{topic} looks like {kind}, going by {records} records: {shape}")
        for each in shape.notes:
            self._note(f"{topic}: {each}")

    def _read(self, view: _View, needed: set[str] | None) -> DataFrame:
        """The topic, of which only what is needed is read; the other columns are null."""
        wanted = set(view.columns.names) if needed is None else needed
        fields = {field.name for field in view.shape.fields}
        if CORRUPT in wanted:
            wanted = wanted | fields
        reader = self.spark.read.format("headrace").options(
            **self.catalog.options, topic=view.topic
        )
        reader = reader.options(**self._bounds.options(view.known, self._clock.now_ms()))
        records = sum(state.records for state in view.known.values())
        if records > SMALL:
            tasks = max(cores_of(self.spark), records // TASK_RECORDS)
            reader = reader.option("minPartitions", tasks)
        chosen = [each for each in view.columns.fields if each.name in wanted]
        if not chosen:  # count(*)
            chosen = [each for each in view.columns.fields if each.name == f"{PREFIX}offset"]
        prefix = ""
        if wanted & (fields | {CORRUPT}):
            reader = reader.option("valueFormat", "json")
        else:
            prefix = PREFIX  # the record's own columns have it here, and not there
        schema = StructType()
        for each in chosen:
            schema.add(each.name.removeprefix(prefix), each.dataType)
        frame = reader.schema(schema).load()
        return frame.select(
            *(
                F.col(quoted(each.name.removeprefix(prefix))).alias(each.name)
                if each in chosen
                else F.lit(None).cast(each.dataType).alias(each.name)
                for each in view.columns.fields
            )
        )


__all__ = ["RecordRange", "Schemas", "TopicSql"]
