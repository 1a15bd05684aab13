"""Greedy continuations equal those of Hugging Face's `generate` on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kitforge.inference.generate import generate
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.folder import save
from tests.core.nn.networks import CONFIGS, build

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
NEW_TOKENS = 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "linear", "yarn", "llama3", "glm", "glm4"])
def test_greedy_texts_equal_those_of_generate(tmp_path: Path, name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float32).requires_grad_(False)
    save(model, tmp_path, extra={"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    outputs = generate(model, PROMPTS, SamplingOptions(max_new_tokens=NEW_TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        texts = peer.generate(tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert output == texts[0, len(prompt) :].tolist()
