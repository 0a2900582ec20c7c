"""Statements are cut where they end; names and schemas are read as they were meant."""

from pathlib import Path

import pytest

from headrace.errors import InvalidArgument
from headrace.spark.sql.text import (
    Schemas,
    names,
    quote_name,
    quoted,
    similar,
    split,
    statements,
    unquoted,
)


@pytest.mark.parametrize(
    ("text", "found", "rest"),
    [
        ("", [], ""),
        (" ; ;\n;", [], ""),
        ("SELECT 1", [], "SELECT 1"),
        ("SELECT 1; SELECT 2 ;", ["SELECT 1", "SELECT 2"], ""),
        ("SELECT 1;\nSELECT", ["SELECT 1"], "SELECT"),
        ("SELECT ';' ; x", ["SELECT ';'"], "x"),
        ('SELECT ";" ; x', ['SELECT ";"'], "x"),
        (r"SELECT 'it\';s'; x", [r"SELECT 'it\';s'"], "x"),
        ("SELECT 'a;''b;'; x", ["SELECT 'a;''b;'"], "x"),
        (r"SELECT r'\'; x", [r"SELECT r'\'"], "x"),
        ("SELECT `a;b`` ;c`; x", ["SELECT `a;b`` ;c`"], "x"),
        ("SELECT 1 -- not; here\n; x", ["SELECT 1 -- not; here"], "x"),
        ("SELECT /* ; /* ; */ ; */ 1; x", ["SELECT /* ; /* ; */ ; */ 1"], "x"),
        ("-- only a remark", [], ""),
        ("SELECT 1; /* the end */", ["SELECT 1"], ""),
        ("SELECT 'never closed; x", [], "SELECT 'never closed; x"),
        ("SELECT /* never closed; x", [], "SELECT /* never closed; x"),
    ],
)
def test_statements_end_at_semicolons(text: str, found: list[str], rest: str) -> None:
    """But not at those in strings, quoted names and comments."""
    assert split(text) == (found, rest)


def test_the_last_statement_needs_no_semicolon() -> None:
    """As in an argument on the command line."""
    assert statements("SELECT 1; SELECT 2") == ["SELECT 1", "SELECT 2"]
    assert statements(" -- nothing ") == []


def test_names_are_words_with_dots_between() -> None:
    """Each with its place; what is in strings and comments is no name."""
    text = "a.b + `x.y`.c /* no.name */ FROM o.`p q`.r WHERE 'not.me' = t.* AND e . f g"
    assert [(parts, text[start:end]) for parts, start, end in names(text)] == [
        (("a", "b"), "a.b"),
        (("x.y", "c"), "`x.y`.c"),
        (("FROM",), "FROM"),
        (("o", "p q", "r"), "o.`p q`.r"),
        (("WHERE",), "WHERE"),
        (("t",), "t"),
        (("AND",), "AND"),
        (("e", "f"), "e . f"),
        (("g",), "g"),
    ]


def test_a_name_of_parts_becomes_one() -> None:
    """Everywhere, and nothing else does."""
    text = "SELECT 'a.b' FROM a.b x JOIN a.b.c JOIN `a`.b -- a.b"
    assert quote_name(text, ("a", "b")) == "SELECT 'a.b' FROM `a.b` x JOIN a.b.c JOIN `a.b` -- a.b"


def test_quotes() -> None:
    """There and back, with quotes inside."""
    assert quoted("a`b") == "`a``b`"
    assert unquoted("`a``b`.`c.d`") == ("a`b", "c.d")


def test_what_may_have_been_meant() -> None:
    """Misspelt, in another case, or only a part."""
    topics = ["orders", "Orders", "orders.eu", "payments", "x"]
    assert similar("ordres", topics)[0] == "orders"
    assert similar("ORDERS", topics)[:2] == ["orders", "Orders"]
    assert similar("eu", topics) == ["orders.eu"]
    assert similar("zzzzzz", topics) == []


class TestSchemas:
    def test_by_name_and_wildcard(self) -> None:
        """A topic's own schema goes before that of a wildcard."""
        schemas = Schemas()
        schemas.add("orders.*: id INT")
        schemas.add(" orders.eu : id STRING, at STRUCT<x: INT> ")
        assert schemas.of("orders.eu") == "id STRING, at STRUCT<x: INT>"
        assert schemas.of("orders.us") == "id INT"
        assert schemas.of("orders") is None

    def test_from_a_file(self, tmp_path: Path) -> None:
        """A JSON object, by topic."""
        path = tmp_path / "schemas.json"
        path.write_text('{"orders": "id INT", "logs": "text"}')
        schemas = Schemas()
        schemas.add(f"@{path}")
        assert (schemas.of("orders"), schemas.of("logs")) == ("id INT", "text")

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("orders", "'TOPIC: FIELDS'"),
            ("orders:", "is empty"),
            ("or ders: id INT", "or ders"),
            ("@/nowhere/x.json", "cannot be read"),
        ],
    )
    def test_mistakes(self, text: str, complaint: str) -> None:
        """Each says what it takes."""
        with pytest.raises(InvalidArgument, match=complaint):
            Schemas().add(text)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [("{", "is not JSON"), ("[1]", "by topic"), ('{"a": 1}', "by topic")],
    )
    def test_a_bad_file(self, tmp_path: Path, content: str, complaint: str) -> None:
        """It is named."""
        path = tmp_path / "schemas.json"
        path.write_text(content)
        with pytest.raises(InvalidArgument, match=complaint):
            Schemas().add(f"@{path}")
