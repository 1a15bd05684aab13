"""Number formats, compile levels, recomputation: what must not change anything, and what may only a little."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import ConfigError
from kitforge.trainer.options import TrainerOptions
from kitforge.trainer.precision import autocast
from tests.core.nn import networks
from tests.trainer import tiny


def losses(folder: Path, corpus: Path, choices: dict[str, Any]) -> Tensor:
    tiny.run(folder, corpus, choices)
    return torch.tensor([record["loss"] for record in tiny.records(folder, "train")])


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.GPT2 | tiny.DROPOUT], ids=["llama", "gpt2 with dropout"])
def test_recomputed_activations_change_no_bit(tmp_path: Path, corpus: Path, model: dict[str, Any]) -> None:
    tiny.run(tmp_path / "kept", corpus, {"model": model})
    for recompute in ("selective", True):
        folder = tmp_path / str(recompute)
        tiny.run(folder, corpus, {"model": model, "trainer.activation_checkpointing": recompute})
        tiny.assert_same(folder, tmp_path / "kept")


def test_the_former_names_of_recomputation_are_those_of_full_and_none() -> None:
    for former, name in ((True, "full"), (False, "none"), ("selective", "selective")):
        options = from_dict(TrainerOptions, {"activation_checkpointing": former})
        assert to_dict(options)["activation_checkpointing"] == name
    with pytest.raises(ConfigError, match="selectiv'\n.*none, selective, full"):
        from_dict(TrainerOptions, {"activation_checkpointing": "selectiv"})


def test_fused_operations_train_like_the_references(tmp_path: Path, corpus: Path) -> None:
    reference = losses(tmp_path / "O0", corpus, {"compile_level": "O0"})
    fused = losses(tmp_path / "O1", corpus, {"compile_level": "O1"})
    torch.testing.assert_close(fused, reference, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_train_like_the_others(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The code that is generated is tested with the blocks (tests/core/nn/test_compiled.py); this is the way to it.
    if "KITFORGE_PROVE" not in os.environ:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Without an evaluation there is one graph less to compile.
    short = {"trainer.max_steps": 3, "data.eval_fraction": 0.0}
    fused = losses(tmp_path / "O1", corpus, short | {"compile_level": "O1"})
    graphs = counters["stats"]["unique_graphs"]
    compiled = losses(tmp_path / "O2", corpus, short | {"compile_level": "O2"})
    torch.testing.assert_close(compiled, fused, rtol=1e-4, atol=0)
    assert counters["stats"]["unique_graphs"] > graphs


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_in_every_precision(tmp_path: Path, corpus: Path, precision: str) -> None:
    course = losses(tmp_path, corpus, {"precision": precision, "trainer.max_steps": 20})
    assert course[-1] < 0.7 * course[0]


def test_fp16_scales_the_loss_and_takes_the_scale_out_again(tmp_path: Path, corpus: Path) -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        tiny.run(
            tmp_path / precision, corpus, {"precision": precision, "trainer.max_steps": 1, "data.eval_fraction": 0.0}
        )
        norms += [record["grad_norm"] for record in tiny.records(tmp_path / precision, "train")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_weights_and_optimizer_whole(tmp_path: Path, corpus: Path, precision: str) -> None:
    tiny.run(tmp_path, corpus, {"precision": precision, "trainer.max_steps": 1})
    tensors, _ = tiny.last_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.slow
def test_two_runs_are_equal_and_another_seed_is_not(tmp_path: Path, corpus: Path) -> None:
    for name in ("one", "two"):
        tiny.run(tmp_path / name, corpus)
    tiny.assert_same(tmp_path / "one", tmp_path / "two")
    other = losses(tmp_path / "other", corpus, {"seed": 1})
    assert not other.equal(torch.tensor([record["loss"] for record in tiny.records(tmp_path / "one", "train")]))


def test_deterministic_algorithms_are_asked_for_by_option(tmp_path: Path, corpus: Path) -> None:
    try:
        tiny.begin(tmp_path / "yes", corpus, {"deterministic": True, "compile_level": "O2"})
        assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
        # Blocks may be compiled before it is asked for, and after, by a compiler that was not there to be told.
        torch._inductor.config.deterministic = False
        networks.build(networks.CONFIGS["gpt2"], "O1", torch.float32).compile_blocks()
        assert torch._inductor.config.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_weight_is_kept_rounded_until_a_pass_ends() -> None:
    with autocast(torch.device("cpu"), "bf16"):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
