"""Tables of comma- or tab-separated values are files of rows for every task that reads rows."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.template import template_of
from kitforge.data.source import open_rows
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


def rows_of(path: str) -> list[Any]:
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
