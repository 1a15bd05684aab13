"""Runs of a tiny language model, and what they leave behind, for comparison bit by bit."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.kits.kit import RunAssembly
from kitforge.kits.transformers.build import TASKS, Inputs
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import train
from kitforge.verify.run_equality import checkpoint_content, copy_up_to, records, run_differences, without_clock
from kitforge.verify.run_equality import last_checkpoint as newest_checkpoint

__all__ = ["copy_up_to", "records", "without_clock"]

KIT = TASKS["text_generation"]

WORDS = ["sun", "moon", "river", "stone", "sings", "sleeps", "over", "under", "the", "a", "old", "café", "夜"]
LLAMA = {"family": "llama", "dim": 32, "num_layers": 2, "num_heads": 2, "mlp_dim": 48, "max_length": 128}
GPT2 = {"family": "gpt2", "dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 128}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
OPTIONS: dict[str, Any] = {
    "model": LLAMA,
    "data.sequence_length": 32,
    "data.batch_size": 4,
    "data.num_workers": 1,
    "trainer.max_steps": 6,
    "trainer.progress": False,
    "trainer.eval_batches": 2,
    "inference.max_new_tokens": 2,
    "optimizer.learning_rate": 1e-2,
    "device": "cpu",
}
# Kinds of runs whose resumption has something of its own to go wrong.
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw"},
    "muon in bf16": {"optimizer.name": "muon", "precision": "bf16"},
    "gpt2 with dropout and micro-batches": {"model": GPT2 | DROPOUT, "trainer.micro_batch_size": 3},
    "packed documents": {"data.train": "documents.jsonl", "optimizer.name": "sgd", "data.eval_fraction": 0.2},
    "a loss scale that falls": {"precision": "fp16"},
    # At this rate every other evaluation disappoints.
    "a plateau": {
        "schedule.name": "plateau",
        "schedule.plateau_patience": 1,
        "schedule.warmup_steps": 0,
        "optimizer.learning_rate": 0.3,
        "trainer.eval_every": 1,
    },
}


def sentence(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(num_words)) + "\n"


def write_corpus(folder: Path) -> Path:
    """A text of about 4,000 bytes in corpus.txt and 60 short documents in documents.jsonl."""
    generator = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("".join(sentence(generator, 9) for _ in range(80)), encoding="utf-8")
    documents = [sentence(generator, generator.randint(1, 9)) for _ in range(60)]
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def nested(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted options as the tree that they stand for."""
    tree: dict[str, Any] = {}
    for name, value in choices.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def begin(
    folder: Path, corpus: Path, choices: Mapping[str, Any] | None = None, callbacks: Sequence[Callback] = ()
) -> RunAssembly[Any, Any]:
    """A run in `folder`, ready to start. `choices` are dotted options; `data.train` is a file of the corpus."""
    values = OPTIONS | {"data.train": "corpus.txt", "data.cache": str(corpus / "cache")} | dict(choices or {})
    values |= {"output_dir": str(folder), "data.train": str(corpus / values["data.train"])}
    options = KIT.read_options(nested(values))
    return KIT.assemble(options, Inputs(callbacks=callbacks), Rendezvous.open(options.parallel, options.device))


def finish(assembly: RunAssembly[Any, Any]) -> dict[str, float]:
    """Train to the end."""
    return train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def run(
    folder: Path, corpus: Path, choices: Mapping[str, Any] | None = None, callbacks: Sequence[Callback] = ()
) -> RunAssembly[Any, Any]:
    """Begin and finish."""
    assembly = begin(folder, corpus, choices, callbacks)
    finish(assembly)
    return assembly


def events(folder: Path, name: str) -> list[str]:
    """The messages of the events of that name."""
    return [record["message"] for record in records(folder, "event") if record["event"] == name]


def last_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of model and optimizer, and the state, of the newest checkpoint; without clock and paths."""
    return checkpoint_content(newest_checkpoint(folder))


def assert_same(got: Path, wanted: Path) -> None:
    """Two runs ended alike, bit for bit, and told the same on the way."""
    assert run_differences(got, wanted) == []
