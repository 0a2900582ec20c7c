"""The site of `make docs`: what mkdocs does with these pages before it builds them (mkdocs.yml names this file).

The pages are written for a repository: they are read there as they are. The site adds pages that are outside of
docs/ (README.md is its first page) and the references, which are generated from the source (tests/docs/tables.py).
A link to a file that is no page of the site becomes the name of that file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/REPORT.md": "benchmarks.md",
}
"""Pages of the repository that are outside of docs/ -> pages of the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *```)(\w+)[^\n`]*$", re.MULTILINE)
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {"frames": "text", "hex": "text"}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    sys.path.insert(0, str(ROOT))
    from tests.docs import tables

    sys.path.remove(str(ROOT))
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    icon = str(ROOT / "src/headrace/console/static/icon.svg")
    files.append(File.generated(config, "pictures/icon.svg", abs_src_path=icon))
    for name in ("settings", "metrics", "codes", "commands"):
        content = getattr(tables, f"{name}_page")()
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    source = {page: source for source, page in OUTSIDE.items()}.get(here, f"docs/{here}")
    folder = PurePosixPath(source).parent

    def linked(found: re.Match[str]) -> str:
        sign, label, target = found.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        name, _, anchor = target.partition("#")
        place = _joined(folder, name)
        address = OUTSIDE.get(place, place.removeprefix("docs/"))
        if files.get_file_from_path(address) is None:
            named = f"`{place}`"
            return label if label.strip("`") in place else f"{label} ({named})"
        up = "../" * here.count("/")
        return f"{sign}[{label}]({up}{address}{'#' + anchor if anchor else ''})"

    parts = _CODE.split(text)
    for number, part in enumerate(parts):
        if number % 2:  # a block of code: only its language is for the site
            parts[number] = _FENCE.sub(
                lambda found: found[1] + LANGUAGES.get(found[2], found[2]), part, count=1
            )
        else:
            parts[number] = _LINK.sub(linked, part)
    return "".join(parts)


def _joined(folder: PurePosixPath, name: str) -> str:
    words: list[str] = []
    for word in (folder / name).parts:
        if word == "..":
            words.pop()
        else:
            words.append(word)
    return "/".join(words)
