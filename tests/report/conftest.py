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
from fedlas.report.page_script import FOLDER
from report import pages


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = os.environ.get("FEDLAS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium, or set FEDLAS_CHROMIUM")
    with playwright.sync_playwright() as driver:
        # Without the sandbox, which containers often lack; the pages are written by the tests.
        chromium_browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield chromium_browser
        chromium_browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def three_model_page(folder: Path) -> Path:
    options: dict[str, Any] = {
        "images": pages.images(),
        "ids": range(700),
        "command": "fedlas evaluate",
        "resamples": 100,
    }
    return save_page(pages.models(), folder / "three-models.html", title="Three models", **options)


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Any]:
    tabs: list[pages.BrowserTab] = []

    def open_path(path: Path, *args: Any, **options: Any) -> pages.BrowserTab:
        tabs.append(pages.BrowserTab(browser, path, *args, **options))
        return tabs[-1]

    yield open_path
    for tab in tabs:
        tab.close()


@pytest.fixture
def modules(browser: Any) -> Iterator[Any]:
    """Return a nearly empty page that can import the modules of the report page."""
    context = browser.new_context()
    page = context.new_page()
    page_errors: list[str] = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    empty_page = (
        '<!doctype html><meta charset="utf-8"><details id="contents"></details>'
        '<script type="application/json" id="page-data">'
        '{"models": [{"states": [], "names": null}], "names": []}</script>'
    )

    def serve(route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        is_script = name.endswith(".js")
        body = (FOLDER / name).read_text(encoding="utf-8") if is_script else empty_page
        route.fulfill(body=body, content_type="text/javascript" if is_script else "text/html")

    page.route("**/*", serve)
    page.goto("http://page.test/empty.html")
    yield page
    context.close()
    assert page_errors == []
