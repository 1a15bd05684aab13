"""Replies are read into content, thoughts and calls, the same however they are cut."""

import itertools
import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kitforge.data.chat.tool_calls import (
    CALL_MARKS,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN_CODER,
    CallFormat,
    CallRules,
    ReplyGrammar,
    ReplyPart,
    ReplyReader,
    call_format_of,
)
from kitforge.data.text.continuation import ReplyMarks
from tests.differential.drawn import drawn

THOUGHT = ("<think>", "</think>")
FORMATS = {"Hermes": HERMES, "Qwen Coder": QWEN_CODER, "Llama": LLAMA, "Mistral": MISTRAL, "Mistral names": MISTRAL}
SCHEMA = {
    "properties": {
        "a": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"type": ["object", "null"]},
        "b": {"type": "boolean"},
    }
}
TOOLS = {"f": SCHEMA, "g": SCHEMA, "get_weather": SCHEMA}

# Pieces of which formats are made, and others that texts have.
PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=f>", "</function>"]
PIECES += ["<parameter=a>", "</parameter>", '{"name": "f", ', '"arguments": {', '"parameters": {}', "}", "}}", ",", ";"]
PIECES += ["[", "]", '"', "\\", "\n", " ", "<think>", "</think>", "<", "Grüße 🎉", "\u00a0", "x", "null"]
garbage = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
words = st.text(st.sampled_from('ab <>{}[]"\\\n;,=/ü🎉'), max_size=12).map(str.strip)
value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {}, optional={"a": st.integers(), "s": words, "o": st.none() | value.map(lambda v: {"k": v})}
)
call = st.tuples(st.sampled_from(sorted(TOOLS)), arguments)


def told(parts: list[ReplyPart]) -> dict[str, Any]:
    """What a client joins of the parts."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for part in parts:
        if part.kind == "call":
            assert part.call == len(said["calls"])
            said["calls"].append([part.text, ""])
        elif part.kind == "arguments":
            said["calls"][part.call][1] += part.text
        else:
            said[part.kind] += part.text
    return said


def read(text: str, calls: CallFormat | None, marks: ReplyMarks | None = None) -> dict[str, Any]:
    """What is told of a reply, which is the same however it is cut."""
    marks = marks or ReplyMarks()
    whole = told(ReplyReader(marks, calls, TOOLS).push(text, is_last=True))
    reader = ReplyReader(marks, calls, TOOLS)
    pieces = [part for letter in text for part in reader.push(letter)]
    assert told(pieces + reader.push("", is_last=True)) == whole
    for cut in range(1, len(text)):
        reader = ReplyReader(marks, calls, TOOLS)
        assert told(reader.push(text[:cut]) + reader.push(text[cut:], is_last=True)) == whole
    return whole


def spelt(kind: str, calls: list[tuple[str, dict[str, Any]]], spaces: str) -> str:
    """Calls as models of that family write them."""

    def text(each: object) -> str:
        return json.dumps(each, ensure_ascii=bool(spaces))

    key = "parameters" if kind == "Llama" else "arguments"
    objects = [f'{{{spaces}"name": "{name}", "{key}":{spaces}{text(given)}{spaces}}}' for name, given in calls]
    if kind == "Mistral":
        return f"[TOOL_CALLS]{spaces}[" + f",{spaces}".join(objects) + "]"
    if kind == "Mistral names":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text(given)}" for name, given in calls)
    if kind == "Llama":
        return f";{spaces}".join(objects)
    if kind == "Qwen Coder":
        objects = []
        for name, given in calls:
            values = {key: each if isinstance(each, str) else text(each) for key, each in given.items()}
            inner = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in values.items())
            objects.append(f"<function={name}>\n{inner}</function>")
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("state", ["none", "opened", "closed", "absent"])
@drawn(12, whole=600)
@given(content=words, thought=words, calls=st.lists(call, min_size=1, max_size=3), spaces=st.sampled_from(["", "\n "]))
def test_a_reply_is_its_content_its_thought_and_its_calls(
    kind: str, state: str, content: str, thought: str, calls: list[tuple[str, dict[str, Any]]], spaces: str
) -> None:
    if kind == "Llama":
        content = ""
    assume(state == "none" or not content.startswith("<t"))
    marks = ReplyMarks() if state in ("none", "closed") else ReplyMarks(thought=THOUGHT, is_thinking=state == "opened")
    opening = {"opened": f"\n{thought}\n</think>\n\n", "absent": f"<think>\n{thought}\n</think>\n\n"}.get(state, "")
    gap = "\n" if content else ""
    found = read(opening + content + gap + spelt(kind, calls, spaces) + gap, FORMATS[kind], marks)
    assert found["content"] == content and found["reasoning"] == (thought if opening else "")
    assert [(name, json.loads(given)) for name, given in found["calls"]] == calls
    if kind != "Qwen Coder":
        # As the model spells them.
        assert [given for _, given in found["calls"]] == [
            json.dumps(given, ensure_ascii=bool(spaces)) for _, given in calls
        ]


@pytest.mark.parametrize("kind", FORMATS)
@drawn(40, whole=4_000)
@given(text=garbage, marks=st.sampled_from([ReplyMarks(), ReplyMarks(thought=THOUGHT)]))
def test_nothing_is_lost_of_a_reply_that_is_no_call(kind: str, text: str, marks: ReplyMarks) -> None:
    found = read(text, FORMATS[kind], marks)
    if not found["calls"] and not text.lstrip().startswith("<think>"):
        assert found["content"] == text


NAMES_LAST = '{"arguments": {"a": 1.50e3, "s": "}"}, "id": "1", "name": "f"}'
FOUND: dict[str, tuple[CallFormat, str, dict[str, Any]]] = {
    "a name after the arguments": (
        HERMES,
        f"<tool_call>{NAMES_LAST}</tool_call>",
        {"calls": [["f", '{"a": 1.50e3, "s": "}"}']]},
    ),
    "names after the arguments": (
        MISTRAL,
        f"[TOOL_CALLS][{NAMES_LAST}, {NAMES_LAST}]",
        {"calls": [["f", '{"a": 1.50e3, "s": "}"}']] * 2},
    ),
    "a call without arguments": (HERMES, '<tool_call>{"name": "g"}</tool_call>', {"calls": [["g", "{}"]]}),
    "null as arguments": (HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>', {"calls": [["g", "{}"]]}),
    "members after the arguments": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "g", "arguments": {}, "id": "}"}] so',
        {"calls": [["g", "{}"]], "content": " so"},
    ),
    "a brace that is missing": (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}</tool_call> so',
        {"calls": [["g", "{}"]], "content": " so"},
    ),
    "a brace too many": (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}}}</tool_call>',
        {"calls": [["g", "{}"]], "content": "}</tool_call>"},
    ),
    "a call that is cut off": (
        HERMES,
        'so <tool_call>{"name": "g", "arguments": {"a": [1',
        {"calls": [["g", '{"a": [1']], "content": "so"},
    ),
    "a call behind one that is none": (
        HERMES,
        '<tool_call>{x}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        {"calls": [["g", "{}"]], "content": "<tool_call>{x}</tool_call>"},
    ),
    "a call in Llama's other form": (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', {"calls": [["f", "{}"]]}),
    "code": (LLAMA, "<|python_tag|>print({})", {"content": "<|python_tag|>print({})"}),
    "an answer in JSON": (LLAMA, '{"name": "Alice", "age": 5}\n', {"content": '{"name": "Alice", "age": 5}\n'}),
    "a tool of no name": (LLAMA, '{"name": 5, "parameters": {}}', {"content": '{"name": 5, "parameters": {}}'}),
    "Mistral's call with an id": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", {"calls": [["f", "{}"]]}),
    "a word and no arguments": (MISTRAL, "so [TOOL_CALLS]f[ARGS]1", {"content": "so [TOOL_CALLS]f[ARGS]1"}),
    "truth and nothing": (
        QWEN_CODER,
        "<tool_call><function=f><parameter=b>True</parameter>\n<parameter=o>null</parameter></function>",
        {"calls": [["f", '{"b": true, "o": null}']]},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_calls_that_are_written_otherwise_are_found(name: str) -> None:
    calls, text, wanted = FOUND[name]
    assert read(text, calls) == {"content": "", "reasoning": "", "calls": [], **wanted}


def test_text_waits_only_while_it_may_be_of_a_mark() -> None:
    reader = ReplyReader(ReplyMarks(thought=THOUGHT), HERMES, TOOLS)
    said = []
    for piece in [
        "<thi",
        "nk>\nso",
        "\n</th",
        "ink>\n\nI <to",
        "ok it.",
        "\n",
        '<tool_call>{"name": "f", "argum',
        'ents": {"a',
        '": 1}',
        "}",
    ]:
        said.append([each.text for each in reader.push(piece)])
    assert said == [[], ["so"], [], ["I"], [" <took it."], [], [], ["f", '{"a'], ['": 1}'], []]
    assert reader.push("", is_last=True) == [] and reader.num_calls == 1


def test_ids_are_as_templates_want_them() -> None:
    for calls, text, size in ((HERMES, '<tool_call>{"name": "f"}', 29), (MISTRAL, "[TOOL_CALLS]f{}", 9)):
        ids = {
            part.id
            for _ in range(3)
            for part in ReplyReader(ReplyMarks(), calls).push(text * 2, is_last=True)
            if part.kind == "call"
        }
        assert (
            len(ids) == 6
            and {len(each) for each in ids} == {size}
            and all(each.replace("call_", "").isalnum() for each in ids)
        )


def test_the_format_is_that_of_the_template() -> None:
    sources = [
        "{{ '<tool_call>' }}",
        "{{ '<tool_call>\n<function=' }}",
        "{{ '[TOOL_CALLS][ARGS]' }}",
        "{{ '\"parameters\": ' }}",
        "{{ tools }}",
    ]
    assert [call_format_of(each) for each in sources] == [HERMES, QWEN_CODER, MISTRAL, LLAMA, None]


SPELT = ["<eos>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "[ARGS]", "<think>", "</think>"]
HELD = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "e": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}},
}
ANSWER = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"], "additionalProperties": False}


class Words(SimpleNamespace):
    """Bytes, and the marks as tokens."""

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def vocabulary(is_special: bool) -> Any:
    tokens = [bytes([byte]) for byte in range(256)] + [each.encode() for each in SPELT]
    special = list(range(256, len(tokens))) if is_special else [256]
    words = Words(bos_token_id=None, eos_token_id=256, tokens=tokens, special_token_ids=special)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=[256])


def fits(source: str, text: str, ids: dict[str, int], is_special: bool) -> bool:
    if "@answer" in source:
        source = json.dumps({"grammars": [{"lark_grammar": source}, {"name": "answer", "json_schema": ANSWER}]})
    matcher = llguidance.LLMatcher(vocabulary(is_special), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    pieces = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    tokens = [token for each in pieces for token in ([ids[each]] if each in ids else each.encode())]
    return all(matcher.validate_tokens([token]) and matcher.consume_token(token) for token in tokens) and (
        matcher.is_accepting()
    )


def written(calls: CallFormat, given: list[tuple[str, str]]) -> str:
    first, middle, behind, following, last = calls.writes
    begin = "" if calls.is_bare else calls.marks[0]
    return begin + first + following.join(f"{name}{middle}{each}{behind}" for name, each in given) + last


@pytest.mark.parametrize(
    "marks", [ReplyMarks(), ReplyMarks(thought=THOUGHT), ReplyMarks(thought=THOUGHT, is_thinking=True)]
)
@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize("calls", {id(each): each for each in CALL_MARKS.values()}.values(), ids=lambda each: each.name)
def test_the_grammar_of_a_reply_takes_what_is_read_of_it(calls: CallFormat, kind: str, marks: ReplyMarks) -> None:
    ids = {} if kind == "text" else {each: 256 + number for number, each in enumerate(SPELT) if number}
    right, wrong, none = '{"a": 1, "s": "ü"}', '{"a": "1"}', "{}"
    if calls == QWEN_CODER:
        right = "<parameter=a>\n1\n</parameter>\n<parameter=s>\nü <b>\n</parameter>\n"
        wrong, none = "<parameter=a>\nx\n</parameter>\n", ""
    one, two, bad = (written(calls, each) for each in ([("f", right)], [("f", right), ("g", none)], [("f", wrong)]))
    assert [name for name, _ in read(two, calls)["calls"]] == ["f", "g"]
    thought = "\nhm { x\n</think>\n\n" if marks.is_thinking else ""
    for is_required, is_single, has_answer in itertools.product([False, True], repeat=3):
        rules = CallRules(calls=calls, schemas=HELD, is_required=is_required, is_single=is_single, options={})
        source = ReplyGrammar(ids).source(marks, rules, has_answer=has_answer)
        is_free = not is_required and not has_answer
        wanted = {one: True, two: not is_single, bad: False, "hello": is_free, "": is_free}
        wanted['{"z": 1}'] = not is_required and (has_answer or not calls.is_bare)
        if is_free and not calls.is_bare:
            wanted |= {"So.\n" + one: True, "So.\n" + bad: False}
        assert {text: fits(source, thought + text, ids, kind == "special") for text in wanted} == wanted
        if marks.thought and not marks.is_thinking:
            assert fits(source, "<think>hm</think>\n" + one, ids, kind == "special")
        if marks.is_thinking and not is_free:
            assert not fits(source, one, ids, kind == "special")
