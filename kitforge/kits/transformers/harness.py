"""Tasks of lm-evaluation-harness, by name or from YAML files, on our engine."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from torch import nn

from kitforge.data.chat.template import template_of
from kitforge.data.optional_imports import import_optional
from kitforge.data.tokenizers.protocol import Tokenizer, document_frame
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import user_path
from kitforge.inference.folder_defaults import with_folder_defaults
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.transformers.evaluation import EvaluationResult, Evaluator, OnTooLong

# Settings of a task's generation that are options of ours under the same name.
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_READ = ("until", "do_sample", "max_gen_toks", *_SETTINGS)


class HarnessModel:
    """Answers the requests of lm-evaluation-harness. Is an `LM` of it, registered when its package is imported."""

    rank, world_size, tokenizer_name = 0, 1, "kitforge"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, options: InferenceOptions, on_too_long: OnTooLong, *, chats: bool
    ) -> None:
        self._template = template_of(tokenizer)
        self._options = with_folder_defaults(options, tokenizer.generation_config)
        reader = cast(Tokenizer, _TemplateReader(tokenizer)) if chats else tokenizer
        self.evaluator = Evaluator(model, reader, options, on_too_long)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding gives it."""
        asked = [(location, [each.args for each in group]) for location, group in groupby(requests, key=_location)]
        scored = (each for found in self.evaluator.score(asked) for each in found)
        return [(score.logprob, score.is_greedy(tokens)) for (_, tokens), score in scored]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of whole texts."""
        return self.evaluator.read([(_location(each), each.args[0]) for each in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What the model says after each context, up to a stop string."""
        return self.evaluator.generate([(_location(each), (each.args[0], self._chosen(each))) for each in requests])

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, which the reply follows."""
        return self._template.prompt_text(chat_history, opens_reply=add_generation_prompt)

    def _chosen(self, request: Any) -> InferenceOptions:
        given = {name: value for name, value in request.args[1].items() if value is not None}
        given.setdefault("temperature", 1.0 if given.get("do_sample") else 0.0)
        wanted = _import("models.utils").normalize_gen_kwargs(given, self._options.max_new_tokens)
        unread = ", ".join(name for name in wanted if name not in _READ)
        check(not unread, f"generation_kwargs of {request.task_name}", unread, f"some of {', '.join(_READ)}")
        return replace(
            self._options,
            max_new_tokens=wanted["max_gen_toks"],
            stop=tuple(filter(None, (*self._options.stop, *wanted["until"]))),
            **{name: wanted[name] for name in _SETTINGS if name in wanted},
        )


class _TemplateReader:
    """A tokenizer that reads the special tokens of its chat template in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.encode = template_of(tokenizer).encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, text: str) -> list[int]:
        tokens, (before, _) = self.encode(text), document_frame(self._tokenizer)
        return tokens if tokens[: len(before)] == before else [*before, *tokens]


def find_tasks(names: Sequence[str], folder: str | None) -> Any:
    """A task manager that knows the names, also of YAML files in `folder`; ConfigError if there is none."""
    library = _import("tasks", f"the benchmark {names[0]!r}, which has no file,")
    path = None if folder is None else str(user_path(folder))
    manager = library.TaskManager(include_path=path, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        # Thousands of files, which take it many seconds to list.
        manager = library.TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            files = [] if path is None else [file.name.partition(".jsonl")[0] for file in Path(path).glob("*.jsonl*")]
            close = get_close_matches(name, [*files, *manager.all_tasks], n=1)
            fix = f"did you mean {close[0]!r}?" if close else "name a jsonl file, or add data.tasks=FOLDER"
            raise ConfigError(f"there is no task {name!r}", fix=fix)
    return manager


def run_tasks(model: HarnessModel, names: Sequence[str], manager: Any, **settings: Any) -> EvaluationResult:
    """The metrics of tasks and their groups, as the harness computes them, and a row of the log for every sample."""
    _import("api.model").LM.register(HarnessModel)
    evaluator = _import("evaluator")
    # Its standard errors else come from processes forked from this one, whose threads may hold a lock.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        found = evaluator.simple_evaluate(model=model, tasks=list(names), task_manager=manager, **settings)
    except (AssertionError, ImportError, KeyError, OSError, ValueError) as error:
        raise ConfigError("lm-evaluation-harness fails", got=f"{type(error).__name__}: {error}") from error
    metrics = {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if "," in name and isinstance(value, (int, float))
    }
    metrics |= {f"{task}/questions": float(size["effective"]) for task, size in found["n-samples"].items()}
    cut = Counter(location.rpartition(":")[0] for location in model.evaluator.cut)
    metrics |= {f"{task}/cut_questions": float(size) for task, size in cut.items()}
    rows = {task: [{"task": task, **row} for row in samples] for task, samples in found["samples"].items()}
    return EvaluationResult(metrics=metrics, rows=rows)


def _location(request: Any) -> str:
    return f"{request.task_name}:{request.doc_id}"


def _import(module: str, needed_for: str = "benchmarks by name") -> Any:
    return import_optional(f"lm_eval.{module}", needed_for=needed_for, extra="evaluation")
