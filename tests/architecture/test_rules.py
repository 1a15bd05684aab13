"""The bars that can be read off the source. Every rule is shown a planted violation, so that it is known to see."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import doors, manners, sizes
from tests.architecture.source import Findings, Source, read, read_package

Rule = Callable[[list[Source]], Findings]
# A rule, the file to plant, and what to plant in it.
Plant = tuple[Rule, str, str]

DOC = '"""Says what it is."""\n'
SEVEN = "a, b, c, d, e, f, g"
IFS = "if a:\n  if b:\n   if c:\n    if d:\n     pass\n"

PLANTED: list[Plant] = [
    (sizes.file_length, "data/long.py", "x = 1\n" * 501),
    (sizes.file_length, "core/kernels/norm/long.py", "x = 1\n" * 601),
    (sizes.room_lines, "data/images/long.py", "x = 1\n" * 9999),
    (sizes.room_lines, "new_room/long.py", "x = 1\n" * 9999),
    (sizes.function_length, "data/long.py", "def f():\n" + " x = 1\n" * 60),
    (sizes.function_length, "data/long.py", "class A:\n def f(self):\n" + "  x = 1\n" * 60),
    (
        sizes.small_functions,
        "data/small.py",
        "def f():\n return 1\n" * 2 + "def g():\n a = 1\n b = 2\n c = 3\n return a\n" * 4,
    ),
    (sizes.parameters, "data/wide.py", f"def f({SEVEN}): ..."),
    (sizes.parameters, "data/wide.py", f"class A:\n def f(self, *, {SEVEN}): ..."),
    (sizes.nesting, "data/deep.py", f"def f(a, b, c, d):\n {IFS}"),
    (sizes.nesting, "data/deep.py", "def f():\n for a in b:\n  while c:\n   try:\n    if d: pass\n   finally: pass"),
    (manners.module_names, "data/utils.py", ""),
    (manners.module_names, "common/tokens.py", ""),
    (manners.module_names, "data/loader_v2.py", ""),
    (manners.comments, "data/a.py", "# ------ loading ------"),
    (manners.comments, "data/a.py", "x = 1  # TODO make nicer"),
    (manners.docstrings, "data/a.py", "x = 1"),
    (manners.docstrings, "data/a.py", f"{DOC}def f(): ..."),
    (manners.docstrings, "data/a.py", f"{DOC}class A: ..."),
    (manners.docstrings, "data/a.py", f"{DOC}class A(Concrete):\n {DOC} def f(self): ..."),
    (manners.options, "data/a.py", "@dataclass(frozen=True, slots=True)\nclass DataConfig: ..."),
    (manners.options, "data/a.py", "class ServerOptions: ..."),
    (manners.inheritance, "data/a.py", "class A: ...\nclass B(A): ..."),
    (manners.inheritance, "data/a.py", "from kitforge.data.concrete import Concrete\nclass B(Concrete): ..."),
    (manners.pass_through, "data/a.py", "def f(**kwargs): return kwargs.get('size')"),
    (manners.pass_through, "data/a.py", "def f(**kwargs): return 1"),
    (manners.prints, "data/a.py", "def f(): print('x')"),
    (manners.vendor_modules, "data/a.py", "import torch\ntorch.cuda.empty_cache()"),
    (manners.vendor_modules, "data/a.py", "from torch import cuda"),
    (manners.vendor_modules, "data/a.py", "def f():\n import torch_npu"),
    (manners.home_folders, "data/a.py", "def f(x): return Path(x).expanduser()"),
    (manners.home_folders, "data/a.py", "x = Path.home() / 'a'"),
    (manners.executed_data, "data/a.py", "import pickle"),
    (manners.executed_data, "data/a.py", "def f():\n from dill import loads"),
    (manners.executed_data, "data/a.py", "import torch\ntorch.load('x')"),
    (manners.executed_data, "data/a.py", "from torch import load"),
    (manners.executed_data, "data/a.py", "import yaml\nyaml.load('x', Loader=yaml.Loader)"),
    (manners.executed_data, "data/a.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (manners.executed_data, "data/a.py", "eval('1')"),
    (manners.network_checks, "core/parallel/a.py", "isinstance(model, Decoder)"),
    (manners.network_checks, "core/parallel/a.py", "isinstance(model, VisionTransformer)"),
    (manners.network_checks, "kits/a.py", "x = [each for each in y if isinstance(each, (decoder.Decoder, Linear))]"),
    (manners.network_checks, "kits/a.py", "match model:\n case Decoder(): pass"),
    (
        manners.network_checks,
        "kits/a.py",
        "from kitforge.models.din.model import DINConfig\nisinstance(a, (B, DINConfig))",
    ),
    (manners.network_checks, "kits/transformers/labelling.py", "isinstance(model, CausalLM)"),
    (manners.local_tensors, "data/a.py", "x.to_local()\nDTensor.from_local(x)"),
    (manners.parts_of_texts, "kits/a.py", "def f(tokenizer): return tokenizer.decode([1])"),
    (manners.parts_of_texts, "data/chat/template.py", "a.tokenizer.encode('')\ny = self._tokenizer.encode_array('')"),
    (doors.hidden_imports, "data/a.py", "def f():\n from kitforge.data import concrete"),
    (doors.hidden_imports, "data/a.py", "def f():\n import kitforge.data.concrete"),
    (doors.front_doors, "data/a.py", "from kitforge.data import Concrete"),
    (doors.front_doors, "report/a.py", "from kitforge import Trainer"),
    (doors.front_doors, "data/a.py", "from .concrete import Concrete"),
    (doors.bare_inits, "report/__init__.py", f"{DOC}x = 1"),
    (doors.bare_inits, "report/__init__.py", ""),
]

INNOCENT: list[Plant] = [
    (sizes.file_length, "core/kernels/norm/long.py", "x = 1\n" * 500),
    (sizes.function_length, "data/a.py", 'def f():\n """One.\n' + "\n" * 60 + ' """\n x = 1'),
    (sizes.function_length, "core/kernels/norm/a.py", "def f():\n" + " x = 1\n" * 60),
    (sizes.parameters, "api.py", f"def f({SEVEN}): ..."),
    (sizes.parameters, "data/a.py", f"class A:\n def f(self, {SEVEN[:-3]}): ..."),
    (sizes.nesting, "data/a.py", "def f(a):\n if a == 1: pass\n elif a == 2: pass\n elif a == 3: pass\n elif a: pass"),
    (sizes.nesting, "data/a.py", "def f(a):\n if a:\n  with b:\n   for c in d:\n    with e: pass"),
    (manners.comments, "data/a.py", "# [batch, length, dim]\nx = 1  # TODO wait for #12"),
    (manners.options, "data/a.py", "@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)\nclass AConfig: ..."),
    (manners.options, "data/a.py", "class AConfig(Protocol): ..."),
    (manners.inheritance, "data/a.py", "class A(ABC): ...\nclass B(A): ...\nclass Concrete(nn.Concrete): ..."),
    (manners.inheritance, "data/a.py", "@dataclass\nclass A: ...\n@dataclass\nclass B(A): ..."),
    (manners.inheritance, "data/a.py", "class AError(Exception): ...\nclass BError(AError): ..."),
    (manners.pass_through, "data/a.py", "def f(**kwargs): return g(1, **kwargs)"),
    (manners.pass_through, "data/a.py", "def f(**kwargs): return g(kwargs)"),
    (manners.vendor_modules, "foundation/device.py", "import torch\ntorch.cuda.empty_cache()"),
    (manners.executed_data, "data/a.py", "model.eval()\nyaml.safe_load('x')\nyaml.load('x', Loader=yaml.CSafeLoader)"),
    (manners.network_checks, "models/catalog.py", "isinstance(model, Decoder)"),
    (manners.network_checks, "core/parallel/a.py", "isinstance(model, Stack)"),
    (manners.network_checks, "kits/transformers/labelling.py", "isinstance(model, Encoder)"),
    (manners.network_checks, "kits/a.py", "isinstance(model, CausalLM)\nx: Decoder = build(Decoder)"),
    (manners.parts_of_texts, "data/text/continuation.py", "def f(tokenizer): return tokenizer.decode([1])"),
    (manners.parts_of_texts, "data/chat/template.py", "x = tokenizer.encode('')\ny = 'a'.encode()"),
    (doors.hidden_imports, "api.py", "def f():\n import kitforge.data.concrete"),
    (doors.hidden_imports, "data/a.py", "def f():\n import pyarrow"),
    (doors.front_doors, "data/a.py", "from kitforge.data import concrete"),
]

RULES = list(dict.fromkeys(rule for rule, _, _ in PLANTED))


@pytest.fixture(scope="module")
def package() -> list[Source]:
    return read_package()


def plant(folder: Path, path: str, text: str) -> list[Source]:
    """A small sound package, and in it one file more (or another) with `text`."""
    sound = {
        "__init__.py": DOC,
        "data/__init__.py": DOC,
        "data/concrete.py": f"{DOC}class Concrete:\n {DOC} x = y.to_local()",
        path: text,
    }
    for name, content in sound.items():
        file = folder / "kitforge" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return read(folder / "kitforge")


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, package: list[Source]) -> None:
    found = list(rule(package))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    assert any(path in finding for finding in rule(plant(tmp_path, path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), INNOCENT)
def test_what_is_allowed_is_let_pass(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    assert not list(rule(plant(tmp_path, path, text)))
