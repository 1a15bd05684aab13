"""What `kitforge verify` prints for Kitforge and for trainers of other libraries, written into docs/verify.md.

    python -m venv PEER; PEER/bin/pip install torch==2.13.0
    PEER/bin/pip install transformers accelerate trl datasets hydra-core rich safetensors
    python benchmarks/verify/peers.py PEER/bin/python

Ours runs under this interpreter, the peers under theirs, one after the other, each in an empty folder.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- printed by benchmarks/verify/peers.py -->", "<!-- end of what is printed -->"
PEERS = {
    "transformers.Trainer": ("verify_hf_trainer:HuggingFaceTrainer", ("transformers", "accelerate", "torch")),
    "trl.SFTTrainer": ("verify_trl_sft:TrlTrainer", ("trl", "transformers", "accelerate", "torch")),
}


def printed(python: str, arguments: list[str]) -> str:
    """The lines of the command in an empty folder, without those of JSON and of paths."""
    places = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    environment = os.environ | {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "kitforge", "verify", *arguments, "output_dir=verify"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        # A path of this machine says nothing.
        text = done.stdout.replace(f"{Path(folder).resolve()}/", "")
    lines = [line for line in text.splitlines() if not line.startswith(("{", "  report"))]
    if done.returncode not in (0, 1) or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return "\n".join([f"$ kitforge verify {' '.join(arguments)}".rstrip(), *lines, f"exit status {done.returncode}"])


def versions(python: str, packages: tuple[str, ...]) -> str:
    """Names and versions of installed packages."""
    program = f"import importlib.metadata as m, json; print(json.dumps([m.version(each) for each in {packages!r}]))"
    found = json.loads(subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout)
    return ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="the interpreter of the peers' environment")
    peer = parser.parse_args().peer
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    parts = [
        f"### Kitforge\n\n{versions(sys.executable, ('torch',))}; {machine}.",
        f"```\n{printed(sys.executable, [])}\n```",
    ]
    for name, (trainer, packages) in PEERS.items():
        parts += [f"### {name}\n\n{versions(peer, packages)}.", f"```\n{printed(peer, ['--callable', trainer])}\n```"]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:before] + "\n\n" + "\n\n".join(parts) + "\n\n" + text[after:], encoding="utf-8")


if __name__ == "__main__":
    main()
