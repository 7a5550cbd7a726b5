"""The comparison's page in a real browser: what is in the DOM, what is fetched, and how it lies on
narrow screens.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
    ),
]

# Runs in a page around the report's, whose own policy forbids scripts, and measures the report in a
# frame.
MEASURE = """<!DOCTYPE html><title>measure</title>
<iframe id="frame" src="/compare.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="found"></pre>
<script>
document.getElementById("frame").onload = event => {
  const page = event.target.contentDocument, cut = [], overlapping = [];
  for (const svg of page.querySelectorAll(".plot svg")) {
    const edge = svg.getBoundingClientRect(), boxes = [];
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1)
        cut.push(text.textContent);
      for (const [other, name] of boxes)
        if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > 1 &&
            Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 3)
          overlapping.push(name + " / " + text.textContent);
      boxes.push([box, text.textContent]);
    }
  }
  const root = page.documentElement;
  document.getElementById("found").textContent = JSON.stringify(
    {cut, overlapping, wide: root.scrollWidth - root.clientWidth, plots: page.querySelectorAll(".plot svg").length});
};
</script>"""


class Site:
    """A server on this machine that hands out the given pages and remembers every path it was asked
    for.
    """

    def __init__(self, pages: dict[str, str]) -> None:
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                body = pages.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(compare_text: str) -> Iterator[Site]:
    pages = {f"/{width}.html": MEASURE.replace("WIDTH", str(width)) for width in (480, 768, 1200)}
    careless = '<!DOCTYPE html><link rel="icon" href="data:,"><img src="/picture.png">'
    site = Site({"/compare.html": compare_text, "/careless.html": careless, **pages})
    yield site
    site.close()


def open_in_browser(address: str, profile: Path) -> str:
    """The page's DOM after loading, as the browser writes it."""
    assert BROWSER is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=5000 --dump-dom"
    )
    command = [BROWSER, *flags.split(), f"--user-data-dir={profile}", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def test_the_dom_has_all_tables_and_plots_and_no_element_from_a_setting(
    site: Site, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")
    dom = open_in_browser(f"{site.address}/compare.html", tmp_path)
    assert dom.count("<table>") == 7
    assert dom.count("<svg") == 7
    assert len(re.findall(r"<section id=", dom)) == 7
    assert "<b id=" not in dom
    rows = re.findall(
        r'<span class="swatch"[^>]*></span>(recompute|hicache|hicache-file|kvtier)</td>', dom
    )
    assert rows == ["recompute", "hicache", "hicache-file", "kvtier"] * 5


def test_the_page_fetches_nothing(site: Site, tmp_path: Path) -> None:
    open_in_browser(f"{site.address}/compare.html", tmp_path)
    assert site.asked == ["/compare.html"]


def test_a_fetch_would_have_been_noticed(site: Site, tmp_path: Path) -> None:
    open_in_browser(f"{site.address}/careless.html", tmp_path)
    assert site.asked == ["/careless.html", "/picture.png"]


@pytest.mark.parametrize("width", [480, 768, 1200])
def test_no_label_is_cut_or_covered_and_the_page_never_scrolls_sideways(
    site: Site, tmp_path: Path, width: int
) -> None:
    pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")
    dom = open_in_browser(f"{site.address}/{width}.html", tmp_path)
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found
    assert json.loads(html.unescape(found[1])) == {
        "cut": [],
        "overlapping": [],
        "wide": 0,
        "plots": 7,
    }
