"""Every dropout mask of a network has a name of its own: two of one name would be equal."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.context import Context, DropoutKey, EncoderInput, dropout_name_key
from kitforge.core.nn.dropout import SampleDropout
from kitforge.foundation import seed as seeds
from kitforge.models.catalog import FAMILIES, Kind, config_of
from tests.models.recommender import samples

SIZES: dict[str, Any] = {"vocab_size": 31, "dim": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"mlp_dim": 32, "head_dim": 8, "max_length": 16, "image_size": 8, "patch_size": 4, "labels": ("a", "b")}
SIZES |= {"experts": {"num_experts": 4, "top_k": 2}, "expert_dim": 16}
TOKENS = torch.arange(10).view(2, 5)
NOISE = DropoutKey(seed=1, step=2, samples=(3, 4))
INPUTS: dict[Kind, Any] = {
    "language model": lambda model: model(TOKENS, Context(dropout=NOISE)),
    "encoder": lambda model: model(TOKENS, Context(dropout=NOISE)),
    "encoder-decoder": lambda model: model(TOKENS, Context(dropout=NOISE, source=EncoderInput(tokens=TOKENS))),
    "vision": lambda model: model.logits(torch.zeros(2, 3, 8, 8), Context(dropout=NOISE)),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The names of all masks that are drawn."""
    found, mask, key = list[Any](), DropoutKey.mask, seeds.key

    def record_mask(self: DropoutKey, name: Any, *arguments: Any) -> Tensor:
        found.append(int(dropout_name_key(name) if isinstance(name, str) else name))
        return mask(self, name, *arguments)

    def record_key(*parts: Any) -> int:
        found.extend(parts[3:] if parts[1:2] == ("sample noise",) else ())
        return key(*parts)

    monkeypatch.setattr(DropoutKey, "mask", record_mask)
    monkeypatch.setattr(seeds, "key", record_key)
    return found


def with_dropout(config: Any) -> tuple[Any, int]:
    """The options with all dropout on, and of how many kinds it is."""
    names = [each.name for each in fields(config) if each.name.endswith("dropout")]
    return replace(config, **dict.fromkeys(names, 0.1)), len(names)


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.kind != "recommender"])
def test_each_mask_of_a_transformer_has_its_own_name(name: str, drawn: list[Any]) -> None:
    known = {each.name for each in fields(FAMILIES[name].config)}
    values = {"family": name} | {key: value for key, value in SIZES.items() if key in known}
    config, num_kinds = with_dropout(config_of(values))
    INPUTS[FAMILIES[name].kind](FAMILIES[name].build(config))
    assert len(drawn) >= 3 * num_kinds
    assert not [key for key, count in Counter(drawn).items() if count > 1]


@pytest.mark.parametrize("name", samples.FAMILIES)
def test_each_mask_of_a_recommender_has_its_own_name(name: str, drawn: list[Any]) -> None:
    config = samples.config_of(name, dropout=0.1, **({} if name == "dlrm" else {"hidden": [12, 6]}))
    dense, vectors = samples.inputs_of(config)
    noise = SampleDropout(seed=1, step=2, samples=torch.arange(len(dense)))
    samples.network_of(config)(dense, vectors, noise)
    assert drawn and not [key for key, count in Counter(drawn).items() if count > 1]


def test_each_mask_of_sasrec_has_its_own_name(drawn: list[Any]) -> None:
    config = samples.config_of("sasrec", dim=8, num_heads=2, num_layers=3, max_length=6, dropout=0.1)
    lengths = torch.tensor([5, 5])
    samples.network_of(config)(torch.zeros(2, 5, 8, dtype=torch.float64), lengths, NOISE)
    assert len(drawn) == 1 + 3 * 3
    assert not [key for key, count in Counter(drawn).items() if count > 1]
