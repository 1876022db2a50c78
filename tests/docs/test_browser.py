"""The built site in a real browser: nothing scrolls sideways, search finds, code can be copied."""

import functools
import http.server
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TOOLS = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # of wall clock, on a busy machine
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs the browser Chromium (apt install chromium)"
    ),
    pytest.mark.skipif(not TOOLS, reason="needs mkdocs (pip install 'llm-trainers[docs]')"),
]

# Shows every page in a frame of a given width, one after the other, and measures it.
LOOK = """
<!doctype html><body><script>
const found = {};
async function look(name, address, width, scheme) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.src = address;
  document.body.append(frame);
  await new Promise((done) => { frame.onload = done; });
  const page = frame.contentDocument;
  page.body.setAttribute("data-md-color-scheme", scheme);
  await new Promise((done) => setTimeout(done, 100));
  found[name] = {
    sideways: page.scrollingElement.scrollWidth - page.documentElement.clientWidth,
    blocks: page.querySelectorAll("pre > code").length,
    copies: page.querySelectorAll(".md-clipboard, .md-code__button").length,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    broken: [...page.querySelectorAll(".md-content img")].filter((i) => !i.naturalWidth).length,
    strays: page.querySelectorAll(".md-content :is(polyline, circle):not(svg *)").length,
  };
  frame.remove();
}
(async () => {
  for (const [name, address, width, scheme] of LOOKS) await look(name, address, width, scheme);
  fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>
"""

# Types a word into the search of the home page.
SEARCH = """
<!doctype html><body><iframe src="index.html" width="1400" height="900"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument;
  page.getElementById("__search").click();
  const field = page.querySelector(".md-search__input");
  const type = () => {
    field.focus();
    field.value = "requeue";
    field.dispatchEvent(new frame.contentWindow.Event("input", {bubbles: true}));
    field.dispatchEvent(new frame.contentWindow.KeyboardEvent("keyup", {key: "e", bubbles: true}));
  };
  type();
  const timer = setInterval(() => {
    const links = [...page.querySelectorAll(".md-search-result__link")].map((a) => a.pathname);
    if (!links.length) { type(); return; }
    clearInterval(timer);
    fetch("/", {method: "POST", body: JSON.stringify(links)});
  }, 300);
};
</script></body>
"""


class Site(http.server.ThreadingHTTPServer):
    """Serves a folder on this machine, and keeps what its pages post."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.posted: queue.Queue[bytes] = queue.Queue()
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer_to(self, script: str, profile: Path) -> Any:
        """What a page posts that is added to the site and opened in the browser."""
        assert CHROMIUM is not None
        (self.folder / "test.html").write_text(script)
        browser = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--remote-debugging-port=0", f"--user-data-dir={profile}",
                f"http://127.0.0.1:{self.server_port}/test.html",
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return json.loads(self.posted.get(timeout=400))
        finally:
            browser.terminate()
            browser.wait()


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(
        build,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with Site(folder) as server:
        yield server
        server.shutdown()


def address_of(page: str) -> str:
    """Where mkdocs puts a page."""
    return "index.html" if page == "index" else f"{page}/index.html"


def test_no_page_scrolls_sideways_and_code_can_be_copied(site, tmp_path):
    looks = [
        (f"{page}, {width} px, {scheme}", address_of(page), width, scheme)
        for page in PAGES
        for width, scheme in ((390, "default"), (390, "slate"), (1400, "default"))
    ]

    found = site.answer_to(LOOK.replace("LOOKS", json.dumps(looks)), tmp_path)

    assert found.keys() == {look[0] for look in looks}
    assert [name for name, seen in found.items() if seen["sideways"] > 0] == []
    assert [name for name, seen in found.items() if seen["broken"]] == []
    assert [
        name for name, seen in found.items() if seen["strays"]
    ] == []  # lines of the notebook's plot
    assert [name for name, seen in found.items() if seen["blocks"] > seen["copies"]] == []
    colours = {seen["background"] for seen in found.values()}
    assert len(colours) == 2  # the light one and the dark one


def test_the_search_finds_the_text_of_a_guide(site, tmp_path):
    assert any("slurm" in link for link in site.answer_to(SEARCH, tmp_path))
