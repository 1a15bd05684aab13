"""Weights of a GGUF file that stay as they are stored: Q8_0 and Q4_0 in the compiled step of a decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kitforge import load_model
from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.linear.numba import prefers_matrix_unit
from kitforge.core.kernels.quantized_linear.reference import dequantize
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.foundation.errors import ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.models import gguf as module
from kitforge.models import loading
from kitforge.models.llama.model import LlamaConfig

CPU = torch.device("cpu")
# Queries and keys of different numbers of heads, whose rows a file of architecture llama has in another order.
CONFIG = LlamaConfig(vocab_size=97, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=96, max_length=64)
PROMPTS = [[1 + 7 * text % 90, 5, *range(3, 3 + 5 * text)] for text in range(6)]


def written(path: Path, kinds: dict[str, str], monkeypatch: pytest.MonkeyPatch, config: LlamaConfig = CONFIG) -> Path:
    """A file of random weights: matrices of the vocabulary, of the MLP's width and others in these tensor types."""

    def kind_of(shape: tuple[int, ...], _dtype: object) -> str:
        width = "vocab" if shape[0] == config.vocab_size else "mlp" if config.mlp_dim in shape else "other"
        return "F32" if len(shape) == 1 else kinds[width]

    monkeypatch.setattr(module, "_kind_of", kind_of)
    model = loading.build(config, device=CPU, seed=3)
    loading.save(model, path, dtype="q8_0")
    return path


def kinds(vocab: str, mlp: str, other: str) -> dict[str, str]:
    return {"vocab": vocab, "mlp": mlp, "other": other}


FILES = {
    "q8_0": kinds("Q8_0", "Q8_0", "Q8_0"),
    "q4_0": kinds("Q4_0", "Q4_0", "Q4_0"),
    # As of llama.cpp, whose Q4_0 has a finer head.
    "mixed": kinds("Q5_1", "Q4_0", "Q8_0"),
    "some": kinds("Q4_0", "F16", "Q8_0"),
}


def texts(model: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
    found = Engine(model, EngineOptions(**options)).generate(
        PROMPTS, SamplingOptions(max_new_tokens=9, temperature=0.8)
    )
    return [(each[0].tokens, each[0].logprobs) for each in found]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_texts_are_those_of_the_dequantized_weights(
    name: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, tie_embeddings=is_tied)
    path = written(tmp_path / "a.gguf", FILES[name], monkeypatch, config)
    kept = load_model(str(path), dtype="auto")
    dtype = "bf16" if NATIVE_DTYPES[torch.bfloat16] else "fp32"
    dense = load_model(str(path), dtype=dtype)
    wanted, found = texts(dense, max_num_seqs=6), texts(kept, max_num_seqs=6)
    assert texts(kept, max_num_seqs=1, max_num_batched_tokens=16) == found
    if dtype == "bf16" and prefers_matrix_unit():
        assert found == wanted
    for (own, own_logprobs), (others, logprobs) in zip(found, wanted, strict=True):
        # The matrix unit alone rounds a weight, so texts may part; until then they are as probable.
        count = next((k for k in range(len(own)) if own[k] != others[k]), len(own))
        torch.testing.assert_close(own_logprobs[:count], logprobs[:count], rtol=0, atol=2**-6)
    assert sum(own[0] == others[0] for (own, _), (others, _) in zip(found, wanted, strict=True)) >= len(PROMPTS) - 1
    # By the modules one by one.
    tokens = torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        torch.testing.assert_close(kept(tokens), dense(tokens), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_weights_are_those_of_the_file_and_take_its_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.gguf", FILES[name], monkeypatch)
    kept, exact = loading.load(path, device=CPU, dtype="auto"), loading.load(path, device=CPU)
    layers = {path: each for path, each in kept.named_modules() if isinstance(each, Linear)}
    assert len(layers) == 2 * 7 + 1
    for own, layer in layers.items():
        dense = exact.output if own == "stored_head" else exact.get_parameter(f"{own}.weight")
        assert dense is not None and layer.scales is not None
        assert torch.equal(dequantize(layer.weight, layer.scales), dense), own
    size = sum(each.nbytes for layer in layers.values() for each in layer.parameters())
    tensors = {each.name: each for each in gguf.GGUFReader(str(path)).tensors}
    stored = sum(each.n_bytes for each in tensors.values() if each.tensor_type.name != "F32")
    assert size == stored - tensors["token_embd.weight"].n_bytes
    # The package decodes them to the same numbers.
    theirs = gguf.quants.dequantize(tensors["blk.1.ffn_down.weight"].data, tensors["blk.1.ffn_down.weight"].tensor_type)
    assert np.array_equal(exact.get_parameter("blocks.1.mlp.down.weight").detach().numpy(), theirs)


def test_another_dtype_widens_and_so_does_what_no_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.gguf", FILES["q8_0"], monkeypatch)
    # llama.cpp's Q5_1, with a finer head.
    other = written(tmp_path / "b.gguf", kinds("Q8_0", "Q5_1", "Q5_1"), monkeypatch)
    for model in (
        loading.load(path, device=CPU),
        loading.load(path, device=CPU, dtype="auto", level="O0"),
        loading.load(other, device=CPU, dtype="auto"),
    ):
        assert isinstance(model, Decoder) and model.stored_head is None
        assert all(each.is_floating_point() for each in model.parameters())


def test_they_are_not_quantized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.gguf", FILES["q4_0"], monkeypatch)
    with pytest.raises(ModelError, match=r"(?s)quantized already.*inference.dtype=fp32"):
        Engine(load_model(str(path), dtype="auto"), EngineOptions(quantization="int8"))
