"""Contracts of gradients and losses: micro-batches equal the batch, evaluation has no batch size, packing isolates."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.api import load_processor
from kitforge.foundation.types import Cursor
from kitforge.kits.registry import DEFAULT_TASK
from kitforge.verify.case import PRECISE, Case
from kitforge.verify.contract import Contract, Measured, NotOfferedError, furthest
from kitforge.verify.run_equality import relative
from kitforge.verify.sample_data import documents

# What rounding may do in float64, and in float32 where tables of rows keep a network in it.
ROUNDING: dict[bool, dict[str, Any]] = {
    True: {"bound": 1e-9, "unit": "relative, float64"},
    False: {"bound": 2e-4, "unit": "relative, float32"},
}
# A step of SGD at rate 1 subtracts the gradient itself.
GRADIENT_STEP: dict[str, Any] = {
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.learning_rate": 1.0,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
# Some metrics are rounded to float32, whatever the network is.
METRIC_BOUND = 1e-6


def check_micro_batches(case: Case) -> Measured:
    """The weights and metrics of two steps in micro-batches against those of whole batches, relative to the way that
    the weights went."""
    model, is_double = case.network()
    before = _weights(model)

    def trained(size: int | None) -> tuple[dict[str, Tensor], dict[str, float]]:
        # Log-probs of further rollouts are rounded to float32.
        steps = 1 if case.has("rollout.max_new_tokens") else 2
        changes = {**GRADIENT_STEP, **PRECISE, "trainer.max_steps": steps, "trainer.micro_batch_size": size}
        changes |= {"trainer.checkpoint_every": None, "trainer.eval_batches": 1}
        given = copy.deepcopy(model) if is_double else None
        # Tables of rows begin with the rows of their seed, and go on from no other.
        with case.run(f"micro_batches/{size}", changes, given) as assembly:
            if given is None:
                before.update(_weights(assembly.loop.model))
            metrics = assembly.train().metrics
            # Rewards and other metrics are rounded to float32.
            return _weights(assembly.loop.model), {"loss": metrics["loss"]}

    whole, metrics = trained(None)
    way = distance_of(whole, before)
    figures = [0.0 if way > 0 else math.inf]
    for size in (1, 3):
        split, found = trained(size)
        loss = _furthest(found, metrics)
        figures += [distance_of(split, whole) / (way or math.inf), loss if loss > METRIC_BOUND else 0.0]
    return Measured(figure=furthest(figures), **ROUNDING[is_double])


def check_evaluation(case: Case) -> Measured:
    """Every metric of the evaluation set at batch sizes 1, 2 and 7, and in micro-batches."""
    if case.values["task"] == "kto":
        raise NotOfferedError("the KL baseline pairs the rows of a batch")
    model, is_double = case.network()
    whole = {**PRECISE, "trainer.eval_batches": None, "data.batch_size": 1}
    metrics = case.evaluate(model, whole)
    if not metrics or metrics == case.evaluate(model, whole | {"trainer.eval_batches": 1}):
        raise NotOfferedError("there are no two rows to evaluate")
    others = [{"data.batch_size": 2}, {"data.batch_size": 7}, {"data.batch_size": 6, "trainer.micro_batch_size": 2}]
    figure = furthest(_furthest(case.evaluate(model, whole | other), metrics) for other in others)
    rounding = ROUNDING[is_double]
    return Measured(figure=figure, bound=max(rounding["bound"], METRIC_BOUND), unit=rounding["unit"])


def check_packing(case: Case) -> Measured:
    """Losses and gradients of documents that share a row against those of each alone."""
    if case.values["task"] == DEFAULT_TASK:
        return _check_packed_documents(case)
    if case.values["task"] == "sft":
        model, is_double = case.network()
        together = _first_gradients(case, PRECISE, model)
        alone = _first_gradients(case, {**PRECISE, "trainer.micro_batch_size": 1}, model)
        figure = distance_of(together, alone) / norm_of(alone)
        return Measured(figure=figure, **ROUNDING[is_double])
    raise NotOfferedError("rows of this task are not packed")


def _check_packed_documents(case: Case) -> Measured:
    """One row of all documents, as the run packs it, against the network on each document by itself."""
    tokenizer: Any = load_processor(case.base)
    encoded = [torch.tensor([*tokenizer.encode(text), tokenizer.eos_id]) for text in documents(3, 5)]
    file = case.folder / "packed.txt"
    separator = "\n%%\n"
    file.write_text(separator.join(documents(3, 5)), encoding="utf-8")
    changes = {
        **PRECISE,
        "data.train": str(file),
        "data.eval": str(file),
        "data.separator": separator,
        "data.sequence_length": sum(map(len, encoded)) - 1,
        "data.batch_size": 1,
        "data.streaming": False,
    }
    model, is_double = case.network()
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for tokens in encoded:
        logits = model(tokens[None].to(next(model.parameters()).device))[0, :-1]
        total = total + functional.cross_entropy(logits, tokens[1:].to(logits.device), reduction="sum").double().cpu()
    count = sum(map(len, encoded)) - len(encoded)
    torch.autograd.backward(total / count)
    alone = _gradients(model)
    model.zero_grad()
    model.eval()
    packed = _first_gradients(case, changes, model)
    loss = case.evaluate(model, changes | {"trainer.eval_batches": None})["eval/loss"]
    figures = (distance_of(packed, alone) / norm_of(alone), relative(loss, float(total.detach()) / count, floor=1e-6))
    return Measured(figure=furthest(figures), **ROUNDING[is_double])


def _first_gradients(case: Case, changes: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    with case.run("gradients", changes, model) as assembly:
        task = assembly.loop.task
        model.eval()
        step = next(iter(task.steps(model, Cursor())))
        count = float(task.count(step)["loss"])
        model.zero_grad()
        for micro_batch in step:
            torch.autograd.backward(task.loss(model, micro_batch)["loss"] / count)
    found = _gradients(model)
    model.zero_grad()
    return found


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all tensors, in double."""
    return math.hypot(*(float(each.double().norm()) for each in tensors.values()))


def distance_of(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all tensors; infinite where names differ."""
    if got.keys() != wanted.keys():
        return math.inf
    return norm_of({name: each - wanted[name] for name, each in got.items()})


def _furthest(got: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """The largest relative difference of metrics; infinite where names differ, or where none is a number in both."""
    if got.keys() != wanted.keys():
        return math.inf
    # NaN of one alone is infinitely far.
    pairs = [(got[name], value) for name, value in wanted.items() if not math.isnan(got[name]) or not math.isnan(value)]
    return furthest(relative(*pair, floor=1e-6) for pair in pairs)


CONTRACTS = (
    Contract(name="micro_batches", promise="micro-batches = batch", check=check_micro_batches),
    Contract(name="evaluation", promise="evaluation independent of the batch size", check=check_evaluation),
    Contract(name="packing", promise="packed = alone", check=check_packing),
)
