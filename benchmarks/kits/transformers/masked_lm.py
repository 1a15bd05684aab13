"""The loss of `task=masked_lm` on a book beside its unigram floor, from random weights.

    python -m benchmarks.kits.transformers.masked_lm TEXT.txt

A small encoder over bytes. The floor is the cross entropy of the held-out bytes under the frequencies of the others: a
network that reads no neighbours cannot do better. Writes masked_lm.md.
"""

import datetime
import platform
import tempfile
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result

OPTIONS: dict[str, Any] = {
    "data.batch_size": 64,
    "data.sequence_length": 128,
    "optimizer.learning_rate": 2e-3,
    "trainer.max_steps": 600,
    "trainer.eval_every": 200,
    "device": "cpu",
}
SMOKE = {"OPTIONS": OPTIONS | {"data.batch_size": 4, "trainer.max_steps": 2, "trainer.eval_every": None}, "file": None}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("file")
    arguments = parser.parse(SMOKE, globals())
    from kitforge import Trainer

    text = "the sun sleeps over the moon. " * 40 if is_smoke() else Path(arguments.file).read_text(encoding="utf-8")
    stop = len(text) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer("masked_lm", "bert_tiny", [{"text": text[:stop]}], [{"text": text[stop:]}], options=OPTIONS,
                          output_dir=f"{folder}/run")  # fmt: skip
        found = trainer.train().metrics
    counts, held = (Counter(part.encode()) for part in (text[:stop], text[stop:]))
    size = counts.total() + 256
    floor = -sum(count * log((counts[byte] + 1) / size) for byte, count in held.items()) / held.total()
    lines = [
        "# Masked bytes of a book",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"{OPTIONS['trainer.max_steps']} steps of {OPTIONS['data.batch_size']} rows of 128 bytes, one seed; the last "
        "tenth is held out.",
        "",
        "| | loss, nats a masked byte | accuracy |",
        "|---|---|---|",
        f"| unigram floor | {floor:.3f} | {held.most_common(1)[0][1] / held.total():.3f} |",
        f"| `task=masked_lm` | {found['eval/loss']:.3f} | {found['eval/accuracy']:.3f} |",
    ]
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
