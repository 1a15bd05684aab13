"""One request and its answers: prompts into the worker, pieces out of it, and nothing left behind. Knows no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.template import ChatTemplate, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError
from kitforge.foundation.log import logger
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.server.authentication import auth_tokens
from kitforge.inference.server.bodies import BodyBuffers
from kitforge.inference.server.errors import ApiError, queue_full
from kitforge.inference.server.metrics import Metrics
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.token_texts import TokenTexts
from kitforge.inference.server.worker import PromptJob, Worker
from kitforge.inference.text_engine import Detokenizer, InferenceOptions, TextDelta, TextEngine

if TYPE_CHECKING:
    # It is loaded when a server is made, as it needs pydantic.
    from kitforge.inference.server.requests import (
        ChatRequest,
        CompletionRequest,
        TokenizeChatRequest,
        TokenizeRequest,
    )

_log = logger(__name__)

# Fields of a request, and what means the same among the options of an engine.
_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_new_tokens",
    "seed": "seed",
}
# What a conversation itself gives its template.
_RESERVED_TEMPLATE_FIELDS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """The tokens of a prompt; its text and where in it each token begins only where it is echoed."""

    tokens: list[int]
    text: str = ""
    offsets: list[int] = field(default_factory=list)


@final
class Service:
    """A model that is asked over HTTP: its worker, its words, and how much may be asked at once."""

    def __init__(self, texts: TextEngine, name: str, defaults: InferenceOptions, limits: ServeOptions) -> None:
        self.name = limits.name or name
        self.limits = limits
        self.auth_tokens = auth_tokens(limits)
        self.metrics = Metrics()
        self.worker = Worker(texts, self.metrics)
        self.bodies = BodyBuffers(limits)
        self.tokenizer: Tokenizer = texts.tokenizer
        self.token_texts = TokenTexts(texts.tokenizer)
        self.template: ChatTemplate = template_of(texts.tokenizer)
        self.created = int(time.time())
        self.num_active_prompts = 0  # prompts
        self._num_requests = 0
        # Two servers of one model, or one that is started twice, draw different noise.
        self._nonce = secrets.token_hex(8)
        self._defaults = defaults
        self._geometry = cast(CausalLM, texts.engine.model).geometry
        self._max_model_len = min(self._geometry.max_length, texts.engine.num_slots)

    def model_card(self) -> dict[str, Any]:
        """What is said of the model."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kitforge",
            "max_model_len": self._max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for the name of another model."""
        if name is not None and name != self.name:
            message = f"there is no model {name[:200]!r} here; this is {self.name!r}"
            raise ApiError(404, message, parameter="model", code="model_not_found")

    def check_capacity(self, num_prompts: int = 1) -> None:
        """Raise ApiError where so many more are too much at once."""
        if self.num_active_prompts + num_prompts > self.limits.max_requests:
            raise queue_full(self.limits.max_requests)

    def submit(self, request: CompletionRequest | ChatRequest, prompts: Sequence[EncodedPrompt]) -> RequestHandle:
        """Have the prompts answered, `request.n` times each. Raises ApiError for what cannot be or is too much."""
        num_choices = request.n or 1
        if len(prompts) * num_choices > self.limits.max_choices:
            message = f"{len(prompts)} prompts with n={num_choices} are more than {self.limits.max_choices} answers"
            raise ApiError(400, message, parameter="n", code="too_many_choices")
        self.check_capacity(len(prompts))
        chosen = [self._options(request, len(prompt.tokens)) for prompt in prompts]
        self._num_requests += 1
        # Without a seed of its own, every request draws noise of its own.
        owner = "seeded" if request.seed is not None else f"{self._nonce}/{self._num_requests}"
        queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()
        jobs = [
            PromptJob(
                prompt=prompt.tokens,
                options=options,
                # Without chance all answers are one, which is made once.
                num_samples=1 if options.is_greedy else num_choices,
                key=f"{owner}/{index}",
                num_top_logprobs=request.num_top_logprobs or 0,
                first_choice=index * num_choices,
                delivers_at_end=not request.stream,
                queue=queue,
            )
            for index, (prompt, options) in enumerate(zip(prompts, chosen, strict=True))
        ]
        return RequestHandle(self, jobs, queue, prompts, num_choices)

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text, between those that the tokenizer begins and ends one with unless they are declined."""
        return self.tokenizer.encode(text) if add_special_tokens is False else self.tokenizer.encode_prompt(text)

    def encode_prompts(self, request: CompletionRequest) -> list[EncodedPrompt]:
        """The prompts of a request as tokens."""
        return [self._encode_prompt(given, request) for given in request.prompts()]

    def _encode_prompt(self, given: str | list[int], request: CompletionRequest) -> EncodedPrompt:
        tokens = self.encode(given, add_special_tokens=request.add_special_tokens) if isinstance(given, str) else given
        if not request.echo or len(tokens) > self._max_model_len:
            return EncodedPrompt(tokens=tokens)
        text = given if isinstance(given, str) else self.tokenizer.decode(tokens)
        detokeniser = Detokenizer(self.tokenizer)
        detokeniser.push(tokens, is_last=True)
        return EncodedPrompt(
            tokens=tokens, text=text, offsets=[min(offset, len(text)) for offset in detokeniser.offsets]
        )

    def encode_chat(self, request: ChatRequest | TokenizeChatRequest) -> list[int]:
        """The tokens of a conversation up to where the reply begins or goes on. Raises ApiError."""
        further: dict[str, Any] = {}
        if request.continue_final_message:
            further["continue_final_message"] = True
        if request.chat_template_kwargs:
            further["chat_template_kwargs"] = request.chat_template_kwargs
            own = next((name for name in request.chat_template_kwargs if name in _RESERVED_TEMPLATE_FIELDS), None)
            if own is not None:
                name = f"chat_template_kwargs.{own}"
                message = f"{name!r} has a field of its own in the request, or is not done here"
                raise ApiError(400, message, parameter=name, code="invalid_value")
        opens_reply = not request.continue_final_message and request.add_generation_prompt is not False
        messages = [message.to_template_message() for message in request.messages]
        try:
            return self.template.tokens(messages, opens_reply=opens_reply, **further)
        except DataError as error:
            raise ApiError(400, str(error), parameter="messages", code="invalid_value") from None

    def tokenize(self, request: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
        """The answer of /tokenize, in vLLM's shape. Raises ApiError."""
        messages = getattr(request, "messages", None)
        if messages is not None:
            tokens = self.encode_chat(cast("TokenizeChatRequest", request))
        else:
            text = cast("TokenizeRequest", request).prompt
            tokens = self.encode(text, add_special_tokens=request.add_special_tokens)
        texts = [self.token_texts.text(token) for token in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens, "token_strs": texts}

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients that count tokens here ask for first: how the tokens that begin and end a text are spelt. No
        text becomes one of those here, so they have no spelling."""
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "chat_template": getattr(self.tokenizer, "chat_templates", {}).get("default"),
            "model_max_length": self._max_model_len,
        }

    def _options(self, request: CompletionRequest | ChatRequest, size: int) -> InferenceOptions:
        limit, requested, most = self._max_model_len, request.new_tokens, self.limits.max_new_tokens
        if requested is not None and most is not None and requested > most:
            message = f"max_tokens={requested} is more than this server gives, which is {most}"
            raise ApiError(400, message, parameter="max_tokens", code="invalid_value")
        if not size:
            raise ApiError(400, "a prompt is empty; give it some text", parameter="prompt", code="empty_prompt")
        least = 1 if requested is None else requested
        if size + least > limit:
            message = f"{size} tokens of prompt and {least} new ones are more than the model's {limit}"
            raise ApiError(400, message, parameter="prompt", code="context_length_exceeded")
        new = min(self._default_new_tokens(request), limit - size, most or limit) if requested is None else requested
        unknown = max(map(int, request.logit_bias or ()), default=0)
        if unknown >= self._geometry.vocab_size:
            message = f"the model has no token {unknown}; its tokens are 0 to {self._geometry.vocab_size - 1}"
            raise ApiError(400, message, parameter="logit_bias", code="invalid_value")
        try:
            return dataclasses.replace(self._defaults, max_new_tokens=new, **_option_overrides(request))
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_value") from None

    def _default_new_tokens(self, request: CompletionRequest | ChatRequest) -> int:
        """How many tokens an answer may have that is given no limit: a reply ends where the model ends it. Where a
        model reads every text as one of the length that it may come to, a reply keeps the length of the options."""
        is_open = request.is_chat and not self._geometry.depends_on_length
        return self._max_model_len if is_open else self._defaults.max_new_tokens


@final
class RequestHandle:
    """Prompts that are being answered. Must be closed, which stops what is left of them."""

    def __init__(
        self,
        service: Service,
        jobs: list[PromptJob],
        queue: asyncio.Queue[tuple[int, TextDelta | Exception]],
        prompts: Sequence[EncodedPrompt],
        num_choices: int,
    ) -> None:
        """`num_choices` answers to each prompt."""
        self.prompt_tokens = sum(len(job.prompt) for job in jobs)
        self.num_choices = num_choices * len(prompts)
        self.completion_tokens = 0
        self._prompts = prompts
        self._prompt_logprobs: dict[int, list[PromptLogprob]] = {}
        self._choices_per_prompt = num_choices
        self._service = service
        self._jobs = jobs
        self._queue = queue
        self._num_open = sum(job.num_samples for job in jobs)
        self._has_started = False
        self._is_closed = False
        self._started_at = time.perf_counter()
        self._first: tuple[int, TextDelta] | None = None
        service.num_active_prompts += len(jobs)
        for job in jobs:
            service.worker.submit(job)

    async def wait_until_started(self) -> None:
        """Wait for the first piece. Raises ApiError for prompts that the engine does not take."""
        self._first = await self._next()

    def prompt_of(self, choice: int) -> EncodedPrompt:
        """What a choice answers."""
        return self._prompts[choice // self._choices_per_prompt]

    def prompt_logprobs_of(self, choice: int) -> list[PromptLogprob] | None:
        """Of its prompt's tokens but the first, where they were asked for and the first piece has come."""
        return self._prompt_logprobs.get(choice // self._choices_per_prompt)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Pieces with the numbers of their choices, until all have ended. Raises ApiError."""
        metrics = self._service.metrics
        metrics.prompt_tokens.inc(self.prompt_tokens)
        while self._num_open:
            choice, delta = await self._next()
            if not self._has_started:
                self._has_started = True
                came = min(job.first_at for job in self._jobs if job.first_at is not None)
                metrics.first_token.observe(came - self._started_at)
            self._num_open -= delta.finish_reason is not None
            index = choice // self._choices_per_prompt
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs[index] = delta.prompt_logprobs
            metrics.generated_tokens.inc(len(delta.tokens))
            for each in range(self._choices_per_prompt // self._jobs[index].num_samples):
                self.completion_tokens += len(delta.tokens)
                yield choice + each, delta

    async def _next(self) -> tuple[int, TextDelta]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        choice, delta = await self._queue.get()
        if isinstance(delta, Exception):
            raise _engine_error(delta, has_failed=self._service.worker.failure is not None)
        if delta.finish_reason == "diverged":
            raise ApiError(500, "the model answers with something that is not a number", code="model_diverged")
        if delta.error is not None:
            _log.error("a text could not be put into words", exc_info=delta.error)
            raise ApiError(500, "the answer could not be put into words", code="decoding_failed")
        return choice, delta

    def close(self) -> None:
        """Stop what is left, and let others in."""
        if self._is_closed:
            return
        self._is_closed = True
        self._service.num_active_prompts -= len(self._jobs)
        if self._num_open:
            self._service.metrics.cancelled.inc()
            for job in self._jobs:
                self._service.worker.cancel(job)

    def usage(self) -> dict[str, int]:
        """How many tokens were read and made."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }


def _option_overrides(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """The options of an engine that a request sets."""
    changes: dict[str, Any] = {
        ours: value for theirs, ours in _SAMPLING_FIELDS.items() if (value := getattr(request, theirs)) is not None
    }
    if request.stop is not None:
        changes["stop"] = request.stops()
    if request.stop_token_ids is not None:
        changes["stop_ids"] = tuple(request.stop_token_ids)
    if request.top_k in (-1, 0):
        changes["top_k"] = None
    if request.top_p == 0:
        # The smallest set of tokens that holds no probability at all: the most likely one.
        changes |= {"top_p": None, "temperature": 0.0}
    echoed = request.num_top_logprobs if request.echo else None
    counts = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    if counts or request.new_tokens == 0:
        changes["prompt_logprobs"] = max(counts, default=0)
    return changes


def _engine_error(error: Exception, *, has_failed: bool) -> ApiError:
    """A request that the engine does not take is the client's matter; anything else is ours, and no details of it."""
    if isinstance(error, KitforgeError) and not has_failed:
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(503, "the engine has stopped; the server's log says why", code="engine_stopped")
