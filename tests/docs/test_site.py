"""The site of `make docs`: it is built without a warning, loads nothing from elsewhere, and can be searched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from headrace.settings import SETTINGS
from tests.console.browser import browser, missing
from tests.docs.blocks import ROOT, read, table
from tests.docs.tables import COMMANDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]
pytest.importorskip("mkdocs", reason="NOT TRIED: the site; make docs installs mkdocs")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*?\ssrc=["']?([^"'\s>]+)|<link[^>]*?\shref=["']?([^"'\s>]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it, into another directory. The build is strict: a bad link ends it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    """And each is in the menu."""
    menu = read("mkdocs.yml")
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), page
        assert f" {page.name}" in menu


def test_the_references_are_complete(site: Path) -> None:
    """Each setting, code, metric and command has its place."""
    pages = {
        name: (site / f"reference/{name}.html").read_text()
        for name in ("settings", "codes", "metrics", "commands")
    }
    codes = table(read("docs/protocol.md"), "code", "kind", "where", "meaning")
    for setting in SETTINGS:
        assert f"<code>{setting.name}</code>" in pages["settings"]
    for row in codes:
        assert f"<code>{row[0].strip('`')}</code>" in pages["codes"]
    for name in COMMANDS:
        assert f">{name}<" in pages["commands"], name
    for name in ("message_broker_messages_published_total", "headrace_pipeline_up"):
        assert f"<code>{name}</code>" in pages["metrics"]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """No script, style, picture or frame has an address on another machine."""
    for page in site.rglob("*.html"):
        for found in _LOADED.finditer(page.read_text()):
            address = found[1] or found[2]
            assert "//" not in address or "canonical" in found[0], (page, found[0])
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", style.read_text()), style


def test_it_is_searched_from_a_disk(site: Path, tmp_path: Path) -> None:
    """Opened as a file, without a server and a network, it finds a page."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with browser(tmp_path) as look:
        look.driver.get((site / "reference" / "codes.html").as_uri())
        look.driver.find_element(By.TAG_NAME, "body").send_keys("/")
        field = look.find(".md-search__input")
        field.send_keys("poison message")
        look.until(lambda: look.text(".md-search-result__list"), "nothing is found")
        field.send_keys(Keys.ENTER)
        look.until(lambda: "codes.html" not in look.driver.current_url, "no page is opened")
        loaded = look.driver.execute_script(
            "return performance.getEntriesByType('resource').map((each) => each.name)"
        )
        assert [each for each in loaded if not each.startswith("file://")] == []
        assert look.errors() == []
