"""Constraints on the text of a sequence: JSON by a schema, a regular expression, choices or a grammar.

llguidance says which tokens may come next; it knows the vocabulary as bytes, and never sees logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from kitforge.data.optional_imports import import_optional
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.data.tokenizers.protocol import NO_TOKEN
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.untrusted import parse_json
from kitforge.inference.constraint import Constraint, Masks

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

# Between the parts of JSON: a blank, or a line and its indentation. Without a bound, a greedy model writes blanks up to
# its maximum length; without a line break, one that wants it takes the nearest token instead, and lists stay empty.
WHITESPACE = r"[ ]|\n[ \t]{0,20}"
# The formats of JSON Schema. Any other is a note that asks nothing, such as pydantic's of paths and secrets.
_FORMATS = {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"}
_FORMATS |= {"uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "regex", "json-pointer"}
_FORMATS |= {"relative-json-pointer"}
_VALUES = {"const", "enum", "default", "examples"}  # keywords of values, which are no schemas
_NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}  # of schemas by names
MAX_CHARACTERS = 2**20
NUM_KEPT = 64  # compiled grammars


class Grammar(Constraint):
    """A constraint by a matcher of llguidance, which never raises: it goes into a state of error, and then allows the
    end alone."""

    reads_tokens = True

    def __init__(self, matcher: Any, compiler: GrammarCompiler) -> None:
        self._matcher = matcher
        self._compiler = compiler

    def masks(self, drafts: Sequence[int]) -> Masks:
        # Of llguidance 1.9.1, a matcher that went back over draft tokens may refuse a token that its mask allows.
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        rows = self._compiler.masks(matcher, list(drafts))
        if self._matcher.is_error():
            raise DataError(
                "the grammar of a text cannot be followed",
                got=_one_line(self._matcher.get_error()),
                fix="write a grammar in letters that the vocabulary has, or a simpler one",
            )
        return rows

    def drafts(self, guesses: list[int]) -> list[int]:
        found = self._matcher.compute_ff_tokens() or guesses
        return found[: self._matcher.validate_tokens(found)]

    def advance(self, token: int) -> None:
        """The next mask tells of an error."""
        self._matcher.consume_token(token)

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._compiler)


class GrammarCompiler:
    """Compiles constraints for a tokenizer and a model of `vocab_size` tokens, whose padding is never allowed. Where a
    text may end, the `stop_ids` of the engine are allowed, and nowhere else. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = sorted(stop for stop in stop_ids if stop < vocab_size)
        self._vocab_size = vocab_size
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def compile(
        self,
        kind: GrammarKind,
        spec: Any = None,
        *,
        label: str | None = None,
        whitespace_pattern: str | None = None,
        around: str | None = None,
    ) -> Grammar:
        """A constraint by a schema or its text, a regular expression, a list of choices, or a grammar in llguidance's
        dialect of Lark or in GBNF; "json_object" needs no `spec`. `whitespace_pattern`, a regular expression, is what
        may be between two parts of JSON. `around`, in Lark, is a grammar in which that text is named `@answer`. Errors
        name the constraint as `label`, by default its kind.

        Raises ConfigError for what cannot be enforced, and DependencyError without llguidance.
        """
        try:
            # The order of keys is that of the text, so they are not sorted.
            return self._compiled(kind, json.dumps(spec), whitespace_pattern or WHITESPACE, around).copy()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"this {label or kind} cannot be enforced",
                got=_one_line(error),
                expected="what is decided while a text is written, in the form of docs/generation.md",
                fix="leave that out, or write it in another way",
            ) from None

    def masks(self, matcher: Any, drafts: list[int]) -> Masks:
        """See `Constraint`."""
        rows = np.full((1 + len(drafts), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        if drafts:
            fill = self._library.numpy.fill_next_token_bitmask_par_with_draft_tokens
            fill(self._executor, [(matcher, 0, drafts)], rows)
        else:
            self._library.numpy.fill_next_token_bitmask(matcher, rows)
        return rows

    @cached_property
    def _library(self) -> Any:
        import_optional("llguidance.numpy", needed_for="structured output", extra="serve")
        return import_optional("llguidance", needed_for="structured output", extra="serve")

    @cached_property
    def _executor(self) -> Any:
        return self._library.LLExecutor(1)

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokens as bytes, which llguidance reads once."""
        tokenizer, stops = self._tokenizer, self._stop_ids
        known = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, self._vocab_size))]
        # No text: numbers that are no token, and stop tokens, which would end a text in its middle.
        tokens = [b"" if token in stops or text == NO_TOKEN else text for token, text in enumerate(known)]
        tokens += [b""] * (self._vocab_size - len(tokens))
        # A grammar names special tokens by their spelling, and no text contains them.
        special = getattr(tokenizer, "special_tokens", {}).items()
        special = {token: name.encode() for name, token in special if token < self._vocab_size}
        tokens = [special.get(token, text) for token, text in enumerate(tokens)]
        words = _Words(eos_token_id=stops[0], bos_token_id=None, tokens=tokens, special_token_ids=list(special))
        words.encode = tokenizer.encode
        words.compiled = self._library.LLTokenizer(words, eos_token=stops)
        return words.compiled

    def _compile(self, kind: GrammarKind, spec: str, blanks: str, around: str | None) -> Grammar:
        """Raises TypeError or ValueError for what cannot be enforced."""
        if not self._stop_ids:
            raise ValueError("the tokenizer of the model names no token that ends a text")
        source = _source(self._library, kind, spec, blanks)
        if around is not None:
            own = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
            source = json.dumps({"grammars": [{"lark_grammar": around}, {**own, "name": "answer"}]})
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            # Its mask alone tells whether a text can begin; the first one also reads most of a large grammar.
            self.masks(matcher, [])
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Grammar(matcher, self)


class _Words(SimpleNamespace):
    """What llguidance reads of a tokenizer. It allows nothing but these tokens where a text must follow, and does not
    see whether they spell it."""

    is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        # A tokenizer may put a blank before every text, or write another one: then greedily, the longest token first.
        for find in (self.encode, lambda each: self.encode("\n" + each), self.compiled.greedy_tokenize):
            found, size = list[int](), 0
            for token in reversed(find(text)):
                if size < len(wanted):
                    found.insert(0, token)
                    size += len(self.tokens[token])
            if b"".join(self.tokens[token] for token in found) == wanted:
                return found
        raise ValueError(f"the vocabulary cannot write {text!r}")


def json_options(blanks: str = WHITESPACE) -> dict[str, Any]:
    """How llguidance reads JSON schemas, with `blanks` between two parts of JSON."""
    return {"whitespace_pattern": blanks, "lenient": False, "coerce_one_of": False}


def _source(library: Any, kind: GrammarKind, text: str, blanks: str) -> str:
    """The grammar as llguidance reads it. Raises TypeError or ValueError."""
    spec = parse_json(text)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, of at most {MAX_CHARACTERS}")
    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else parse_json(spec) if isinstance(spec, str) else spec
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise TypeError("a schema must be an object, without options of llguidance (x-guidance)")
        return str(library.LLMatcher.grammar_from_json_schema(plain_schema(schema), overrides=json_options(blanks)))
    if kind == "choice":
        if not (isinstance(spec, list) and spec and all(isinstance(each, str) for each in spec)):
            raise TypeError("choices must be a list of texts")
        return str(library.grammar_from("choice", text))
    if not isinstance(spec, str):
        raise TypeError("it must be a text")
    if kind == "regex":
        # \d of ASCII, as clients of other servers expect.
        return f"start: /{library.regex_to_lark(spec, 'd')}/"
    is_gbnf = re.search(r"^\s*root\s*::=", spec, re.MULTILINE)
    return str(library.grammar_from("gbnf" if is_gbnf else "lark", spec))


def plain_schema(schema: Any, root: Any = None, *, of_names: bool = False) -> Any:
    """The same schema as llguidance reads it: without formats that ask nothing, and with `anyOf` for a `oneOf` whose
    branches a tag tells apart, also where they are references."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return [plain_schema(each, root) for each in schema] if isinstance(schema, list) else schema
    if of_names:
        # A property may be called as a keyword is.
        return {name: plain_schema(each, root) for name, each in schema.items()}
    branches = schema.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in schema and _has_tag([_target(each, root) for each in branches]):
        # The name of the tag only stands in the way of references that are circular.
        schema = {"anyOf": branches} | {name: schema[name] for name in schema if name not in ("oneOf", "discriminator")}
    return {
        name: value if name in _VALUES else plain_schema(value, root, of_names=name in _NAMED)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in _FORMATS)
    }


def _target(schema: Any, root: Any) -> Any:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return schema
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _has_tag(branches: list[Any]) -> bool:
    """Whether each branch is an object that must have a property of texts which no other branch allows."""
    try:
        tags = [{name: each["properties"][name] for name in each["required"]} for each in branches]
        named = [[of.get(name, {}) for of in tags] for name in tags[0]]
        texts = [[text for each in several for text in each.get("enum", [each.get("const")])] for several in named]
        are_texts = [all(isinstance(text, str) for text in each) and len(set(each)) == len(each) for each in texts]
        return any(are_texts) and all(each["type"] == "object" for each in branches)
    except (AttributeError, IndexError, KeyError, TypeError):
        # A schema of another form, or none.
        return False


def _one_line(reason: object) -> str:
    # Without what the library adds for those who mend it.
    return " ".join(re.split(r", traceback|<backtrace>|<non-verbose|<state>", str(reason))[0].split())[:300]
