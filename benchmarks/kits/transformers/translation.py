"""T5: a tiny one from scratch on multi30k (English to German, 29,000 pairs); a step beside the Hugging Face Trainer.

    python -m benchmarks.kits.transformers.translation quality train.jsonl val.jsonl test.jsonl --seeds 0 1
    python -m benchmarks.kits.transformers.translation speed               # interleaved
    python -m benchmarks.kits.transformers.translation speed --worker ours bf16

Rows are {"en": ..., "de": ...}. Quality: `t5_tiny`, a sentencepiece vocabulary of 8,000, dropout 0.1, batch 128, 1,200
steps. Speed: 4 + 4 layers x 256, vocabulary 8192, 32 pairs of 64 + 64 tokens, AdamW, every worker its own process; the
ratios are medians over pairs, memory is the peak of the whole process. Both print lines for translation.md.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke

BATCH, LENGTH, VOCAB, WARMUP, STEPS = 32, 64, 8192, 2, 6
SHAPE = {"dim": 256, "num_layers": 4, "num_heads": 4, "head_dim": 64, "mlp_dim": 1024}


OPTIONS: dict[str, Any] = {
    "model.dropout": 0.1,
    "tokenizer.name": "sentencepiece",
    "tokenizer.vocab_size": 8000,
    "data.source": "en",
    "data.target": "de",
    "data.batch_size": 128,
    "optimizer.learning_rate": 2e-3,
    "trainer.max_steps": 1200,
    "trainer.epochs": 6,
    "trainer.eval_every": 600,
}


def quality(files: list[str], seeds: list[int], folder: str | None = None) -> None:
    """Train a tiny T5 under each seed, in `folder` or where runs go; BLEU of the whole test set, greedy and with four
    beams."""
    from kitforge import Trainer

    train, held, test = files
    for seed in seeds:
        options = {**OPTIONS, "seed": seed}
        began = time.perf_counter()
        run = Trainer("translation", "t5_tiny", train, held, output_dir=folder, options=options).train()
        minutes, found = (time.perf_counter() - began) / 60, []
        for beams in (1, 4):
            command = [sys.executable, "-m", "kitforge", "evaluate", f"checkpoint={run.folder}", f"data.eval={test}"]
            command += ["data.eval_texts=1000", f"inference.num_beams={beams}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        greedy, beam = found
        sys.stdout.write(
            f"| {seed} | {minutes:.1f} | {greedy['loss']:.3f} | {greedy['bleu']:.1f} | {beam['bleu']:.1f} | "
            f"{beam['chrf']:.1f} |\n"
        )
        sys.stdout.flush()


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

    def result(self) -> dict[str, float]:
        """Seconds of a step, and bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": statistics.median(self.seconds), "peak": peak}


def rows() -> list[dict[str, str]]:
    """Pairs of 63 letters, of 64 tokens with their ends."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [
        {side: "a" + "".join(draw.choices(letters, k=LENGTH - 3)) + "a" for side in ("source", "target")}
        for _ in range(512)
    ]


def ours(precision: str) -> dict[str, float]:
    """The Trainer."""
    from kitforge import Trainer
    from kitforge.data.tokenizers.loading import ByteTokenizer
    from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

    class Watch(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "start":
                self.laps = Laps()
            if event.kind == "step" and self.laps.lap():
                self.found = self.laps.result()
                run.stop("measured")

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            **{f"model.{name}": value for name, value in SHAPE.items()},
            "model.vocab_size": VOCAB,
            "model.activation": "relu",
            "model.tie_embeddings": True,
            "precision": precision,
            "data.batch_size": BATCH,
            "data.eval_fraction": 0.0,
            "trainer.max_steps": 100,
            "trainer.epochs": 100,
            "trainer.progress": False,
            "trainer.checkpoint_every": None,
        }
        place = f"{folder}/run"
        Trainer(
            "translation",
            "t5_tiny",
            rows(),
            processor=ByteTokenizer(),
            output_dir=place,
            options=options,
            callbacks=[watch],
        ).train()
    return watch.found


def hugging_face(precision: str) -> dict[str, float]:
    """The same shapes in `transformers`, trained by its Trainer."""
    import transformers

    tokens = [{side: [*row[side].encode(), 256] for side in row} for row in rows()]

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = tokens[index % len(tokens)]
            return {"input_ids": row["source"], "labels": row["target"]}

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.laps = Laps()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.laps.lap()

    watch = Watch()
    config_class: Any = transformers.T5Config
    config = config_class(
        vocab_size=VOCAB,
        d_model=SHAPE["dim"],
        d_kv=SHAPE["head_dim"],
        d_ff=SHAPE["mlp_dim"],
        num_layers=SHAPE["num_layers"],
        num_heads=SHAPE["num_heads"],
        dropout_rate=0.0,
        decoder_start_token_id=257,
    )
    with tempfile.TemporaryDirectory() as folder:
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
            disable_tqdm=True,
        )
        model = transformers.T5ForConditionalGeneration(config)
        transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[watch]).train()
    return watch.laps.result()


WORKERS = {"ours": ours, "HF Trainer": hugging_face}


def launch(name: str, precision: str) -> dict[str, float]:
    """The figures of one worker, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kits.transformers.translation", "speed"]
    done = subprocess.run([*command, "--worker", name, precision], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} {precision} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def speed(pairs: int) -> None:
    """Both in turns, in both precisions."""
    for precision in ("fp32", "bf16"):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in WORKERS}
        for _ in range(pairs):
            for name in WORKERS:
                found[name].append(launch(name, precision))
        peer = next(reversed(WORKERS))
        ratios = [theirs["seconds"] / own["seconds"] for own, theirs in zip(found["ours"], found[peer], strict=True)]
        for name, results in found.items():
            seconds, peak = (statistics.median(each[key] for each in results) for key in ("seconds", "peak"))
            ratio = statistics.median(ratios) if name != "ours" else 1.0
            sys.stdout.write(f"| {precision} | {name} | {seconds:.3f} | {ratio:.2f} | {peak / 1e6:,.0f} |\n")
        sys.stdout.write(f"({min(ratios):.2f} to {max(ratios):.2f})\n")
        sys.stdout.flush()


SMOKE = {
    **{"SHAPE": {"dim": 16, "num_layers": 1, "num_heads": 1, "head_dim": 16, "mlp_dim": 32}, "BATCH": 2, "LENGTH": 16},
    **{"VOCAB": 258, "WARMUP": 1, "STEPS": 1, "WORKERS": {"ours": ours}, "pairs": 1, "what": None},
    "OPTIONS": OPTIONS
    | {"model.dropout": 0.0, "tokenizer.vocab_size": 300, "data.batch_size": 4, "trainer.max_steps": 1},
}


def smoke() -> None:
    """A step of a run, its evaluation, and a round of our worker."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"en": f"the number {number}", "de": f"die Zahl {number}"} for number in range(32)]
        file = Path(folder) / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        quality([str(file)] * 3, [0], f"{folder}/run")
    speed(1)


def main() -> None:
    """Print the rows of a table."""
    parser = CommandLine(__doc__)
    parser.add_argument("what", choices=("quality", "speed"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "PRECISION"))
    arguments = parser.parse(SMOKE, globals())
    if arguments.worker:
        name, precision = arguments.worker
        sys.stdout.write(json.dumps(WORKERS[name](precision)) + "\n")
    elif is_smoke():
        smoke()
    elif arguments.what == "speed":
        speed(arguments.pairs)
    elif len(arguments.files) == 3:
        quality(arguments.files, arguments.seeds)
    else:
        parser.error("quality needs three files: train.jsonl val.jsonl test.jsonl")


if __name__ == "__main__":
    main()
