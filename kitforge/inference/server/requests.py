"""Request bodies as pydantic models: OpenAI's fields and vLLM's extensions.

`null` means absent, at any depth but within data, such as an `enum` of a schema. A field that is not supported is
accepted with a value that changes nothing, and refused with any other: no option is ignored silently.

Only this module and `messages` import pydantic, so only `app.create_app` imports it.
"""

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from kitforge.foundation.errors import nearest
from kitforge.inference.grammar import GrammarKind
from kitforge.inference.server.errors import refused
from kitforge.inference.server.messages import (
    MAX_MESSAGES,
    AllowedTools,
    Messages,
    RequestBody,
    Tool,
    ToolChoice,
    Tools,
)
from kitforge.inference.server.request_body import (
    MAX_SHOWN_CHARACTERS,
    fields_of,
    invalid_value,
    truncate,
    validation_error,
)

T = TypeVar("T", bound="RequestBody")

MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 2**20
MAX_STOPS = 16
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_CHOICES = 4096

# Parameters of other servers, and what to do instead.
_UNSUPPORTED = {
    "audio": "speech is not supported; leave it out",
    "background": "leave it out, and wait for the response or stream it",
    "conversation": "responses are not stored; send the whole conversation as input",
    "dimensions": "POST /v1/embeddings gives embeddings",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "max_completion_tokens": "use max_tokens, or max_output_tokens of /v1/responses",
    "max_new_tokens": "use max_tokens",
    "max_tokens": "use max_output_tokens",
    "n_predict": "use max_tokens",
    "num_beams": "beam search is not supported; use n for several choices",
    "num_predict": "use max_tokens",
    "prefix": "write it at the beginning of prompt",
    "prediction": "leave it out",
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "repeat_penalty": "use repetition_penalty",
    "stop_sequences": "use stop",
    "store": "responses are not stored; leave it out, and send the whole conversation as input",
    "web_search_options": "web search is not supported; leave it out",
}
_GUIDED = re.compile(r"guided_\w+|grammar|json_schema|regex")
# The fields of `structured_outputs`, and how each is compiled.
_KINDS: dict[str, GrammarKind] = {"json_object": "json_object", "json_": "json_schema"}
_KINDS |= {"regex": "regex", "choice": "choice", "grammar": "grammar"}


def _integral(value: Any) -> Any:
    """JSON has one number type: 5.0 is accepted as 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_token_keys(value: Any) -> Any:
    """Token ids as keys, in canonical form."""
    for key in value if isinstance(value, dict) else ():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))):
            raise PydanticCustomError("token", "token ids as keys")
    return value


_INTEGRAL = BeforeValidator(_integral)
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
NewTokens = Annotated[int, Field(ge=1, lt=2**31), _INTEGRAL]


def _prompt_kind(value: Any) -> str | None:
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "tokens" if isinstance(first, int) else "rows"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("rows")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="text, [text, ...], [token, ...] or [[token, ...], ...]",
    ),
]
Stops = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True), Tag("texts")],
    Discriminator(
        lambda value: "text" if isinstance(value, str) else "texts" if isinstance(value, list) else None,
        custom_error_type="stop",
        custom_error_message=f"text, or a list of up to {MAX_STOPS} texts",
    ),
]


class StreamSettings(RequestBody):
    """The field stream_options."""

    include_usage: bool = False  # token usage, in a last event
    include_obfuscation: bool | None = None  # accepted; no padding is sent
    continuous_usage_stats: bool | None = None  # with include_usage, in every event


class JsonSchema(RequestBody):
    """The schema of response_format. Its keywords are enforced or refused, strict or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputFormat(RequestBody):
    """The field response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestBody):
    """The field structured_outputs, as in vLLM: one of the first five."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None  # a schema
    regex: Text | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Text | None = None  # Lark or GBNF
    json_object: Literal[True] | None = None
    whitespace_pattern: Text | None = None  # between the parts of JSON


class SamplingFields(RequestBody, ABC):
    """The fields common to all routes of texts. None means the server's default."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None  # 0: greedy
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _INTEGRAL] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_check_token_keys)] | None = (
        None
    )
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None  # ignore end-of-sequence tokens
    # Stop tokens are excluded before so many tokens.
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), _INTEGRAL] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _INTEGRAL] | None = None
    stream: bool | None = None

    # Metadata of the client; ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Accepted with values that change nothing.
    store: Literal[False] | None = None
    priority: Literal[0] | None = None
    cache_salt: Text | None = None  # prefixes are shared with requests of the same one alone


class GenerationParams(SamplingFields, ABC):
    """The fields common to completions and chats."""

    is_open_ended: ClassVar[bool] = False  # by default a text ends where the model ends it

    n: Annotated[int, Field(ge=1, le=128), _INTEGRAL] | None = None
    stream_options: StreamSettings | None = None
    # Log-probabilities of the prompt tokens, with so many most likely tokens each.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), _INTEGRAL] | None = None

    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Accepted with values that change nothing.
    best_of: Annotated[int, Field(ge=1, le=128), _INTEGRAL] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    spaces_between_special_tokens: bool | None = None  # none are written
    include_stop_str_in_output: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None

    @property
    def structure(self) -> tuple[str, GrammarKind, Any] | None:
        """What a text must be: the field that says so, the kind and the specification. Raises ApiError for fields that
        contradict one another."""
        found: list[tuple[str, GrammarKind, Any]] = []
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            found.append(("response_format", "json_object", None))
        if form is not None and (form.type == "json_schema" or form.json_schema is not None):
            schema = form.json_schema and form.json_schema.schema_
            found.append(("response_format.json_schema", "json_schema", schema))
        for name, kind in _KINDS.items() if outputs is not None else ():
            if (spec := getattr(outputs, name)) is not None:
                found.append((f"structured_outputs.{name.rstrip('_')}", kind, spec))
        if len(found) > 1 or (outputs is not None and not found):
            got = ", ".join(name for name, _, _ in found) or "none"
            raise refused("structured_outputs", "a text has one structure", got=got, expected="one of them")
        if found and self.ignore_eos:
            raise refused("ignore_eos", "ignore_eos contradicts a structure, with which a text ends")
        return found[0] if found else None

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to return with each token; None: no log-probabilities."""

    @property
    @abstractmethod
    def new_tokens(self) -> int | None:
        """The maximum number of new tokens."""


class CompletionRequest(GenerationParams):
    """The body of /v1/completions."""

    prompt: Prompt
    # 0 with echo or prompt_logprobs.
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), _INTEGRAL] | None = None
    # Log-probabilities of the tokens, with so many most likely tokens each.
    logprobs: Annotated[int, Field(ge=0, le=5), _INTEGRAL] | None = None
    echo: bool | None = None  # return the prompt before the completion, also in logprobs
    add_special_tokens: bool | None = None  # add the special tokens of the tokenizer; default true

    suffix: Literal[""] | None = None
    skip_special_tokens: Literal[True] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens


class TokenSampling(GenerationParams):
    """The field sampling_params of /inference/v1/generate, whose other fields it takes up."""

    is_open_ended = True

    max_tokens: NewTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), _INTEGRAL] | None = None  # most likely tokens with each

    # Of how vLLM writes and stores texts, which are no part of the response.
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    flat_logprobs: bool | None = None
    extra_args: dict[str, Any] | None = None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens


class GenerateRequest(RequestBody):
    """The body of /inference/v1/generate, as in vLLM."""

    token_ids: Tokens
    sampling_params: TokenSampling = TokenSampling()
    request_id: Text | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    cache_salt: Text | None = None
    priority: Literal[0] | None = None

    def sampling(self) -> TokenSampling:
        """What is asked of the engine. Raises ApiError for fields in the wrong place, or in contradiction."""
        own = {name: getattr(self, name) for name in ("model", "stream", "stream_options", "cache_salt")}
        for name in own.keys() & self.sampling_params.model_fields_set:
            fix = f"write {name} beside sampling_params"
            raise refused(f"sampling_params.{name}", f"unknown parameter {name!r}", "unknown_parameter", fix=fix)
        params = self.sampling_params.model_copy(update=own)
        check_consistency(params)
        return params


class ChatRequest(GenerationParams):
    """The body of /v1/chat/completions."""

    is_open_ended = True

    messages: Messages
    add_generation_prompt: bool | None = None  # default true
    continue_final_message: bool | None = None  # continue the last message instead
    chat_template_kwargs: dict[str, Any] | None = None  # further template variables
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None  # of the sampled tokens
    top_logprobs: Annotated[int, Field(ge=0, le=20), _INTEGRAL] | None = None  # most likely tokens with each

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # default auto
    parallel_tool_calls: bool | None = None  # default true
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "medium"] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    add_special_tokens: Literal[False] | None = None  # the template adds its own

    @property
    def must_call(self) -> bool:
        """Whether a reply must be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return self.names_call or choice == "required"

    @property
    def names_call(self) -> bool:
        """Whether the choice is one function."""
        return isinstance(self.tool_choice, Tool)

    @property
    def callable_tools(self) -> list[str]:
        """The names of the tools that may be called."""
        choice = self.tool_choice
        chosen = [choice] if isinstance(choice, Tool) else self.tools or []
        chosen = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else chosen
        return [each.function.name for each in chosen]

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(RequestBody):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestBody):
    """The body of /tokenize for a conversation."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    model: str | None = None
    add_special_tokens: Literal[False] | None = None
    return_token_strs: bool | None = None


class MarkdownRequest(RequestBody):
    """The body of /markdown, by which the web page shows replies."""

    texts: Annotated[list[str], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


def read(kind: type[T], body: bytes) -> T:
    """Parse a request body. Raises ApiError naming the unknown, missing or invalid field."""
    value = fields_of(body)
    _check_names(kind, value)
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0], _UNSUPPORTED) from None
    check_consistency(request)
    return request


def read_tokenize(body: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """Parse a body of /tokenize, which has a prompt or messages. Raises ApiError."""
    is_chat = "messages" in fields_of(body)
    return read(TokenizeChatRequest, body) if is_chat else read(TokenizeRequest, body)


def _check_names(kind: type[RequestBody], value: Mapping[str, Any]) -> None:
    """Refuse unknown top-level fields with a hint."""
    for name in value:
        if name not in kind.model_fields:
            hint = _UNSUPPORTED.get(name)
            if _GUIDED.fullmatch(name):
                hint = "use structured_outputs: {json, regex, choice, grammar, json_object or whitespace_pattern}"
            near = difflib.get_close_matches(name[:MAX_SHOWN_CHARACTERS], kind.model_fields, n=1, cutoff=0.8)
            hint = hint or (f"did you mean {near[0]!r}?" if near else "leave it out; /openapi.json names what there is")
            problem = f"unknown parameter {truncate(repr(name))}"
            raise refused(truncate(name), problem, "unknown_parameter", fix=hint)


def check_consistency(request: RequestBody) -> None:
    """Refuse combinations of fields that contradict one another."""
    if isinstance(request, (ChatRequest, TokenizeChatRequest)):
        _check_messages(request)
        _check_tools(request)
    if not isinstance(request, GenerationParams):
        return
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise refused("best_of", "best_of beyond n is not supported; use n for several choices")
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options", "stream_options needs stream=true")
    if request.stream and request.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "prompt_logprobs are not supported in a stream; leave stream out")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs=true")
    if request.new_tokens == 0:
        if not (getattr(request, "echo", None) or request.prompt_logprobs is not None):
            raise invalid_value("max_tokens", 0, "at least 1, or 0 with echo=true or prompt_logprobs")
        if request.min_tokens:
            raise refused("min_tokens", "min_tokens is more than max_tokens")


def _check_messages(request: ChatRequest | TokenizeChatRequest) -> None:
    last = request.messages[-1]
    if request.continue_final_message and request.add_generation_prompt:
        raise refused("continue_final_message", "continue_final_message excludes add_generation_prompt")
    if request.continue_final_message and (last.role != "assistant" or last.tool_calls):
        raise refused("continue_final_message", "continue_final_message needs a last message of the assistant")
    for index, message in enumerate(request.messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            name = f"messages[{index}].content"
            raise refused(name, f"{name!r} is missing", "missing_parameter")


def _check_tools(request: ChatRequest | TokenizeChatRequest) -> None:
    """Refuse tools of one name, and the choice of one that is not there."""
    names = [each.function.name for each in request.tools or ()]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise refused("tools", f"two tools have the name {truncate(double)!r}")
    choice = getattr(request, "tool_choice", None)
    if not names and choice not in (None, "none", "auto"):
        raise refused("tool_choice", "tool_choice needs tools to choose from", fix="give tools, or leave it out")
    for name in request.callable_tools if isinstance(request, ChatRequest) else ():
        if name not in names:
            problem = f"there is no tool {truncate(name)!r} to call"
            raise refused("tool_choice", problem, fix=nearest(name, names))
