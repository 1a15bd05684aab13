"""Only replies are learnt, whatever they are packed with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.data.chat.datasets import TokenizedExample
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.batching import input_tokens, pack_examples, pad_examples
from tests.kits.rlhf import runs

RESPONSES = [
    TokenizedExample(tokens=tuple(range(size)), loss_mask=tuple(place >= size // 2 for place in range(size)))
    for size in (9, 3, 4, 2, 9, 5)
]


def evaluated(choices: dict[str, Any], **inputs: Any) -> float:
    assembly = runs.begin("sft", None, choices, model=runs.network(torch.float64), **inputs)
    with torch.no_grad():
        return assembly.loop.task.evaluate(assembly.loop.model)["eval/loss"]


def test_tokens_are_counted_that_are_read_and_not_the_filling() -> None:
    wanted = sum(len(each.tokens) for each in RESPONSES)
    wide = [pack_examples(RESPONSES, 99), pack_examples(RESPONSES, 99, packing=False), pad_examples(RESPONSES, 99)]
    assert [int(input_tokens([each])) for each in wide] == [wanted] * 3
    assert int(input_tokens([pad_examples([], 99)])) == 0
    # Two micro-batches are one batch.
    assert int(input_tokens([pad_examples(RESPONSES[:2], 99), pad_examples(RESPONSES[2:], 99)])) == wanted


@pytest.mark.parametrize("task", ["sft", "dpo", "reward", "kto"])
def test_every_stage_over_rows_says_how_many_tokens_it_reads(task: str, tmp_path: Path) -> None:
    runs.finish(runs.begin(task, tmp_path, {"trainer.max_steps": 1}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    line = next(each for each in lines if each["kind"] == "train")
    assert line["time/input_tokens_per_second"] > line.get("time/tokens_per_second", 0) >= 0


@pytest.mark.parametrize("pad_id", [0, 3, 257])
def test_neither_the_filling_nor_the_batch_size_is_seen(pad_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = evaluated({"data.batch_size": 1, "packing": False})
    monkeypatch.setattr(ByteTokenizer, "pad_id", pad_id)
    for choices in ({"data.batch_size": 5}, {"data.batch_size": 5, "packing": False}, {"trainer.micro_batch_size": 1}):
        assert evaluated(choices) == pytest.approx(wanted, abs=1e-12)


def test_an_end_that_also_fills_rows_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where pad = eos, DeepSpeed-Chat masks the end by its number, and models never learn to stop.
    assembly = runs.begin("sft", None, {"packing": False})
    monkeypatch.setattr(ByteTokenizer, "pad_id", ByteTokenizer.eos_id)
    filled = runs.begin("sft", None, {"packing": False})
    ends = [
        sum(
            int((part["targets"] == ByteTokenizer.eos_id).sum())
            for part in runs.first_step(each.loop.task, each.loop.model)
        )
        for each in (assembly, filled)
    ]
    assert ends == [4, 4]


def test_packed_rows_hold_every_response_once_and_no_token_twice() -> None:
    rows = pack_examples(RESPONSES, pad_id=99)
    assert rows["tokens"].shape == (4, 9)
    assert int(rows["members"].sum()) == len(RESPONSES)
    found = sorted(
        tuple(row[documents == document].tolist())
        for row, documents in zip(rows["tokens"], rows["documents"], strict=True)
        for document in documents.unique()
        if 99 not in row[documents == document]
    )
    assert len(found) >= 4
    alone = pad_examples(RESPONSES, pad_id=99)
    assert sorted(rows["targets"][rows["targets"] >= 0].tolist()) == sorted(
        alone["targets"][alone["targets"] >= 0].tolist()
    )


def test_the_token_after_a_prompt_is_the_first_that_is_learnt() -> None:
    # volcengine/verl #3287 was off by one here.
    row = pad_examples([TokenizedExample(tokens=(5, 6, 7, 8), loss_mask=(False, False, True, True))], pad_id=0)
    assert row["targets"].tolist() == [[-100, 7, 8, -100]]


def test_a_run_goes_on_over_the_rows_it_began_with() -> None:
    assembly = runs.begin("sft")
    other = runs.begin("sft", None, train_dataset=runs.DEMONSTRATIONS[1:])
    with pytest.raises(ConfigError, match="training rows"):
        assembly.loop.task.load_state(other.loop.task.state())
