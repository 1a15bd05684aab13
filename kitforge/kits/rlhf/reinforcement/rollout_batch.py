"""Rollouts: completions with their log-probs, values, rewards and advantages. S completions, T tokens.

Tokens of the engine are trained on unchanged, without decoding and encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.data.chat.datasets import PromptExample, TokenizedExample
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation import seed as seeds
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import IGNORED, MicroBatch
from kitforge.inference.engine import Engine
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine
from kitforge.kits.rlhf.batching import pad_examples
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel

# Those of a completion that are kept, besides its prompt.
_KEPT_FIELDS = ("tokens", "loss_mask", "is_finished", "is_stopped", "is_turn_ended", "turn_lengths", "observations")
# Fields that earlier files lack.
_LATER_FIELDS = {"is_turn_ended", "turn_lengths", "observations", "num_tool_errors"}
# Fields per generated token.
_TOKEN_FIELDS = ("logprobs", "ref_logprobs", "values", "old_logprobs")
# The dtypes of token fields in a checkpoint; scores only if they are token rewards.
_STORED_DTYPES = {
    "prompt_tokens": torch.int64,
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    **dict.fromkeys(("score", *_TOKEN_FIELDS), torch.float64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion. `values` and `ref_logprobs` are empty without a critic or a reference model."""

    completion: PromptCompletion
    prompt_index: int  # index of the prompt in the rollout batch
    logprobs: tuple[float, ...]  # per generated token, under the sampling distribution
    # Reward of the completion or of each generated token; None: not scored.
    score: float | tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    old_logprobs: tuple[float, ...] = ()  # log-probs of the trainer, if they are recomputed
    rewards: Mapping[str, float] = field(default_factory=dict)  # rewards by name
    turn_rewards: tuple[float, ...] = ()  # rewards of an environment by turn
    failure: str | None = None  # error of the last step of an environment
    has_timed_out: bool = False  # the step timed out
    num_tool_calls: int | None = None  # in the episode; None without tools
    num_tool_failures: int = 0  # failed calls: not runnable, raised or timed out
    num_tool_errors: int = 0  # of these, the calls whose tool raised

    @property
    def reward(self) -> float:
        """The reward of the whole completion."""
        assert self.score is not None
        return sum(self.score) if isinstance(self.score, tuple) else self.score

    @property
    def kl(self) -> float | None:
        """The log-ratio of policy and reference summed over the completion; None without a reference."""
        if not self.ref_logprobs:
            return None
        return sum(
            own - other for own, other in zip(self.old_logprobs or self.logprobs, self.ref_logprobs, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values, bit for bit; without the columns of the prompt row."""
        completion = {name: getattr(self.completion, name) for name in _KEPT_FIELDS}
        own = {name: getattr(self, name) for name in _own_fields()}
        return {"prompt_tokens": self.completion.prompt, **completion, **own, "rewards": dict(self.rewards)}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Rollout:
        """The inverse of `to_dict`. Raises KeyError without a field, but for `_LATER_FIELDS`."""
        given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in plain.items()}
        missing = _LATER_FIELDS - given.keys()
        of_completion = {name: given[name] for name in _KEPT_FIELDS if name not in missing}
        completion = PromptCompletion(prompt=given["prompt_tokens"], columns={}, **of_completion)
        return cls(completion=completion, **{name: given[name] for name in _own_fields() if name not in missing})


def _own_fields() -> list[str]:
    return [each.name for each in dataclasses.fields(Rollout) if each.name != "completion"]


def to_state(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """State of rollouts for a checkpoint: each token field as one tensor of all completions with their lengths; the
    rest as JSON values."""
    rows = [each.to_dict() for each in rollouts]
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, dtype in _STORED_DTYPES.items():
        held = [row.pop(name) if isinstance(row[name], tuple) else () for row in rows]
        values = [value for each in held for value in each]
        lengths = torch.tensor([len(each) for each in held], dtype=torch.int64)
        tensors[name] = {"values": torch.tensor(values, dtype=dtype), "lengths": lengths}
    return {"rows": rows, "tensors": tensors}


def from_state(state: dict[str, Any]) -> list[Rollout]:
    """The inverse of `to_state`."""
    rows = [dict(row) for row in state["rows"]]
    for name, stored in state["tensors"].items():
        for row, values in zip(rows, stored["values"].split(stored["lengths"].tolist()), strict=True):
            row.setdefault(name, values.tolist())
    return [Rollout.from_dict(row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """All completions of a rollout batch as tensors, on every rank.

    Grids are [S, T]: the value of the token at i + 1 is at position i, which predicts it.
    """

    tokens: Tensor
    targets: Tensor
    old_logprobs: Tensor  # log-probs under the rollout policy
    importance_weights: Tensor  # importance weights of trainer and rollout policy
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    keep_mask: Tensor  # [S], whether a completion is trained on
    metrics: dict[str, float]  # of the rollout batch

    @property
    def mask(self) -> Tensor:
        """True [S, T] where a token was generated."""
        return self.targets != IGNORED

    def prompts(self, rows: Tensor) -> list[bytes]:
        """The `prompt_bytes` of rows: what lies before the first token that was generated."""
        first = self.mask[rows].int().argmax(dim=1) + 1
        return prompt_bytes(self.tokens[row, :end].numpy() for row, end in zip(rows, first.tolist(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors and metrics by name."""
        return {name: getattr(self, name) for name in (*_TENSORS, "metrics")}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> RolloutBatch:
        """The inverse of `to_dict`, in new memory."""
        return cls(metrics=plain["metrics"], **{name: plain[name].clone() for name in _TENSORS})


_TENSORS = [each.name for each in dataclasses.fields(RolloutBatch) if each.name != "metrics"]
_GRIDS = [name for name in _TENSORS if name != "keep_mask"]


def generate_rollouts(
    engine: Engine,
    prompts: Sequence[tuple[int, PromptExample]],
    options: InferenceOptions,
    num_samples: int,
    name: str,
    *,
    tokenizer: Tokenizer,
) -> list[Rollout]:
    """`num_samples` completions of each numbered prompt. Sampling noise is keyed by `name` and the number of the
    prompt, so that completions depend neither on ranks nor on other prompts."""
    requests: dict[int, tuple[int, PromptExample]] = {}
    # Stop strings need the text; they change neither the tokens before their end nor the log-probs.
    texts = TextEngine(engine, tokenizer) if options.stop else engine
    for number, prompt in prompts:
        key = seeds.key(name, number)
        request = texts.submit(prompt.tokens, options, num_samples=num_samples, key=key)
        requests[request] = (number, prompt)
    tokens: dict[tuple[int, int], list[int]] = {}
    log_probs: dict[tuple[int, int], list[float]] = {}
    ended: dict[tuple[int, int], bool] = {}
    stopped: set[tuple[int, int]] = set()
    while engine.has_work:
        for output in texts.step():
            if output.error is not None:
                raise output.error
            sample_key = (output.request, output.sample)
            tokens.setdefault(sample_key, []).extend(output.tokens)
            log_probs.setdefault(sample_key, []).extend(output.logprobs)
            ended[sample_key] = output.finish_reason == "stop"
            if isinstance(output, TextDelta) and output.hit_stop_string:
                stopped.add(sample_key)
    return [
        Rollout(
            completion=PromptCompletion(
                prompt=prompt.tokens,
                tokens=tuple(tokens[request, sample]),
                is_finished=ended[request, sample],
                is_stopped=(request, sample) in stopped,
                columns=prompt.columns,
            ),
            prompt_index=number,
            logprobs=tuple(log_probs[request, sample]),
        )
        for request, (number, prompt) in requests.items()
        for sample in range(num_samples)
    ]


def pad_rollouts(rollouts: Sequence[Rollout], pad_id: int) -> dict[str, Tensor]:
    """`tokens` and `targets` [S, T], see `pad_examples`; all generated tokens are targets, EOS included."""
    examples = [
        TokenizedExample(
            tokens=(*each.completion.prompt, *each.completion.tokens),
            loss_mask=(False,) * len(each.completion.prompt)
            + (each.completion.loss_mask or (True,) * len(each.completion.tokens)),
        )
        for each in rollouts
    ]
    return pad_examples(examples, pad_id)


def to_token_grid(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Values of generated tokens as a grid [S, T], 0 elsewhere, in float64."""
    flat = torch.tensor([number for row in rows for number in row], dtype=torch.float64)
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, flat)


def target_logprobs(
    model: nn.Module, tokens: Tensor, targets: Tensor, temperature: float, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the targets [B, T], 0 without a target; `hidden` are the states there, if known."""
    network = cast(CausalLM, model)
    hidden = hidden_at(network, tokens, targets != IGNORED) if hidden is None else hidden
    targets = copy_to(targets, hidden.device)
    mask = targets != IGNORED
    found = network.kernels.linear_log_probs(hidden, network.head_weight, targets[mask], temperature)
    log_probs, entropies = (torch.zeros_like(targets, dtype=each.dtype).masked_scatter(mask, each) for each in found)
    return log_probs, entropies


def token_values(critic: ValueHeadModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Values of the critic before each generated token [B, T], 0 elsewhere."""
    device = critic.score.weight.device
    values = critic(copy_to(tokens, device))
    return torch.where(copy_to(mask, device), values, 0.0)


def slice_batch(batch: RolloutBatch, rows: Tensor) -> dict[str, Tensor]:
    """Some rows of a rollout batch, as wide as the longest; on a rank without rows, one padding row."""
    chosen = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
    width = last_index(batch.mask[chosen].any(0))
    grids = {name: getattr(batch, name)[chosen, :width] for name in _GRIDS}
    is_real = torch.full((len(chosen),), len(rows) > 0)
    return {**grids, "keep_mask": batch.keep_mask[chosen] & is_real, "is_real": is_real}


def prompt_bytes(prompts: Iterable[ArrayLike]) -> list[bytes]:
    """The tokens of prompts, as `shared_prompt_batches` takes them."""
    return [np.asarray(each, dtype=np.int64).tobytes() for each in prompts]


def last_index(mask: Tensor) -> int:
    """The length of a row, or of the longest of several, from its loss mask [T] over predicted positions."""
    return int(mask.nonzero().max()) + 2 if mask.any() else 1


def loss_mask(micro_batch: MicroBatch) -> Tensor:
    """True [B, T] at the tokens that are trained on."""
    mask: Tensor = (micro_batch["targets"] != IGNORED) & micro_batch["keep_mask"].unsqueeze(-1)
    return mask
