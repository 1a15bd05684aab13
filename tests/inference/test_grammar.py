"""Grammars say which tokens may come next, and nothing else about a text."""

import json
from typing import Any, cast

import numpy as np
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError
from kitforge.inference.engine import Engine
from kitforge.inference.grammar import NUM_KEPT, Grammar, GrammarCompiler
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.inference.recomputation import until_end
from tests.tiny import built
from tests.trainer import tiny

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
VOCAB = TOKENIZER.vocab_size + 40
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.eos_ids, VOCAB)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return cast(Decoder, built(tiny.LLAMA, VOCAB))


def allowed(constraint: Grammar, text: str | bytes = "") -> set[int]:
    """The tokens that may follow a text."""
    copy = constraint.copy()
    for token in text.encode() if isinstance(text, str) else text:
        copy.advance(token)
    return set(np.flatnonzero(np.unpackbits(copy.masks([]).view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def said(model: Decoder, kind: Any, spec: Any, **options: Any) -> list[int]:
    """The tokens of a text by a grammar; an error of it is raised."""
    engine = Engine(model, stop_ids=[EOS])
    engine.submit([1], SamplingOptions(**{"max_new_tokens": 9} | options), constraint=COMPILER.compile(kind, spec))
    outputs = list(until_end(engine))
    if outputs[-1].error is not None:
        raise outputs[-1].error
    return [token for each in outputs for token in each.tokens]


def letters(constraint: Grammar, text: str = "") -> str:
    """The same as letters, with $ for the end."""
    return "".join(sorted("$" if token == EOS else chr(token) for token in allowed(constraint, text)))


def schema(**keywords: Any) -> Grammar:
    return COMPILER.compile("json_schema", keywords)


def takes(constraint: Grammar, text: str) -> bool:
    """Whether the text may be written and end."""
    tokens = [*text.encode(), EOS]
    return all(token in allowed(constraint, bytes(tokens[:place])) for place, token in enumerate(tokens))


class Voiceless(ByteTokenizer):
    """A vocabulary without an opening brace, and with a token of no text that is not special."""

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == ord("{") else super().token_bytes(token)


def test_a_vocabulary_that_cannot_write_a_text_fails_it_and_no_other(model: Decoder) -> None:
    broken = GrammarCompiler(Voiceless(), [EOS], VOCAB).compile("regex", "[ab]{2}[{]c")
    engine, options = Engine(model, stop_ids=[EOS]), SamplingOptions(max_new_tokens=9)
    failed = engine.submit([1, 2], options, constraint=broken, num_samples=2)
    engine.submit([1, 2], options, constraint=COMPILER.compile("choice", ["yes"]))
    ends = [each for each in until_end(engine) if each.finish_reason is not None]
    for each in ends:
        assert (each.finish_reason == "failed") == (each.request == failed) == isinstance(each.error, DataError)
    assert len(ends) == 3 and "cannot be followed" in str(ends[-1].error)


def test_only_the_stop_tokens_of_the_engine_end_a_text_and_only_a_complete_one() -> None:
    both = GrammarCompiler(TOKENIZER, [EOS, VOCAB - 1, VOCAB + 5], VOCAB).compile("regex", "ab?")
    assert EOS not in allowed(both) and allowed(both, "a") == {ord("b"), EOS, VOCAB - 1} == allowed(both, "a")
    assert allowed(both, "ab") == {EOS, VOCAB - 1}


def test_a_stop_token_that_spells_a_text_ends_none_in_its_middle() -> None:
    comma = GrammarCompiler(TOKENIZER, [ord(",")], VOCAB)
    with pytest.raises(ConfigError, match="cannot write 'a,b'"):
        comma.compile("regex", "a,b")
    with pytest.raises(DataError, match="cannot be followed"):
        allowed(comma.compile("regex", "[ac],b"), "a")


def test_ignored_stop_tokens_are_refused(model: Decoder) -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        said(model, "regex", "a", ignore_eos=True)


@pytest.mark.parametrize("shortest", [2, 3, 9])
def test_a_grammar_comes_before_the_least_number_of_tokens(model: Decoder, shortest: int) -> None:
    assert said(model, "regex", "ab", min_new_tokens=shortest) == [*b"ab", EOS]


def test_the_least_number_of_tokens_holds_where_a_grammar_has_another(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 7, "logit_bias": {str(EOS): 50.0}}
    assert said(model, "regex", "a+", **options) == [*b"aaaaaaa", EOS]


def test_tokens_that_are_never_generated_may_leave_a_grammar_none(model: Decoder) -> None:
    assert said(model, "regex", "a[bc]", suppress_tokens=(ord("b"),)) == [*b"ac", EOS]
    with pytest.raises(DataError, match="suppress_tokens"):
        said(model, "regex", "ab", suppress_tokens=(ord("b"),))


def test_blanks_between_the_parts_of_json_are_bounded() -> None:
    lists = schema(type="array", items={"type": "integer"})
    for text in ("[1,2]", "[ 1, 2 ]", "[\n  1,\n  2\n]"):
        assert takes(lists, text)
    assert letters(lists, "[ ").strip() == letters(lists, "[\n" + " " * 20) == "-0123456789]"
    assert not takes(lists, " [1]")


def test_a_pattern_of_blanks_is_obeyed_and_no_other_grammar() -> None:
    spec = {"type": "array", "items": {"type": "null"}}
    tight = COMPILER.compile("json_schema", spec, whitespace_pattern="_?")
    assert takes(tight, "[_null]") and not takes(COMPILER.compile("json_schema", spec), "[_null]")


def test_properties_come_in_the_order_of_their_schema() -> None:
    named = schema(type="object", properties={"b": {"const": 1}, "a": {"const": 2}}, additionalProperties=False)
    turned = schema(type="object", properties={"a": {"const": 2}, "b": {"const": 1}}, additionalProperties=False)
    assert takes(named, '{"b":1,"a":2}') and not takes(named, '{"a":2,"b":1}') and takes(turned, '{"a":2,"b":1}')


def test_other_properties_are_allowed_unless_the_schema_says_no() -> None:
    properties = {"properties": {"a": {"const": 1}}, "type": "object"}
    assert takes(schema(**properties), '{"a":1,"z":[]}') and not takes(schema(**properties), '{"a":1,"a":[]}')
    assert not takes(schema(**properties, additionalProperties=False), '{"z":1}')


def test_a_text_of_json_has_letters_and_no_escapes_of_them() -> None:
    texts = schema(type="string")
    assert takes(texts, '"é\\n\\"\U0001f600"') and not takes(texts, '"\\u00e9"') and not takes(texts, '"\\ud83d"')
    # Half of a letter may be followed by its other half alone.
    assert allowed(texts, '"é"'.encode()[:2]) == set(range(0x80, 0xC0))


def test_inherited_schemas_and_patterns_of_names_hold_together() -> None:
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    child = schema(allOf=[base, {"properties": {"b": {"const": 1}}, "required": ["b"]}])
    assert takes(child, '{"a":3,"b":1}') and not takes(child, '{"a":3}') and not takes(child, '{"b":1}')
    pattern = schema(type="object", properties={"ab": {"type": "integer"}}, patternProperties={"^a": {"maximum": 3}})
    assert takes(pattern, '{"ab":2}') and not takes(pattern, '{"ab":4}')


def test_a_format_that_json_schema_does_not_define_asks_nothing() -> None:
    # Those of pydantic's paths, secrets, bytes and numbers.
    for name in ("path", "password", "binary", "int32"):
        assert takes(schema(type="object", properties={"format": {"type": "string", "format": name}}), '{"format":"é"}')
    assert takes(schema(type="string", format="date"), '"2026-11-28"')
    assert not takes(schema(type="string", format="date"), '"é"')
    with pytest.raises(ConfigError, match="idn-email"):
        schema(type="string", format="idn-email")
    kept = schema(const={"type": "string", "format": "path"})
    assert takes(kept, '{"type":"string","format":"path"}') and not takes(kept, '{"type":"string"}')


def test_a_property_may_be_called_as_a_keyword_is() -> None:
    odd = {"type": "string", "format": "path"}
    for name in ("default", "const", "enum", "examples", "format", "properties"):
        assert takes(schema(type="object", properties={name: odd}), json.dumps({name: "x"}, separators=(",", ":")))
        named = schema(type="object", properties={name: {"$ref": f"#/$defs/{name}"}}, **{"$defs": {name: odd}})
        assert takes(named, json.dumps({name: "x"}, separators=(",", ":")))


def branch(kind: Any, **properties: Any) -> dict[str, Any]:
    members = {"kind": {"enum": [*kind]} if isinstance(kind, list) else {"const": kind}, **properties}
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


def test_branches_that_a_tag_tells_apart_may_be_references() -> None:
    """As pydantic writes them; llguidance sees it of branches that are written out alone."""
    leaf, inner = branch("leaf", n={"type": "integer"}), branch(["add", "mul"], left={"$ref": "#/$defs/tree"})
    tree = {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/inner"}], "discriminator": {"propertyName": "kind"}}
    for one_of in (tree, {"oneOf": tree["oneOf"]}):
        found = schema(**one_of, **{"$defs": {"tree": one_of, "leaf": leaf, "inner": inner}})
        assert takes(found, '{"kind":"mul","left":{"kind":"leaf","n":1}}') and takes(found, '{"kind":"leaf","n":1}')
        assert not takes(found, '{"kind":"leaf","left":{"kind":"leaf","n":1}}')
    for other in (
        branch(["mul", "leaf"]),
        {**branch("x"), "required": []},
        {**branch("x"), "type": ["object", "null"]},
    ):
        with pytest.raises(ConfigError, match="oneOf"):
            schema(oneOf=tree["oneOf"], **{"$defs": {"leaf": leaf, "inner": other}})


def test_digits_are_those_of_ascii_and_anchors_change_nothing() -> None:
    assert letters(COMPILER.compile("regex", r"^\d{2}$")) == "0123456789"
    assert takes(COMPILER.compile("regex", r"^\d{2}$"), "42") and takes(COMPILER.compile("regex", 'a/b\n"'), 'a/b\n"')


def test_choices_that_begin_alike_end_where_each_ends() -> None:
    choices = COMPILER.compile("choice", ["yes", "yes, but", 'é"\\\n', "\U0001f600"])
    assert letters(choices, "yes") == "$," and all(
        takes(choices, text) for text in ["yes, but", 'é"\\\n', "\U0001f600"]
    )


def test_a_grammar_is_lark_or_gbnf() -> None:
    for text in ('start: "a" | "b"', 'root ::= "a" | "b"', f'start: <[{VOCAB - 2}]> "c"'):
        assert allowed(COMPILER.compile("grammar", text)) in ({97, 98}, {VOCAB - 2})


def test_padding_and_special_tokens_are_in_no_text() -> None:
    free = COMPILER.compile("regex", "(?s:.*)")
    assert max(allowed(free, "a")) == EOS and max(allowed(schema(type="string"), '"a')) < EOS


def test_special_tokens_have_their_names_in_a_grammar() -> None:
    class Named(ByteTokenizer):
        special_tokens = {"<call>": 258, "<unknown>": VOCAB + 7}

    compiler = GrammarCompiler(Named(), [EOS], VOCAB)
    assert allowed(compiler.compile("grammar", 'start: <call> "a"')) == {258}
    assert allowed(compiler.compile("regex", "<call>")) == {ord("<")}


def test_a_nested_text_has_no_least_depth_and_a_nested_schema_is_refused() -> None:
    deep: dict[str, Any] = {"$ref": "#/$defs/list"}
    lists = schema(**deep, **{"$defs": {"list": {"type": "array", "items": deep}}})
    assert takes(lists, "[" * 500 + "]" * 500)
    text: dict[str, Any] = {}
    for _ in range(5_000):
        text = {"type": "array", "items": text}
    for spec in (text, '{"type":"array","items":' * 5_000 + "{}" + "}" * 5_000):
        with pytest.raises(ConfigError, match="recursion|nested"):
            COMPILER.compile("json_schema", spec)


def test_compiled_grammars_are_kept_and_copied() -> None:
    compiler = GrammarCompiler(TOKENIZER, [EOS], VOCAB)
    first = compiler.compile("regex", "ab")
    first.advance(ord("a"))
    assert letters(first) == "b" and letters(compiler.compile("regex", "ab")) == "a"
    for number in range(NUM_KEPT + 5):
        compiler.compile("choice", [str(number)])
    kept = compiler._compiled.cache_info()
    assert (kept.hits, kept.currsize) == (1, NUM_KEPT)
    with pytest.raises(ConfigError):
        compiler.compile("regex", "(")


def test_what_must_follow_is_sampled_and_costs_no_step_for_each_token(model: Decoder) -> None:
    engine, options = Engine(model, stop_ids=[EOS]), SamplingOptions(max_new_tokens=9, temperature=1.0)
    constraint = COMPILER.compile("regex", "[xy]abcdef")
    assert constraint.drafts([]) == [] and COMPILER.compile("regex", "abc[de]").drafts([7]) == [97, 98, 99]
    engine.submit([1], options, constraint=constraint)
    outputs = list(until_end(engine))
    # The first with the prompt; then the six that must follow, and what comes after them.
    assert [len(each.tokens) for each in outputs] == [1, 7]
    assert [logprob == 0.0 for each in outputs for logprob in each.logprobs] == [False, *[True] * 7]


class Prefixed(ByteTokenizer):
    """Puts a blank before every text, as many do, and has it in one token with an a."""

    def token_bytes(self, token: int) -> bytes:
        return b" a" if token == 257 else super().token_bytes(token)

    def encode(self, text: str) -> list[int]:
        return [257, *super().encode(text)[1:]] if text.startswith("a") else [32, *super().encode(text)]


class Lower(ByteTokenizer):
    """Writes small letters only, though the vocabulary has the others."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


@pytest.mark.parametrize("kind", [Prefixed, Lower])
def test_what_must_follow_is_spelled_whatever_the_tokenizer_does_to_a_text(kind: type[ByteTokenizer]) -> None:
    constraint = GrammarCompiler(kind(), [EOS], VOCAB).compile("regex", "[xy]aBc[de]")
    for place, letter in enumerate("aBc"):
        assert allowed(constraint, "xaBc"[: place + 1]) == {ord(letter)}
    assert GrammarCompiler(kind(), [EOS], VOCAB).compile("regex", "aBc").drafts([]) == list(b"aBc")


def test_guesses_are_cut_where_the_grammar_ends_them() -> None:
    choices = COMPILER.compile("regex", "[ab]{3}")
    assert choices.drafts([97, 98, 99, 97]) == [97, 98] and choices.drafts([99]) == []
    assert choices.masks([97, 98]).shape == (3, -(-VOCAB // 32))


def test_each_sample_follows_a_copy_of_its_own(model: Decoder) -> None:
    engine, options = (
        Engine(model, EngineOptions(max_num_seqs=4), stop_ids=[EOS]),
        SamplingOptions(max_new_tokens=40, temperature=3.0),
    )
    constraint = COMPILER.compile("regex", "(abc|xyz|a[b-y]z){4}")
    for _ in range(2):
        engine.submit([1, 2], options, num_samples=3, constraint=constraint)
    texts: dict[tuple[int, int], list[int]] = {}
    for each in until_end(engine):
        texts.setdefault((each.request, each.sample), []).extend(each.tokens)
    assert len({tuple(text) for text in texts.values()}) > 1
    assert all(text[-1] == EOS and takes(constraint, bytes(text[:-1]).decode()) for text in texts.values())


VOICELESS = GrammarCompiler(Voiceless(), [EOS], VOCAB)
# Grammars that no text can follow, and words of the refusal.
REFUSED: list[tuple[GrammarCompiler, Any, Any, str]] = [
    (GrammarCompiler(TOKENIZER, [], VOCAB), "json_object", None, "no token that ends a text"),
    (VOICELESS, "json_object", None, "cannot write '{'"),
    (COMPILER, "regex", "[^\\x00-\\x{10FFFF}]", "this regex cannot be enforced"),
    (COMPILER, "grammar", "start: /[^\\x00-\\x{10FFFF}]/", "this grammar cannot be enforced"),
    *((COMPILER, "regex", each, "regex") for each in ("(?=a)b", "(a)\\1", "\\bfoo", "a(", "(?!a)b")),
    (COMPILER, "json_schema", {"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
    (COMPILER, "json_schema", {"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
    (COMPILER, "json_schema", {"enum": []}, "Unsatisfiable"),
    # A schema is an object, without options of the compiler.
    *((COMPILER, "json_schema", each, "json_schema") for each in (True, [], None, "3", {"not": {}})),
    (COMPILER, "json_schema", {"type": "object", "x-guidance": {"lenient": True}}, "json_schema"),
    (COMPILER, "json_schema", {"enum": ["x" * 2**20]}, "characters"),
    (COMPILER, "grammar", "start: (", "grammar"),
    *((COMPILER, "choice", each, "choice") for each in ([], "yes", [1], None, ["\ud83d"])),
]


@pytest.mark.parametrize(("compiler", "kind", "spec", "words"), REFUSED, ids=lambda each: str(each)[:30])
def test_what_no_text_can_follow_is_refused(compiler: GrammarCompiler, kind: Any, spec: Any, words: str) -> None:
    with pytest.raises(KitforgeError, match=words) as told:
        compiler.compile(kind, spec)
    lines = str(told.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:3]] == ["got", "expected"]
    assert len(lines[1]) < 320 and json.dumps(str(told.value))
