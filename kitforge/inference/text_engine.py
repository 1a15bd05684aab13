"""Text in and out of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kitforge.data.text.continuation import Detokenizer, ReplyMarks
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.dtype import LoadDtype
from kitforge.inference.constraint import Constraint
from kitforge.inference.engine import Engine, Output
from kitforge.inference.grammar import GrammarCompiler
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions, TopLogprobs
from kitforge.inference.sequence import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions(SamplingOptions):
    """Options of text generation."""

    stop: tuple[str, ...] = ()  # strings that end the output, which does not contain them
    # Of the weights of a model loaded for inference; auto: as stored (on a CPU float16 becomes fp32, and Q8_0 and Q4_0
    # of a GGUF file stay quantized).
    dtype: LoadDtype = "auto"
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        check(all(self.stop), "inference.stop", list(self.stop), "strings that are not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The text that a step added to one sample of a request."""

    request: int
    sample: int
    text: str  # whole characters, without stop strings
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    offsets: list[int]  # of each token in the text, in characters; a stop token has none
    hit_stop_string: bool  # the text ended at a stop string
    finish_reason: FinishReason | None
    prompt_logprobs: list[PromptLogprob] | None  # of all prompt tokens but the first; only in the first delta
    embedding: Tensor | None = None  # see `Output`
    error: Exception | None = None  # of the tokenizer or the constraint, where finish_reason is "failed"


class TextEngine:
    """An engine over text. It numbers requests as the engine does, which should have no other user.

    Threads may share it. `step` returns the deltas of all requests; the caller holds `engine.lock` until it has
    distributed them.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer, engine.stop_ids, engine.vocab_size)
        self._detokenizers: dict[tuple[int, int], Detokenizer] = {}

    def submit(
        self,
        prompt: str | Sequence[int],
        options: InferenceOptions,
        *,
        num_samples: int = 1,
        key: str | int | None = None,
        constraint: Constraint | None = None,
        marks: ReplyMarks | None = None,
    ) -> int:
        """See `Engine.submit`. A text gets the special tokens of the tokenizer; token ids are used as they are. Stop
        strings do not apply within the thoughts of `marks`."""
        tokens = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        with self.engine.lock:
            request = self.engine.submit(tokens, options, num_samples=num_samples, key=key, constraint=constraint)
            for sample in range(num_samples):
                self._detokenizers[request, sample] = Detokenizer(self.tokenizer, options.stop, tokens, marks)
        return request

    def cancel(self, request: int) -> None:
        """Cancel a request; `step` returns no more deltas of it."""
        with self.engine.lock:
            self.engine.cancel(request)
            for named in [named for named in self._detokenizers if named[0] == request]:
                del self._detokenizers[named]

    @property
    def has_work(self) -> bool:
        """Whether further steps will return deltas."""
        return self.engine.has_work

    def step(self) -> list[TextDelta]:
        """One step of the engine, as text."""
        with self.engine.lock:
            return [
                self._delta(output)
                for output in self.engine.step()
                if (output.request, output.sample) in self._detokenizers
            ]

    def _delta(self, output: Output) -> TextDelta:
        detokenizer, reason = self._detokenizers[output.request, output.sample], output.finish_reason
        text, kept = "", output.tokens[:-1] if reason == "stop" else output.tokens
        error: Exception | None = output.error
        try:
            for count, token in enumerate(kept, 1):
                text += detokenizer.push([token])
                if detokenizer.is_stopped:
                    # Those behind it depend on how many tokens the step had.
                    kept = kept[:count]
                    break
            text += detokenizer.push([], is_last=reason is not None)
        except Exception as raised:  # noqa: BLE001 (an error of the tokenizer fails this sample alone)
            error = raised
        ended: FinishReason | None = "failed" if error is not None else "stop" if detokenizer.is_stopped else None
        if ended is not None and reason != "stop":
            self.engine.cancel(output.request, output.sample)
        reason = ended or reason
        if reason is not None:
            del self._detokenizers[output.request, output.sample]
        tokens = kept if detokenizer.is_stopped else output.tokens
        return TextDelta(
            request=output.request,
            sample=output.sample,
            text=text,
            tokens=tokens,
            logprobs=output.logprobs[: len(tokens)],
            top_logprobs=output.top_logprobs[: len(tokens)],
            offsets=detokenizer.offsets[len(detokenizer.offsets) - len(kept) :],
            hit_stop_string=detokenizer.is_stopped,
            finish_reason=reason,
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
            error=error,
        )
