"""BLOOM: isolated documents in packed rows, old folders, and the sizes of the published models."""

import pytest
import torch

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.context import Context
from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import converter_of_type
from tests.models.conftest import GetPeer
from tests.models.variants import converter_and_config, largest_difference, logits_of, ours_from


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_bloom_documents_of_a_packed_row_are_those_of_transformers_alone(level: CompileLevel, peer: GetPeer) -> None:
    # transformers has no packing for BLOOM: its position is the count of the tokens of the row.
    ours, theirs = ours_from(peer("bloom").folder, level), peer("bloom").model
    lengths = [5, 1, 9]
    documents = [torch.arange(length) * 7 % 97 for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    row = torch.cat(documents).unsqueeze(0)
    with torch.no_grad():
        packed = ours(row, Context.packed(positions, numbers))[0].split(lengths)
    for got, document in zip(packed, documents, strict=True):
        assert largest_difference(got, logits_of(theirs, document.unsqueeze(0))[0]) < 1e-5
    contaminated = logits_of(theirs, row)[0].split(lengths)[2]
    assert largest_difference(packed[2], contaminated) > 1e-3


def test_the_keys_of_the_first_checkpoints_are_read(peer: GetPeer) -> None:
    converter, config = converter_and_config(peer("bloom"))
    names = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    old = {names.get(name, name): value for name, value in config.items()}
    assert "hidden_size" not in old
    assert converter.read_config(old) == converter.read_config(config)
    assert converter.read_config(config | {"n_embed": 1, "seq_length": 77}).max_length == 77


def test_another_residual_connection_is_refused(peer: GetPeer) -> None:
    _, config = converter_and_config(peer("bloom"))
    with pytest.raises(ModelError, match="apply_residual_connection_post_layernorm=True"):
        converter_of_type("bloom").read_config(config | {"apply_residual_connection_post_layernorm": True})
