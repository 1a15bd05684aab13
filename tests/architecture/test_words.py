"""Names are the field's: a public class name exists once, and words of a private language do not come back."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from kitforge.cli.main import COMMANDS
from kitforge.foundation.config import option_names
from kitforge.kits.registry import kit_of, task_names
from tests.architecture.source import PACKAGE, Source, read_package

# Words given up, as whole words of identifiers and file names (split at `_` and capitals), with what to say instead.
GIVEN_UP = {
    "beside": "inference, peer, extra",
    "company": "autotuner, threads",
    "deed": "command",
    "deeds": "commands",
    "everyone": "all_ranks",
    "gains": "advantages",
    "guest": "unadmitted",
    "guests": "unadmitted",
    "heard": "observation",
    "judged": "experience",
    "ladder": "hierarchy",
    "laid": "padded, sharded",
    "learnt": "loss_mask",
    "lobby": "rendezvous",
    "looks": "poll, forward",
    "meeting": "barrier",
    "nats": "kl",
    "piece": "shard, chunk, token",
    "pieces": "shards, chunks, tokens",
    "place": "position, index, path, rank",
    "places": "positions, indices, paths, ranks",
    "played": "run",
    "share": "shard, fraction",
    "spoken": "text_tokens",
    "stem": "prefix",
    "tally": "counter",
    "ticket": "handle",
    "tickets": "handles",
    "told": "message, reported",
}
# The names of other libraries, and of Python.
FOREIGN = re.compile(r"SentencePiece\w*|id_to_piece|piece_to_id")
FOREIGN_ATTRIBUTES = ("stem",)  # of pathlib.Path


def class_names(sources: list[Source]) -> dict[str, list[str]]:
    """The files of every public class by its name."""
    files: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(source.path))
    return files


def identifiers(nodes: list[ast.AST]) -> set[str]:
    """The names that a module gives: to modules, classes, functions, parameters, variables and attributes."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr not in FOREIGN_ATTRIBUTES:
            names.add(node.attr)
    return names


def given_up_words(source: Source) -> list[str]:
    """The names of a file, its own among them, that hold a word given up."""
    found = []
    for name in sorted(identifiers(source.nodes) | {source.path.stem}):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        if not FOREIGN.fullmatch(name) and words & GIVEN_UP.keys():
            found.append(name)
    return found


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return read_package()


def test_a_public_class_name_exists_once(sources: list[Source]) -> None:
    twice = {name: files for name, files in class_names(sources).items() if len(files) > 1}
    assert twice == {}


def function_names(sources: list[Source]) -> dict[str, set[str]]:
    """The public functions of modules, and where each is. Of a kernel's implementations, of a family's functions and of
    a verb and its work, which share a name on purpose, one is counted."""
    found: dict[str, set[str]] = {}
    for source in sources:
        room, path = source.path.parent, str(source.path)
        for node in source.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                is_kernel = room.parent.name == "kernels"
                is_family = room.parent.name == "models" and source.path.stem == "convert"
                is_work = node.name in COMMANDS
                shared = str(room) if is_kernel else "a family" if is_family else "a verb" if is_work else path
                found.setdefault(node.name, set()).add(shared)
    return found


def test_a_public_function_name_has_one_meaning(sources: list[Source]) -> None:
    assert {name: places for name, places in function_names(sources).items() if len(places) > 1} == {}


def test_what_something_is_not_is_said_plainly(sources: list[Source]) -> None:
    # "There is no such thing" is plain; so is what an idiom has.
    pattern = re.compile(r"(?<!there )\bis no (?!longer|end|room|exchange|observer|reference|hidden|trainable)\w", re.I)
    assert [f"{source.path}: {found}" for source in sources for found in pattern.findall(source.text)] == []


def test_spelling_is_american(sources: list[Source]) -> None:
    british = re.compile("(normal|initial)is(e|ing|ation)", re.I)
    assert [str(source.path) for source in sources if british.search(source.text)] == []


@pytest.mark.slow
def test_words_given_up_do_not_come_back(sources: list[Source]) -> None:
    assert {str(source.path): words for source in sources if (words := given_up_words(source))} == {}


def test_options_and_presets_have_no_words_given_up() -> None:
    options = {name for task in task_names() for name in option_names(kit_of(task).OPTIONS)}
    files = [path.relative_to(PACKAGE) for path in (PACKAGE / "configs").rglob("*.yaml")]
    words = {word for name in (*options, *map(str, files)) for word in re.split(r"[._/]", name)}
    assert not words & GIVEN_UP.keys()


@pytest.mark.parametrize("text", ["def place(): ...", "x.num_pieces", "class TicketOffice: ...", "def f(told): ..."])
def test_a_planted_word_is_seen(text: str) -> None:
    assert given_up_words(Source(path=Path("kitforge/data/a.py"), text=text, tree=ast.parse(text)))


def test_a_planted_function_is_seen() -> None:
    text = "def opened(): ...\n"
    files = [Path(f"kitforge/data/{name}.py") for name in "ab"]
    sources = [Source(path=path, text=text, tree=ast.parse(text)) for path in files]
    assert function_names(sources)["opened"] == {"kitforge/data/a.py", "kitforge/data/b.py"}


def test_a_planted_class_is_seen_and_a_word_within_another_is_not() -> None:
    text = "class Reader: ...\n"
    source = Source(path=Path("kitforge/data/a.py"), text=text, tree=ast.parse(text))
    assert class_names([source, source])["Reader"] == ["kitforge/data/a.py"] * 2
    text = "replace = placement = shared = 1"
    assert given_up_words(Source(path=Path("kitforge/data/a.py"), text=text, tree=ast.parse(text))) == []
