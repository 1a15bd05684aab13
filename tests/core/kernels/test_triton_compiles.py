"""Every Triton kernel compiles down to machine code of an H100, without a GPU, and keeps its values in registers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.differential.drawn import WHOLE

ROOT = Path(__file__).parents[3]
# Bytes of a thread. Attention in fp32 has no tensor cores to feed and may spill a little, as it does with Triton 3.6.
MOST_SPILLED = {"_split_kernel": 256, "_product_kernel": 8}
# Kernels that begin before the one before them ends, those that load weights meanwhile first.
CHAIN = {"_heads_kernel", "_product_kernel"}
WITHOUT_WEIGHTS = {"_join_kernel", "_split_kernel", "_merge_kernel"}


def kernels_in_source() -> set[tuple[str, str]]:
    """Module and name of every kernel."""
    found = set()
    folder = ROOT / "kitforge" / "core" / "kernels"
    for path in [*folder.glob("*/triton.py"), *folder.glob("triton/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        found |= {(module, node.name) for node in functions if node.name.endswith("_kernel")}
    return found


@pytest.mark.slow
@pytest.mark.prove
def test_every_kernel_compiles_without_spilling(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """The one proof that a kernel is more than what the interpreter takes: its types, its tiles and its registers; in
    the gate for some arguments of each. Triton keeps machine code by source, options and its own version, so that only
    what has changed since the last gate is compiled."""
    kept = tmp_path if WHOLE or pytestconfig.cache is None else pytestconfig.cache.mkdir("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.core.kernels.compile_triton",
        "90",
        "all" if WHOLE else "some",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(line["module"], line["kernel"]) for line in lines} == kernels_in_source()
    assert not [line for line in lines if line["error"]]
    # A kernel of a chain that does not wait reads what is not written yet; the interpreter cannot see that.
    chain = [line for line in lines if "'PDL': True" in line["constants"]]
    assert {line["kernel"] for line in chain} == {*CHAIN, *WITHOUT_WEIGHTS}
    assert all(line["waits"] and line["releases"] for line in chain)
    assert all(line["first"] == (line["kernel"] in CHAIN) for line in chain)
    assert not [line for line in lines if line["stack"] > MOST_SPILLED.get(line["kernel"], 0)]
