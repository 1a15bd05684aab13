"""The reward `math`: whether a completion ends with the right answer, by math-verify in a process of its own."""

import atexit
import json
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from kitforge.foundation.errors import DataError, TrainingError

# Seconds for one completion: some texts take the library hours. Those for its start, which imports sympy.
TIMEOUT, START_TIMEOUT = 10.0, 120.0


class MathWorker:
    """A process of `math_worker`, started when it is first asked, and again after one that took too long or ended."""

    def __init__(self, timeout: float = TIMEOUT, command: Sequence[str] = ()) -> None:
        self._timeout = timeout
        self._command = list(command) or [sys.executable, "-P", "-m", "kitforge.kits.rlhf.roles.math_worker"]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, golds: Sequence[str], text: str) -> Any:
        """The worker's reply; "timeout" after that many seconds, of which its start is none."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1
                )
                if self._reply(self._process, START_TIMEOUT) is not True:
                    raise TrainingError("the process of reward=math does not start", got=" ".join(self._command))
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([list(golds), text]) + "\n")
            return self._reply(self._process, self._timeout)

    def _reply(self, process: subprocess.Popen[str], timeout: float) -> Any:
        """The next reply of the process, which is ended if there is none in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout) else ""
        if line:
            return json.loads(line)
        self.close()
        return "timeout"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # Reads and closes the pipes.
            process.communicate()


@cache
def _worker() -> MathWorker:
    found = MathWorker()
    atexit.register(found.close)
    return found


def math_match(
    *, completions: Sequence[str], answers: Sequence[Sequence[str]], worker: MathWorker | None = None
) -> list[dict[str, float]]:
    """Per completion 1 if it ends with one of its right answers, and whether the comparison took too long, which gives
    0. Raises DataError for a right answer that cannot be read."""
    found = []
    for text, golds in zip(completions, answers, strict=True):
        reply = (worker or _worker()).ask([gold.rpartition("####")[2].strip() for gold in golds], text)
        if reply is None:
            expected = "numbers or LaTeX, such as 42, 1/2, $\\sqrt{2}$ or #### 42"
            raise DataError("column 'answer' is not mathematics", got=", ".join(golds)[-60:], expected=expected)
        found.append({"score": float(reply is True), "timeouts": float(reply == "timeout")})
    return found
