"""`kitforge serve` as a person starts and stops it."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.inference.server.conftest import until
from tests.inference.server.test_many import answers_with, counts
from tests.patience import PATIENCE
from tests.small_run import write_run

ROOT = Path(__file__).parents[3]
CROWD = 16
LONG = 400  # tokens, of which most are yet to come when the server is told to stop


def crowd(url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Clients with long answers to come."""
    files = [folder / "bodies.json", folder / "answers.json"]
    files[0].write_text(
        json.dumps([{"prompt": str(place), "max_tokens": LONG, "temperature": 0} for place in range(CROWD)])
    )
    port = url.rpartition(":")[2]
    return subprocess.Popen([sys.executable, "-m", "tests.inference.server.crowd", port, *map(str, files)], cwd=ROOT)


def num_taken(url: str) -> int:
    """Requests that are being answered or have been."""
    found = counts(httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
    return found["kitforge_engine_prompts"] + found.get(answers_with(200), 0)


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
            asked = {"prompt": "ROMEO:", "max_tokens": LONG, "temperature": 0, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                with crowd(url, tmp_path) as others:
                    until(lambda: num_taken(url) > CROWD, 60)
                    process.send_signal(signal.SIGTERM)
                    assert [line for line in lines if line][-1] == "data: [DONE]"
                    assert others.wait(PATIENCE) == 0
            assert process.wait(PATIENCE) == 0
            answers = json.loads((tmp_path / "answers.json").read_text())
            assert [(status, each["usage"]["completion_tokens"]) for status, _, each in answers] == [
                (200, LONG)
            ] * CROWD
            said = process.stderr.read().splitlines()
            assert said[0] == "warming up" and all(line.startswith("compiling loops") for line in said[1:])
        finally:
            end.cancel()
            process.kill()
