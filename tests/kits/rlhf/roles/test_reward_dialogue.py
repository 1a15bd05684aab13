"""A reward model with a tokenizer of its own reads the dialogue that the policy saw."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.data.chat.rows import with_open_end
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, Tokenizer, load_tokenizer
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.rewards import scorer_of
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer.run_folder import Run
from tests.data.chat.cases import TOOLS, assistant, save_tokenizer, user
from tests.kits.rlhf import runs
from tests.trainer import tiny

TEMPLATE = (
    "{% if tools %}[T{{ tools | length }}]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}
BEGUN = [user("What is it?"), assistant("It is")]
ROWS: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {
    "system": ({"system": "Be kind.", "prompt": "Hello"}, [SYSTEM, user("Hello")], {}),
    "history": ({"history": [["Hi", "Yes"]], "prompt": "Hello"}, [user("Hi"), assistant("Yes"), user("Hello")], {}),
    "both": (
        {"system": "Be kind.", "history": [["Hi", "Yes"]], "prompt": [user("Hello")]},
        [SYSTEM, user("Hi"), assistant("Yes"), user("Hello")],
        {},
    ),
    "begun": ({"prompt": BEGUN}, BEGUN, {}),
    "dialogue in a text": ({"prompt": "\n\nHuman: Hello\n\nAssistant: It is"}, [user("Hello"), BEGUN[1]], {}),
    "messages in JSON": ({"prompt": '[{"role": "user", "content": "Hello"}]'}, [user("Hello")], {}),
    "tools": ({"prompt": [user("Hello")], "tools": TOOLS}, [user("Hello")], {"tools": TOOLS}),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("own"), "bytes", TEMPLATE, eos_token="<|im_end|>"))


def judge_of(own: Tokenizer) -> Run:
    config = config_of({**tiny.LLAMA, "vocab_size": own.vocab_size, "max_length": 256})
    model = ValueHeadModel(build(config, device=torch.device("cpu"), seed=3))
    model.reset_head(1)
    return Run(folder=Path(), model=model, processor=own, metrics={})


@pytest.mark.parametrize("name", ROWS)
def test_the_reward_model_reads_what_the_policy_saw(
    own: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row, messages, inputs = ROWS[name]
    seen: list[list[int]] = []
    original = ValueHeadModel.scores_at

    def spy(self: ValueHeadModel, tokens: Tensor, ends: Tensor) -> Tensor:
        seen.extend(each[: int(end) + 1].tolist() for each, end in zip(tokens, ends, strict=True))
        return original(self, tokens, ends)

    monkeypatch.setattr(ValueHeadModel, "scores_at", spy)
    choices = {"data.sequence_length": 200, "trainer.max_steps": 1, "data.eval_fraction": 0.0}
    policy = load_tokenizer(save_tokenizer(tmp_path, "spaces", TEMPLATE, eos_token="<|im_end|>"))
    network = build(
        config_of({**tiny.LLAMA, "vocab_size": policy.vocab_size, "max_length": 256}),
        device=torch.device("cpu"),
        seed=1,
    )
    given = {"processor": policy, "model": network, "train_dataset": [row] * 8, "roles": {"reward": judge_of(own)}}
    runs.finish(runs.begin("grpo", tmp_path / "run", choices, **given))
    # The border to the reply may lie within a token.
    begins = own.decode(template_of(own).prompt(with_open_end(messages), **inputs)).rstrip()
    assert seen and all(own.decode(each).startswith(begins) and own.decode(each) != begins for each in seen)


def test_the_reply_goes_on_with_the_message_that_the_prompt_has_begun(own: Tokenizer) -> None:
    policy = ByteTokenizer()
    prompt = tuple(with_open_end(BEGUN))
    asked = template_of(policy).prompt(prompt)
    tokens = (*policy.encode(" blue."), policy.eos_id)
    answer = PromptCompletion(
        prompt=tuple(asked), tokens=tokens, is_finished=True, columns={"prompt": BEGUN}, prompt_messages=prompt
    )
    whole = [user("What is it?"), assistant("It is blue.")]
    assert answer.messages(policy) == whole
    for given in (
        answer,
        PromptCompletion(prompt=tuple(asked), tokens=tokens, is_finished=True, columns={"prompt": BEGUN}),
    ):
        judge = judge_of(own)
        wanted = template_of(own).training(whole, prompt=prompt).tokens
        with torch.no_grad():
            score = float(judge.model(torch.tensor([wanted]))[0, -1])
        assert scorer_of(judge, policy).checked_rewards([given])[0].score == pytest.approx(score, abs=1e-6)


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{# <think> </think> <tool_call> </tool_call> tools #}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_reward_may_ask_for_the_messages_of_prompt_and_completion(has_tools: bool, tmp_path: Path) -> None:
    policy = load_tokenizer(save_tokenizer(tmp_path, "bytes", THINKING, eos_token="<|im_end|>"))
    seen: dict[str, Any] = {}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nHm.\n</think>\n\nSo.\n{call}"
    prompt = (user("Hello"),)
    tokens = tuple(policy.encode(text)) + (policy.eos_id,)
    given = PromptCompletion(
        prompt=tuple(template_of(policy).prompt(prompt)),
        tokens=tokens,
        is_finished=True,
        columns={},
        prompt_messages=prompt,
        prompt_inputs={"tools": TOOLS} if has_tools else {},
    )

    def reward(*, prompt_messages: Any, completion_messages: Any, **others: Any) -> list[float]:
        seen.update(others, prompt=prompt_messages, completion=completion_messages)
        return [1.0]

    scorer_of(reward, policy).checked_rewards([given])
    assert seen["prompt"] == [list(prompt)]
    ((reply,),) = seen["completion"]
    assert (reply["role"], reply["reasoning_content"]) == ("assistant", "Hm.")
    if has_tools:
        assert reply["content"].strip() == "So."
        (found,) = reply["tool_calls"]
        assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == ("add", {"a": 1})
    else:
        # Without tools a reply that looks like a call is text.
        assert "tool_calls" not in reply
        assert call in reply["content"]
    scorer_of(lambda **others: [float("completion_messages" in others)], policy).checked_rewards([given])
    assert seen["completions"] == [text]
