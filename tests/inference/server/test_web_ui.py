"""The built-in page in a real browser: it fits a phone, is dark in the dark, and shows what a model writes as text."""

import json
import re
import subprocess
from html import unescape
from pathlib import Path

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.web_ui import page
from tests.inference.server.conftest import Served, make_service, serving
from tests.patience import PATIENCE
from tests.report.test_browser import _FLAGS, browser, corner

__all__ = ["browser"]
_ASK = """
<script>
const evil = "<img src=x onerror='document.title=1'>";
window.fetch = async (path, options) => new Response(
  ["<b>", "hi", evil].map((content) => `data: ${JSON.stringify({ choices: [{ delta: { content } }] })}\\n\\n`).join("")
  + "data: [DONE]\\n\\n", { status: 200, headers: { sent: options.body } });
document.getElementById("text").value = "hello " + evil;
document.getElementById("form").requestSubmit();
setTimeout(() => {
  const said = [...document.querySelectorAll("main p")].map((each) => each.textContent);
  document.title = JSON.stringify({ said, images: document.images.length, messages: messages.length });
}, 300);
</script>
"""


def open_page(browser: str, folder: Path, address: str, *flags: str) -> tuple[str, list[str]]:
    """The browser's output, and what the page wrote to its console."""
    command = [browser, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=500,900", *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_is_fetched_whole(model: Decoder) -> None:
    service = make_service(model, ServeOptions(token="secret", name="<b>mine</b>"), EngineOptions())
    with serving(service) as guarded:
        response = httpx.get(guarded.url)
    assert response.status_code == 200
    assert "&lt;b&gt;mine&lt;/b&gt;" in response.text and "<b>mine" not in response.text
    assert not re.findall(r"(?:src|href)=[\"'](?!data:,)", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]


@pytest.mark.slow
def test_the_page_is_painted_dark_under_its_own_policy(browser: str, served: Served, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    dark = "--blink-settings=preferredColorScheme=0"
    _, console = open_page(browser, tmp_path, served.url, f"--screenshot={picture}", dark)
    assert console == []
    assert max(corner(picture)[2]) < 60


@pytest.mark.slow
def test_what_a_model_writes_stays_text(browser: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page("tiny", needs_token=False).replace("</body>", f"{_ASK}</body>"), "utf-8")
    dump, console = open_page(browser, tmp_path, path.as_uri(), "--dump-dom", "--virtual-time-budget=3000")
    assert console == []
    title = re.search("<title>(.*?)</title>", dump)
    assert title
    found = json.loads(unescape(title[1]))
    evil = "<img src=x onerror='document.title=1'>"
    assert found == {"said": [f"hello {evil}", f"<b>hi{evil}"], "images": 0, "messages": 2}
