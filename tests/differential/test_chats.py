"""Rows of conversations, however they are stored, as tokens and labels: as transformers' chat templates make them."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import datasets
import pyarrow as pa
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.rows import FLAGS
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from tests.data.chat.cases import CHATML, THINKING, TRAINING, assistant, save_tokenizer, user
from tests.differential.drawn import drawn

TEMPLATES = {"plain": CHATML, "tools": THINKING, "marked": TRAINING}
STORED = ("list", "jsonl", "dataset", "json features", "parquet")
TEXT = st.text(alphabet="ab Z.é漢😀\n'{", min_size=1, max_size=8).filter(str.strip)
# One type for each key: a column of Arrow has one.
ARGUMENTS = st.fixed_dictionaries({}, optional={"a": TEXT, "b": st.integers(0, 9), "c": st.lists(TEXT, max_size=2)})


@cache
def folder(kind: str) -> Path:
    return save_tokenizer(Path(mkdtemp()), "bytes", TEMPLATES[kind])


@cache
def tokenizers_of(kind: str) -> tuple[ChatDatasetReader, transformers.PreTrainedTokenizerFast]:
    ours = HuggingFaceTokenizer(folder(kind))
    return ChatDatasetReader(ours, template_of(ours)), transformers.PreTrainedTokenizerFast.from_pretrained(
        folder(kind)
    )


@st.composite
def talks(draw: Any, kind: str) -> dict[str, Any]:
    """A row: turns of user and assistant, of which replies may have calls, and flags that leave them out."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXT)), assistant(draw(TEXT))]
        if kind == "marked":
            flag = draw(st.sampled_from([{}, {"weight": 0}, {"train": True}, {"loss": False}]))
            messages[-1] |= flag
        if kind != "plain" and draw(st.booleans()):
            function = {"name": "f", "arguments": {"x": 1} | draw(ARGUMENTS)}
            messages[-1]["tool_calls"] = [{"type": "function", "function": function}]
    properties = {name: {"type": "string"} for name in draw(st.sets(st.sampled_from("pqr"), min_size=1))}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    messages[-1] = {name: value for name, value in messages[-1].items() if name not in ("weight", "loss")}
    return {"messages": messages} | ({} if kind == "plain" else {"tools": [tool]})


def without_nulls(value: Any) -> Any:
    """`remove_none_values` of TRL."""
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return value


def stored(rows: list[dict[str, Any]], how: str) -> tuple[Any, list[dict[str, Any]]]:
    """The rows as a corpus, and as the library that stores them gives them back."""
    path = Path(mkdtemp()) / ("rows.jsonl" if how == "jsonl" else "rows.parquet")
    if how == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if how in ("list", "jsonl"):
        return (rows if how == "list" else path), rows
    dataset = datasets.Dataset.from_list(rows)
    if how == "json features" and "tools" in rows[0]:
        features = datasets.Features({**dataset.features, "tools": datasets.List(datasets.Json())})
        dataset = datasets.Dataset.from_list(rows, features=features)
    if how == "dataset":
        return dataset, without_nulls(dataset.to_list())
    parquet.write_table(dataset.data.table if how == "json features" else pa.Table.from_pylist(rows), path)
    return path, without_nulls([*dataset])


def wanted(peer: Any, row: dict[str, Any], kind: str) -> tuple[list[int], list[bool] | None]:
    """Tokens, and those of the replies that are trained on where the template marks replies."""
    messages = [
        {name: each[name] for name in each if name not in ("weight", "train", "loss")} for each in row["messages"]
    ]
    found = peer.apply_chat_template(
        messages, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=kind == "marked"
    )
    if kind != "marked":
        return found["input_ids"], None
    replies = [each for each in row["messages"] if each["role"] == "assistant"]
    is_trained = [all(each.get(name) in (None, 1) for name in FLAGS) for each in replies]
    mask, number, was = [], -1, 0
    for each in found["assistant_masks"]:
        number += each > was
        was = each
        mask.append(bool(each and is_trained[number]))
    return found["input_ids"], mask


@drawn(60)
@given(st.data())
def test_rows_give_the_tokens_and_labels_of_transformers(data: st.DataObject) -> None:
    kind, how = data.draw(st.sampled_from([*TEMPLATES])), data.draw(st.sampled_from(STORED))
    rows = data.draw(st.lists(talks(kind), min_size=1, max_size=3))
    reader, peer = tokenizers_of(kind)
    spec, given_back = stored(rows, how)
    found = list(reader.demonstrations(spec))
    assert len(found) == len(rows)
    for example, row in zip(found, given_back, strict=True):
        tokens, mask = wanted(peer, row, kind)
        assert list(example.tokens) == tokens
        assert mask is None or list(example.loss_mask) == mask
