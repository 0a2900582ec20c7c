"""The image: what its build copies is enough, and its steps, run here, make a broker that works."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.server.server import DRAIN_S
from tests.deploy import container
from tests.deploy.dockerfile import ROOT, context, copy, environment, stages


def test_the_context_is_what_dockerignore_lets_through(tmp_path: Path) -> None:
    """The last rule that matches decides, and caches inside of what is let through stay outside."""
    for name in ("src/a.py", "src/__pycache__/a.pyc", "src/b/__pycache__/c", "README.md", "data/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text((ROOT / ".dockerignore").read_text())
    assert {str(path) for path in context(tmp_path)} == {"src/a.py", "README.md"}


def test_what_is_copied_is_enough_to_build_the_package(tmp_path: Path) -> None:
    """The files of the first stage, and no others, make a wheel: nothing that it reads is missing."""
    files = context()
    for instruction in stages()[0]:
        if instruction.name == "COPY":
            copy(instruction, files, ROOT, tmp_path)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    ended = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.name == f"headrace-{project['version']}-py3-none-any.whl"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The image, built and run as Docker and as Kubernetes run it."""
    work = tmp_path_factory.mktemp("image")
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable]
    ended = subprocess.run(
        [*command, "-m", "tests.deploy.container", str(work)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode == container.CANNOT or "unshare failed" in ended.stderr:
        pytest.skip(
            "THE STEPS OF THE DOCKERFILE WERE NOT RUN: that needs root and mounts; "
            + ended.stderr.strip()
        )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["docker", "kubernetes"])
def test_the_image_runs(ran: Any, engine: str) -> None:
    """Every step, then ENTRYPOINT and CMD as USER on a read-only root: it is ready, healthy and durable,
    and it ends well on STOPSIGNAL; the health check notices the end."""
    found, image = ran[engine], {instruction.name: instruction for instruction in stages()[-1]}
    directory = "/data" if engine == "docker" else "/data/broker"
    ports = [int(port) for port in image["EXPOSE"].words]
    assert found["ready"] == (
        f"Headrace is ready: tcp://0.0.0.0:{ports[0]}, http://0.0.0.0:{ports[1]} (data: {directory})"
    )
    assert [found["port"], found["http_port"]] == ports
    assert f"{found['uid']}:{found['gid']}" == image["USER"].arguments == "10001:10001"
    assert found["healthy"] == 0
    assert found["published"] == "Published to orders/0 at offset 0."
    assert (found["code"], found["stopped_s"] < 2 * DRAIN_S) == (0, True)
    assert found["dead"] != 0
    assert found["data_mode"] == "700"
    assert environment()["HEADRACE_DATA_DIR"] == image["VOLUME"].arguments == "/data"
