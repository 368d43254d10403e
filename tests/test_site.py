"""The site that `make docs` builds: every page is there, every public name is on one, and a browser shows them."""

import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import dpfast
import dpfast.opacus
from dpfast import errors

ROOT = Path(__file__).resolve().parents[1]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built strictly: a dead link or anchor, or a name that is not there, ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def pages(site):
    return sorted(p.relative_to(site) for p in site.rglob("index.html"))


def test_every_page_of_the_folder_is_in_the_navigation(site):
    home = (site / "index.html").read_text()
    written = {p.stem for p in (ROOT / "docs").glob("*.md")}
    assert written | {"architecture", "contributing", "changelog"} == {str(p.parent) for p in pages(site)} - {"."}
    assert all(f'href="{name}/"' in home for name in written)


@pytest.mark.parametrize("module", [dpfast, dpfast.opacus], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(site, module):
    shown = set(re.findall(r'id="dpfast\.(?:[\w.]+\.)?(\w+)"', (site / "api/index.html").read_text()))
    shown |= set(re.findall(r'<h2 id="\w+">(\w+)', (site / "errors/index.html").read_text()))
    internal = {
        "ClippedLoss",
        "ClippedLossTensor",
        "rules",
    }  # made by the engine; a package, whose page is writing-a-rule
    assert set(module.__all__) - internal <= shown
    assert {name for name, value in vars(errors).items() if isinstance(value, type)} <= shown


def test_no_markup_is_left_over(site):
    for page in pages(site):
        assert not re.search(r":(class|meth|func|data):", (site / page).read_text()), page
    assert (
        "<blockquote>" not in (site / "api/index.html").read_text()
    )  # what prompts become that are not taken for code


PROBE = """<!doctype html><body><script>
const wait = ms => new Promise(done => setTimeout(done, ms));
const shown = url => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.onload = () => done(frame);
  frame.src = url;
  document.body.append(frame);
});
(async () => {
  const report = {titles: {}, found: []};
  for (const page of PAGES) {
    const frame = await shown(page);
    report.titles[page] = frame.contentDocument.querySelector("article h1")?.innerText ?? "";
    frame.remove();
  }
  const frame = await shown("/?q=ghost+clipping");
  for (let i = 0; i < 300 && !report.found.length; i++) {
    await wait(100);
    report.found = [...frame.contentDocument.querySelectorAll(".md-search-result__link")].map(a => a.pathname);
  }
  await fetch("/report", {method: "POST", body: JSON.stringify(report)});
})();
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and takes what the probe saw."""

    reports: queue.Queue = queue.Queue()

    def do_POST(self):
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_in_a_browser(site, tmp_path):
    """Every page renders without a message on the console, and search finds what it should."""
    addresses = [f"/{page.parent}/" if page.parent != Path() else "/" for page in pages(site)]
    (site / "probe.html").write_text(PROBE.replace("PAGES", json.dumps(addresses)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--remote-debugging-port=0"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/probe.html"
        with open(tmp_path / "messages", "w+") as messages:
            browser = subprocess.Popen(
                [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", address], stderr=messages
            )
            try:
                report = Server.reports.get(timeout=240)
            finally:
                browser.kill()
                browser.wait()
                server.shutdown()
            messages.seek(0)
            assert "CONSOLE" not in (said := messages.read()), said
    assert all(report["titles"].get(address) for address in addresses), report["titles"]
    assert {"/which-mode/", "/migration/"} & set(report["found"]), report["found"]
