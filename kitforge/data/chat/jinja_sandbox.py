"""Renders chat templates, which come from strangers: Jinja as Hugging Face sets it up, within a budget of work.

Knows no tokens. The sandbox of Jinja keeps a template from reaching Python; it does not keep it from running for ever.
So every loop, call and operator of a template is metered: what it costs is known before it runs, and is charged to
the budget of the conversation.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import generate
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

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
_MAX_INDENT = 64
# The fixed cost of a call, besides that of its arguments.
_CALL = 10
# A format field with a width of 10,000 or more, or with a width taken from a value.
_WIDE = re.compile(r"%[^%a-zA-Z]*?(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)")
# Filters, tests and methods whose cost does not depend on the size of their arguments ...
_SHALLOW = frozenset(
    ("length", "count", "first", "last", "default", "d", "items", "keys", "values", "get", "startswith")
    + ("endswith", "defined", "undefined", "none", "mapping", "iterable", "sequence", "true", "false")
)
# ... those that go through a text letter by letter in Python ...
_SLOW = frozenset(
    ("wordcount", "wordwrap", "urlize", "title", "xmlattr", "pprint", "split", "rsplit", "splitlines", "list", "sort")
)
# ... and those whose result may be as long as the product of their arguments.
_GROWING = frozenset(
    ("join", "ljust", "rjust", "center", "zfill", "expandtabs", "translate", "indent", "wordwrap", "truncate", "batch")
    + ("slice", "round", "sum", "urlize", "generate_lorem_ipsum", "xmlattr")
)
_Function = Callable[..., Any]
# What templates can loop over.
_SIZED = (dict, list, tuple, set, frozenset, range, KeysView, ValuesView, ItemsView)

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
            self._template = environment.from_string(source)
        except Exception as error:  # noqa: BLE001 (a template is data, and may fail in any way)
            raise DataError("the tokenizer's chat template cannot be read", got=_short(error)) from None
        finally:
            _budget.reset(token)
        # All literals of the template, and those that it may search its inputs for.
        self.constants = frozenset(_spelt(tree))
        looking = tree.find_all((nodes.Call, nodes.Compare, nodes.Filter, nodes.Test))
        self.looked_for = frozenset(text for node in looking for text in _spelt_directly(node))
        callees = [block.call.node for block in tree.find_all(nodes.CallBlock)]
        self.marks_replies = any(
            isinstance(callee, nodes.ExtensionAttribute) and callee.identifier == _Generation.identifier
            for callee in callees
        )

    def render(self, variables: Mapping[str, Any], budget: WorkBudget, marks: tuple[str, str] | None = None) -> str:
        """The text; `marks` enclose what stands in `{% generation %}`. Raises DataError for a template that refuses
        the conversation, fails, or does too much."""
        tokens = _budget.set(budget), _marks.set(marks)
        try:
            budget.charge(1)
            return "".join(self._template.generate(variables))
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

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("enclosed"), [], [], body).set_lineno(line)

    def enclosed(self, caller: Callable[[], str]) -> str:
        marks = _marks.get()
        return caller() if marks is None else marks[0] + caller() + marks[1]


class _PlainNamespace(Namespace):
    """`namespace(...)`, in which no name means anything to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *attributes = args
        names = dict(*attributes, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


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
        self.globals |= {
            "raise_exception": _refuse,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _PlainNamespace,
        }

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
        owners = (owner,) if isinstance(owner, (str, list, tuple, dict)) else ()
        _charge_call(getattr(callee, "__name__", ""), (*owners, *args), kwargs)
        return super().call(context, callee, *map(_counted, args), **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _StepCounter(self).visit(source)
        return str(generate(source, self, name, filename, defer_init=defer_init, optimized=self.optimized))


class _StepCounter(NodeTransformer):
    """Puts meters into the syntax tree where Jinja offers no hook: loops, comparisons, slices, `~` and literals."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def visit(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            self._tick(node)
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = self._through("<count>", cast(nodes.Expr, node.iter))
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = self._through("<count>", node.node)
        elif isinstance(node, nodes.Compare):
            node.expr = self._through("<weigh>", node.expr)
        elif isinstance(node, (nodes.Operand, nodes.Pair)):
            name = "expr" if isinstance(node, nodes.Operand) else "value"
            setattr(node, name, self._through("<weigh>", getattr(node, name)))
        elif isinstance(node, nodes.Concat):
            node.nodes = [self._through("<weigh>", item) for item in node.nodes]
        elif isinstance(node, (nodes.List, nodes.Tuple)) and getattr(node, "ctx", "load") == "load":
            node.items = [self._through("<weigh>", item) for item in node.items]
        return node

    def _tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> None:
        """Charge each run of a loop body for the nodes in it."""
        calls = 0 if isinstance(node, nodes.For) else 2 * _CALL
        spelt = sum(map(len, _spelt(node)))
        size = calls + sum(1 for _ in node.find_all(nodes.Node)) // 16 + spelt // _CHARS
        tick = self._through("<tick>", nodes.TemplateData(str(size)))
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))

    def _through(self, filter_name: str, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        through = nodes.Filter(node, filter_name, [], [], None, None)
        through.set_lineno(node.lineno)
        through.set_environment(self._environment)
        return through


# A filter that is passed the context is never worked out when the template is compiled.
@pass_context
def _tick(_: Context, size: str) -> None:
    _charge(int(size))


@pass_context
def _weigh(_: Context, value: Any) -> Any:
    return _weighed(value)


@pass_context
def _count(_: Context, value: Any) -> Any:
    _charge(len(value) if isinstance(value, (str, *_SIZED)) else 0)
    return _counted(value)


def _charge(steps: int) -> None:
    _budget.get().charge(1 + steps)


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


def _counted(value: Any) -> Any:
    """Charge generators for the values they yield; other values were charged already."""
    return (_after(1, each) for each in value) if isinstance(value, types.GeneratorType) else value


def _after(steps: int, value: Any) -> Any:
    _charge(steps)
    return value


def _metered(name: str, function: _Function) -> _Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _charge_call(name, args, kwargs)
        return function(*map(_counted, args), **kwargs)

    return run


def _charge_call(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charge a call before it runs, for its inputs and for its possible output."""
    _charge(_CALL)
    given = (*args, *named.values())
    for value in given:
        if name not in _SHALLOW:
            _weighed(value)
    if name == "replace":
        texts = [str(value) for value in given if isinstance(value, str)]
        if len(texts) > 2:
            _charge(texts[0].count(texts[1]) * len(texts[2]) // _CHARS)
    elif name in ("format", "format_map"):
        _charge_format(given)
    elif name in _SLOW:
        _charge(sum(map(_extent, given)) // 4)
    if name in _GROWING:
        _charge(functools.reduce(lambda product, value: product * (1 + _extent(value)), given, 1) // _CHARS)


def _charge_format(given: tuple[Any, ...]) -> None:
    if given and isinstance(given[0], str):
        if _WIDE.search(given[0]):
            raise SecurityError("a format makes a field too wide")
        fields = given[0].count("%") + given[0].count("{")
        _charge(fields * (10_000 + sum(map(_extent, given[1:]))) // _CHARS)


def _extent(value: Any) -> int:
    """How much a value can make of a text: its characters, its number, or that of all its elements."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, range):
        return len(value)
    return sum(len(part) if isinstance(part, str) else 1 for part in _parts(value))


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise SecurityError("a number grows too large")
    if operator == "*":
        times = left if isinstance(left, int) else right if isinstance(right, int) else 0
        sizes = [len(each) for each in (left, right) if isinstance(each, (str, *_SIZED))]
        _charge(max(times, 0) * sum(sizes) // (_CHARS if isinstance(left, str) or isinstance(right, str) else 1))
    elif operator == "%":
        _weighed(right)
        _charge_format((left, *right) if isinstance(right, tuple) else (left, right))
    else:
        _charge(_shallow(left) + _shallow(right))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if _extent("" if indent is None else indent) > _MAX_INDENT:
        raise SecurityError("JSON is indented too deep")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    # Deeper elements have longer indentation.
    return "".join(_after(len(part) // _CHARS, part) for part in encoder.iterencode(value))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names that begin with an underscore: {name[:40]!r}")


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
