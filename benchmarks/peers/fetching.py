"""Where the peers come from: Debian's packages, the Go module proxy, Maven Central. Each is fetched once.

What cannot be fetched raises :class:`Missing` with the reason; the report says it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.harness import ROOT, console
from benchmarks.peers.server import Missing
from benchmarks.spark.kafka import NotFetched, fetch_jars
from headrace.spark import use_java

CACHE = ROOT / ".cache" / "peers"
FETCH_S = 900.0
NATS_CLI = "v0.3.0"
_PATIENT = ("-o", "DPkg::Lock::Timeout=300")  # another installation may be under way


def debian(program: str, package: str) -> str:
    """A program of Debian. Only root can install it; nothing is started by the installation."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found:
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Missing(f"{program} is not installed (Debian: apt-get install {package})")
    # A policy that allows no start: the benchmark starts the server itself, with its own settings.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        with console.status(f"installing {package}"):
            _run(["apt-get", *_PATIENT, "update", "-qq"])
            _run(
                ["apt-get", *_PATIENT, "install", "-y", "-qq", package],
                DEBIAN_FRONTEND="noninteractive",
            )
    finally:
        if ours:
            policy.unlink()
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not found:
        raise Missing(f"the package {package} has no {program}")
    return found


def go(program: str, module: str) -> str:
    """A program in Go, newest version, built here."""
    path = CACHE / "go" / program
    if not path.exists():
        _need("go")
        with console.status(f"building {program}"):
            _run(["go", "install", module], GOBIN=str(path.parent))
    return str(path)


def nats_cli() -> str:
    """NATS's load tool. ``go install`` needs the proxy's list of versions, which not every proxy has; a build in a
    module of its own does not."""
    module = f"module cli\n\ngo 1.24\n\nrequire github.com/nats-io/natscli {NATS_CLI}\n"
    source = 'package cli\n\nimport _ "github.com/nats-io/natscli/cli"\n'
    return go_program("nats", module, {"cli.go": source}, "github.com/nats-io/natscli/nats")


def go_program(name: str, module: str, files: dict[str, str], package: str = ".") -> str:
    """A program that is built in a module of its own: its go.mod, its files, and the package of the program."""
    path = CACHE / "go" / name
    if not path.exists():
        _need("go")
        folder = CACHE / f"go-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in {"go.mod": module, **files}.items():
            (folder / file).write_text(text)
        with console.status(f"building {name}"):
            _run(["go", "mod", "tidy"], cwd=folder)
            _run(["go", "build", "-o", str(path), package], cwd=folder)
    return str(path)


def maven(name: str, package: str) -> list[str]:
    """The jars of a package of Maven Central."""
    try:
        use_java()
        return [str(jar) for jar in fetch_jars(name, package)]
    except (NotFetched, OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{package} cannot be fetched: {error}") from None


def java() -> str:
    use_java()
    return str(Path(os.environ["JAVA_HOME"]) / "bin" / "java")


def _need(program: str) -> None:
    if not shutil.which(program):
        raise Missing(f"{program} is not installed")


def _run(command: list[str], cwd: Path | None = None, **environment: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"{command[0]} took longer than {FETCH_S:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"{' '.join(command[:3])}: {lines[-1] if lines else 'failed'}")
