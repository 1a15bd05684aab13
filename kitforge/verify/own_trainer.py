"""Contracts of a trainer that is not ours, against a small protocol; `examples/verify_hf_trainer.py` implements it.

A batch is a dict of int64 tensors [rows, length] as Hugging Face names them: `input_ids`; `labels`, which the trainer
shifts, -100 where a token is not to be predicted; `position_ids`, which begin anew with each document of a row.
"""

import functools
import importlib
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from kitforge.api import save_model
from kitforge.foundation.errors import ConfigError
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build
from kitforge.verify.contract import Contract, Measured, NotOfferedError, furthest
from kitforge.verify.killing import die_at_operation, die_before_backward
from kitforge.verify.learning import distance_of, norm_of
from kitforge.verify.processes import Process
from kitforge.verify.run_equality import is_equal

Batch: TypeAlias = dict[str, Tensor]
NETWORK = LlamaConfig(vocab_size=96, dim=32, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=64, max_length=128)
ROWS, LENGTH, STEPS = 12, 24, 6
LENGTHS = (5, 13, 7, 9, 14, 6)  # of the documents that share a row
# Weights this much larger than initial ones give logits and gradients of the size that real ones have: norms above any
# usual bound of clipping. The networks of evaluations have dropout, which train mode would show.
SCALE, DROPOUT = 12.0, 0.2
# In float32, and in half precision, which rounds the gradients of each micro-batch.
WEIGHTS, LOSSES = ("relative to the way of the weights", 1e-4, 0.1), ("nats", 1e-5, 0.02)
# Shares of the way that a label makes at least, and that may be aside of the known gradient. Above this cosine a step
# is one along it: SGD, with or without momentum, clipping or weight decay; signs and orthogonal matrices are further.
LEAST, ASIDE, ALONG = 1e-3, 0.05, 0.9
KILLS, ATTEMPTS, OPERATIONS, RUN_TIMEOUT = 2, 10, 60, 240.0


class TrainerUnderTest(Protocol):
    """What is asked of a trainer; each method is optional, and what is missing is not offered.

    def train(
        self, model: nn.Module, batches: Sequence[Batch], *, micro_batches: int, folder: Path, resume: bool
    ) -> nn.Module | Mapping[str, Tensor]:
        One optimizer step for each batch in order, its rows in `micro_batches` equal parts; a checkpoint in `folder`
        after every step. With `resume`, goes on from the newest one there, if any. Returns the trained network, or
        its weights by name. It may change `model`, or train a network made of its weights.

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        The mean loss in nats over all labels of all batches, without dropout.

    sgd: float
        The rate, if each step is plain SGD in float32 at a constant rate; every step is then known.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTrainer:
    """A trainer of the caller's, and the folder that its runs are in."""

    trainer: Any
    folder: Path
    dtypes: set[torch.dtype] = field(default_factory=set)  # of what the modules that it ran returned

    def train(
        self, name: str, batches: Sequence[Batch], micro_batches: int = 1, *, resume: bool = False
    ) -> Mapping[str, Tensor]:
        """The weights after training. Raises NotOfferedError, and TypeError for what are no weights."""
        method = self._method("train")
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        given = [dict(batch) for batch in batches]
        with register_module_forward_hook(self._note):
            found = method(network(), given, micro_batches=micro_batches, folder=folder, resume=resume)
        weights = dict(found.named_parameters()) if isinstance(found, nn.Module) else found
        are_tensors = isinstance(weights, Mapping) and all(isinstance(each, Tensor) for each in weights.values())
        if not weights or not are_tensors:
            raise TypeError(f"train returned {type(found).__name__}, not a network or its weights by name")
        return {name: each.detach().double().cpu() for name, each in weights.items()}

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        """The mean loss. Raises NotOfferedError, and TypeError for what is not a number."""
        method = self._method("evaluate")
        with register_module_forward_hook(self._note):
            found = method(model, [dict(batch) for batch in batches])
        # Also a number of NumPy, and a tensor that holds one.
        if isinstance(found, (bool, str)) or not math.isfinite(number := float(found)):
            raise TypeError(f"evaluate returned {found!r}, not a finite number")
        return number

    def offers(self, name: str) -> bool:
        """Whether the trainer has this method."""
        return callable(getattr(self.trainer, name, None))

    def measured(self, figure: float, of: tuple[str, float, float], words: str = "") -> Measured:
        """The figure, bounded by the precision that the trainer ran in."""
        unit, *bounds = of
        is_half = not self.dtypes.isdisjoint((torch.bfloat16, torch.float16))
        precision = "half precision" if is_half else "float32"
        return Measured(figure=figure, bound=bounds[is_half], unit=f"{unit}, {precision}{words}")

    def _note(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.dtypes.add(output.dtype)

    def _method(self, name: str) -> Callable[..., Any]:
        if not self.offers(name):
            raise NotOfferedError(f"the trainer has no method {name!r}")
        found: Callable[..., Any] = getattr(self.trainer, name)
        return found


def load_trainer(name: str) -> Any:
    """The object `module:object`, of a module on the path or in the current folder; a class is called without
    arguments. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError("this names no trainer", got=name, expected="module:object")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        return found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:
        raise ConfigError("the trainer cannot be loaded", got=f"{name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


def network(dropout: float = 0.0) -> nn.Module:
    """A small LLaMA in float32, the same at each call; in train mode, as modules are."""
    model = build(replace(NETWORK, attention_dropout=dropout), device=torch.device("cpu"), seed=0, level="O0")
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(SCALE if each.dim() > 1 else 1)
    if dropout:
        # The network's own needs the key of a step, which trainers of others do not know.
        model.get_submodule("norm").register_forward_hook(
            lambda module, _, output: functional.dropout(output, DROPOUT, module.training)
        )
    return model


def known_loss(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """The mean loss of all labels, each document by itself."""
    losses = []
    for batch in batches:
        for row, positions in enumerate(batch["position_ids"].tolist()):
            starts = [index for index, position in enumerate(positions) if position == 0]
            for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
                logits = model(batch["input_ids"][row : row + 1, start:end])[0, :-1]
                labels = batch["labels"][row, start + 1 : end]
                losses.append(
                    functional.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")
                )
    return torch.cat(losses).mean()


def known_weights(batches: Sequence[Batch], rate: float, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights after a step of SGD for each batch, in float64, under the names of `like`: ours or Hugging Face's, of
    a wrapped module or not. None for others."""
    model = network().double()
    parameters = dict(model.named_parameters())
    for batch in batches:
        gradients = torch.autograd.grad(known_loss(model, [batch]), list(parameters.values()))
        with torch.no_grad():
            for each, gradient in zip(parameters.values(), gradients, strict=True):
                each.sub_(rate * gradient)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        exported = load_file(Path(folder) / "model.safetensors")
    plain = {name.replace("_orig_mod.", "").replace("module.", ""): name for name in like}
    for known in (parameters, exported):
        if {name: each.shape for name, each in known.items()} == {each: like[plain[each]].shape for each in plain}:
            return {plain[name]: each.detach().double() for name, each in known.items()}
    return None


def rows(count: int) -> Batch:
    """Rows of one document each, with a different number of labels in each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, NETWORK.vocab_size, (count, LENGTH), generator=generator)
    masked = torch.arange(count) * 5 % (LENGTH - 4)
    labels = tokens.masked_fill(torch.arange(LENGTH) <= masked.unsqueeze(1), -100)
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH).expand(count, LENGTH).clone()}


def batches_of(batch: Batch, size: int) -> list[Batch]:
    """The rows in batches of that size; the last one may be smaller."""
    starts = range(0, len(batch["input_ids"]), size)
    return [{name: each[start : start + size].clone() for name, each in batch.items()} for start in starts]


def check_own_gradient(own: OwnTrainer) -> Measured:
    """Steps against what is known of them, whatever the optimizer: which labels and rows have an effect and which have
    none, that rows given twice change nothing, and that it goes downhill; for SGD the gradient itself."""
    batch, other = batches_of(rows(8), 4)
    whole, reached = own.train("whole", [batch] * 3), own.train("other", [batch, batch, other])
    way = distance_of(reached, whole)
    found = [] if way > 0 else ["the last batch has no effect"]
    for row, position in ((0, 1), (0, -1), (-1, -1)):
        changed = {name: each.clone() for name, each in batch.items()}
        changed["labels"][row, position] = (changed["labels"][row, position] + 1) % NETWORK.vocab_size
        if not distance_of(own.train(f"label {row} {position}", [changed] * 3), whole) > LEAST * way:
            found.append(f"label {position} of row {row} has no effect")
    # Each row twice, once with another last token, and filled up: nothing that counts follows.
    twice = {name: torch.cat([each, each]) for name, each in batch.items()}
    twice["input_ids"][: len(batch["labels"]), -1] = 1
    filled = twice["input_ids"][:, :3]
    fill = {"input_ids": filled, "labels": torch.full_like(filled, -100), "position_ids": LENGTH + torch.arange(3)}
    same = {name: torch.cat([each, fill[name].expand_as(filled)], dim=1) for name, each in twice.items()}
    figures = [distance_of(own.train("same", [same] * 3), whole) / (way or math.inf)]
    first = own.train("first", [batch])
    start, end = known_weights([], 1.0, first), known_weights([batch], 1.0, first)
    if start is not None and end is not None:
        gradient = {name: each - end[name] for name, each in start.items()}
        found += _faults_of_step({name: each - start[name] for name, each in first.items()}, gradient, start)
    if (rate := getattr(own.trainer, "sgd", None)) is not None:
        known = known_weights([batch, batch, other], rate, first)
        if known is None:
            raise TypeError("train returned weights whose names are neither the network's nor Hugging Face's")
        figures.append(distance_of(reached, known) / (way or math.inf))
    return own.measured(math.inf if found else furthest(figures), WEIGHTS, "".join(f"; {each}" for each in found))


def _faults_of_step(
    step: Mapping[str, Tensor], gradient: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> list[str]:
    """What is wrong with the first step; a warmup may begin with none."""
    along = sum(float((each * gradient[name]).sum()) for name, each in step.items())
    length = norm_of(step)
    if length == 0:
        return []
    if not along < 0:
        return ["the first step goes uphill"]
    if along > -ALONG * length * norm_of(gradient):
        return []
    rest, still = {}, [name for name, each in step.items() if not each.any() and gradient[name].any()]
    if still:
        return [f"{still[0]} does not move"]
    for name, each in step.items():
        # Each tensor may have a rate and a weight decay of its own.
        ways = torch.stack([gradient[name].flatten(), start[name].flatten()], dim=1)
        rest[name] = each.flatten() - ways @ torch.linalg.lstsq(ways, each.flatten()).solution
    aside = norm_of(rest) / length
    return [] if aside < ASIDE else [f"{aside:.1g} of the first step is not along the gradient"]


def check_own_micro_batches(own: OwnTrainer) -> Measured:
    """Weights after three steps in two and in four micro-batches against whole batches, relative to the way."""
    batches = batches_of(rows(ROWS), 4)
    before = own.train("start", batches[:1])
    whole = own.train("whole", batches)
    way = distance_of(whole, before)
    figures = [distance_of(own.train(f"parts_{parts}", batches, parts), whole) / (way or math.nan) for parts in (2, 4)]
    return own.measured(furthest(figures), WEIGHTS)


def check_own_evaluation(own: OwnTrainer) -> Measured:
    """The loss of the same rows in batches of 1, 3, 5 and all, twice, of a network with dropout, and the known one."""
    model, batches = network(DROPOUT), {size: batches_of(rows(ROWS), size) for size in (1, 3, 5, ROWS)}
    known = known_loss(network().double(), batches[ROWS]).item()
    few = batches[5][:1]
    errors = [abs(own.evaluate(model, few) - known_loss(network().double(), few).item())]
    losses = [own.evaluate(model, batches[size]) for size in (*batches, *batches)]
    errors += [abs(one - other) for one in losses for other in (known, *losses)]
    return own.measured(max(errors), LOSSES)


def check_own_packing(own: OwnTrainer) -> Measured:
    """Documents in one row against each in a row of its own: the known loss, and the weights after training."""
    alone, order, found = rows(len(LENGTHS)), torch.arange(LENGTH), list[Measured]()
    # Each row ends with tokens that nothing is to be learned from; and no document is asked for its first token, which
    # nothing of its own precedes.
    silent = (order == 0) | (order >= torch.tensor(LENGTHS).unsqueeze(1))
    alone["labels"] = alone["input_ids"].masked_fill(silent, -100)
    packed = {
        name: torch.cat([row[:length] for row, length in zip(each, LENGTHS, strict=True)]).unsqueeze(0)
        for name, each in alone.items()
    }
    if own.offers("evaluate") or not own.offers("train"):
        known = known_loss(network().double(), [alone]).item()
        losses = [own.evaluate(network(DROPOUT), [batch]) for batch in (alone, packed)]
        found.append(own.measured(max(abs(loss - known) for loss in losses), LOSSES))
    if own.offers("train"):
        # A warmup may begin with a rate of 0.
        for steps in (1, 3):
            ways = (
                own.train(f"{len(each['labels'])} rows, {steps}", [each] * steps) for each in (alone, packed, rows(4))
            )
            apart, together, others = ways
            if way := distance_of(others, apart):
                break
        found.append(own.measured(distance_of(together, apart) / (way or math.nan), WEIGHTS))
    return next((each for each in found if not each.is_held), found[0])


def check_own_resume(own: OwnTrainer) -> Measured:
    """SIGKILL at drawn operations on files of the run and before drawn steps, and resumption until the end. A batch of
    a step that was saved is another then: it is not read again."""
    batches, draw = batches_of(rows(STEPS * 4), 4), random.Random(0)
    whole = own.train("undisturbed", batches)
    spent = [{name: each.flip(0).roll(1, 1) for name, each in batches[0].items()}, *batches[1:]]
    kills = {"killed": _kill_in_files(own, batches, draw)}
    kills["stopped"] = _kill_between_steps(own, batches, spent, draw.randint(2, STEPS - 3))
    if not any(kills.values()):
        raise NotOfferedError("the run ends before it can be killed")
    differing = set[str]()
    for run, given in (("killed", batches), ("stopped", spent)):
        found = own.train(run, given, resume=True) if kills[run] else whole
        differing |= {name for name in whole.keys() | found.keys() if not is_equal(whole.get(name), found.get(name))}
    return Measured(figure=len(differing), unit=f"of {len(whole)} tensors differ after {sum(kills.values())} kills")


def _kill_in_files(own: OwnTrainer, batches: Sequence[Batch], draw: random.Random) -> int:
    """The kills at file operations of the run `killed`, which lie between steps and within saves."""
    folder, kills, latest = own.folder / "killed", 0, OPERATIONS
    for _ in range(ATTEMPTS):
        number = draw.randrange(1, latest)
        if _ended(own, "killed", batches, functools.partial(die_at_operation, number, folder)):
            # It has fewer operations.
            latest = max(number, 2)
            shutil.rmtree(folder)
        # What has left nothing has nothing to resume.
        elif has_files(folder):
            kills += 1
        if kills == KILLS:
            break
    return kills


def _kill_between_steps(own: OwnTrainer, batches: Sequence[Batch], spent: Sequence[Batch], number: int) -> int:
    """The kills between steps of the run `stopped`, which sees files however they are written; 0 if it cannot be
    killed so."""
    folder = own.folder / "stopped"
    while not has_files(folder):
        if _ended(own, "stopped", batches, functools.partial(die_before_backward, number)):
            return 0
        # One with several backward passes for each step is still in its first.
        number *= 2
    return 1 + (not _ended(own, "stopped", spent, functools.partial(die_before_backward, 1)))


def _ended(own: OwnTrainer, name: str, batches: Sequence[Batch], prepare: Callable[[], None]) -> bool:
    def train() -> None:
        prepare()
        own.train(name, batches, resume=True)

    return Process(train).ended(RUN_TIMEOUT)


def has_files(folder: Path) -> bool:
    """Whether a file lies there, at any depth."""
    return any(path.is_file() for path in folder.rglob("*"))


CONTRACTS = (
    Contract(name="gradient", promise="a step = the gradient of the mean loss", check=check_own_gradient),
    Contract(name="micro_batches", promise="micro-batches = batch", check=check_own_micro_batches),
    Contract(name="evaluation", promise="evaluation independent of the batch size", check=check_own_evaluation),
    Contract(name="packing", promise="packed = alone", check=check_own_packing),
    Contract(name="resume", promise="killed and resumed = never killed", check=check_own_resume),
)
