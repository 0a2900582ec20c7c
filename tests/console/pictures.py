"""Pictures of every page, in both themes and on a phone: ``python -m tests.console.pictures DIRECTORY``.

``python -m tests.console.pictures --docs`` renews those of the documentation, docs/pictures/console-*.webp.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from pathlib import Path

from headrace.testing import running_server
from tests.console.browser import Browser, browser
from tests.console.shop import shop

PAGES = {
    "overview": "#/",
    "topics": "#/topics",
    "messages": "#/topics/orders",
    "publish": "#/topics/orders/publish",
    "topic": "#/topics/orders/details",
    "message": "#/topics/orders/messages/0/0",
    "subscriptions": "#/subscriptions",
    "subscription": "#/subscriptions/billing",
    "dead-letters": "#/dead-letters",
    "letters": "#/dead-letters/email?letter=1",
    "scheduled": "#/scheduled",
    "pipelines": "#/pipelines",
    "access": "#/access",
}
LOOKS = {"light": ("light", 1280, 900), "dark": ("dark", 1280, 900), "phone": ("light", 400, 800)}


DOCS = {
    "overview": "#/",
    "messages": "#/topics/orders?from=earliest&kind=json&find=customer.id%3Dc5",
    "subscription": "#/subscriptions/billing",
    "dead-letters": "#/dead-letters/email?letter=1&reason=refused",
}
IN_DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def take_for_docs(look: Browser, base: str) -> None:
    """The upper part of some pages, as small files."""
    look.driver.set_window_size(1100, 760)
    for page, address in DOCS.items():
        look.open(base, address)
        look.find("main h1")
        look.theme("light")
        time.sleep(1.5)
        taken = look.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "webp", "quality": 80}
        )
        (IN_DOCS / f"console-{page}.webp").write_bytes(base64.b64decode(taken["data"]))


def take(look: Browser, base: str, directory: Path, only: list[str]) -> None:
    for name, (theme, width, height) in LOOKS.items():
        look.driver.set_window_size(width, height)
        for page, address in PAGES.items():
            if only and page not in only:
                continue
            look.open(base, address)
            look.find("main h1")
            look.theme(theme)
            time.sleep(0.6)
            look.picture(directory / f"{page}-{name}.png")


def main(directory: Path | None, only: list[str]) -> None:
    """Without a directory: those of the documentation."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        running_server() as server,
        shop(server) as client,
        browser(Path(profile)) as look,
    ):
        end = time.monotonic() + 32
        while time.monotonic() < end and not only:  # so that the plots have something to show
            for _ in range(20):
                client.publish("payments", b"x" * 300)
            time.sleep(0.3)
        host, port = server.http_address
        base = f"http://{host}:{port}"
        if directory is None:
            take_for_docs(look, base)
        else:
            take(look, base, directory, only)
        print("\n".join(look.errors()))


if __name__ == "__main__":
    main(None if sys.argv[1] == "--docs" else Path(sys.argv[1]), sys.argv[2:])
