"""What the engine's parts are worth, each against what it has to reach.

    python -m benchmarks.inference.engine_claims                     # all, writes engine_claims.md
    python -m benchmarks.inference.engine_claims --only workload prefix --table some.md

bandwidth  134M LLaMA, batch 1 and 8: time of a step in fp32, bf16, int8; weights read a second beside a read of memory
workload   64 requests of geometric lengths on 8 slots: against the ideal computed from measured costs of steps and
           prompts, and against batches that wait for their longest text
prefix     the first token of a 512-token prompt, new and again
waste      slots of the cache that hold nothing, at block 16, while the workload runs
scheduler  the share of a step at 64 sequences that goes into planning it
"""

import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.catalog import config_of
from kitforge.models.loading import build

TABLE = Path(__file__).with_suffix(".md")
LARGE = {"dim": 768, "num_layers": 12, "num_heads": 12, "mlp_dim": 2048, "vocab_size": 32000, "max_length": 1024}
SMALL = {"dim": 384, "num_layers": 6, "num_heads": 6, "vocab_size": 8192, "max_length": 1024}
SLOTS, REQUESTS, MEAN = 8, 64, 64
# Numbers that a plain read of memory sums.
READ = 2**26
SMALLEST = {"dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 64, "vocab_size": 8192, "max_length": 1024}
SMOKE = {"LARGE": SMALLEST, "SMALL": SMALLEST, "SLOTS": 2, "REQUESTS": 4, "MEAN": 2, "READ": 2**10}


def network(family: str, sizes: dict[str, Any]) -> Decoder:
    model = build(config_of({"family": family, **sizes}), device=torch.device("cpu"), seed=0)
    return model.eval().requires_grad_(False)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes a second of the best of several plain sums."""
    memory = torch.ones(READ)
    return memory.nbytes / min(seconds(memory.sum) for _ in range(6))


def step_seconds(engine: Engine, batch: int, num_new: int) -> float:
    """Of a decoding step: the median, after the prompts have been read."""
    options = SamplingOptions(max_new_tokens=num_new)
    for place in range(batch):
        engine.submit([place + 1] * 32, options)
    times = []
    while engine.has_work:
        times.append(seconds(engine.step))
    return statistics.median(times[3:])


def bandwidth() -> list[str]:
    model = network("llama", LARGE)
    read = 4 * (sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel())
    limit = read_bandwidth()
    lines = [f"| plain read of memory | {limit / 1e9:.1f} GB/s | |"]
    halved = network("llama", LARGE).to(torch.bfloat16)
    steps: dict[tuple[str, int], float] = {}
    kinds: tuple[tuple[str, Decoder, Literal["none", "int8"]], ...]
    kinds = (("fp32", model, "none"), ("bf16", halved, "none"), ("int8", model, "int8"))
    for name, running, weights in kinds:
        for batch in (1, 8):
            engine = Engine(running, EngineOptions(max_num_seqs=batch, quantization=weights))
            step_seconds(engine, batch, 4)
            step = steps[name, batch] = step_seconds(engine, batch, 24)
            cells = f"| 134M LLaMA, {name}, batch {batch} | {1000 * step:.1f} ms a step, {batch / step:.0f} tokens/s"
            lines.append(f"{cells} | {steps['fp32', batch] / step:.2f}x fp32 |")
    share, gain = read / steps["fp32", 1] / limit, steps["bf16", 8] / steps["int8", 8]
    return [
        *lines,
        f"| fp32 at batch 1 | {share:.0%} of the bandwidth limit | {reached(share >= 0.7)}: 70 % |",
        f"| int8 against bf16 at batch 8 | {gain:.2f}x | {reached(gain >= 1.8)}: 1.8x |",
    ]


def reached(is_met: bool) -> str:
    return "met" if is_met else "missed"


def lengths() -> list[int]:
    chance = random.Random(0)
    found = []
    for _ in range(REQUESTS):
        length = 1
        while chance.random() > 1 / MEAN and length < 512:
            length += 1
        found.append(length)
    return found


def workload() -> list[str]:
    model, wanted = network("gpt2", SMALL), lengths()
    engine = Engine(model, EngineOptions(max_num_seqs=SLOTS, prefix_cache=False))
    costs = {batch: step_seconds(engine, batch, 40) for batch in range(1, SLOTS + 1)}
    prompts = [[place % 100 + 1] * 16 for place in range(REQUESTS)]

    def serve(groups: list[list[int]]) -> None:
        for group in groups:
            for place in group:
                engine.submit(prompts[place], SamplingOptions(max_new_tokens=wanted[place]))
            while engine.has_work:
                engine.step()

    everyone = list(range(REQUESTS))
    batches = [everyone[start : start + SLOTS] for start in range(0, REQUESTS, SLOTS)]
    rounds = [(seconds(lambda: serve([everyone])), seconds(lambda: serve(batches))) for _ in range(3)]
    continuous, static = (statistics.median(times) for times in zip(*rounds, strict=True))
    free = ideal_seconds(wanted, costs)
    # A prompt that has been read gives the first token as well.
    decoding = ideal_seconds([length - 1 for length in wanted if length > 1], costs)
    ideal = decoding + REQUESTS * prompt_seconds(engine, prompts[:SLOTS])
    total = sum(wanted)
    padded = sum(max(wanted[place] for place in batch) for batch in batches) * costs[SLOTS]
    share, gain = ideal / continuous, padded / continuous
    return [
        f"| 64 geometric requests, 8 slots, ours | {total / continuous:.0f} tokens/s | {share:.0%} of the ideal "
        f"{total / ideal:.0f}; {reached(share >= 0.9)}: 90 % |",
        f"| the same, with free prompts | {total / free:.0f} tokens/s (computed) | {free / continuous:.0%} of it |",
        f"| waiting for each batch to end | {total / static:.0f} tokens/s | {static / continuous:.2f}x slower |",
        f"| the same, padded to the longest (computed) | {total / padded:.0f} tokens/s | {gain:.2f}x slower |",
    ]


def ideal_seconds(wanted: list[int], costs: dict[int, float]) -> float:
    """Of decoding alone, where a slot that is free takes the next request at once."""
    waiting, spent = list(wanted), 0.0
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < SLOTS:
            running.append(waiting.pop(0))
        spent += costs[len(running)]
        running = [left - 1 for left in running if left > 1]
    return spent


def prompt_seconds(engine: Engine, prompts: list[list[int]]) -> float:
    """Of one prompt where all are read in one step, the cheapest way there is."""
    options = SamplingOptions(max_new_tokens=1)
    return statistics.median(seconds(lambda: engine.generate(prompts, options)) for _ in range(9)) / len(prompts)


def prefix() -> list[str]:
    model = network("gpt2", SMALL)
    prompt = [place * 7 % 8000 for place in range(512)]
    options = SamplingOptions(max_new_tokens=1)
    fresh, again = [], []
    for _ in range(5):
        engine = Engine(model, EngineOptions(max_num_seqs=4))
        engine.generate([[1] * 8], options)
        fresh.append(seconds(partial(engine.generate, [prompt], options)))
        again.append(seconds(partial(engine.generate, [prompt], options)))
    gain = statistics.median(one / other for one, other in zip(fresh, again, strict=True))
    return [
        f"| first token of a 512-token prompt | {1000 * statistics.median(fresh):.0f} ms | |",
        f"| the same again | {1000 * statistics.median(again):.1f} ms | {gain:.0f}x; {reached(gain >= 10)}: 10x |",
    ]


def waste() -> list[str]:
    model, wanted = network("gpt2", SMALL | {"num_layers": 1}), lengths()
    engine = Engine(model, EngineOptions(max_num_seqs=SLOTS, kv_layout="paged", prefix_cache=False))
    for place, length in enumerate(wanted):
        engine.submit([place % 100 + 1] * 256, SamplingOptions(max_new_tokens=length))
    held = used = 0
    while engine.has_work:
        engine.step()
        held += engine.stats()["blocks_used"] * 16
        used += sum(sequence.num_cached for sequence in engine._scheduler.running)
    share = 1 - used / held
    return [f"| unused cache slots, paged, block 16, prompts of 256 | {share:.1%} | {reached(share <= 0.05)}: 5 % |"]


def scheduler() -> list[str]:
    model = network("gpt2", SMALL)
    engine = Engine(model, EngineOptions(max_num_seqs=64, prefix_cache=False))
    for place in range(64):
        engine.submit([place + 1] * 32, SamplingOptions(max_new_tokens=30))
    for _ in range(6):
        engine.step()
    plan: list[float] = []
    schedule = engine._scheduler.schedule
    engine._scheduler.schedule = lambda: planned(schedule, plan)  # type: ignore[method-assign]
    steps = [seconds(engine.step) for _ in range(20)]
    share = statistics.median(one / other for one, other in zip(plan, steps, strict=True))
    return [
        f"| planning of a step at 64 sequences | {1e6 * statistics.median(plan):.0f} us of "
        f"{1000 * statistics.median(steps):.0f} ms | {share:.1%}; {reached(share < 0.03)}: 3 % |"
    ]


def planned(schedule: Callable[[], Any], times: list[float]) -> Any:
    start = time.perf_counter()
    works = schedule()
    times.append(time.perf_counter() - start)
    return works


CLAIMS = {"workload": workload, "prefix": prefix, "waste": waste, "scheduler": scheduler, "bandwidth": bandwidth}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    lines = [
        "# Effect of each part of the engine",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, fp32 where nothing else is said; load average at the start {os.getloadavg()[0]:.1f}.",
        "",
        "| what | measured | against |",
        "|---|---|---|",
    ]
    for name in arguments.only:
        lines += CLAIMS[name]()
        print(lines[-1], flush=True)
    write_result(arguments.table, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
