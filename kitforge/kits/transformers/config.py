"""The options of the task `text_generation`. Built from a plain dict, without Hydra."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kitforge.data.schedule import OnSourceEnd
from kitforge.foundation.config import check, check_least
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.language_model import TokenizedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Training and evaluation text, packing and batching."""

    # python_stdlib, a file, a folder, a glob, a list of them, or a mixture [{source: ..., weight: 0.7}, ...]
    train: Any = None
    eval: Any = None  # None: a fraction of the training documents (eval_fraction)
    batch_size: int = 8  # rows per step
    sequence_length: int = 256  # tokens per row
    eval_fraction: float = 0.05  # fraction of the training documents held out if data.eval is not given
    column: str = "text"  # text column of jsonl, csv and parquet
    separator: str | None = None  # separator of documents in a txt file; None: one document per file
    encoding_errors: Literal["strict", "replace", "ignore"] = "strict"  # handling of bytes that are not UTF-8
    shuffle: bool = True
    # When a source of a mixture has no further rows: read it again in another order, or end the training.
    on_source_end: OnSourceEnd = "restart"
    # Read and tokenize the training text during training, without a token cache; needs trainer.max_steps.
    streaming: bool = False
    shuffle_buffer: int = 10_000  # documents that a stream holds to shuffle them, over all ranks
    prefetch: int = 2  # batches prepared ahead in the background
    num_workers: int | None = None  # tokenizer processes; None: one per core
    tasks: str | None = None  # folder of benchmark files and YAML files of lm-evaluation-harness that `tasks` names
    # Benchmark questions longer than the context window: refuse, or cut the beginning of the context.
    on_too_long: Literal["refuse", "cut_left"] = "refuse"
    cache: str | None = None  # folder of token caches; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        check_least("data", self, 1, "batch_size", "sequence_length", "prefetch", "shuffle_buffer")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGenerationOptions(TokenizedOptions):
    """All options of the task."""

    task: str = "text_generation"
    data: DataOptions = field(default_factory=DataOptions)
    inference: InferenceOptions = field(default_factory=InferenceOptions)
    format: Literal["huggingface", "gguf", "onnx", "torch_export"] = "huggingface"  # of `export`
    # `export` to onnx and torch_export: past keys and values are inputs; False: whole texts only.
    use_cache: bool = True
    prompt: Any = None  # one prompt or a list; also for the samples of the report
    # What `generate` continues a prompt with: JSON by a file with a JSON schema, a regular expression, or one of these.
    schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    # Benchmarks of `evaluate`: jsonl files, their names in data.tasks, or tasks of lm-evaluation-harness.
    tasks: tuple[str, ...] = ()
    apply_chat_template: bool = False  # whether tasks of lm-evaluation-harness ask in the chat template
    limit: int | None = None  # first questions of each benchmark; None: all
    # Output jsonl file: completions of the prompts in data.eval for `generate`, rows for `evaluate` (None: a file per
    # benchmark in the run folder).
    output: str | None = None
    port: int = 8000  # port of `serve`; 0: any free port
    serve: ServeOptions = field(default_factory=ServeOptions)

    def __post_init__(self) -> None:
        TokenizedOptions.__post_init__(self)
        max_steps, epochs = self.trainer.max_steps, self.trainer.epochs
        fits = not self.data.streaming or (max_steps is not None and epochs is None)
        given = f"trainer.max_steps={max_steps} trainer.epochs={epochs}"
        expected = "trainer.max_steps=N without trainer.epochs, as a stream has no length"
        check(fits, "data.streaming", given, expected)
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        right = texts is None or (isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts))
        check(right, "prompt", self.prompt, "text, or a list of texts", """prompt='["first","second"]'""")
        check(self.limit is None or self.limit >= 1, "limit", self.limit, "a whole number of at least 1")
        check(self.limit is None or bool(self.tasks), "limit", self.limit, "nothing without questions (tasks=[...])")
        check(0 <= self.port < 65536, "port", self.port, "0 to 65535")
