"""Attention of `parallel.context` by groups of heads: the part of its messages that is hidden, and the most memory.

Two ranks have half of a row each. The link between them is emulated: a message takes a time in proportion to its bytes
and no processor, and the real one runs at its end. It is set so that all messages of a pass take a share of the time of
attention itself. Hidden is the part of that time in which the rank computes. There is no peer and no bar.

Run from the checkout: `python -m benchmarks.parallel.head_groups [--rounds 5]`. Every round launches fresh ranks;
medians over the rounds are in benchmarks/parallel/head_groups.md.
"""

import datetime
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks.command_line import CommandLine, write_result
from benchmarks.core.nn.recomputation import MIB, Live
from kitforge.core.kernels.dispatch import select
from kitforge.core.nn.context import AttentionSpec, CausalAttend
from kitforge.core.parallel import context
from kitforge.foundation.device import describe

TABLE = Path(__file__).with_suffix(".md")
RANKS, LENGTH, HEADS, HEAD_DIM, PASSES = 2, 2048, 16, 64, 5
KEY_HEADS, GROUPS, SHARES = (16, 2), (1, 2, 4, 8), (0.5, 1.0)
SMOKE = {"LENGTH": 64, "HEADS": 4, "HEAD_DIM": 8, "PASSES": 1, "KEY_HEADS": (2,), "GROUPS": (1, 2), "SHARES": (0.5,)}
SMOKE |= {"rounds": 1}


class Link:
    """Stands in for `all_to_all_single`: messages pass one after another, at `seconds` a byte."""

    def __init__(self) -> None:
        self.seconds = self.free = self.busy = self.waited = 0.0
        self._real: Any = dist.all_to_all_single

    def __call__(self, received: Tensor, sent: Tensor, *, group: Any, async_op: bool = False) -> Any:
        due = max(time.perf_counter(), self.free) + sent.nbytes / RANKS * (RANKS - 1) * self.seconds
        self.busy += due - max(time.perf_counter(), self.free)
        self.free = due
        link, real = self, self._real

        class Message:
            def wait(self) -> None:
                left = due - time.perf_counter()
                if left > 0:
                    time.sleep(left)
                    link.waited += left
                real(received, sent, group=group)

        return Message() if async_op else Message().wait()

    def hidden(self) -> float:
        """Since the last call."""
        share, self.busy, self.waited = 1 - self.waited / self.busy if self.busy else 0.0, 0.0, 0.0
        return share


def _rank(rank: int, folder: str, kv_heads: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    group: Any = dist.group.WORLD
    link = Link()
    generator, size = torch.Generator().manual_seed(rank), LENGTH // RANKS
    query, key, value = inputs = [
        torch.randn(1, size, heads, HEAD_DIM, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    ]
    gradient = torch.randn(1, HEADS, size, HEAD_DIM, generator=generator)
    spec = AttentionSpec(layer=0, kernel=select("O1").attention, scale=HEAD_DIM**-0.5)
    attend = context.HeadExchange(CausalAttend(), group, LENGTH, drops=False)

    def passes() -> dict[str, float]:
        dist.barrier()
        started = time.perf_counter()
        mixed = attend(query, key, value, spec)
        middle, forward = time.perf_counter(), link.hidden()
        mixed.backward(gradient)
        ended = time.perf_counter()
        return {"forward": middle - started, "backward": ended - middle, "hid": forward, "hid back": link.hidden()}

    def median(count: int) -> dict[str, float]:
        runs = [passes() for _ in range(count)]
        return {name: statistics.median(run[name] for run in runs) for name in runs[0]}

    found = dict[str, Any]()
    total = sum(each.nbytes for each in inputs)
    alone = median(PASSES)
    for groups in GROUPS:
        context.GROUP_BYTES = total // groups
        with torch.no_grad(), Live(nn.Module()) as live:
            attend(query, key, value, spec)
        forward_bytes = live.most
        with Live(nn.Module()) as live:
            attend(query, key, value, spec).backward(gradient)
        found[f"{groups} bytes"] = forward_bytes, live.most
        found[f"{groups} 0"] = median(PASSES)
    vars(dist)["all_to_all_single"] = link
    for share in SHARES:
        # Both ways, and the output of queries alone: the same bytes in the backward pass, whose attention takes longer.
        num_bytes = (total + query.nbytes) / RANKS * (RANKS - 1)
        link.seconds = share * alone["forward"] / num_bytes
        for groups in GROUPS:
            context.GROUP_BYTES = total // groups
            found[f"{groups} {share}"] = median(PASSES)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(kv_heads: int) -> dict[str, Any]:
    """What the first rank found."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, (folder, kv_heads), nprocs=RANKS, start_method="fork")
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        return found


def render(found: dict[int, list[dict[str, Any]]]) -> str:
    rounds = len(next(iter(found.values())))
    lines = [
        "# Attention of `parallel.context` by groups of heads",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu')).split(',')[0]}, 2 virtual cores, one thread a rank, "
        f"Python {platform.python_version()}, torch {torch.__version__}; gloo; {RANKS} ranks, a row of {LENGTH} "
        f"tokens, {HEADS} heads of {HEAD_DIM} in fp32; median of {rounds} rounds. The link is emulated: its messages "
        "of a forward pass take the given share of the time of a forward pass without a link. With g groups the first "
        "message in and the last one out, 1/g of the time, have no attention beside them.",
    ]
    for kv_heads, launches in found.items():

        def median(groups: int, share: object, name: str, of: list[dict[str, Any]] = launches) -> float:
            return statistics.median(each[f"{groups} {share}"][name] for each in of)

        lines += ["", f"{kv_heads} key heads:", ""]
        lines += ["| groups | MiB at most, forward | and backward | ms, no link | "]
        lines[-1] += " | ".join(f"link {share}: hidden forward | backward | ms" for share in SHARES) + " |"
        lines += ["|---:|---:|---:|---:|" + "---:|---:|---:|" * len(SHARES)]
        for groups in GROUPS:
            most = launches[0][f"{groups} bytes"]
            cells = [f"| {groups} | {most[0] / MIB:.1f} | {most[1] / MIB:.1f} |"]
            cells += [f"{1e3 * (median(groups, 0, 'forward') + median(groups, 0, 'backward')):.0f} |"]
            for share in SHARES:
                seconds = median(groups, share, "forward") + median(groups, share, "backward")
                hidden = [f"{median(groups, share, name):.0%}" for name in ("hid", "hid back")]
                cells += [f"{hidden[0]} | {hidden[1]} | {1e3 * seconds:.0f} |"]
            lines.append(" ".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse(SMOKE, globals())
    found: dict[int, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for kv_heads in KEY_HEADS:
            found.setdefault(kv_heads, []).append(launch(kv_heads))
    print(render(found))
    write_result(TABLE, render(found))


if __name__ == "__main__":
    main()
