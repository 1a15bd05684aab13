"""A batch of whole rows has no column of documents."""

import torch

from kitforge.data.collate import drop_trivial_columns


def batch(num_rows: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(num_rows * 3).view(num_rows, 3),
        "documents": torch.zeros(num_rows, 3, dtype=torch.int32),
    }


def test_rows_of_one_document_each_need_no_documents() -> None:
    assert set(drop_trivial_columns(batch(2))) == {"tokens"}


def test_a_row_of_two_documents_keeps_them() -> None:
    mixed = batch(2)
    mixed["documents"][1, 2] = 1
    assert set(drop_trivial_columns(mixed)) == {"tokens", "documents"}


def test_a_batch_without_documents_stays_as_it_is() -> None:
    assert set(drop_trivial_columns({"tokens": torch.zeros(1)})) == {"tokens"}
