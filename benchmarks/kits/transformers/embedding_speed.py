"""A step of `task=embedding` beside sentence-transformers: the same BERT, texts, batch and loss, in fp32.

    python -m benchmarks.kits.transformers.embedding_speed --peer-python OTHER/bin/python [--size small] [--threads 1]

transformers writes a BERT of random weights with a WordPiece vocabulary. Both sides read its folder and the same pairs
of texts of 8 to 32 words, pool by the mean, and learn by in-batch negatives (MultipleNegativesRankingLoss) with AdamW
and the dropout of the folder. Each is launched in turn; a figure is the median of the steps behind the first ones. The
section goes to embedding_speed.md.
"""

import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_section
from kitforge.foundation.device import describe

# Layers, width, heads, pairs of a step.
SIZES = {"tiny": (2, 128, 2, 64), "small": (4, 512, 8, 32)}
WARMUP, STEPS, WORDS = 2, 5, 3000
Lap = tuple[float, float]  # seconds by the wall's clock, and of the processor
SMOKE = {"SIZES": {"tiny": (1, 32, 2, 4)}, "STEPS": 1, "WARMUP": 1, "size": "tiny", "launches": 1}


def write_inputs(folder: Path, size: str) -> None:
    """The model, and the pairs."""
    import transformers

    draw, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    words = sorted({"".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)})
    model = folder / "model"
    model.mkdir()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(model)
    layers, dim, heads, pairs = SIZES[size]
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "num_attention_heads": heads,
        "intermediate_size": 4 * dim,
    }
    torch.manual_seed(0)
    network = transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **shape))
    network.save_pretrained(model)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(pairs * (WARMUP + STEPS + 2)):
            texts = (" ".join(draw.choices(words, k=draw.randint(8, 32))) for _ in range(2))
            file.write(json.dumps(dict(zip(("anchor", "positive"), texts, strict=True))) + "\n")


def ours(folder: Path, size: str) -> list[Lap]:
    """The laps of the steps of the Trainer."""
    from kitforge import Trainer
    from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

    class Watch(Callback):
        def __init__(self) -> None:
            self.at: list[Lap] = []

        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "step":
                self.at.append((time.perf_counter(), time.process_time()))

    watch = Watch()
    options = {
        "pooling": "mean",
        "data.batch_size": SIZES[size][3],
        "data.eval_fraction": 0.0,
        "optimizer.learning_rate": 5e-5,
        "trainer.max_steps": WARMUP + STEPS,
        "trainer.progress": False,
        "trainer.checkpoint_every": None,
        "device": "cpu",
    }
    with tempfile.TemporaryDirectory() as place:
        output, rows = Path(place) / "run", folder / "pairs.jsonl"
        Trainer("embedding", folder / "model", rows, output_dir=output, options=options, callbacks=[watch]).train()
    return watch.at


def floor(folder: Path, size: str) -> float:
    """Seconds of the matrix products of a step's tokens alone, a backward pass counted twice."""
    layers, dim, _, pairs = SIZES[size]
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    counts = [len(text.split()) + 2 for line in lines for text in json.loads(line).values()]
    rows, total = round(statistics.mean(counts) * 2 * pairs), 0.0
    for narrow, wide, times in ((dim, dim, 4), (dim, 4 * dim, 2)):
        input, weight, out = (torch.ones(shape) for shape in ((rows, narrow), (narrow, wide), (rows, wide)))
        seconds = []
        for _ in range(11):
            begun = time.perf_counter()
            torch.mm(input, weight, out=out)
            seconds.append(time.perf_counter() - begun)
        total += 3 * layers * times * statistics.median(seconds)
    return total


def launched(command: list[str]) -> Lap:
    """The median step of a child."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    ends = json.loads(line.removeprefix("RESULT "))[WARMUP - 1 :]
    wall, cpu = ([last[clock] - first[clock] for first, last in pairwise(ends)] for clock in (0, 1))
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", help="an interpreter that has sentence-transformers; without one, ours alone")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--child", type=Path)
    chosen: Any = parser.parse(SMOKE, globals())
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        sys.stdout.write(f"RESULT {json.dumps(ours(chosen.child, chosen.size))}\n")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, chosen.size)
        sides = {"kitforge": [sys.executable, "-m", "benchmarks.kits.transformers.embedding_speed", "--child", name]}
        sides["kitforge"] += ["--size", chosen.size, "--threads", str(chosen.threads)]
        if chosen.peer_python:
            script = Path(__file__).with_name("peer_embedding_speed.py")
            shape = [str(each) for each in (SIZES[chosen.size][3], WARMUP + STEPS, chosen.threads)]
            sides["sentence-transformers"] = [chosen.peer_python, str(script), name, *shape]
        found: dict[str, list[Lap]] = {side: [] for side in sides}
        for _ in range(chosen.launches):
            for side, command in sides.items():
                found[side].append(launched(command))
        least = floor(folder, chosen.size)
    layers, dim, heads, pairs = SIZES[chosen.size]
    lines = [
        f"BERT {chosen.size}, {chosen.threads} thread(s)",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, torch {torch.__version__}. {layers} layers of "
        f"{dim}, {heads} heads; {pairs} pairs a step. Median of {chosen.launches} interleaved rounds. The matrix "
        f"products alone take {1000 * least:.0f} ms.",
        "",
        "| | ms a step | speedup of ours | time / products | CPU ms | speedup by CPU |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for side, laps in found.items():
        figures = []
        for clock in (0, 1):
            turns = zip(laps, found["kitforge"], strict=True)
            ratio = statistics.median(each[clock] / own[clock] for each, own in turns)
            median = statistics.median(each[clock] for each in laps)
            figures += [f"{1000 * median:.0f}", f"{ratio:.2f}x", *([] if clock else [f"{median / least:.2f}x"])]
        lines.append(f"| {side} | {' | '.join(figures)} |")
    section = "\n".join([*lines, ""])
    sys.stdout.write(section)
    if not is_smoke():
        write_section(Path(__file__).with_suffix(".md"), "Embedding steps beside sentence-transformers", section)


if __name__ == "__main__":
    main()
