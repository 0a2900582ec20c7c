"""The prompt of ``headrace sql``, and statements from a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

from headrace.cli.spark_work import state_directory
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.sql import StatementRunner

PROMPT = "headrace> "
MORE = "     ...> "
HISTORY_LINES = 1_000
HELP = r"""  SELECT …;     a statement ends with a semicolon and may span several lines
  \d            list the topics
  \d orders     list the columns of a topic
  \q            quit (also Ctrl-D)
  Ctrl-C        cancel the running query, or discard the typed text
  `orders-eu`   a name needs backticks unless it has only letters, digits, _ and dots
  `orders.*`    all topics that match the wildcard"""
_WORDS = (
    *("SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "LIMIT", "JOIN", "HAVING", "DISTINCT"),
    *("COUNT(*)", "_key", "_topic", "_partition", "_offset", "_timestamp", "_headers", "_corrupt"),
)
_PLAIN = re.compile(r"[A-Za-z_][\w.]*\Z")


class StatementFeed:
    """Splits lines into statements."""

    def __init__(self) -> None:
        self._pending = ""

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def drop(self) -> None:
        self._pending = ""

    def line(self, line: str) -> list[str]:
        """The statements, and commands of the prompt, that end with this line."""
        from headrace.spark.sql.text import split

        word = line.strip()
        if self.is_empty and word.startswith("\\"):
            return [word.rstrip(";").strip()]
        found, rest = split(self._pending + line + "\n")
        self._pending = rest + "\n" if rest else ""
        return found

    def end(self) -> list[str]:
        """The last statement, which needs no semicolon."""
        rest, self._pending = self._pending.strip(), ""
        return [rest] if rest else []


def from_pipe(work: StatementRunner) -> None:
    """Run statement after statement, until one fails."""
    feed = StatementFeed()
    for line in sys.stdin:
        if not all(_run(work, statement) for statement in feed.line(line.rstrip("\r\n"))):
            return
    for statement in feed.end():
        _run(work, statement)


def prompt(work: StatementRunner) -> None:
    """Run statements until Ctrl-D or \\q. An error is printed, and the prompt continues."""
    history = _readline(work)
    work.shows_time = True
    work.say(f"topics at {work.catalog.place}; \\? for help, \\q to quit")
    feed = StatementFeed()
    while True:
        try:
            line = input(PROMPT if feed.is_empty else MORE)
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            feed.drop()
            print()
            continue
        try:
            if not all(_run(work, statement) for statement in feed.line(line)):
                break
        except HeadraceError as error:
            feed.drop()
            work.say(f"headrace: {error.message} [{error.code}]")
            if error.code in ("no_spark", "no_java", "spark_ended"):
                raise
        except KeyboardInterrupt:
            print()
    if history is not None:
        history()


def _run(work: StatementRunner, statement: str) -> bool:
    """Run one statement; false if it ends the session."""
    if statement in ("\\q", "\\quit", "exit", "quit"):
        return False
    if statement in ("\\?", "\\h", "\\help"):
        print(HELP)
    elif statement.startswith("\\") and not re.match(r"\\d(\s|\Z)", statement):
        raise HeadraceError(f"unknown command {statement.split()[0]}; \\? prints help")
    else:
        work.run(statement)
    return True


# --- the keyboard -------------------------------------------------------------------------------------
def _readline(work: StatementRunner) -> Any:
    """Set up history and completion, if Python has readline. Returns a function that saves the history."""
    try:
        import readline
    except ImportError:
        return None
    path = state_directory() / "sql_history"
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):  # the first time, there is no history
        readline.read_history_file(path)
    readline.set_completer_delims(" \t\n,;()=<>+*/'\"`")
    readline.set_completer(_completer(work))
    readline.parse_and_bind("tab: complete")

    def keep() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError as error:
            work.say(f"the history was not saved: {path}: {error.strerror or error}")

    return keep


def _completer(work: StatementRunner) -> Any:
    found: list[str] = []

    def complete(text: str, number: int) -> str | None:
        if number == 0:
            found[:] = candidates(text, _topics(work))
        return found[number] if number < len(found) else None

    return complete


def _topics(work: StatementRunner) -> list[str]:
    try:
        return work.catalog.names()
    except HeadraceError:
        return []


def candidates(text: str, topics: list[str]) -> list[str]:
    """Completions of the beginning of a word."""
    lower = text.lower()
    names = [name for name in topics if name.lower().startswith(lower)]
    quoted = [name if _PLAIN.match(name) else f"`{name}`" for name in names]
    return quoted + [word for word in _WORDS if text and word.lower().startswith(lower)]
