"""``headrace sql``: errors before Spark starts, the output, and the prompt on a terminal."""

import io
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from headrace import BrokerClient
from headrace.cli import sql_table
from headrace.cli.sql_prompt import StatementFeed, candidates
from headrace.testing import RunningServer
from tests.cli.rig import SCRIPT, Command, clean_environment
from tests.spark.conftest import spark  # noqa: F401, the one session of all tests


@pytest.fixture(scope="module")
def topics(server: RunningServer) -> None:
    """The topics of these tests."""
    with server.client() as client:
        client.publish_many("orders", [b'{"id": "o%d", "n": %d}' % (n, n) for n in range(150)])
        client.publish_many("logs.eu", [b"started", b"\x1b[31mred", b"two\nlines"])


# --- before Spark -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["SELECT 1", "--format", "xml"], "--format is table, csv, json or parquet, not 'xml'"),
        (["SELECT 1", "--json", "--format", "csv"], "give only one of them"),
        (["SELECT 1", "-o", "x.txt"], "say with --format"),
        (["SELECT 1", "-o", "no/such/x.csv"], "does not exist"),
        (["-o", "x.csv"], "--output needs exactly one query"),
        (["SELECT 1; SELECT 2", "-o", "x.csv"], "--output needs exactly one query"),
        ([" ; "], "the query is empty"),
        (["SELECT 1", "--since", "soon"], "--since: 'soon' is neither a time"),
        (["SELECT 1", "--since", "1h", "--from-offset", "3"], "--since or --from-offset, not both"),
        (["SELECT 1", "--schema", "orders"], "'TOPIC: FIELDS'"),
        (["SELECT 1", "--conf", "memory=8g"], "--conf takes spark.NAME=VALUE"),
        (["SELECT 1", "--server", "nonsense:port"], "is not a port"),
        (["SELECT 1", "--path", "nowhere"], "nowhere cannot be read"),
        (["SELECT 1", "--server", "127.0.0.1:1"], "is it running?"),
    ],
)
def test_mistakes_are_found_before_spark_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    """One line, at once."""
    monkeypatch.setenv("HEADRACE_REQUEST_TIMEOUT", "0.2")
    monkeypatch.setattr("headrace.cli.sql.StatementRunner.start", None)
    ran = command("sql", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headrace: ")
    assert complaint in ran.err
    assert ran.err.count("\n") == 1


def test_the_topics_need_no_spark(
    headrace: Command, topics: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are listed in every format, and by a pipe."""
    monkeypatch.setattr("headrace.cli.sql.StatementRunner.start", None)
    ran = headrace("sql", "show tables")
    assert ran.rows[0] == ["topic", "partitions", "records", "size"]
    assert ran.rows[1:] == [
        ["logs.eu", "1", "3", *ran.rows[1][3:]],
        ["orders", "1", "150", *ran.rows[2][3:]],
    ]
    assert headrace("sql", "SHOW TOPICS;", "--json").json_lines[1]["records"] == 150
    assert headrace("sql", input="\\d\n").lines == ran.lines
    assert headrace("sql", input="\\d;\n\\q\nSELECT 1;").lines == ran.lines
    assert headrace("sql", "show tables", "-o", tmp_path / "x.csv").code == 0
    assert (
        (tmp_path / "x.csv").read_text().startswith("topic,partitions,records,bytes\nlogs.eu,1,3,")
    )
    assert "\\d orders" in headrace("sql", input="\\?\n").out
    ran = headrace("sql", input="\\x\n")
    assert (ran.code, "unknown command \\x" in ran.err) == (2, True)


class TestFeed:
    def test_statements_of_lines(self) -> None:
        """A statement may have several lines, a line several statements."""
        feed = StatementFeed()
        assert feed.line("SELECT 1,") == []
        assert not feed.is_empty
        assert feed.line("  2; SELECT 3; SELECT") == ["SELECT 1,\n  2", "SELECT 3"]
        assert feed.line("'a;") == []
        assert feed.line("b'; -- done") == ["SELECT\n'a;\nb'"]
        assert feed.is_empty

    def test_words_of_the_prompt(self) -> None:
        """They need no semicolon, and are none inside a statement."""
        feed = StatementFeed()
        assert feed.line(" \\d orders ; ") == ["\\d orders"]
        feed.line("SELECT '")
        assert feed.line("\\d") == []
        feed.drop()
        assert feed.is_empty

    def test_the_end(self) -> None:
        """The last statement of a file needs no semicolon."""
        feed = StatementFeed()
        feed.line("SELECT 1")
        assert feed.end() == ["SELECT 1"]
        assert feed.end() == []


def test_completion() -> None:
    """Topics first; those that need quotes have them."""
    topics = ["orders", "orders-eu", "logs"]
    assert candidates("ord", topics) == ["orders", "`orders-eu`", "ORDER BY"]
    assert candidates("", topics) == ["orders", "`orders-eu`", "logs"]
    assert candidates("_of", topics) == ["_offset"]


# --- tables -----------------------------------------------------------------------------------------
@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """A terminal of forty columns."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(sql_table, "console", console)
    monkeypatch.setattr("headrace.cli.printing.console", console)
    return stream


def printed(stream: io.StringIO) -> list[str]:
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_table_on_a_terminal(terminal: io.StringIO) -> None:
    """Numbers to the right, nulls as such, long texts folded, and empty columns left out."""
    from headrace.spark.sql.output import ResultRows

    rows = ResultRows.of(
        {"id": ["a", None], "n": [5, 1000], "_key": [None, None], "t": ["x" * 40, "[b]"]}
    )
    assert sql_table.print_table_of(rows, set()) == ["_key"]
    assert printed(terminal)[:2] == ["id       n  t", "a        5  " + "x" * 28]
    assert printed(terminal)[-1] == "NULL  1000  [b]"
    assert sql_table.print_table_of(rows, {"_key"}) == []


def test_a_row_at_a_time_where_it_is_too_wide(terminal: io.StringIO) -> None:
    """A row that does not fit is printed as a block."""
    from headrace.spark.sql.output import ResultRows

    rows = ResultRows.of({f"column{n}": ["text that is long"] for n in range(5)})
    sql_table.print_table_of(rows, set())
    assert re.match(r"(─+ )?row 1 ─", printed(terminal)[0])
    assert printed(terminal)[1:3] == ["column0  text that is long", "column1  text that is long"]


# --- with Spark -------------------------------------------------------------------------------------
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark", "topics")
class TestQueries:
    def test_a_table(self, headrace: Command) -> None:
        """The inferred schema goes to standard error; a message cannot control the terminal."""
        ran = headrace("sql", "SELECT n, id FROM orders WHERE n < 2 ORDER BY n; SELECT 7 AS seven")
        assert ran.lines == ["n  id", "0  o0", "1  o1", "seven", "    7"]
        assert "orders looks like JSON, going by all records: id string, n bigint" in ran.err
        ran = headrace("sql", "SELECT value FROM logs.eu ORDER BY _offset", "-q")
        assert ran.lines == ["value", "started", "\\x1b[31mred", "two\\nlines"]
        assert ran.err == ""

    def test_a_limit(self, headrace: Command) -> None:
        """A table has one unless told otherwise, and says so; the rest has none."""
        ran = headrace("sql", "SELECT n FROM orders", "-q")
        assert len(ran.lines) == 101
        assert ran.err == "only the first 100 rows are shown; --limit 0 shows all\n"
        ran = headrace("sql", "SELECT n FROM orders", "-q", "--format", "csv")
        assert (len(ran.lines), ran.err) == (151, "")
        assert (
            len(headrace("sql", "SELECT n FROM orders", "-q", "--json", "-n", "3").json_lines) == 3
        )

    def test_a_file(self, headrace: Command, tmp_path: Path) -> None:
        """Whole, in the format of its name; bounds and a declared schema on the way."""
        path = tmp_path / "orders.json"
        ran = headrace(
            "sql", "SELECT n, id FROM orders ORDER BY n DESC", "-o", path,
            "--to-offset", "3", "--schema", "orders: n DOUBLE, id STRING",
        )  # fmt: skip
        assert (ran.code, ran.out) == (0, "")
        assert ran.err == f"wrote 3 rows to {path}\n"
        assert path.read_text().splitlines() == [f'{{"n":{n}.0,"id":"o{n}"}}' for n in (2, 1, 0)]

    def test_a_pipe_ends_with_the_first_mistake(self, headrace: Command) -> None:
        """Which is one line."""
        ran = headrace("sql", "-q", input="SELECT 1 AS a;\nSELECT\n b;\nSELECT 2 AS c;")
        assert (ran.code, ran.lines) == (2, ["a", "1"])
        assert re.fullmatch(r"headrace: .*`b`.*\(line 2, position 2\) \[invalid_sql\]\n", ran.err)
        ran = headrace("sql", "SELECT * FROM ordres")
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert ran.err.endswith("is it orders? [topic_not_found]\n")


class Terminal:
    """Somebody who sits at the prompt."""

    def __init__(self, *arguments: str, **environment: str):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [SCRIPT, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=clean_environment() | {"TERM": "xterm", "COLUMNS": "100"} | environment,
            preexec_fn=lambda: _be_controlled_by(0),
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, seconds: float = 240) -> str:
        """The output up to the end of a match of the pattern."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self._ours], [], [], left)[0]:
                self.seen += os.read(self._ours, 1 << 16).decode()
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _be_controlled_by(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.mark.timeout(400)
def test_the_prompt(
    server: RunningServer, client: BrokerClient, topics: None, tmp_path: Path
) -> None:
    """Topics, a query of two lines, a mistake, a query that is cancelled, and what was typed is kept."""
    terminal = Terminal(
        "sql", HEADRACE_SERVER=f"{server.host}:{server.port}", XDG_STATE_HOME=str(tmp_path)
    )
    try:
        terminal.wait_for("headrace> ")
        terminal.type("\\d\n")
        terminal.wait_for(r"orders +1 +150.*headrace> ")
        terminal.type("SELECT sum(n) AS total\n")
        terminal.wait_for(r"\.\.\.> ")
        terminal.type("FROM orders;\n")
        shown = terminal.wait_for(r"1 row.*[0-9.]+ s\r\n.*headrace> ")
        assert re.search(r"total *\r\n *11175", shown)
        terminal.type("SELECT * FROM ordres;\n")
        assert "is it orders?" in terminal.wait_for(r"\[topic_not_found\].*headrace> ")
        terminal.type("SELECT count(*) FROM range(1000000000000) WHERE sqrt(id) % 7 = 3;\n")
        terminal.wait_for(r"0 of \d+ tasks?")
        terminal.type("\x03")
        terminal.wait_for(r"\[cancelled\].*headrace> ")
        terminal.type("SELECT 40 + 2 AS answer;\n")
        assert re.search(r"answer *\r\n *42", terminal.wait_for(r"1 row.*headrace> "))
        terminal.type("\\q\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    history = (tmp_path / "headrace" / "sql_history").read_text()
    assert "FROM orders;\n" in history


def test_a_plan_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of EXPLAIN is no table; a column of the same name is one."""
    from headrace.cli.sql_table import print_table_of
    from headrace.spark.sql.output import ResultRows

    print_table_of(
        ResultRows.of({"plan": ["== Physical Plan ==\n*(1) Project\n+- Scan\n\n"]}), set()
    )
    assert capsys.readouterr().out == "== Physical Plan ==\n*(1) Project\n+- Scan\n"
    print_table_of(ResultRows.of({"plan": ["free"]}), set())
    assert capsys.readouterr().out.split() == ["plan", "free"]
