"""Rows that begin alike have the hidden states and gradients of rows that are computed whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn import shared_prefix
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.shared_prefix import SharedPrefixAttend, hidden_at, prefix_tree
from tests.core.nn.networks import CONFIGS, GPT2, LLAMA, VOCAB, build

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), min_size=1, max_size=8)


def grid(rows: list[list[int]], filling: int = 1) -> Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([row + [filling] * (width - len(row)) for row in rows])


@given(ROWS)
def test_a_node_is_one_prefix_of_some_rows(rows: list[list[int]]) -> None:
    tokens = grid(rows)
    tree = prefix_tree(tokens, [len(row) for row in rows])
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert tree.tokens.shape == tree.positions.shape == (1, len(prefixes))
    found = {}
    for row, nodes in zip(rows, tree.nodes.tolist(), strict=True):
        for end, node in enumerate(nodes[: len(row)]):
            assert tree.tokens[0, node] == row[end]
            assert tree.positions[0, node] == end
            assert found.setdefault(node, tuple(row[: end + 1])) == tuple(row[: end + 1])
    for node, origin in enumerate(tree.origins.tolist()):
        assert tree.nodes.flatten()[origin] == node
        assert origin % tokens.shape[1] == len(found[node]) - 1


def answers(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of answers of several lengths to three prompts, one of which begins as another, and their mask."""
    noise = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCAB, (6,), generator=noise)
    prompts = [first, torch.cat([first[:4], first[:1]]), torch.randint(0, VOCAB, (2,), generator=noise)]
    tokens, mask = torch.randint(0, VOCAB, (11, 14), generator=noise), torch.zeros(11, 14, dtype=torch.bool)
    for row in range(11):
        prompt = prompts[row % 3]
        tokens[row, : len(prompt)] = prompt
        mask[row, len(prompt) - 1 : len(prompt) + row % 7 - 1] = True
    # A token of a tool within an answer is not trained on.
    mask[10, 4] = False
    return tokens, mask


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_gradients_are_those_of_whole_rows(
    name: str, level: CompileLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (tokens, mask) = build(CONFIGS[name], level), answers(5)
    weights = torch.randn(int(mask.sum()), model.geometry.dim, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for share in (0.0, 0.9):
        monkeypatch.setattr(shared_prefix, "SHARED", share)
        model.zero_grad()
        hidden = hidden_at(model, tokens, mask)
        (hidden * weights).sum().backward()
        found.append((hidden, [each.grad for each in model.parameters() if each.grad is not None]))
    (whole, expected), (shared, gradients) = found
    assert (whole - shared).abs().max() < 1e-12
    assert len(expected) == len(gradients) > 0
    for one, other in zip(expected, gradients, strict=True):
        assert (one - other).abs().max() < 1e-11 * max(1.0, float(one.abs().max()))


def computed(model: Decoder, tokens: Tensor, mask: Tensor) -> int:
    """The number of tokens of the pass."""
    counts, hidden = [], model.hidden

    def counted(tokens: Tensor, context: Context | None = None) -> Tensor:
        counts.append(tokens.numel())
        assert (context is not None and isinstance(context.attend, SharedPrefixAttend)) == (len(tokens) == 1)
        return hidden(tokens, context)

    model.__dict__["hidden"] = counted
    hidden_at(model, tokens, mask)
    (count,) = counts
    return count


def test_a_prompt_is_computed_once_and_padding_not_at_all() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6], [[7, 8], [9], [7, 9, 9]]
    tokens, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.bool)
    for row, each in enumerate(answer):
        text = torch.tensor(prompt + each)
        tokens[row, : len(text)] = text
        mask[row, len(prompt) - 1 : len(text) - 1] = True
    # The last token of an answer predicts nothing. The 7 that follows the prompt is common to two answers.
    assert computed(build(LLAMA), tokens, mask) == 6 + 1 + 1


def test_rows_that_share_little_are_computed_whole() -> None:
    tokens = torch.arange(24).view(2, 12) % VOCAB
    mask = torch.ones(2, 12, dtype=torch.bool)
    assert computed(build(GPT2), tokens, mask) == 24
    assert computed(build(GPT2), tokens, torch.zeros_like(mask)) == 24


def test_angles_that_depend_on_the_length_of_a_row_share_nothing() -> None:
    scaled = next(each for each in CONFIGS.values() if build(each).geometry.depends_on_length)
    tokens = torch.ones(4, 8, dtype=torch.long)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 5] = True
    assert computed(build(scaled), tokens, mask) == 32
    assert computed(build(replace(LLAMA)), tokens, mask) == 6
