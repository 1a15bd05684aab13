"""What is learnt of rows is printed as text, for every task that learns from rows."""

import json
from pathlib import Path

import pytest

from kitforge.cli import main as cli
from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.template import template_of
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.inspection import loss_mask_lines
from tests.data.chat.cases import CALL, THINKING, TOOL, assistant, save_tokenizer, user
from tests.tokenizer_kinds import tokenizer_of

ROWS = {
    "sft": {"prompt": "a", "completion": "b"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": False},
    "grpo": {"prompt": "a"},
}
WANTED = {
    "sft": ["row 1: 3 tokens, 2 trained", "  context 'a'", "  trained 'b<eos>'"],
    "dpo": [
        "row 1, chosen: 3 tokens, 2 trained",
        "  context 'a'",
        "  trained 'b<eos>'",
        "row 1, rejected: 3 tokens, 2 trained",
        "  context 'a'",
        "  trained 'c<eos>'",
    ],
    "kto": ["row 1, undesirable: 3 tokens, 2 trained", "  context 'a'", "  trained 'b<eos>'"],
    "grpo": ["row 1, prompt: 1 tokens, 0 trained", "  context 'a'"],
}


@pytest.mark.parametrize("task", ROWS)
def test_learnt_tokens_are_printed(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[task]))
    assert cli.run(["inspect", f"task={task}", f"data.train={tmp_path}/rows.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines() == WANTED[task]


@pytest.mark.slow
def test_a_call_is_printed_with_the_tokens_of_its_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(tmp_path, "bytes", THINKING)
    talk = [user("2+2?"), assistant(None, tool_calls=[CALL]), TOOL, assistant("Four")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(9)))
    assert cli.run(["inspect", f"data.train={tmp_path}/rows.jsonl", f"checkpoint={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwei ü"}}\n</tool_call>'
    assert lines[1:5] == [
        "  context " + repr("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        "  trained " + repr("<think>\n\n</think>\n\n" + call + "<|im_end|>\n"),
        "  context " + repr("<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        "  trained " + repr("<think>\n\n</think>\n\nFour<|im_end|>\n"),
    ]
    assert sum(line.startswith("row") for line in lines) == 3


def test_what_has_no_rows_to_learn_from_is_refused(tmp_path: Path) -> None:
    for arguments in (["task=text_generation", "data.train=x"], ["task=sft"], ["a", "b"], []):
        with pytest.raises(ConfigError, match="inspect"):
            cli.run(["inspect", *arguments])


@pytest.mark.parametrize("kind", ["prepend and strip", "sentencepiece"])
def test_spaces_between_context_and_what_is_trained_are_shown(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    row = {"prompt": "He went to", "completion": " the school"}
    rows = ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([row])
    assert list(loss_mask_lines(rows, tokenizer))[2] == f"  trained ' the school{end_of(kind)}'"


def end_of(kind: str) -> str:
    return "<eos>" if kind == "sentencepiece" else "</s>"
