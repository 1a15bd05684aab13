"""One page of a headless Chromium, spoken to over a pipe (https://chromedevtools.github.io/devtools-protocol/)."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.inference.server.conftest import until
from tests.patience import PATIENCE
from tests.report.test_browser import _FLAGS


class Tab:
    """Scripts that it runs are not bound to the policy of the page, as those of the page are."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._rest, self._number, self._session = b"", 0, ""
        self.complaints: list[object] = []  # what the pages wrote to their console, and errors of their scripts
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._reads, 2**16)
                assert read, "the browser has ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(line)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(found["params"])

    def run(self, script: str) -> Any:
        """The value of a script, once it is there."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait for a condition to hold."""
        until(lambda: self.run(f"Boolean({script})"))

    def open(self, url: str, *, width: int = 500, is_dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.run("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.until("!window.isOld && document.readyState === 'complete'")

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextmanager
def browser_tab(browser: str, folder: Path) -> Iterator[Tab]:
    theirs, ours = os.pipe(), os.pipe()
    flags = " ".join([*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"])
    command = f"exec {browser} {flags} about:blank 3<&{theirs[0]} 4>&{ours[1]}"
    process = subprocess.Popen(["bash", "-c", command], pass_fds=(theirs[0], ours[1]), stderr=subprocess.DEVNULL)
    for end in (theirs[0], ours[1]):
        os.close(end)
    try:
        yield Tab(ours[0], theirs[1])
    finally:
        process.terminate()
        process.wait(PATIENCE)
        for end in (ours[0], theirs[1]):
            os.close(end)
