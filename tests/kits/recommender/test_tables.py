"""Where the tables of a run go on several ranks."""

import pytest
from torch import Tensor

from kitforge.composition import compose_config
from kitforge.data.schedule import shuffled_indices
from kitforge.embedding_cache.sharding.planner import TableLoad
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.config import CacheOptions
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.factory import build_objective
from kitforge.kits.recommender.model import build_request_plan
from kitforge.kits.recommender.tables import assign_sharding, describe_placements, distinct_rows
from kitforge.models.catalog import recommender_of
from tests.kits.recommender.runs import LOG, OPTIONS

KIT = TASKS["recommendation"]

LOADS = {
    "wide": TableLoad(num_rows=1000, dim=1, width=3, distinct=300.0, optimizer="ftrl"),
    "deep_16": TableLoad(num_rows=10**7, dim=16, width=48, distinct=50_000.0, optimizer="lazy_adam"),
    "deep_16_of_user": TableLoad(num_rows=2**63, dim=16, width=48, distinct=90_000.0, optimizer="lazy_adam"),
}


def test_size_and_use_decide_where_nobody_else_does() -> None:
    placed = assign_sharding(LOADS, CacheOptions(placement={"deep_16": "column", "wide": "auto"}), 4)
    assert {name: each.sharding_type for name, each in placed.items()} == {
        "wide": "replicate",
        "deep_16": "column",
        "deep_16_of_user": "row",
    }
    assert (
        describe_placements(placed, LOADS)
        == "wide on all ranks (0.0 MiB), deep_16 by columns (1,831.1 MiB), deep_16_of_user by rows (any number of rows)"
    )
    placed = assign_sharding(LOADS, CacheOptions(placement="table"), 4)
    assert [(each.sharding_type, each.owner) for each in placed.values()] == [("table", 0)] * 3


def test_a_placement_that_cannot_be_is_refused_with_those_that_can() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no table of this network.*deep_15.*deep_16"):
        assign_sharding(LOADS, CacheOptions(placement={"deep_15": "row"}), 2)
    rows_only = {
        name: TableLoad(num_rows=9, dim=2, width=4, distinct=2.0, sharding_types=("row",)) for name in ("wide",)
    }
    with pytest.raises(ConfigError, match=r"(?s)cache\.placement.*replicate.*auto or row"):
        assign_sharding(rows_only, CacheOptions(placement="replicate"), 2)
    assert assign_sharding(rows_only, CacheOptions(), 2)["wide"].sharding_type == "row"


def test_what_a_step_needs_is_counted_in_the_first_one() -> None:
    given = {name: value for name, value in OPTIONS.items() if name != "data.batch_size"}
    for size, replicas in ((100, 1), (100, 2), (1200, 1)):
        choices = {"model": "wide_deep", **given, "data.batch_size": size, "parallel.data": replicas}
        options = KIT.read_options(compose_config("recommendation", choices).values)
        config, dataset = recommender_of(options.model), load_dataset(LOG, None, options.data, 0, None)
        found = distinct_rows(config, options, dataset, build_objective(config, options, dataset))
        rows = dataset.train_rows()
        first = shuffled_indices(0, rows.num_rows, 0, min(size // replicas, rows.num_rows), shuffle=True)
        (request,) = build_request_plan(config, dataset.encoder).requests(rows.batch(first), ["wide"]).values()
        assert isinstance(request, Tensor)
        assert found["wide"] == len(request.unique())
        assert found["deep_4"] > 0
