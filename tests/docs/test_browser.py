"""The built site in a real browser: nothing scrolls sideways, search finds, code can be copied."""

import functools
import html
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TOOLS = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings")))

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs the browser Chromium (apt install chromium)"
    ),
    pytest.mark.skipif(not TOOLS, reason="needs mkdocs (pip install 'llm-trainers[docs]')"),
]

# Shows every page in a frame of a given width, one after the other, and measures it.
LOOK = """
<!doctype html><title></title><body><script>
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
  };
  frame.remove();
}
(async () => {
  for (const [name, address, width, scheme] of LOOKS) await look(name, address, width, scheme);
  document.title = JSON.stringify(found);
})();
</script></body>
"""

# Types a word into the search of the home page.
SEARCH = """
<!doctype html><title></title><body><iframe src="index.html" width="1400" height="900"></iframe>
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
    document.title = JSON.stringify(links);
  }, 300);
};
</script></body>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The built site: its folder, and its address on this machine."""
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

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def title_of(address: str, profile: Path) -> object:
    """What a page says in its title, as JSON, when its script has ended."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--virtual-time-budget=60000", f"--user-data-dir={profile}", "--dump-dom", address,
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    assert title[1], "the script did not come to its end"
    return json.loads(html.unescape(title[1]))


def address_of(page: str) -> str:
    """Where mkdocs puts a page."""
    return "index.html" if page == "index" else f"{page}/index.html"


def test_no_page_scrolls_sideways_and_code_can_be_copied(site, tmp_path):
    folder, address = site
    looks = [
        (f"{page}, {width} px, {scheme}", address_of(page), width, scheme)
        for page in PAGES
        for width, scheme in ((390, "default"), (390, "slate"), (1400, "default"))
    ]
    (folder / "look.html").write_text(LOOK.replace("LOOKS", json.dumps(looks)))

    found = title_of(f"{address}/look.html", tmp_path)

    assert found.keys() == {look[0] for look in looks}
    assert [name for name, seen in found.items() if seen["sideways"] > 0] == []
    assert [name for name, seen in found.items() if seen["broken"]] == []
    assert [name for name, seen in found.items() if seen["blocks"] > seen["copies"]] == []
    colours = {seen["background"] for seen in found.values()}
    assert len(colours) == 2  # the light one and the dark one


def test_the_search_finds_what_a_guide_says(site, tmp_path):
    folder, address = site
    (folder / "search.html").write_text(SEARCH)
    assert any("slurm" in link for link in title_of(f"{address}/search.html", tmp_path))
