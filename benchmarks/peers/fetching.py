"""Where the peers come from: Debian's packages, the Go module proxy, Maven Central. Each is fetched once.

What cannot be fetched raises :class:`Missing` with the reason; the report says it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.harness import ROOT, console

CACHE = ROOT / ".cache" / "peers"
FETCH_S = 900.0
NATS_CLI = "v0.3.0"


class Missing(Exception):
    """The peer, or its load tool, cannot be had here."""


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
            _run(["apt-get", "update", "-qq"])
            _run(["apt-get", "install", "-y", "-qq", package], DEBIAN_FRONTEND="noninteractive")
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
    path = CACHE / "go" / "nats"
    if not path.exists():
        _need("go")
        folder = CACHE / "nats-cli"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "go.mod").write_text(
            f"module cli\n\ngo 1.24\n\nrequire github.com/nats-io/natscli {NATS_CLI}\n"
        )
        (folder / "cli.go").write_text('package cli\n\nimport _ "github.com/nats-io/natscli/cli"\n')
        with console.status("building nats"):
            _run(["go", "mod", "tidy"], cwd=folder)
            _run(["go", "build", "-o", str(path), "github.com/nats-io/natscli/nats"], cwd=folder)
    return str(path)


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
