"""The page in a real browser: on a phone and on a wide screen, by day and by night, with and without a hand on it."""

import json
import os
import re
import shutil
import subprocess
import zlib
from html import unescape
from pathlib import Path

import pytest

from kitforge.report.page import write_report
from tests.patience import PATIENCE

PHONE, WIDE = (390, 2000), (1280, 2000)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")

# Runs after the page's own script and sends what it finds to the frame around it.
_PROBE = """
<script>
const area = document.querySelector(".area"), box = area.getBoundingClientRect();
const readout = document.querySelector(".legend b"), cursor = document.querySelector(".cursor");
const found = { width: innerWidth, scroll: document.documentElement.scrollWidth, before: readout.textContent };
area.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left, bubbles: true }));
found.hover = readout.textContent;
found.isCursorShown = !cursor.hidden;
area.dispatchEvent(new PointerEvent("pointerleave"));
found.after = readout.textContent;
area.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
found.home = readout.textContent;
const button = document.querySelector("[data-switch]");
if (button) {
  button.click();
  found.pressed = button.getAttribute("aria-pressed");
  found.left = [...document.querySelectorAll("g[data-run]")].filter((line) => line.getClientRects().length)
    .map((line) => line.dataset.run);
}
parent.postMessage(JSON.stringify(found), "*");
</script>
"""
# A browser that dumps its document has a window of 500 pixels at least; a frame can be as narrow as a phone.
_FRAME = """<!doctype html><title></title><link rel="icon" href="data:,">
<script>addEventListener("message", (event) => { document.title = event.data; });</script>
<iframe src="probed.html" style="border:0;width:%dpx;height:%dpx"></iframe>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"none of {', '.join(_NAMES)} is installed; the report must be seen in a browser here")
    if found is None:
        pytest.skip("no Chromium here")
    return found


def open_page(browser: str, page: Path, size: tuple[int, int], *flags: str) -> tuple[str, list[str]]:
    """The browser's output, and what the page wrote to its console."""
    profile = page.parent / f"profile-{len(list(page.parent.iterdir()))}"
    window = f"--window-size={size[0]},{size[1]}"
    command = [browser, *_FLAGS, f"--user-data-dir={profile}", window, *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(browser: str, page: Path, size: tuple[int, int]) -> dict[str, object]:
    """What a script finds that is let in for the test alone."""
    html = page.read_text("utf-8")
    opened = re.sub("<meta http-equiv[^>]*>", "", html).replace("</body>", f"{_PROBE}</body>")
    page.with_name("probed.html").write_text(opened, "utf-8")
    frame = page.with_name("frame.html")
    frame.write_text(_FRAME % size, "utf-8")
    dump, console = open_page(browser, frame, WIDE, "--dump-dom")
    assert console == []
    found = re.search("<title>(.*?)</title>", dump)
    assert found
    return json.loads(unescape(found[1]))


def corner(picture: Path) -> tuple[int, int, tuple[int, ...]]:
    """Width, height and first pixel of a PNG (https://www.w3.org/TR/png-3/)."""
    data = picture.read_bytes()
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    place, packed = 8, b""
    while place < len(data):
        length, kind = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8]
        packed += data[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += length + 12
    # Whatever its filter, the first pixel of the first row has no neighbour to be predicted from.
    return width, height, tuple(zlib.decompressobj().decompress(packed, 64)[1:4])


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_is_painted_without_complaint(browser, write_run, tmp_path, size, is_dark) -> None:
    page, picture = write_report([write_run()]), tmp_path / "picture.png"
    theme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    _, console = open_page(browser, page, size, f"--screenshot={picture}", *theme)
    assert console == []
    width, height, pixel = corner(picture)
    assert (width, height) == size
    assert max(pixel) < 60 if is_dark else min(pixel) > 230
    # An empty page of this size takes a few kilobytes.
    assert picture.stat().st_size > 40_000


@pytest.mark.slow
def test_two_runs_fit_a_small_phone_and_can_be_switched(browser, write_run) -> None:
    page = write_report([write_run("a-rather-long-name-of-a-run-that-will-not-wrap"), write_run("b", seed=2)])
    found = probe(browser, page, (360, 800))
    assert found["width"] == found["scroll"] == 360
    assert found["pressed"] == "false"
    assert set(found["left"]) == {"1"}


@pytest.mark.slow
def test_the_read_out_follows_the_pointer_and_the_keys(browser, write_run) -> None:
    found = probe(browser, write_report([write_run()]), PHONE)
    assert found["scroll"] == PHONE[0]
    assert found["isCursorShown"]
    assert found["hover"] == found["home"] != found["before"]
    assert found["after"] == found["before"]


@pytest.mark.slow
def test_the_checks_above_see_an_overflow_and_an_error(browser, write_run) -> None:
    page = write_report([write_run(num_steps=12)])
    whole = page.read_text("utf-8")
    page.write_text(whole.replace("<main>", '<main><div style="width:50rem">wide</div>'))
    assert probe(browser, page, PHONE)["scroll"] > PHONE[0]
    page.write_text(whole.replace("</main>", "<script>alert(1)</script></main>"))
    _, console = open_page(browser, page, PHONE, "--dump-dom")
    assert len(console) == 1 and "Content Security Policy" in console[0]


@pytest.mark.slow
@pytest.mark.parametrize("age", [0, 4000])
def test_the_page_of_a_run_that_was_killed_stops_loading_itself(browser, write_run, age: int) -> None:
    page = write_report([write_run(num_steps=12)], is_live=True)
    html = re.sub(
        "<meta http-equiv[^>]*>",
        "<script>setTimeout = (_, wait) => { document.title = wait; }</script>",
        page.read_text("utf-8"),
    )
    page.write_text(re.sub('data-live="([0-9]+)"', lambda found: f'data-live="{int(found[1]) - age}"', html))
    dump, _ = open_page(browser, page, PHONE, "--dump-dom")
    assert ("<title>30000</title>" in dump) == (age == 0)


@pytest.mark.slow
def test_hostile_text_stays_text(browser, write_run) -> None:
    folder = write_run("<script>document.title=1<", num_steps=12)
    evil = "</script><script>throw 1</script><img src=x onerror='throw 2'>"
    (folder / "samples" / "step_99.json").write_text(
        json.dumps({"step": 99, "samples": [{"prompt": evil, "text": evil}]})
    )
    dump, console = open_page(browser, write_report([folder]), PHONE, "--dump-dom")
    assert console == []
    assert "&lt;img src=x onerror='throw 2'&gt;" in dump
