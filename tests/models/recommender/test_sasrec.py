"""SASRec looks back only, at histories only."""

import torch
from torch import Tensor

from kitforge.core.nn.context import DropoutKey
from kitforge.models.sasrec.model import SASRec
from tests.models.recommender.samples import SHAPE, config_of, network_of

CONFIG = config_of("sasrec", dim=8, num_heads=2, num_layers=2, max_length=6)


def items_of(num_samples: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(num_samples, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_state_does_not_see_what_comes_later() -> None:
    network = network_of(CONFIG)
    items = items_of(2, 5)
    lengths = torch.tensor([5, 5])
    states = network(items, lengths)
    changed = items.clone()
    changed[:, 3:] += items_of(2, 2, seed=1)
    later = network(changed, lengths)
    torch.testing.assert_close(later[:, :3], states[:, :3])
    assert not torch.allclose(later[:, 3:], states[:, 3:])


def test_padding_changes_nothing() -> None:
    network = network_of(CONFIG)
    items = items_of(3, 3)
    lengths = torch.tensor([3, 2, 1])
    states = network(items, lengths)
    padded = torch.cat([items, torch.full((3, 3, 8), torch.nan, dtype=torch.float64)], dim=1)
    for row, length in enumerate(lengths.tolist()):
        padded[row, length:] = torch.nan
    padded.requires_grad_()
    longer = network(padded, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(longer[row, :length], states[row, :length])
        torch.testing.assert_close(
            longer[row, :length], network(items[row : row + 1, :length], lengths[row : row + 1])[0]
        )
    longer[torch.arange(3), lengths - 1].sum().backward()
    assert padded.grad is not None and bool(padded.grad.isfinite().all())


def test_the_newest_item_always_has_the_same_position() -> None:
    network = network_of(CONFIG)
    assert isinstance(network, SASRec)
    items = items_of(1, 4)
    with torch.no_grad():
        network.position.weight[1:] = 0.0
    alone = network(items[:, 3:], torch.tensor([1]))
    for block in network.blocks:
        block.attention.out.weight.data.zero_()  # type: ignore[union-attr]
    after_others = network(items, torch.tensor([4]))
    expected = network(items[:, 3:], torch.tensor([1]))
    assert not torch.allclose(alone, expected)
    torch.testing.assert_close(after_others[:, 3], expected[:, 0])


def test_the_last_state_is_that_of_the_last_item() -> None:
    network = network_of(CONFIG)
    assert isinstance(network, SASRec)
    states = network(items_of(2, 4), torch.tensor([4, 2]))
    last = network.last(states, torch.tensor([4, 2]))
    assert torch.equal(last, torch.stack([states[0, 3], states[1, 1]]))


def test_noise_does_not_depend_on_how_a_batch_is_split() -> None:
    network = network_of(CONFIG)
    items, lengths = items_of(4, 3), torch.tensor([3, 1, 2, 3])
    whole = network(items, lengths, DropoutKey(seed=1, step=2, samples=(5, 6, 7, 8)))
    part = network(items[1:3], lengths[1:3], DropoutKey(seed=1, step=2, samples=(6, 7)))
    torch.testing.assert_close(part, whole[1:3])
    assert not torch.allclose(network(items, lengths), whole)


def test_histories_of_any_lengths_together_are_as_each_alone() -> None:
    network = network_of(config_of("sasrec", dim=8, num_heads=2, num_layers=2, max_length=40, dropout=0.5))
    lengths = torch.tensor([40, 0, 7, 8, 9, 16, 17, 32, 33, 1])
    items, samples = items_of(10, 40), tuple(range(10, 20))
    together = network(items, lengths, DropoutKey(seed=1, step=2, samples=samples))
    for row, length in enumerate(lengths.tolist()):
        noise = DropoutKey(seed=1, step=2, samples=samples[row : row + 1])
        alone = network(items[row : row + 1], lengths[row : row + 1], noise)
        torch.testing.assert_close(together[row, :length], alone[0, :length])


def test_the_items_are_those_of_the_only_sequence() -> None:
    assert CONFIG.items(SHAPE) == "history"
    (lookup,) = CONFIG.lookups(SHAPE)
    assert (lookup.name, lookup.pooling, lookup.dim) == ("items", "sequence", 8)
