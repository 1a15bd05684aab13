"""What PPO's four roles hold: as networks of their own, and as adapters and heads on one base.

python -m benchmarks.kits.rlhf.adapters [--model gpt2_small] [--rank 8]

State bytes are those of weights and, where they are trained, of gradients and both moments of AdamW; the peak is the
most memory that a process had in it during two rounds of PPO, each in a process of its own. Writes adapters.md.
"""

import datetime
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks.command_line import CommandLine, write_result
from kitforge.composition import compose_config
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.device import describe
from kitforge.kits.kit import RunAssembly
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.loading import build

TABLE = Path(__file__).with_suffix(".md")
SMOKE = {"model": "gpt2_tiny", "rank": 2}


def state_bytes(*networks: nn.Module) -> int:
    """Of all weights, each once, with what training keeps beside those that learn."""
    every = {each.data_ptr(): each for network in networks for each in network.parameters()}
    return sum(each.nbytes * (4 if each.requires_grad else 1) for each in every.values())


def roles(shape: dict[str, Any], rank: int) -> tuple[int, RunAssembly[Any, Any]]:
    """State bytes of policy, critic, reward model and reference, as the stages make them, and the run of PPO."""
    policy = build(config_of(shape), device=torch.device("cpu"), seed=0)
    common = {"device": "cpu", "data": {"sequence_length": 128, "eval_fraction": 0.0}, "lora": {"rank": rank}}
    rounds = {"rl": {"prompts_per_rollout": 8}, "rollout": {"max_new_tokens": 32}}
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    found: list[RunAssembly[Any, Any]] = []
    for stage in ("reward", "ppo"):
        values = common | {"task": stage, "output_dir": tempfile.mkdtemp(), "trainer": {"max_steps": 2}}
        values |= rounds if stage == "ppo" else {}
        options = TASKS[stage].read_options(values)
        given = {"reward": found[0].loop.model} if found else {}
        inputs = Inputs(processor=ByteTokenizer(), model=policy, train_dataset=rows, roles=given)
        found.append(TASKS[stage].assemble(options, inputs, Rendezvous.open(options.parallel, "cpu")))
    # By now the reward model is only asked.
    judge = cast(ValueHeadModel, found[0].loop.model).requires_grad_(False)
    return state_bytes(policy.requires_grad_(False), judge, found[1].loop.model), found[1]


def peak(model: str, rank: int) -> int:
    """Bytes, of a process that runs two rounds."""
    command = [sys.executable, "-m", __spec__.name, "--model", model, "--rank", str(rank), "--peak"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Both, and their ratio."""
    parser = CommandLine(__doc__)
    parser.add_argument("--model", default="gpt2_small")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--peak", action="store_true", help="run two rounds and print the bytes that were needed")
    chosen = parser.parse(SMOKE, globals())
    torch.set_num_threads(1)
    shape = dict(compose_config("sft", {"model": chosen.model}).values["model"])
    shape = shape | {"vocab_size": shape.get("vocab_size") or ByteTokenizer.vocab_size}
    if chosen.peak:
        _, run = roles(shape, chosen.rank)
        # Without the callbacks of a run, which would write gigabytes.
        run.loop.callbacks.clear()
        run.loop.train()
        sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        return
    # First, as a process begins with the peak of the one that started it.
    peaks = [peak(chosen.model, rank) for rank in (0, chosen.rank)]
    states = [roles(shape, rank)[0] for rank in (0, chosen.rank)]
    lines = [
        f"| {chosen.model} | four networks | one base, rank {chosen.rank} | ratio | target |",
        "|---|---:|---:|---:|---|",
    ]
    for name, (apart, together), most in (("state", states, 0.15), ("peak", peaks, 0.45)):
        share = together / apart
        verdict = "met" if share <= most else "missed"
        lines.append(
            f"| {name} | {apart / 1e6:,.0f} MB | {together / 1e6:,.0f} MB | {share:.1%} | {verdict}: {most:.0%} |"
        )
    where = f"{datetime.date.today()}, {describe(torch.device('cpu'))}; 8 answers of 32 tokens a round."
    page = "\n".join(["# Memory of adapters", "", where, "", *lines]) + "\n"
    write_result(TABLE, page)
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
