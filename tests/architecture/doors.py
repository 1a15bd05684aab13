"""The bars on imports that import-linter does not see: front doors, hidden imports, what an `__init__` may hold."""

import ast

from tests.architecture.source import Findings, Source, imports

# The only places where an import of our own may wait inside a function.
LAZY = {"kitforge", "kitforge.api"}


def hidden_imports(sources: list[Source]) -> Findings:
    """An import of our own inside a function is the fingerprint of a circle."""
    for source in sources:
        for function in () if source.module in LAZY else source.functions:
            for name, node in imports(ast.walk(function)):
                if name.split(".")[0] == "kitforge":
                    yield f"{source.at(node)} {function.name} imports {name}"


def front_doors(sources: list[Source]) -> Findings:
    """A name is imported from the file that defines it, by its whole path."""
    modules = {source.module for source in sources}
    packages = {source.module for source in sources if source.is_door}
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                yield f"{source.at(node)} is a relative import"
            elif node.module in packages:
                names = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules]
                yield from (f"{source.at(node)} takes {name} from the front door of {node.module}" for name in names)


def bare_inits(sources: list[Source]) -> Findings:
    """An `__init__` holds a docstring and nothing else, the front door's apart."""
    for source in sources:
        if (
            source.is_door
            and not source.is_front_door
            and not (len(source.tree.body) == 1 and ast.get_docstring(source.tree))
        ):
            yield f"{source.path} holds more than a docstring, or not even one"
