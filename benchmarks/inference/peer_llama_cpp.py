"""A decoding step of llama.cpp on a network of random weights, in its own environment (llama-cpp-python and gguf).

python -m benchmarks.inference.peer_llama_cpp SHAPE_JSON FORMAT BATCH THREADS

Prints the median seconds of a step, greedy choice left out. Prompts of 32 tokens, 24 steps.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

PROMPT, STEPS = 32, 24
FORMATS = {
    "fp32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}


def write(path: Path, shape: dict[str, int], name: str) -> None:
    """A GGUF file of the LLaMA shape; matrices in the format, norms in fp32."""
    dim, layers, heads, mlp = (shape[key] for key in ("dim", "num_layers", "num_heads", "mlp_dim"))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_length"])
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(dim // heads)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    noise, kind = np.random.default_rng(0), FORMATS[name]

    def matrix(key: str, rows: int, columns: int) -> None:
        values = noise.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(f"{key}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(key: str) -> None:
        writer.add_tensor(f"{key}.weight", np.ones(dim, np.float32))

    matrix("token_embd", shape["vocab_size"], dim)
    for layer in range(layers):
        for each in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{each}", dim, dim)
        matrix(f"blk.{layer}.ffn_gate", mlp, dim)
        matrix(f"blk.{layer}.ffn_up", mlp, dim)
        matrix(f"blk.{layer}.ffn_down", dim, mlp)
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
    norm("output_norm")
    matrix("output", shape["vocab_size"], dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    shape, name, batch, threads = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write(path, shape, name)
        sys.stdout.write(f"{step_seconds(path, batch, threads)}\n")


if __name__ == "__main__":
    main()
