"""ViT: what `transformers` computes, folders in and out, and both axes of its images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from kitforge.api import load_model, save_model
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.vision import VisionTransformer
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.models import loading
from kitforge.models.catalog import config_of, converter_of_type
from kitforge.models.vit.model import ViTConfig

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
    "id2label": {0: "cat", 1: "dog", 2: "bird"},
    "label2id": {"cat": 0, "dog": 1, "bird": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unbiased": {"qkv_bias": False},
    "tanh_one_channel": {"hidden_act": "gelu_pytorch_tanh", "num_channels": 1, "patch_size": 6, "layer_norm_eps": 1e-6},
}
TINY = ViTConfig(dim=24, num_layers=2, num_heads=3, image_size=12, patch_size=4, labels=("a", "b", "c"))


def peer(name: str, folder: Path) -> Any:
    """A network of theirs with every parameter off its initial value, written to the folder."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES | VARIANTS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def images(name: str) -> Tensor:
    channels = VARIANTS[name].get("num_channels", 3)
    return torch.randn(3, channels, 24, 24, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, level: CompileLevel, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path)
    ours: Any = loading.load(tmp_path, device=CPU, level=level)
    with torch.no_grad():
        wanted = theirs(images(name)).logits
        assert wanted.abs().max() > 0.1
        assert (ours(images(name)) - wanted).abs().max() < 1e-5
    assert ours.config.labels == ("cat", "dog", "bird")


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path).double()
    ours: Any = loading.load(tmp_path, device=CPU).double()
    labels, inputs = torch.tensor([2, 0, 1]), images(name).double()
    functional.cross_entropy(theirs(inputs).logits, labels).backward()
    functional.cross_entropy(ours(inputs), labels).backward()
    # The names on disk are those of version 4, which the live network no longer has.
    found = transformers_gradients(theirs, tmp_path)
    mappings = converter_of_type("vit").tensor_mappings(ours.config, "vit")
    assert len(mappings) == len(list(ours.parameters())) == len(found)
    for mapping in mappings:
        own, wanted = ours.get_parameter(mapping.ours).grad, found[mapping.theirs]
        # A bias of keys moves all scores of a query alike: its gradient is zero but for rounding.
        assert (own - wanted).norm() < 1e-9 * wanted.norm() + 1e-15, mapping


def transformers_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients by the names on disk: of a network whose weights are the gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")
    return load_file(folder / "gradients" / "model.safetensors")


@pytest.mark.parametrize("name", VARIANTS)
def test_an_exported_folder_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    peer(name, tmp_path / "theirs")
    ours: Any = load_model(tmp_path / "theirs")
    save_model(ours, tmp_path / "ours")
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert again.config.id2label == SIZES["id2label"]
    with torch.no_grad():
        assert (again(images(name)).logits - ours(images(name))).abs().max() < 1e-5


def test_folders_that_are_another_network_are_refused(tmp_path: Path) -> None:
    peer("plain", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = converter_of_type("vit").read_config
    for change, message in (
        ({"hidden_act": "relu"}, "another activation"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"patch_size": 7}, "patch_size"),
        ({"num_attention_heads": 5}, "num_heads"),
    ):
        with pytest.raises((ModelError, ConfigError), match=message):
            read(config | change).vision()
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_size": 48}))
    with pytest.raises(ModelError, match="misshapen"):
        loading.load(tmp_path, device=CPU)
    with pytest.raises(ConfigError, match="task=image_classification"):
        config_of({"family": "vit"}, "language model")


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ModelError, match="another size"):
        VisionTransformer(TINY)(torch.zeros(1, 3, 24, 24))


def test_recomputation_and_dropout() -> None:
    dropped = replace(TINY, embedding_dropout=0.2, attention_dropout=0.2, residual_dropout=0.2)
    model = VisionTransformer(dropped, select("O1"))
    init_weights(model.named_parameters(), 2, seed=1)
    inputs = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    key, found = DropoutKey(seed=0, step=0, samples=(0, 1, 2)), []
    for recompute in get_args(Recompute):
        model.recompute = recompute
        out = model.logits(inputs, Context(dropout=key))
        found.append([out, *torch.autograd.grad(out.logsumexp(-1).sum(), list(model.parameters()))])
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))
    assert not torch.equal(found[0][0], model(inputs))
    part = model.logits(inputs[1:], Context(dropout=DropoutKey(seed=0, step=0, samples=(1, 2))))
    torch.testing.assert_close(part, found[0][0][1:], rtol=1e-5, atol=1e-6)


def test_bf16_is_near_fp32() -> None:
    model = VisionTransformer(TINY, select("O1"))
    init_weights(model.named_parameters(), 2, seed=1)
    inputs = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(inputs)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.03 * wanted.norm()
