"""The report page in a browser: Debian's Chromium, driven by playwright.

No page may write to the console, request anything from the network, or be wider than its window. Without the browser
these tests are skipped:

    pip install playwright && apt-get install chromium

`FEDLAS_CHROMIUM` names another browser.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlas.report.html import save_page
from report import pages

WIDE = 1440  # pixels of the default window


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = os.environ.get("FEDLAS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium, or set FEDLAS_CHROMIUM")
    with playwright.sync_playwright() as driver:
        # Without the sandbox, which containers often lack; the pages are written by the tests.
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def several(folder: Path) -> Path:
    options: dict[str, Any] = {
        "images": pages.images(),
        "ids": range(700),
        "command": "fedlas evaluate",
        "resamples": 100,
    }
    return save_page(folder / "several.html", pages.models(), title="Three models", **options)


class Visit:
    """An open page, and the errors that it caused."""

    def __init__(self, browser: Any, path: Path, width: int = WIDE, scheme: str = "light", **options: Any) -> None:
        options = {
            "viewport": {"width": width, "height": 900},
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        } | options
        self.context = browser.new_context(**options)
        self.faults: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._asked)
        self.page.on("requestfailed", lambda request: self.faults.append(f"failed: {request.url} {request.failure}"))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("data:", "file:")) or request.resource_type not in {"document", "image"}:
            self.faults.append(f"request: {request.url}")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def open_all(self) -> None:
        self.page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def close(self) -> None:
        self.context.close()
        assert self.faults == []


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    opened: list[Visit] = []

    def go(path: Path, *args: Any, **options: Any) -> Visit:
        opened.append(Visit(browser, path, *args, **options))
        return opened[-1]

    yield go
    for one in opened:
        one.close()
