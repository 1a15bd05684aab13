"""The rows that the teacher of on-policy distillation reads: prompts of its own may come before the completions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kitforge.data.chat.datasets import PromptExample
from kitforge.data.chat.template import BegunMessage, ChatTemplate
from kitforge.foundation.errors import DataError
from kitforge.kits.rlhf.reinforcement.rollout_batch import last_index, prompt_bytes

TEACHER_PROMPT = "teacher_prompt"  # a column


def with_teacher_prompts(
    prompts: Sequence[PromptExample], read: Callable[[], Iterable[PromptExample]], template: ChatTemplate
) -> list[PromptExample]:
    """The prompts with those that the teacher reads instead, from the column `teacher_prompt`; unchanged without it.
    Raises DataError where only some rows have one, or where it opens the reply in another way."""
    has = [each.columns.get(TEACHER_PROMPT) is not None for each in prompts]
    if not any(has):
        return list(prompts)
    others = list(read()) if all(has) else []
    if len(others) != len(prompts):
        got = f"{len(others) or sum(has)} of {len(prompts)} rows with a usable {TEACHER_PROMPT}"
        raise DataError("the teacher has no prompt for some rows", got=got, expected=f"a {TEACHER_PROMPT} in every row")
    found = []
    for number, (own, other) in enumerate(zip(prompts, others, strict=True), start=1):
        if _opening(own, template) != _opening(other, template):
            raise DataError(
                f"{TEACHER_PROMPT} of row {number} changes the completion",
                got="prompts that open the reply in different ways",
                expected="messages in both columns or text in both, and the same begun reply",
                fix="write both prompts in the same form",
            )
        found.append(replace(own, teacher_tokens=other.tokens))
    return found


def _opening(prompt: PromptExample, template: ChatTemplate) -> tuple[bool, Mapping[str, Any], tuple[int, ...]]:
    """Whether it is a chat, the message that it begins, and the tokens that open the reply."""
    if prompt.messages is None:
        return False, {}, ()
    last = prompt.messages[-1]
    if isinstance(last, BegunMessage):
        return True, dict(last), ()
    return True, {}, prompt.tokens[len(template.tokens(prompt.messages, **prompt.inputs)) :]


class TeacherRows:
    """The rows that the teacher reads: those of the policy, or its own prompts with the same completions."""

    def __init__(self, prompts: Iterable[PromptExample], room: int, pad_id: int) -> None:
        """Raises DataError for two teacher's prompts to one prompt, and for one of more than `room` tokens, which
        leaves none for a completion."""
        self._pad_id = pad_id
        self._prompts: dict[bytes, tuple[int, ...]] = {}
        for each in (each for each in prompts if each.teacher_tokens):
            (key,) = prompt_bytes([each.tokens])
            if self._prompts.setdefault(key, each.teacher_tokens) != each.teacher_tokens:
                expected = "one for each prompt"
                raise DataError(f"two rows with the same prompt have another {TEACHER_PROMPT}", expected=expected)
            if len(each.teacher_tokens) > room:
                got, expected = f"{len(each.teacher_tokens)} tokens", f"at most {room} before rollout.max_new_tokens"
                raise DataError(f"a {TEACHER_PROMPT} is too long for the teacher", got=got, expected=expected)

    def of(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T'] and the mask of positions [B, T'], in the order of those in the policy's tokens and mask
        [B, T]."""
        if not self._prompts:
            return tokens, mask
        rows, masks = [], []
        for own, is_counted in zip(tokens, mask, strict=True):
            if not is_counted.any():
                continue
            first = int(is_counted.int().argmax()) + 1
            (key,) = prompt_bytes([own[:first].numpy()])
            prompt = torch.tensor(self._prompts[key])
            end = last_index(is_counted)
            rows.append(torch.cat([prompt, own[first:end]]))
            masks.append(torch.cat([torch.zeros(len(prompt) - 1, dtype=torch.bool), is_counted[first - 1 : end]]))
        if not rows:
            return tokens, mask
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(rows, True, self._pad_id), pad(masks, True, False)
