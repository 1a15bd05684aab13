"""Reward models from and to Hugging Face folders: the logits of transformers, and ours back to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kitforge.api import load_model, pipeline, save_model
from kitforge.cli.main import run
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ModelError
from kitforge.kits.registry import recorded_task
from kitforge.kits.rlhf.roles.model_loading import is_reward_model, load_reward_model
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.trainer.run_folder import Run
from tests.kits.rlhf import runs
from tests.trainer import tiny

CPU = torch.device("cpu")
PAD = 257
ROPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": ROPED,
    "Qwen2": ROPED,
    "Qwen3": ROPED | {"head_dim": 16},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
TEXTS = ([72, 101, 256], [72, 105, 33, 33, 80, 256], [90])


def peer(name: str, folder: Path, **choices: Any) -> Any:
    """A small random model of transformers that gives scores, in a folder of its own."""
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(1)
    given = {"vocab_size": 258, "num_labels": 1, "pad_token_id": PAD, "tie_word_embeddings": False} | choices
    model = getattr(transformers, f"{name}ForSequenceClassification")(config(**SIZES[name], **given)).eval()
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return model


@torch.no_grad()
def their_logits(model: Any, texts: Any = TEXTS) -> Tensor:
    """Of texts that are filled up on the right."""
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[PAD] * (width - len(text))] for text in texts])
    return model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]


@torch.no_grad()
def our_logits(model: ValueHeadModel, texts: Any = TEXTS) -> Tensor:
    rows = [torch.tensor([text]) for text in texts]
    return torch.cat([model.scores_at(row, torch.tensor([row.shape[1] - 1])) for row in rows])


@pytest.mark.parametrize("name", SIZES)
def test_a_folder_of_transformers_gives_the_logits_that_it_gives_there(name: str, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path)
    assert is_reward_model(tmp_path) and recorded_task(tmp_path) == "reward"
    model = load_model(tmp_path, "cpu")
    assert isinstance(model, ValueHeadModel)
    torch.testing.assert_close(our_logits(model), their_logits(theirs), rtol=0, atol=2e-6)
    score = pipeline("reward", tmp_path)({"prompt": "H", "completion": "e"})[0]["score"]
    assert score == pytest.approx(float(their_logits(theirs)[0]), abs=2e-6)


def test_a_fill_token_that_ends_a_text_is_passed_over_as_there(tmp_path: Path) -> None:
    theirs = peer("Llama", tmp_path, pad_token_id=256)
    model, text = load_reward_model(tmp_path, CPU), [72, 105, 256, 33, 256, 256]
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([text])).logits[:, 0]
    torch.testing.assert_close(our_logits(model, [text]), wanted, rtol=0, atol=2e-6)
    assert not torch.equal(our_logits(model, [text]), model(torch.tensor([text]))[:, -1])


@pytest.mark.parametrize("family", [tiny.LLAMA, tiny.GPT2], ids=["llama", "gpt2"])
def test_a_reward_run_is_exported_with_the_logits_that_it_has(family: Any, tmp_path: Path) -> None:
    choices = {"lora.rank": 2} if family is tiny.LLAMA else {}
    runs.finish(runs.begin("reward", tmp_path / "rm", choices, model=runs.network(family=family)))
    assert run(["export", f"checkpoint={tmp_path / 'rm'}", f"output_dir={tmp_path / 'folder'}"]) == 0
    page = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert page["architectures"][0].endswith("ForSequenceClassification") and page["pad_token_id"] == PAD
    ours, again = load_reward_model(tmp_path / "rm", CPU), load_reward_model(tmp_path / "folder", CPU)
    assert float(ours.deviation.detach()) != 1.0
    assert torch.equal(ours.normalized(our_logits(ours)), again.normalized(our_logits(again)))
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "folder", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    # Heads of transformers have no bias.
    wanted = our_logits(ours) - ours.score.bias.detach()
    torch.testing.assert_close(their_logits(theirs.eval()), wanted, rtol=0, atol=2e-6)


def test_a_run_in_memory_is_exported_from_its_folder(tmp_path: Path) -> None:
    begun = runs.begin("reward", tmp_path / "rm")
    metrics = runs.finish(begun)
    made = Run(folder=tmp_path / "rm", model=begun.loop.model, processor=ByteTokenizer(), metrics=metrics)
    save_model(made, tmp_path / "folder", dtype="bfloat16")
    assert load_reward_model(tmp_path / "folder", CPU).score.weight.dtype == torch.float32


def test_a_folder_serves_as_reward_and_as_what_training_begins_with(tmp_path: Path) -> None:
    peer("Qwen3", tmp_path / "judge")
    found = runs.finish(runs.begin("grpo", None, {"reward": str(tmp_path / "judge"), "trainer.max_steps": 1}, roles={}))
    assert found["reward"] != 0
    choices = {"checkpoint": str(tmp_path / "judge"), "trainer.max_steps": 1}
    begun = runs.begin("reward", None, choices, model=None)
    assert "loss" in runs.finish(begun)


def test_a_model_of_several_labels_and_one_that_writes_are_refused(tmp_path: Path) -> None:
    peer("Llama", tmp_path / "two", num_labels=2)
    with pytest.raises(ModelError, match=r"(?s)does not hold a reward model.*2 scores a text.*num_labels=1"):
        load_reward_model(tmp_path / "two", CPU)
    save_model(runs.network(), tmp_path / "writer", ByteTokenizer())
    assert not is_reward_model(tmp_path / "writer")
    with pytest.raises(ModelError, match=r"(?s)no reward model here.*ForSequenceClassification"):
        load_reward_model(tmp_path / "writer", CPU)
