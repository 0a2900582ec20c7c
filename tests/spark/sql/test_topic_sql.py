"""Queries over topics, on a real Spark and a real broker."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError, InvalidArgument, TopicNotFound
from headrace.spark.error_sentences import InvalidSql, QueryCancelled, QueryFailed
from headrace.spark.notation import RecordRange
from headrace.spark.sql import topic_sql
from headrace.spark.sql.output import cells, fetch, spool
from headrace.spark.sql.running import TaskProgress, run
from headrace.spark.sql.topic_sql import Schemas, TopicSql
from headrace.testing import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("spark")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One broker for all; each test has topics of its own, or only reads."""
    with running_server() as server, server.client() as client:
        client.create_topic("orders", 2)
        for number in range(2):
            client.publish_many(
                "orders",
                [
                    b'{"id": "%d-%d", "amount": %d.5, "country": "%s", "lines": [{"sku": "s%d", "count": %d}]}'
                    % (number, n, n, (b"de", b"fr", b"it")[n % 3], n % 2, n)
                    for n in range(300)
                ],
                {"source": "shop"},
                partition=number,
                keys=[f"k{n % 5}" for n in range(300)],
            )
        client.publish_many("orders", [b"not json"], partition=1)
        prices = [b'{"amount": 3.5, "at": 1}', b'{"amount": "much", "at": 2}', b"none"]
        client.publish_many("prices", prices)
        client.publish_many("logs.eu.de", [b"started", b"stopped"])
        client.publish_many("logs.eu.fr", [b"started"])
        client.publish_many("countries", [b'{"code": "de", "Name": "Germany", "a.b": 1}'])
        yield server


@pytest.fixture(scope="module")
def where(server: RunningServer) -> dict[str, str]:
    return {"servers": f"{server.host}:{server.port}", "timeout": "10"}


@pytest.fixture(scope="module")
def notes() -> list[str]:
    return []


@pytest.fixture(scope="module")
def topics(spark: Any, where: dict[str, str], notes: list[str]) -> Iterator[TopicSql]:
    """With filters pushed down, as in a session of Headrace's own."""
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, "true")
    made = TopicSql(spark, where, note=notes.append)
    yield made
    made.close()
    spark.conf.set(PUSHDOWN, before)


def rows(topics: TopicSql, text: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in topics.query(text).collect()]


def explained(topics: TopicSql, text: str) -> str:
    return str(rows(topics, f"EXPLAIN {text}")[0][0])


# --- what can be asked ----------------------------------------------------------------------------
def test_a_topic_is_a_table(topics: TopicSql, notes: list[str]) -> None:
    """Its JSON fields are columns, and what was inferred is said once."""
    found = rows(
        topics,
        "SELECT country, count(*), sum(amount) FROM orders WHERE country IS NOT NULL "
        "GROUP BY country ORDER BY country",
    )
    assert found == [("de", 200, 29800.0), ("fr", 200, 30000.0), ("it", 200, 30200.0)]
    assert rows(topics, "SELECT count(*) FROM orders") == [(601,)]
    assert notes == [
        "orders looks like JSON, going by all records: id string, amount double, country string, "
        "lines array<struct<sku:string,count:bigint>>",
        "orders: 1 of 601 records are no JSON objects; see the column _corrupt",
    ]


def test_a_records_own_columns(topics: TopicSql) -> None:
    """Their names begin with an underscore."""
    assert rows(
        topics,
        "SELECT _topic, _partition, _offset, _key, _headers['source'], id, lines[0].sku, "
        "_timestamp > TIMESTAMP '2020-01-01', length(_id) FROM orders "
        "WHERE _partition = 1 AND _offset = 7",
    ) == [("orders", 1, 7, "k2", "shop", "1-7", "s1", True, 36)]


def test_values_that_differ_are_text(topics: TopicSql) -> None:
    """So no record is bad that was looked at; what is no JSON stands in a column of its own."""
    assert rows(topics, "SELECT amount, at, _corrupt FROM prices ORDER BY _offset") == [
        ("3.5", 1, None),
        ("much", 2, None),
        (None, None, "none"),
    ]


def test_bad_records_are_seen(topics: TopicSql) -> None:
    """In a column of their own."""
    assert rows(topics, "SELECT _corrupt, id FROM orders WHERE _corrupt IS NOT NULL") == [
        ("not json", None)
    ]


@pytest.mark.parametrize("name", ["logs.eu.de", "`logs.eu.de`", "LOGS.eu.de", "logs . eu . de"])
def test_names_with_dots(topics: TopicSql, name: str) -> None:
    """With quotes or without."""
    assert rows(topics, f"SELECT value, _offset FROM {name} AS l ORDER BY l._offset") == [
        ("started", 0),
        ("stopped", 1),
    ]


def test_a_wildcard_is_a_table(topics: TopicSql) -> None:
    """Over all topics that it fits."""
    found = "SELECT _topic, count(*) FROM `logs.>` GROUP BY _topic ORDER BY _topic"
    assert rows(topics, found) == [("logs.eu.de", 2), ("logs.eu.fr", 1)]


def test_joins_subqueries_and_names_of_ones_own(topics: TopicSql) -> None:
    """All that Spark knows; a common table expression hides a topic of its name."""
    text = """
        WITH orders AS (SELECT id, country, lines FROM orders WHERE _partition = 0), -- hides it
             big AS (SELECT * FROM orders WHERE id LIKE '0-9%')
        SELECT c.Name, c.`a.b`, count(*), max(sku), (SELECT count(*) FROM logs.eu.fr)
        FROM big JOIN countries c ON big.country = c.code LATERAL VIEW explode(lines.sku) x AS sku
        WHERE id NOT IN (SELECT value FROM logs.eu.de) GROUP BY ALL
    """
    assert rows(topics, text) == [("Germany", 1, 5, "s1", 1)]


def test_statements_that_are_no_queries(topics: TopicSql, tmp_path: Path) -> None:
    """Views of the user's own, files, settings; nothing runs twice."""
    topics.query("CREATE TEMPORARY VIEW dear AS SELECT id FROM orders WHERE amount > 298")
    try:
        assert sorted(rows(topics, "SELECT * FROM dear")) == [
            ("0-298",), ("0-299",), ("1-298",), ("1-299",),
        ]  # fmt: skip
        out = tmp_path / "out"
        topics.query(f"INSERT OVERWRITE DIRECTORY '{out}' USING csv SELECT value FROM logs.eu.de")
        written = [line for path in out.glob("part-*") for line in path.read_text().splitlines()]
        assert sorted(written) == ["started", "stopped"]
        assert topics.query("DESCRIBE logs.eu.de").collect()[0][:2] == ("value", "string")
    finally:
        topics.spark.catalog.dropTempView("dear")


def test_every_statement_sees_what_is_there(topics: TopicSql, server: RunningServer) -> None:
    """Also through a view that was made before."""
    with server.client() as client:
        client.publish_many("growing", [b'{"n": 1}'])
        topics.query("CREATE TEMPORARY VIEW grown AS SELECT n FROM growing")
        assert rows(topics, "SELECT n FROM growing") == [(1,)]
        client.publish_many("growing", [b'{"n": 2}'])
        assert rows(topics, "SELECT n FROM growing ORDER BY n") == [(1,), (2,)]
        assert rows(topics, "SELECT count(*) FROM grown") == [(2,)]
        # The view reads a column that the statement does not mention.
        assert rows(topics, "SELECT count(*) FROM grown, growing WHERE grown.n = 2") == [(2,)]
        topics.spark.catalog.dropTempView("grown")


# --- what is read ---------------------------------------------------------------------------------
def test_only_what_is_needed_is_read(topics: TopicSql) -> None:
    """Neither other columns nor records that a filter on their place rules out."""
    assert "headrace[amount#" in explained(topics, "SELECT sum(amount) FROM orders")
    assert "headrace[offset#" in explained(topics, "SELECT count(*) FROM orders")
    plan = explained(topics, "SELECT id FROM orders WHERE _offset = 3")
    assert "headrace[id#" in plan
    assert "amount" not in plan
    assert "Filter (" not in plan  # it was pushed down


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM orders ORDER BY _partition, _offset LIMIT 20",
        "SELECT DISTINCT country FROM orders ORDER BY 1",
        "SELECT id FROM orders WHERE _partition = 0 UNION SELECT code FROM countries ORDER BY 1",
        "SELECT * EXCEPT (_headers) FROM orders WHERE _offset < 2 EXCEPT ALL "
        "SELECT * EXCEPT (_headers) FROM orders WHERE _offset < 1 ORDER BY _partition",
        "SELECT country, row_number() OVER (PARTITION BY country ORDER BY _partition, _offset) AS n "
        "FROM orders QUALIFY n < 3 ORDER BY 1, 2",
        "SELECT country, _key, count(*) FROM orders GROUP BY ROLLUP (country, _key) ORDER BY 1, 2",
        "SELECT a.id FROM orders a LEFT ANTI JOIN orders b ON a._offset + 1 = b._offset ORDER BY 1",
        "SELECT a.id FROM orders a WHERE EXISTS (SELECT * FROM countries WHERE code = a.country) "
        "AND a._offset > (SELECT max(_offset) - 8 FROM orders) ORDER BY 1",
    ],
)  # fmt: skip
def test_reading_less_changes_nothing(
    topics: TopicSql, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as if every column were read."""
    less = rows(topics, text)
    monkeypatch.setattr(topic_sql, "mentioned_columns", lambda text, columns: None)
    assert rows(topics, text) == less


def test_bounds(spark: Any, where: dict[str, str]) -> None:
    """By offset in each partition, and by time."""
    count = "SELECT count(*) FROM orders"

    def counted(**bounds: Any) -> int:
        some = TopicSql(spark, where, bounds=RecordRange(**bounds))
        try:
            return int(rows(some, count)[0][0])
        finally:
            some.close()

    assert counted(from_offset=290, to_offset=300) == 20
    assert counted(from_offset=300) == 1
    assert counted(since="1h") == 601
    assert counted(until="2020-01-01") == 0


def test_declared_schemas(spark: Any, where: dict[str, str]) -> None:
    """Types that are not guessed; and text, where that is wanted."""
    schemas = Schemas({"prices": "amount DECIMAL(9, 2) NOT NULL, _offset INT", "countries": "text"})
    topics = TopicSql(spark, where, schemas=schemas)
    try:
        assert topics.columns("prices").names[:3] == ["amount", "_corrupt", "_key"]
        assert rows(
            topics, "SELECT CAST(amount AS STRING), _corrupt FROM prices ORDER BY _offset"
        ) == [
            ("3.50", None),
            (None, '{"amount": "much", "at": 2}'),
            (None, "none"),
        ]
        assert rows(topics, "SELECT value FROM countries")[0][0].startswith('{"code"')
    finally:
        topics.close()
    for ddl, complaint in (
        ("id STRNG", "is invalid"),
        ("_offset INT", "no field"),
        ("int", "is invalid"),
    ):
        topics = TopicSql(spark, where, schemas={"orders": ddl})
        with pytest.raises(InvalidArgument, match=complaint):
            topics.query("SELECT * FROM orders")
        topics.close()


def test_a_data_directory(spark: Any, tmp_path: Path) -> None:
    """With no broker at all."""
    with running_server(data_dir=tmp_path) as server, server.client() as client:
        client.publish_many("orders", [b'{"n": 1}', b'{"n": 2}'])
    topics = TopicSql(spark, {"path": str(tmp_path)})
    try:
        assert topics.catalog.names() == ["orders"]
        assert rows(topics, "SELECT sum(n), max(_offset) FROM orders") == [(3, 1)]
        with pytest.raises(TopicNotFound, match="is it orders"):
            topics.query("SELECT * FROM order")
    finally:
        topics.close()


# --- what can go wrong ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "kind", "complaint"),
    [
        ("SELECT * FROM ordres", TopicNotFound, r"no topic 'ordres'.*is it orders"),
        ("SELECT * FROM logs.eu.xx", TopicNotFound, r"'logs\.eu\.xx'.*logs\.eu\.de"),
        ("SELECT amout FROM orders", InvalidSql, r"`amout`.*`amount`.*\(line 1, position 8\)"),
        ("SELECT 1,\n  amout FROM orders", InvalidSql, r"\(line 2, position 3\)"),
        ("SELEC 1", InvalidSql, r"Syntax error at or near 'SELEC' \(line 1, position 1\)"),
        ("SELECT * FROM orders-eu", InvalidSql, r"back quoted as: `orders-eu` \(line 1"),
        ("SELECT id, FROM orders", InvalidSql, "Trailing comma"),
        ("SELECT 1/0", QueryFailed, r"Division by zero.*\(line 1, position 8\)"),
        ("SELECT CAST(id AS INT) FROM orders", QueryFailed, "'[01]-[0-9]+'.*cannot be cast"),
        ("SELECT raise_error('my own')", QueryFailed, "my own"),
        ("INSERT INTO orders SELECT 1", InvalidSql, "topics are read here.* orders"),
        ("DROP TABLE IF EXISTS `logs.eu.de`", InvalidSql, "topics are read here"),
        ("SELECT * FROM Logs_2 JOIN logs_2", InvalidSql, "only in case"),
    ],
)
def test_mistakes(
    topics: TopicSql, server: RunningServer, text: str, kind: type[HeadraceError], complaint: str
) -> None:
    """One sentence, with the place; nothing of Java, no plan."""
    if "ogs_2" in text:
        with server.client() as client:
            client.publish_many("Logs_2", [b"x"])
            client.publish_many("logs_2", [b"x"])
    with pytest.raises(kind, match=complaint) as raised:
        run(topics.spark, lambda: fetch(topics.query(text), 5))
    message = raised.value.message
    assert "\n" not in message
    assert "org.apache" not in message
    assert "SQLSTATE" not in message


def test_the_broker_goes_away(spark: Any) -> None:
    """Its own words, not those of a worker process."""
    with running_server() as server:
        with server.client() as client:
            client.publish_many("orders", [b"x"])
        where = {"servers": f"{server.host}:{server.port}", "timeout": "1"}
        topics = TopicSql(spark, where)
        frame = topics.query("SELECT * FROM orders")
    with pytest.raises(HeadraceError, match="is it running") as raised:
        run(spark, frame.collect)
    assert raised.value.code in ("timeout", "connect_failed", "connection_failed", "unreachable")
    topics.catalog.close()


# --- results --------------------------------------------------------------------------------------
def test_rows_for_a_table(topics: TopicSql) -> None:
    """As many as asked for, and whether these are all; types that Arrow does not know are text."""
    found = fetch(topics.query("SELECT _offset AS o, _offset AS o FROM orders ORDER BY 1"), 3)
    assert (found.names, found.is_all) == (["o", "o"], False)
    assert [each.to_pylist() for each in found.batch.columns] == [[0, 0, 1]] * 2
    found = fetch(topics.query("SELECT NULL, INTERVAL 1 DAY, parse_json('[1]'), map(1, 2)"), 3)
    assert cells(found.batch) == [[None], ["INTERVAL '1' DAY"], ["[1]"], ['{"1":2}']]
    assert found.is_all
    assert fetch(topics.query("CREATE TEMPORARY VIEW nothing AS SELECT 1"), 3).names == []
    topics.spark.catalog.dropTempView("nothing")


def test_rows_on_disk(topics: TopicSql) -> None:
    """All of them, in order, and times with their zone."""
    frame = topics.query(
        "SELECT _partition * 1000 + _offset AS n, _timestamp AS at, 1 AS n FROM orders ORDER BY 1 DESC"
    )
    for limit, count in ((None, 601), (10, 10)):
        spooled = spool(frame, limit)
        try:
            batches = list(spooled.batches())
        finally:
            spooled.remove()
        numbers = [n for batch in batches for n in batch.column(0).to_pylist()]
        assert numbers == sorted(numbers, reverse=True)
        assert (len(numbers), numbers[0]) == (count, 1300)
        assert str(batches[0].schema.field("at").type) == "timestamp[us, tz=UTC]"
        assert not spooled.folder.exists()


def test_a_query_can_be_watched_and_cancelled(topics: TopicSql) -> None:
    """Ctrl-C ends it; the session goes on."""
    seen: list[TaskProgress] = []

    def tell(progress: TaskProgress) -> None:
        seen.append(progress)
        if progress.active:
            os.kill(os.getpid(), signal.SIGINT)

    endless = "SELECT count(*) FROM range(1000000000000) WHERE sqrt(id) % 7 = 3"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(QueryCancelled):
        run(topics.spark, topics.query(endless).collect, tell)
    assert seen[-1].active
    assert seen[-1].total
    assert signal.getsignal(signal.SIGINT) is before
    assert run(topics.spark, topics.query("SELECT 1").collect) == [(1,)]
    assert not [each for each in threading.enumerate() if each.name == "headrace-sql"]


def test_from_a_notebook(topics: TopicSql) -> None:
    """What comes back is a DataFrame like any other, and nothing is left behind in the session."""
    frame = topics.query("SELECT country, amount FROM orders WHERE country = 'de'")
    assert frame.filter("amount > 290").count() == 6
    assert topics.spark.catalog.listTables() == []
