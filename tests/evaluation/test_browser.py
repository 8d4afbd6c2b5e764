"""The page in a real browser: no error, no request, nothing wider than the screen, text that can be read."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cards import write_run
from records import make_record

from moh_llm.evaluation.report import render
from moh_llm.evaluation.runs import read_run

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# Contrast of each text with what it stands on, as WCAG 2 defines it; below 4.5 for anything but marks.
_CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("h1, h2, h3, p, td, th, a, summary, figcaption, svg text, pre")) {
    const style = getComputedStyle(node);
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const ink = light(numbers(node.namespaceURI.endsWith("svg") ? style.fill : style.color));
    const paper = light(ground(node));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) poor.push([node.tagName, node.textContent.trim().slice(0, 30), ratio]);
  }
  return poor;
}"""


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Charts are rendered here, unless a test takes `unrendered`."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page_files(tmp_path: Path, analysis: dict[str, Any]) -> list[Path]:
    record = make_record({"base": ("dense", 1.0), "one": ("first", 0.9), "a model with a long name": ("second", 0.8)})
    record.analysis, record.limit, record.command = {"one": analysis}, 20, "moh-llm evaluate " + "folder/" * 40
    run = read_run(write_run(tmp_path / "run", "out/moh"))
    files = []
    for name, evaluation in (("evaluation.html", record), ("run.html", None)):
        files.append(tmp_path / name)
        files[-1].write_text(render("report.html", evaluation, [run]))
    return files


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_in_a_browser(browser: Any, page_files: list[Path], tmp_path: Path, size: str, scheme: str) -> None:
    for page_file in page_files:
        check_page(browser, page_file, tmp_path / f"{page_file.stem}-{size}-{scheme}.png", size, scheme)


def check_page(browser: Any, page_file: Path, picture: Path, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(page_file.as_uri())
    assert said == [page_file.as_uri()]
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    charts = page.query_selector_all("figure svg")
    assert len(charts) > 4
    for chart in charts:
        box = chart.bounding_box()
        assert 250 < box["width"] <= width and box["height"] < 900
    assert page.evaluate(_CONTRAST) == []
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg text')].map((text) => parseFloat(getComputedStyle(text).fontSize)"
        " * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b))"
    )
    assert min(sizes) > 7.5
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 30_000
    page.close()
