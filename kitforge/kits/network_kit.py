"""What the kits share that train a network of a family: how it is checked, opened, loaded and exported."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.config import to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError
from kitforge.kits.dry_task import rows_at_once, traced_task
from kitforge.kits.kit import Kit, ProcessorT, RunInputs, datasets
from kitforge.kits.language_model import (
    NetworkOptions,
    evaluation_options,
    export_language_model,
    save_language_model,
    stored_tokenizer,
)
from kitforge.kits.network_source import check_splits
from kitforge.models import loading as model_folder
from kitforge.models.catalog import Kind, config_of, families_of
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.trainer.run_folder import Run
from kitforge.trainer.step_trace import TracedTask

NetworkOptionsT = TypeVar("NetworkOptionsT", bound=NetworkOptions)


class NetworkKit(Kit[NetworkOptionsT, ProcessorT]):
    """A kit around a network of one kind."""

    FINE_TUNING = "adamw_finetune"
    KIND: Kind = "language model"
    FURTHER_KINDS: tuple[Kind, ...] = ()  # that the task trains too
    ROWS = "ROWS.jsonl"  # names of files in advice: of rows, and what `predict` writes of them
    OUTPUT = "PREDICTIONS.jsonl"

    def required_datasets(
        self, options: NetworkOptionsT, inputs: RunInputs[ProcessorT], rows: str, *, is_evaluation: bool
    ) -> tuple[object, object]:
        """See `datasets`. Raises ConfigError where neither names `rows`."""
        train, evaluation = datasets(options, inputs, is_evaluation=is_evaluation)
        if train is None and evaluation is None:
            raise ConfigError(f"there are no {rows}", got="data.train=null", fix=f"add data.train={self.ROWS}")
        return train, evaluation

    def check_parallel(self, options: NetworkOptionsT) -> None:
        """Raise ConfigError for a network that the degrees of `options` cannot split; before any rank is started."""
        check_splits(options, self.KIND, *self.FURTHER_KINDS)

    def evaluation_options(self, recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The run's options without those of its training. With a new data.train, data.eval is a part of it."""
        return evaluation_options(recorded, chosen)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The model of a run folder, a step folder or a Hugging Face folder, adapters merged."""
        return model_folder.load_stored(self.open_model(folder), device=device, level=level, dtype=dtype)

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a run folder, a step folder or a Hugging Face folder, of which no weight is read yet."""
        return model_folder.open_model(folder, open_run)

    def find_processor(self, folder: Path) -> Any:
        """The tokenizer that lies with a run, a step or a Hugging Face folder."""
        return stored_tokenizer(folder)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
        """Write a Hugging Face folder, adapters merged: of a model in memory, see `save_language_model`, or of a
        folder."""
        if isinstance(source, Path):
            export_language_model(self.open_model(source), folder, processor, dtype)
        else:
            save_language_model(source.model if isinstance(source, Run) else source, folder, processor, dtype)

    def next_steps(self, folder: Path) -> list[str]:
        return [
            f"kitforge predict checkpoint={folder} data.eval={self.ROWS} output={self.OUTPUT}",
            f"kitforge evaluate checkpoint={folder} data.eval={self.ROWS}",
        ]

    def resolved(self, options: NetworkOptionsT) -> dict[str, Any]:
        values = to_dict(options)
        if options.checkpoint is not None or self.KIND == "vision":
            return values
        network, tokenizer = dict(options.model), cast(Any, options).tokenizer
        if network.get("vocab_size") is None:
            # The size that the tokenizer will have; that of a folder is not read for this.
            network["vocab_size"] = ByteTokenizer.vocab_size if tokenizer.name == "byte" else tokenizer.vocab_size
        config = config_of(network)
        return values | {"model": {"family": config.family, **to_dict(config)}}

    def plan(self, options: NetworkOptionsT) -> TracedTask:
        """The step of rows that stand in for data, which are as long as the options allow."""
        home = options.checkpoint
        stored = None if home is None else self.open_model(resolve(home))
        config: Any = self.new_config(options) if stored is None else stored.config
        if stored is None and options.lora.is_on:
            stored = StoredModel(config=config, names=(), read=lambda _, part: torch.zeros(part.shape if part else ()))
            home = "planned"
        planned = replace(options, checkpoint=home, trainer=replace(options.trainer, progress=False))
        planned = replace(planned, data=replace(options.data, train=None, eval=None))
        return traced_task(self, planned, config, self.dry_inputs(options, config), stored)

    def new_config(self, options: NetworkOptionsT) -> Any:
        """That of a new network."""
        return config_of(self.resolved(options)["model"], self.KIND, *self.FURTHER_KINDS)

    def dry_inputs(self, options: NetworkOptionsT, config: Any) -> RunInputs[Any]:
        """Rows that stand in for data, and what reads them."""
        rows = self.dry_rows(options)
        held_out = rows * -(-rows_at_once(options) * options.parallel.num_replicas // len(rows))
        return RunInputs(train_dataset=rows, eval_dataset=held_out, processor=cast(Any, ByteTokenizer()))

    def dry_rows(self, options: NetworkOptionsT) -> list[Any]:
        """As many rows as a batch cannot do without, as long as they may be."""
        raise self._unsupported("is not planned")

    def describe_presets(self, presets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
        """A row for every preset of a family of ours."""
        rows = []
        for name, values in presets.items():
            if values.get("family") in families_of(self.KIND):
                vocabulary = {"vocab_size": values.get("vocab_size") or ByteTokenizer.vocab_size}
                config: Any = config_of({**values, **({} if self.KIND == "vision" else vocabulary)})
                size = _num_parameters(config)
                count = f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
                row = {"model": name, "family": config.family, "parameters": count}
                row |= {"layers": str(config.num_layers), "width": str(config.dim)}
                unit, size = ("image", config.image_size) if self.KIND == "vision" else ("length", config.max_length)
                rows.append(row | {unit: f"{size:,}"})
        return rows


@functools.cache
def _num_parameters(config: Any) -> int:
    """Of a network built on meta, so nothing is held; many tasks ask for the same one."""
    return sum(parameter.numel() for parameter in model_folder.build_on_meta(config).parameters())
