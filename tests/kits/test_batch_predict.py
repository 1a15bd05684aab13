"""Lines that `predict` writes are those that pandas writes of the same rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kitforge.foundation.errors import DataError
from kitforge.kits.batch_predict import predict_rows

NUMBERS = st.sampled_from([0.0, -1.5, 2.0**20, float("nan"), float("inf"), float("-inf")])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def written(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    target = folder / "out.jsonl"
    target.unlink(missing_ok=True)
    data, trainer = SimpleNamespace(eval="rows.jsonl"), SimpleNamespace(progress=False)
    options: Any = SimpleNamespace(
        checkpoint=str(folder), output=str(target), overwrite=False, data=data, trainer=trainer, device="cpu"
    )
    predict_rows(options, [rows], lambda *_: nn.Identity(), lambda _, __: lambda part: iter(part))
    return target.read_text().split("\n")[:-1]


@given(st.lists(st.fixed_dictionaries({"a": NUMBERS, "b": TEXTS}), min_size=1, max_size=4))
def test_numbers_that_json_has_not_are_null_as_of_pandas(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    wanted = pd.DataFrame(rows).to_json(orient="records", lines=True).split("\n")[:-1]
    found = written(tmp_path_factory.mktemp("rows"), rows)
    assert [json.loads(line) for line in found] == [json.loads(line) for line in wanted]
    assert not any("NaN" in line or "Infinity" in line for line, row in zip(found, rows, strict=True) if not row["b"])


@pytest.mark.parametrize("value", [b"bytes", "\ud800", object()], ids=["bytes", "surrogate", "object"])
def test_what_no_line_can_hold_is_refused_in_words(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match="cannot be written as JSON"):
        written(tmp_path, [{"a": value}])
    assert not (tmp_path / "out.jsonl").exists()
