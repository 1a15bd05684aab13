"""A network and a loss of your own: a Task says what to build, what a step consumes and what to make small."""

import itertools

import torch
from torch import nn

from kitforge import Task, Trainer


class Sine(Task):
    """Fits sin(x) between -3 and 3."""

    def build(self, world):
        """The network, on the device of the run."""
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(world.device)

    def steps(self, model, cursor):
        """One micro-batch a step, drawn from the step's number, so that a resumed run sees the same."""
        for step in itertools.count(cursor.step):
            x = torch.rand(256, 1, generator=torch.Generator().manual_seed(step)) * 6 - 3
            yield [{"x": x, "y": x.sin()}]

    def loss(self, model, micro_batch):
        """The sum over the samples; the loop divides it by their number."""
        return {"loss": (model(micro_batch["x"]) - micro_batch["y"]).square().sum()}


OPTIONS = {"trainer.max_steps": 300, "optimizer.learning_rate": 0.02, "optimizer.weight_decay": 0.0}
run = Trainer(Sine(), options=OPTIONS).train()
with torch.no_grad():
    print("sin(1) =", run.model.cpu()(torch.tensor([[1.0]])).item())
