"""Run the tests that failed once more, each alone in a process of its own.

A test that passes then is printed as FLAKY and does not fail the run: it is to be mended first. One that fails twice
fails it. Reads the list that pytest keeps of the last failures.

    python scripts/retry_failed.py [.pytest_cache/v/cache/lastfailed]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# More failures than these are no matter of chance.
MOST = 20


def main(failed: Path) -> int:
    """Zero when every test that failed passes alone."""
    names = list(json.loads(failed.read_text(encoding="utf-8"))) if failed.exists() else []
    if not 0 < len(names) <= MOST:
        # No test failed, so something else did, such as the installation.
        return 1
    verdicts = {name: _passes(name) for name in names}
    for name, passes in verdicts.items():
        sys.stdout.write(f"{'FLAKY' if passes else 'FAILED TWICE'} {name}\n")
    return 0 if all(verdicts.values()) else 1


def _passes(name: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".pytest_cache/v/cache/lastfailed")))
