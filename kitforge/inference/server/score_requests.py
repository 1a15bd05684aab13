"""Bodies of embeddings, scores and rankings, as in OpenAI's, vLLM's and Jina's API. Imports pydantic, as `requests`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from kitforge.inference.server.errors import refused
from kitforge.inference.server.messages import Messages, RequestBody
from kitforge.inference.server.requests import MAX_PROMPTS, Prompt, Text

# A text, or an object with it.
Document = Annotated[
    Text, BeforeValidator(lambda value: value["text"] if isinstance(value, dict) and [*value] == ["text"] else value)
]


class EmbeddingRequest(RequestBody):
    """The body of /v1/embeddings."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None  # base64: of float32, least byte first; default float
    dimensions: int | None = None  # those of the model
    add_special_tokens: bool | None = None  # add those of the tokenizer to texts; default true
    user: str | None = None  # ignored

    def texts(self) -> list[str | list[int]]:
        """The inputs, each as text or tokens."""
        return _prompts(self.input)


_SCORED = ("text_1", "text_2", "queries", "documents", "messages")


class ScoreRequest(RequestBody):
    """The body of /score: one text for one or for each of several, or as many; or a conversation with its reply."""

    model: str | None = None
    text_1: Prompt | None = None
    text_2: Prompt | None = None
    queries: Prompt | None = None  # another name of text_1
    documents: Prompt | None = None  # another name of text_2
    messages: Messages | None = None  # for a reward model
    user: str | None = None  # ignored

    @property
    def field(self) -> str:
        """The field that holds what is scored."""
        return [name for name in _SCORED if getattr(self, name)][-1]

    def texts(self) -> list[Any]:
        """The pairs, or the conversation. Raises ApiError."""
        names = [name for name in _SCORED if getattr(self, name)]
        if names == ["messages"]:
            return [[message.to_template_message() for message in self.messages or ()]]
        firsts, seconds = (_prompts(getattr(self, name)) for name in names) if len(names) == 2 else ([], [])
        is_known = names in (["text_1", "text_2"], ["queries", "documents"])
        if not is_known or not all(isinstance(each, str) for each in firsts + seconds):
            got, expected = ", ".join(names) or "none", "text_1 and text_2, queries and documents, or messages"
            raise refused("text_1", "a score is of pairs of texts or of a conversation", got=got, expected=expected)
        if len(firsts) not in (1, len(seconds)):
            got, expected = f"{len(firsts)} and {len(seconds)}", "one and any number, or as many"
            raise refused(names[0], "the texts do not make pairs", got=got, expected=expected)
        return list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))


class RerankRequest(RequestBody):
    """The body of /rerank."""

    model: str | None = None
    query: Text
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = None  # only so many, the best ones; default and 0: all
    return_documents: bool | None = None  # default true
    user: str | None = None  # ignored

    field: ClassVar[str] = "documents"  # that holds what is scored

    def texts(self) -> list[tuple[str, str]]:
        """The query with each document."""
        return [(self.query, each) for each in self.documents]


def _prompts(given: Any) -> list[str | list[int]]:
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
