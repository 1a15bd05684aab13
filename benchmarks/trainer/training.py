"""Training speed, memory and start-up of Kitforge beside the Hugging Face Trainer and a plain PyTorch loop.

    python -m benchmarks.trainer.training                      # all, interleaved, writes training.md
    python -m benchmarks.trainer.training --dtype fp32 --only ours "HF Trainer" --table some.md
    python -m benchmarks.trainer.training --arch bloom --only ours "HF Trainer" --table some.md
    python -m benchmarks.trainer.training --worker ours gpt2 fp32

Shapes: GPT-2 and BLOOM 6 layers x 384, LLaMA 8 layers x 512; vocabulary 8192, sequences of 256, batch 8; fused AdamW,
gradients clipped at 1. Every worker is its own process; the peers take turns, and the ratios are medians over rounds.
"""

import contextlib
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.command_line import CommandLine, write_result

BATCH, LENGTH, VOCAB = 8, 256, 8192
WARMUP, STEPS = 2, 6
SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"dim": 384, "num_layers": 6, "num_heads": 6},
    "gpt2": {"dim": 384, "num_layers": 6, "num_heads": 6, "max_length": 1024},
    "llama": {"dim": 512, "num_layers": 8, "num_heads": 8, "mlp_dim": 1376, "max_length": 1024},
}


class Meter:
    """Step times, and memory before and after."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.first_step = 0.0
        self.built = resident_bytes()
        self._last = (time.perf_counter(), time.process_time())
        self._count = 0

    def lap(self) -> bool:
        """A step has ended. True when enough have."""
        now = (time.perf_counter(), time.process_time())
        self._count += 1
        if self._count == 1:
            self.first_step = time.time()
        if self._count > WARMUP:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = (time.perf_counter(), time.process_time())
        return self._count >= WARMUP + STEPS

    def result(self) -> dict[str, float]:
        """Tokens a second by the wall and by the processors' clock, bytes above those after build, first step."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "tokens_per_second": BATCH * LENGTH / statistics.median(self.wall),
            "tokens_per_cpu_second": BATCH * LENGTH / statistics.median(self.cpu),
            "megabytes": (peak - self.built) / 1e6,
            "first_step": self.first_step,
        }


def resident_bytes() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def ours(arch: str, dtype: str, level: str = "O1") -> dict[str, float]:
    """The real loop over real packed rows."""
    import numpy as np

    from kitforge.core.parallel.world import ALONE, World
    from kitforge.data.source import open_source
    from kitforge.data.text.packing import PackedRows
    from kitforge.data.text.token_cache import build_token_cache
    from kitforge.kits.transformers.build import TASKS

    kit = TASKS["text_generation"]
    from kitforge.kits.transformers.data import Corpus
    from kitforge.kits.transformers.task import TextGenerationTask
    from kitforge.models import loading
    from kitforge.models.catalog import config_of
    from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
    from kitforge.trainer.run_folder import make_loop, train

    class Numbers:
        """Stands in for a tokenizer: a document is its seed."""

        vocab_size, eos_id, pad_id, eos_ids, bos_id, fingerprint = VOCAB, 0, 1, (0,), None, "benchmark"

        def encode(self, text: str) -> list[int]:
            return [2]

        encode_prompt = encode

        def encode_array(self, text: str) -> Any:
            return np.random.default_rng(int(text)).integers(2, VOCAB, LENGTH - 1).astype(np.uint16)

    class Laps(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "start":
                self.meter = Meter()
            if event.kind == "step" and self.meter.lap():
                run.stop("measured")

    values = {
        "model": {"family": arch, "vocab_size": VOCAB, **SIZES[arch]},
        "data": {"batch_size": BATCH, "sequence_length": LENGTH, "eval_fraction": 0.0},
        "trainer": {"max_steps": 1000, "progress": False},
        "precision": dtype,
        "compile_level": level,
    }
    options = kit.read_options(values)
    tokenizer: Any = Numbers()
    with tempfile.TemporaryDirectory() as place:
        cache = build_token_cache(
            open_source([str(n) for n in range(512)]), tokenizer, Path(place) / "cache", num_workers=1
        )
        corpus = Corpus(train=PackedRows(cache, length=LENGTH, pad_id=1), eval=None, fingerprint=cache.fingerprint)

        world = ALONE

        def network(world: World) -> Any:
            model = loading.build(config_of(options.model), device=world.device, level=options.compile_level, seed=0)
            if level == "O2":
                model.compile_blocks()
            return model

        laps = Laps()
        run_folder = Path(place) / "run"
        task = TextGenerationTask(options, corpus, network, world)
        loop = make_loop(task, options, run_folder, world=world, config={}, callbacks=[laps])
        loop.callbacks = [laps]
        train(loop, options, run_folder, "")
        return laps.meter.result()


def hugging_face(arch: str, dtype: str) -> dict[str, float]:
    """The same shapes in `transformers`, trained by its Trainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    tokens = torch.randint(2, VOCAB, (512, LENGTH), generator=torch.Generator().manual_seed(0))

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": tokens[index % 512], "labels": tokens[index % 512]}

    class Laps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.meter = Meter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.meter.lap()

    laps = Laps()
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place,
            per_device_train_batch_size=BATCH,
            max_steps=1000,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=dtype == "bf16",
            optim="adamw_torch_fused",
            learning_rate=3e-4,
            disable_tqdm=True,
        )
        Trainer(model=peer_model(arch), args=arguments, train_dataset=Rows(), callbacks=[laps]).train()
    return laps.meter.result()


def peer_model(arch: str) -> Any:
    """The shape in `transformers`, dropout off, as ours has it."""
    import transformers

    size = SIZES[arch]
    config: Any
    if arch == "gpt2":
        config = transformers.GPT2Config(
            n_layer=size["num_layers"],
            n_embd=size["dim"],
            n_head=size["num_heads"],
            vocab_size=VOCAB,
            n_positions=1024,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        )
        return transformers.GPT2LMHeadModel(config)
    if arch == "bloom":
        config = transformers.BloomConfig(
            n_layer=size["num_layers"], hidden_size=size["dim"], n_head=size["num_heads"], vocab_size=VOCAB
        )
        return transformers.BloomForCausalLM(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=size["num_layers"],
        hidden_size=size["dim"],
        num_attention_heads=size["num_heads"],
        intermediate_size=size["mlp_dim"],
        vocab_size=VOCAB,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config)


def plain(arch: str, dtype: str, compiled: bool = False) -> dict[str, float]:
    """A loop of a dozen lines over a hand-written network: fused attention, fused AdamW, autocast."""
    import torch

    from benchmarks.trainer.plain_models import PlainGPT2, PlainLlama

    torch.manual_seed(0)
    tokens = torch.randint(2, VOCAB, (512, LENGTH + 1))
    size = SIZES[arch]
    if arch == "bloom":
        raise SystemExit("the plain loop has no BLOOM; choose --arch gpt2 llama, or --only ours 'HF Trainer'")
    network: Any = (PlainGPT2 if arch == "gpt2" else PlainLlama)(size, VOCAB, LENGTH)
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    if compiled:
        network = torch.compile(network)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = (
        (lambda: torch.autocast("cpu", torch.bfloat16)) if dtype == "bf16" else contextlib.nullcontext
    )
    meter = Meter()
    for step in range(1000):
        batch = tokens[step * BATCH % 512 :][:BATCH]
        with context():
            loss = network(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if meter.lap():
            break
    return meter.result()


WORKERS: dict[str, Callable[[str, str], dict[str, float]]] = {
    "ours": ours,
    "ours O2": lambda arch, dtype: ours(arch, dtype, "O2"),
    "HF Trainer": hugging_face,
    "plain loop": plain,
    "plain loop, compiled": lambda arch, dtype: plain(arch, dtype, compiled=True),
}


SMOKE = {
    "SIZES": {"gpt2": {"dim": 32, "num_layers": 1, "num_heads": 2, "max_length": 64}},
    **{"BATCH": 2, "LENGTH": 16, "VOCAB": 64, "WARMUP": 1, "STEPS": 1},
    **{"rounds": 1, "only": ["ours"], "arch": ["gpt2"], "dtype": ["fp32"]},
}


def measure(worker: str, arch: str, dtype: str) -> dict[str, float]:
    """One worker in its own process; `first_step` becomes seconds since the command."""
    command = [sys.executable, "-m", "benchmarks.trainer.training", "--worker", worker, arch, dtype]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{worker} {arch} {dtype} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["first_step"] -= started
    return result


def rounds(workers: list[str], arch: str, dtype: str, count: int) -> Iterator[str]:
    """Lines of the table for one shape: the workers take turns `count` times."""
    results: dict[str, list[dict[str, float]]] = {worker: [] for worker in workers}
    for _ in range(count):
        for worker in workers:
            results[worker].append(measure(worker, arch, dtype))
    for worker in workers:
        middle = {name: statistics.median(each[name] for each in results[worker]) for name in results[worker][0]}
        pairs = zip(results["ours"], results[worker], strict=True)
        ratio = statistics.median(one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs)
        yield (
            f"| {arch} | {dtype} | {worker} | {middle['tokens_per_second']:,.0f} | {ratio:.2f} | "
            f"{middle['megabytes']:,.0f} | {middle['first_step']:.1f} |"
        )


def main() -> None:
    """Run one worker, or all of them in turn."""
    parser = CommandLine(__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("WORKER", "ARCH", "DTYPE"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WORKERS))
    parser.add_argument("--arch", nargs="*", default=["gpt2", "llama"], choices=list(SIZES))
    parser.add_argument("--dtype", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--table", default="training.md")
    arguments = parser.parse(SMOKE, globals())
    if arguments.worker:
        worker, arch, dtype = arguments.worker
        sys.stdout.write(json.dumps(WORKERS[worker](arch, dtype)) + "\n")
        return
    import torch

    lines = [
        "# Training against its peers",
        "",
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}; median of {arguments.rounds} interleaved "
        "rounds. `ours / it` above 1 means that Kitforge is faster. Memory is the peak above that after build.",
        "",
        "| shape | precision | | tokens/s | ours / it | memory MB | first step s |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for arch in arguments.arch:
        for dtype in arguments.dtype:
            lines += rounds(arguments.only, arch, dtype, arguments.rounds)
            sys.stdout.write("\n".join(lines[-len(arguments.only) :]) + "\n")
            sys.stdout.flush()
            write_result(Path(__file__).with_name(arguments.table), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
