"""Runs of the stages over a few rows, small enough to be made by the dozen."""

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.types import Cursor, MicroBatch
from kitforge.kits.kit import RunAssembly
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer.run_folder import train
from kitforge.trainer.task import Task
from tests.trainer import tiny

DEMONSTRATIONS = [{"prompt": f"Q{n % 5}: ", "completion": "yes " * (n % 4 + 1)} for n in range(24)]
PAIRS = [
    {"prompt": f"Q{n % 5}: ", "chosen": "yes" * (n % 3 + 1), "rejected": "no" * (n % 2 + 1), "source": "ab"[n % 2]}
    for n in range(24)
]
JUDGED = [
    {"prompt": f"Q{n % 5}: ", "completion": ("no", "yes")[n % 2] * (n % 3 + 1), "label": n % 2 == 1} for n in range(24)
]
PROMPTS = [{"prompt": f"Q{n % 5}{'?' * (n % 3)}: ", "answer": str(n)} for n in range(24)]
ROWS = {"sft": DEMONSTRATIONS, "kto": JUDGED} | dict.fromkeys(("reward", "dpo", "ipo", "orpo", "simpo"), PAIRS)
SHAPED: dict[str, dict[str, Any]] = {
    "ipo": {"preference.loss": "ipo"},
    "orpo": {"preference.loss": "orpo"},
    "simpo": {"preference.loss": "simpo"},
    "ppo": {"rl.whiten_advantages": True, "kl.controller": "adaptive", "kl.horizon": 50},
    "grpo": {
        "rl.advantage": "grpo",
        "rl.num_generations": 4,
        "rl.loss_aggregation": "seq-mean-token-mean",
        "kl.apply_to": "loss",
        "kl.estimator": "k3",
    },
    "dr_grpo": {"rl.advantage": "dr_grpo", "rl.num_generations": 4, "rl.loss_aggregation": "constant"},
    "dapo": {
        "rl.advantage": "grpo",
        "rl.num_generations": 4,
        "rl.filter_zero_variance_groups": True,
        "rl.max_num_gen_batches": 3,
        "rl.overlong_buffer": 3,
        "rl.clip_ratio_high": 0.28,
        "kl.apply_to": "loss",
    },
    "rloo": {"rl.advantage": "rloo", "rl.num_generations": 4, "rl.loss_aggregation": "seq-mean-token-sum"},
    "reinforce_pp": {"rl.advantage": "reinforce", "rl.whiten_advantages": True},
    "distill": {"rl.advantage": "grpo", "rl.num_generations": 4, "kl.coef": 0.0},
    "online_dpo": {"rl.advantage": "dr_grpo", "rl.num_generations": 3, "kl.coef": 0.0},
}
# Tasks on rollouts with a loss of their own.
ON_POLICY = ("distill", "online_dpo")
RL = ("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
OPTIONS: dict[str, Any] = {
    "data.sequence_length": 32,
    "data.batch_size": 4,
    "data.eval_fraction": 0.2,
    "trainer.max_steps": 4,
    "trainer.progress": False,
    "optimizer.learning_rate": 1e-2,
    "device": "cpu",
}
# For runs whose folders nobody looks at.
_SCRATCH = tempfile.TemporaryDirectory()
_NUMBERS = itertools.count()
ROUNDS: dict[str, Any] = {"rl.prompts_per_rollout": 4, "rollout.max_new_tokens": 6}


def letters(*, completion_tokens: list[list[int]]) -> list[float]:
    """Something that differs from answer to answer."""
    return [sum(tokens) % 17 / 17 for tokens in completion_tokens]


def network(
    dtype: torch.dtype = torch.float32, family: Mapping[str, Any] = tiny.LLAMA, *, seed: int = 3, padding: int = 0
) -> nn.Module:
    config = config_of({**family, "vocab_size": ByteTokenizer.vocab_size + padding})
    return build(config, device=torch.device("cpu"), seed=seed).to(dtype)


class Noisy(nn.Module):
    """Somebody's own network, whose dropout nobody tells when to be silent."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.network = cast(Decoder, inner or network(torch.float64))
        self.dropout = nn.Dropout(0.3)
        self.geometry, self.kernels = self.network.geometry, self.network.kernels

    @property
    def head_weight(self) -> Tensor:
        return self.network.head_weight

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        return cast(Tensor, self.dropout(self.network.hidden(tokens, context)))

    def head(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        return self.head(self.hidden(tokens, context))


def roles_of(stage: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The roles that a stage needs."""
    if stage == "distill":
        return {"teacher": network(dtype, seed=4)}
    return {"reward": letters} if stage in (*RL, *ON_POLICY) else {}


def begin(
    stage: str, folder: Path | None = None, choices: Mapping[str, Any] | None = None, **inputs: Any
) -> RunAssembly[Any, Any]:
    """A run of the stage, ready to start; over `rows`, from a small network, unless told otherwise."""
    values = (
        OPTIONS
        | (ROUNDS if stage in (*RL, *ON_POLICY) else {})
        | SHAPED.get(stage, {})
        | {"task": stage}
        | dict(choices or {})
    )
    values["output_dir"] = f"{_SCRATCH.name}/{next(_NUMBERS)}" if folder is None else str(folder)
    given: dict[str, Any] = {
        "processor": ByteTokenizer(),
        "model": network(),
        "train_dataset": ROWS.get(stage, PROMPTS),
    }
    model = (given | inputs)["model"]
    given["roles"] = roles_of(stage, torch.float32 if model is None else next(model.parameters()).dtype)
    options = TASKS[stage].read_options(tiny.nested(values))
    return TASKS[stage].assemble(
        options, Inputs(**(given | inputs)), Rendezvous.open(options.parallel, options.device, options.num_ranks)
    )


def finish(assembly: RunAssembly[Any, Any]) -> dict[str, float]:
    """Train to the end."""
    return train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def first_step(task: Task, model: nn.Module) -> list[MicroBatch]:
    return next(iter(task.steps(model, Cursor())))


def opened(assembly: RunAssembly[Any, Any]) -> tuple[Any, Any, list[MicroBatch]]:
    """Task and network of a run, and the micro-batches of its first step."""
    task, model = assembly.loop.task, assembly.loop.model
    return task, model, first_step(task, model)


def collected(task: Any) -> list[Rollout]:
    """The completions of the latest round, in the order in which they were drawn."""
    return cast(PolicyGradientTask, task).collected[1]  # type: ignore[index]


def gradient(assembly: RunAssembly[Any, Any]) -> Tensor:
    """Of the first step, all parameters laid end to end, as the loop would have it."""
    task, model, step = opened(assembly)
    weight = 1 / max(float(task.count(step)["loss"]), 1.0)
    for micro_batch in step:
        (task.loss(model, micro_batch)["loss"] * weight).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
