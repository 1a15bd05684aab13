"""Texts on one device: the engine and a run of GRPO against the CPU, and their speed; rows for `make gpu-check`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.kernels import Row, Sizes, build_llama, seconds
from kitforge.core.nn.context import Context
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation import device as devices
from kitforge.foundation.types import IGNORED
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.reinforcement.rollout_batch import target_logprobs
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer.run_folder import train

CPU = torch.device("cpu")
TINY = {"vocab_size": 300, "dim": 64, "num_layers": 2, "num_heads": 4, "max_length": 256}
_GATED = {"mlp_dim": 96, "num_kv_heads": 2}
_EXPERTS = _GATED | {"experts": {"num_experts": 4, "top_k": 2}}
LLAMA = {"family": "llama", **TINY, **_GATED}
# Of each family that writes text, and of a window.
NETWORKS: dict[str, dict[str, Any]] = {
    "bloom": {"family": "bloom"},
    "glm": {"family": "glm", **_GATED},
    "gpt2": {"family": "gpt2"},
    "llama": LLAMA,
    "llama with a window": LLAMA | {"sliding_window": 24},
    "mixtral": {"family": "mixtral", **_EXPERTS},
    "pangu_alpha": {"family": "pangu_alpha"},
    "qwen3_moe": {"family": "qwen3_moe", **_EXPERTS, "expert_dim": 32},
}
# Room for some of the texts at once: others wait, are preempted and go on.
CROWDED: dict[str, Any] = {"kv_cache_bytes": 2**19, "max_num_batched_tokens": 64}
# Ways of one network: options of its engine.
WAYS: dict[str, dict[str, Any]] = {
    "with drafts": CROWDED | {"prompt_lookup_tokens": 3},
    "with contiguous keys": CROWDED | {"kv_layout": "contiguous"},
    "with room": {},
    "with the fused step": {"fused_decode": True},
    "with steps one by one": {"num_scheduler_steps": 1},
    "in int8": {"quantization": "int8"},
}


def check_texts(device: torch.device) -> Iterator[Row]:
    """Sampled texts of each family in fp32, in an engine too small for them, on the device and on the CPU."""
    base = list(range(40, 77))
    prompts = [[*base[: 5 * text % 37], 100 + text] for text in range(12)]
    options = SamplingOptions(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    cases = {name: (values, CROWDED) for name, values in NETWORKS.items()}
    cases |= {f"llama {name}": (LLAMA, way) for name, way in WAYS.items()}
    for name, (values, way) in cases.items():
        results = []
        for where in (CPU, device):
            model = build(config_of(TINY | values), device=where, seed=1).eval()
            results.append([each[0] for each in Engine(model, EngineOptions(**way)).generate(prompts, options)])
        same = [(one, other) for one, other in zip(*results, strict=True) if one.tokens == other.tokens]
        error = max(
            (abs(a - b) for one, other in same for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0
        )
        # A draw between two tokens that rounding decides ends a comparison.
        is_right = len(same) >= len(prompts) - 1 and error < 1e-4
        words = f"{len(same)} of {len(prompts)} texts the same, log-probs {error:.0e}"
        yield f"engine, {name}", words, "equal" if is_right else "DIFFERENT"


def check_half_precision(device: torch.device) -> Iterator[Row]:
    """Log-probabilities of sampled tokens in bfloat16, by the engine and by the network that trains."""
    base = list(range(40, 77))
    prompts = [[*base[: 7 * text % 37], 100 + text] for text in range(6)]
    options = SamplingOptions(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    for name in ("llama", "llama with a window", "bloom"):
        model = build(config_of(TINY | NETWORKS[name]), device=device, seed=1, dtype=torch.bfloat16).eval()
        engine, error = Engine(model, EngineOptions(prompt_lookup_tokens=2)), 0.0
        # The second time, beginnings are in the cache.
        for _ in range(2):
            for prompt, (found,) in zip(prompts, engine.generate(prompts, options), strict=True):
                tokens = torch.tensor([prompt + found.tokens])
                targets = torch.full_like(tokens, IGNORED)
                targets[0, len(prompt) - 1 : -1] = tokens[0, len(prompt) :]
                with torch.no_grad():
                    logprobs = target_logprobs(model, tokens, targets, 1.0)[0][0, len(prompt) - 1 : -1]
                error = max(error, float((logprobs.cpu() - torch.tensor(found.logprobs)).abs().max()))
        yield (
            f"{name}, bfloat16: sampler = trainer",
            f"{error:.0e} of log-probs",
            "equal" if error < 0.1 else "DIFFERENT",
        )


def distinct(*, completion_tokens: list[list[int]]) -> list[float]:
    """The share of tokens that are new."""
    return [len(set(tokens)) / max(len(tokens), 1) for tokens in completion_tokens]


def check_groups(device: torch.device, place: Path) -> Row:
    """Metrics of GRPO against a reference, with prompts that the completions share, on the device and on the CPU."""
    rows = [{"prompt": "To be, or not to be" * (1 + number % 3)} for number in range(16)]
    lines: list[list[dict[str, Any]]] = []
    for where in (CPU, device):
        model = build(config_of(LLAMA), device=where, seed=1)
        values = {
            "task": "grpo",
            "device": str(where),
            "output_dir": str(place / f"groups-{len(lines)}"),
            "data": {"sequence_length": 128, "eval_fraction": 0.0},
            "rl": {"prompts_per_rollout": 4, "num_generations": 4, "advantage": "grpo"},
            "kl": {"apply_to": "loss", "estimator": "k3", "coef": 0.04},
            "rollout": {"max_new_tokens": 24},
            "optimizer": {"learning_rate": 1e-4},
            "trainer": {"max_steps": 4, "progress": False, "log_every": 1},
        }
        inputs = Inputs(processor=ByteTokenizer(), model=model, train_dataset=rows, roles={"reward": distinct})
        options = TASKS["grpo"].read_options(values)
        assembly = TASKS["grpo"].assemble(options, inputs, Rendezvous.open(options.parallel, options.device))
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
        records = map(json.loads, (assembly.folder / "metrics.jsonl").read_text().splitlines())
        lines.append([each for each in records if "loss" in each])
    names = sorted(name for name in lines[0][0] if name in ("loss", "grad_norm") or name.startswith(("reward", "kl")))
    error = max(
        abs(one[name] - other[name]) / max(abs(one[name]), 1e-2)
        for one, other in zip(*lines, strict=True)
        for name in names
    )
    words = f"{error:.0e} of {', '.join(names)} in {len(lines[0])} steps"
    return "GRPO, device = CPU", words, "equal" if error < 1e-2 else "DIFFERENT"


def measure_groups(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Forward and backward passes of groups of 8 completions, their prompt computed once against whole rows."""
    model = build_llama(sizes.network, device, torch.bfloat16)
    unit = sizes.num_new_tokens * 2
    for prompts, prompt, new in ((4, unit, unit), (2, 4 * unit, unit), (1, 16 * unit, unit)):
        rows = torch.randint(0, sizes.network["vocab_size"], (prompts, 1, prompt)).expand(-1, 8, -1).flatten(0, 1)
        tokens = torch.cat([rows, torch.randint(0, sizes.network["vocab_size"], (8 * prompts, new))], dim=1)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, prompt - 1 : -1] = True
        targets = tokens[:, 1:][mask[:, :-1]].to(device)

        def whole(tokens: Tensor, mask: Tensor) -> Tensor:
            return model.hidden(tokens.to(device), Context())[mask.to(device)]

        def shared(tokens: Tensor, mask: Tensor) -> Tensor:
            return hidden_at(model, tokens, mask)

        def step(states: Any, tokens: Tensor = tokens, mask: Tensor = mask, targets: Tensor = targets) -> None:
            found, _ = model.kernels.linear_log_probs(states(tokens, mask), model.head_weight, targets)
            found.mean().backward()
            model.zero_grad()

        taken = [seconds(lambda way=way: step(way), device) for way in (shared, whole)]  # type: ignore[misc]
        words = f"{tokens.numel() / taken[0]:,.0f} tokens/s, {taken[1] / taken[0]:.2f}x whole rows"
        yield f"update of {prompts} x 8 rows of {prompt} + {new}", words, ""


def decoding_seconds(model: nn.Module, texts: int, new: int, length: int, temperature: float, **engine: Any) -> float:
    """Of a decoding step of texts that began together."""
    prompts = [[number % 500, *range(length - 1)] for number in range(texts)]
    runner = Engine(model, EngineOptions(max_num_seqs=texts, **engine))
    options = SamplingOptions(max_new_tokens=new, ignore_eos=True, temperature=temperature)
    times = []
    for _ in range(3):
        for prompt in prompts:
            runner.submit(prompt, options)
        # Until all prompts are read and each text has a token, or two.
        read = -(-texts * length // runner.options.batched_tokens("cuda")) + 2
        counts = [sum(len(each.tokens) for each in runner.step()) for _ in range(read)]
        devices.synchronize(next(model.parameters()).device)
        started = time.perf_counter()
        made = 0
        while runner.has_work:
            made += sum(len(each.tokens) for each in runner.step())
        times.append((time.perf_counter() - started) * texts / made)
        assert made + sum(counts) == texts * new
    return min(times)


def measure_texts(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Decoding steps of many texts in bfloat16, against the time in which the weights can be read."""
    model = build_llama(sizes.network, device, torch.bfloat16)
    weights = sum(each.nbytes for each in model.parameters())
    cases = [(1, 32, 0.0), (64, 32, 0.0), (64, 32, 1.0), (64, 1024, 0.0), (256, 32, 1.0), (512, 32, 1.0)]
    for texts, length, temperature in cases if device.type != "cpu" else [(1, 8, 0.0), (4, 8, 1.0)]:
        with torch.no_grad():
            taken, alone = (
                decoding_seconds(model, texts, sizes.num_new_tokens, length, temperature, num_scheduler_steps=steps)
                for steps in (4, 1)
            )
        rate = f"{texts / taken:,.0f} tokens/s, weights at {weights / taken / 1e9:,.0f} GB/s"
        words = f"{1e3 * taken:.2f} ms a step, {rate}; {alone / taken:.2f}x steps that wait for the host"
        yield f"decode {texts} texts of {length}, temperature {temperature:.0f}", words, ""
