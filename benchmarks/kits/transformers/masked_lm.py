"""The loss of `task=masked_lm` on Wikipedia's articles beside its unigram floor, from random weights.

    python -m benchmarks.kits.transformers.masked_lm wiki.txt.gz

A small encoder over a sentencepiece vocabulary of the text, whose last tenth is held out. The floor is the cross
entropy of the very tokens that are masked in evaluation under the frequencies of the training text: no network that
reads no neighbours does better. Writes masked_lm.md.
"""

import datetime
import gzip
import tempfile
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge import Trainer
from kitforge.data.text.masking import MaskToken, framed_rows, masked
from kitforge.foundation.device import describe
from kitforge.foundation.types import IGNORED

OPTIONS: dict[str, Any] = {
    "optimizer": "muon",
    "optimizer.learning_rate": 0.01,
    "tokenizer.name": "sentencepiece",
    "tokenizer.vocab_size": 2048,
    "data.batch_size": 32,
    "data.sequence_length": 128,
    "trainer.max_steps": 800,
    "trainer.eval_every": 200,
    "device": "cpu",
}
SMALLER = {"data.batch_size": 4, "trainer.max_steps": 2, "trainer.eval_every": None, "tokenizer.vocab_size": 290}
SMOKE = {"OPTIONS": OPTIONS | SMALLER, "file": None}


def floor(tokenizer: Any, train: str, held: str) -> tuple[float, float]:
    """Cross entropy and accuracy of the training tokens' frequencies, on the tokens that evaluation masks."""
    counts = Counter(tokenizer.encode(train))
    size, likeliest, targets = counts.total() + tokenizer.vocab_size, counts.most_common(1)[0][0], list[int]()
    for row, (tokens, words) in enumerate(framed_rows(tokenizer, held, OPTIONS["data.sequence_length"])):
        numbered = np.where(np.array(words) > 0, np.arange(1, len(words) + 1), 0)
        seed, mask = (0, "mask", "evaluation", row), MaskToken.of(tokenizer).number
        wanted = masked(np.array(tokens), numbered, seed, 0.15, mask, tokenizer.vocab_size)[1]
        targets += wanted[wanted != IGNORED].tolist()
    loss = -sum(log((counts[token] + 1) / size) for token in targets) / len(targets)
    return loss, targets.count(likeliest) / len(targets)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("file")
    arguments = parser.parse(SMOKE, globals())
    text = "the sun sleeps over the moon, which is a star. " * 60
    if not is_smoke():
        text = gzip.decompress(Path(arguments.file).read_bytes()).decode()
    stop = len(text) * 9 // 10
    parts = text[:stop], text[stop:]
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS | {"data.cache": f"{folder}/cache", "output_dir": f"{folder}/run"}
        run = Trainer("masked_lm", "bert_tiny", *([{"text": part}] for part in parts), options=options).train()
        least = floor(run.processor, *parts)
    lines = [
        "# Masked subwords of Wikipedia",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, torch {torch.__version__}. "
        f"{OPTIONS['trainer.max_steps']} steps of {OPTIONS['data.batch_size']} rows of "
        f"{OPTIONS['data.sequence_length']} tokens, a vocabulary of {OPTIONS['tokenizer.vocab_size']}, one seed; the "
        "last tenth is held out.",
        "",
        "| | loss, nats a masked token | accuracy |",
        "|---|---:|---:|",
        f"| unigram floor | {least[0]:.3f} | {least[1]:.3f} |",
        f"| `task=masked_lm` | {run.metrics['eval/loss']:.3f} | {run.metrics['eval/accuracy']:.3f} |",
    ]
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
