"""Rows that are too long are refused, left out, or cut on the side that was chosen; nothing happens in silence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge.data.chat.datasets import ChatDatasetReader, ExampleKind
from kitforge.data.chat.example_cache import build_example_cache
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError
from kitforge.kits.rlhf.config import ChatDatasetOptions
from kitforge.kits.rlhf.dataset import DatasetSplits, read_examples, read_rows

TOKENIZER = ByteTokenizer()
READER = ChatDatasetReader(TOKENIZER, template_of(TOKENIZER))
SHORT, LONG = {"prompt": "a", "completion": "b"}, {"prompt": "pqrs", "completion": "uvw"}
PAIR = {"prompt": "pqrs", "chosen": "uvw", "rejected": "x"}


def read(
    kind: ExampleKind | None, rows: list[dict[str, Any]], folder: Path, reserved: int = 0, **more: Any
) -> DatasetSplits[Any]:
    def rows_of(spec: object) -> Any:
        return (
            list(READER.prompts(spec)) if kind is None else build_example_cache(READER, TOKENIZER, kind, spec, folder)
        )

    options = ChatDatasetOptions(**{"sequence_length": 5, "eval_fraction": 0.0, **more})
    return read_rows(rows_of, (rows, None), options, seed=0, pad_id=0, reserved=reserved)


def said(response: Any) -> tuple[str, str]:
    """The tokens, and those that are learnt; a bar for the end."""
    letters = np.array(["|" if token == TOKENIZER.eos_id else chr(token) for token in response.tokens])
    return "".join(letters), "".join(letters[np.array(response.loss_mask)])


@pytest.mark.parametrize(("side", "wanted"), [("left", ("suvw|", "uvw|")), ("right", ("pqrsu", "u"))])
def test_demonstrations_are_cut_on_either_side(
    side: str, wanted: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fits = {"prompt": "cd", "completion": "ef"}
    rows = read("demonstrations", [SHORT, LONG, fits], tmp_path, on_too_long=f"cut_{side}")
    assert [said(row) for row in rows.train] == [("ab|", "b|"), wanted, ("cdef|", "ef|")]
    assert f"1 of 3 rows have more than 5 tokens and are truncated on the {side}" in caplog.text


def test_each_response_of_a_pair_is_cut_by_itself(tmp_path: Path) -> None:
    (pair,) = read("pairs", [PAIR], tmp_path, on_too_long="cut_left").train
    assert (said(pair.chosen), said(pair.rejected)) == (("suvw|", "uvw|"), ("qrsx|", "x|"))
    (judged,) = read("unpaired", [{**LONG, "label": True}], tmp_path, on_too_long="cut_right").train
    assert said(judged.completion) == ("pqrsu", "u")


def test_prompts_are_cut_to_leave_room_for_answers(tmp_path: Path) -> None:
    (prompt,) = read(None, [{"prompt": "pqrs", "answer": 4}], tmp_path, reserved=3, on_too_long="cut_left").train
    assert (prompt.tokens, prompt.columns) == ((ord("r"), ord("s")), {"prompt": "pqrs", "answer": 4})
    with pytest.raises(DataError, match="3 are left for the completion"):
        read(None, [{"prompt": "pqrs"}], tmp_path, reserved=3)
    with pytest.raises(DataError, match="too long"):
        read(None, [{"prompt": "pqrs"}], tmp_path, reserved=5, on_too_long="cut_left")
    # The end of a prompt opens the answer.
    with pytest.raises(DataError, match="prompts cut on the right lose what opens the reply"):
        read(None, [{"prompt": "pqrs"}], tmp_path, reserved=3, on_too_long="cut_right")
    assert len(read(None, [{"prompt": "pq"}], tmp_path, reserved=3, on_too_long="cut_right").train) == 1


def test_rows_of_which_nothing_is_left_to_learn_are_refused_or_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "pqrst", "completion": "u"}, LONG]
    with pytest.raises(DataError, match="1 of 2 rows have no trained token after truncation"):
        read("demonstrations", rows, tmp_path, on_too_long="cut_right")
    kept = read("demonstrations", rows, tmp_path, on_too_long="cut_right", on_invalid="skip")
    assert [said(row) for row in kept.train] == [("pqrsu", "u")]
    assert "1 of 2 rows have no trained token" in caplog.text
    # The first token of a row is not predicted from anything.
    with pytest.raises(DataError, match="no trained token"):
        read("demonstrations", [{"text": "abc"}], tmp_path, on_too_long="cut_right", sequence_length=1)
    alike = [{"prompt": "pq", "chosen": "aaab", "rejected": "aaac"}, PAIR]
    with pytest.raises(DataError, match="no trained token"):
        read("pairs", alike, tmp_path, on_too_long="cut_right")


def test_what_is_learnt_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    rows = [SHORT, LONG]
    found = [
        read("demonstrations", rows, tmp_path, **more).fingerprint
        for more in ({"on_too_long": "cut_left"}, {"on_too_long": "cut_right"}, {"on_too_long": "drop"})
    ]
    assert len({*found, read("demonstrations", [SHORT], tmp_path).fingerprint}) == 4
    fits = [read("demonstrations", [SHORT], tmp_path, **more).fingerprint for more in ({}, {"on_too_long": "cut_left"})]
    assert fits[0] == fits[1]


def test_evaluation_rows_are_a_share_of_those_that_fit(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": letter} for letter in "bcdefghij"]
    options = ChatDatasetOptions(sequence_length=5, eval_fraction=0.3, on_too_long="drop")
    cache = build_example_cache(READER, TOKENIZER, "demonstrations", [*rows[:4], LONG, *rows[4:]], tmp_path)
    found = read_rows(lambda _: cache, ([], None), options, seed=0, pad_id=0)
    parts = [said(row)[1][0] for part in (found.train, found.eval) for row in part]
    assert sorted(parts) == list("bcdefghij") and len(found.eval) > 0
    assert [said(row) for row in found.train[:2]] == [said(found.train[number]) for number in (0, 1)]


def test_a_misspelt_column_of_a_source_is_refused_with_the_name_of_the_source() -> None:
    rows = [{"question": f"Q{number}", "completion": "b", "response": "c"} for number in range(4)]
    columns = {"prompt": "question", "completion": "respons"}
    mixture = [{"source": tuple(rows), "weight": 1, "columns": columns}, {"source": rows, "weight": 1}]
    reader = ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), {"prompt": "question"})
    options = ChatDatasetOptions(eval_fraction=0.0, num_workers=1)
    with pytest.raises(DataError, match=r"source .* of the mixture: no row has the column 'respons'") as error:
        read_examples(reader, TOKENIZER, "demonstrations", (mixture, None), options, seed=0)
    assert "did you mean 'response'?" in str(error.value)
