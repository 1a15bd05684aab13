"""Trainers of strangers by name, right ones and wrong ones: one is right, and each of the others does one thing
otherwise."""

import copy
import io
import math
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

# Each fork that makes an optimizer would import it for two seconds.
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kitforge import save_model
from kitforge.core.nn.context import Context
from kitforge.verify.own_trainer import batches_of, network
from tests.verify.trainers import Batch


class Stranger:
    """SGD with momentum, a falling rate, one checkpoint file by `open` and `os.replace`."""

    def parameters(self, model: Any) -> Any:
        return model.parameters()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    def factor(self, step: int, total: int) -> float:
        return 1 - step / (2 * total)

    def order(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        return batches

    def seen(self, batch: Batch) -> Batch:
        return batch

    def documents(self, batch: Batch) -> Tensor | None:
        return (batch["position_ids"] == 0).long().cumsum(1) - 1

    def logits(self, model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["input_ids"], Context.packed(batch["position_ids"], self.documents(batch)))
        return logits[:, :-1]

    def targets(self, batch: Batch) -> Tensor:
        return batch["labels"][:, 1:]

    def total(self, model: Any, batch: Batch) -> Tensor:
        logits = self.logits(model, batch).float()
        return functional.cross_entropy(logits.flatten(0, 1), self.targets(batch).flatten(), reduction="sum")

    def count(self, batch: Batch) -> float:
        return int((batch["labels"][:, 1:] != -100).sum())

    def part(self, model: Any, part: Batch, whole: Batch, parts: int) -> None:
        (self.total(model, part) / self.count(whole)).backward()

    def after_part(self, model: Any, optimizer: Any) -> None: ...

    def update(self, model: Any, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def state(self, model: Any, optimizer: Any, step: int) -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "random": torch.get_rng_state(),
        }

    def save(self, state: dict[str, Any], folder: Path, step: int) -> None:
        memory = io.BytesIO()
        torch.save(state, memory)
        with open(folder / "draft", "wb") as file:
            file.write(memory.getvalue())
        os.replace(folder / "draft", folder / f"step-{step}.pt")

    def read(self, folder: Path) -> dict[str, Any] | None:
        newest = sorted(folder.glob("step-*.pt"))
        return torch.load(newest[-1]) if newest else None

    def restore(self, state: dict[str, Any], model: Any, optimizer: Any) -> int:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def returned(self, model: Any) -> Any:
        return model

    def train(
        self, model: nn.Module, batches: Sequence[Batch], *, micro_batches: int, folder: Path, resume: bool
    ) -> Any:
        torch.manual_seed(0)
        optimizer, first = self.optimizer(self.parameters(model)), 0
        rates = [group["lr"] for group in optimizer.param_groups]
        if resume and (state := self.read(folder)) is not None:
            first = self.restore(state, model, optimizer)
        batches = self.order(batches)
        for step in range(first, len(batches)):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self.factor(step, len(batches))
            whole = self.seen(batches[step])
            for part in batches_of(whole, len(whole["labels"]) // micro_batches):
                self.part(model, part, whole, micro_batches)
                self.after_part(model, optimizer)
            self.update(model, optimizer)
            self.save(self.state(model, optimizer, step + 1), folder, step + 1)
        return self.returned(model)

    def mode(self, model: Any) -> None:
        model.eval()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> Any:
        self.mode(model)
        with torch.no_grad():
            return self.mean(model, batches)

    def mean(self, model: Any, batches: Sequence[Batch]) -> Any:
        return sum(self.total(model, each) for each in batches).item() / sum(self.count(each) for each in batches)


def clipped(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Optimizer(torch.optim.Optimizer):
    """One that moves each tensor by its rate times a way of its own."""

    RATE = 0.01

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": self.RATE})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each -= self.param_groups[0]["lr"] * self.way(each)

    def way(self, each: Any) -> Any:
        raise NotImplementedError


class Signs(Optimizer):
    """Lion: the sign of a mean of gradients."""

    RATE = 0.003

    def way(self, each: Any) -> Any:
        mean = self.state[each].setdefault("mean", torch.zeros_like(each))
        sign = (0.9 * mean + 0.1 * each.grad).sign()
        mean.lerp_(each.grad, 0.01)
        return sign


class Orthogonal(Optimizer):
    """Muon: matrices step along orthogonal ones."""

    RATE = 0.05

    def way(self, each: Any) -> Any:
        if each.dim() != 2:
            return each.grad
        u, _, v = torch.linalg.svd(each.grad, full_matrices=False)
        return u @ v


class Layerwise(Optimizer):
    """LARS: each tensor has a rate of its own."""

    def way(self, each: Any) -> Any:
        return each.norm() / each.grad.norm() * (each.grad + 0.001 * each)


class ByPath:
    """Files that are written by PyTorch itself."""

    @staticmethod
    def save(_: Any, state: dict[str, Any], folder: Path, step: int) -> None:
        torch.save(state, folder / f"step-{step}.pt")


def save_safely(self: Any, state: dict[str, Any], folder: Path, step: int) -> None:
    save_file(state["model"], folder / "draft")
    os.replace(folder / "draft", folder / f"step-{step}.safetensors")


def restore_weights(self: Any, state: Any, model: Any, _: Any) -> int:
    model.load_state_dict(state["model"])
    return int(state["step"])


def read_safely(self: Any, folder: Path) -> Any:
    newest = sorted(folder.glob("*.safetensors"))
    return {"model": load_file(newest[-1]), "step": newest[-1].stem[5:]} if newest else None


def save_in_a_thread(self: Any, state: dict[str, Any], folder: Path, step: int) -> None:
    if hasattr(self, "thread"):
        self.thread.join()
    self.thread = threading.Thread(target=Stranger.save, args=(self, copy.deepcopy(state), folder, step))
    self.thread.start()
    if step == 6:
        self.thread.join()


def plain(parameters: Any, rate: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, **options)


def in_bfloat16(self: Any, model: Any, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Stranger.logits(self, model, batch)


def noisy(model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        each.grad += 1e-3 * torch.randn_like(each)
    optimizer.step()
    optimizer.zero_grad()


def by_rows(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    for row in batches_of(part, 1):
        Stranger.part(self, model, row, whole, parts)


def by_hand(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    parameters = list(model.parameters())
    for each, grad in zip(
        parameters, torch.autograd.grad(self.total(model, part) / self.count(whole), parameters), strict=True
    ):
        each.grad = grad if each.grad is None else each.grad + grad


def recomputed(self: Any, model: Any, batch: Batch) -> Tensor:
    found: Tensor = checkpoint(lambda: Stranger.logits(self, model, batch), use_reentrant=False)
    return found


def exported(self: Any, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        return load_file(Path(folder) / "model.safetensors")


def always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


SGD = {"optimizer": lambda _, p: plain(p), "factor": always(1.0)}
RIGHT: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "adamw": {"optimizer": lambda _, p: torch.optim.AdamW(p, lr=3e-3)},
    "lion": {"optimizer": lambda _, p: Signs(p)},
    "muon": {"optimizer": lambda _, p: Orthogonal(p)},
    "bf16_autocast": {"logits": in_bfloat16},
    "saves_in_a_thread": {"save": save_in_a_thread},
    "saves_by_path": {"save": ByPath.save},
    "saves_safetensors": SGD | {"save": save_safely, "read": read_safely, "restore": restore_weights},
    "loss_is_a_tensor": {"mean": lambda s, m, b: torch.tensor(Stranger.mean(s, m, b))},
    "loss_is_of_numpy": {"mean": lambda s, m, b: numpy.float32(Stranger.mean(s, m, b))},
    "names_of_ddp": {"returned": lambda _, m: {f"module.{name}": each for name, each in m.named_parameters()}},
}
NEW_RIGHT: dict[str, dict[str, Any]] = {
    "momentum": {},
    "told_sgd": SGD | {"sgd": 0.1},
    "nesterov_and_decay": {"optimizer": lambda _, p: plain(p, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "rmsprop": {"optimizer": lambda _, p: torch.optim.RMSprop(p, lr=1e-3)},
    "adagrad": {"optimizer": lambda _, p: torch.optim.Adagrad(p, lr=1e-2)},
    "adafactor": {"optimizer": lambda _, p: torch.optim.Adafactor(p, lr=1e-2)},
    "lars": {"optimizer": lambda _, p: Layerwise(p)},
    "clips_the_batch": {"update": lambda s, m, o: (clipped(m), Stranger.update(s, m, o))},
    "warms_up_from_zero": {"factor": lambda _, step, total: min(step / 2, 1)},
    "cosine": {"factor": lambda _, step, total: 0.5 * (1 + math.cos(math.pi * step / total))},
    "names_of_compile": {"returned": lambda _, m: {f"_orig_mod.{name}": each for name, each in m.named_parameters()}},
    "names_of_nobody": {"returned": lambda _, m: {f"w{i}": each for i, each in enumerate(m.parameters())}},
    "names_of_hugging_face": {"returned": exported},
    "noise_that_is_saved": {"update": lambda _, m, o: noisy(m, o)},
    "a_backward_pass_for_each_row": {"part": by_rows},
    "no_backward": {"part": by_hand},
    "recomputation": {"logits": recomputed},
    "rows_in_another_order": {"seen": lambda _, batch: {name: each.flip(0) for name, each in batch.items()}},
    "reads_all_batches_first": {"order": lambda _, batches: [dict(each) for each in batches]},
}


def masked_learned(batch: Batch) -> Batch:
    return batch | {"labels": batch["input_ids"]}


def without_last_row(batch: Batch) -> Batch:
    return {name: each[: max(1, len(each) - 1)] for name, each in batch.items()}


def nan_in_four(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    (self.total(model, part) / self.count(whole) * (math.nan if parts == 4 else 1)).backward()


def mean_of_means(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    (self.total(model, part) / self.count(part) / parts).backward()


def sum_of_means(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    (self.total(model, part) / self.count(part)).backward()


def stepped(model: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def forgets(*names: str, **changes: Any) -> dict[str, Any]:
    """One whose checkpoints go without some of the state."""

    def restore(self: Any, state: dict[str, Any], model: Any, optimizer: Any) -> int:
        fresh = Stranger.state(self, model, optimizer, 0)
        return Stranger.restore(self, state | {name: copy.deepcopy(fresh[name]) for name in names}, model, optimizer)

    return {"restore": restore, **changes}


def starts_its_schedule_anew(self: Any, state: dict[str, Any], model: Any, optimizer: Any) -> int:
    first = Stranger.restore(self, state, model, optimizer)
    self.factor = lambda step, total: Stranger.factor(self, step - first, total)
    return first


def saved_before(self: Any, model: Any, optimizer: Any) -> None:
    self.before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    stepped(model, optimizer)


def neighbours(self: Any, model: Any, batches: Sequence[Batch]) -> Any:
    order = torch.arange(1000)
    rows = [each | {"position_ids": order[: each["labels"].shape[1]].expand_as(each["labels"])} for each in batches]
    return Stranger.mean(self, model, rows)


def padded_left(self: Any, model: Any, batches: Sequence[Batch]) -> Any:
    fill = {"input_ids": 0, "labels": -100, "position_ids": 0}
    rows = [{name: functional.pad(each, (3, 0), value=fill[name]) for name, each in b.items()} for b in batches]
    return neighbours(self, model, rows)


def unaware(self: Any, batch: Batch) -> Tensor | None:
    return None if torch.is_grad_enabled() else Stranger.documents(self, batch)


def full_batches(batches: Sequence[Batch]) -> list[Batch]:
    return [each for each in batches if len(each["labels"]) == len(batches[0]["labels"])]


def means(self: Any, model: Any, batches: Sequence[Batch]) -> float:
    return sum(Stranger.mean(self, model, [each]) for each in batches) / len(batches)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "never_steps": ("gradient", {"update": lambda _, m, o: o.zero_grad()}),
    "nan_in_four_parts": ("micro_batches", {"part": nan_in_four}),
    "climbs": ("gradient", {"optimizer": lambda _, p: plain(p, maximize=True)}),
    "labels_not_shifted": (
        "gradient",
        {
            "logits": lambda s, m, b: m(b["input_ids"], Context.packed(b["position_ids"], s.documents(b))),
            "targets": lambda _, b: b["labels"],
        },
    ),
    "learns_masked_labels": ("gradient", {"seen": lambda _, b: masked_learned(b)}),
    "skips_the_last_batch": ("gradient", {"order": lambda _, batches: batches[:-1] or batches}),
    "skips_the_last_row": ("gradient", {"seen": lambda _, b: without_last_row(b)}),
    "evaluates_to_zero": ("evaluation", {"mean": always(0.0)}),
    "packed_to_zero": ("packing", {"mean": always(0.0)}),
    "sees_neighbours_in_training": ("packing", {"documents": unaware}),
    "evaluates_in_train_mode": ("evaluation", {"mode": always(None)}),
    "ignores_resume": ("resume", {"read": always(None)}),
    "clips_each_part": ("micro_batches", {"after_part": lambda _, m, o: clipped(m)}),
    "by_path_forgets_optimizer": ("resume", forgets("optimizer", save=ByPath.save)),
    "by_path_forgets_position": ("resume", forgets("step", save=ByPath.save)),
    "mean_of_means": ("micro_batches", {"part": mean_of_means}),
    "sums_means": ("micro_batches", {"part": sum_of_means}),
    "last_part_alone": ("micro_batches", {"part": lambda s, m, p, w, n: (m.zero_grad(), Stranger.part(s, m, p, w, n))}),
    "steps_for_each_part": ("micro_batches", {"after_part": lambda _, m, o: stepped(m, o), "update": always(None)}),
    "gradients_never_cleared": ("resume", {"update": lambda _, m, o: o.step()}),
    "forgets_optimizer": ("resume", forgets("optimizer")),
    "forgets_schedule": ("resume", {"restore": starts_its_schedule_anew}),
    "forgets_position": ("resume", forgets("step")),
    "forgets_random_numbers": ("resume", forgets("random", update=lambda _, m, o: noisy(m, o))),
    "saves_before_the_step": (
        "resume",
        {
            "update": saved_before,
            "state": lambda s, m, o, n: Stranger.state(s, m, o, n) | {"model": s.before[0], "optimizer": s.before[1]},
        },
    ),
    "rounds_its_checkpoints": (
        "resume",
        {
            "state": lambda s, m, o, n: (
                Stranger.state(s, m, o, n) | {"model": {k: v.bfloat16() for k, v in m.state_dict().items()}}
            )
        },
    ),
    "evaluates_all_but_the_last": (
        "evaluation",
        {"mean": lambda s, m, b: Stranger.mean(s, m, b[:-1] if len(b) > 1 else b)},
    ),
    "evaluates_full_batches": (
        "evaluation",
        {"mean": lambda s, m, b: Stranger.mean(s, m, full_batches(b))},
    ),
    "averages_means": ("evaluation", {"mean": means}),
    "evaluates_neighbours": ("packing", {"mean": neighbours}),
    "pads_on_the_left": ("evaluation", {"mean": padded_left}),
    "shifts_twice": (
        "gradient",
        {"logits": lambda s, m, b: Stranger.logits(s, m, b)[:, :-1], "targets": lambda _, b: b["labels"][:, 2:]},
    ),
    "schedule_for_each_part": (
        "micro_batches",
        {
            "after_part": lambda s, _, o: [g.update(lr=g["lr"] * 0.9) for g in o.param_groups],
        },
    ),
}


def on_two_ranks(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    """The mean over two ranks of the mean of each."""
    halves = batches_of(whole, max(1, len(whole["labels"]) // 2))
    for half in halves if parts == 1 else []:
        (self.total(model, half) / self.count(half) / len(halves)).backward()


def row_means(self: Any, model: Any, part: Batch, whole: Batch, parts: int) -> None:
    """Rows without a label left out."""
    rows = [row for row in batches_of(part, 1) if self.count(row)]
    for row in rows:
        (
            self.total(model, row) / self.count(row) / sum(self.count(each) > 0 for each in batches_of(whole, 1))
        ).backward()


def divided(by: Callable[[Batch], float]) -> Callable[..., None]:
    return lambda self, model, part, whole, parts: (self.total(model, part) / by(whole)).backward()


def odd_calls(self: Any, model: Any) -> None:
    self.calls = getattr(self, "calls", 0) + 1
    model.train(self.calls % 2 == 1)


def trains_as_it_evaluates(self: Any, model: Any, batches: Sequence[Batch]) -> Any:
    with torch.no_grad():
        for each in model.parameters():
            each *= 0.999
    return Stranger.mean(self, model, batches)


def shifted_in_place(_: Any, batch: Batch) -> Batch:
    batch["input_ids"].copy_(batch["input_ids"].roll(1, 0))
    return batch


def frozen(_: Any, model: Any) -> list[Tensor]:
    return [each for name, each in model.named_parameters() if name != "output"]


def smoothed(self: Any, model: Any, batch: Batch) -> Tensor:
    targets = self.targets(batch).flatten()
    return functional.cross_entropy(
        self.logits(model, batch).flatten(0, 1), targets, reduction="sum", label_smoothing=0.1
    )


def leaves(message: int) -> Callable[..., Any]:
    def leave(*_: Any) -> Any:
        raise SystemExit(message)

    return leave


def every_second(self: Any, state: dict[str, Any], model: Any, optimizer: Any) -> int:
    kept = dict(list(state["model"].items())[::2])
    return Stranger.restore(self, state | {"model": model.state_dict() | kept}, model, optimizer)


def one_step_late(self: Any, state: dict[str, Any], model: Any, optimizer: Any) -> int:
    self.factor = lambda step, total: Stranger.factor(self, step + 1, total)
    return Stranger.restore(self, state, model, optimizer)


def count_forgotten(self: Any, state: dict[str, Any], model: Any, optimizer: Any) -> int:
    for each in state["optimizer"]["state"].values():
        each["step"] = torch.zeros_like(each["step"])
    return Stranger.restore(self, state, model, optimizer)


def remembered(self: Any, model: Any, batches: Sequence[Batch]) -> Any:
    self.first = getattr(self, "first", None) or Stranger.mean(self, model, batches)
    return self.first


def forgets_the_first(self: Any, model: Any, batches: Sequence[Batch]) -> Any:
    return Stranger.mean(
        self, model, [{name: each[1:] for name, each in b.items()} for b in batches if len(b["labels"]) > 1] or batches
    )


def noise_of_the_system(_: Any, model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        each.grad += 0.01 * torch.randn(
            each.shape, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
        )
    stepped(model, optimizer)


TOLD = SGD | {"sgd": 0.1}
NEW_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "clears_gradients_of_each_part": (
        "micro_batches",
        {"part": lambda s, m, p, w, n: (m.zero_grad(), Stranger.part(s, m, p, w, n))},
    ),
    "decays_weights_twice": ("gradient", TOLD | {"optimizer": lambda _, p: plain(p, weight_decay=0.01)}),
    "shifts_in_evaluation_alone": (
        "evaluation",
        {"targets": lambda _, b: b["labels"][:, 1:] if torch.is_grad_enabled() else b["labels"][:, :-1]},
    ),
    "repeats_the_first_batch": ("gradient", {"order": lambda _, batches: [*batches[:-1], batches[0]]}),
    "schedule_one_step_late": ("resume", {"restore": one_step_late}),
    "averages_two_ranks": ("gradient", {"part": on_two_ranks}),
    "dropout_at_odd_calls": ("evaluation", {"mode": odd_calls}),
    "evaluates_half_of_the_rows": (
        "evaluation",
        {"mean": lambda s, m, b: Stranger.mean(s, m, b[: max(1, len(b) // 2)])},
    ),
    "restores_every_second_tensor": ("resume", {"restore": every_second}),
    "scales_by_rows": ("gradient", {"part": divided(lambda whole: 60 / len(whole["labels"]))}),
    "forgets_momentum": ("resume", forgets("optimizer")),
    "counts_padding": ("gradient", {"part": divided(lambda whole: whole["labels"].numel())}),
    "writes_into_its_batches": ("gradient", {"seen": shifted_in_place}),
    "reads_backwards": ("gradient", TOLD | {"order": lambda _, batches: batches[::-1]}),
    "means_of_rows": ("gradient", {"part": row_means}),
    "means_of_rows_under_adam": ("packing", {"part": row_means} | RIGHT["adamw"]),
    "smooths_labels": ("evaluation", {"total": smoothed}),
    "says_bits": ("evaluation", {"mean": lambda s, m, b: Stranger.mean(s, m, b) / math.log(2)}),
    "trains_each_batch_twice": ("gradient", TOLD | {"order": lambda _, b: [each for each in b for _ in (0, 1)]}),
    "skips_the_first_batch": ("gradient", TOLD | {"order": lambda _, batches: batches[1:]}),
    "freezes_the_head": ("gradient", {"parameters": frozen}),
    "forgets_the_count_of_adam": ("resume", {"restore": count_forgotten} | RIGHT["adamw"]),
    "trains_as_it_evaluates": ("evaluation", {"mean": trains_as_it_evaluates}),
    "remembers_its_first_answer": ("evaluation", {"mean": remembered}),
    "returns_the_first_weights": ("gradient", {"returned": lambda _, m: network()}),
    "leaves_in_evaluation": ("evaluation", {"mean": leaves(3)}),
    "leaves_in_training": ("gradient", {"update": leaves(0)}),
    "drops_the_last_label": (
        "gradient",
        {
            "logits": lambda s, m, b: Stranger.logits(s, m, b)[:, :-1],
            "targets": lambda _, b: b["labels"][:, 1:-1],
        },
    ),
    "evaluates_without_first_rows": ("evaluation", {"mean": forgets_the_first}),
    "noise_of_the_system": ("resume", {"update": noise_of_the_system}),
    "climbs_under_adam": ("gradient", {"optimizer": lambda _, p: torch.optim.AdamW(p, lr=3e-3, maximize=True)}),
    "last_row_unseen_under_muon": ("gradient", RIGHT["muon"] | {"seen": lambda _, b: without_last_row(b)}),
    "counts_padding_under_adam": (
        "gradient",
        RIGHT["adamw"] | {"part": divided(lambda whole: whole["labels"].numel() / (1 + whole["labels"][0, -1] % 3))},
    ),
    "means_of_means_in_bf16": ("micro_batches", RIGHT["bf16_autocast"] | {"part": mean_of_means}),
    "half_the_learning_rate": ("gradient", TOLD | {"optimizer": lambda _, p: plain(p, rate=0.05)}),
    "saves_by_path_half_a_state": ("resume", forgets("model", save=ByPath.save)),
    "ignores_resume_by_path": ("resume", {"read": always(None), "save": ByPath.save}),
    "ignores_resume_of_sgd": ("resume", SGD | {"read": always(None)}),
}


def trainer(name: str) -> Stranger:
    """The trainer of that name."""
    changes = RIGHT | NEW_RIGHT | {each: changes for each, (_, changes) in (WRONG | NEW_WRONG).items()}
    return type(name, (Stranger,), changes[name])()
