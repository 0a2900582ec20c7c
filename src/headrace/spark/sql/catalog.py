"""Which topics exist, and the shape of their records: what a prompt knows before Spark has started.

A topic's shape is what was declared, else what its records look like. That is looked up once and kept,
until the topic is another one or, when there were few records to look at, there are more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pyspark.sql.types import StructField

from headrace.errors import InvalidArgument, TopicNotFound
from headrace.model import INTERNAL_PREFIX, check_pattern, check_topic_name, is_pattern
from headrace.spark.error_sentences import sentence
from headrace.spark.history.store import HistoryStore
from headrace.spark.notation import parse_schema
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known
from headrace.spark.source.rows import CORRUPT
from headrace.spark.source.stores import DirectoryStore, open_store
from headrace.spark.sql.schema import SAMPLE_RECORDS, TAKEN, Shape, infer, take_sample
from headrace.spark.sql.text import Schemas, similar


class Described(NamedTuple):
    """A line of the list of topics."""

    topic: str
    partitions: int
    records: int
    bytes: int


class _Kept(NamedTuple):
    shape: Shape
    incarnations: dict[str, int]
    records: int


class Catalog:
    """The topics of a broker or a data directory. ``options`` are those of the source, but topic."""

    def __init__(self, options: Mapping[str, str], schemas: Schemas | None = None):
        self.options = dict(options)
        self.schemas = schemas or Schemas()
        self._store = open_store(SourceOptions.of({**self.options, "topic": ">"}))
        self._kept: dict[str, _Kept] = {}

    def close(self) -> None:
        self._store.close()

    @property
    def place(self) -> str:
        """Where the topics are, for people."""
        log = self._store.log if isinstance(self._store, HistoryStore) else self._store
        return str(log.path) if isinstance(log, DirectoryStore) else str(log.connection)

    # --- names ------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """All topics, those of dead letters too, but not the internal ones."""
        found = self._store.names()
        return sorted(name for name in found if not name.startswith(INTERNAL_PREFIX))

    def known(self, name: str) -> Known:
        """The topics of a name or a wildcard; empty if none exists."""
        try:
            (check_pattern(name) if is_pattern(name) else check_topic_name(name, internal=True))
            return self._store.topics([name])
        except (InvalidArgument, TopicNotFound):
            self._store.names()  # a directory that cannot be read is an error
            return {}

    def find(self, name: str) -> str | None:
        """The topic or wildcard of this name. Spark does not tell names apart by case: nor does this."""
        if self.known(name):
            return name
        matching = [each for each in self.names() if each.lower() == name.lower()]
        return matching[0] if len(matching) == 1 else None

    def no_such(self, name: str) -> TopicNotFound:
        """The error for a name that is no topic."""
        names = self.names()
        close = similar(name, names)
        if close:
            hint = "is it " + " or ".join(close) + "?"
        elif names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            hint = "there are " + ", ".join(names[:5]) + more
        else:
            hint = "there are no topics at all"
        return TopicNotFound(f"there is no topic {name!r} at {self.place}; {hint}")

    def listing(self) -> list[Described]:
        names = self.names()
        known = self._store.topics(names) if names else {}
        return [
            Described(
                topic,
                len(state.partitions),
                state.records,
                sum(extent.bytes for extent in state.partitions.values()),
            )
            for topic, state in known.items()
        ]

    # --- shapes -----------------------------------------------------------------------------
    def shape(self, name: str, known: Known) -> tuple[Shape, bool]:
        """The shape of a topic or wildcard, and whether it was just inferred."""
        incarnations = {topic: state.incarnation for topic, state in known.items()}
        total = sum(state.records for state in known.values())
        kept = self._kept.get(name)
        if kept is not None and kept.incarnations == incarnations:
            is_enough = kept.shape.is_declared or kept.shape.seen >= SAMPLE_RECORDS // 2
            if is_enough or kept.records == total:
                return kept.shape, False
        ddl = self.schemas.of(name)
        if ddl is None and is_pattern(name):
            declared = {self.schemas.of(topic) for topic in known}
            ddl = declared.pop() if len(declared) == 1 else None
        shape = infer(take_sample(self._store, known)) if ddl is None else declared_shape(ddl)
        is_news = kept is None or str(kept.shape) != str(shape)
        self._kept[name] = _Kept(shape, incarnations, total)
        return shape, is_news and not shape.is_declared


def declared_shape(ddl: str) -> Shape:
    """``text``, ``binary``, or the fields of JSON values."""
    word: Any = ddl.strip().lower()
    if word in ("text", "binary"):
        return Shape(word, is_declared=True)
    try:
        fields = [each for each in parse_schema(ddl).fields if each.name.lower() not in TAKEN]
    except Exception as error:
        raise InvalidArgument(
            f"the schema {ddl!r} is invalid: {sentence(error)}", code="invalid_schema"
        ) from None
    if not fields:
        raise InvalidArgument(
            f"the schema {ddl!r} has no field: {CORRUPT} and the columns that begin with _ always exist",
            code="invalid_schema",
        )
    nullable = [StructField(each.name, each.dataType, True) for each in fields]
    return Shape("json", tuple(nullable), is_declared=True)
