"""A network with dropout on: the same noise however its batch is split and whatever is computed twice."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.attention.reference import probabilities
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.attention import Attention, AttentionConfig
from kitforge.core.nn.context import Context, DropoutKey, DropoutShard, dropout, dropout_name_key
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.positions import PositionEncoding
from tests.core.nn.networks import BLOOM, GLM, GPT2, LLAMA, PANGU_ALPHA, VOCAB, build, distance, gradients

CONFIGS: dict[str, FamilyConfig] = {
    "gpt2": replace(GPT2, embedding_dropout=0.1, attention_dropout=0.2, residual_dropout=0.3),
    "pangu_alpha": replace(PANGU_ALPHA, embedding_dropout=0.1, attention_dropout=0.2, residual_dropout=0.3),
    "bloom": replace(BLOOM, attention_dropout=0.2, residual_dropout=0.3),
    "llama": replace(LLAMA, attention_dropout=0.2, sliding_window=3),
    "glm": replace(GLM, attention_dropout=0.2),
}
SAMPLES = (10, 11, 12, 13, 14)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (len(SAMPLES), 7), generator=torch.Generator().manual_seed(1))


def loss_of(model: Decoder, rows: slice, step: int = 0) -> Tensor:
    """The loss of some rows of the batch, summed."""
    ids = tokens()[rows]
    context = Context(dropout=DropoutKey(seed=0, step=step, samples=SAMPLES[rows]))
    hidden = model.hidden(ids, context)[:, :-1].flatten(0, 1)
    return model.kernels.linear_cross_entropy(hidden, model.head_weight, ids[:, 1:].flatten())


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_equal_one_batch(name: str, level: CompileLevel) -> None:
    model = build(CONFIGS[name], level)
    whole = loss_of(model, slice(0, 5))
    parts = torch.stack([loss_of(model, slice(start, start + 2)) for start in (0, 2, 4)]).sum()
    assert distance(parts, whole) < 1e-12
    assert distance(gradients(model, parts), gradients(model, whole)) < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_noise_that_followed_the_place_in_the_micro_batch_would_show(name: str) -> None:
    model, rows = build(CONFIGS[name]), slice(2, 4)
    ids = tokens()[rows]
    right = model(ids, Context(dropout=DropoutKey(seed=0, step=0, samples=SAMPLES[rows])))
    wrong = model(ids, Context(dropout=DropoutKey(seed=0, step=0, samples=SAMPLES[:2])))
    assert distance(wrong, right) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_has_noise_of_its_own(name: str) -> None:
    model = build(CONFIGS[name])
    losses = [loss_of(model, slice(0, 5), step=step) for step in (0, 1, 0)]
    assert torch.equal(losses[0], losses[2])
    assert not torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_pass_without_a_key_drops_nothing(name: str) -> None:
    model = build(CONFIGS[name])
    rates = ("embedding_dropout", "attention_dropout", "residual_dropout")
    off = {each: 0.0 for each in rates if hasattr(CONFIGS[name], each)}
    without = build(replace(CONFIGS[name], **off))  # type: ignore[type-var]
    assert torch.equal(model(tokens()), without(tokens()))


@pytest.mark.parametrize("name", CONFIGS)
def test_with_a_key_that_drops_nothing_the_network_is_the_same(name: str) -> None:
    model = build(replace(CONFIGS[name], attention_dropout=1e-15))  # type: ignore[type-var]
    plain = {each: 0.0 for each in ("embedding_dropout", "residual_dropout") if hasattr(CONFIGS[name], each)}
    model = build(replace(model.config, **plain))  # type: ignore[type-var]
    context = Context(dropout=DropoutKey(seed=0, step=0, samples=SAMPLES))
    assert distance(model(tokens(), context), model(tokens())) < 1e-12


@pytest.mark.parametrize("place", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_each_place_of_dropout_is_alive(place: str) -> None:
    model = build(replace(GPT2, **{place: 0.3}))
    context = Context(dropout=DropoutKey(seed=0, step=0, samples=SAMPLES))
    assert distance(model(tokens(), context), model(tokens())) > 1e-3


def test_no_two_places_of_a_network_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[int] = []

    def spy(_: DropoutKey, name: str | Tensor, shape: torch.Size, _rate: float, _device: torch.device) -> Tensor:
        names.append(int(dropout_name_key(name) if isinstance(name, str) else name))
        return torch.ones(shape, dtype=torch.bool)

    monkeypatch.setattr(DropoutKey, "mask", spy)
    loss_of(build(CONFIGS["gpt2"]), slice(0, 5))
    assert len(names) == len(set(names)) == 1 + 3 * GPT2.num_layers


def test_attention_dropout_is_of_the_weights() -> None:
    config = AttentionConfig(dim=8, num_heads=4, num_kv_heads=2, head_dim=2, dropout=0.4)
    attention = Attention(config, 3, select("O1")).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    input = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    key = DropoutKey(seed=0, step=0, samples=(4, 5))
    query, keys, values = (
        layer(input).view(2, 5, -1, 2).transpose(1, 2) for layer in (attention.query, attention.key, attention.value)
    )
    weights = probabilities(query, keys, mask=None, causal=True, scale=2**-0.5)
    kept = dropout(weights, 0.4, "attention.3", key)
    wanted = attention.out((kept @ values.repeat_interleave(2, dim=1)).transpose(1, 2).flatten(2))
    assert distance(attention(input, PositionEncoding(), Context(dropout=key)), wanted) < 1e-12


@pytest.mark.parametrize(("shape", "share"), [((2, 6, 3), "sequence"), ((2, 4, 3, 3), "heads")])
def test_the_masks_of_all_shares_are_the_whole_mask(shape: tuple[int, ...], share: str) -> None:
    key, parts = DropoutKey(seed=0, step=1, samples=(4, 9)), 2
    whole = key.mask("a", torch.Size(shape), 0.5, torch.device("cpu"))
    piece = torch.Size((shape[0], shape[1] // parts, *shape[2:]))
    shares = [replace(key, shard=DropoutShard(**{share: (index, parts)})) for index in range(parts)]
    masks = [each.mask("a", piece, 0.5, torch.device("cpu")) for each in shares]
    assert torch.equal(torch.cat(masks, dim=1), whole)
