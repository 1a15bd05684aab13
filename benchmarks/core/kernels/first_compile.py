"""The wait of a machine for its first text: ours, whose inner loops have no machine code of their own, beside numba's
way, interleaved, each in a process with an empty cache.

Run from the checkout: `python -m benchmarks.core.kernels.first_compile`.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.command_line import CommandLine, is_smoke

NETWORK = {"family": "llama", "dim": 64, "num_layers": 2, "num_heads": 4, "mlp_dim": 96, "vocab_size": 99}
CHILD = f"""
import sys, time
import torch
from kitforge.core.kernels.cpu_engine import numba_runtime
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
if sys.argv[1] == "numba":
    del numba_runtime._INNER["pipeline_class"]
engine = Engine(build(config_of({NETWORK}), device=torch.device("cpu"), seed=0))
for _ in range(2):
    start = time.perf_counter()
    engine.generate([[1, 2]], SamplingOptions(max_new_tokens=2))
    print(time.perf_counter() - start)
"""


def wait(way: str) -> list[float]:
    """Seconds of the first text and of the second, which is the floor."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", CHILD, way]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [float(line) for line in output.split()]


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse({"rounds": 1})
    found: dict[str, list[list[float]]] = {way: [] for way in (["ours"] if is_smoke() else ["ours", "numba"])}
    for _ in range(arguments.rounds):
        for way, waits in found.items():
            waits.append(wait(way))
    first = {way: statistics.median(each[0] for each in waits) for way, waits in found.items()}
    floor = statistics.median(each[1] for each in found["ours"])
    for way, seconds in first.items():
        print(
            f"first text, {way}: {seconds:.1f} s, {seconds / first['ours']:.2f} times ours; a second text {floor:.3f} s"
        )


if __name__ == "__main__":
    main()
