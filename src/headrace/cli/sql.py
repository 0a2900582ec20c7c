"""``headrace sql``: topics as tables, for one query or at a prompt.

Spark takes seconds to start, so mistakes in the arguments, the broker's address and file names are
reported before. At the prompt, Spark starts while you type the first query. Its log goes into a file,
which is deleted at the end; if Spark itself fails, the file is kept and named.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from headrace import limits
from headrace.cli.printing import SafeStream, count_of, errors, progress_bar, size
from headrace.cli.spark_work import (
    DataDir,
    History,
    SparkPlace,
    check_installed,
    sparkling,
    with_bar,
    with_place,
    with_range,
)
from headrace.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from headrace.spark.notation import RecordRange
    from headrace.spark.sql.catalog import Catalog
    from headrace.spark.sql.output import Format, ResultRows
    from headrace.spark.sql.topic_sql import TopicSql

LIMIT = 100
"""Rows that a table shows without --limit."""
_LIST = re.compile(r"(?:\\d|SHOW\s+(?:TABLES|TOPICS))\s*\Z", re.IGNORECASE)
_DESCRIBE = re.compile(r"\\d\s+(\S+)\s*\Z")


@with_place
@with_range
def sql(
    query: Annotated[
        str | None,
        typer.Argument(metavar="[QUERY]", help="The query; default: open a prompt."),
    ] = None,
    schema: Annotated[
        list[str] | None,
        typer.Option(
            "--schema",
            metavar="'TOPIC: FIELDS'",
            help="A topic's schema: fields as in CREATE TABLE, text, or binary. @FILE reads a JSON "
            "object of topics and schemas. May be repeated. Default: inferred.",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", "-f", metavar="FORMAT", help="table, csv, json or parquet."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the result to a file."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            help=f"Maximum number of rows; 0: all. Default for tables: {LIMIT}.",
        ),
    ] = None,
    path: DataDir = None,
    history: History = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print inferred schemas.")
    ] = False,
    *,
    bounds: Any,
    place: SparkPlace,
) -> None:
    """Query topics with SQL.

    Each topic is a table of the same name.

    \b
    Examples:
      headrace sql "SELECT country, sum(amount) FROM orders GROUP BY country"
      headrace sql "SELECT * FROM orders.eu WHERE amount > 100" --since 1h
      headrace sql "SELECT * FROM orders" --format csv --output orders.csv
      headrace sql --schema "orders: id STRING, ordered_at TIMESTAMP"
      headrace sql --path ./data "SELECT _timestamp, value FROM logs LIMIT 5"
      headrace sql --history archive "SELECT year(_timestamp), count(*) FROM orders GROUP BY 1"

    \b
    Columns: the fields of JSON values, or else the column value; and for each record
      _key _topic _partition _offset _timestamp _headers _id (and _corrupt for JSON)

    Without a query, a prompt opens. There a statement ends with a semicolon, and \\? prints help.
    Statements from a pipe run one after another.
    """
    place.spark_settings()  # a mistake in --conf is an error before anything else
    if as_json and format_ not in (None, "json"):
        raise InvalidArgument("--json means --format json: give only one of them")
    check_installed()
    from headrace.spark.sql.catalog import Catalog
    from headrace.spark.sql.output import format_of
    from headrace.spark.sql.text import Schemas, statements

    shape = format_of("json" if as_json else format_, output)
    if shape == "parquet" and output is None and sys.stdout.isatty():
        raise InvalidArgument("Parquet cannot be shown on a terminal: name a file with --output")
    if output is not None and not output.absolute().parent.is_dir():
        raise InvalidArgument(
            f"the folder {output.absolute().parent} of {output.name} does not exist"
        )
    schemas = Schemas()
    for each in schema or ():
        schemas.add(each)
    given = None if query is None else statements(query)
    if given == []:
        raise InvalidArgument("the query is empty; without a query, headrace sql opens a prompt")
    if output is not None and (given is None or len(given) != 1):
        raise InvalidArgument("--output needs exactly one query")
    source = place.source(path)
    if history is not None:
        source["history"] = history
    catalog = Catalog(source, schemas)
    if limit is None and shape == "table":
        limit = LIMIT
    with StatementRunner(catalog, bounds, shape, output, limit or None, quiet, place) as work:
        catalog.names()  # fails now if no broker answers
        try:
            _run(work, given)
        except HeadraceError as error:
            if error.code == "cancelled":
                raise KeyboardInterrupt from None
            raise


def _run(work: StatementRunner, given: list[str] | None) -> None:
    from headrace.cli.sql_prompt import from_pipe, prompt

    if given is not None:
        for statement in given:
            work.run(statement)
    elif sys.stdin.isatty():
        work.start()
        prompt(work)
    else:
        from_pipe(work)


@dataclass
class StatementRunner:
    """Runs statements and prints their results. Spark starts with the first one that needs it."""

    catalog: Catalog
    bounds: RecordRange
    format: Format
    output: Path | None
    limit: int | None
    """None: no limit."""
    quiet: bool
    place: SparkPlace
    shows_time: bool = False
    _starting: threading.Thread | None = None
    _started: TopicSql | HeadraceError | None = None
    _ending: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> StatementRunner:
        # When the JVM dies, py4j logs a traceback for every call; our one line is enough.
        silence = logging.NullHandler()
        logging.getLogger().addHandler(silence)
        self._ending.callback(logging.getLogger().removeHandler, silence)
        self._ending.callback(self.catalog.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._ending.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Print a line for people, on standard error."""
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    # --- Spark ------------------------------------------------------------------------------
    def start(self) -> None:
        """Start Spark in the background."""
        if self._starting is None:
            self._starting = threading.Thread(target=self._start, name="spark", daemon=True)
            self._starting.start()

    def _start(self) -> None:
        from headrace.spark.sql.topic_sql import TopicSql

        # A query that fails is not retried: a person waits for it.
        place = self.place._replace(master=self.place.master or f"local[{limits.cores()},1]")
        try:
            spark = self._ending.enter_context(sparkling("sql", place, in_background=True))
            self._started = TopicSql(
                spark, {}, bounds=self.bounds, note=self._note, catalog=self.catalog
            )
        except HeadraceError as error:
            self._started = error
        except BaseException as error:
            self._started = HeadraceError(
                f"Spark did not start: {type(error).__name__}: {error}", code="no_spark"
            )

    def _note(self, text: str) -> None:
        if not self.quiet:
            self.say(text)

    def topics(self) -> TopicSql:
        self.start()
        assert self._starting is not None
        if self._starting.is_alive():
            with progress_bar("starting Spark"):
                while self._starting.is_alive():
                    self._starting.join(0.1)
        if isinstance(self._started, HeadraceError):
            raise self._started
        assert self._started is not None
        return self._started

    # --- statements -------------------------------------------------------------------------
    def run(self, statement: str) -> None:
        """Run one statement, or one command of the prompt, and print the result."""
        began = time.monotonic()
        described = _DESCRIBE.match(statement)
        if _LIST.match(statement):
            self._list()
        elif described:
            self._describe(described[1])
        elif self.format == "table":
            self._run_table(statement)
        else:
            self._run_rows(statement)
        if self.shows_time:
            self.say(f"{time.monotonic() - began:.1f} s")

    def _run_table(self, statement: str) -> None:
        from headrace.spark.sql.output import fetch

        topics = self.topics()
        limit = self.limit
        rows = with_bar(topics.spark, "query", lambda: fetch(topics.query(statement), limit))
        self._print(rows, statement)
        if not rows.is_all:
            self.say(
                f"only the first {count_of(rows.batch.num_rows, 'row')} are shown; --limit 0 shows all"
            )

    def _run_rows(self, statement: str) -> None:
        from headrace.spark.sql.output import Spool, check_names, spool

        topics = self.topics()

        def work() -> Spool:
            frame = topics.query(statement)
            check_names(frame.columns, self.format)
            return spool(frame, self.limit)

        found = with_bar(topics.spark, "query", work)
        try:
            self._write(found.batches())
        finally:
            found.remove()

    def _write(self, batches: Iterator[Any]) -> None:
        from headrace.spark.sql.output import replacing, write

        if self.output is None:
            sys.stdout.flush()
            is_text = self.format != "parquet" and sys.stdout.isatty()
            out = SafeStream(sys.stdout.buffer) if is_text else sys.stdout.buffer
            write(batches, cast(IO[bytes], out), self.format)
            return
        with replacing(self.output) as stream:
            count = write(batches, stream, self.format)
        self.say(f"wrote {count_of(count, 'row')} to {self.output}")

    def _print(self, rows: ResultRows, statement: str = "") -> None:
        """Print as a table, or in the format of ``--format``."""
        from headrace.cli.sql_table import print_table_of
        from headrace.spark.sql.text import names

        if not rows.names:
            return
        if self.format != "table":
            self._write(iter([rows.batch]))
            return
        asked_for = {part for parts, _, _ in names(statement) for part in parts}
        left_out = print_table_of(rows, asked_for)
        if left_out:
            self.say(f"not shown, because NULL in all rows: {', '.join(left_out)}")
        if self.shows_time:
            self.say(count_of(rows.batch.num_rows, "row"))

    def _list(self) -> None:
        from headrace.spark.sql.output import ResultRows

        found = self.catalog.listing()
        if not found and self.format == "table":
            self.say(f"there are no topics at {self.catalog.place}")
            return
        sizes: list[Any] = [each.bytes for each in found]
        rows = ResultRows.of(
            {
                "topic": [each.topic for each in found],
                "partitions": [each.partitions for each in found],
                "records": [each.records for each in found],
                "size" if self.format == "table" else "bytes": (
                    [size(each) for each in sizes] if self.format == "table" else sizes
                ),
            }
        )
        self._print(rows)

    def _describe(self, name: str) -> None:
        from headrace.spark.sql.output import ResultRows

        columns = self.topics().columns(name.strip("`'\";"))
        rows = ResultRows.of(
            {
                "column": [each.name for each in columns.fields],
                "type": [each.dataType.simpleString() for each in columns.fields],
            }
        )
        self._print(rows)
