"""`make dist`: the wheel has what a user needs and nothing else, and it runs in an empty environment."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.cli.rig import clean_environment
from tests.deploy.dockerfile import ROOT

OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHON"}
PUBLISH = """
import sys
import headrace
from headrace import BrokerClient
assert "site-packages" in headrace.__file__
with BrokerClient(port=int(sys.argv[1])) as client:
    print(client.publish("orders", b"one").offset, client.fetch_values("orders"))
"""


def run(*command: object, folder: Path = ROOT, **environment: str) -> str:
    clean = {n: v for n, v in clean_environment().items() if n not in OF_MAKE | {"PYTHONPATH"}}
    ended = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def tracked(*folders: str) -> set[str]:
    """The files of the commit and of the working tree, without what git ignores."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, as ``make dist`` builds them: the sdist from the checkout, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    run(*build)
    assert sorted(path.suffix for path in folder.iterdir()) == [".gz", ".whl"]
    return folder


def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    """Every file of src/, the marker of types included, the license, and what pip needs."""
    [wheel] = dist.glob("*.whl")
    found = set(files_of(wheel))
    described = {name for name in found if ".dist-info/" in name}
    ends = {name.split(".dist-info/")[1] for name in described}
    assert ends == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert found - described == {name.removeprefix("src/") for name in tracked("src")}
    assert "headrace/py.typed" in found


def test_the_sdist_has_what_the_repository_has(dist: Path) -> None:
    """Source, tests and documents, and nothing that is not in the repository."""
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    known = tracked()
    assert names - known == {"PKG-INFO"}
    wanted = ("src/", "tests/", "docs/", "deploy/", "examples/", "benchmarks/", "Makefile")
    assert {name for name in known if name.startswith(wanted)} <= names


def test_the_wheel_of_the_checkout_is_that_of_the_sdist(dist: Path, tmp_path: Path) -> None:
    """Byte for byte: nobody needs the repository to build what we build."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path)
    [ours], [theirs] = tmp_path.glob("*.whl"), dist.glob("*.whl")
    assert files_of(ours) == files_of(theirs)


def test_make_dist_builds_them() -> None:
    """The target runs the same builder, in the directory that is named."""
    recipe = run("make", "-n", "-o", ".venv/.made", "dist", "DIST=/somewhere")
    assert ".venv/bin/python -m build --outdir /somewhere" in recipe


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_runs_in_an_empty_environment(dist: Path, tmp_path: Path, kind: str) -> None:
    """Installed by pip alone: the version, a broker, a publish, and the extras that errors name."""
    [package] = dist.glob(kind)
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "install", "-c", ROOT / "constraints.txt", package, folder=tmp_path)
    run(*pip, "check", folder=tmp_path)
    headrace = venv / "bin" / "headrace"
    version = package.name.split("-")[1].removesuffix(".tar.gz")
    assert run(headrace, "--version", folder=tmp_path).split() == ["headrace", version]
    serving = subprocess.Popen(
        [headrace, "serve", "--port", "0", "--http-port", "0"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert serving.stdout is not None
        found = re.search(r"tcp://127\.0\.0\.1:(\d+)", serving.stdout.readline())
        assert found
        said = run(headrace, "publish", "orders", "zero", folder=tmp_path, HEADRACE_PORT=found[1])
        assert said == "Published to orders/0 at offset 0.\n"
        assert run(python, "-c", PUBLISH, found[1], folder=tmp_path) == "1 [b'zero', b'one']\n"
        serving.terminate()
        assert serving.wait(30) == 0
    finally:
        serving.kill()
        serving.wait()
        assert serving.stdout is not None
        serving.stdout.close()
    # Errors say "pip install 'headrace[spark]'". Where the package is installed, that needs no index for it.
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    ended = subprocess.run(
        [*map(str, pip), "install", "--dry-run", "headrace[spark]"],
        cwd=tmp_path,
        env=clean_environment() | offline,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "from headrace[spark]" in ended.stderr  # it knows the extra, and lacks only the index
