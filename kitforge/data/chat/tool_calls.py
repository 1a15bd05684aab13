"""What a reply says, read while it is generated: content, thoughts, and calls of tools in the model's own format.

Knows neither HTTP nor tokens. Text is held back only while it may be of a mark, or of a call whose name is not known
yet. The arguments of a call are passed on as the model spells them: JSON is looked through, never mended. What looks
like a call and is none comes out as content, letter for letter.
"""

import json
import re
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kitforge.data.text.continuation import ReplyMarks, num_open

# A part of the reader: it yields where it needs more text, and returns whether it found what it looks for.
_Reading = Generator[None, None, bool]
_SPACE = " \t\r\n"
# What begins and what ends a thought.
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# The beginning of a call up to its arguments, as JSON and as Mistral's later models write it.
_JSON = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED = re.compile(r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
# A call of Qwen 3 Coder: its beginning, its end, and what stands between two values.
_FUNCTION = re.compile(r"<function=(?P<name>[^<>\s]+)>")
_FUNCTION_END = re.compile(r"(?:</parameter>|<function=[^<>\s]+>)\s*</function>")
_PARAMETER = re.compile(r"(?:\A|</parameter>)\s*<parameter=([^<>\n]+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models calls tools."""

    name: str
    marks: tuple[str, ...]  # before a call, after one, and further ones
    opening: re.Pattern[str]  # what stands before a call
    # What a model writes from the mark to the name, from there to the arguments, and behind these; from there to the
    # next name, and behind the last call.
    writes: tuple[str, str, str, str, str]
    is_bare: bool = False  # a reply that begins with a JSON object may be a call


# <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen 2.5 and 3.
HERMES = CallFormat(
    name="Hermes",
    marks=("<tool_call>", "</tool_call>"),
    opening=re.compile(r"\s*<tool_call>\s*"),
    writes=('\n{"name": "', '", "arguments": ', "}\n</tool_call>", '\n<tool_call>\n{"name": "', ""),
)
# <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, in which values are text whose
# types the tool's schema tells.
QWEN_CODER = replace(
    HERMES,
    name="Qwen 3 Coder",
    writes=("\n<function=", ">\n", "</function>\n</tool_call>", "\n<tool_call>\n<function=", ""),
)
# Llama 3: a reply that is {"name": ..., "parameters": {...}}, or some of these with ";" between.
LLAMA = CallFormat(
    name="Llama 3",
    marks=("<|python_tag|>", ""),
    opening=re.compile(r"\s*(?:<\|python_tag\|>)?\s*;?\s*"),
    writes=('{"name": "', '", "parameters": ', "}", '; {"name": "', ""),
    is_bare=True,
)
# [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], later [TOOL_CALLS]name[ARGS]{...}. Both are read.
MISTRAL = CallFormat(
    name="Mistral",
    marks=("[TOOL_CALLS]", "]", "[ARGS]", "[CALL_ID]"),
    opening=re.compile(r"\s*(?:\[TOOL_CALLS\]\s*\[?|,)?\s*"),
    writes=("", "[ARGS]", "", "[TOOL_CALLS]", ""),
)
# The mark by which the format of calls is found in a chat template, the first that is there.
CALL_MARKS = {
    "<function=": QWEN_CODER,
    "<tool_call>": HERMES,
    "[ARGS]": MISTRAL,
    "[TOOL_CALLS]": replace(MISTRAL, writes=('[{"name": "', '", "arguments": ', "}", ', {"name": "', "]")),
    "<|python_tag|>": LLAMA,
    '"parameters": ': LLAMA,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """A part of a reply: text of its content or of a thought, the name of a call, or text of the call's arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0  # the index of the call among those of the reply
    id: str = ""  # of a call
    problem: str | None = None  # of content that looks like a call: why it is none


class ReplyReader:
    """Reads one reply, cut anywhere."""

    def __init__(
        self, marks: ReplyMarks, calls: CallFormat | None = None, tools: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`tools` are the JSON schemas of the arguments of each tool."""
        self.num_calls = 0  # that are whole
        self._text = ""  # not read yet
        self._is_last = False
        self._tools = tools or {}
        self._num_begun = 0
        self._is_behind_call = False
        self._parts: list[ReplyPart] = []
        self._steps = self._read(marks, calls)

    def push(self, text: str, *, is_last: bool = False) -> list[ReplyPart]:
        """The parts that this text completes; with `is_last` all that was held back."""
        self._text += text
        self._is_last = is_last
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self, marks: ReplyMarks, calls: CallFormat | None) -> _Reading:
        if marks.thought is not None and (marks.is_thinking or (yield from self._skip(marks.thought[0]))):
            # Line breaks around a thought and behind it only lay it out.
            yield from self._behind(re.compile(r"\n*"), reads=True)
            if (yield from self._pass("reasoning", marks.thought[1], "\n")):
                yield from self._behind(re.compile(rf"\n*{re.escape(marks.thought[1])}\n*"), reads=True)
        if calls is None:
            return (yield from self._pass("content", ""))
        may_be_bare = calls.is_bare
        while True:
            start = (yield from self._behind(calls.opening)) if may_be_bare else 0
            is_next = may_be_bare and self._text.startswith("{", start)
            if not is_next and not (yield from self._pass("content", calls.marks[0], _SPACE)):
                return True
            may_be_bare = yield from self._call(calls)

    def _pass(self, kind: Literal["content", "reasoning"], mark: str, space: str = "") -> _Reading:
        """Pass text on up to a mark, which stays as does white space before it, or to the end."""
        while True:
            found = self._text.find(mark) if mark else -1
            size = found if found >= 0 else len(self._text) - num_open(self._text, [mark])
            said = self._text[:size].rstrip(space)
            if found < 0 and self._is_last:
                # White space behind the last call only lays it out.
                said = "" if self._is_behind_call and not self._text.strip(_SPACE) else self._text
            self._emit(kind, said)
            self._text = self._text[len(said) :]
            if found >= 0 or self._is_last:
                return found >= 0
            yield

    def _behind(self, opening: re.Pattern[str], *, reads: bool = False) -> Generator[None, None, int]:
        """Where the text behind an opening begins, once there is some; the end where there is none."""
        while (found := opening.match(self._text)) and found.end() == len(self._text) and not self._is_last:
            yield
        size = len(self._text) if found is None else found.end()
        self._text = self._text[size:] if reads else self._text
        return size

    def _skip(self, mark: str) -> _Reading:
        """Read a mark and white space before it; nothing where something else follows."""
        while not (said := self._text.lstrip(_SPACE)).startswith(mark):
            if self._is_last or not mark.startswith(said):
                return False
            yield
        self._text = said.removeprefix(mark)
        return True

    def _call(self, calls: CallFormat) -> _Reading:
        """Read a call; what opens one and is none is content."""
        start = stop = yield from self._behind(calls.opening)
        if calls == QWEN_CODER:
            while (end := _FUNCTION_END.search(self._text, start)) is None and not self._is_last:
                yield
            return self._function(start, end) and ((yield from self._skip(calls.marks[1])) or True)
        header = _NAMED if calls.name == MISTRAL.name and not self._text.startswith("{", start) else _JSON
        scanner = JsonScanner()
        while (found := header.match(self._text, start)) is None:
            size = scanner.feed(self._text[stop:]) if header is _JSON else None
            stop = len(self._text) if size is None else stop + size
            if size is not None or self._is_last or (header is _JSON and not self._text.startswith("{", start)):
                return self._whole(start, stop, calls) and ((yield from self._skip(calls.marks[1])) or True)
            yield
        self._begin(found["name"], found.end(), calls)
        yield from self._object("arguments")
        if header is _JSON and not (yield from self._skip("}")) and self._text.lstrip(_SPACE).startswith(","):
            # Other members of the call.
            yield from self._object(None, depth=1)
        yield from self._skip(calls.marks[1])
        return True

    def _object(self, kind: Literal["arguments"] | None, depth: int = 0) -> _Reading:
        """Read on to the end of a JSON object, and pass it on as it is spelt."""
        scanner = JsonScanner(depth)
        while True:
            size = scanner.feed(self._text)
            if kind is not None:
                self._emit(kind, self._text[:size])
            self._text = "" if size is None else self._text[size:]
            if size is not None or self._is_last:
                self.num_calls += kind is not None and size is not None
                return True
            yield

    def _whole(self, start: int, stop: int, calls: CallFormat) -> bool:
        """Read a call that is a JSON object of members in any order."""
        body, problem, call = self._text[start:stop], None, dict[str, Any]()
        has_arguments = re.search('"(?:arguments|parameters)"', body) is not None
        try:
            call = json.loads(body) if body.startswith("{") else call
        except (ValueError, RecursionError) as error:
            problem = f"the call is not JSON: {error}"
        key = next((each for each in ("arguments", "parameters") if call.get(each) is not None), "")
        if problem is None and not (isinstance(call.get("name"), str) and isinstance(call.get(key, {}), dict)):
            problem = 'the call is not of the form {"name": ..., "arguments": {...}}'
        if problem is None and (has_arguments or not calls.is_bare or call["name"] in self._tools):
            self._begin(call["name"], stop, calls)
            self._emit("arguments", _member(body, key) if key else "{}")
            self.num_calls += 1
            return True
        # A JSON object without arguments is an answer.
        return self._refuse(start, problem if has_arguments or not calls.is_bare else None)

    def _function(self, start: int, end: re.Match[str] | None) -> bool:
        """Read a call of Qwen 3 Coder."""
        head = _FUNCTION.match(self._text, start)
        before, *found = _PARAMETER.split(self._text[head.end() : end.start()]) if head and end else ["?"]
        if head is None or end is None or before.strip():
            return self._refuse(start, "the call is not of the form <function=...>...</function>")
        known = _properties(self._tools.get(head["name"], {}))
        values = {
            key: _typed(value.removeprefix("\n").removesuffix("\n"), known.get(key, {}))
            for key, value in zip(found[::2], found[1::2], strict=True)
        }
        self._begin(head["name"], end.end(), QWEN_CODER)
        self._emit("arguments", json.dumps(values, ensure_ascii=False))
        self.num_calls += 1
        return True

    def _begin(self, name: str, size: int, calls: CallFormat) -> None:
        """A call begins, whose arguments follow `size` characters later."""
        self._text = self._text[size:]
        # The chat templates of Mistral want nine letters or digits.
        call_id = secrets.token_hex(5)[:9] if calls.name == MISTRAL.name else f"call_{secrets.token_hex(12)}"
        self._parts.append(ReplyPart(kind="call", text=name, call=self._num_begun, id=call_id))
        self._num_begun += 1

    def _refuse(self, size: int, problem: str | None) -> bool:
        """There is no call: its first characters, at least one, are content, and the rest is read again."""
        self._emit("content", self._text[: size or 1], problem)
        self._text = self._text[size or 1 :]
        return False

    def _emit(self, kind: Literal["content", "reasoning", "arguments"], text: str, problem: str | None = None) -> None:
        if text:
            self._parts.append(ReplyPart(kind=kind, text=text, call=max(self._num_begun - 1, 0), problem=problem))
            self._is_behind_call = kind == "arguments"


def parsed_reply(
    message: Mapping[str, Any], thought: tuple[str, str] | None, calls: CallFormat | None
) -> dict[str, Any]:
    """A reply with its thought as `reasoning_content` and its calls as `tool_calls`; without those that it lacks."""
    text = message["content"]
    is_thinking = thought is not None and thought[1] in text and thought[0] not in text
    texts, found = {"content": "", "reasoning": ""}, list[dict[str, Any]]()
    marks = ReplyMarks(thought=thought, is_thinking=is_thinking)
    for part in ReplyReader(marks, calls).push(text, is_last=True):
        if part.kind == "call":
            found.append({"type": "function", "function": {"name": part.text, "arguments": ""}})
        elif part.kind == "arguments":
            found[-1]["function"]["arguments"] += part.text
        else:
            texts[part.kind] += part.text
    further = {"reasoning_content": texts["reasoning"], "tool_calls": found}
    return {**message, "content": texts["content"], **{name: each for name, each in further.items() if each}}


class JsonScanner:
    """Finds where the JSON object or list ends that begins with the first text, or is open `depth` levels already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """How much of the text belongs to it; None: all, and it goes on."""
        for index, sign in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or sign != '"'
                self._is_escaped = sign == "\\" and not self._is_escaped
            elif sign in "[{":
                self._depth += 1
            elif sign in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
            else:
                self._in_string = sign == '"'
        return None


def _member(body: str, key: str) -> str:
    """The last value under that key of a JSON object, as it is spelt."""
    decode, value, at = json.JSONDecoder().raw_decode, "", 1
    while rest := body[at:-1].lstrip(_SPACE + ","):
        name, size = decode(rest)
        said = rest[size:].lstrip(_SPACE + ":")
        at = len(body) - 1 - len(said) + (size := decode(said)[1])
        value = said[:size] if name == key else value
    return value


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references of a schema name, which a schema that is taken out of it or put into another needs."""
    return {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)}


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemas of the arguments, each for itself; instead of a reference what that names."""
    kept = _definitions(schema)
    named = {f"#/{origin}/{name}": each for origin, known in kept.items() for name, each in known.items()}
    found = {}
    for key, each in schema["properties"].items() if isinstance(schema.get("properties"), dict) else ():
        own = named.get(str(each.get("$ref")), each) if isinstance(each, dict) else None
        found[key] = {**own, **kept} if isinstance(own, dict) else {}
    return found


def _typed(said: str, schema: Mapping[str, Any]) -> Any:
    """The value that a text stands for: itself where the schema takes text or says nothing, else JSON."""
    several, kinds = schema.get("anyOf"), list[Any]()
    for each in (schema, *(several if isinstance(several, list) else ())):
        kind = each.get("type") if isinstance(each, dict) else None
        kinds += kind if isinstance(kind, list) else [] if kind is None else [kind]
    if not kinds or ("string" in kinds and not (said == "null" and "null" in kinds)):
        return said
    try:
        return json.loads(said.lower() if "boolean" in kinds else said)
    except (ValueError, RecursionError):
        return said


def call_format_of(source: str) -> CallFormat | None:
    """The format that a chat template teaches; None where it has none of these."""
    return next((calls for mark, calls in CALL_MARKS.items() if mark in source), None)


def thought_of(source: str) -> tuple[str, str] | None:
    """What begins and what ends a thought in a chat template."""
    return next((each for each in _THOUGHTS if each[1] in source), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The calls that a reply may have, or must."""

    calls: CallFormat
    schemas: Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the tool
    is_required: bool
    is_single: bool
    options: Mapping[str, Any]  # of llguidance for JSON


class ReplyGrammar:
    """Writes the grammar of a reply in llguidance's dialect of Lark. Marks that are tokens, `ids` by their spelling,
    are these tokens and no other text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._rules: list[str] = []

    def source(self, marks: ReplyMarks, rules: CallRules | None, *, has_answer: bool) -> str:
        """The grammar, in which `@answer` stands for another one of the content; without that, content is any."""
        body = "@answer" if rules is None else self._body(rules, has_answer=has_answer)
        if marks.thought is not None:
            begin, end = marks.thought
            self._until("thought", end)
            thought = "thought /\\n{0,2}/"
            body = f"{thought if marks.is_thinking else f'({self._text(begin)} {thought})?'} ({body})"
        return "\n".join([f"start: {body}", *self._rules])

    def _body(self, rules: CallRules, *, has_answer: bool) -> str:
        first, middle, behind, following, last = rules.calls.writes
        is_bare = rules.calls.is_bare
        for number, (name, schema) in enumerate(rules.schemas.items()):
            head, tail = self._text(name + middle), self._text(behind)
            if is_bare:
                # Cut into the lexemes of JSON, which may be an answer's.
                first, following, head, tail = "", "; ", "", ""
                members = {"name": {"const": name}, "parameters": {"type": "object", **schema}}
                kept = _definitions(schema)
                schema = {"properties": members, "required": list(members), "additionalProperties": False, **kept}
            self._rules.append(f"call{number}: {head} arguments{number} {tail}")
            if rules.calls == QWEN_CODER:
                self._parameters(number, schema, rules.options)
            else:
                self._rules.append(f"arguments{number}: {_json(schema, rules.options)}")
        call = f"({' | '.join(f'call{number}' for number in range(len(rules.schemas)))})"
        more = "" if rules.is_single else f"({self._text(following)} {call})*"
        calls = f"{self._text(first)} {call} {more} {self._text(last)}"
        begin = "" if is_bare else rules.calls.marks[0]
        if rules.is_required or has_answer:
            return f"{self._text(begin)} {calls}" + ("" if rules.is_required else " | @answer")
        if is_bare:
            return rf"/([^{{\s](.|\n)*)?/ | {calls}"
        self._until("opening", begin)
        self._rules.append(f"CONTENT: {_without(begin)}")
        return f"CONTENT | opening {calls}"

    def _parameters(self, number: int, schema: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """The arguments of Qwen 3 Coder, in the order of the schema."""
        required, written = schema.get("required"), []
        required = required if isinstance(required, list) else []
        for index, (key, each) in enumerate(_properties(schema).items()):
            name, end = f"value{number}x{index}", "\n</parameter>\n"
            if isinstance(each.get("enum"), list):
                said = (one if isinstance(one, str) else json.dumps(one) for one in each["enum"])
                self._rules.append(f"{name}: ({' | '.join(map(_quoted, said))}) {_quoted(end)}")
            elif each.get("type") in ("integer", "number", "boolean", "array", "object"):
                self._rules.append(f"{name}: {name}json {_quoted(end)}\n{name}json: {_json(each, options)}")
            else:
                self._rules.append(rf"{name}[suffix={_quoted(end)}]: /(.|\n)*/")
            value = f"{_quoted(f'<parameter={key}>' + chr(10))} {name}"
            written.append(value if key in required else f"({value})?")
        self._rules.append(f"arguments{number}: {' '.join(written) or _quoted('')}")

    def _until(self, name: str, mark: str) -> None:
        """A rule of any text up to a mark, and that."""
        if mark in self._ids:
            self._rules += [f"{name}: {name.upper()} {self._text(mark)}", f"{name.upper()}: {_without(mark)}"]
        else:
            self._rules.append(rf"{name}[suffix={_quoted(mark)}]: /(.|\n)*/")

    def _text(self, text: str) -> str:
        marks = "|".join(map(re.escape, self._ids))
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(f"<[{self._ids[each]}]>" if each in self._ids else _quoted(each) for each in parts if each)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(mark: str) -> str:
    return r"/(.|\n)*/ & ~/(.|\n)*MARK(.|\n)*/".replace("MARK", re.escape(mark).replace("/", r"\/"))


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'type': 'object', **schema, 'x-guidance': options})}"
