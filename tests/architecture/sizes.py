"""The bars of size: how long a file and a function may be, how deep, and how much it may be handed."""

import ast
from collections import Counter

from tests.architecture.source import Findings, Function, Source

FILE_LINES = 500
KERNEL_FILE_LINES = 600
FUNCTION_LINES = 60
PARAMETERS = 6
NESTING = 3
# Rows, what belongs to a row, columns, and one choice among them.
KERNEL_NESTING = 4
# Share of functions of at most SMALL_LINES lines: a page of fragments is read by jumping.
SMALL_LINES = 3
SMALL_SHARE = 0.30
# The lines that each room may have, its deepest name first: a room that outgrows its number is a choice, made in
# docs/log.md with its reason.
ROOM_LINES = {
    "": 1098,
    "cli/": 1845,
    "core/": 1,
    "core/checkpoint/": 2662,
    "core/kernels/": 12890,
    "core/nn/": 3471,
    "core/optim/": 914,
    "core/parallel/": 7104,
    "data/": 2313,
    "data/chat/": 3029,
    "data/images/": 191,
    "data/tables/": 3338,
    "data/text/": 1384,
    "data/tokenizers/": 1951,
    "embedding_cache/": 4699,
    "foundation/": 1329,
    "inference/": 3574,
    "inference/server/": 3752,
    "kits/": 2218,
    "kits/recommender/": 6608,
    "kits/rlhf/": 8167,
    "kits/transformers/": 5345,
    "models/": 4971,
    "report/": 2280,
    "trainer/": 2384,
    "verify/": 2125,
}
# What opens a branch or a loop. A `with` opens neither, so it does not count.
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


def file_length(sources: list[Source]) -> Findings:
    for source in sources:
        lines, wall = len(source.text.splitlines()), KERNEL_FILE_LINES if source.is_kernel else FILE_LINES
        if lines > wall:
            yield f"{source.path} has {lines} lines, over {wall}"


def room_lines(sources: list[Source]) -> Findings:
    """Every file lies in a room of `ROOM_LINES`, the longest name that its path begins with, and fits into it."""
    lines: dict[str, Counter[str]] = {}
    for source in sources:
        path = source.path.as_posix()
        room = max((room for room in ROOM_LINES if path.startswith(f"kitforge/{room}")), key=len)
        lines.setdefault(room, Counter())[path] = len(source.text.splitlines())
    for room, files in lines.items():
        if files.total() > ROOM_LINES[room]:
            longest = ", ".join(path for path, _ in files.most_common(3))
            yield (
                f"{room or 'the package outside its rooms'} has {files.total()} lines, over {ROOM_LINES[room]}: take "
                f"some out, or raise the number with a line in docs/log.md that says why; the longest are {longest}"
            )


def function_length(sources: list[Source]) -> Findings:
    """Lines from `def` to the end, the docstring left out."""
    for source in sources:
        for node in () if source.is_kernel or source.is_front_door else source.functions:
            first = node.body[0]
            doc = last_line(first) - first.lineno + 1 if ast.get_docstring(node) else 0
            lines = last_line(node) - node.lineno + 1 - doc
            if lines > FUNCTION_LINES:
                yield f"{source.at(node)} {node.name} has {lines} lines, over {FUNCTION_LINES}"


def small_functions(sources: list[Source]) -> Findings:
    """Few functions are fragments. Declarations without a body (protocols, abstract methods) do not count."""
    small: Counter[str] = Counter()
    num_functions = 0
    for source in sources:
        for node in source.functions:
            has_doc = ast.get_docstring(node) is not None
            if all(isinstance(each, ast.Raise) or is_ellipsis(each) for each in node.body[has_doc:]):
                continue
            doc = last_line(node.body[0]) - node.body[0].lineno + 1 if has_doc else 0
            num_functions += 1
            small[str(source.path)] += last_line(node) - node.lineno + 1 - doc <= SMALL_LINES
    if small.total() > SMALL_SHARE * num_functions:
        worst = ", ".join(path for path, _ in small.most_common(5))
        yield f"{small.total()} of {num_functions} functions have at most {SMALL_LINES} lines, most in {worst}"


def is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis


def parameters(sources: list[Source]) -> Findings:
    """A seventh parameter means that a dataclass is missing; `self` and `cls` do not count."""
    for source in sources:
        for node in () if source.is_kernel or source.is_front_door else source.functions:
            given = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            num = len(given) - (given[:1] in (["self"], ["cls"]))
            if num > PARAMETERS:
                yield f"{source.at(node)} {node.name} takes {num} parameters, over {PARAMETERS}"


def nesting(sources: list[Source]) -> Findings:
    for source in sources:
        for node in source.functions:
            depth = max(map(block_depth, node.body))
            wall = KERNEL_NESTING if source.is_kernel else NESTING
            if depth > wall:
                yield f"{source.at(node)} {node.name} is nested {depth} deep, over {wall}"


def block_depth(node: ast.AST) -> int:
    """Blocks within blocks below `node`, itself counted. A function inside a function has a count of its own."""
    if isinstance(node, (Function, ast.ClassDef)):
        return 0
    # An `elif` is, to Python, an `if` alone in the `else`, though no deeper to a reader.
    inner = list(ast.iter_child_nodes(node))
    beside = [node.orelse[0]] if isinstance(node, ast.If) and is_chain(node) else []
    depth = max((block_depth(child) for child in inner if child not in beside), default=0)
    return max(depth + isinstance(node, BLOCKS), *map(block_depth, beside), 0)


def is_chain(node: ast.If) -> bool:
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
