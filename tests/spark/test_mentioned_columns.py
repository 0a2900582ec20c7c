"""Columns are found by their names in the text; where one can be read without its name, all are."""

import pytest

from headrace.spark.mentioned_columns import mentioned_columns

COLUMNS = ["id", "amount", "quantity", "a.b", "odd`name", "_offset", "_id"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("SELECT 1 FROM orders", set()),
        ("SELECT count(*), COUNT( * ) FROM orders", set()),
        ("SELECT sum(AMOUNT) FROM orders", {"amount"}),
        ("SELECT amount * quantity, 2 * amount, (amount) * 2 FROM o", {"amount", "quantity"}),
        ("SELECT o.amount*o.quantity FROM orders o", {"amount", "quantity"}),
        ("SELECT `amount` * 2 FROM orders", {"amount"}),
        ("SELECT `a.b`, `odd``name` FROM orders", {"a.b", "odd`name"}),
        ("SELECT idle, _offset FROM orders", {"_offset"}),
        ("SELECT IDENTIFIER('amount') FROM orders", {"amount"}),
        ("SELECT 1 FROM a JOIN b USING (id)", {"id"}),
    ],
)
def test_what_is_mentioned(text: str, found: set[str]) -> None:
    assert mentioned_columns(text, COLUMNS) == found


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM orders",
        "SELECT id, o.* FROM orders o",
        "SELECT amount, * FROM orders",
        "SELECT DISTINCT * FROM orders",
        "SELECT count(DISTINCT *) FROM orders",
        "SELECT to_json(struct(*)) FROM orders",
        "SELECT * EXCEPT (id) FROM orders",
        "SELECT id FROM (SELECT * FROM orders)",
        "TABLE orders",
        "FROM orders",
        "FROM orders |> WHERE id = 1",
        "SELECT count(*) FROM a NATURAL JOIN b",
        "SELECT count(*) FROM orders PIVOT (sum(amount) FOR id IN (1, 2))",
    ],
)
def test_what_may_read_everything(text: str) -> None:
    assert mentioned_columns(text, COLUMNS) is None
