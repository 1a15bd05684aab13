"""The evaluation loss is a property of model and text: no batch size, no split and no padding changes it."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.transformers.build import TASKS, Inputs
from kitforge.kits.transformers.task import TextGenerationTask
from tests.tiny import built
from tests.trainer import tiny

KIT = TASKS["text_generation"]

NETWORKS = {"llama": tiny.LLAMA, "gpt2": tiny.GPT2 | tiny.DROPOUT}


def network(name: str, dtype: torch.dtype) -> nn.Module:
    return cast(nn.Module, built(NETWORKS[name], ByteTokenizer.vocab_size).to(dtype))


def loss(model: nn.Module, corpus: Path, file: str, **choices: Any) -> float:
    values = {"data.eval": str(corpus / file), "data.cache": str(corpus / "cache"), "data.num_workers": 1}
    values |= {"data.sequence_length": 32, "device": "cpu"} | {
        name.replace("__", "."): choices[name] for name in choices
    }
    options = KIT.read_options(tiny.nested(values))
    inputs = Inputs(model=model, processor=ByteTokenizer())
    return KIT.evaluate(options, inputs, Rendezvous.open(options.parallel, options.device))["eval/loss"]


def test_the_loss_is_that_of_every_document_alone(tmp_path: Path) -> None:
    # All of them fit in one row, so that none is cut.
    texts = ["to be", "or not", "夜 café", "that is the question"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    model, tokenizer = network("llama", torch.float64).requires_grad_(False), ByteTokenizer()
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([*tokenizer.encode(text), tokenizer.eos_id])
        total += float(functional.cross_entropy(model(tokens[None])[0, :-1], tokens[1:], reduction="sum"))
        count += len(tokens) - 1
    assert loss(model, tmp_path, "texts.jsonl", data__sequence_length=43) == pytest.approx(total / count, abs=1e-12)


def test_dropout_is_off_and_the_mode_is_put_back(corpus: Path) -> None:
    model = network("gpt2", torch.float64)
    model.train()
    while_training = loss(model, corpus, "corpus.txt")
    assert model.training
    assert while_training == loss(model.eval(), corpus, "corpus.txt")


def test_the_folder_of_a_run_that_stopped_early_gives_the_best_weights(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(TextGenerationTask, "evaluate", lambda *_: {"eval/loss": next(losses)})
    options = {"trainer.eval_every": 1, "trainer.early_stopping": 2, "inference.max_new_tokens": 1}
    assembly = tiny.run(tmp_path / "run", corpus, options)
    found = KIT.load(tmp_path / "run", torch.device("cpu")).state_dict()
    best = KIT.load(tmp_path / "run" / "checkpoints" / "step_2", torch.device("cpu")).state_dict()
    last = KIT.load(tmp_path / "run" / "checkpoints" / "step_4", torch.device("cpu")).state_dict()
    assert all(torch.equal(found[name], best[name]) for name in best)
    assert any(not torch.equal(found[name], last[name]) for name in last)
    assert all(torch.equal(found[name], value) for name, value in assembly.loop.model.state_dict().items())
