"""One request and its answers: prompts into the worker, pieces out of it, and nothing left behind. Knows no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast, final

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.template import ChatTemplate, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.errors import DataError, KitforgeError
from kitforge.foundation.log import logger
from kitforge.inference.server.asked import ChatRequest, CompletionRequest, Wishes
from kitforge.inference.server.metrics import Metrics
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.refusal import RefusalError, too_busy
from kitforge.inference.server.worker import Ticket, Worker
from kitforge.inference.text import InferenceOptions, Piece, TextEngine

_log = logger(__name__)

# Fields of a request that have the same name and meaning among the options of an engine.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


@final
class Service:
    """A model that is asked over HTTP: its worker, its words, and how much may be asked at once."""

    def __init__(self, texts: TextEngine, name: str, defaults: InferenceOptions, limits: ServeOptions) -> None:
        self.name = limits.name or name
        self.limits = limits
        self.worker = Worker(texts)
        self.metrics = Metrics()
        self.tokenizer: Tokenizer = texts.tokenizer
        self.template: ChatTemplate = template_of(texts.tokenizer)
        self.created = int(time.time())
        self.num_live = 0  # prompts
        self._num_asked = 0
        self._defaults = defaults
        self._geometry = cast(CausalLM, texts.engine.model).geometry

    def check_model(self, name: str | None) -> None:
        """Raise RefusalError for the name of another model."""
        if name is not None and name != self.name:
            message = f"there is no model {name[:200]!r} here; this is {self.name!r}"
            raise RefusalError(404, message, parameter="model", code="model_not_found")

    def check_room(self, num_prompts: int = 1) -> None:
        """Raise RefusalError where so many more are too much at once."""
        if self.num_live + num_prompts > self.limits.max_requests:
            raise too_busy(self.limits.max_requests)

    def open(self, request: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]) -> Exchange:
        """Have the prompts answered, `request.n` times each. Raises RefusalError for what cannot be or is too much."""
        num_samples = request.n or 1
        if len(prompts) * num_samples > self.limits.max_choices:
            message = f"{len(prompts)} prompts with n={num_samples} are more than {self.limits.max_choices} answers"
            raise RefusalError(400, message, parameter="n", code="too_many_choices")
        self.check_room(len(prompts))
        chosen = [self._options(request, len(prompt)) for prompt in prompts]
        self._num_asked += 1
        # Without a seed of its own, every request draws noise of its own.
        owner = "seeded" if request.seed is not None else str(self._num_asked)
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tickets = [
            Ticket(
                prompt=prompt,
                options=options,
                num_samples=num_samples,
                key=f"{owner}/{place}",
                num_alternatives=request.num_alternatives(),
                first=place * num_samples,
                is_whole=not request.stream,
                queue=queue,
            )
            for place, (prompt, options) in enumerate(zip(prompts, chosen, strict=True))
        ]
        return Exchange(self, tickets, queue)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """The tokens of a conversation up to where the reply begins. Raises RefusalError."""
        if not request.messages:
            raise RefusalError(400, "a chat needs at least one message", parameter="messages", code="invalid_value")
        try:
            return self.template.tokens([message.plain() for message in request.messages], opens_reply=True)
        except DataError as error:
            raise RefusalError(400, str(error), parameter="messages", code="invalid_value") from None

    def _options(self, request: CompletionRequest | ChatRequest, size: int) -> InferenceOptions:
        limit = self._geometry.max_length
        asked = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            asked = request.max_completion_tokens
        most = self.limits.max_new_tokens
        if asked is not None and most is not None and asked > most:
            message = f"max_tokens={asked} is more than this server gives, which is {most}"
            raise RefusalError(400, message, parameter="max_tokens", code="invalid_value")
        if not size:
            raise RefusalError(400, "a prompt is empty; give it some text", parameter="prompt", code="empty_prompt")
        if size + (asked or 1) > limit:
            message = f"{size} tokens of prompt and {asked or 1} new ones are more than the model's {limit}"
            raise RefusalError(400, message, parameter="prompt", code="context_length_exceeded")
        new = asked or min(self._defaults.max_new_tokens, limit - size, most or limit)
        for token in request.logit_bias or ():
            if int(token) >= self._geometry.vocab_size:
                message = f"the model has no token {token}; its tokens are 0 to {self._geometry.vocab_size - 1}"
                raise RefusalError(400, message, parameter="logit_bias", code="invalid_value")
        return dataclasses.replace(self._defaults, max_new_tokens=new, **_changes(request))


@final
class Exchange:
    """Prompts that are being answered. Must be closed, which stops what is left of them."""

    def __init__(
        self, service: Service, tickets: list[Ticket], queue: asyncio.Queue[tuple[int, Piece | Exception]]
    ) -> None:
        self.prompt_tokens = sum(len(ticket.prompt) for ticket in tickets)
        self.num_choices = sum(ticket.num_samples for ticket in tickets)
        self.completion_tokens = 0
        self._service = service
        self._tickets = tickets
        self._queue = queue
        self._num_open = self.num_choices
        self._is_closed = False
        self._since = time.perf_counter()
        self._first: tuple[int, Piece] | None = None
        service.num_live += len(tickets)
        for ticket in tickets:
            service.worker.submit(ticket)

    async def begin(self) -> None:
        """Wait for the first piece. Raises RefusalError for prompts that the engine does not take."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces with the numbers of their choices, until all have ended. Raises RefusalError."""
        metrics = self._service.metrics
        metrics.prompt_tokens += self.prompt_tokens
        while self._num_open:
            choice, piece = await self._next()
            if not self.completion_tokens:
                came = min(ticket.first_at for ticket in self._tickets if ticket.first_at is not None)
                metrics.first_token.add(came - self._since)
            self._num_open -= piece.finish_reason is not None
            self.completion_tokens += len(piece.tokens)
            metrics.generated_tokens += len(piece.tokens)
            yield choice, piece

    async def _next(self) -> tuple[int, Piece]:
        if self._first is not None:
            found, self._first = self._first, None
            return found
        choice, piece = await self._queue.get()
        if isinstance(piece, Exception):
            raise _refused(piece)
        if piece.finish_reason == "diverged":
            raise RefusalError(500, "the model answers with something that is not a number", code="model_diverged")
        if piece.error is not None:
            _log.error("a text could not be put into words", exc_info=piece.error)
            raise RefusalError(500, "the answer could not be put into words", code="decoding_failed")
        return choice, piece

    def close(self) -> None:
        """Stop what is left, and let others in."""
        if self._is_closed:
            return
        self._is_closed = True
        self._service.num_live -= len(self._tickets)
        if self._num_open:
            self._service.metrics.cancelled += 1
            for ticket in self._tickets:
                self._service.worker.cancel(ticket)

    def usage(self) -> dict[str, int]:
        """How many tokens were read and made."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }


def _changes(request: Wishes) -> dict[str, Any]:
    """The options of an engine that a request sets."""
    changes: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        changes["stop"] = request.stops()
    if request.seed is not None:
        changes["seed"] = request.seed
    return changes


def _refused(error: Exception) -> RefusalError:
    """A request that the engine does not take is the client's matter; anything else is ours, and no details of it."""
    if isinstance(error, KitforgeError):
        return RefusalError(400, str(error), code="invalid_value")
    return RefusalError(503, "the engine has stopped; the server's log says why", code="engine_stopped")
