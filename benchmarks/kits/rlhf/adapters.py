"""What PPO's four roles hold: as networks of their own, and as adapters and heads on one base.

python -m benchmarks.kits.rlhf.adapters [--model gpt2_small] [--rank 8]

Counted are weights, and for those that are trained gradients and both moments of AdamW; activations are not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any, cast

import torch
from torch import nn

from kitforge.api import composed
from kitforge.core.parallel.lobby import Lobby
from kitforge.data.tokenizer import ByteTokenizer
from kitforge.kits.rlhf.build import STAGES
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.stages import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.folder import build


def state_bytes(*networks: nn.Module) -> int:
    """Of all weights, each once, with what training keeps beside those that learn."""
    every = {each.data_ptr(): each for network in networks for each in network.parameters()}
    return sum(each.nbytes * (4 if each.requires_grad else 1) for each in every.values())


def roles(shape: dict[str, Any], rank: int) -> int:
    """State bytes of policy, critic, reward model and reference, as the stages make them."""
    policy = build(config_of(shape), device=torch.device("cpu"), seed=0)
    common = {"device": "cpu", "data": {"sequence_length": 128, "validation": 0.0}, "adapter": {"rank": rank}}
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    found: list[nn.Module] = []
    for stage in ("reward", "ppo"):
        values = common | {"task": stage, "output_dir": tempfile.mkdtemp(), "trainer": {"max_steps": 1}}
        options = STAGES[stage].read_options(values)
        given = {"reward": found[0]} if found else {}
        inputs = Inputs(tokenizer=ByteTokenizer(), model=policy, train_dataset=rows, roles=given)
        found.append(STAGES[stage].assemble(options, inputs, Lobby.open(options.parallel, "cpu")).loop.model)
    # By now the reward model is only asked.
    judge = cast(ScalarModel, found[0]).requires_grad_(False)
    return state_bytes(policy.requires_grad_(False), judge, found[1])


def main() -> None:
    """Both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2_small")
    parser.add_argument("--rank", type=int, default=8)
    chosen = parser.parse_args()
    shape = dict(composed("sft", {"model": chosen.model}).values["model"])
    shape = shape | {"vocab_size": shape.get("vocab_size") or ByteTokenizer.vocab_size}
    apart, together = roles(shape, 0), roles(shape, chosen.rank)
    sys.stdout.write(f"four networks: {apart / 1e6:,.1f} MB\none base, rank {chosen.rank}: {together / 1e6:,.1f} MB\n")
    sys.stdout.write(f"{together / apart:.1%}\n")


if __name__ == "__main__":
    main()
