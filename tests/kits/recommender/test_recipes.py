"""The recipes of others: their sizes, and that each trains on rows of the form that it is for."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from kitforge.composition import compose_config
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.model import build_request_plan
from kitforge.models.catalog import recommender_of
from kitforge.trainer.run_folder import train
from tests.distributed.training import Losses, TestRendezvous
from tests.kits.recommender.runs import numbers

KIT = TASKS["recommendation"]

NUM_ROWS = 60
RECIPES = ("wide_deep_mindspore", "wide_deep_recipe", "hugectr_wdl", "dlrm_dcnv2_mlperf")


def rows_for(recipe: str, folder: Path) -> Path:
    """Rows as Criteo has them, or with lists of ids where the recipe asks for bags."""
    random = np.random.default_rng(0)
    values, ids = random.integers(0, 99, (NUM_ROWS, 13)), random.integers(0, 2**32, (NUM_ROWS, 26))
    if recipe != "dlrm_dcnv2_mlperf":
        lines = [
            "\t".join([str(row % 2), *map(str, values[row]), *(f"{each:08x}" for each in ids[row])])
            for row in range(NUM_ROWS)
        ]
        (folder / "day_0.tsv").write_text("\n".join(lines) + "\n")
        return folder / "day_0.tsv"
    columns: dict[str, Any] = {"label": np.arange(NUM_ROWS) % 2}
    columns |= {f"I{place + 1}": values[:, place] for place in range(13)}
    columns |= {f"C{place + 1}": [ids[row, : row % 3 + 1] for row in range(NUM_ROWS)] for place in range(26)}
    parquet.write_table(pyarrow.table(columns), folder / "day_0.parquet")
    return folder / "day_0.parquet"


def options_of(recipe: str, rows: Path, **choices: Any) -> Any:
    given = {"recipe": recipe, "data.train": str(rows), "data.cache": str(rows.parent / "cache"), "device": "cpu"}
    return KIT.read_options(compose_config("recommendation", given | choices).values)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_rows_of_its_form(recipe: str, tmp_path: Path) -> None:
    rows = rows_for(recipe, tmp_path)
    small = {"model.top": [8], "model.bottom": [8], "model.rank": 4} if "dlrm" in recipe else {"model.hidden": [8]}
    more = {"data.batch_size": 20, "trainer.max_steps": 3, "trainer.progress": False, "model.dim": 4}
    options, told = options_of(recipe, rows, **small, **more, output_dir=str(tmp_path / "run")), Losses()
    assembly = KIT.assemble(options, Inputs(callbacks=[told]), TestRendezvous(options.parallel))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    assert len(numbers(told, "loss")) == 3


@pytest.mark.slow
def test_recipes_have_the_sizes_that_are_told_of_them(tmp_path: Path) -> None:
    found = {}
    for recipe in RECIPES:
        rows = rows_for(recipe, tmp_path)
        options = options_of(recipe, rows)
        dataset = load_dataset(str(rows), None, options.data, 0, None)
        plan = build_request_plan(recommender_of(options.model), dataset.encoder)
        tables = {name: table.num_rows for name, table in plan.tables.items()}
        rule = options.tables.optimizer_of("deep")
        found[recipe] = (options.data.batch_size, tables, rule.name, rule.learning_rate, options.tables.wide.name)
    assert found["wide_deep_mindspore"] == (
        16_000, {"wide": 5_860_000, "deep_16": 5_860_000}, "lazy_adam", 3.5e-4, "ftrl"
    )  # fmt: skip
    assert found["wide_deep_recipe"] == (16_000, {"wide": 200_000, "deep_80": 200_000}, "lazy_adam", 3.5e-4, "ftrl")
    assert found["hugectr_wdl"] == (16_384, {"wide": 2_000_000, "deep_16": 2_600_000}, "adam", 1e-3, "adam")
    size, tables, *rule = found["dlrm_dcnv2_mlperf"]
    assert (size, rule[:2]) == (65_536, ["adagrad", 0.005])
    assert tables == {f"deep_128_of_C{number}": None for number in range(1, 27)}
