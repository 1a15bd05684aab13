"""What TRL 1.12's losses are of tensors that a few sines give, by TRL's own code. In an environment with trl==1.12.0:

python benchmarks/kits/rlhf/peer_losses.py > tests/kits/rlhf/algorithms/trl_losses.json

The tests compute ours of the same tensors (tests/kits/rlhf/algorithms/test_trl.py).
"""

import collections
import contextlib
import importlib
import inspect
import json
import sys
import textwrap
import types
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

VOCAB, ROWS, LENGTH = 7, 4, 9
PROMPT, ENDS = 3, (9, 6, 8, 5)  # tokens of each prompt, and of each whole row


def table(number: int) -> Tensor:
    """Logits [vocab, vocab] of the next token after each one."""
    grid = torch.arange(1, VOCAB + 1, dtype=torch.float64)
    return torch.sin(grid.unsqueeze(1) * grid * (number + 1) * 0.7) * 1.5


def rows() -> tuple[Tensor, Tensor]:
    """Tokens [rows, length], and which belong to the answers."""
    place = torch.arange(LENGTH)
    tokens = (3 * torch.arange(ROWS).unsqueeze(1) + 2 * place + place * place) % VOCAB
    return tokens, (place >= PROMPT) & (place < torch.tensor(ENDS).unsqueeze(1))


def numbers(number: int, *shape: int) -> Tensor:
    """Anything between -1 and 1."""
    return torch.sin(torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64) * (number + 1.3)).view(shape)


class Stand(types.SimpleNamespace):
    """A trainer's or a model's attributes; what was not set is None."""

    def __getattr__(self, name: str) -> Any:
        return None


def model(number: int, training: bool = True) -> Any:
    """Looks like a model to TRL."""

    class Network:
        def __init__(self) -> None:
            self.training = training

        def __call__(self, input_ids: Tensor, **_: Any) -> Any:
            return Stand(logits=table(number)[input_ids])

    return Network()


def stand(**values: Any) -> Stand:
    """Looks like a trainer to its own methods."""
    accelerator = Stand(
        device="cpu", gather_for_metrics=lambda each: each, gather=lambda each: each, reduce=lambda each, **_: each
    )
    metrics: Any = collections.defaultdict(lambda: collections.defaultdict(list))
    common = {"_metrics": metrics, "_total_train_tokens": 0, "accelerator": accelerator, "args": Stand()}
    policy, reference = model(0), model(1, training=False)
    return Stand(**(common | {"model": policy, "ref_model": reference, "aux_loss_enabled": False} | values))


def found() -> dict[str, float]:
    """The losses by name."""
    load = importlib.import_module
    # The client of a server that nobody starts here; it wants a package that TRL does not name.
    sys.modules["trl.generation.vllm_client"] = MagicMock()
    dpo: Any
    kto: Any
    dpo, kto, grpo, reward = (load(f"trl.trainer.{name}_trainer") for name in ("dpo", "kto", "grpo", "reward"))
    orpo, cpo, ppo = (load(f"trl.experimental.{name}.{name}_trainer") for name in ("orpo", "cpo", "ppo"))
    for module in (dpo, kto):
        module.disable_gradient_checkpointing = lambda *_: contextlib.nullcontext()
    tokens, mask = rows()
    batch = {"input_ids": tokens, "completion_mask": mask.long(), "attention_mask": torch.ones_like(tokens)}
    shared = {"beta": 0.1, "f_divergence_type": "reverse_kl", "loss_weights": [1.0], "ld_alpha": None}
    result = {}
    for name, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):
        trainer = stand(**shared, loss_types=[kind])
        result[name] = dpo.DPOTrainer._compute_loss(trainer, trainer.model, dict(batch), False)
    crossed = tokens.clone()
    crossed[:, PROMPT:] = tokens.roll(1, 0)[:, PROMPT:]
    trainer = stand(
        beta=0.1, loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.5, padding_value=0
    )
    trainer._compute_kl_logps = types.MethodType(kto.KTOTrainer._compute_kl_logps, trainer)
    labelled = {
        "label": torch.tensor([True, False, False, True]),
        "KL_input_ids": crossed,
        "KL_completion_mask": mask.roll(1, 0).long(),
        "KL_attention_mask": torch.ones_like(tokens),
    }
    result["kto"] = kto.KTOTrainer._compute_loss(trainer, trainer.model, batch | labelled, False)
    per_token = table(0)[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1) * mask[:, 1:]
    chosen, rejected = (per_token.sum(-1) / mask.sum(-1)).chunk(2)
    # TRL's odds term alone. The likelihood beside it is the paper's, a mean over each chosen response; TRL's trainer
    # takes one over all tokens of prompts and responses.
    result["orpo"] = -chosen.mean() - orpo.ORPOTrainer.odds_ratio_loss(stand(beta=0.1), chosen, rejected)[0].mean()
    simpo = stand(beta=2.0, simpo_gamma=0.5, loss_type="simpo", label_smoothing=0.0, alpha=0.0)
    result["simpo"] = cpo.CPOTrainer.cpo_loss(simpo, chosen, rejected)[0].mean()
    judge = Stand(training=True)
    scores = numbers(5, ROWS, 1)
    trainer = stand(model=judge, args=Stand(center_rewards_coefficient=0.01))
    inputs = {"attention_mask": torch.ones_like(tokens), "margin": torch.tensor([0.3, 0.0])}
    result["reward"] = reward.RewardTrainer.compute_loss(trainer, lambda **_: Stand(logits=scores), inputs)
    result |= {f"grpo/{kind}": _grpo(grpo, kind, per_token, mask) for kind in ("grpo", "dr_grpo", "bnpo")}
    result |= _ppo(ppo, per_token[:, PROMPT - 1 :], ~mask[:, PROMPT:])
    causal = load("transformers.loss.loss_utils").ForCausalLMLoss
    result["sft"] = causal(table(0)[tokens], torch.where(mask, tokens, -100), VOCAB)
    return {name: float(value) for name, value in result.items()}


def _grpo(module: Any, kind: str, per_token: Tensor, mask: Tensor) -> Tensor:
    """Of answers that were drawn from another table than the one that is trained, beside a third."""
    tokens, _ = rows()
    answers = per_token[:, PROMPT - 1 :]
    logged = [
        table(each)[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1) for each in (2, 1)
    ]
    old, reference = (each[:, PROMPT - 1 :] for each in logged)
    trainer = stand(
        **{"beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": kind, "max_completion_length": 6},
        **{"importance_sampling_level": "token", "top_entropy_quantile": 1.0, "use_vllm": False},
        current_gradient_accumulation_steps=1,
        _get_per_token_logps_and_entropies=lambda *_, **__: (answers, torch.zeros_like(answers), None),
        args=Stand(use_bias_correction_kl=False, delta=None),
    )
    inputs = {
        **{"prompt_ids": tokens[:, :PROMPT], "completion_ids": tokens[:, PROMPT:]},
        **{"prompt_mask": torch.ones(ROWS, PROMPT), "completion_mask": mask[:, PROMPT:].long()},
        **{"advantages": numbers(3, ROWS), "old_per_token_logps": old, "ref_per_token_logps": reference},
    }
    found: Tensor = module.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return found


def _ppo(module: Any, new_logprobs: Tensor, padding_mask: Tensor) -> dict[str, Tensor]:
    """The lines of its `train` between the forward and the backward pass; they stand in no function of their own."""
    lines = inspect.getsource(module.PPOTrainer.train).splitlines()
    begin = next(number for number, line in enumerate(lines) if "vpred = torch.masked_fill" in line)
    end = next(number for number, line in enumerate(lines) if "pg_loss = masked_mean" in line) + 1
    tokens, _ = rows()
    before = table(2)[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]
    names = {
        **{"torch": torch, "masked_mean": module.masked_mean, "micro_batch_inds": slice(None)},
        **{"padding_mask": padding_mask, "padding_mask_p1": padding_mask, "new_logprobs": new_logprobs},
        **{"mb_logprobs": before, "mb_advantage": numbers(3, *before.shape), "mb_return": numbers(6, *before.shape)},
        **{"vpred": numbers(7, *before.shape), "mb_values": numbers(8, *before.shape)},
        "args": Stand(cliprange=0.2, cliprange_value=0.2),
    }
    exec(textwrap.dedent("\n".join(lines[begin:end])), names)
    return {"ppo/policy": names["pg_loss"], "ppo/value": names["vf_loss"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found(), indent=1) + "\n")
