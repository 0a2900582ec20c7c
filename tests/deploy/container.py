"""Build the image and run it, without a container engine: ``python -m tests.deploy.container WORK``.

This machine stands in for the base image. Every stage is an overlay on its root, in memory, so what a step
changes is gone at the end and nothing on the machine changes. The steps of the Dockerfile run in it as they
are written. The image then runs as ``docker run --read-only`` and Kubernetes would run it: in a network of
its own, as the image's user, on a read-only root, with a volume.

It needs root and new namespaces: ``unshare --mount --pid --fork --kill-child``. It prints what it found as
one JSON object, and exits with ``CANNOT`` if this machine does not allow that.
"""

import ctypes
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.dockerfile import ROOT, Instruction, context, copy, environment, stages

CANNOT = 77
PATIENCE_S = 60.0
CLONE_NEWNET = 0x40000000
TOKEN = "the-token-of-the-container-tests"
MANIFEST = ROOT / "deploy/kubernetes/statefulset.yaml"


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Stage:
    """A root directory that the steps change."""

    def __init__(self, work: Path, number: int):
        base = work / str(number)
        self.root = base / "root"
        for name in ("upper", "work", "root"):
            (base / name).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={base / 'upper'},workdir={base / 'work'}"
        mount("-t", "overlay", "overlay", "-o", layers, self.root)
        mount("-t", "proc", "proc", self.root / "proc")
        mount("--bind", "/dev", self.root / "dev")
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", self.root / "tmp")
        # The base image has python first on the PATH, and its files can be read by everybody.
        programs = Path(sys.base_prefix, "bin")
        for parent in (programs, *programs.parents):
            inside = self.root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o055)
        python = self.root / programs.relative_to("/") / "python"
        if not python.exists():
            python.symlink_to("python3")
        self.folder = "/"
        self.environment = {"PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"}

    def inside(self, path: str) -> Path:
        return self.root / os.path.join(self.folder, path).lstrip("/")

    def command(self, words: list[str], user: str = "0:0") -> list[str]:
        there = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder]
        return ["chroot", f"--userspec={user}", str(self.root), *there, *words]

    def step(self, instruction: Instruction, files: list[Path], named: dict[str, "Stage"]) -> None:
        match instruction.name:
            case "WORKDIR":
                self.folder = instruction.words[0]
                self.inside("").mkdir(parents=True, exist_ok=True)
            case "COPY" if origin := instruction.option.get("from"):
                source, target = instruction.words
                subprocess.run(
                    ["cp", "-a", named[origin].inside(source), self.inside(target)], check=True
                )
            case "COPY":
                copy(instruction, files, ROOT, self.inside(""))
            case "RUN":
                print(f"RUN {instruction.arguments}", file=sys.stderr, flush=True)
                subprocess.run(
                    self.command(["sh", "-c", instruction.arguments]),
                    env=_registry() | self.environment,
                    stdout=sys.stderr,
                    check=True,
                )
            case "ENV":
                for name, value in environment().items():
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])


def _registry() -> dict[str, str]:
    """How this machine reaches the package registry: docker passes the proxies, too."""
    wanted = re.compile(r"PIP_\w+|SSL_CERT_FILE|(https?|no)_proxy", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if wanted.fullmatch(name)}


def build(work: Path) -> Stage:
    files, named = context(), {}
    for number, instructions in enumerate(stages()):
        stage = Stage(work, number)
        _, *name = instructions[0].arguments.split(" AS ")
        for instruction in instructions[1:]:
            stage.step(instruction, files, named)
        named[name[0] if name else ""] = stage
    return named[""]


# --- running it -------------------------------------------------------------------------------------
def leave_the_network() -> None:
    """A loopback of our own, where the ports of the image are free."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as control:
        is_up = struct.pack("16sh", b"lo", 1)
        fcntl.ioctl(control, 0x8914, is_up)  # SIOCSIFFLAGS, IFF_UP


def run(image: Stage, settings: dict[str, str], volume: str) -> dict[str, Any]:
    """Start what the image starts, ask and use it, and stop it as the engine would."""
    said = {instruction.name: instruction for instruction in stages()[-1]}
    user = said["USER"].arguments
    owner = image.inside(said["VOLUME"].arguments).stat()
    options = f"mode={owner.st_mode & 0o777:o},uid={owner.st_uid},gid={owner.st_gid}"
    mount("-t", "tmpfs", "-o", volume or options, "tmpfs", image.inside(said["VOLUME"].arguments))
    known = image.environment | {"HEADRACE_TOKEN": TOKEN} | settings
    start = [*said["ENTRYPOINT"].command, *said["CMD"].command]
    check = image.command(said["HEALTHCHECK"].command, user)
    process = subprocess.Popen(
        image.command(start, user), env=known, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        found["ready"] = process.stdout.readline().strip()
        if process.poll() is None and found["ready"]:
            status = (image.root / f"proc/{process.pid}/status").read_text()
            found["uid"] = int(re.findall(r"^Uid:\s+(\d+)", status, re.MULTILINE)[0])
            found["gid"] = int(re.findall(r"^Gid:\s+(\d+)", status, re.MULTILINE)[0])
            found["healthy"] = subprocess.run(
                check, env=known, stderr=subprocess.DEVNULL
            ).returncode
            for name in ("port", "http_port"):
                port = {"port": 9999, "http_port": 8080}[name]
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
                    found[name] = port
            publish = [*said["ENTRYPOINT"].command, "publish", "orders", "one"]
            found["published"] = subprocess.run(
                image.command(publish, user), env=known, capture_output=True, text=True
            ).stdout.strip()
        began = time.monotonic()
        process.send_signal(signal.Signals[said["STOPSIGNAL"].arguments])
        found["code"] = process.wait(PATIENCE_S)
        found["stopped_s"] = time.monotonic() - began
        found["dead"] = subprocess.run(check, env=known, stderr=subprocess.DEVNULL).returncode
    finally:
        process.kill()
        process.wait()
    directory = image.inside(known["HEADRACE_DATA_DIR"])
    found["data_mode"] = f"{directory.stat().st_mode & 0o777:o}" if directory.exists() else None
    subprocess.run(["umount", image.inside(said["VOLUME"].arguments)], check=True)
    return found


def of_kubernetes() -> dict[str, str]:
    """The settings that the manifest gives the broker, and those that Kubernetes adds."""
    [broker] = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in broker["env"] if "value" in each}
    links = {"HEADRACE_SERVICE_HOST": "10.0.0.1", "HEADRACE_PORT": "tcp://10.0.0.1:9999"}
    return {**links, **given}


def main(work: Path) -> int:
    try:
        mount("--make-rprivate", "/")
        mount("-t", "tmpfs", "tmpfs", work)
        Stage(work, 99)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no overlay can be mounted here: {error}", file=sys.stderr)
        return CANNOT
    image = build(work)
    mount("-o", "remount,ro", image.root)
    leave_the_network()
    # Kubernetes gives the volume to root and to the group of fsGroup.
    result = {
        "docker": run(image, {}, ""),
        "kubernetes": run(image, of_kubernetes(), "mode=2775,uid=0,gid=10001"),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
