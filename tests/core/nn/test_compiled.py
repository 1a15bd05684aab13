"""Level O2: compiled blocks compute what eager ones do, and few graphs serve all layers and steps."""

import copy
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from tests.core.nn.networks import (
    CONFIGS,
    GPT2,
    LLAMA,
    MIXTRAL,
    VOCAB,
    build,
    distance,
    documents_of,
    gradients,
    packed,
)

# A family is compiled for ten seconds and more; `make prove` compiles these too.
_IS_WHOLE = "KITFORGE_PROVE" in os.environ
MORE_GRAPHS = [("llama", False), ("gpt2", True), ("bloom", True)] if _IS_WHOLE else []
MORE_RECOMPUTED = ["llama", "bloom"] if _IS_WHOLE else []

# What torch says about itself while it compiles is not ours to answer for.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.filterwarnings("default")]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Counter[str]]:
    """What the compiler has counted since the test began. It traces as ever, but spends no time on generating code."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    return counters


@pytest.fixture
def traced(counted: Mapping[str, Counter[str]], monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Counter[str]]:
    """The same where nothing but the number of graphs is asked: their backward passes are not traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    return counted


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_compiled_blocks_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers that compile side by side would each import torch first, for more time than they save.
    monkeypatch.setattr(inductor, "compile_threads", 1)
    compiled, eager = both(LLAMA)
    ids, context = packed(documents_of(5, 2, 8))
    found, wanted = compiled(ids, context), eager(ids, context)
    assert distance(found, wanted) < 1e-5
    assert distance(gradients(compiled, found.square().sum()), gradients(eager, wanted.square().sum())) < 1e-5


@pytest.mark.prove
@pytest.mark.parametrize(("name", "half"), [("llama", True), *MORE_GRAPHS])
def test_layers_share_their_graphs_and_nothing_breaks_them(
    name: str, half: bool, counted: Mapping[str, Counter[str]]
) -> None:
    compiled, eager = both(replace(CONFIGS[name], num_layers=4))  # type: ignore[type-var]
    ids, context = packed(documents_of(5, 2, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = compiled(ids, context).float()
    wanted, tolerance = eager(ids, context), 5e-2 if half else 1e-5
    assert distance(found, wanted) < tolerance
    assert distance(gradients(compiled, found.square().sum()), gradients(eager, wanted.square().sum())) < tolerance
    assert counted["stats"]["unique_graphs"] == 1
    assert not counted["graph_break"]


def test_a_mixture_is_balanced_as_in_eager_blocks_and_no_step_is_compiled_anew(
    counted: Mapping[str, Counter[str]],
) -> None:
    compiled, eager = both(replace(MIXTRAL, num_layers=4))
    for step in range(3):
        ids, context = packed(documents_of(5, 2, 8))
        context = replace(context, loss_weight=torch.tensor(1.0 + step, dtype=torch.float64), counted=ids > 3)
        found, wanted = (gradients(each, each(ids, context).square().sum()) for each in (compiled, eager))
        assert distance(found, wanted) < 1e-5
        for one, other in zip(compiled.blocks, eager.blocks, strict=True):
            assert torch.equal(one.mlp.load, other.mlp.load)  # type: ignore[union-attr,arg-type]
    assert counted["stats"]["unique_graphs"] == 1
    assert not counted["graph_break"]


def test_dropout_is_that_of_eager_blocks_and_no_step_is_compiled_anew(counted: Mapping[str, Counter[str]]) -> None:
    compiled, eager = both(
        replace(GPT2, num_layers=4, attention_dropout=0.1, residual_dropout=0.2, scale_by_layer=True)
    )
    counts = []
    for step in range(3):
        context = Context(dropout=DropoutKey(seed=0, step=step, samples=(2 * step, 2 * step + 1)))
        assert distance(compiled(tokens(), context), eager(tokens(), context)) < 1e-5
        counts.append(counted["stats"]["unique_graphs"])
    assert counts == [1, 1, 1]
    assert not counted["graph_break"]


def test_an_ordinary_run_stays_below_the_limit(traced: Mapping[str, Counter[str]]) -> None:
    """Training and evaluation, one document a row and several, whole batches and smaller last ones, two windows."""
    compiled, _ = both(replace(LLAMA, num_layers=2, sliding_window=3, window_layers=(1,)))
    with warnings.catch_warnings(record=True) as told:
        for is_training in (True, False):
            for rows in (4, 3) if is_training else (2, 1):
                for documents in (torch.zeros(rows, 8, dtype=torch.int32), None):
                    with torch.set_grad_enabled(is_training):
                        ids = torch.zeros(rows, 8, dtype=torch.long)
                        compiled.hidden(ids, Context.packed(torch.arange(8).expand(rows, 8), documents))
    assert not [each for each in told if "compile_level=O2" in str(each.message)]
    assert traced["stats"]["unique_graphs"] == 16
    assert not any("limit" in reason for reason in traced["unimplemented"])


def test_the_limit_is_told_to_the_user_and_compilation_does_not_travel_with_a_copy(
    traced: Mapping[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, eager = both(LLAMA)
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    copy.deepcopy(compiled)(tokens())
    assert traced["stats"]["unique_graphs"] == 0
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    with pytest.warns(UserWarning, match="compile_level=O2"):
        for rows in range(1, 5):
            compiled.hidden(torch.zeros(rows, 8, dtype=torch.long))
    assert traced["unimplemented"]


def both(config: FamilyConfig) -> tuple[Decoder, Decoder]:
    """The same network with compiled blocks, and as its reference."""
    compiled, eager = build(config, "O2", torch.float32), build(config, "O0", torch.float32)
    compiled.compile_blocks()
    return compiled, eager


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def saved_bytes(model: Decoder, context: Context) -> tuple[int, Tensor]:
    """The bytes that autograd saves of a pass beside the parameters, and all gradients but the head's."""
    memory: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.hidden(tokens(), context).square().sum()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found = torch.autograd.grad(loss, [each for each in model.parameters() if each is not model.output])
    kept = sum(each.nbytes() for name, each in memory.items() if name not in own)
    return kept, torch.cat([each.flatten() for each in found])


@pytest.mark.prove
@pytest.mark.parametrize("name", ["gpt2", *MORE_RECOMPUTED])
def test_recomputed_blocks_have_the_same_gradients(name: str, counted: Mapping[str, Counter[str]]) -> None:
    config = replace(GPT2, num_layers=4, attention_dropout=0.1, residual_dropout=0.2) if name == "gpt2" else None
    config = replace(CONFIGS[name], num_layers=4) if config is None else config  # type: ignore[type-var]
    compiled, _ = both(config)
    found = {}
    for recompute in get_args(Recompute):
        compiled.recompute = recompute
        for step in range(2):
            found[recompute] = saved_bytes(
                compiled, Context(dropout=DropoutKey(seed=0, step=step, samples=(step, step + 1)))
            )
    assert torch.equal(found["selective"][1], found["none"][1]) and torch.equal(found["full"][1], found["none"][1])
    assert found["none"][0] > found["selective"][0]
    # One for each kind of recomputation: layers and steps share it.
    assert counted["stats"]["unique_graphs"] == 3
    assert not counted["graph_break"]
