"""What the kits of tasks over rows in memory share: how a run is put together, and how a model is evaluated."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.foundation.config import to_dict, to_yaml
from kitforge.foundation.errors import ModelError
from kitforge.kits.kit import Kit, OptionsT, ProcessorT, RunAssembly, RunInputs, evaluate_model
from kitforge.kits.transformers.rows import RowSplits, RowTask
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import default_folder, make_loop

TRAINING_ONLY_OPTIONS = frozenset(
    ("checkpoint", "model", "lora", "freeze", "resume", "output_dir", "device", "parallel", "output")
)


class PreparedRows(Protocol):
    """Rows and processor of a run, and how its network is built."""

    @property
    def data(self) -> RowSplits:
        """Rows of training and evaluation."""
        ...

    @property
    def processor(self) -> Any:
        """What reads the rows."""
        ...

    def recorded(self) -> dict[str, Any]:
        """Options as a checkpoint records them, where they differ from those given: the model, and its labels."""
        ...

    def build(self, world: World) -> nn.Module:
        """The network on the device, cut as the world's degrees say."""
        ...


class RowKit(Kit[OptionsT, ProcessorT]):
    """A kit around a `RowTask`."""

    FINE_TUNING = "adamw_finetune"
    PREDICTS_AS_TRAINED = True

    @abstractmethod
    def prepare(self, options: OptionsT, inputs: RunInputs[ProcessorT], *, is_evaluation: bool) -> PreparedRows:
        """Everything that can be read before any rank is started."""

    @abstractmethod
    def task(
        self, options: OptionsT, prepared: PreparedRows, build: Callable[[World], nn.Module], world: World
    ) -> RowTask:
        """The loss over the rows, of the network that `build` gives."""

    def callbacks(self, options: OptionsT, prepared: PreparedRows) -> Sequence[Callback]:
        """Further callbacks of a run. Default: none."""
        del options, prepared
        return ()

    def assemble(
        self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous
    ) -> RunAssembly[OptionsT, ProcessorT]:
        """Everything that a run needs, in the order in which mistakes are cheapest to find."""
        prepared = self.prepare(options, inputs, is_evaluation=False)
        world = rendezvous.init_process_group().with_precision(options.precision)
        recorded = to_dict(options) | prepared.recorded()
        config_text = to_yaml(recorded)
        rendezvous.check_same({"configuration": config_text, "rows": prepared.data.fingerprint})
        folder = world.broadcast_object(default_folder(options, inputs.model_name))
        loop = make_loop(
            self.task(options, prepared, prepared.build, world),
            dataclasses.replace(options, device=str(world.device)),
            folder,
            world=world,
            config=recorded,
            callbacks=[*inputs.callbacks, *self.callbacks(options, prepared)],
        )
        return RunAssembly(
            loop=loop, folder=folder, processor=prepared.processor, options=options, config_text=config_text
        )

    def evaluate(self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous) -> dict[str, float]:
        """Metrics of the evaluation rows, for a model in memory or under `options.checkpoint`."""
        if inputs.model is None and getattr(options, "checkpoint", None) is None:
            raise ModelError("there is no model to evaluate", fix="add checkpoint=RUN, or train one first")
        prepared = self.prepare(options, inputs, is_evaluation=True)
        world = rendezvous.init_process_group().with_precision(options.precision)
        model = prepared.build(world)
        task = self.task(options, prepared, lambda _world: model, world)
        return evaluate_model(task, parallel_model_of(model, world), world.device, options.precision)

    def evaluation_options(self, recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The run's options without those of its training. With a new data.train, data.eval is a part of it."""
        found = {name: value for name, value in recorded.items() if name not in TRAINING_ONLY_OPTIONS}
        if "data.train" in chosen and "data.eval" not in chosen:
            found["data"] = {**found["data"], "eval": None}
        return found
