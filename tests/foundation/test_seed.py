import torch

from kitforge.foundation import seed


def test_a_key_depends_on_every_part_and_on_their_borders() -> None:
    keys = {seed.key(0, "a", 1), seed.key(1, "a", 1), seed.key(0, "b", 1), seed.key(0, "a", 2), seed.key(0, "a1")}
    keys |= {seed.key("0", "a", 1), seed.key(0, "a"), seed.key("ab", "c"), seed.key("a", "bc")}
    assert len(keys) == 9


def test_a_key_fits_a_generator_and_does_not_change() -> None:
    assert 0 <= seed.key(0, "init", 3) < 2**63
    assert seed.key(0, "init", 3) == seed.key(0, "init", 3)
    first = torch.rand(4, generator=seed.generator(0, "x"))
    assert torch.equal(first, torch.rand(4, generator=seed.generator(0, "x")))
    assert not torch.equal(first, torch.rand(4, generator=seed.generator(0, "y")))
