"""PanGu-alpha against its published definition (Zeng et al., 2021), written out below for one document at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.checkpoint.hugging_face import read_folder, write_folder
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.context import Context
from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import converter_of_type
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from kitforge.models.weight_mapping import export_tensors
from tests.models.variants import largest_difference, ours_from

VOCAB, DIM, LAYERS, HEADS, LENGTH = 61, 48, 3, 4, 32
CONFIG: dict[str, Any] = {
    "model_type": "gpt_pangu",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "activation_function": "quick_gelu",
}


def random_tensors() -> dict[str, Tensor]:
    """Weights in the names of the port, with the buffers that its files hold too."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    tensors = {"wte.weight": drawn(VOCAB, DIM), "wpe.weight": drawn(LENGTH, DIM), "wqe.weight": drawn(LENGTH, DIM)}
    norms = ["ln_f", *(f"h.{layer}.ln_{index}" for layer in range(LAYERS) for index in (1, 2))]
    for name in norms:
        tensors |= {f"{name}.weight": 1 + drawn(DIM), f"{name}.bias": drawn(DIM)}
    for layer in range(LAYERS):
        shapes = {f"attn.{name}_proj": (DIM, DIM) for name in "qkvc"}
        shapes |= {"mlp.c_fc": (4 * DIM, DIM), "mlp.c_proj": (DIM, 4 * DIM)}
        for name, shape in shapes.items():
            tensors |= {f"h.{layer}.{name}.weight": drawn(*shape), f"h.{layer}.{name}.bias": drawn(shape[0])}
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.uint8).tril()
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def reference(tensors: dict[str, Tensor], document: Tensor) -> Tensor:
    """Logits [T, vocab] of one document [T]."""

    def linear(name: str, input: Tensor) -> Tensor:
        return input @ tensors[f"transformer.{name}.weight"].T + tensors[f"transformer.{name}.bias"]

    def norm(name: str, input: Tensor) -> Tensor:
        scale, shift = (tensors[f"transformer.{name}.{kind}"] for kind in ("weight", "bias"))
        return (input - input.mean(-1, keepdim=True)) / (
            input.var(-1, False, keepdim=True) + 1e-5
        ).sqrt() * scale + shift

    def heads(input: Tensor) -> Tensor:
        return input.view(len(input), HEADS, DIM // HEADS).transpose(0, 1)

    words, table, queries = (tensors[f"transformer.{name}.weight"] for name in ("wte", "wpe", "wqe"))
    hidden = words[document] + table[: len(document)]
    for layer in range(LAYERS):
        block = f"h.{layer}"
        is_top = layer == LAYERS - 1
        hidden = norm("ln_f", hidden) if is_top else hidden
        normal = norm(f"{block}.ln_1", hidden)
        query = heads(linear(f"{block}.attn.q_proj", queries[: len(document)] if is_top else normal))
        key, value = (heads(linear(f"{block}.attn.{name}_proj", normal)) for name in "kv")
        scores = query @ key.transpose(1, 2) / (DIM // HEADS) ** 0.5
        future = torch.ones(len(document), len(document)).triu(1).bool()
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        hidden = hidden + linear(f"{block}.attn.c_proj", mixed.transpose(0, 1).flatten(1))
        inner = linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", hidden))
        hidden = hidden + linear(f"{block}.mlp.c_proj", inner / (1 + torch.exp(-1.702 * inner)))
    return hidden @ words.T


def packed_documents(*lengths: int) -> tuple[Tensor, Context]:
    """A packed row [1, T] of documents of these lengths, and its context."""
    row = torch.randint(0, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    return row, Context.packed(positions, numbers)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_packed_row_computes_the_definition_of_each_document(level: CompileLevel, tmp_path: Path) -> None:
    tensors = random_tensors()
    write_folder(tmp_path, CONFIG, tensors.items())
    lengths = (7, 1, 12)
    row, context = packed_documents(*lengths)
    with torch.no_grad():
        got = ours_from(tmp_path, level)(row, context)[0].split(lengths)
    for ours, document in zip(got, row[0].split(lengths), strict=True):
        expected = reference(tensors, document)
        assert expected.abs().max() > 1
        assert largest_difference(ours, expected) < 1e-5


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_gradients_are_those_of_the_definition(level: CompileLevel, tmp_path: Path) -> None:
    tensors = random_tensors()
    write_folder(tmp_path, CONFIG, tensors.items())
    lengths = (5, 9)
    row, context = packed_documents(*lengths)
    ours = ours_from(tmp_path, level).double()
    functional.cross_entropy(ours(row, context)[0], row[0]).backward()
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items() if "attn.bias" not in name}
    logits = torch.cat([reference(leaves, document) for document in row[0].split(lengths)])
    functional.cross_entropy(logits, row[0]).backward()
    converter = converter_of_type("gpt_pangu")
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for mapping in converter.tensor_mappings(ours.config, "gpt_pangu"):
        expected, got = leaves[mapping.theirs].grad, grads.pop(mapping.ours)
        assert expected is not None and got is not None
        assert largest_difference(got, expected) < 1e-9, mapping.ours
    assert not grads


def test_a_written_folder_is_the_one_that_was_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_folder(tmp_path / "read", CONFIG, tensors.items())
    ours = ours_from(tmp_path / "read")
    config = ours.config
    assert isinstance(config, PanguAlphaConfig)
    converter = converter_of_type("gpt_pangu")
    state = ours.state_dict()
    written = dict(export_tensors(converter.tensor_mappings(config, "gpt_pangu"), state.__getitem__))
    write_folder(tmp_path / "written", converter.write_config(config), written.items())
    assert {name for name in tensors if not name.endswith(("attn.bias", "masked_bias"))} == written.keys()
    again = read_folder(tmp_path / "written")
    assert converter.read_config(again.config) == config
    for name in again.names():
        assert torch.equal(again.tensor(name), tensors[name])


@pytest.mark.parametrize(("theirs", "ours"), [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("fast_gelu", "quick_gelu")])
def test_the_activation_is_the_one_of_config_json(theirs: str, ours: str) -> None:
    converter = converter_of_type("gpt_pangu")
    config = converter.read_config(CONFIG | {"activation_function": theirs})
    assert config.activation == ours
    assert converter.read_config(converter.write_config(config)) == config
    with pytest.raises(ModelError, match="activation_function='relu'"):
        converter.read_config(CONFIG | {"activation_function": "relu"})
