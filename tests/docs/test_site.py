"""The site in a real browser, opened as files and without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from report.browser import Browser, chromium

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
A_MOMENT = "return new Promise(done => setTimeout(done, 1000))"
FOUND = "return [...document.querySelectorAll('.md-search-result__item h1')].map(title => title.textContent)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site is built with the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        browser.offline()
        browser.resize(1300, 1000)
        yield browser


@pytest.mark.parametrize("page", ["index", "theory", "algorithms/fedlalr", "api"])
def test_a_page_opens_as_a_file_and_loads_nothing_from_elsewhere(browser: Browser, site: Path, page: str) -> None:
    browser.open(site / f"{page}.html")
    browser.run(A_MOMENT)
    assert browser.complaints() == []
    assert browser.run("return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('file:'))") == []


def test_the_search_works_without_a_server(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    browser.run(A_MOMENT)
    browser.click(".md-search__input")
    browser.press(".md-search__input", "lambert")
    browser.run(A_MOMENT)
    assert "Theory" in browser.run(FOUND)
