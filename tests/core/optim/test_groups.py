"""Which parameters decay and which Muon may take."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from kitforge.core.optim.groups import ParameterGroup, decay_groups, network_groups, table_names
from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import FAMILIES, config_of
from tests.models.recommender import samples
from tests.models.test_dropout_names import SIZES


class Model(nn.Module):
    """A little of everything: embedding, linear with bias, convolution, norm, head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        # The head comes first, so that a tied model shows which name is kept.
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding = nn.Embedding(6, 4)
        self.linear = nn.Linear(4, 4)
        self.mix = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        if tied:
            self.head.weight = self.embedding.weight


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return decay_groups(
        model.named_parameters(remove_duplicate=False),
        weight_decay=0.1,
        no_decay=["embedding.weight"],
        heads=["head.weight"],
    )


def summary(groups: list[ParameterGroup]) -> list[tuple[tuple[str, ...], float, bool]]:
    return [(group.names, group.weight_decay, group.matrix) for group in groups]


REST = ("linear.bias", "mix.bias", "norm.weight", "norm.bias")


def test_matrices_decay_and_embeddings_norms_and_biases_do_not() -> None:
    assert summary(groups_of(Model())) == [
        (("linear.weight",), 0.1, True),
        (("head.weight", "mix.weight"), 0.1, False),
        (("embedding.weight", *REST), 0.0, False),
    ]


def test_a_head_tied_to_the_embedding_comes_once_and_does_not_decay() -> None:
    assert summary(groups_of(Model(tied=True))) == [
        (("linear.weight",), 0.1, True),
        (("mix.weight",), 0.1, False),
        (("head.weight", *REST), 0.0, False),
    ]


def test_names_and_parameters_stand_in_the_same_order() -> None:
    model = Model()
    for group in groups_of(model):
        for name, parameter in zip(group.names, group.parameters, strict=True):
            assert model.get_parameter(name) is parameter


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.linear.requires_grad_(False)
    model.embedding.requires_grad_(False)
    names = {name for group in groups_of(model) for name in group.names}
    assert names == {"head.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias"}


def test_a_listed_name_that_no_parameter_has_is_refused_and_the_nearest_named() -> None:
    model = Model()
    with pytest.raises(ModelError, match="did you mean 'embedding.weight'"):
        decay_groups(model.named_parameters(), weight_decay=0.1, no_decay=["embeding.weight"])


def test_a_tied_name_that_was_not_shown_is_refused() -> None:
    model = Model(tied=True)
    with pytest.raises(ModelError, match="remove_duplicate=False"):
        decay_groups(model.named_parameters(), weight_decay=0.1, no_decay=["embedding.weight"])


def test_equal_but_separate_parameters_are_both_kept() -> None:
    named = [("a", nn.Parameter(torch.ones(2, 2))), ("b", nn.Parameter(torch.ones(2, 2)))]
    assert summary(decay_groups(named, weight_decay=0.1)) == [(("a", "b"), 0.1, True)]


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.kind != "recommender"])
def test_no_table_of_a_family_decays(name: str) -> None:
    known = {each.name for each in fields(FAMILIES[name].config)}
    model = FAMILIES[name].build(config_of({"family": name} | {key: SIZES[key] for key in SIZES if key in known}))
    tables = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    assert tables <= set(table_names(model))
    for prefix, network in (("", model), ("policy.", nn.ModuleDict({"policy": model}))):
        decayed = {each for group in network_groups(network, 0.1) if group.weight_decay for each in group.names}
        assert not decayed & {prefix + table for table in tables}
        assert prefix + "blocks.0.mlp.down.weight" in decayed or name not in {"llama", "pangu_alpha"}


def test_the_positions_of_sasrec_do_not_decay() -> None:
    model = samples.network_of(samples.config_of("sasrec", dim=8, num_heads=2, num_layers=1, max_length=6))
    assert table_names(model) == ["position.weight"]
