"""Turn the JUnit files of `make prove` into the table that is committed: one line a test, its cases counted.

Of a case that several files hold, the last one counts, so that a part can be run again.
"""

import datetime
import importlib.metadata
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

# The first line of the part of the page that scripts/mutate.py writes.
MUTATION = "<!-- mutation: begin -->"
COLUMNS = ("cases", "passed", "failed", "skipped", "seconds")


def tally(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """The counts of every test function, by its dotted name without parameters."""
    cases = {
        (case.get("classname"), case.get("name")): case
        for file in files
        for case in ElementTree.parse(file).iter("testcase")
    }
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for case in cases.values():
        row = rows[f"{case.get('classname')}.{case.get('name', '').split('[')[0]}"]
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        row["cases"] += 1
        row[outcome] += 1
        row["seconds"] += float(case.get("time", 0))
    return dict(rows)


def render(rows: dict[str, dict[str, float]]) -> str:
    """The page: where and when it was made, then the table."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    lines = [
        "# Results of `make prove`",
        "",
        f"{datetime.date.today()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"{versions}.",
        "",
        f"| test | {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
    ]
    for name, row in sorted(rows.items()):
        lines.append(f"| `{name}` | {' | '.join(f'{row[column]:.0f}' for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """`prove_table.py JUNIT [JUNIT ...] PAGE`."""
    *files, page = map(Path, sys.argv[1:])
    page.parent.mkdir(exist_ok=True)
    # What `make mutate` has written there stays.
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    kept = before[before.find(MUTATION) :] if MUTATION in before else ""
    page.write_text(render(tally(files)) + (f"\n{kept}" if kept else ""), encoding="utf-8")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
