"""A kit of your own: `pip install ./own_kit`, then `kitforge train task=own samples=512 trainer.max_steps=200`."""

from dataclasses import dataclass

import torch
from torch import nn

from kitforge import Task
from kitforge.kits.kit import TaskKit
from kitforge.trainer.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions(RunOptions):
    """All options of the task `own`."""

    task: str = "own"
    samples: int = 256  # samples of a step
    hidden: int = 64  # width of the hidden layer


class Sine(Task):
    """Fits sin(x) between -3 and 3."""

    def __init__(self, options):
        self.options = options

    def build(self, world):
        """The network, on the device of the run."""
        return nn.Sequential(nn.Linear(1, self.options.hidden), nn.Tanh(), nn.Linear(self.options.hidden, 1)).to(
            world.device
        )

    def steps(self, model, cursor):
        """One micro-batch per step, drawn from the step's number: a resumed run sees the same."""
        for step in range(cursor.step, 10**9):
            x = torch.rand(self.options.samples, 1, generator=torch.Generator().manual_seed(step)) * 6 - 3
            yield [{"x": x, "y": x.sin()}]

    def loss(self, model, micro_batch):
        """The sum over the samples."""
        return {"loss": (model(micro_batch["x"]) - micro_batch["y"]).square().sum()}

    def evaluate(self, model):
        """The mean squared error on a grid."""
        x = torch.linspace(-3, 3, 101)[:, None]
        return {"eval/loss": (model(x) - x.sin()).square().mean().item()}


class OwnKit(TaskKit):
    """The kit: its options, and the task that they build."""

    OPTIONS = OwnOptions

    def task(self, options, inputs):
        """The network, the data and the loss."""
        return Sine(options)


TASKS = {"own": OwnKit()}
