"""``headrace doctor`` as a person or a script meets it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app, main
from headrace.files import Files
from tests.cli.rig import Command
from tests.doctor.directories import SETTINGS, flip_body, make_partition, read_all, segment

FILES = Files()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with one healthy partition of two segments."""
    make_partition(FILES, tmp_path / "orders" / "0", [5, 5])
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """As the command is started from a shell; the exit code."""
    monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def damage(data: Path) -> None:
    flip_body(FILES, segment(data / "orders" / "0", 0), 2)


def test_a_healthy_directory_is_said_to_be_healthy(data: Path) -> None:
    """One row for the partition, one sentence, exit code 0."""
    result = run(data)
    assert result.exit_code == 0
    assert "orders/0" in result.stdout
    assert "Healthy: 100 records in 1 partition of 1 topic" in result.stdout


def test_damage_is_shown_and_left_alone(data: Path) -> None:
    """The offsets that cannot be read are named, what to do is said, exit code 1."""
    damage(data)
    before = segment(data / "orders" / "0", 0).read_bytes()
    result = run(data)
    assert result.exit_code == 1
    assert "offsets 20 to 29" in result.stdout
    assert "[damaged_range]" in result.stdout
    assert "--repair" in result.stdout
    assert segment(data / "orders" / "0", 0).read_bytes() == before


def test_a_repair_asks_first(data: Path, command: Command) -> None:
    """Yes repairs, and the last sentence says that all is well again."""
    damage(data)
    ran = command("doctor", data, "--repair", input="y\n", terminal=True)
    assert "give up 10 records for good?" in ran.err
    assert "Healthy: 90 records" in ran.out
    assert ran.code == 0
    gone = set(range(20, 30))
    assert read_all(FILES, data / "orders" / "0") == (set(range(100)) - gone, gone)


@pytest.mark.parametrize(
    ("answer", "terminal", "code"),
    [("n\n", True, 1), ("", True, 1), ("y\n", False, 2)],
    ids=["no", "nobody there", "no terminal"],
)
def test_no_answer_is_no(
    data: Path, command: Command, answer: str, terminal: bool, code: int
) -> None:
    """Without a clear yes, from somebody at a terminal, nothing is changed."""
    damage(data)
    before = segment(data / "orders" / "0", 0).read_bytes()
    ran = command("doctor", data, "--repair", input=answer, terminal=terminal)
    assert ran.code == code
    assert ("[not_confirmed]" in ran.err) == (not terminal)
    assert segment(data / "orders" / "0", 0).read_bytes() == before


def test_yes_repairs_without_asking(data: Path) -> None:
    """For scripts: the answer is given beforehand."""
    damage(data)
    result = run(data, "--repair", "--yes")
    assert result.exit_code == 0
    assert "given up as lost" in result.stdout


def test_a_repair_of_a_healthy_directory_does_nothing(data: Path) -> None:
    """There is nothing to ask and nothing to do."""
    result = run(data, "--repair")
    assert result.exit_code == 0
    assert "?" not in result.stdout


def test_damage_that_cannot_be_repaired_is_left(data: Path) -> None:
    """The exit code says that something is left, and the sentence says whose turn it is."""
    (data / "orders" / "topic.json").write_text("{")
    result = run(data, "--repair", "--yes")
    assert result.exit_code == 1
    assert "must be fixed by hand" in result.stdout


def test_json_is_for_programs(data: Path) -> None:
    """Standard output is one JSON document with the totals and every finding."""
    damage(data)
    result = run(data, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["healthy"] is False
    assert report["totals"]["damaged_records"] == 10
    [finding] = report["findings"]
    assert (finding["code"], finding["first"], finding["end"]) == ("damaged_range", 20, 30)


def test_a_repair_in_json_says_before_and_after(data: Path) -> None:
    """One document has the report before, the actions and the report after."""
    damage(data)
    result = run(data, "--json", "--repair", "--yes")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["before"]["healthy"] is False
    assert document["after"]["healthy"] is True
    assert [action["code"] for action in document["actions"]] == ["damaged_range"]


def test_dump_lists_the_batches_of_a_file(data: Path) -> None:
    """One line per batch, and exit code 1 where one is damaged."""
    path = segment(data / "orders" / "0", 0)
    result = run("--dump", path)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 6
    assert "0 to 9" in result.stdout
    damage(data)
    result = run("--dump", path)
    assert result.exit_code == 1
    assert "body_damaged" in result.stdout


def test_dump_in_json_is_one_object_per_line(data: Path) -> None:
    """A program can read it line by line."""
    result = run("--dump", segment(data / "orders" / "0", 50), "--json")
    assert [json.loads(line)["first"] for line in result.stdout.splitlines()] == [
        50, 60, 70, 80, 90,
    ]  # fmt: skip


def test_the_data_directory_may_come_from_the_environment(data: Path) -> None:
    """The variable that the broker reads is read here too."""
    result = CliRunner().invoke(app, ["doctor"], env={"HEADRACE_DATA_DIR": str(data)})
    assert result.exit_code == 0
    assert "Healthy" in result.stdout


def test_names_are_printed_as_they_are(data: Path) -> None:
    """A file name is never taken for markup, and one that cannot be printed is escaped."""
    (data / "orders" / "0" / "[red]file").write_text("")
    (data / "orders" / "0" / "bell\a").write_text("")
    result = run(data)
    assert "[red]file" in result.stdout
    assert "bell\\x07" in result.stdout


def test_many_findings_of_one_kind_are_counted(data: Path) -> None:
    """A directory full of strangers does not bury what matters."""
    for number in range(100):
        (data / "orders" / "0" / f"stranger-{number:03d}").write_text("")
    result = run(data)
    assert "and 80 more unknown_file" in result.stdout
    assert len(json.loads(run(data, "--json").stdout)["findings"]) == 100


def test_many_partitions_are_counted(data: Path) -> None:
    """Only those that have something to say are listed when there are very many."""
    for number in range(60):
        (data / "many" / str(number)).mkdir(parents=True)
    (data / "many" / "topic.json").write_bytes(SETTINGS)
    damage(data)
    result = run(data)
    assert "orders/0" in result.stdout
    assert "many/7" not in result.stdout
    assert "and 60 partitions without problems" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name the data directory"),
        (["nowhere"], "directory nowhere does not exist [data_dir_not_found]"),
        (["{data}/orders/topic.json"], "is a file"),
        (["{data}/orders/0"], "is not a data directory"),
        (["{data}", "--yes"], "add --repair"),
        (["{data}", "--repair", "--json"], "add --yes"),
        (["--dump", "{data}"], "is a directory"),
        (["--dump", "{data}/orders/topic.json"], "no file of batches"),
        (["--dump", "nothing.log"], "nothing.log does not exist"),
        (["--dump", "nothing.log", "--repair"], "leave out --repair"),
        (["--frobnicate"], "No such option"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    """Nobody sees a traceback for what they typed, and standard output stays empty."""
    monkeypatch.delenv("HEADRACE_DATA_DIR", raising=False)
    code = run_main(monkeypatch, "doctor", *(a.format(data=data) for a in arguments))
    out, err = capsys.readouterr()
    assert code == 2
    assert complaint in err
    assert "Traceback" not in err
    assert out == ""


def test_a_directory_in_use_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the code of the error, where a broker holds the lock."""
    holder = FILES.open(data / "@lock", write=True, create=True)
    assert FILES.lock(holder)
    assert run_main(monkeypatch, "doctor", data) == 2
    holder.close()
    assert "[directory_locked]" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it without a word."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.doctor.examine", interrupted)
    assert run_main(monkeypatch, "doctor", data) == 130


def test_a_failing_disk_is_one_sentence(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the operating system names the file and is no traceback."""

    def failing(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "data/@lock")

    monkeypatch.setattr("headrace.cli.doctor.examine", failing)
    assert run_main(monkeypatch, "doctor", data) == 2
    assert capsys.readouterr().err == "headrace: data/@lock: Permission denied [storage_failed]\n"


def test_a_reader_that_has_seen_enough_is_no_error(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``headrace doctor --dump … | head`` ends without a word."""

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("headrace.cli.doctor.dump", closed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is wrapped, and put back afterwards
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert run_main(monkeypatch, "doctor", "--dump", segment(data / "orders" / "0", 0)) == 1
    assert capsys.readouterr().err == ""


def test_help_shows_examples() -> None:
    """The help of the command has examples and the exit codes, line by line."""
    result = run("--help")
    assert "  headrace doctor data --repair" in result.stdout
    assert "Exit codes:" in result.stdout


def test_the_version_is_printed() -> None:
    """``headrace --version`` says which one it is."""
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("headrace ")
