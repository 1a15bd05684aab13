"""The text-generation service: it validates requests, submits prompts and returns deltas. Independent of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.chat.template import ChatTemplate, template_of
from kitforge.data.chat.tool_calls import CALL_MARKS, CallFormat, CallRules, ReplyGrammar
from kitforge.data.text.continuation import Detokenizer, ReplyMarks
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, KitforgeError
from kitforge.foundation.log import logger
from kitforge.inference.capacity import kv_bytes_per_token
from kitforge.inference.constraint import Constraint
from kitforge.inference.grammar import json_options, plain_schema
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.pooling import TextPooling, find_pooling
from kitforge.inference.server.application import HttpService
from kitforge.inference.server.errors import ApiError, refused
from kitforge.inference.server.metrics import Metrics
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.worker import PromptJob, Worker
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine

if TYPE_CHECKING:
    # Needs pydantic, so it is imported at run time by `app.create_app` alone.
    from kitforge.inference.server.messages import Tool
    from kitforge.inference.server.requests import ChatRequest, CompletionRequest, TokenizeChatRequest, TokenizeRequest

_log = logger(__name__)

# Fields of a request, and the names of the same options of the engine.
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES, "logit_bias", "ignore_eos", "seed", "cache_salt")
_SAMPLING_FIELDS = {"min_tokens": "min_new_tokens"} | {name: name for name in _SAME_NAMES}
# Template variables that a request sets through fields of its own.
_RESERVED_TEMPLATE_FIELDS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """The tokens of a prompt; its text and the offset of each token only where it is echoed. Of a chat, what marks the
    parts of its reply, and how that calls tools, whose arguments have the schemas `tools`."""

    tokens: list[int]
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    marks: ReplyMarks | None = None
    calls: CallFormat | None = None
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    grammar: str | None = None  # of the reply, in which `@answer` is the structure that the request asks for


class TokenTexts:
    """The text and bytes of single tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """The text of a token; for part of a character its bytes, as `bytes:\\xe2\\x82`."""
        return self._lookup(token)[0]

    def bytes(self, token: int) -> list[int]:
        """The UTF-8 bytes of a token."""
        return self._lookup(token)[1]

    def _lookup(self, token: int) -> tuple[str, list[int]]:
        entry = self._cache.get(token)
        if entry is None:
            content = self._tokenizer.token_bytes(token)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            entry = self._cache[token] = text, list(content)
        return entry


class Service(HttpService):
    """A served model: its worker, tokenizer, limits and metrics."""

    limits: ServeOptions
    metrics: Metrics
    worker: Worker

    def __init__(
        self,
        texts: TextEngine,
        name: str,
        defaults: InferenceOptions,
        limits: ServeOptions,
        pooling: TextPooling | KitforgeError | None = None,
    ) -> None:
        """`pooling` makes embeddings; else it says why there are none."""
        super().__init__(name, limits, Metrics())
        self.worker = Worker(texts, self.metrics)
        self.threads = (self.worker,)
        self.tokenizer: Tokenizer = texts.tokenizer
        self.token_texts = TokenTexts(texts.tokenizer)
        self.template: ChatTemplate = template_of(texts.tokenizer)
        self._num_requests = 0
        # Keys the noise of unseeded requests, so that it differs between servers and restarts.
        self._nonce = secrets.token_hex(8)
        self.defaults = defaults
        self.engine = texts.engine
        self.geometry = cast(CausalLM, texts.engine.model).geometry
        self.pooling = pooling or find_pooling(None, None, None)
        self._grammars = texts.grammars
        # Apart from the threads that read bodies: large schemas hold one another up, and nobody else.
        self._compilers = ThreadPoolExecutor(2, "grammars")
        self.max_model_len = min(self.geometry.max_length, texts.engine.num_slots)
        self.model_names += texts.engine.adapters.names
        is_one = self.name not in self.model_names[1:]
        check(is_one, "serve.adapters", self.name, "names other than that of the base model", "or serve.name=NAME")

    def summary(self) -> dict[str, str]:
        kinds, model, slots = Counter[torch.dtype](), self.engine.model, self.engine.num_slots
        for tensor in (*model.parameters(), *model.buffers()):
            kinds[tensor.dtype] += tensor.nbytes
        megabytes = slots * kv_bytes_per_token(model) / 2**20
        chosen = {name: getattr(self.defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        sampling = ", ".join(f"{name} {value:g}" for name, value in chosen.items() if value is not None)
        return super().summary() | {
            "weights": str(kinds.most_common(1)[0][0]).removeprefix("torch."),
            "context": f"{self.max_model_len:,} tokens; the cache holds {slots:,} ({megabytes:,.0f} MiB)",
            "sampling": f"{sampling}, where a request names no other",
        }

    def page_facts(self) -> dict[str, Any]:
        """What the web page says and uses of the model."""
        context, most = self.max_model_len, self.limits.max_new_tokens or self.max_model_len
        is_chat = bool(getattr(self.tokenizer, "chat_templates", None))
        return {"is_chat": is_chat, "context": context, "most": most, "sampling": dataclasses.asdict(self.defaults)}

    def warm_up(self) -> None:
        """Continue one text and several, since loops are compiled when they first run, which takes seconds. Compile a
        grammar, since the first reads all tokens."""
        new = min(3, self.max_model_len - 1)
        options = dataclasses.replace(self.defaults, max_new_tokens=new, min_new_tokens=0, ignore_eos=True)
        for num_rows in (1, 3) if new else ():
            lengths = range(min(16, self.max_model_len - new), 0, -1)[:num_rows]
            self.engine.generate([[0] * length for length in lengths], options)
        # Without llguidance, or a token that ends a text, a request is told so.
        with contextlib.suppress(KitforgeError):
            self._grammars.compile("json_object")

    async def rendered_metrics(self) -> tuple[bytes, str]:
        stats = await self.worker.stats()
        # No await between the two, so that no request is counted both as active and as done.
        return self.metrics.text({"prompts": self.num_active, **stats})

    async def constraint(self, request: CompletionRequest | ChatRequest, prompt: EncodedPrompt) -> Constraint | None:
        """What the texts of a request must be, compiled in a thread of its own. Raises ApiError."""
        structure, loop = request.structure, asyncio.get_running_loop()
        if structure is None and prompt.grammar is None:
            return None
        field, kind, spec = structure or ("tools", "grammar", prompt.grammar)
        chosen: dict[str, Any] = {
            "whitespace_pattern": getattr(request.structured_outputs, "whitespace_pattern", None),
            "around": None if structure is None else prompt.grammar,
            "label": field,
        }
        try:
            return await loop.run_in_executor(self._compilers, partial(self._grammars.compile, kind, spec, **chosen))
        except KitforgeError as error:
            if structure is None:
                tools = _enforced(cast("ChatRequest", request))
                await loop.run_in_executor(self._compilers, self._check_parameters, tools)
            raise ApiError(400, str(error), parameter=field, code="invalid_value") from None

    def submit(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[EncodedPrompt],
        constraint: Constraint | None = None,
    ) -> RequestHandle:
        """Submit the prompts with `request.n` choices each, all of which obey the constraint. Raises ApiError for
        invalid or too many requests."""
        num_choices = request.n or 1
        if len(prompts) * num_choices > self.limits.max_choices:
            message = f"{len(prompts)} prompts with n={num_choices} are more than {self.limits.max_choices} choices"
            raise ApiError(400, message, parameter="n", code="too_many_choices")
        self.check_capacity(len(prompts))
        try:
            chosen = [self._options(request, len(prompt.tokens)) for prompt in prompts]
            for prompt, options in zip(prompts, chosen, strict=True):
                self.engine.validate(prompt.tokens, options)
        except KitforgeError as error:
            raise self.api_error(error) from None
        self._num_requests += 1
        # Without a seed, every request has noise of its own.
        owner = "seeded" if request.seed is not None else f"{self._nonce}/{self._num_requests}"
        queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()
        jobs = [
            PromptJob(
                prompt=prompt.tokens,
                options=options,
                # Greedy choices are equal, so one is generated.
                num_samples=1 if options.is_greedy else num_choices,
                key=f"{owner}/{index}",
                marks=prompt.marks,
                first_choice=index * num_choices,
                constraint=constraint,
                delivers_at_end=not request.stream,
                queue=queue,
            )
            for index, (prompt, options) in enumerate(zip(prompts, chosen, strict=True))
        ]
        return RequestHandle(self, jobs, queue, prompts, num_choices)

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text, with the special tokens of the tokenizer unless these are declined."""
        return self.tokenizer.encode(text) if add_special_tokens is False else self.tokenizer.encode_prompt(text)

    def encode_prompts(self, request: CompletionRequest) -> list[EncodedPrompt]:
        """The prompts of a request as tokens; where it echoes them, with text and offsets."""
        prompts = []
        for given in request.prompts():
            if isinstance(given, str):
                tokens = self.encode(given, add_special_tokens=request.add_special_tokens)
            else:
                tokens = given
            text, offsets = "", []
            if request.echo and len(tokens) <= self.max_model_len:
                text = given if isinstance(given, str) else self.tokenizer.decode(tokens)
                detokenizer = Detokenizer(self.tokenizer)
                detokenizer.push(tokens, is_last=True)
                offsets = [min(offset, len(text)) for offset in detokenizer.offsets]
            prompts.append(EncodedPrompt(tokens=tokens, text=text, offsets=offsets))
        return prompts

    def encode_chat(self, request: ChatRequest | TokenizeChatRequest) -> EncodedPrompt:
        """A chat, up to the beginning or continuation of the reply. Raises ApiError."""
        further: dict[str, Any] = {}
        if request.continue_final_message:
            further["continue_final_message"] = True
        if request.chat_template_kwargs:
            further["chat_template_kwargs"] = request.chat_template_kwargs
            own = next((name for name in request.chat_template_kwargs if name in _RESERVED_TEMPLATE_FIELDS), None)
            if own is not None:
                name = f"chat_template_kwargs.{own}"
                message = f"{name!r} is set by a field of the request, or is not supported"
                raise refused(name, message)
        opens_reply = not request.continue_final_message and request.add_generation_prompt is not False
        messages = [message.to_template_message() for message in request.messages]
        # Results of tools have the names of their calls, which some templates write.
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        messages = [
            {"name": names[each["tool_call_id"]], **each} if each.get("tool_call_id") in names else each
            for each in messages
        ]
        tools = [] if getattr(request, "tool_choice", None) == "none" else request.tools or []
        try:
            if tools:
                # As models know tools from training.
                kept: dict[str, Any] = {"exclude_none": True, "exclude": {"function": {"strict"}}}
                further["tools"] = [each.model_dump(**kept) for each in tools]
                self._check_tools(messages, further)
            marks = self.template.reply_marks(messages, further, opens_reply=opens_reply)
            return EncodedPrompt(
                tokens=self.template.tokens(messages, opens_reply=opens_reply, **further),
                marks=marks,
                grammar=self._reply_grammar(request, marks, tools),
                calls=self.template.calls if tools else None,
                tools={each.function.name: each.function.parameters or {} for each in tools},
            )
        except DataError as error:
            raise refused("messages", str(error)) from None

    def _reply_grammar(
        self, request: ChatRequest | TokenizeChatRequest, marks: ReplyMarks, tools: Sequence[Tool]
    ) -> str | None:
        """What a reply must be; None where nothing is asked of it but what `request.structure` says of all of it."""
        asked = cast("ChatRequest", request)
        if not hasattr(asked, "must_call"):
            # Nothing is generated, only counted.
            return None
        has_answer = asked.structure is not None
        is_single = asked.names_call or asked.parallel_tool_calls is False
        is_bound = len(asked.callable_tools) < len(tools) or any(each.function.strict for each in tools)
        rules = None
        if self.template.calls is not None and tools and (has_answer or asked.must_call or is_single or is_bound):
            rules = CallRules(
                calls=self.template.calls,
                schemas=_enforced(asked),
                is_required=asked.must_call,
                is_single=is_single,
                options=json_options(),
            )
        if rules is None and not (has_answer and marks.thought):
            return None
        return ReplyGrammar(self.template.mark_ids).source(marks, rules, has_answer=has_answer)

    def _check_parameters(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ApiError for a tool whose schema cannot be enforced: the grammar of all does not tell which."""
        for name, schema in tools.items():
            try:
                self._grammars.compile("json_schema", {"type": "object", **schema})
            except KitforgeError as error:
                raise refused("tools", f"of the tool {name!r}, {error}") from None

    def _check_tools(self, messages: list[dict[str, Any]], inputs: dict[str, Any]) -> None:
        problem = None if self.template.calls is not None else "calls tools in an unknown format"
        problem = problem if self.template.writes_tools(messages, inputs) else "ignores tools"
        if problem is not None:
            expected = f"a template of {', '.join({each.name: '' for each in CALL_MARKS.values()})}"
            fix = 'leave tools out, or set tool_choice="none"'
            raise refused("tools", f"the chat template of this model {problem}", expected=expected, fix=fix)

    def tokenize(self, request: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
        """The response of /tokenize, in vLLM's format. Raises ApiError."""
        messages = getattr(request, "messages", None)
        if messages is not None:
            tokens = self.encode_chat(cast("TokenizeChatRequest", request)).tokens
        else:
            text = cast("TokenizeRequest", request).prompt
            tokens = self.encode(text, add_special_tokens=request.add_special_tokens)
        texts = [self.token_texts.text(token) for token in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": texts}

    def tokenizer_info(self) -> dict[str, Any]:
        """The response of /tokenizer_info, which clients that count tokens read first. Special tokens have no text,
        since no text is encoded as one here."""
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "chat_template": getattr(self.tokenizer, "chat_templates", {}).get("default"),
            "model_max_length": self.max_model_len,
        }

    def _options(self, request: CompletionRequest | ChatRequest, size: int) -> InferenceOptions:
        limit, requested, most = self.max_model_len, request.new_tokens, self.limits.max_new_tokens
        if requested is not None and most is not None and requested > most:
            message = f"max_tokens={requested} is more than this server allows, which is {most}"
            raise refused("max_tokens", message)
        # By default a chat reply ends where the model ends it; where keys depend on the length of a sequence, and in
        # completions, its length is that of the options.
        is_open = request.is_open_ended and not self.geometry.depends_on_length
        default = limit if is_open else self.defaults.max_new_tokens
        # At least 1: the engine refuses a prompt that leaves no room.
        new = max(1, min(default, limit - size, most or limit)) if requested is None else requested
        adapter = None if request.model == self.name else request.model
        return dataclasses.replace(self.defaults, adapter=adapter, max_new_tokens=new, **_option_overrides(request))


class RequestHandle:
    """A request in progress. `close` cancels what is left of it and must always be called."""

    def __init__(
        self,
        service: Service,
        jobs: list[PromptJob],
        queue: asyncio.Queue[tuple[int, TextDelta | Exception]],
        prompts: Sequence[EncodedPrompt],
        num_choices: int,
    ) -> None:
        """Submit the jobs, with `num_choices` choices for each prompt."""
        self.prompt_tokens = sum(len(job.prompt) for job in jobs)
        self.num_choices = num_choices * len(prompts)
        self.completion_tokens = 0
        self.prompts = [prompt for prompt in prompts for _ in range(num_choices)]  # of each choice
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
        service.num_active += len(jobs)
        for job in jobs:
            service.worker.submit(job)

    async def wait_until_started(self) -> None:
        """Wait for the first delta. Raises ApiError for prompts that the engine refuses."""
        self._first = await self._next()

    def prompt_logprobs_of(self, choice: int) -> list[PromptLogprob] | None:
        """Log-probabilities of the choice's prompt tokens but the first, once its first delta has arrived."""
        return self._prompt_logprobs.get(choice // self._choices_per_prompt)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Deltas with the indices of their choices, until all have finished. Raises ApiError."""
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
            raise self._service.api_error(delta)
        if delta.finish_reason == "diverged":
            raise ApiError(500, "the model's outputs are not finite", code="model_diverged")
        if isinstance(delta.error, KitforgeError):
            raise ApiError(400, str(delta.error), code="grammar_failed")
        if delta.error is not None:
            _log.error("a sequence could not be decoded to text", exc_info=delta.error)
            raise ApiError(500, "the output could not be decoded to text", code="decoding_failed")
        return choice, delta

    def close(self) -> None:
        """Cancel unfinished prompts and free their capacity."""
        if self._is_closed:
            return
        self._is_closed = True
        self._service.num_active -= len(self._jobs)
        if self._num_open:
            self._service.metrics.cancelled.inc()
            for job in self._jobs:
                self._service.worker.cancel(job)

    def usage(self) -> dict[str, Any]:
        """The `usage` of the response."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": sum(job.num_cached for job in self._jobs)},
        }


def _enforced(request: ChatRequest) -> dict[str, dict[str, Any]]:
    """The tools that may be called, each with the schema that its arguments are held to."""
    functions = [each.function for each in request.tools or () if each.function.name in request.callable_tools]
    is_held = request.must_call
    return {each.name: plain_schema(each.parameters or {}) if each.strict or is_held else {} for each in functions}


def _option_overrides(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    changes: dict[str, Any] = {"num_top_logprobs": request.num_top_logprobs or 0} | {
        ours: value for theirs, ours in _SAMPLING_FIELDS.items() if (value := getattr(request, theirs)) is not None
    }
    if request.stop is not None:
        changes["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        changes["stop_ids"] = tuple(request.stop_token_ids)
    if request.top_k in (-1, 0):
        changes["top_k"] = None
    if request.top_p == 0:
        # The smallest nucleus is the most likely token.
        changes |= {"top_p": None, "temperature": 0.0}
    echoed = request.num_top_logprobs if getattr(request, "echo", None) else None
    counts = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    if counts or request.new_tokens == 0:
        changes["prompt_logprobs"] = max(counts, default=0)
    return changes
