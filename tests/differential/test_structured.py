"""Texts by a schema: whatever the weights, a text that ends is what jsonschema accepts, its log-probabilities are those
of the logits that the masks leave, and no neighbour, draft, cancellation or cache changes it."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.grammar import Grammar, GrammarCompiler
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.loading import build
from tests.core.nn.networks import LLAMA
from tests.differential.drawn import drawn
from tests.inference.recomputation import logits_of

TOKENIZER = ByteTokenizer()
# Three more than the tokenizer has, as publishers pad.
VOCAB = TOKENIZER.vocab_size + 3
LONGEST = 120
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.eos_ids, VOCAB)
# Random weights end a text seldom without it.
ENDS = {"34": 3.0, "93": 3.0, "125": 3.0, "44": -1.0, str(TOKENIZER.eos_id): 3.0}
ENGINE = EngineOptions(block_size=4, max_num_batched_tokens=64, max_num_seqs=8)

BLOCK = 2 * LLAMA.num_layers * (LLAMA.num_kv_heads or LLAMA.num_heads) * LLAMA.dim // LLAMA.num_heads * 4 * 4  # bytes
preempted: list[int] = []

# Keywords that no prefix of a text decides; each is refused in words that name it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"not": {"type": "string"}}, "what is excluded is known at the end"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "the condition is known at the end"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "all items before would be part of the grammar"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "which item it is is known at the end"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, "not done by llguidance"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "not done by llguidance"),
    "format": ({"type": "string", "format": "iri"}, "a format of JSON Schema that has no rule"),
    "example.org": ({"$ref": "https://example.org/schema.json"}, "nothing is fetched"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "both may hold, which is known at the end"),
    "x-guidance": ({"type": "object", "x-guidance": {"lenient": True}}, "would switch refusals off"),
}


@functools.cache
def network(seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    config = replace(LLAMA, vocab_size=VOCAB, max_length=256)
    return build(config, device=torch.device("cpu"), seed=seed, dtype=dtype).requires_grad_(False).eval()


LETTERS = st.text('ab é"\\\n', max_size=4)
BOUNDS = st.tuples(st.integers(-30, 30), st.integers(0, 40)).map(lambda low: (low[0], low[0] + low[1]))
PLAIN: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"const": None}]),
    BOUNDS.map(lambda at: {"type": "integer", "minimum": at[0], "maximum": at[1]}),
    BOUNDS.map(lambda at: {"type": "number", "exclusiveMinimum": at[0], "maximum": at[1] + 1}),
    st.tuples(st.integers(0, 3), st.integers(0, 6)).map(
        lambda at: {"type": "string", "minLength": at[0], "maxLength": at[0] + at[1]}
    ),
    st.sampled_from(["^a+$", "[0-9]{2}", "^(yes|no)$", "^\\d{4}-\\d{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(LETTERS | st.integers(-9, 9) | st.none(), min_size=1, max_size=3).map(lambda some: {"enum": some}),
    LETTERS.map(lambda text: {"const": text}),
    st.integers(2, 7).map(lambda step: {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 99}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(LETTERS, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    return schema | draw(st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"const": 1}}]))


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda at: {"type": "array", "items": at[0], "minItems": at[1], "maxItems": at[1] + at[2]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda some: {"type": "array", "prefixItems": some, "items": False, "minItems": len(some)}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    )


LINKED = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/one"}]}}}
SCHEMAS = st.tuples(
    objects(st.recursive(PLAIN | st.just({"$ref": "#/$defs/one"}), nested, max_leaves=4)), PLAIN | st.just(LINKED)
).map(lambda at: at[0] | {"$defs": {"one": at[1]}})


def options_of(temperature: float, longest: int = LONGEST, **others: Any) -> SamplingOptions:
    return SamplingOptions(max_new_tokens=longest, temperature=temperature, logit_bias=ENDS, **others)


def texts_of(
    engine: Engine, asked: Sequence[tuple[str, SamplingOptions, Grammar | None]], num_samples: int = 1
) -> list[list[Completion]]:
    """The samples of each (prompt, options, constraint), which run together; noise is keyed by the prompt."""
    found: dict[int, list[Completion]] = {}
    for prompt, options, constraint in asked:
        tokens = TOKENIZER.encode(prompt)
        request = engine.submit(tokens, options, num_samples=num_samples, key=prompt, constraint=constraint)
        found[request] = [Completion(tokens=[], logprobs=[]) for _ in range(num_samples)]
    while engine.has_work:
        for output in engine.step():
            if output.request in found:
                sample = found[output.request][output.sample]
                sample.tokens += output.tokens
                sample.logprobs += output.logprobs
                sample.finish_reason = output.finish_reason
                assert output.error is None
    return list(found.values())


def compiled(schema: dict[str, Any]) -> Grammar:
    try:
        return COMPILER.compile("json_schema", schema)
    except ConfigError as error:
        if "Unsatisfiable" not in str(error):
            raise
        reject()


@drawn(25, whole=1_000, shrinks=False)
@given(SCHEMAS, st.integers(0, 7), st.sampled_from([0.0, 0.7, 1.5, 4.0]), st.booleans())
def test_a_text_that_ends_is_what_its_schema_accepts(
    schema: dict[str, Any], seed: int, temperature: float, has_top_p: bool
) -> None:
    options = options_of(temperature, top_p=0.6 if has_top_p else None)
    [samples] = texts_of(
        Engine(network(seed), ENGINE, stop_ids=TOKENIZER.eos_ids), [("x", options, compiled(schema))], 3
    )
    for sample in samples:
        text = TOKENIZER.decode(sample.content)
        assert "\ufffd" not in text or sample.finish_reason == "length"
        if sample.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert sample.finish_reason in ("stop", "length") and max(sample.tokens) < TOKENIZER.vocab_size


@drawn(6, whole=200, shrinks=False)
@given(SCHEMAS, st.integers(0, 7), st.sampled_from([0.0, 1.0, 2.5]))
def test_log_probabilities_are_those_of_the_logits_that_are_left(
    schema: dict[str, Any], seed: int, temperature: float
) -> None:
    model, options = network(seed, torch.float64), options_of(temperature, 24)
    engine = Engine(model, ENGINE, stop_ids=TOKENIZER.eos_ids)
    [[sample]] = texts_of(engine, [("x", options, compiled(schema))])
    constraint, text = compiled(schema), TOKENIZER.encode("x")
    logits = logits_of(model, [*text, *sample.tokens], len(text) + 24)
    for place, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True), len(text) - 1):
        scores = logits[place].clone()
        for biased, value in ENDS.items():
            scores[int(biased)] += value
        bits = np.unpackbits(constraint.masks([]).view(np.uint8), bitorder="little")[:VOCAB]
        scores[torch.from_numpy(bits == 0)] = float("-inf")
        expected = (scores / (temperature or 1.0)).log_softmax(-1)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-9)
        assert temperature or token == int(scores.argmax())
        constraint.advance(token)


@drawn(5, whole=200, shrinks=False)
@given(st.lists(SCHEMAS, min_size=2, max_size=2), st.integers(0, 7), st.sampled_from([0.0, 1.0]))
def test_nothing_beside_a_text_changes_it(schemas: list[dict[str, Any]], seed: int, temperature: float) -> None:
    options, model = options_of(temperature, 40), network(seed)
    grammars = [compiled(schema) for schema in schemas]
    mine = ("the first text", options, grammars[0])
    plain = ("the text without", options_of(temperature, 40), None)
    others = [(f"the other {number}", options, grammars[number % 2] if number % 3 else None) for number in range(6)]

    def engine(**changes: Any) -> Engine:
        return Engine(model, replace(ENGINE, **changes), stop_ids=TOKENIZER.eos_ids)

    [[alone]] = texts_of(engine(), [mine])
    [[without]] = texts_of(engine(), [plain])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Grammar, "drafts", lambda _self, _guesses: [])
        assert texts_of(engine(), [mine]) == [[alone]]
    # So little memory that texts push one another out.
    crowded = engine(prompt_lookup_tokens=3, max_num_seqs=5, kv_cache_bytes=24 * BLOCK)
    # Cancelled in its middle, and then from the prefix cache.
    gone = crowded.submit(TOKENIZER.encode("the first text"), options, key="gone", constraint=grammars[1])
    for _ in range(7):
        crowded.step()
    crowded.cancel(gone)
    for _ in range(2):
        first, second, *_ = texts_of(crowded, [mine, plain, *others])
        assert (first, second) == ([alone], [without])
    three = texts_of(engine(), [mine, plain], 3)
    assert [samples[0] for samples in three] == [alone, without]
    again = texts_of(engine(prompt_lookup_tokens=2), [plain, mine], 3)
    assert again == three[::-1]
    preempted.append(crowded.stats()["preemptions"])


def test_texts_were_pushed_out_meanwhile() -> None:
    assert not preempted or sum(preempted) > 0, preempted


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_what_cannot_be_enforced_is_refused_by_its_name(keyword: str) -> None:
    with pytest.raises(ConfigError) as refused:
        COMPILER.compile("json_schema", REFUSED[keyword][0])
    assert keyword in str(refused.value)
