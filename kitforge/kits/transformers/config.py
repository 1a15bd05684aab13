"""The options of the task `text_generation`. Built from a plain dict, without Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kitforge.data.tokenizer import TokenizerConfig
from kitforge.foundation.config import check
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.trainer.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Which text, and how it is cut into batches."""

    train: Any = None  # python_stdlib, a file, a folder, a glob, or a list of them
    eval: Any = None  # None: a share of the training documents
    batch_size: int = 8  # rows of a step
    sequence_length: int = 256  # tokens of a row
    eval_fraction: float = 0.05  # share of the training documents kept for evaluation where data.eval is not given
    column: str = "text"  # of jsonl, csv and parquet
    separator: str | None = None  # text that parts the documents of a txt file; None: a file is one document
    encoding_errors: Literal["strict", "replace", "ignore"] = "strict"  # what to do with bytes that are not UTF-8
    shuffle: bool = True
    prefetch: int = 2  # batches made ready ahead
    num_workers: int | None = None  # processes that tokenise; None: one per core
    tasks: str | None = None  # folder in which the tasks of `evaluate` are looked for by name
    # What `evaluate` does with a question that the model has no room for; cut_left drops the beginning of its context.
    on_too_long: Literal["refuse", "cut_left"] = "refuse"
    cache: str | None = None  # folder of token caches; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "prefetch"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGenerationOptions(RunOptions):
    """All options of the task."""

    task: str = "text_generation"
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataOptions = field(default_factory=DataOptions)
    inference: InferenceOptions = field(default_factory=InferenceOptions)
    checkpoint: str | None = None  # weights to start from, to evaluate or to generate with
    prompt: Any = None  # text, or a list of texts, to continue; also for the samples of a report
    tasks: tuple[str, ...] = ()  # questions for `evaluate`: jsonl files, or names of those in data.tasks
    limit: int | None = None  # questions of each task, from its beginning; None: all
    # The jsonl file that `generate` writes answers to the prompts of data.eval into, and `evaluate` its rows; None for
    # `evaluate`: a file for each task in the run's folder.
    output: str | None = None
    port: int = 8000  # that `serve` listens on; 0: any that is free
    serve: ServeOptions = field(default_factory=ServeOptions)

    def __post_init__(self) -> None:
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        right = texts is None or (isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts))
        check(right, "prompt", self.prompt, "text, or a list of texts", """prompt='["first","second"]'""")
        check(self.limit is None or self.limit >= 1, "limit", self.limit, "a whole number of at least 1")
        check(self.limit is None or bool(self.tasks), "limit", self.limit, "nothing without questions (tasks=[...])")
        check(0 <= self.port < 65536, "port", self.port, "0 to 65535")
