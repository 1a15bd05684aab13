"""The package as text and syntax trees, so that its habits can be checked without importing it."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kitforge"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
# A finding is a sentence that begins with the place; a rule that finds nothing is kept.
Findings = Iterator[str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file; `path` is relative to the folder that holds the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name under which it is imported."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_door(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def is_front_door(self) -> bool:
        """Whether it is one of the two files whose signatures are the product's own."""
        return self.path.parts[1:] in {("__init__.py",), ("api.py",)}

    @property
    def is_kernel(self) -> bool:
        return "kernels" in self.path.parts

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The whole tree, walked once for all rules."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Every call with the dotted name of what is called, as far as it is made of names."""
        return [(dotted(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    def at(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.path}:{node.lineno}"


@cache
def read_package() -> list[Source]:
    """The files of Kitforge, read once for all tests of a process."""
    return read(PACKAGE)


def read(package: Path) -> list[Source]:
    """Every Python file of the package."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py")))
    return [Source(path=path.relative_to(package.parent), text=text, tree=ast.parse(text)) for path, text in texts]


def dotted(node: ast.AST) -> str:
    """`torch.cuda.empty_cache` for that expression; the parts before the last that are no names become `?`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Every module named by an import statement: `from a import b` names both `a` and `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """The definitions of a module that carry a public name."""
    return (node for node in body if isinstance(node, Definition) and not node.name.startswith("_"))


def decorators(node: Definition) -> dict[str, ast.expr]:
    """The last part of every decorator's name, and the decorator."""
    calls = ((item.func if isinstance(item, ast.Call) else item, item) for item in node.decorator_list)
    return {dotted(name).rsplit(".", 1)[-1]: item for name, item in calls}
