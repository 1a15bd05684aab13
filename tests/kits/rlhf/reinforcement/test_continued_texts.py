"""What environments hear, say and see of a policy is the text of its tokens, whatever the tokenizer does at the
beginning of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kitforge.data.text.continuation import encode_continuation
from kitforge.data.tokenizers.protocol import Tokenizer
from kitforge.inference.engine import Engine
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.rewards import FunctionScorer
from tests.kits.rlhf import runs
from tests.tiny import built
from tests.tokenizer_kinds import tokenizer_of
from tests.trainer import tiny

KINDS = ["prepend and strip", "metaspace always", "sentencepiece", "byte-level"]
PROMPT = "He went"


class Guide:
    """Continues words of its own, and the policy's."""

    played: list[Guide] = []

    def __init__(self) -> None:
        self.heard: list[str] = []
        Guide.played.append(self)

    def reset(self, row: Mapping[str, Any]) -> str:
        return "\nA"

    def step(self, response: str) -> tuple[str, float, bool]:
        self.heard.append(response)
        return ("ok", " school")[len(self.heard) % 2], 1.0, False


def rollouts(
    tokenizer: Tokenizer, roles: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **choices: Any
) -> list[Rollout]:
    """Rollouts of a policy that says " the" until it is stopped."""
    token = tokenizer.encode(f"{PROMPT} the")[len(tokenizer.encode(PROMPT))]
    submit = Engine.submit

    def forced(self: Engine, prompt: Any, options: Any, **more: Any) -> int:
        object.__setattr__(options, "logit_bias", {str(token): 100.0})
        return submit(self, prompt, options, **more)

    monkeypatch.setattr(Engine, "submit", forced)
    model = built(tiny.LLAMA, tokenizer.vocab_size)
    given = {"rollout.stop": (" the the",), "rollout.max_turns": 3, "data.sequence_length": 64, "kl.coef": 0.0}
    rows = [{"prompt": PROMPT}] * 8
    assembly = runs.begin(
        "grpo", None, given | choices, model=model, train_dataset=rows, roles=roles, processor=tokenizer
    )
    return runs.collected(runs.opened(assembly)[0])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_text_of_several_turns_is_what_both_sides_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(kind)
    Guide.played = []
    (first, *_) = rollouts(tokenizer, {"environment": Guide}, monkeypatch)
    said = " the the"
    assert Guide.played[0].heard == [said] * 3
    assert first.completion.text(tokenizer) == f"\nA{said} school{said}ok{said}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_function_reads_what_follows_the_prompt(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tuple(tokenizer.encode_prompt(PROMPT))
    tokens = (*encode_continuation(tokenizer, prompt, " the school"), tokenizer.eos_id)
    answer = PromptCompletion(prompt=prompt, tokens=tokens, is_finished=True, columns={})
    read: list[str] = []

    def score(*, prompts: list[str], completions: list[str]) -> list[float]:
        read.extend((*prompts, *completions))
        return [0.0]

    FunctionScorer(score, tokenizer, EventLoop()).rewards([answer])
    assert read[1] == " the school" and read[0].strip() == PROMPT
