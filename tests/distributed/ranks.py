"""Several ranks on this machine, for tests: forked, joined through a file, on gloo."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.patience import PATIENCE

TIMEOUT = datetime.timedelta(seconds=PATIENCE)


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank, in rank order; what the first failing rank raised is
    raised here, with its traceback as text."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _rank, (world_size, Path(folder), function, arguments), nprocs=world_size, start_method="fork", join=False
        )
        for process in context.processes:
            process.join(TIMEOUT.total_seconds() * 3)
        for process in context.processes:
            if process.is_alive():
                process.kill()
        answers = [_answer(Path(folder), rank) for rank in range(world_size)]
    errors = sorted((answer for answer in answers if answer["error"] is not None), key=lambda answer: answer["time"])
    if errors:
        raise errors[0]["error"] from RuntimeError(errors[0]["trace"])
    return [answer["result"] for answer in answers]


def _answer(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"answer_{rank}"
    if not path.exists():
        return {"error": RuntimeError(f"rank {rank} died or hung"), "trace": "", "time": float("inf")}
    answer: dict[str, Any] = pickle.loads(path.read_bytes())
    return answer


def _rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.enable()
    # A rank that looks for garbage would make all memory of the tests its own.
    gc.freeze()
    torch.set_num_threads(1)
    answer: dict[str, Any] = {"result": None, "error": None}
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
        answer["result"] = function(rank, *arguments)
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 (the parent raises it)
        import time

        answer |= {"error": error, "trace": traceback.format_exc(), "time": time.time()}
    draft = folder / f"draft_{rank}"
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(folder / f"answer_{rank}")
    dist.destroy_process_group()
