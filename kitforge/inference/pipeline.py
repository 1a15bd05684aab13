"""The text-generation pipeline: prompts and chats in, Hugging Face's output format out."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from kitforge.data.chat.rows import with_open_end
from kitforge.data.chat.template import BegunMessage, Message, template_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import missing_file_error, user_path
from kitforge.inference.adapters import Factors
from kitforge.inference.constraint import Constraint
from kitforge.inference.engine import Engine
from kitforge.inference.folder_defaults import with_folder_defaults
from kitforge.inference.grammar import GrammarCompiler, GrammarKind
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine
from kitforge.report.notebook import Rows

TextPrompt = str | Sequence[Message]
_KINDS: dict[str, GrammarKind] = {"schema": "json_schema", "regex": "regex", "choices": "choice"}


class TextGenerationPipeline:
    """`pipeline("text")` returns `[{"generated_text": ...}]`; a list of texts returns a list of these.

    A chat is a list of messages `{"role": ..., "content": ...}`; the generated text is then the chat with its reply.
    The engine keeps its prefix cache until a weight changes. Threads may share a pipeline: their requests are batched,
    which does not change the result of any. `adapter` names the one of `serve.adapters` that a call generates with.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        options: InferenceOptions,
        adapters: Mapping[str, Factors] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = with_folder_defaults(options, tokenizer.generation_config)
        engine = Engine(model, options.engine, stop_ids=tokenizer.eos_ids, adapters=adapters)
        self._text_engine = TextEngine(engine, tokenizer)
        self._deltas: dict[int, deque[TextDelta]] = {}  # of each request, not yet fetched
        self._abandoned: deque[int] = deque()  # requests of abandoned streams
        self._weights = _weights_fingerprint(model)

    def __call__(self, texts: TextPrompt | Sequence[TextPrompt], *, num_samples: int = 1, **options: Any) -> list[Any]:
        """`num_samples` continuations of each text. `options` are fields of InferenceOptions, for this call, and what
        the continuations must be: `schema` (a JSON schema, a pydantic class or a file), `regex` or `choices`."""
        if isinstance(texts, str) or (texts and isinstance(texts[0], Mapping)):
            result: list[Any] = self([cast(TextPrompt, texts)], num_samples=num_samples, **options)[0]
            return result
        several = cast(Sequence[TextPrompt], texts)
        constraint = self._constraint(options)
        chosen = self._resolve_options(options)
        requests: list[int] = []
        try:
            for index, text in enumerate(several):
                requests.append(self._submit(text, chosen, constraint, num_samples, index))
            completions = [self._collect(request, num_samples) for request in requests]
        finally:
            self._drop_requests(requests)
        results = Rows()
        for text, samples in zip(several, completions, strict=True):
            if isinstance(text, str):
                results.append(Rows({"generated_text": text + sample} for sample in samples))
            else:
                results.append(Rows({"generated_text": _with_reply(text, sample)} for sample in samples))
        return results

    def stream(self, text: TextPrompt, **options: Any) -> Iterator[str]:
        """The continuation as a stream of text deltas of whole characters. Several streams may be read in turn or by
        several threads, each stream by one."""
        constraint = self._constraint(options)
        request = self._submit(text, self._resolve_options(options), constraint, 1, 0)
        try:
            for delta in self._until_end(request, 1):
                if delta.text:
                    yield delta.text
        finally:
            # The garbage collector may close a stream on any thread, even within a step, so no lock is acquired here.
            self._abandoned.append(request)

    def _submit(
        self, text: TextPrompt, options: InferenceOptions, constraint: Constraint | None, num_samples: int, index: int
    ) -> int:
        if isinstance(text, str):
            tokens = self.tokenizer.encode_prompt(text)
        else:
            tokens = template_of(self.tokenizer).prompt(cast(Sequence[Message], with_open_end(text)))
        with self._text_engine.engine.lock:
            request = self._text_engine.submit(
                tokens, options, num_samples=num_samples, key=index, constraint=constraint
            )
            self._deltas[request] = deque()
        return request

    def _collect(self, request: int, num_samples: int) -> list[str]:
        samples = [""] * num_samples
        for delta in self._until_end(request, num_samples):
            samples[delta.sample] += delta.text
        return samples

    def _until_end(self, request: int, num_samples: int) -> Iterator[TextDelta]:
        """All deltas of a request. Deltas of other requests are queued for them."""
        while num_samples:
            delta = self._next(request)
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason == "diverged":
                raise ModelError(
                    "the model's outputs for this text are not finite",
                    got="NaN or infinity",
                    expected="finite logits",
                    fix="take a checkpoint from before the training diverged",
                )
            num_samples -= delta.finish_reason is not None
            yield delta

    def _next(self, request: int) -> TextDelta:
        """The next delta of a request. Deltas are distributed before the lock is released, which keeps their order. The
        lock is released after every step, so that other threads can step too."""
        while True:
            with self._text_engine.engine.lock:
                self._drop_requests([self._abandoned.popleft() for _ in range(len(self._abandoned))])
                if not self._deltas[request]:
                    for delta in self._text_engine.step():
                        self._deltas[delta.request].append(delta)
                if self._deltas[request]:
                    return self._deltas[request].popleft()

    def _drop_requests(self, requests: list[int]) -> None:
        with self._text_engine.engine.lock:
            for request in requests:
                self._text_engine.cancel(request)
                self._deltas.pop(request, None)

    def _constraint(self, options: dict[str, Any]) -> Constraint | None:
        """What a call says that continuations must be, which is taken out of its options. Raises ConfigError."""
        structure = structure_of({name: options.pop(name, None) for name in _KINDS})
        return compile_structure(self._text_engine.grammars, structure)

    def _resolve_options(self, options: dict[str, Any]) -> InferenceOptions:
        """The options of a call; tells the engine if a weight has changed."""
        for name in sorted({"engine", "dtype", "ignored_settings"} & options.keys()):
            raise ConfigError(
                "the engine, its weights and the folder's settings are fixed when a pipeline is made",
                got=f"{name}={options[name]!r} for one call",
                fix='pipeline(..., options={"inference.engine.max_num_seqs": 8, "inference.dtype": "bf16"})',
            )
        with self._text_engine.engine.lock:
            weights = _weights_fingerprint(self.model)
            if weights != self._weights:
                self._weights = weights
                self._text_engine.engine.update_weights(self._text_engine.engine.version + 1)
        return from_dict(InferenceOptions, dataclasses.asdict(self.options) | options, "inference")


def structure_of(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The one of `schema`, `regex` and `choices` that is not None, of a file its text. Raises ConfigError."""
    found = {name: given[name] for name in _KINDS if given.get(name) is not None}
    if len(found) > 1:
        raise ConfigError("a text has one structure", got=", ".join(found), expected="schema, regex or choices")
    for name, spec in found.items():
        return name, _schema(spec) if name == "schema" else spec if name == "regex" else list(spec)
    return None


def compile_structure(grammars: GrammarCompiler, structure: tuple[str, Any] | None) -> Constraint | None:
    """The constraint of a structure. Raises ConfigError."""
    return structure and grammars.compile(_KINDS[structure[0]], structure[1], label=structure[0])


def _schema(given: Any) -> Any:
    """The JSON schema of a pydantic class, of a file, or as it is."""
    if isinstance(given, (str, Path)):
        if not (path := user_path(given)).is_file():
            raise missing_file_error(path)
        return path.read_text(encoding="utf-8-sig")
    return given.model_json_schema() if hasattr(given, "model_json_schema") else given


def _with_reply(chat: Sequence[Message], reply: str) -> list[Message]:
    """The chat with a reply, or with the end of the one that it had begun."""
    prompt = cast(Sequence[Message], with_open_end(chat))
    if isinstance(prompt[-1], BegunMessage):
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + reply}]
    return [*prompt, {"role": "assistant", "content": reply}]


def _weights_fingerprint(model: nn.Module) -> int:
    """A hash that changes whenever a parameter is replaced or written."""
    return hash(tuple((id(each), each._version) for each in model.parameters()))
