"""Retrieval of German captions by English ones (multi30k), beside tf-idf: `task=embedding` from random weights.

    python -m benchmarks.kits.transformers.embedding TRAIN.en.gz TRAIN.de.gz TEST.en.gz TEST.de.gz

A small encoder over a sentencepiece vocabulary of both languages learns from 29,000 pairs and finds the captions of
1,000 others. Writes embedding.md.
"""

import datetime
import gzip
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result

Pair = dict[str, str]
OPTIONS: dict[str, Any] = {
    "model.num_layers": 2,
    "data.batch_size": 256,
    "data.sequence_length": 128,
    "pooling": "mean",
    "sizes": [32],
    "optimizer.learning_rate": 2e-3,
    "trainer.max_steps": 600,
    "trainer.eval_every": 200,
    "device": "cpu",
}
VOCABULARY = 6000
SMOKE = {
    "OPTIONS": OPTIONS | {"data.batch_size": 8, "trainer.max_steps": 2, "sizes": [], "trainer.eval_every": None},
    "VOCABULARY": 300,
    "files": None,
}
WORDS = ("dog", "cat", "men", "sun", "girl"), ("runs", "sleeps", "reads", "talks")
MADE_UP = [f"{one} {other}" for one in WORDS[0] for other in WORDS[1]]


def captions(names: Sequence[str]) -> list[Pair]:
    """The pairs of two files of lines; equal lines are left out."""
    if is_smoke():
        return [
            {"anchor": f"{text} {number}", "positive": f"{text[::-1]} {number}"} for number, text in enumerate(MADE_UP)
        ]
    texts = [gzip.decompress(Path(name).read_bytes()).decode().splitlines() for name in names]
    pairs = [{"anchor": one.strip(), "positive": other.strip()} for one, other in zip(*texts, strict=True)]
    return [row for row in pairs if all(row.values()) and row["anchor"] != row["positive"]]


def tf_idf(
    train: list[dict[str, str]], test: list[dict[str, str]], analyzer: str, sizes: tuple[int, int]
) -> list[float]:
    """recall@1, recall@10 and ndcg@10 by the cosine of tf-idf; of two equal scores neither comes first."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer=analyzer, ngram_range=sizes, sublinear_tf=True)
    vectorizer.fit([text for row in train for text in row.values()])
    one, other = (vectorizer.transform([row[side] for row in test]) for side in ("anchor", "positive"))
    scores = (one @ other.T).toarray()
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)
    gains = np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0.0)
    return [float((ranks == 1).mean()), float((ranks <= 10).mean()), float(gains.mean())]


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("files", nargs=4)
    arguments = parser.parse(SMOKE, globals())
    from kitforge import Trainer
    from kitforge.data.source import open_source
    from kitforge.data.tokenizers.loading import TokenizerConfig, make_tokenizer

    files = arguments.files or [""] * 4
    train, test = captions(files[:2]), captions(files[2:])
    with tempfile.TemporaryDirectory() as folder:
        source = open_source([{"text": text} for row in train for text in row.values()])
        config = TokenizerConfig(name="sentencepiece", vocab_size=VOCABULARY)
        tokenizer = make_tokenizer(config, source, Path(folder) / "cache")
        trainer = Trainer(
            "embedding", None, train, test, processor=tokenizer, options=OPTIONS, output_dir=f"{folder}/run"
        )
        found = trainer.train().metrics
    lines = [
        "# Retrieval of German captions by English ones",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"{len(train)} pairs, {OPTIONS['trainer.max_steps']} steps of {OPTIONS['data.batch_size']}, one seed; "
        f"{len(test)} held-out pairs.",
        "",
        "| | recall@1 | recall@10 | nDCG@10 |",
        "|---|---|---|---|",
    ]
    for name, values in (
        ("tf-idf, words and pairs of words", tf_idf(train, test, "word", (1, 2))),
        ("tf-idf, 2 to 4 letters", tf_idf(train, test, "char_wb", (2, 4))),
        ("`task=embedding`, 128 numbers", [found[f"eval/{each}"] for each in ("recall@1", "recall@10", "ndcg@10")]),
        ("its first 32", [found.get(f"eval/{each}/32", 0.0) for each in ("recall@1", "recall@10", "ndcg@10")]),
    ):
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
