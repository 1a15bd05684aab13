"""Texts that benchmarks and training runs write of a model continue their prompts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kitforge.data.tokenizers.protocol import Tokenizer
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.transformers.evaluation import Evaluator
from kitforge.kits.transformers.generation_samples import GenerationSamples
from kitforge.kits.transformers.questions import load_task
from kitforge.trainer.callbacks.callback import Event
from tests.tiny import built
from tests.tokenizer_kinds import tokenizer_of
from tests.trainer import tiny

KINDS = ["prepend and strip", "metaspace always", "sentencepiece"]


def saying(tokenizer: Tokenizer, **options: Any) -> InferenceOptions:
    """Options of a model that says " the" again and again."""
    token = tokenizer.encode("to the")[1]
    return InferenceOptions(logit_bias={str(token): 100.0}, max_new_tokens=2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_benchmarks_show_what_follows_the_context(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    files = {
        "continuation": {"context": "He went to", "continuation": "the school"},
        "number": {"question": "what is 1", "answer": "1"},
    }
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    sets = [load_task(tmp_path / f"{name}.jsonl") for name in files]
    found = Evaluator(built(tiny.LLAMA, tokenizer.vocab_size), tokenizer, saying(tokenizer)).evaluate(sets)
    assert found.rows["continuation"][0]["gold"] == " the school"
    assert found.rows["number"][0]["generated_text"] == " the the"


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_run_are_what_the_model_adds_to_their_prompts(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    state = SimpleNamespace(parallel=SimpleNamespace(reshard=lambda: None), cursor=SimpleNamespace(step=1))
    world = SimpleNamespace(rank=0, mesh=None)
    run: Any = SimpleNamespace(model=built(tiny.LLAMA, tokenizer.vocab_size), world=world, state=state, folder=tmp_path)
    GenerationSamples(["He went to"], tokenizer, saying(tokenizer)).on_event(Event(kind="evaluate"), run)
    (sample,) = json.loads((tmp_path / "samples" / "step_1.json").read_text())["samples"]
    assert sample == {"prompt": "He went to", "text": " the the"}
