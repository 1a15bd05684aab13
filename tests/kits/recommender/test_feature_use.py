"""Which features a family uses: none of the schema's is left out without a word."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitforge.core.nn.embedding_spec import used_features
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.model import inputs_of, sample_shape
from kitforge.models.catalog import recommender_of
from tests.kits.recommender.runs import numbers, ready

WORDS = {"kind": "integer", "encoding": "vocabulary"}
SCHEMA: dict[str, Any] = {
    "label": {"name": "click"},
    "numeric": {"price": {}},
    "categorical": {"user": WORDS, "item": WORDS | {"table": "items"}},
    "sequences": {"history": WORDS | {"table": "items", "max_length": 5}},
    "crosses": {"user_x_item": {"of": ["user", "item"], "num_buckets": 50}},
}
ROWS = [
    {
        "click": int(n % 5 < 2),
        "price": float(n % 7),
        "user": n % 11,
        "item": n % 9,
        "history": [(n * k) % 9 for k in range(n % 5)],
    }
    for n in range(300)
]
SCORING = ("wide_deep", "deepfm", "dcn_v2", "dlrm", "din")


@pytest.mark.slow
@pytest.mark.parametrize("family", SCORING)
@pytest.mark.parametrize("feature", ["price", "user", "item", "history", "user_x_item"])
def test_a_family_that_scores_uses_every_feature(tmp_path: Path, family: str, feature: str) -> None:
    assembly, _ = ready(tmp_path, family, {"data.schema": SCHEMA, "data.eval_fraction": 0.0}, ROWS)
    model: Any = assembly.loop.model
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    batch = assembly.loop.task._dataset.train.batch(np.arange(40))  # type: ignore[attr-defined]
    inputs = inputs_of(batch, model.requests)
    vectors = model.vectors(inputs)
    # Rows of the wide part begin at zero: what is changed is what they are multiplied by.
    leaves = {
        name: value.detach().clone().requires_grad_() for name, value in vectors.items() if value.is_floating_point()
    }
    dense = inputs["dense"].clone().requires_grad_()
    model.network(dense, {**vectors, **leaves}, None).sum().backward()
    if feature == "price":
        assert dense.grad is not None and dense.grad.any()
        return
    grads = {
        lookup.name: leaves[lookup.name].grad
        if lookup.pooling != "each"
        else leaves[lookup.name].grad[:, lookup.features.index(feature)]  # type: ignore[index]
        for lookup in model.requests.lookups
        if feature in lookup.features
    }
    assert grads and all(grad is not None and grad.any() for grad in grads.values())


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_sequence_without_a_place_of_its_own_is_the_mean_of_its_vectors(tmp_path: Path, pooling: str) -> None:
    choices = {"data.schema": SCHEMA, "data.eval_fraction": 0.0, "tables.pooling": pooling}
    assembly, _ = ready(tmp_path, "dlrm", choices, ROWS)
    model: Any = assembly.loop.model
    batch = assembly.loop.task._dataset.train.batch(np.arange(40))  # type: ignore[attr-defined]
    (lookup,) = model.requests.lookups
    found = model.vectors(inputs_of(batch, model.requests))["deep"][:, lookup.features.index("history")]
    sequence = batch.sequences["history"]
    assert 0 in sequence.lengths and sequence.lengths.max() == 4
    for row, length in enumerate(sequence.lengths.tolist()):
        ids = sequence.ids[row, :length]
        request = model.requests.request_of("deep", "item", ids)
        (key,) = request
        rows = model.tables(request)[key].view(length, lookup.dim)
        expected = rows.sum(0) / max(length, 1)
        torch.testing.assert_close(found[row], expected)


def test_one_sequence_is_enough_to_learn_from(tmp_path: Path) -> None:
    rows = [{"click": int(n % 4 == 0), "history": [n % 4 + 4 * k for k in range(3)]} for n in range(600)]
    schema = {"label": {"name": "click"}, "sequences": {"history": WORDS}}
    assembly, losses = ready(tmp_path, "wide_deep", {"data.schema": schema, "trainer.max_steps": 40}, rows)
    assembly.loop.train()
    assert numbers(losses, "eval/auc")[-1] == 1.0


def test_the_used_features_are_logged_and_those_that_are_not_named(tmp_path: Path) -> None:
    assembly, told = ready(tmp_path, "wide_deep", {"data.schema": SCHEMA, "trainer.max_steps": 2}, ROWS)
    assembly.loop.train()
    events = [line["message"] for line in told.lines if line.get("event") == "features"]
    assert events == [
        "wide_deep uses numeric price; categorical user, item; crosses user_x_item; "
        "sequences history (mean of its vectors)"
    ]
    shape = sample_shape(assembly.loop.model.encoder)  # type: ignore[arg-type]
    towers = recommender_of({"family": "two_tower", "user": ["user"], "item": ["item"]})
    assert used_features(towers, shape).endswith("; not used: price, user_x_item, history")
    assert used_features(recommender_of({"family": "din"}), shape).endswith("sequences history")
    assert "not used: price, user, item" in used_features(recommender_of({"family": "sasrec"}), shape)


@pytest.mark.slow
def test_a_feature_that_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    towers = {"model.user": ["user_x_item"], "model.item": ["item"]}
    with pytest.raises(ConfigError, match=r"user_x_item[^$]*other than crosses"):
        ready(tmp_path, "two_tower", {"data.schema": SCHEMA, **towers}, ROWS)
    apart = {**SCHEMA, "sequences": {"history": WORDS}}
    with pytest.raises(ConfigError, match=r"history is a history of: user, item[^$]*model.targets=.history: FEATURE"):
        ready(tmp_path, "din", {"data.schema": apart}, ROWS)
    none = {name: part for name, part in SCHEMA.items() if name not in ("sequences", "crosses")}
    with pytest.raises(ConfigError, match="SASRec needs 1 or more features under sequences"):
        ready(tmp_path, "sasrec", {"data.schema": none}, ROWS)
