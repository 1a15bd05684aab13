"""Tables of comma- or tab-separated values are files of rows for every task that reads rows."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.template import template_of
from kitforge.data.source import open_rows, open_source
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError
from tests.kits.transformers import test_classification as texts

TOKENIZER = ByteTokenizer()
HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ".tsv" in path.name else ",")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def rows_of(path: object) -> list[Any]:
    return [row for shard in open_rows(path) for _, row in shard.rows()]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_cells_are_texts_and_empty_ones_no_value(name: str, tmp_path: Path) -> None:
    given = [{"prompt": 'a, "b"\nc\td', "answer": "007"}, {"prompt": "True", "answer": ""}]
    assert rows_of(write(tmp_path / name, given)) == [given[0], {"prompt": "True", "answer": None}]


ROWS: dict[str, list[dict[str, Any]]] = {
    "demonstrations": [
        {"prompt": "Q", "completion": "yes", "system": "", "history": "", "tools": ""},
        {"prompt": "Q", "completion": "yes", "system": "Be kind.", "history": '[["a", "b"]]', "tools": ""},
        {"prompt": json.dumps([HI]), "completion": json.dumps([YO]), "system": "", "history": "", "tools": ""},
    ],
    "pairs": [
        {"prompt": "Q", "chosen": "yes", "rejected": "no", "margin": "0.5"},
        {"prompt": json.dumps([HI]), "chosen": json.dumps([YO]), "rejected": json.dumps([HI | YO]), "margin": "-1e-1"},
    ],
    "unpaired": [
        {"prompt": "Q", "completion": "yes", "label": label} for label in ("True", "false", "TRUE", "0", "1", "FALSE")
    ],
    "prompts": [{"prompt": "Q", "answer": "18"}, {"prompt": json.dumps([HI]), "answer": "1.50"}],
}


def typed(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row as a JSON file has it."""
    found = {name: value for name, value in row.items() if value != ""}
    if kind == "pairs":
        found["margin"] = float(row["margin"])
    if kind == "unpaired":
        found["label"] = row["label"].lower() in ("true", "1")
    return found


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_rows_of_a_table_are_what_rows_of_json_are(kind: str, suffix: str, tmp_path: Path) -> None:
    given = ROWS[kind]
    if kind == "pairs":
        given[1]["rejected"] = json.dumps([{**YO, "content": "no"}])
    reader = ChatDatasetReader(TOKENIZER, template_of(TOKENIZER))
    read = getattr(reader, kind)
    found = list(read(write(tmp_path / f"rows.{suffix}", given)))
    wanted = list(read([typed(kind, row) for row in given]))
    if kind == "prompts":
        found, wanted = ([(each.tokens, each.messages) for each in part] for part in (found, wanted))
    assert found == wanted


@pytest.mark.parametrize(
    ("column", "value"), [("label", "good"), ("label", "2"), ("margin", "much"), ("margin", "nan")]
)
def test_a_cell_that_is_no_verdict_or_number_is_refused_with_its_line(column: str, value: str, tmp_path: Path) -> None:
    kind = "unpaired" if column == "label" else "pairs"
    path = write(tmp_path / "rows.csv", [{**ROWS[kind][0], column: value}])
    with pytest.raises(DataError, match=r"rows\.csv:2"):
        list(getattr(ChatDatasetReader(TOKENIZER, template_of(TOKENIZER)), kind)(path))


def test_a_table_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match=r"rows\.csv:1 names a column twice"):
        rows_of(str(tmp_path / "rows.csv"))


def test_a_file_of_texts_names_the_kinds_of_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(DataError, match=r"(?s)holds texts.*\.jsonl \.json \.csv \.tsv \.parquet"):
        rows_of(str(tmp_path / "rows.txt"))


def test_a_table_of_labelled_texts_trains_a_classifier(tmp_path: Path) -> None:
    given = [{"text": f"text {number}", "label": ("bad", "good")[number % 2]} for number in range(12)]
    path = write(tmp_path / "rows.csv", given)
    model = texts.run(tmp_path / "run", {"trainer.max_steps": 1}, train_dataset=path).loop.model
    assert model.labels == ("bad", "good")


@given(st.data(), st.integers(1, 5))
def test_columns_are_rows(draws: st.DataObject, length: int) -> None:
    messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3)}), max_size=2)
    kinds = {"messages": messages, "text": st.text(max_size=3), "label": st.integers(0, 9), "margin": st.none()}
    columns = {name: draws.draw(st.lists(kind, min_size=length, max_size=length)) for name, kind in kinds.items()}
    wanted = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert [row for shard in open_rows(columns) for _, row in shard.rows()] == wanted
    assert list(datasets.Dataset.from_dict({**columns})) == wanted
    as_arrays = {**columns, "label": np.array(columns["label"])}
    assert [row for shard in open_rows(as_arrays) for _, row in shard.rows()] == wanted
    if any(columns["text"]):
        assert list(open_source(columns).documents()) == list(filter(None, columns["text"]))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"(?s)not equally long.*got:.*a: 2, b: 1.*expected:.*do:"):
        rows_of({"a": [1, 2], "b": [1]})
    # What is no column is no corpus, as before: parts of a data set by their names.
    with pytest.raises(DataError, match="one of its values"):
        rows_of({"train": object()})


ODD = ["dialog", "msgs", "conversation", "turns", "Messages", "content", "promt", "zzz"]


@settings(max_examples=60)
@given(st.sampled_from(ODD), st.sampled_from(["messages", "sharegpt", "json", "text"]), st.booleans())
@pytest.mark.parametrize("kind", ["demonstrations", "prompts", "pairs"])
def test_a_missing_column_is_looked_for_by_what_the_others_hold(
    kind: str, name: str, written: str, has_id: bool
) -> None:
    says: dict[str, Any] = {
        "messages": [HI, YO],
        "sharegpt": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
        "json": json.dumps([HI, YO]),
        "text": "hello",
    }
    row = {**({"id": 7, "score": 0.5} if has_id else {}), name: says[written]}
    reader = ChatDatasetReader(TOKENIZER, template_of(TOKENIZER))
    with pytest.raises(DataError, match=r"(?s)has no column.*got:.*expected:.*do:") as told:
        list(getattr(reader, kind)([row]))
    fix = str(told.value).partition("do:")[2]
    assert name in fix and " id" not in fix and "score" not in fix
    option = re.search(r"data\.columns\.(\w+)=(\S+)", fix)
    assert option is not None
    if written != "text":
        assert option[2] == name
        if kind == "demonstrations":
            # The advice is taken.
            assert list(ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), {option[1]: name}).demonstrations([row]))
