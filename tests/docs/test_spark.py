"""docs/spark.md: its tables are what the source says."""

import ast
import re

from headrace.spark.sink import writers
from headrace.spark.source import options
from tests.docs.blocks import read
from tests.docs.test_protocol import SPARK, classes, raised, table

TEXT = read("docs/spark.md")


def class_codes() -> set[str]:
    """Codes of the error classes that the Spark room has of its own, and those given to them."""
    found = set()
    for path in SPARK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef(body=body):
                    for line in body:
                        match line:
                            case ast.Assign(
                                targets=[ast.Name(id="code")], value=ast.Constant(value=str(code))
                            ):
                                found.add(code)
                case ast.keyword(arg="code", value=ast.Constant(value=str(code))):
                    found.add(code)
    return found


def test_every_code_is_described() -> None:
    """Each code that only Spark's users can meet stands in the table, and none that is not there."""
    rows = {row[0].strip("`") for row in table(TEXT, "code", "meaning")}
    ours = set(raised(spark=True)) | class_codes()
    general = {cls.code for cls in classes().values()}
    assert sorted(ours - general - rows) == [], "add a row to the table in docs/spark.md for these"
    assert sorted(rows - ours) == [], "these stand in docs/spark.md and nowhere else"


def test_every_option_of_reading_is_described() -> None:
    """By its name, as it is spelt."""
    rows = table(TEXT, "option", "default", "meaning")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(options.READING)


def test_every_option_of_writing_is_described() -> None:
    """Besides those that reading has too, or that Spark adds."""
    text = TEXT[TEXT.index("## Writing") :]
    spark = {"checkpointLocation", "queryName"}
    ours = set(writers.WRITING) - set(options.READING) - spark
    rows = table(text, "option", "meaning")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == ours
