"""A small training state that is a pure function of its step, and what tests ask of saved ones."""

from pathlib import Path

import torch
from torch import Tensor

from kitforge.core.checkpoint.load import Checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter


def model(step: int, size: int = 64) -> dict[str, Tensor]:
    """Three tensors, two of which are tied."""
    weight = torch.full((size, 4), float(step))
    return {"embedding.weight": weight, "norm.bias": torch.arange(5) + step, "head.weight": weight}


def optimizer(step: int, size: int = 64) -> dict[str, Tensor]:
    """Moments and a 0-dim counter."""
    return {"embedding.weight.exp_avg": torch.full((size, 4), step / 8), "embedding.weight.step": torch.tensor(step)}


def state(step: int) -> dict[str, object]:
    """Plain state."""
    return {"step": step, "order": [step, step + 1], "text": "é"}


def save(writer: CheckpointWriter, step: int, *, size: int = 64, keep: bool = False) -> None:
    """Save the example of that step."""
    tensors = {"model": model(step, size).items(), "optimizer": optimizer(step, size).items()}
    writer.save(step, model=tensors["model"], optimizer=tensors["optimizer"], state=state(step), keep=keep)


def saved(root: Path, *numbers: int, keep_last: int = 100) -> Path:
    """A root with those steps, published."""
    writer = CheckpointWriter(root, keep_last=keep_last)
    for step in numbers:
        save(writer, step)
    writer.close()
    return root


def assert_whole(checkpoint: Checkpoint, *, size: int = 64) -> None:
    """The checkpoint holds the example of its step, to the bit."""
    assert_equal(dict(checkpoint.model()), model(checkpoint.step, size))
    assert_equal(dict(checkpoint.optimizer()), optimizer(checkpoint.step, size))
    assert checkpoint.state == state(checkpoint.step)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names in the same order, and tensors equal to the bit, dtypes included."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert (
            got[name]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        ), name
