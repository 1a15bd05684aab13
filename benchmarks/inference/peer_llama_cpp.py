"""A decoding step of llama.cpp, in its own environment (llama-cpp-python alone).

python -m benchmarks.inference.peer_llama_cpp FILE.gguf BATCH THREADS

Prints the median seconds of a step, greedy choice left out. Prompts of 32 tokens, 24 steps.
"""

import ctypes
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp

PROMPT, STEPS = 32, 24


def step_seconds(path: Path, batch: int, threads: int) -> float:
    """The median of the steps, each a token for every sequence."""
    settings: Any = llama_cpp.llama_context_default_params()
    settings.n_ctx = batch * 128
    settings.n_batch = settings.n_ubatch = max(PROMPT, batch)
    settings.n_seq_max = batch
    settings.n_threads = settings.n_threads_batch = threads
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(model, settings)
    assert context, "llama.cpp made no context"
    room: Any = llama_cpp.llama_batch_init(max(PROMPT, batch), 0, 1)

    def decode(tokens: list[tuple[int, int, int]]) -> None:
        """Read (token, position, sequence) at once, and look at the logits as far as they are there."""
        room.n_tokens = len(tokens)
        for place, (token, position, sequence) in enumerate(tokens):
            room.token[place], room.pos[place], room.n_seq_id[place] = token, position, 1
            room.seq_id[place][0] = sequence
            room.logits[place] = position >= PROMPT - 1
        assert llama_cpp.llama_decode(context, room) == 0
        ctypes.cast(llama_cpp.llama_get_logits_ith(context, len(tokens) - 1), ctypes.POINTER(ctypes.c_float))[0]

    for sequence in range(batch):
        decode([(sequence + 1, position, sequence) for position in range(PROMPT)])
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        decode([(step + 1, PROMPT + step, sequence) for sequence in range(batch)])
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def main() -> None:
    """One measurement, its seconds on the last line."""
    path, batch, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    llama_cpp.llama_backend_init()
    sys.stdout.write(f"{step_seconds(path, batch, threads)}\n")


if __name__ == "__main__":
    main()
