"""Greedy generation beside `transformers.generate` and a hand-written loop with a static cache, on the same weights.

    python -m benchmarks.inference.against_transformers              # writes against_transformers.md
    python -m benchmarks.inference.against_transformers --models gpt2 --rounds 3 --threads 1 --table some.md
    python -m benchmarks.inference.against_transformers --dtype bfloat16 --append     # writes below what is there

Shapes: GPT-2 6 layers x 384, LLaMA 8 layers x 512, vocabulary 8192; prompts of 32 tokens, 64 new ones. All
contestants run in one process and take turns; ratios are medians over rounds. Their tokens are compared first.
"""

import datetime
import importlib.metadata
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine, is_smoke, write_result
from benchmarks.inference.plain_loop import Contestant, PlainLoop
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.catalog import config_of
from kitforge.models.loading import build, save

PROMPT, NEW, VOCAB = 32, 64, 8192
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"dim": 384, "num_layers": 6, "num_heads": 6, "max_length": 1024},
    "llama": {"dim": 512, "num_layers": 8, "num_heads": 8, "mlp_dim": 1376, "max_length": 1024},
}
TARGETS = {1: 1.8, 8: 1.6}
TABLE = Path(__file__).with_suffix(".md")
SMALLEST = {"dim": 32, "num_layers": 1, "num_heads": 2, "max_length": 64}
SMOKE = {
    **{"SIZES": {"gpt2": SMALLEST, "llama": {**SMALLEST, "mlp_dim": 64}}, "PROMPT": 4, "NEW": 4, "VOCAB": 64},
    **{"batches": [1], "rounds": 1},
}


def ours(model: Decoder, options: EngineOptions) -> Contestant:
    engine = Engine(model, options)

    def generate(tokens: Tensor, num_new: int) -> list[list[int]]:
        completions = engine.generate(tokens.tolist(), SamplingOptions(max_new_tokens=num_new))
        return [sample.tokens for (sample,) in completions]

    return generate


def theirs(model: Decoder) -> Contestant:
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder), extra={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.head_weight.dtype).eval()

    def generate(tokens: Tensor, num_new: int) -> list[list[int]]:
        mask = torch.ones_like(tokens)
        length = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        texts = peer.generate(tokens, attention_mask=mask, do_sample=False, use_cache=True, **length)
        return texts[:, tokens.shape[1] :].tolist()

    return generate


def contestants(name: str, batch: int, dtype: torch.dtype) -> dict[str, Contestant]:
    config = config_of({"family": name, "vocab_size": VOCAB} | SIZES[name])
    model = build(config, device=torch.device("cpu"), seed=0).to(dtype).eval().requires_grad_(False)
    size: dict[str, Any] = {"max_num_seqs": batch, "prefix_cache": False}
    return {
        "ours": ours(model, EngineOptions(**size)),
        "ours, int8": ours(model, EngineOptions(**size, quantization="int8")),
        **({} if is_smoke() else {"transformers.generate": theirs(model)}),
        "plain static loop": PlainLoop(model),
    }


def measured(name: str, batch: int, rounds: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """New tokens a second of every contestant in every round."""
    found = contestants(name, batch, dtype)
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randint(3, VOCAB, (batch, PROMPT), generator=generator)
    texts = {title: generate(tokens, 8) for title, generate in found.items() if "int8" not in title}
    agreed = all(text == texts["ours"] for text in texts.values())
    print(f"{name}, batch {batch}: the same tokens: {agreed}", flush=True)
    found["ours, int8"](tokens, 2)
    speeds: dict[str, list[float]] = {title: [] for title in found}
    for _ in range(rounds):
        for title, generate in found.items():
            start = time.perf_counter()
            generate(tokens, NEW)
            speeds[title].append(batch * NEW / (time.perf_counter() - start))
    return speeds


def rows(name: str, batch: int, speeds: dict[str, list[float]]) -> list[str]:
    lines = []
    for title, values in speeds.items():
        against = {
            peer: statistics.median(mine / other for mine, other in zip(values, speeds[peer], strict=True))
            for peer in ("transformers.generate", "plain static loop")
            if peer in speeds
        }
        verdict = ""
        if title == "ours" and len(against) == 2:
            met = against["transformers.generate"] >= TARGETS[batch] and against["plain static loop"] >= 0.995
            verdict = f"{'met' if met else 'missed'}: >= {TARGETS[batch]}x and >= 1x"
        cells = [f"{statistics.median(values):.0f}", *(f"{ratio:.2f}x" for ratio in against.values()), verdict]
        lines.append(f"| {name} | {batch} | {title} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    peer = "no peer" if is_smoke() else f"transformers {importlib.metadata.version('transformers')}"
    lines = [
        *([""] if arguments.append else ["# Generation against transformers and a plain loop", ""]),
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {peer}; {arguments.dtype}, greedy, "
        f"{PROMPT} + {NEW} tokens; median of {arguments.rounds} interleaved rounds; load "
        f"average at the start {os.getloadavg()[0]:.1f}.",
        "",
        "| model | batch | contestant | new tokens a second | against transformers | against the plain loop | target |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for name in arguments.models:
        for batch in arguments.batches:
            lines += rows(name, batch, measured(name, batch, arguments.rounds, getattr(torch, arguments.dtype)))
            print("\n".join(lines[-4:]), flush=True)
    before = arguments.table.read_text(encoding="utf-8") if arguments.append else ""
    write_result(arguments.table, before + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
