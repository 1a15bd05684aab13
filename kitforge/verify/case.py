"""A configuration under test: composed and checked as `kitforge train` does, then reduced to a run of seconds."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from kitforge.api import load_model, load_processor
from kitforge.composition import compose_config, dotted, nested, task_of
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.foundation.config import option_names
from kitforge.foundation.errors import ConfigError
from kitforge.kits.kit import AnyKit, RunAssembly, RunInputs
from kitforge.kits.registry import DEFAULT_TASK, kit_of
from kitforge.kits.start import with_open_model
from kitforge.verify.contract import NotOfferedError
from kitforge.verify.processes import Process
from kitforge.verify.sample_data import REWARD, REWARDED_TASKS, write_sample

# The run that every contract is about.
STEPS, CHECKPOINT_EVERY = 8, 2
# Seconds that one run may take.
RUN_TIMEOUT = 600.0
# What a run is reduced to: the most that an option may be.
LIMITS = {
    "data.batch_size": 6,
    "inference.max_new_tokens": 8,
    "rollout.max_new_tokens": 8,
    "rl.prompts_per_rollout": 4,
    "rl.num_generations": 4,
    "retrieval.num_negatives": 16,
}
# What a run is set to.
FIXED = {
    "trainer.max_steps": STEPS,
    "trainer.epochs": None,
    "trainer.checkpoint_every": CHECKPOINT_EVERY,
    "trainer.save_total_limit": STEPS,
    "trainer.eval_every": None,
    "trainer.eval_first": False,
    "trainer.eval_batches": 2,
    "trainer.early_stopping": None,
    "trainer.log_every": 1,
    "trainer.micro_batch_size": None,
    "trainer.progress": False,
    "trainer.profile": False,
    "trainer.tensorboard": False,
    "trainer.wandb": None,
    "schedule.warmup_steps": None,
    "data.num_workers": 1,
    "resume": None,
}
# Where what differs by rounding is compared: the same code, whose mistakes half precision would hide.
PRECISE = {"precision": "fp32"}
DEGREES = ("parallel.data", "parallel.shard", "parallel.context", "parallel.tensor", "parallel.pipeline")
# What goes with degrees above 1, and is refused without them.
OF_DEGREES = {
    "parallel.expert": 1,
    "parallel.context_by": "heads",
    "parallel.schedule": "1f1b",
    "parallel.stages_per_rank": 2,
}
LARGE, FEW_LAYERS = 20_000_000, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task with its composed options, and the folder that its runs are in."""

    name: str
    values: Mapping[str, Any]  # by dotted name, reduced
    kit: AnyKit
    folder: Path
    degrees: Mapping[str, Any]  # of parallelism, and what goes with them, as given
    reduced: tuple[str, ...] = field(default=())  # what was reduced

    @classmethod
    def of(cls, choices: Mapping[str, Any], folder: Path) -> Self:
        """The case of the options of a command. Raises what `kitforge train` raises for them."""
        task = task_of(choices)
        kit = kit_of(task)
        given = {name: value for name, value in choices.items() if name != "task"}
        composed = compose_config(task, given, ("serve",))
        options = kit.read_options(composed.values)
        kit.check_parallel(options)
        folder.mkdir(parents=True, exist_ok=True)
        known, filled = option_names(kit.OPTIONS), dict[str, Any]()
        if "data.train" in known and options.data.train is None and (sample := write_sample(task, folder)) is not None:
            # Enough evaluation rows for batches of several.
            filled = {"data.train": str(sample), "data.eval_fraction": 0.25}
        if task in REWARDED_TASKS and getattr(options, "reward", None) is None:
            filled["reward"] = REWARD
        whole = dotted(composed.values) | dotted(kit.resolved(options)) | filled
        limits = _reductions(whole, known)
        alone = dict.fromkeys(DEGREES, 1) | OF_DEGREES
        fixed = FIXED | alone | {"data.cache": str(folder / "cache")}
        values = whole | {name: value for name, value in fixed.items() if name in known} | limits
        reduced = [f"trainer.max_steps={STEPS}", *(f"{name}={value}" for name, value in limits.items())]
        if values["device"] != "cpu" and torch.accelerator.is_available():
            # Equal bits are promised for this alone.
            values["deterministic"] = True
            reduced.append("deterministic=True")
        if values["precision"] != "fp32":
            reduced.append("fp32 for micro_batches, evaluation, packing, ranks and layouts")
        if math.prod(whole.get(name, 1) for name in DEGREES) > 1:
            reduced.append("one rank but for ranks and layouts")
        return cls(
            name=f"{task}/{composed.model_name}",
            values=values,
            kit=kit,
            folder=folder,
            degrees={name: whole.get(name, value) for name, value in alone.items()},
            reduced=tuple(reduced),
        )

    @property
    def num_ranks(self) -> int:
        """The ranks that the degrees as given ask for."""
        return math.prod(self.degrees[name] for name in DEGREES)

    def options(self, changes: Mapping[str, Any]) -> Any:
        """The options of the reduced run, with changes by dotted name. Raises ConfigError."""
        return self.kit.read_options(nested({**self.values, **changes}))

    def has(self, option: str) -> bool:
        """Whether the task has this option."""
        return option in option_names(self.kit.OPTIONS)

    @contextmanager
    def run(
        self, folder: str | Path, changes: Mapping[str, Any], model: nn.Module | None = None
    ) -> Iterator[RunAssembly[Any, Any]]:
        """A run in `folder` ready to start, of the network handed over if there is one, which it trains in place."""
        network = {name: None for name in self.values if name.startswith("model.")} if model is not None else {}
        values = {name: value for name, value in self.values.items() if name not in network}
        given = nested({**values, **changes, "output_dir": str(self.folder / folder)})
        options = self.kit.read_options({**given, "model": {}} if model is not None else given)
        inputs = RunInputs[Any](model=model, model_name=self.name)
        with Rendezvous.open(options.parallel, options.device, options.num_ranks) as rendezvous:
            yield self.kit.assemble(options, with_open_model(options, inputs), rendezvous)

    def train(self, folder: str | Path, changes: Mapping[str, Any]) -> Path:
        """Train to the end in this process; the run folder."""
        with self.run(folder, changes) as assembly:
            return assembly.train().folder

    def start(
        self, folder: str | Path, changes: Mapping[str, Any], prepare: Callable[[], None] = lambda: None
    ) -> Process:
        """Train in a process of its own, which first calls `prepare`."""

        def work() -> None:
            prepare()
            self.train(folder, changes)

        return Process(work)

    @property
    def base(self) -> Path:
        """The run that nobody disturbed."""
        return self.folder / "base"

    def train_base(self) -> None:
        """Train the undisturbed run: on a CPU in this process, whose forks are then warm; an accelerator cannot be used
        by forks of a process that has used it."""
        if self.values["device"] == "cpu" or not torch.accelerator.is_available():
            self.train("base", {})
        else:
            self.start("base", {}).result(RUN_TIMEOUT)

    def network(self) -> tuple[nn.Module, bool]:
        """The trained network on this process, and whether it is in float64. One with tables of rows stays as it is."""
        try:
            model = load_model(self.base, self.values["device"], "fp32", self.values["task"])
        except ConfigError as error:
            # Of a kit that leaves this to its user.
            raise NotOfferedError(str(error).splitlines()[0]) from None
        is_double = not self.has("cache.device_rows") and self.values["device"] != "mps"
        return (model.double() if is_double else model), is_double

    def evaluate(self, model: nn.Module, changes: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of the evaluation set for this network."""
        options = self.options(changes)
        roles: dict[str, Any] = {}
        for role in ("reference", "teacher"):
            if role not in self.kit.ROLES or getattr(options, role) is not None:
                continue
            # Preferences are measured from the policy that training began with, or one close to it.
            first = step_folder(self.base / "checkpoints", CHECKPOINT_EVERY)
            dtype = next(model.parameters()).dtype
            roles[role] = load_model(first, options.device, "fp32", options.task).to(dtype)
        processor = load_processor(self.base)
        inputs = RunInputs[Any](model=model, model_folder=self.base, processor=processor, roles=roles)
        rendezvous = Rendezvous.open(options.parallel, options.device, options.num_ranks)
        found = self.kit.evaluate(options, inputs, rendezvous)
        return {name: value for name, value in found.items() if not name.startswith("time/")}


def _reductions(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Options that exceed what a run of seconds can have."""
    found = {}
    # Texts are cut into rows; rows that are too long would be refused.
    limits = LIMITS | ({"data.sequence_length": 64} if values["task"] == DEFAULT_TASK else {})
    for name, most in limits.items():
        given = values.get(name)
        if name in known and (given is None or (isinstance(given, int) and given > most)):
            found[name] = most
    layers = values.get("model.num_layers")
    width = max((values.get(f"model.{name}") or 0) for name in ("dim", "mlp_dim"))
    if isinstance(layers, int) and layers > FEW_LAYERS and layers * 12 * width**2 > LARGE:
        found["model.num_layers"] = FEW_LAYERS
    return found
