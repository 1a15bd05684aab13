from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from tests.core.nn.networks import CONFIGS, GPT2, MIXTURES, VOCAB, build, distance, documents_of, packed


def tokens(length: int = 7) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_is_a_causal_language_model(name: str) -> None:
    model = build(CONFIGS[name])
    assert isinstance(model, CausalLM)
    hidden = model.hidden(tokens())
    assert hidden.shape == (2, 7, model.geometry.dim)
    assert torch.equal(model(tokens()), model.head(hidden))
    assert torch.equal(model.head(hidden), hidden @ model.head_weight.t())


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_may_have_no_row(name: str, level: CompileLevel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build(CONFIGS[name], level, dtype)
        logits = model(torch.empty(0, 5, dtype=torch.int64))
        assert logits.shape == (0, 5, VOCAB)
        logits.sum().backward()
        assert not any(each.grad is not None and each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_does_not_see_those_after_it(name: str) -> None:
    model, ids = build(CONFIGS[name]), tokens()
    before = model(ids)
    ids[:, 5] = (ids[:, 5] + 1) % VOCAB
    after = model(ids)
    assert (after[:, :5] - before[:, :5]).abs().max() <= (1e-12 if name in MIXTURES else 0)
    assert not torch.equal(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("name", ["dynamic", "llama", "glm"])
def test_rotary_positions_go_on_beyond_the_trained_length(name: str) -> None:
    assert torch.isfinite(build(CONFIGS[name])(tokens(40))).all()


def test_learned_positions_end_with_their_table() -> None:
    model = build(GPT2)
    assert model(tokens(16)).shape == (2, 16, VOCAB)
    with pytest.raises(ConfigError, match=r"got: +17\n.*max_length=16"):
        model(tokens(17))


def test_given_positions_end_with_the_table_too() -> None:
    model = build(GPT2)
    assert model(tokens(1), Context(positions=torch.tensor([15]))).shape == (2, 1, VOCAB)
    with pytest.raises(ConfigError, match=r"got: +17\n.*max_length=16"):
        model(tokens(1), Context(positions=torch.tensor([16])))


def test_a_row_may_be_longer_than_the_table_when_its_documents_are_not() -> None:
    model, documents = build(GPT2), documents_of(12, 11)
    ids, context = packed(documents)
    assert torch.isfinite(model(ids, context)).all()


@pytest.mark.parametrize("name", ["vocab_size", "num_layers"])
def test_a_network_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)model\.{name}.*a whole number from 1"):
        Decoder(replace(GPT2, **{name: 0}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_stays_near_the_exact_logits(name: str, dtype: torch.dtype) -> None:
    wanted = build(CONFIGS[name])(tokens())
    model = build(CONFIGS[name], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    assert distance(logits.double(), wanted) < 5e-2
