"""Where a fault lies in the source and what it changes there. Knows no test.

A fault is anchored in the syntax tree: by the shape of the function that holds it (its tree without names, texts and
annotations) and the number of the node in that function. A renamed variable, function, class or file therefore carries
its faults along; a function that computes something else loses them, and `locate` says so.
"""

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

PACKAGE = Path(__file__).parents[2] / "kitforge"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
# Calls that only refuse or report: dropping one is another kind of fault.
_MESSAGES = {"check", "check_counts", "check_least", "check_choice", "warning", "info", "debug"}
# What a shape leaves out: names and texts may change while the arithmetic stays.
_UNNAMED = {"id", "arg", "attr", "name", "annotation", "returns", "decorator_list", "type_comment", "kind", "ctx"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of one node. `operator` is a name in `OPERATORS`, with its argument behind a colon."""

    id: str
    file: str  # below the package; where it was when the fault was written
    function: str  # its dotted name then
    shape: str
    node: int  # in the order of `nodes`
    operator: str
    why: str = ""  # of a fault written by hand: what it is called
    equivalent: str = ""  # why no test can find it, where that is so
    # Files or tests that find it, slow ones too; none: the fast tests of its room are to.
    tests: list[str] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A function of the package as it is now."""

    path: Path
    function: str
    node: Definition


def functions(path: Path) -> Iterator[Place]:
    """The functions and methods of a file; those inside another belong to it."""

    def below(body: list[ast.stmt], prefix: str) -> Iterator[Place]:
        for each in body:
            if isinstance(each, Definition):
                yield Place(path, prefix + each.name, each)
            elif isinstance(each, ast.ClassDef):
                yield from below(each.body, f"{prefix}{each.name}.")

    yield from below(ast.parse(path.read_text(encoding="utf-8")).body, "")


def shape(definition: Definition) -> str:
    """The digest of a function's tree without names, texts and annotations."""
    return hashlib.sha256(repr(_shape(definition)).encode()).hexdigest()[:16]


def nodes(definition: Definition) -> list[ast.AST]:
    """The statements and expressions of a function, each before what it is made of, without its annotations and its
    docstring."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.stmt, ast.expr)):
            found.append(node)
        for child in _children(node):
            visit(child)

    visit(definition)
    return found


def locate(fault: Fault) -> Place | None:
    """The function that the fault lies in; None where none has its shape any more, or several others have
    it, as functions of one line do."""
    own = PACKAGE / fault.file
    # Mostly it lies where it was, and the other files need not be read.
    places = _places(own).get(fault.shape) if own.exists() else None
    if not places:
        places = [place for path in sorted(PACKAGE.rglob("*.py")) for place in _places(path).get(fault.shape, [])]
    named = [place for place in places if place.function == fault.function]
    return next(iter(named or (places if len(places) == 1 else [])), None)


def planted(fault: Fault) -> tuple[Path, str] | None:
    """The file that the fault lies in and its text with the fault; None where it no longer applies."""
    place = locate(fault)
    if place is None:
        return None
    found = nodes(place.node)
    if fault.node >= len(found):
        return None
    node = found[fault.node]
    changed = apply(fault.operator, node)
    return None if changed is None else (place.path, _spliced(place.path, node, ast.unparse(changed)))


def candidates(definition: Definition) -> Iterator[tuple[int, str]]:
    """The nodes of a function that a drawn fault may change, with the operator for each. What only makes a message or
    holds for the type checker is left out."""
    silent = {
        id(inner)
        for node in ast.walk(definition)
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or _is_reported(node)
        for inner in ast.walk(node)
    }
    for number, node in enumerate(nodes(definition)):
        if id(node) not in silent:
            yield from ((number, name) for name in DRAWN if apply(name, node) is not None)


def apply(operator: str, node: ast.AST) -> ast.AST | None:
    """The node with the fault; None where the operator does not fit it."""
    name, _, argument = operator.partition(":")
    faulty: ast.AST | None = OPERATORS[name](copy.deepcopy(node), argument)
    return faulty


def _comparison(node: ast.AST, _: str) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in COMPARISONS:
        return None
    node.ops[0] = COMPARISONS[type(node.ops[0])]()
    return node


def _sign(node: ast.AST, _: str) -> ast.AST | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    # Texts and lists are joined with the sign of a sum.
    joined = (ast.List, ast.Tuple, ast.JoinedStr, ast.ListComp)
    if not isinstance(node, (ast.BinOp, ast.AugAssign)) or type(node.op) not in SIGNS:
        return None
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    if any(isinstance(side, joined) or _is_text(side) for side in sides):
        return None
    node.op = SIGNS[type(node.op)]()
    return node


def _boolean(node: ast.AST, _: str) -> ast.AST | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if not isinstance(node, ast.BoolOp):
        return None
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _dropped_call(node: ast.AST, _: str) -> ast.AST | None:
    return ast.Pass() if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _swapped_arguments(node: ast.AST, _: str) -> ast.AST | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    # A check of a type with its arguments swapped fails at once, whoever runs it.
    if isinstance(node.func, ast.Name) and node.func.id in (
        "isinstance",
        "getattr",
        "setattr",
        "hasattr",
        "zip",
        "map",
    ):
        return None
    if ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return None
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return node


def _off_by_one(node: ast.AST, _: str) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return None
    return ast.Constant(node.value + 1)


def _negated(node: ast.AST, _: str) -> ast.AST | None:
    return ast.UnaryOp(ast.Not(), node) if isinstance(node, ast.expr) else None


def _dropped(node: ast.AST, _: str) -> ast.AST | None:
    return ast.Pass() if isinstance(node, ast.stmt) else None


def _child(node: ast.AST, argument: str) -> ast.AST | None:
    """The node's own n-th expression in its place: `loss * scale` becomes `loss`."""
    inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return inner[int(argument)] if isinstance(node, ast.expr) and int(argument) < len(inner) else None


def _constant(node: ast.AST, argument: str) -> ast.AST | None:
    return ast.parse(argument, mode="eval").body if isinstance(node, ast.expr) else None


def _ends_with(node: ast.AST, _: str) -> ast.AST | None:
    """`a == b` becomes `a.endswith(b)`."""
    if not isinstance(node, ast.Compare):
        return None
    return ast.Call(ast.Attribute(node.left, "endswith", ast.Load()), [node.comparators[0]], [])


def _without_last(node: ast.AST, _: str) -> ast.AST | None:
    """A chain of `and` or `or` without its last member."""
    if not isinstance(node, ast.BoolOp):
        return None
    return node.values[0] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[:-1])


OPERATORS: dict[str, Any] = {
    "comparison": _comparison,
    "sign": _sign,
    "boolean": _boolean,
    "dropped call": _dropped_call,
    "swapped arguments": _swapped_arguments,
    "off by one": _off_by_one,
    # For faults written by hand alone.
    "negated": _negated,
    "dropped": _dropped,
    "child": _child,
    "constant": _constant,
    "ends with": _ends_with,
    "without last": _without_last,
}
DRAWN = ("comparison", "sign", "boolean", "dropped call", "swapped arguments", "off by one")


@cache
def _places(path: Path) -> dict[str, list[Place]]:
    """The functions of a file by their shapes."""
    found: dict[str, list[Place]] = {}
    for place in functions(path):
        found.setdefault(shape(place.node), []).append(place)
    return found


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in _UNNAMED:
            continue
        values = value if isinstance(value, list) else [value]
        for place, each in enumerate(values):
            is_doc = name == "body" and place == 0 and isinstance(each, ast.Expr) and _is_text(each.value)
            if isinstance(each, ast.AST) and not is_doc:
                yield each


def _shape(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant):
        return type(node.value).__name__ if isinstance(node.value, (str, bytes)) else repr(node.value)
    return type(node).__name__, tuple(_shape(child) for child in _children(node))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_reported(node: ast.AST) -> bool:
    """A call whose arguments are for people: an error that is made, a check, a line of a log."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called.endswith("Error") or called in _MESSAGES


def _spliced(path: Path, node: Any, text: str) -> str:
    """The file's text with other text in the node's place. Columns count bytes of UTF-8."""
    lines = path.read_bytes().split(b"\n")
    before = lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :]
    is_statement = isinstance(node, ast.stmt)
    text = text if is_statement else f"({text})"
    changed = (before + text.encode() + after).split(b"\n")
    return b"\n".join([*lines[: node.lineno - 1], *changed, *lines[node.end_lineno :]]).decode()
