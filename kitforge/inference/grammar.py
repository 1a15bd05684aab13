"""Constraints on the text of a sequence: JSON by a schema, a regular expression, choices or a grammar.

llguidance computes which tokens may come next; it knows the vocabulary as bytes, and never sees logits.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal

import numpy as np

from kitforge.data.optional_imports import import_optional
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.data.tokenizers.protocol import NO_TOKEN
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.constraint import Masks

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

# Between the parts of JSON: a blank, or a line and its indentation. Without a bound, a greedy model writes blanks up to
# its maximum length; without a line break, one that wants it takes the nearest token instead, and lists stay empty.
WHITESPACE = r"[ ]|\n[ \t]{0,20}"
MAX_NODES = 2**16  # objects, lists and values of a schema
NUM_KEPT = 64  # compiled grammars
MAX_SHOWN = 300  # characters of a reason

_EXPECTED = {
    "json_object": "nothing to compile",
    "json_schema": "keywords of JSON Schema that decide while a text is written: no `not`, `if` or `uniqueItems`",
    "regex": "a regular expression without look-around and back-references",
    "choice": "at least one text",
    "grammar": "Lark in the dialect of llguidance, or GBNF",
}


class Grammar:
    """A constraint by a matcher of llguidance, which never raises: it goes into a state of error, and then allows the
    end alone."""

    reads_tokens = True

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def masks(self, drafts: Sequence[int]) -> Masks:
        """See `Constraint.masks`."""
        # Of llguidance 1.9.1, a matcher that went back over draft tokens may refuse a token that its mask allows.
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        rows = self._vocabulary.masks(matcher, list(drafts))
        if self._matcher.is_error():
            raise DataError(
                "the grammar of a text cannot be followed",
                got=_one_line(self._matcher.get_error()),
                expected="a token of the vocabulary that the grammar allows",
                fix="write a grammar in letters that the vocabulary has, or a simpler one",
            )
        return rows

    def drafts(self, guesses: list[int]) -> list[int]:
        """See `Constraint.drafts`."""
        found = self._matcher.compute_ff_tokens() or guesses
        return found[: self._matcher.validate_tokens(found)]

    def advance(self, token: int) -> None:
        """See `Constraint.advance`. The next mask tells of an error."""
        self._matcher.consume_token(token)

    def copy(self) -> Grammar:
        """See `Constraint.copy`."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary)


class GrammarCompiler:
    """Compiles constraints for a tokenizer and a model of `vocab_size` tokens, whose padding is never allowed. Where a
    text may end, the `stop_ids` of the engine are allowed, and nowhere else. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], vocab_size: int) -> None:
        self._open = partial(_Vocabulary, tokenizer, stop_ids, vocab_size)
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, ...], Grammar] = OrderedDict()
        self._lock = Lock()

    def compile(
        self, kind: GrammarKind, spec: Any = None, *, whitespace_pattern: str | None = None, around: str | None = None
    ) -> Grammar:
        """A constraint by a schema, a regular expression, a list of choices, or a grammar in llguidance's dialect of
        Lark or in GBNF; "json_object" needs no `spec`. `whitespace_pattern`, a regular expression, is what may be
        between two parts of JSON. `around`, in Lark, is a grammar in which that text is named `@answer`.

        Raises ConfigError for what cannot be enforced, and DependencyError without llguidance.
        """
        blanks = whitespace_pattern or WHITESPACE
        try:
            # The order of keys is that of the text, so they are not sorted.
            key = (kind, json.dumps(spec), blanks, around or "")
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(kind, error) from None
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or self._open()
            found = self._kept.pop(key, None)
        if found is None:
            found = Grammar(vocabulary.matcher(kind, spec, blanks, around), vocabulary)
        with self._lock:
            self._kept[key] = found
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
            return found.copy()


class _Vocabulary:
    """The tokens of a model as bytes, which llguidance reads once."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], vocab_size: int) -> None:
        stops = sorted(stop for stop in stop_ids if stop < vocab_size)
        if not stops:
            fix = "use a model whose tokenizer names an end-of-sequence token"
            raise ConfigError("structured output needs a token that ends a text", got="none", fix=fix)
        self.eos_token_id = stops[0]
        special = {token: name for name, token in getattr(tokenizer, "special_tokens", {}).items()}
        self.special_token_ids = list(special)
        known = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, vocab_size))]
        # No text: numbers that are no token, and stop tokens, which would end it in its middle.
        silent = {*stops, *(token for token, content in enumerate(known) if content == NO_TOKEN)}
        self.tokens = [b"" if token in silent else content for token, content in enumerate(known)]
        self.tokens += [b""] * (vocab_size - len(known))
        # A grammar names them by their spelling, and no text contains them.
        for token, name in special.items():
            self.tokens[token] = name.encode()
        self._encode = tokenizer.encode
        self._library = import_optional("llguidance", needed_for="structured output", extra="serve")
        self._packed = import_optional("llguidance.numpy", needed_for="structured output", extra="serve")
        self._tokenizer = self._library.LLTokenizer(self._library.TokenizerWrapper(self), eos_token=stops)
        self._executor = self._library.LLExecutor(1)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))

    def matcher(self, kind: GrammarKind, spec: Any, blanks: str, around: str | None = None) -> Any:
        """What follows a text by its grammar. Raises ConfigError."""
        try:
            source = _source(self._library, kind, spec, blanks)
            if around is not None:
                is_json = source.startswith("{")
                own = json.loads(source)["grammars"][0] if is_json else {"lark_grammar": source}
                source = json.dumps({"grammars": [{"lark_grammar": around}, {**own, "name": "answer"}]})
        except (TypeError, ValueError) as error:
            raise _refused(kind, error) from None
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return matcher

    def masks(self, matcher: Any, drafts: list[int]) -> Masks:
        """See `Constraint.masks`."""
        rows = np.full((1 + len(drafts), -(-len(self.tokens) // 32)), -1, dtype=np.int32)
        if drafts:
            self._packed.fill_next_token_bitmask_par_with_draft_tokens(self._executor, [(matcher, 0, drafts)], rows)
        else:
            self._packed.fill_next_token_bitmask(matcher, rows)
        return rows


def _source(library: Any, kind: GrammarKind, spec: Any, blanks: str) -> str:
    """The grammar as llguidance reads it. Raises TypeError or ValueError."""
    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else spec
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise TypeError("a schema must be an object, without options of llguidance (x-guidance)")
        if _num_nodes(schema) > MAX_NODES:
            raise ValueError(f"a schema has more than {MAX_NODES} values")
        return str(library.LLMatcher.grammar_from_json_schema(schema, overrides=json_options(blanks)))
    if kind == "choice":
        if not (isinstance(spec, list) and spec and all(isinstance(each, str) for each in spec)):
            raise TypeError("choices must be a list of texts")
        return str(library.grammar_from("choice", json.dumps(spec)))
    if not isinstance(spec, str):
        raise TypeError("a grammar must be a text")
    if kind == "regex":
        # \d of ASCII, as clients of other servers expect.
        return f"start: /{library.regex_to_lark(spec, 'd')}/"
    is_gbnf = re.search(r"^\s*root\s*::=", spec, re.MULTILINE)
    return str(library.grammar_from("gbnf" if is_gbnf else "lark", spec))


def json_options(blanks: str = WHITESPACE) -> dict[str, Any]:
    """How llguidance reads schemas: what it cannot enforce is an error."""
    return {"whitespace_pattern": blanks, "lenient": False, "coerce_one_of": False}


def _num_nodes(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_nodes, entries))


def _refused(kind: GrammarKind, reason: object) -> ConfigError:
    fix = "leave it out, or check the text that comes" if kind.startswith("json") else "write it in another way"
    return ConfigError(f"this {kind} cannot be enforced", got=_one_line(reason), expected=_EXPECTED[kind], fix=fix)


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:MAX_SHOWN]
