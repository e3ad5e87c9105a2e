"""The report in a real browser: the decision, a pointer over a chart, the fold, silence, accessibility."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune_offload.reports import page
from tests.factories import make_choice, make_profile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install the package `chromium` to look at the page"
)

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
VIEWS = [(PHONE, "light"), (PHONE, "dark"), (DESKTOP, "light"), (DESKTOP, "dark")]
each_view = pytest.mark.parametrize(
    ("size", "scheme"), VIEWS, ids=[f"{size['width']}-{scheme}" for size, scheme in VIEWS]
)


@dataclass
class Seen:
    """A page that was opened, and what it did meanwhile."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    with sync_api.sync_playwright() as playwright:
        # containers run tests as root, where Chromium's own sandbox cannot start
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two profiles, so that everything that can be on a page is on it."""
    made = tmp_path_factory.mktemp("report") / "report.html"
    profiles = [("a.yaml", make_profile()), ("b.yaml", make_profile(choice=make_choice(gain=1.0)))]
    made.write_text(page.html(profiles), encoding="utf-8")
    return made


def _open(browser: Any, file: Path, size: dict[str, int], scheme: str) -> Seen:
    opened = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    seen = Seen(opened)
    opened.on("console", lambda message: seen.console.append(message.text))
    opened.on("pageerror", lambda error: seen.console.append(str(error)))
    opened.on("request", lambda request: seen.requests.append(request.url))
    opened.goto(file.as_uri())
    return seen


@each_view
def test_the_page_is_silent_and_fits(browser: Any, file: Path, size: dict[str, int], scheme: str) -> None:
    """Nothing on the console, no request but for the file itself, no sideways scrolling, the decision in sight."""
    seen = _open(browser, file, size, scheme)
    assert (seen.console, seen.requests) == ([], [file.as_uri()])
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert seen.page.locator(".decision").first.inner_text() == page.decision(make_profile())
    assert all(chart.bounding_box()["height"] > 50 for chart in seen.page.locator(".chart:visible").all())


@pytest.mark.long
@each_view
def test_axe_finds_nothing(browser: Any, file: Path, size: dict[str, int], scheme: str) -> None:
    """No rule of axe-core is broken, folds open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    seen = _open(browser, file, size, scheme)
    seen.page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    found = axe.Axe().run(seen.page).response["violations"]
    assert [(each["id"], each["impact"], each["nodes"][0]["html"][:200]) for each in found] == []


@pytest.mark.parametrize("chart", ["costs", "stages", "curve"])
def test_a_pointer_over_a_mark_shows_its_numbers(browser: Any, file: Path, chart: str) -> None:
    """The tip holds the words of the mark under the pointer, and goes when the pointer leaves the chart."""
    seen = _open(browser, file, DESKTOP, "light")
    nth = {"costs": 0, "stages": 1, "curve": 2}[chart]
    drawn = seen.page.locator("section.profile").first.locator(".chart:visible").nth(nth)
    drawn.scroll_into_view_if_needed()
    mark = drawn.locator("[aria-roledescription=point], [aria-roledescription=bar]").last
    box, tip = mark.bounding_box(), seen.page.locator("#tip")
    assert tip.is_hidden()
    seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert tip.is_visible() and tip.inner_text() == mark.get_attribute("aria-label")
    seen.page.mouse.move(1, 1)
    assert tip.is_hidden()


def test_the_fold_opens_by_keyboard(browser: Any, file: Path) -> None:
    """The raw numbers are hidden until their heading is pressed."""
    seen = _open(browser, file, PHONE, "light")
    fold = seen.page.locator("details.raw").first
    raw = fold.locator("pre")
    assert raw.is_hidden()
    fold.locator("summary").focus()
    seen.page.keyboard.press("Enter")
    assert raw.is_visible() and '"schema": 1' in raw.inner_text()


def test_paper_is_white_whatever_the_scheme(browser: Any, file: Path) -> None:
    """Printed from a dark desktop, the page has black ink on white."""
    seen = _open(browser, file, DESKTOP, "dark")
    dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.page.emulate_media(media="print")
    printed = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark, printed) == ("rgb(13, 17, 23)", "rgb(255, 255, 255)")
    assert seen.page.locator("details.raw").first.is_hidden()
