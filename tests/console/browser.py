"""A real Chromium without a window, and what the tests do with it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

WAIT_S = 15.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-dev-shm-usage", "--disable-component-update", "--no-first-run", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--metrics-recording-only", "--window-size=1280,900",
)  # fmt: skip


def missing() -> str | None:
    """What has to be installed, or None."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return "NOT TRIED: the console in a browser; apt-get install chromium chromium-driver"
    return None


class Browser:
    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self.home = ""

    def open(self, base: str, page: str = "#/") -> None:
        """A page of the console, newly loaded."""
        self.home = base
        self.driver.get("about:blank")
        self.driver.get(f"{base}/{page}")

    def go(self, page: str) -> None:
        """Another page, as a link would open it."""
        self.driver.execute_script("location.hash = arguments[0]", page)

    def find(self, css: str) -> WebElement:
        return self.until(lambda: self._visible(css), f"no {css}")

    def _visible(self, css: str) -> WebElement | None:
        return next(
            (e for e in self.driver.find_elements(By.CSS_SELECTOR, css) if e.is_displayed()), None
        )

    def has(self, css: str) -> bool:
        return self._visible(css) is not None

    def click(self, css: str) -> None:
        def clicked() -> bool:
            found = self._visible(css)
            if found is None:
                return False
            found.click()
            return True

        self.until(clicked, f"cannot click {css}")

    def button(self, text: str, inside: str = "body") -> None:
        """Click the button or link with this text."""

        def clicked() -> bool:
            for each in self.driver.find_elements(By.CSS_SELECTOR, f"{inside} button, {inside} a"):
                if each.is_displayed() and each.text.strip() == text:
                    # Not to the upper edge, where the menu stays above everything.
                    self.driver.execute_script(
                        "arguments[0].scrollIntoView({block: 'nearest'})", each
                    )
                    each.click()
                    return True
            return False

        self.until(clicked, f"no button {text!r}")

    def type(self, css: str, text: str) -> None:
        """Replace what is in a field, as a user does."""
        field = self.find(css)
        field.send_keys(Keys.CONTROL + "a")
        field.send_keys(text or Keys.BACKSPACE)

    def choose(self, css: str, value: str) -> None:
        self.driver.execute_script(
            "const node = arguments[0]; node.value = arguments[1];"
            "for (const name of ['input', 'change']) node.dispatchEvent(new Event(name, {bubbles: true}));",
            self.find(css), value,
        )  # fmt: skip

    def text(self, css: str = "#app") -> str:
        found = self._visible(css)
        return "" if found is None else found.text

    def says(self, text: str, css: str = "body") -> None:
        """Wait until the page says it."""
        self.until(
            lambda: text in self.text(css), lambda: f"{text!r} is not in: {self.text(css)[:1500]}"
        )

    def until(self, condition: Callable[[], Any], otherwise: str | Callable[[], str]) -> Any:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                found = condition()
                if found:
                    return found
            except (StaleElementReferenceException, WebDriverException):
                pass  # it was drawn anew
            if time.monotonic() > end:
                raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
            time.sleep(0.03)

    def errors(self) -> list[str]:
        """What the browser complained about since the last call."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def theme(self, name: str) -> None:
        self.driver.execute_script("document.documentElement.dataset.theme = arguments[0]", name)

    def picture(self, path: Path) -> None:
        """Of the whole page, however long it is."""
        height = self.driver.execute_script("return document.documentElement.scrollHeight")
        size = self.driver.get_window_size()
        self.driver.set_window_size(size["width"], min(int(height) + 160, 4000))
        self.driver.save_screenshot(str(path))
        self.driver.set_window_size(size["width"], size["height"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
