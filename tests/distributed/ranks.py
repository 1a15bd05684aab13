"""Several ranks on this machine, for tests: forked, joined through a file, on gloo."""

import datetime
import functools
import importlib
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kitforge.composition import compose_config
from kitforge.core.parallel.rendezvous import code_version
from kitforge.verify import processes
from tests.patience import PATIENCE

TIMEOUT = datetime.timedelta(seconds=PATIENCE)
# What ranks import and this process does not: 1,300 modules, most of them for FSDP.
OF_RANKS = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "kitforge.core.kernels.rms_norm.numba",
    "kitforge.core.kernels.rotary.numba",
)


@functools.cache
def import_for_ranks() -> None:
    """Import once what each rank that is forked would import in seconds of its own, hash the code, and start numba."""
    code_version()
    for module in OF_RANKS:
        importlib.import_module(module)
    # The first compiled loop of a process takes longer than the steps of a test, and so do the first presets.
    importlib.import_module("kitforge.core.kernels.linear.numba").linear(torch.ones(1, 1), torch.ones(1, 1))
    for model in ("llama_tiny", "llama_moe_tiny", "gpt2_tiny"):
        compose_config("text_generation", {"model": model})


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank, in rank order; what the first failing rank raised is
    raised here, with its traceback as text. Results may hold tensors, which take the way through files."""
    import_for_ranks()
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, Path(folder), function, arguments)
        processes.run_ranks(world_size, _rank, *given, timeout=TIMEOUT.total_seconds() * 3)
        return [pickle.loads((Path(folder) / f"answer_{rank}").read_bytes()) for rank in range(world_size)]


def ask_ranks(questions: Mapping[Any, tuple[Any, ...]]) -> dict[Any, list[Any]]:
    """Of each question, a number of ranks and a function with its arguments, what the function returns on each rank.
    One launch answers all questions of one number, since most of what a short run costs is the first of a process; a
    number of one is this process."""
    found = dict[Any, list[Any]]()
    for size in sorted({size for size, *_ in questions.values()}):
        asked = {name: rest for name, (number, *rest) in questions.items() if number == size}
        answers = run_ranks(size, _answers, [*asked.values()]) if size > 1 else [_answers(0, [*asked.values()])]
        found |= dict(zip(asked, map(list, zip(*answers, strict=True)), strict=True))
    return found


def _answers(rank: int, asked: list[Any]) -> list[Any]:
    return [function(rank, *arguments) for function, *arguments in asked]


def _rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    (folder / f"answer_{rank}").write_bytes(pickle.dumps(function(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()
