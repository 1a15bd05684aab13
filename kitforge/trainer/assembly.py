"""What the front door hands to a kit, and the run that it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from torch import nn

from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.loop import Loop

# What reads the rows of a task: the tokenizer of texts, the features of a table.
Reader = TypeVar("Reader")
Options = TypeVar("Options")


# Without slots, with which Python 3.11 makes no instance of a frozen dataclass by a name such as RunInputs[int].
@final
@dataclass(frozen=True, kw_only=True)
class RunInputs(Generic[Reader]):
    """Objects that a caller hands over instead of naming them in the options."""

    train_dataset: Any = None
    eval_dataset: Any = None
    model: nn.Module | None = None
    tokenizer: Reader | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    model_name: str = "model"


@final
@dataclass(frozen=True, kw_only=True)
class RunAssembly(Generic[Options, Reader]):
    """A run ready to start."""

    loop: Loop
    folder: Path
    tokenizer: Reader
    options: Options
    config_text: str
