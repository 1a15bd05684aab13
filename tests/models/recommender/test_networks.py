"""Every network is its formula, written out by hand in float64."""

import itertools
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import REFERENCE
from kitforge.core.nn.cross_network import CrossNetwork, dot_interaction
from kitforge.core.nn.dropout import SampleDropout, sample_dropout
from kitforge.core.nn.embedding_spec import SampleShape
from kitforge.core.nn.mlp_tower import MLPTower
from kitforge.foundation.errors import ConfigError
from kitforge.models.catalog import build_recommender, families_of, recommender_of
from kitforge.models.deepfm.model import pairwise
from kitforge.models.din.model import DIN
from kitforge.models.two_tower.model import TwoTower
from kitforge.models.wide_deep.model import WideDeep
from tests.models.recommender.samples import FAMILIES, SHAPE, config_of, inputs_of, network_of
from tests.preset_values import preset_values


def tower(weights: MLPTower, input: Tensor) -> Tensor:
    for layer in list(weights.layers)[:-1]:
        input = torch.clamp(input @ layer.weight.T + layer.bias, min=0.0)
    last = weights.layers[-1]
    return input @ last.weight.T + last.bias


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_gives_a_logit_for_each_sample_and_a_gradient_to_each_input(family: str) -> None:
    config = config_of(family)
    dense, vectors = inputs_of(config)
    logits = network_of(config)(dense, vectors)
    assert logits.shape == (5,)
    logits.sum().backward()
    given = [dense, *(tensor for name, tensor in vectors.items() if not name.endswith(".lengths"))]
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in given)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_does_not_depend_on_those_beside_it(family: str) -> None:
    config = config_of(family)
    network = network_of(config)
    dense, vectors = inputs_of(config)
    whole = network(dense, vectors)
    for start, stop in ((0, 2), (2, 5), (3, 3)):
        part = {name: tensor[start:stop] for name, tensor in vectors.items()}
        torch.testing.assert_close(network(dense[start:stop], part), whole[start:stop])


def test_wide_deep_adds_the_wide_weights_the_numbers_and_the_tower() -> None:
    config = config_of("wide_deep")
    network = network_of(config)
    assert isinstance(network, WideDeep) and network.linear is not None
    dense, vectors = inputs_of(config)
    deep = tower(network.tower, torch.cat([dense, vectors["deep"].flatten(1)], dim=1))
    expected = (vectors["wide"] + dense @ network.linear.weight.T + deep).squeeze(1)
    torch.testing.assert_close(network(dense, vectors), expected)


def test_numbers_may_scale_rows_of_their_own() -> None:
    config = config_of("wide_deep", numeric="rows")
    network = network_of(config)
    assert isinstance(network, WideDeep) and network.linear is not None and network.rows is not None
    dense, vectors = inputs_of(config)
    scaled = torch.cat([dense[:, :1] * network.rows[0], dense[:, 1:] * network.rows[1], vectors["deep"].flatten(1)], 1)
    expected = (vectors["wide"] + dense @ network.linear.weight.T + tower(network.tower, scaled)).squeeze(1)
    torch.testing.assert_close(network(dense, vectors), expected)


def test_the_wide_part_takes_the_features_that_it_is_given() -> None:
    wide = config_of("wide_deep", wide=["item_x_place", "user"]).lookups(SHAPE)[0]
    assert (wide.kind, wide.dim, wide.features) == ("wide", 1, ("item_x_place", "user"))
    assert config_of("wide_deep").lookups(SHAPE)[0].features == (*SHAPE.categorical, *SHAPE.crosses)
    with pytest.raises(ConfigError, match=r"model.wide.*\n.*usr"):
        config_of("wide_deep", wide=["usr"]).lookups(SHAPE)


def test_features_may_have_rows_of_several_widths() -> None:
    shape = SampleShape(numeric=("age",), categorical=("a", "b", "c"), dims={"b": 2})
    config = config_of("dcn_v2")
    assert [(each.features, each.dim) for each in config.lookups(shape)] == [(("a", "c"), 4), (("b",), 2)]
    dense, vectors = inputs_of(config, shape=shape)
    assert network_of(config, shape)(dense, vectors).shape == (5,)


@pytest.mark.parametrize("family", ["deepfm", "dlrm", "din", "two_tower"])
def test_vectors_that_meet_in_products_have_one_width(family: str) -> None:
    shape = SampleShape(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__ if name != "dims"}, dims={"item": 2})
    with pytest.raises(ConfigError, match=r"item.dim.*\n.*2\n.*model.dim=4"):
        config_of(family).lookups(shape)


@pytest.mark.parametrize("family", [*FAMILIES, "sasrec"])
def test_a_network_takes_the_data_or_says_which_feature_to_give(family: str) -> None:
    draws, kinds = random.Random(0), ("numeric", "categorical", "sequences")
    for _ in range(30):
        drawn = {kind: getattr(SHAPE, kind)[: draws.randint(0, 3)] for kind in kinds}
        shape, config = SampleShape(**drawn, tables=SHAPE.tables), config_of(family)
        try:
            config.lookups(shape)
        except ConfigError as error:
            assert re.search(r"(?s)got: .*expected: .*data\.schema|model\.\w+.*got: .*expected: ", str(error))
        else:
            build_recommender(config, shape, REFERENCE)


def test_deepfm_s_second_order_is_the_sum_over_all_pairs() -> None:
    vectors = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = itertools.combinations(range(5), 2)
    expected = sum((vectors[:, first] * vectors[:, second]).sum(1) for first, second in pairs)
    torch.testing.assert_close(pairwise(vectors), expected)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_cross_layer_is_its_formula(rank: int | None) -> None:
    network = CrossNetwork(6, 2, rank=rank, kernels=REFERENCE).double()
    for number, parameter in enumerate(network.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1 + number))
    first = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = first
    for layer in range(2):
        outer, bias = network.outer[layer].weight, network.outer[layer].bias
        matrix = outer if rank is None else outer @ network.inner[layer].weight
        state = first * (state @ matrix.T + bias) + state
    torch.testing.assert_close(network(first), state)
    assert sum(each.numel() for each in network.parameters()) == 2 * (6 * 6 + 6 if rank is None else 2 * 6 * 3 + 6)


def test_dlrm_s_interaction_is_every_pair_once() -> None:
    vectors = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = [(row, column) for row in range(4) for column in range(row)]
    expected = torch.stack([(vectors[:, row] * vectors[:, column]).sum(1) for row, column in pairs], dim=1)
    torch.testing.assert_close(dot_interaction(vectors), expected)


@pytest.mark.parametrize("softmax", [False, True])
def test_din_weighs_the_items_of_a_history_one_by_one(softmax: bool) -> None:
    config = config_of("din", softmax=softmax)
    network = network_of(config)
    assert isinstance(network, DIN)
    interest: Any = network.interests["history"]
    _, vectors = inputs_of(config, num_samples=4)
    target = vectors["deep"][:, 1]
    found = interest(target, vectors["history"], vectors["history.lengths"])
    for sample, length in enumerate(vectors["history.lengths"].tolist()):
        items = vectors["history"][sample, :length]
        query = target[sample].expand_as(items)
        scores = tower(interest.tower, torch.cat([query, items, query - items, query * items], dim=1))
        weights = scores.softmax(0) if softmax else scores
        torch.testing.assert_close(found[sample], (weights * items).sum(0))


@pytest.mark.parametrize("softmax", [False, True])
def test_what_pads_a_history_of_din_is_never_seen(softmax: bool) -> None:
    config = config_of("din", softmax=softmax)
    network = network_of(config)
    dense, vectors = inputs_of(config)
    clean = network(dense, vectors)
    padding = torch.arange(3) >= vectors["history.lengths"].unsqueeze(1)
    poisoned = vectors["history"].detach().masked_fill(padding.unsqueeze(2), torch.nan).requires_grad_()
    dirty = network(dense, {**vectors, "history": poisoned})
    torch.testing.assert_close(dirty, clean)
    dirty.sum().backward()
    assert poisoned.grad is not None and bool(poisoned.grad.isfinite().all())
    assert not bool(poisoned.grad[padding].any())


def test_din_s_target_is_what_the_history_shares_a_table_with() -> None:
    assert config_of("din").pairs(SHAPE) == {"history": "item"}
    assert config_of("din", targets={"history": "place"}).pairs(SHAPE) == {"history": "place"}
    alone = SampleShape(categorical=("user",), sequences=("history",))
    with pytest.raises(ConfigError, match=r"model.targets.history"):
        config_of("din").lookups(alone)


def test_two_towers_multiply_vectors_of_length_one() -> None:
    config = config_of("two_tower", temperature=0.5)
    network = network_of(config)
    assert isinstance(network, TwoTower)
    dense, vectors = inputs_of(config)
    lengths = vectors["history.lengths"]
    means = torch.stack(
        [vectors["history"][sample, :length].sum(0) / max(length, 1) for sample, length in enumerate(lengths.tolist())]
    )
    user = tower(network.user.tower, torch.cat([dense[:, :1], vectors["user"].flatten(1), means], dim=1))
    item = tower(network.item.tower, vectors["item"].flatten(1))
    expected = functional.cosine_similarity(user, item, dim=1) / 0.5
    torch.testing.assert_close(network(dense, vectors), expected.float().double(), check_dtype=False)


def test_towers_need_the_features_of_either_side() -> None:
    with pytest.raises(ConfigError, match=r"model.item.*\n.*\n.*features of the item"):
        config_of("two_tower", item=[]).lookups(SHAPE)
    with pytest.raises(ConfigError, match="first the categorical item id"):
        config_of("two_tower", item=["price"]).lookups(SHAPE)


def test_noise_depends_on_the_sample_alone() -> None:
    samples = torch.arange(250, 262)

    def masked(step: int, samples: torch.Tensor) -> torch.Tensor:
        noise = SampleDropout(seed=3, step=step, samples=samples)
        return sample_dropout(torch.ones(len(samples), 8), 0.5, "tower.0", noise)

    whole = masked(7, samples)
    assert torch.equal(masked(7, samples[4:9]), whole[4:9])
    assert not torch.equal(masked(8, samples), whole)
    assert set(whole.unique().tolist()) == {0.0, 2.0}


def test_every_preset_is_built_on_meta() -> None:
    shape = SampleShape(
        numeric=tuple(f"I{number}" for number in range(1, 14)),
        categorical=tuple(f"C{number}" for number in range(1, 27)),
        sequences=("history",),
        tables={"history": "C1"},
    )
    named = {
        name: values
        for name, values in preset_values("model").items()
        if values["family"] in families_of("recommender")
    }
    assert {values["family"] for values in named.values()} == set(families_of("recommender"))
    for values in named.values():
        sides = {"user": ["C1", "history"], "item": ["C2"]} if values["family"] == "two_tower" else {}
        with torch.device("meta"):
            network = build_recommender(recommender_of({**values, **sides}), shape, REFERENCE)
        assert all(each.is_meta for each in network.parameters())


def test_mindspore_s_benchmark_has_the_sizes_that_are_told_of_it() -> None:
    shape = SampleShape(
        numeric=tuple("I" * number for number in range(13)), categorical=tuple("abcdefghijklmnopqrstuvwxyz")
    )
    config = recommender_of(preset_values("model")["wide_deep_mindspore"])
    with torch.device("meta"):
        network = build_recommender(config, shape, REFERENCE)
    sizes = [tuple(layer.weight.shape) for layer in network.tower.layers]  # type: ignore[union-attr]
    assert sizes == [(1024, 39 * 16), *[(1024, 1024)] * 6, (1, 1024)]


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got: +deep_fm\n.*did you mean 'deepfm'"):
        recommender_of({"family": "deep_fm"})


@pytest.mark.parametrize("family", ["dcn_v2", "dlrm"])
@pytest.mark.parametrize("rank", [0, -1])
def test_matrices_of_no_rank_are_refused(family: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="model.rank"):
        recommender_of({"family": family, "rank": rank})
