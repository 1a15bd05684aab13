"""One process pays nothing for the parallel core: no DTensor, no collective, no process group."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.ranks import run_ranks
from tests.distributed.training import run_training, write_text


class Trace(TorchDispatchMode):
    """Names of all operations, and whether a DTensor was among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.saw_dtensor = False

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.add(str(operation))
        self.saw_dtensor |= any(isinstance(leaf, DTensor) for leaf in tree_leaves((arguments, options or {})))
        return operation(*arguments, **(options or {}))

    @property
    def is_parallel(self) -> bool:
        return self.saw_dtensor or any("c10d" in name for name in self.names)


def traced(rank: int, folder: Path, choices: dict[str, Any]) -> tuple[bool, int]:
    with Trace() as trace:
        run_training(
            rank, folder, {"trainer.max_steps": 2, "output_dir": str(folder / f"run{len(choices)}"), **choices}
        )
    return trace.is_parallel, len(trace.names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("alone")
    write_text(place)
    return place


def test_a_run_of_one_process_has_no_collective_and_no_dtensor(folder: Path) -> None:
    is_parallel, num_operations = traced(0, folder, {})
    assert num_operations > 20
    assert not is_parallel
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_trace_would_see_them(folder: Path) -> None:
    assert all(is_parallel for is_parallel, _ in run_ranks(2, traced, folder, {"parallel.data": 2}))
