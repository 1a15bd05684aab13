"""Micro-batches are views of their batch, and a batch of whole rows says nothing of documents."""

import pytest
import torch

from kitforge.data.collate import drop_trivial_columns, split_micro_batches
from kitforge.foundation.errors import ConfigError


def batch(num_rows: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(num_rows * 3).view(num_rows, 3),
        "documents": torch.zeros(num_rows, 3, dtype=torch.int32),
    }


@pytest.mark.parametrize(("num_rows", "size", "sizes"), [(6, 2, [2, 2, 2]), (5, 2, [2, 2, 1]), (2, 9, [2]), (0, 2, [])])
def test_a_batch_is_cut_in_order(num_rows: int, size: int, sizes: list[int]) -> None:
    whole = batch(num_rows)
    parts = split_micro_batches(whole, size)
    assert [len(part["tokens"]) for part in parts] == sizes
    assert [row for part in parts for row in part["tokens"].tolist()] == whole["tokens"].tolist()
    assert all(set(part) == set(whole) for part in parts)


def test_micro_batches_are_views() -> None:
    whole = batch(4)
    split_micro_batches(whole, 3)[1]["tokens"][0, 0] = 99
    assert whole["tokens"][3, 0] == 99


def test_tensors_of_different_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        split_micro_batches({"a": torch.zeros(2), "b": torch.zeros(3)}, 1)


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_size"):
        split_micro_batches(batch(2), 0)


def test_rows_of_one_document_each_need_no_documents() -> None:
    assert set(drop_trivial_columns(batch(2))) == {"tokens"}


def test_a_row_of_two_documents_keeps_them() -> None:
    mixed = batch(2)
    mixed["documents"][1, 2] = 1
    assert set(drop_trivial_columns(mixed)) == {"tokens", "documents"}


def test_a_batch_without_documents_stays_as_it_is() -> None:
    assert set(drop_trivial_columns({"tokens": torch.zeros(1)})) == {"tokens"}
