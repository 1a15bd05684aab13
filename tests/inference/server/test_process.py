"""`kitforge serve` as a person starts and stops it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.small_run import write_run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_process_answers_and_finishes_before_it_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    command = [sys.executable, "-m", "kitforge", "serve", f"checkpoint={run}", "port=0", "device=cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        # Whatever is wrong, the test ends.
        end = threading.Timer(120, process.kill)
        end.start()
        try:
            line = process.stdout.readline()
            assert "answers at http://127.0.0.1:" in line, process.stderr.read()
            url = line.partition(" answers at ")[2].split()[0]
            asked = {"prompt": "ROMEO:", "max_tokens": 20, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
        finally:
            end.cancel()
            process.kill()
