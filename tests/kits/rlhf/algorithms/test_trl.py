"""Ours of the tensors whose losses TRL's own code gave; how is told in `benchmarks/kits/rlhf/peer_losses.py`."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.kits.rlhf.peer_losses import PROMPT, ROWS, numbers, rows, table
from kitforge.kits.rlhf.algorithms.kl import kl_estimate, kl_loss
from kitforge.kits.rlhf.algorithms.losses import (
    ClipOptions,
    LossAggregation,
    aggregate,
    loss_denominator,
    policy_loss,
    value_loss,
)
from kitforge.kits.rlhf.algorithms.preference_losses import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    logratio_margin,
    orpo_loss,
    pairwise_loss,
    simpo_loss,
)

THEIRS = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
TOKENS, ANSWERS = rows()
MASK = ANSWERS[:, PROMPT:]
LENGTHS = MASK.sum(-1)
# TRL rounds these to fp32 whatever it is given. Of orpo only the odds term is its own.
ROUNDED = {"orpo": 1e-6, "sft": 1e-6}


def log_probs(number: int, tokens: Tensor = TOKENS) -> Tensor:
    """Of every token of the answers, also of what fills their rows."""
    every = table(number)[tokens[:, :-1]].log_softmax(-1)
    return every.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]


def whole(number: int, tokens: Tensor = TOKENS, mask: Tensor = MASK) -> Tensor:
    return torch.where(mask, log_probs(number, tokens), 0.0).sum(-1)


def kto(rows: slice = slice(None)) -> Tensor:
    tokens, mask = TOKENS[rows], MASK[rows]
    crossed = torch.cat([tokens[:, :PROMPT], tokens.roll(1, 0)[:, PROMPT:]], dim=-1), mask.roll(1, 0)
    baseline = (whole(0, *crossed) - whole(1, *crossed)).mean()
    good = torch.tensor([True, False, False, True])[rows]
    losses = kto_loss(whole(0, tokens, mask) - whole(1, tokens, mask), good, baseline, 0.1)
    return (losses * torch.where(good, 1.5, 0.5)).mean()


def groups(mode: LossAggregation) -> Tensor:
    """TRL's k3 is differentiated as it stands, as it should not be; its value is that of the estimate."""
    gains = numbers(3, ROWS).unsqueeze(-1)
    losses, _ = policy_loss(log_probs(0), log_probs(2), gains, ClipOptions())
    losses = losses + 0.04 * kl_estimate(log_probs(0), log_probs(1), "k3")
    return aggregate(losses, MASK, mode, loss_denominator(MASK, mode, longest=6))


def critic() -> Tensor:
    values, before, wanted = (numbers(each, *MASK.shape) for each in (7, 8, 6))
    return aggregate(value_loss(values, before, wanted, 0.2), MASK, "token-mean", MASK.sum())


def actor() -> Tensor:
    losses, _ = policy_loss(log_probs(0), log_probs(2), numbers(3, *MASK.shape), ClipOptions())
    return aggregate(losses, MASK, "token-mean", MASK.sum())


def sft() -> Tensor:
    return aggregate(-log_probs(0), MASK, "token-mean", MASK.sum())


def ours() -> dict[str, Tensor]:
    policy, reference = whole(0).chunk(2), whole(1).chunk(2)
    means, frozen = (whole(0) / LENGTHS).chunk(2), (whole(1) / LENGTHS).chunk(2)
    return {
        "dpo": dpo_loss(logratio_margin(*policy, *reference), 0.1).mean(),
        "ipo": ipo_loss(logratio_margin(*means, *frozen), 0.1).mean(),
        "kto": kto(),
        "orpo": (-means[0] + 0.1 * orpo_loss(*means)).mean(),
        "simpo": simpo_loss(*means, beta=2.0, gamma=0.5).mean(),
        "reward": pairwise_loss(*numbers(5, ROWS).chunk(2), torch.tensor([0.3, 0.0]), 0.01).mean(),
        "grpo/grpo": groups("seq-mean-token-mean"),
        "grpo/dr_grpo": groups("constant"),
        "grpo/bnpo": groups("token-mean"),
        "ppo/policy": actor(),
        "ppo/value": critic(),
        "sft": sft(),
    }


@pytest.mark.parametrize("name", THEIRS)
def test_a_loss_is_theirs_on_the_same_tensors(name: str) -> None:
    assert ours()[name].item() == pytest.approx(THEIRS[name], abs=ROUNDED.get(name, 1e-12))


def test_where_theirs_is_wrong_ours_is_another() -> None:
    # k3 as a plain loss has TRL's value and another gradient; ours is weighed by the ratio to the policy that drew.
    weighed = kl_loss(log_probs(0), log_probs(1), "k3", rollout_logprobs=log_probs(2))
    assert not torch.allclose(weighed, kl_estimate(log_probs(0), log_probs(1), "k3"))
    # A baseline of each micro-batch of two, which is what TRL's KTO takes, gives another loss than that of all four.
    alone = [kto(slice(0, 2)), kto(slice(2, 4))]
    assert abs(float(sum(alone)) / 2 - THEIRS["kto"]) > 1e-4
