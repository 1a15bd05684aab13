"""What the tasks of this kit share: the tokenizer of a run, and the options and settings of its network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import Trainable
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.data.source import Source
from kitforge.data.token_cache import default_root
from kitforge.data.tokenizer import Tokenizer, TokenizerConfig, make_tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError
from kitforge.kits.language_model import stored_tokenizer
from kitforge.models.catalog import Kind, config_of
from kitforge.trainer.options import TrainerOptions


class RowOptions(Protocol):
    """What the data options of all tasks have."""

    @property
    def sequence_length(self) -> int:
        """Largest number of tokens of a row."""
        ...

    @property
    def cache(self) -> str | None:
        """Folder of caches."""
        ...


class NetworkOptions(Protocol):
    """What the options of all tasks have."""

    @property
    def model(self) -> dict[str, Any]:
        """The family and its options."""
        ...

    @property
    def tokenizer(self) -> TokenizerConfig:
        """Which tokenizer."""
        ...

    @property
    def data(self) -> RowOptions:
        """Rows."""
        ...

    @property
    def checkpoint(self) -> str | None:
        """Weights to start from."""
        ...

    @property
    def trainer(self) -> TrainerOptions:
        """Of the loop."""
        ...

    @property
    def compile_level(self) -> CompileLevel:
        """Of the kernels."""
        ...


def find_run_tokenizer(options: NetworkOptions, given: Tokenizer | None, source: Source | None) -> Tokenizer:
    """The one handed over, else the one that lies with the weights, else the one that the options name."""
    if given is not None:
        return given
    if options.checkpoint is not None:
        try:
            return stored_tokenizer(Path(options.checkpoint))
        except DataError:
            if options.tokenizer == type(options.tokenizer)():
                raise
    cache = options.data.cache
    return make_tokenizer(options.tokenizer, source, default_root() if cache is None else Path(cache))


def new_config(options: NetworkOptions, tokenizer: Tokenizer, kind: Kind = "language model") -> FamilyConfig:
    """The options of a network of that kind that is to be built."""
    values = dict(options.model)
    if values.get("vocab_size") is None:
        values["vocab_size"] = tokenizer.vocab_size
    return config_of(values, kind)


def check_fit(config: FamilyConfig, options: NetworkOptions, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a network that is too small for the tokenizer or the rows."""
    check(
        config.vocab_size >= tokenizer.vocab_size,
        "model.vocab_size",
        config.vocab_size,
        f"at least the tokenizer's {tokenizer.vocab_size}",
        "model.vocab_size=null takes the tokenizer's",
    )
    check(
        options.data.sequence_length <= config.max_length,
        "data.sequence_length",
        options.data.sequence_length,
        f"at most the model's max_length={config.max_length}",
    )


def prepare(model: nn.Module, options: NetworkOptions) -> nn.Module:
    """Apply the options of training to a network, and return it."""
    if isinstance(model, Trainable):
        model.recompute = options.trainer.activation_checkpointing
        if options.compile_level == "O2":
            model.compile_blocks()
    return model
