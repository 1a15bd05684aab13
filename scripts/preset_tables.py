"""Writes kitforge/configs/presets.yaml, the tables of `kitforge list`: `python -m scripts.preset_tables`."""

import json

from kitforge.cli.info import described_presets
from kitforge.preset_files import CONFIGS

HEADER = """# The tables of `kitforge list` for the presets of this package, so that it prints them without torch.
# Written by `python -m scripts.preset_tables`; a test compares them with the networks.
"""


def main() -> None:
    lines = [HEADER]
    for title, rows in described_presets().items():
        if isinstance(rows[0], str):
            lines.append(f"{title}:\n  [{', '.join(rows)}]\n")
            continue
        lines.append(f"{title}:\n")
        for row in rows:
            lines.append("  - {" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in row.items()) + "}\n")
    (CONFIGS / "presets.yaml").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
