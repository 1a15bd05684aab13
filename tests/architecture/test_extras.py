"""The extras of pyproject.toml: each holds what the modules that need it import."""

import ast
import functools
import re
import sys
import tomllib

import pytest

from tests.architecture.source import ROOT, Source, imports, read_package

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Packages of another name than their module's, and modules that a package brings with it.
PACKAGES = {
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "yaml": "hydra-core",
    "llvmlite": "numba",
    "faiss": "faiss-cpu",
    "PIL": "pillow",
    "lm_eval": "lm-eval",
    "math_verify": "math-verify",
    "markdown_it": "markdown-it-py",
    "pydantic_core": "pydantic",
    "rouge_score": "rouge-score",
}
# The extras whose users run the modules of a room; of two rooms, the deeper one. A room that is not here has required
# packages alone.
ROOMS = {
    "core/kernels": ("gpu",),
    "data/chat": ("transformers", "rlhf"),
    "data/gguf_file.py": ("transformers", "rlhf"),
    "data/images": ("vision",),
    "data/in_memory.py": ("transformers", "rlhf", "recommender"),
    "data/named_dataset.py": ("transformers", "rlhf"),
    "data/readers.py": ("transformers", "rlhf", "recommender"),
    "data/tables": ("recommender",),
    "data/tokenizers": ("transformers", "rlhf"),
    "embedding_cache/tiers": ("remote",),
    "inference/grammar.py": ("transformers", "serve"),
    "inference/server": ("serve",),
    "kits/recommender": ("recommender",),
    "kits/recommender/server": ("serve",),
    "kits/rlhf/reinforcement/openenv.py": ("openenv",),
    "kits/rlhf/roles/math_worker.py": ("math",),
    "kits/transformers": ("transformers",),
    "kits/transformers/harness.py": ("evaluation",),
    "kits/transformers/programs.py": ("onnx",),
    "models": ("transformers", "rlhf"),
    "trainer/callbacks": ("tracking",),
}


def names(requirements: list[str]) -> set[str]:
    """The packages of requirements, those of an extra of our own included."""
    found: set[str] = set()
    for requirement in requirements:
        if inner := re.match(r"kitforge\[(.*)\]", requirement):
            found |= {name for extra in inner[1].split(",") for name in names(EXTRAS[extra])}
        else:
            found.add(re.split(r"[^\w.-]", requirement)[0])
    return found


EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = names(PROJECT["dependencies"])
KNOWN = REQUIRED | names(["kitforge[all,gpu]"])


@functools.cache
def third_party(source: Source) -> list[str]:
    """The packages that a module imports, also those that it names to a function which imports them."""
    modules = {name for name, _ in imports(source.nodes)}
    for function in source.functions if "import_optional" in source.text else ():
        if any(isinstance(node, ast.Name) and node.id == "import_optional" for node in ast.walk(function)):
            words = (node.value for node in ast.walk(function) if isinstance(node, ast.Constant))
            modules |= {word for word in words if isinstance(word, str) and package(word) in KNOWN}
    ours = {"kitforge", "__future__", *sys.stdlib_module_names}
    return sorted({package(name) for name in modules if name.split(".")[0] not in ours})


def package(module: str) -> str:
    """The package of a module."""
    root = module.split(".")[0]
    return PACKAGES.get(root, root)


def missing(sources: list[Source]) -> list[str]:
    """The packages that an extra lacks, and where they are imported."""
    found = []
    for source in sources:
        path = source.path.relative_to("kitforge").as_posix()
        room = max((room for room in ROOMS if path.startswith(room)), key=len, default="")
        for extra in ROOMS.get(room, ("dependencies",)):
            held = REQUIRED | names(EXTRAS.get(extra, []))
            found += [f"{extra} lacks {name}, which {path} imports" for name in third_party(source) if name not in held]
    return found


def test_each_extra_brings_what_its_modules_import() -> None:
    assert missing(read_package()) == []


@pytest.mark.parametrize(
    ("path", "text", "finding"),
    [
        ("data/chat/a.py", "import pyarrow.csv\nimport redis", "transformers lacks redis"),
        ("core/nn/a.py", "def f():\n    from jinja2 import nodes", "dependencies lacks jinja2"),
        ("data/images/a.py", 'def f():\n    import_optional("gguf")', "vision lacks gguf"),
    ],
)
def test_an_import_that_no_extra_brings_is_found(path: str, text: str, finding: str) -> None:
    planted = Source(path=ROOT.relative_to(ROOT) / "kitforge" / path, text=text, tree=ast.parse(text))
    assert missing([planted])[0].startswith(finding)


def test_no_package_is_required_or_brought_that_no_module_imports() -> None:
    used = {name for source in read_package() for name in third_party(source)}
    # Whoever writes an ONNX file runs it, and torch's writer for TensorBoard imports its package.
    assert KNOWN - used == {"onnxruntime", "tensorboard"}


def test_the_loops_of_cpus_are_required() -> None:
    """Without numba decoding is slower than transformers, and log-probabilities depend on the batch."""
    assert "numba" in REQUIRED
