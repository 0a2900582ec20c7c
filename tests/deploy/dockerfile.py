"""The Dockerfile as a list of instructions, and the files that a build may copy."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Instruction(NamedTuple):
    name: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """The arguments of COPY, USER, EXPOSE…, without options."""
        return [word for word in shlex.split(self.arguments) if not word.startswith("--")]

    @property
    def option(self) -> dict[str, str]:
        pairs = (
            word[2:].partition("=") for word in shlex.split(self.arguments) if word[:2] == "--"
        )
        return {name: value for name, _, value in pairs}

    @property
    def command(self) -> list[str]:
        """The words of ENTRYPOINT, CMD and HEALTHCHECK, which are JSON."""
        words = json.loads(self.arguments[self.arguments.index("[") :])
        assert isinstance(words, list)
        return words


def instructions() -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(" ", 1)) for line in lines if line.strip()]


def stages() -> list[list[Instruction]]:
    """Each begins with its FROM; the last one is the image."""
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction.name == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def environment() -> dict[str, str]:
    """What ENV adds to the environment of the image."""
    [line] = [arguments for name, arguments in stages()[-1] if name == "ENV"]
    return dict(word.split("=", 1) for word in shlex.split(line))


# --- the context ------------------------------------------------------------------------------------
def context(root: Path = ROOT) -> list[Path]:
    """The files that docker sends to the engine, relative to the root: .dockerignore leaves out the rest."""
    lines = (root / ".dockerignore").read_text().splitlines()
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    found = []
    for folder, directories, names in os.walk(root):
        here = Path(folder).relative_to(root)
        directories[:] = [
            name
            for name in directories
            if not _is_ignored(here / name, rules)
            or any(rule.startswith(f"{here / name}/") for rule in kept)
        ]
        found += [here / name for name in names if not _is_ignored(here / name, rules)]
    return found


def _is_ignored(path: Path, rules: list[str]) -> bool:
    """The last rule that matches the path, or a directory that it is in, decides."""
    ignored = False
    places = [str(path), *(str(parent) for parent in path.parents if str(parent) != ".")]
    for rule in rules:
        pattern = "".join(
            {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
            for part in re.split(r"(\*\*/|\*\*|\*|\?)", rule.removeprefix("!").strip("/"))
        )
        if any(re.fullmatch(pattern, place) for place in places):
            ignored = not rule.startswith("!")
    return ignored


def copy(instruction: Instruction, files: list[Path], root: Path, folder: Path) -> None:
    """COPY from the context to a working directory; a source that is not in the context is an error."""
    *sources, target = instruction.words
    for source in map(Path, sources):
        found = [path for path in files if path == source or source in path.parents]
        if not found:
            raise FileNotFoundError(f"COPY {source}: not in the context (see .dockerignore)")
        for path in found:
            if path == source:
                place = folder / target / path.name if target.endswith("/") else folder / target
            else:
                place = folder / target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, place)
