"""LoRA on SmolLM2-135M: a step and its memory beside PEFT under the Hugging Face Trainer; bytes of weights with QLoRA.

    kitforge models fetch smollm2
    python -m benchmarks.kits.transformers.adapters            # interleaved, writes adapters.md
    python -m benchmarks.kits.transformers.adapters --worker ours bf16 lora

Rank 8 on queries and values, rows of 256 tokens, batch 8, AdamW. Every worker is its own process; ours and the peer
take turns, and the ratios are medians over pairs. Memory is the peak of the whole process.
"""

import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from benchmarks.kits.transformers.small_model import write_small_model

BATCH, LENGTH, WARMUP, STEPS = 8, 256, 1, 4
PRECISIONS = ("fp32", "bf16")
KINDS = {"lora (fp32)": "lora", "dora (fp32)": "dora", "qlora (int4)": "qlora"}


class Laps:
    """Step times of a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()
        self._count = 0

    def lap(self) -> bool:
        """A step has ended. True when enough have."""
        now = time.perf_counter()
        self._count += 1
        if self._count > WARMUP:
            self.seconds.append(now - self._last)
        self._last = time.perf_counter()
        return self._count >= WARMUP + STEPS

    def result(self, model: Any) -> dict[str, float]:
        """Seconds of a step, and bytes."""
        weights = sum(each.nbytes for each in model.parameters())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": statistics.median(self.seconds), "peak": peak, "weights": weights}


def corpus() -> str:
    """Half a megabyte of English prose of Python's own documentation strings."""
    import pydoc_data.topics as pages

    return "\n".join(pages.topics.values())


def ours(precision: str, kind: str) -> dict[str, float]:
    """The Trainer on the GGUF file."""
    from kitforge import Trainer
    from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

    class Watch(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "start":
                self.laps = Laps()
            if event.kind == "step" and self.laps.lap():
                self.found = self.laps.result(run.model)
                run.stop("measured")

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.txt"
        text.write_text(corpus(), encoding="utf-8")
        options = {
            "lora.rank": 8,
            "lora.kind": kind,
            "precision": precision,
            "data.batch_size": BATCH,
            "data.sequence_length": LENGTH,
            "data.eval_fraction": 0.0,
            "trainer.max_steps": 100,
            "trainer.progress": False,
            "trainer.checkpoint_every": None,
        }
        base = write_small_model(Path(folder)) if is_smoke() else "smollm2"
        place = f"{folder}/run"
        Trainer("text_generation", base, text, output_dir=place, options=options, callbacks=[watch]).train()
    return watch.found


def peft_trainer(precision: str, _kind: str) -> dict[str, float]:
    """PEFT under the Hugging Face Trainer, on the exported folder."""
    import peft
    import transformers

    from kitforge import load_processor

    tokenizer: Any = load_processor("smollm2")
    tokens = torch.tensor(tokenizer.encode(corpus()))
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": rows[index % len(rows)], "labels": rows[index % len(rows)]}

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.laps = Laps()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.laps.lap()

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        # Written by a process of its own, whose memory is not the peer's.
        code = f"from kitforge import save_model; save_model('smollm2', {folder!r}, dtype='float32')"
        subprocess.run([sys.executable, "-c", code], check=True)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        options = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        arguments = transformers.TrainingArguments(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=BATCH,
            max_steps=100,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=precision == "bf16",
            optim="adamw_torch_fused",
            learning_rate=2e-4,
            disable_tqdm=True,
        )
        model = peft.get_peft_model(base, options)
        transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[watch]).train()
        return watch.laps.result(model)


WORKERS = {"ours": ours, "PEFT": peft_trainer}
SMOKE = {
    **{"BATCH": 2, "LENGTH": 32, "STEPS": 1, "PRECISIONS": ("fp32",), "KINDS": {"qlora (int4)": "qlora"}},
    **{"WORKERS": {"ours": ours}, "pairs": 1},
}


def launch(name: str, precision: str, kind: str = "lora") -> dict[str, float]:
    """The figures of one worker, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--worker", name, precision, kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(pairs: int) -> list[str]:
    """The lines of the table."""
    lines = ["| precision | ours, s a step | PEFT + Trainer | ratio of time | ours, peak MB | PEFT | ratio of memory |"]
    lines += ["|---|---|---|---|---|---|---|"]
    weights = 0.0
    for precision in PRECISIONS:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in WORKERS}
        for _ in range(pairs):
            for name in WORKERS:
                found[name].append(launch(name, precision))
        seconds, peaks = (
            {name: statistics.median(each[key] for each in runs) for name, runs in found.items()}
            for key in ("seconds", "peak")
        )
        weights = found["ours"][0]["weights"]
        if "PEFT" not in found:
            lines.append(f"| {precision} | {seconds['ours']:.2f} | | | {peaks['ours'] / 1e6:.0f} | | |")
            continue
        ratios = [theirs["seconds"] / own["seconds"] for own, theirs in zip(*found.values(), strict=True)]
        lines.append(
            f"| {precision} | {seconds['ours']:.2f} | {seconds['PEFT']:.2f} | {statistics.median(ratios):.2f}x "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {peaks['ours'] / 1e6:.0f} | {peaks['PEFT'] / 1e6:.0f} "
            f"| {peaks['ours'] / peaks['PEFT']:.2f}x |"
        )
        print(lines[-1], flush=True)
    lines += ["", "| base | seconds a step, bf16 | bytes of all weights | of LoRA's |", "|---|---|---|---|"]
    for label, kind in KINDS.items():
        own = launch("ours", "bf16", kind)
        lines.append(
            f"| {label} | {own['seconds']:.2f} | {own['weights'] / 1e6:.0f} MB | {own['weights'] / weights:.2f}x |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "PRECISION", "KIND"))
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse(SMOKE, globals())
    if arguments.worker:
        name, precision, kind = arguments.worker
        print(json.dumps(WORKERS[name](precision, kind)))
        return
    page = Path(__file__).with_suffix(".md")
    head = [
        "# LoRA on SmolLM2-135M beside PEFT",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"{arguments.pairs} interleaved pairs; rows of {LENGTH} tokens, batch {BATCH}, rank 8 on queries and values.",
        "",
    ]
    write_result(page, "\n".join([*head, *table(arguments.pairs)]) + "\n")


if __name__ == "__main__":
    main()
