"""What a student of half the layers recovers by `task=distill`, beside SFT on its teacher's texts, on movie reviews.

    kitforge models fetch smollm2
    python -m benchmarks.kits.rlhf.distill_quality train.jsonl.gz test.jsonl.gz [--seeds 0 1 2]

The teacher is SmolLM2-135M after LoRA on reviews of rt-polarity with their sentiment as a text. The student has every
second layer of it. From there it learns by on-policy distillation, or by SFT on one text that the teacher wrote to each
of the same prompts: as many prompts, steps and prompts a step. Accuracy is that of the likelier of both sentiments on
held-out reviews; what is recovered is a share of the accuracy that the cut has lost. Writes distill_quality.md.
"""

import dataclasses
import datetime
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from benchmarks.kits.transformers.small_model import write_small_model
from kitforge import Trainer, load_model, load_processor, pipeline, save_model
from kitforge.foundation.device import describe
from kitforge.models.loading import build

TAUGHT, PROMPTS, HELD_OUT, BATCH = 640, 7680, 400, 16
SIDES = [" negative", " positive"]
COMMON: dict[str, Any] = {
    "precision": "bf16",
    "device": "cpu",
    "data.sequence_length": 160,
    "data.eval_fraction": 0.0,
    "trainer.epochs": 1,
    "trainer.progress": False,
    "trainer.checkpoint_every": None,
}
LORA = {"lora.rank": 8, "lora.target_modules": ["query", "key", "value", "out", "gate", "up", "down"]}
TEACHER = {"data.batch_size": BATCH, "optimizer.learning_rate": 5e-4, **LORA}
STUDENT = {"optimizer.learning_rate": 1e-4, "schedule.warmup_steps": 0.1}
DISTILL = {
    "rl.prompts_per_rollout": BATCH,
    "rl.num_generations": 1,
    "rl.advantage": "reinforce",
    "rollout.max_new_tokens": 1,
    # A divergence of both, as 0.5, is flat where a student that was cut is: far from its teacher.
    "distill.beta": 0.0,
    "trainer.eval_first": False,
}
SMOKE = {"TAUGHT": 8, "PROMPTS": 8, "HELD_OUT": 4, "BATCH": 4, "files": None, "seeds": [0]} | {
    "TEACHER": {**TEACHER, "data.batch_size": 4},
    "DISTILL": {**DISTILL, "rl.prompts_per_rollout": 4},
}
Row = dict[str, Any]


def rows_of(name: str | None) -> list[Row]:
    """Reviews as prompts, with their sentiment as a completion, in a drawn order."""
    if is_smoke():
        found = [{"text": ("a good film", "a bad film")[number % 2], "label": number % 2} for number in range(40)]
    else:
        lines = gzip.decompress(Path(str(name)).read_bytes()).decode().splitlines()
        found = [json.loads(line) for line in lines]
    random.Random(0).shuffle(found)
    return [{"prompt": f"Review: {row['text']}\nSentiment:", "completion": SIDES[int(row["label"])]} for row in found]


def accuracy(model: Any, held: list[Row]) -> float:
    """The fraction of reviews whose sentiment is the likelier one to the model."""
    answer = pipeline("text_generation", model=model)
    texts = answer([row["prompt"] for row in held], choices=SIDES, temperature=0.0, max_new_tokens=16)
    pairs = zip(held, texts, strict=True)
    return statistics.mean(text[0]["generated_text"].endswith(row["completion"]) for row, text in pairs)


def write_half(teacher: Path, folder: Path) -> Path:
    """A model of every second layer."""
    whole: Any = load_model(teacher)
    config = dataclasses.replace(whole.config, num_layers=-(-whole.config.num_layers // 2))
    half = build(config, device=torch.device("cpu"), seed=0)
    weights = whole.state_dict()
    kept = {name: weights[_of_whole(name)] for name in half.state_dict()}
    half.load_state_dict(kept)
    save_model(half, folder, load_processor(teacher))
    return folder


def _of_whole(name: str) -> str:
    parts = name.split(".")
    return ".".join([parts[0], str(2 * int(parts[1])), *parts[2:]]) if parts[0] == "blocks" else name


def measured(files: list[str | None], seed: int, place: Path) -> dict[str, tuple[float, float]]:
    """Accuracy and processor minutes of each model."""
    rows, held = rows_of(files[0]), rows_of(files[1])[:HELD_OUT]
    own, prompts = rows[:TAUGHT], [{"prompt": row["prompt"]} for row in rows[TAUGHT : TAUGHT + PROMPTS]]
    base = write_small_model(place) if is_smoke() else "smollm2"
    found: dict[str, tuple[float, float]] = {}

    def learned(name: str, task: str, start: Any, given: list[Row], choices: dict[str, Any], **roles: Any) -> Path:
        begun = time.process_time()
        options = {**COMMON, **choices, "seed": seed, "output_dir": str(place / name)}
        run = Trainer(task, start, given, options=options, roles=roles).train()
        minutes = (time.process_time() - begun) / 60
        found[name] = (accuracy(run.folder, held), minutes)
        sys.stdout.write(f"seed {seed}, {name}: {found[name][0]:.3f}, {minutes:.1f} minutes\n")
        sys.stdout.flush()
        return run.folder

    teacher = learned("teacher", "sft", base, own, TEACHER)
    cut = write_half(teacher, place / "cut")
    found["cut"] = (accuracy(cut, held), 0.0)
    sys.stdout.write(f"seed {seed}, cut: {found['cut'][0]:.3f}\n")
    learned("distilled", "distill", cut, prompts, STUDENT | DISTILL, teacher=teacher)
    begun = time.process_time()
    write = pipeline("text_generation", model=teacher)
    asked = [row["prompt"] for row in prompts]
    texts = write(asked, temperature=1.0, max_new_tokens=DISTILL["rollout.max_new_tokens"], seed=seed)
    written = [
        {"prompt": prompt, "completion": text[0]["generated_text"].removeprefix(prompt)}
        for prompt, text in zip(asked, texts, strict=True)
    ]
    writing = (time.process_time() - begun) / 60
    skipped = {"data.on_invalid": "skip", "data.batch_size": BATCH}
    learned("sft", "sft", cut, written, STUDENT | skipped)
    found["sft"] = (found["sft"][0], found["sft"][1] + writing)
    return found


TITLES = {
    "teacher": "teacher, 30 layers",
    "cut": "15 of its layers, untrained",
    "distilled": "`task=distill`",
    "sft": "SFT on the teacher's texts",
}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("files", nargs=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse(SMOKE, globals())
    runs = []
    for seed in chosen.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measured(chosen.files or [None, None], seed, Path(folder)))
    lines = [
        "# Half of the layers, distilled",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, torch "
        f"{torch.__version__}. SmolLM2-135M in {COMMON['precision']}; the teacher learns from {TAUGHT} reviews, a "
        f"student from {PROMPTS} prompts, {BATCH} a step. Accuracy on {HELD_OUT} held-out reviews of rt-polarity.",
        "",
        "| | accuracy | by seed | recovered | processor minutes |",
        "|---|---:|---|---:|---:|",
    ]
    for name, title in TITLES.items():
        values, minutes = zip(*(run[name] for run in runs), strict=True)
        lost = [run["teacher"][0] - run["cut"][0] for run in runs]
        gained = [run[name][0] - run["cut"][0] for run in runs]
        share = "" if name in ("teacher", "cut") else f"{sum(gained) / (sum(lost) or 1):.0%}"
        each = ", ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {title} | {statistics.mean(values):.3f} | {each} | {share} | {statistics.mean(minutes):.1f} |")
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
