"""What a public project shows: its workflow, its templates, its policy, and documents that say what is true."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.deploy.dockerfile import ROOT

GITHUB = ROOT / ".github"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
SCHEMAS = {
    "vendor.github-workflows": sorted((GITHUB / "workflows").glob("*.yml")),
    "vendor.github-issue-forms": sorted(
        path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
    ),
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.compose-spec": [ROOT / "docker-compose.yml", ROOT / "deploy" / "docker-compose.yml"],
}


def conforms(schema: str, *paths: Path) -> bool:
    """Whether the files follow a schema that comes with check-jsonschema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    ended = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=60)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode == 0


@pytest.mark.parametrize("schema", SCHEMAS)
def test_it_follows_its_schema(schema: str, tmp_path: Path) -> None:
    """GitHub and Docker take the files; one with an invented key would be noticed."""
    assert SCHEMAS[schema]
    assert conforms(schema, *SCHEMAS[schema])
    broken = tmp_path / "broken.yml"
    broken.write_text(SCHEMAS[schema][0].read_text() + "\ninvented: [1]\n")
    assert not conforms(schema, broken)


# --- the workflow -----------------------------------------------------------------------------------
def jobs() -> dict[str, Any]:
    [workflow] = SCHEMAS["vendor.github-workflows"]
    found = yaml.safe_load(workflow.read_text())["jobs"]
    assert isinstance(found, dict)
    return found


def runs(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_it_checks_every_supported_python() -> None:
    """`make check` on the versions that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classifier = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    versions = [found[1] for text in project["classifiers"] if (found := classifier.match(text))]
    job = jobs()["check"]
    assert job["strategy"]["matrix"]["python"] == versions
    assert runs(job) == ["make check PYTHON=python${{ matrix.python }}"]


def test_every_command_is_real() -> None:
    """Each is a target of the Makefile, or builds or runs the image of the Dockerfile."""
    makefile = (ROOT / "Makefile").read_text()
    commands = [command for job in jobs().values() for command in runs(job)]
    assert len(commands) > 3
    for command in commands:
        program, argument, *_ = command.split()
        if program == "make":
            assert f"\n{argument}:" in makefile, command
        else:
            assert (program, argument) in {("docker", "build"), ("docker", "run")}, command


# --- the documents ----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [ROOT / "SECURITY.md", GITHUB / "pull_request_template.md"])
def test_a_policy_and_a_template_lead_somewhere(path: Path) -> None:
    """Files and headings that they link to exist."""
    links = re.findall(r"\]\((?:\.\./blob/main/)?([^)#]+)(?:#([^)]+))?\)", path.read_text())
    assert links
    for target, heading in links:
        text = (ROOT / target).read_text().lower()
        assert not heading or f"# {heading.replace('-', ' ')}\n" in text, (target, heading)


def test_pip_is_told_what_it_can_find() -> None:
    """No index has the package, so no page says `pip install headrace`; a path or a checkout works."""
    named = re.compile(r"pip install[^`\n]*[ '\"]headrace\b(?!/)")
    said = {path.name: named.findall(path.read_text()) for path in PAGES}
    said |= {path.name: named.findall(path.read_text()) for path in ROOT.glob("examples/**/*.py")}
    assert {name: found for name, found in said.items() if found} == {}


def test_the_picture_is_at_the_top_of_the_readme() -> None:
    """It is a drawing with a title and a description, in light and in dark, and needs nothing else."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"!\[[^\]]{20,}\]\((docs/[\w-]+\.svg)\)", readme)
    assert found
    assert readme.index(found[0]) < readme.index("\n## ")
    text = (ROOT / found[1]).read_text()
    drawing = ElementTree.fromstring(text)
    names = {child.tag.rpartition("}")[2] for child in drawing}
    assert {"title", "desc"} <= names
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:href|src)=\"(?!#)|url\((?!#)|@import", text)
