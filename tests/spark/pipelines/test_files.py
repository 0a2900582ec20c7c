"""TOML and Python files become pipelines."""

import sys
import textwrap
from pathlib import Path

import pytest

from headrace.spark.pipelines.files import PipelineFile, load
from headrace.spark.pipelines.sections import InvalidPipeline


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def example(language: str) -> str:
    """The example of docs/pipelines.md."""
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    return page.split(f"```{language}\n")[1].split("```")[0]


def test_the_example_in_the_documents(tmp_path: Path) -> None:
    """It can be read as it stands."""
    block = example("toml")
    declared = load(written(tmp_path, "orders.toml", block))
    revenue, shipped = declared.pipelines
    assert declared.servers == "127.0.0.1:9999"
    assert declared.checkpoint_dir == "/var/lib/pipelines"
    assert declared.spark == {"spark.sql.shuffle.partitions": "4"}
    assert (revenue.name, revenue.failed) == ("revenue", "revenue.dlq")
    assert [each.name for each in shipped.inputs] == ["orders", "shipments", "customers"]
    assert str(shipped.to) == f"{tmp_path}/lake/shipped (delta)"


def test_the_example_in_python(tmp_path: Path) -> None:
    """The same for the one in Python."""
    (pipeline,) = load(written(tmp_path, "orders.py", example("python"))).pipelines
    assert (pipeline.name, pipeline.failed, pipeline.way) == (
        "large_orders",
        "large_orders.dlq",
        "large_orders()",
    )
    assert pipeline.topics[0].topics == ("orders",)


def test_checkpoints_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is run from."""
    written(tmp_path, "a.toml", '[pipeline.p]\nfrom = "a"\nto = "b"\n')
    monkeypatch.chdir(tmp_path)
    assert load("a.toml").state_dir == tmp_path / "a.toml.state"


def test_a_python_file_has_settings_and_modules_beside_it(tmp_path: Path) -> None:
    """SETTINGS is the head; modules of the same folder can be imported, and are sent by value."""
    written(tmp_path, "beside_the_file.py", "LIMIT = 7\n")
    path = written(
        tmp_path,
        "many-things.py",
        """
        from beside_the_file import LIMIT
        from headrace.spark.pipelines import pipeline

        SETTINGS = {"servers": "10.0.0.1:9999", "checkpoint_dir": "ck", "spark": {"a.b": 1}}

        @pipeline(name="first", from_="a", to="b")
        @pipeline(name="second", from_="a", to="c", trigger=f"{LIMIT} seconds")
        def copied(rows):
            return rows
        """,
    )
    declared = load(path)
    assert [(each.name, str(each.to)) for each in declared.pipelines] == [
        ("second", "c"),
        ("first", "b"),
    ]
    assert declared.pipelines[0].trigger == {"processingTime": "7 seconds"}
    assert declared.checkpoint_dir == str(tmp_path / "ck")
    assert declared.spark == {"spark.a.b": "1"}
    assert str(tmp_path) not in sys.path
    from pyspark.cloudpickle.cloudpickle import list_registry_pickle_by_value

    assert {"beside_the_file", "headrace_pipelines_many_things"} <= list_registry_pickle_by_value()


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.yaml", "", "is neither a .toml nor a .py file"),
        ("a.toml", "x = ", "is no TOML: Invalid value (at end of document)"),
        ("a.toml", "", "declares no pipeline"),
        ("a.toml", "[pipelines.x]\nfrom='a'", "declares no pipeline"),
        ("a.toml", "pipeline = 3", "pipeline: it is a table, not 3"),
        ("a.toml", "sevrers='x'\n[pipeline.p]\nfrom='a'\nto='b'", "is it servers?"),
        ("a.toml", "[pipeline.p]\nfrom='a'", "a.toml:1, pipeline p: to: say where"),
        ("a.py", "1 +\n", "failed: line 1: invalid syntax"),
        ("a.py", "x = 1\nraise ValueError('no')", "failed: line 2: ValueError: no"),
        ("a.py", "import nothing_of_this_name", "failed: line 1: ModuleNotFoundError"),
        ("a.py", "SETTINGS = 3", "SETTINGS is a dictionary, not 3"),
        (
            "a.py",
            "from headrace.spark.pipelines import pipeline\n"
            "@pipeline(from_='a', to='b', name='x')\n@pipeline(from_='a', to='c', name='x')\n"
            "def f(rows): ...",
            "has two pipelines 'x'",
        ),
        (
            "a.py",
            "from headrace.spark.pipelines import pipeline\n@pipeline(sql='x')\ndef f(): ...",
            "@pipeline takes no 'sql'",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    """With the file, and the line where there is one."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidPipeline) as caught:
        load(path)
    assert complaint in caught.value.message
    assert name in caught.value.message


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    """Each on a line of its own, with file, line, pipeline and key; a pipeline hides no other."""
    path = written(
        tmp_path,
        "a.toml",
        """
        sevrers = "x"  # 2
        [pipeline.one]
        from = "a b"
        tigger = "1 s"
        restarts = -1
        sql = '''
          SELECT [pipeline.none]
          FROM x = 3
        '''
        to = { topic = "b", kee = "c" }  # 11
        ensure = [
          "x > 0",
        ]
        [pipeline.two]
        to = "c"
        [pipeline.two.inputs.x]  # 17
        from = "a"

        watermark = "at soon"
        """,
    )
    with pytest.raises(InvalidPipeline) as caught:
        load(path)
    found = [each.removeprefix(f"{path}:").split(": ")[:2] for each in caught.value.mistakes]
    assert found == [
        ["4, pipeline one", "from"],
        ["11, pipeline one", "to.kee"],
        ["6, pipeline one", "restarts"],
        ["5, pipeline one", "tigger"],
        ["12, pipeline one", "ensure"],
        ["20, pipeline two", "inputs.x.watermark"],
        ["2", "sevrers"],
    ]


def test_the_lines_of_a_python_file(tmp_path: Path) -> None:
    """The keyword of the decorator, or the key of a dictionary in it."""
    path = written(
        tmp_path,
        "a.py",
        """
        from headrace.spark.pipelines import pipeline

        @pipeline(
            from_="a",
            to={
                "topic": "b",
                "kee": "x",
            },
        )
        def one(rows): ...

        @pipeline(name="second", from_="a b", to="c")
        def two(rows): ...
        """,
    )
    with pytest.raises(InvalidPipeline) as caught:
        load(path)
    found = [each.removeprefix(f"{path}:").split(": ")[:2] for each in caught.value.mistakes]
    assert found == [["8, pipeline one", "to.kee"], ["13, pipeline second", "from"]]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match="cannot be read: No such file"):
        load(tmp_path / "nothing.toml")


def test_pipelines_are_chosen_by_name(tmp_path: Path) -> None:
    """In the order asked for, each once; without a name, all."""
    declared: PipelineFile = load(
        written(
            tmp_path,
            "a.toml",
            """
            [pipeline.one]
            from = "a"
            to = "b"
            [pipeline.two]
            from = "a"
            to = "c"
            """,
        )
    )
    assert [each.name for each in declared.choose([])] == ["one", "two"]
    assert [each.name for each in declared.choose(["two", "one", "two"])] == ["two", "one"]
    with pytest.raises(InvalidPipeline, match="has no pipeline 'three'; it has one, two"):
        declared.choose(["three"])
