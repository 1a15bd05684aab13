"""Renders chat templates, which come from strangers: Jinja as Hugging Face sets it up, within a budget of work.

Knows no tokens. The sandbox of Jinja keeps a template from reaching Python; it does not keep it from running for ever.
So every loop, call and operator of a template is metered: what it costs is known before it runs, and is charged to
the budget of the conversation.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from math import prod
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kitforge.foundation.errors import DataError

# A step is about a microsecond of work: one turn of a short loop, one value, or this many characters.
_CHARS = 32
# The work budget of any conversation, and the extra budget per step of its own size.
_STEPS = 150_000
_STEPS_PER_SIZE = 100
_MAX_SOURCE = 100_000
# Jinja compiles these in the square of their number.
_MAX_BRANCHES = 1_000
_MAX_INTEGER_BITS = 4096
# The fixed cost of a call, besides that of its arguments.
_CALL = 10
# A format field with a width of 10,000 or more, or with a width taken from a value.
_WIDE = re.compile(r"%[^%a-zA-Z]*?(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)")
# Filters, tests and methods whose cost does not depend on the size of their arguments ...
_SHALLOW = frozenset(
    ("length", "count", "first", "last", "default", "d", "items", "keys", "values", "get", "startswith")
    + ("endswith", "defined", "undefined", "none", "mapping", "iterable", "sequence", "true", "false")
)
# ... and those whose result may be as long as the product of their arguments.
_GROWING = frozenset(
    ("join", "ljust", "rjust", "center", "zfill", "expandtabs", "translate", "indent", "tojson")
    + ("wordwrap", "truncate", "batch", "slice", "round", "sum", "urlize", "generate_lorem_ipsum", "xmlattr")
)
# What templates can loop over.
_SIZED = (dict, list, tuple, set, frozenset, range, KeysView, ValuesView, ItemsView)
# Where Jinja offers no hook: the parts of expressions that go through a meter, and whose bodies are counted.
_METERED: dict[type[nodes.Node], tuple[str, str]] = {
    nodes.For: ("iter", "<count>"),
    nodes.Compare: ("expr", "<weigh>"),
    nodes.Operand: ("expr", "<weigh>"),
    nodes.Pair: ("value", "<weigh>"),
    nodes.Concat: ("nodes", "<weigh>"),
    nodes.List: ("items", "<weigh>"),
    nodes.Tuple: ("items", "<weigh>"),
    nodes.Getitem: ("node", "<count>"),
}
_Function = Callable[..., Any]
_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)

_marks: ContextVar[tuple[str, str] | None] = ContextVar("marks", default=None)
_budget: ContextVar[WorkBudget] = ContextVar("budget")


class WorkBudget:
    """The remaining render budget of a conversation, over all of its renders."""

    def __init__(self, inputs: object = None, *, num_renders: int = 1) -> None:
        self.left = num_renders * (_STEPS + _STEPS_PER_SIZE * sum(map(_shallow, _parts(inputs))))

    def charge(self, steps: int) -> None:
        """Take so many steps. Raises DataError where they are not there."""
        self.left -= steps
        if self.left < 0:
            raise DataError(
                "the chat template does more work than a conversation can need",
                got="a loop, a text or a number that grows too large",
                fix="use the template of the model's own makers",
            )


class SandboxedTemplate:
    """A compiled template. Raises DataError where the source is not a template."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE:
            raise DataError("the chat template is too long", got=len(source), expected=f"<= {_MAX_SOURCE} characters")
        environment = _Environment()
        token = _budget.set(WorkBudget())
        try:
            tree = environment.parse(source)
            if sum(1 for _ in tree.find_all(nodes.If)) > _MAX_BRANCHES:
                raise DataError("it has too many branches", expected=f"<= {_MAX_BRANCHES}")
            # All literals of the template, and those that it may search its inputs for.
            self.constants = frozenset(_spelt(tree))
            looking = tree.find_all((nodes.Call, nodes.Compare, nodes.Filter, nodes.Test))
            self.looked_for = frozenset(text for node in looking for text in _spelt_directly(node))
            tags = tree.find_all(nodes.ExtensionAttribute)
            self.marks_replies = any(each.identifier == _Generation.identifier for each in tags)
            _meter(tree, environment)
            self._template = environment.from_string(tree)
        except Exception as error:  # noqa: BLE001 (a template is data, and may fail in any way)
            raise DataError("the tokenizer's chat template cannot be read", got=_short(error)) from None
        finally:
            _budget.reset(token)

    def render(self, variables: Mapping[str, Any], budget: WorkBudget, marks: tuple[str, str] | None = None) -> str:
        """The text; `marks` enclose what stands in `{% generation %}`. Raises DataError for a template that refuses
        the conversation, fails, or does too much."""
        tokens = _budget.set(budget), _marks.set(marks)
        try:
            budget.charge(1)
            return self._template.render(variables)
        except Exception as error:  # noqa: BLE001 (a template is data, and may fail in any way)
            raise DataError("the chat template cannot write this conversation", got=_short(error)) from None
        finally:
            _budget.reset(tokens[0])
            _marks.reset(tokens[1])


@functools.lru_cache(maxsize=16)
def sandboxed(source: str) -> SandboxedTemplate:
    """The template of a source, compiled once."""
    return SandboxedTemplate(source)


class _Generation(Extension):
    """The `{% generation %}` block, which marks the tokens to train on."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("enclosed"), [], [], body).set_lineno(line)

    def enclosed(self, caller: Callable[[], str]) -> str:
        marks = _marks.get()
        return caller() if marks is None else marks[0] + caller() + marks[1]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja with the filters, globals and tags of Hugging Face, metered."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=_weighed
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, each) for name, each in self.filters.items()}
        self.filters |= {"<tick>": _tick, "<weigh>": _weigh, "<count>": _count}
        self.tests = {name: _metered(name, cast(_Function, each)) for name, each in self.tests.items()}
        # A namespace of namespaces would be written in the power of their depth.
        unwritten = {"__repr__": lambda _: _refuse("a namespace has no text")}
        namespace = type("namespace", (cast(type, self.globals["namespace"]),), unwritten)
        self.globals["namespace"] = lambda *args, **kwargs: namespace(_checked(dict(*args, **kwargs)))
        self.globals["raise_exception"] = _refuse

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
        owners = (owner,) if isinstance(owner, (str, list, tuple, dict)) else ()
        _charge_call(getattr(callee, "__name__", ""), (*owners, *args), kwargs)
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _meter(tree: nodes.Template, environment: _Environment) -> None:
    """Put meters into the syntax tree where Jinja offers no hook."""

    def through(name: str, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=environment)

    _checked([each.attr for each in tree.find_all(nodes.NSRef)])
    bodies = [(each, _size(each)) for each in tree.find_all(_BODIES)]
    for node in list(tree.find_all(tuple(_METERED))):
        field, meter = _METERED[type(node)]
        part = getattr(node, field)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            continue
        if not isinstance(node, nodes.Getitem) or isinstance(node.arg, nodes.Slice):
            parts = [through(meter, each) for each in part] if isinstance(part, list) else through(meter, part)
            setattr(node, field, parts)
    for body, size in bodies:
        tick = through("<tick>", nodes.TemplateData(str(size), lineno=body.lineno))
        cast(Any, body).body.insert(0, nodes.ExprStmt(tick, lineno=body.lineno))


def _size(body: nodes.Node) -> int:
    calls = 0 if isinstance(body, nodes.For) else 2 * _CALL
    return 1 + calls + sum(1 for _ in body.find_all(nodes.Node)) // 16 + sum(map(len, _spelt(body))) // _CHARS


# A filter that is passed the context is never worked out when the template is compiled.
@pass_context
def _tick(_: object, size: str) -> None:
    _budget.get().charge(int(size))


@pass_context
def _weigh(_: object, value: Any) -> Any:
    return _weighed(value)


@pass_context
def _count(_: object, value: Any) -> Any:
    _budget.get().charge(1 + (len(value) if isinstance(value, (str, *_SIZED)) else 0))
    return value


def _weighed(value: Any) -> Any:
    """The value, whose size was charged down to its last element."""
    budget, steps = _budget.get(), 0
    for part in _parts(value):
        steps += _shallow(part)
        if steps > budget.left:
            break
    budget.charge(steps)
    return value


def _parts(value: Any) -> Iterator[Any]:
    """A value and everything in it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset)):
            left += part


def _shallow(value: Any) -> int:
    if isinstance(value, str):
        return 1 + len(value) // _CHARS
    if isinstance(value, int):
        return 1 + value.bit_length() // _CHARS
    return 1 + (len(value) if isinstance(value, _SIZED) else 0)


def _metered(name: str, function: _Function) -> _Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _charge_call(name, args, kwargs)
        return function(*args, **kwargs)

    return run


def _charge_call(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charge a call before it runs, for its inputs and for its possible output."""
    given = (*args, *named.values())
    _budget.get().charge(_CALL)
    if name not in _SHALLOW:
        _weighed(given)
    if name in ("format", "format_map"):
        _charge_format(given)
    texts = [value for value in given if isinstance(value, str)]
    if name == "replace" and len(texts) > 2:
        _budget.get().charge(texts[0].count(texts[1]) * len(texts[2]) // _CHARS)
    if name in _GROWING:
        _budget.get().charge(prod(1 + _extent(value) for value in given) // _CHARS)


def _charge_format(given: tuple[Any, ...]) -> None:
    if given and isinstance(given[0], str):
        if _WIDE.search(given[0]):
            raise SecurityError("a format makes a field too wide")
        fields = given[0].count("%") + given[0].count("{")
        _budget.get().charge(fields * (10_000 + sum(map(_extent, given[1:]))) // _CHARS)


def _extent(value: Any) -> int:
    """How much a value can make of a text: its characters, its number, or that of all its elements."""
    if isinstance(value, (str, range)):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    return sum(len(part) if isinstance(part, str) else 1 for part in _parts(value))


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise SecurityError("a number grows too large")
    elif operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and isinstance(value, (str, *_SIZED)):
            _budget.get().charge(max(times, 0) * len(value) // (_CHARS if isinstance(value, str) else 1))
    elif operator == "%":
        _weighed(right)
        _charge_format((left, *right) if isinstance(right, tuple) else (left, right))
    _budget.get().charge(_shallow(left) + _shallow(right))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    # Deeper elements have longer indentation.
    return "".join(_weighed(part) for part in encoder.iterencode(value))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _checked(names: Any) -> Any:
    """The names of a namespace, none of which means anything to Python."""
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with an underscore: {name[:40]!r}")
    return names


def _spelt(tree: nodes.Node) -> Iterator[str]:
    yield from (each.data for each in tree.find_all(nodes.TemplateData))
    yield from (each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str))


def _spelt_directly(node: nodes.Node) -> Iterator[str]:
    children = (child.expr if isinstance(child, nodes.Operand) else child for child in node.iter_child_nodes())
    for child in children:
        items = child.items if isinstance(child, (nodes.List, nodes.Tuple)) else [child]
        yield from (item.value for item in items if isinstance(item, nodes.Const) and isinstance(item.value, str))


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
