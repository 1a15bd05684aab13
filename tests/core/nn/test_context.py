from dataclasses import replace

import pytest
import torch

from kitforge.core.kernels.dispatch import select
from kitforge.core.nn import context as operations
from kitforge.core.nn.context import AttentionSpec, CausalAttend, Context, DropoutKey, causal_mask, dropout
from tests.core.nn.networks import VOCAB

KEY = DropoutKey(seed=3, step=7, samples=(10, 11, 12))
SHAPE = torch.Size((3, 5, 4))
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_query_sees_itself_and_the_window_before_it(window: int | None) -> None:
    queries, keys = torch.arange(4, 9), torch.arange(9)
    mask = causal_mask(queries, keys, window)
    for row, query in enumerate(queries.tolist()):
        first = 0 if window is None else query - window + 1
        assert [key for key in range(9) if mask[row, key]] == list(range(max(first, 0), query + 1))


def test_a_window_as_long_as_the_row_is_no_window() -> None:
    found: list[object] = []

    def kernel(query: torch.Tensor, *_: torch.Tensor, mask: object, **__: object) -> torch.Tensor:
        found.append(mask)
        return query

    attend, heads = CausalAttend(), torch.zeros(1, 1, 4, 2)
    for window in (None, 4, 5, 3):
        attend(heads, heads, heads, AttentionSpec(layer=0, kernel=kernel, scale=1.0, window=window))
    assert [mask is None for mask in found] == [True, True, True, False]


def test_one_attend_serves_layers_of_different_windows() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    attend, heads = CausalAttend(documents), torch.randn(1, 1, 6, 2)
    kernel = select("O0").attention
    narrow, wide = (AttentionSpec(layer=0, kernel=kernel, scale=1.0, window=window) for window in (1, None))
    first = attend(heads, heads, heads, narrow)
    assert torch.equal(first, heads)
    assert not torch.equal(attend(heads, heads, heads, wide), heads)
    assert torch.equal(attend(heads, heads, heads, narrow), first)


@pytest.mark.parametrize("samples", [(0, 1), (0, 2), (1, 2, 2)])
def test_noise_of_a_row_depends_on_the_row_alone(samples: tuple[int, ...]) -> None:
    whole = KEY.mask("x", SHAPE, 0.3, CPU)
    chosen = replace(KEY, samples=tuple(KEY.samples[row] for row in samples))
    assert torch.equal(chosen.mask("x", torch.Size((len(samples), 5, 4)), 0.3, CPU), whole[list(samples)])


@pytest.mark.parametrize(
    ("change", "name"),
    [({}, "y"), ({"seed": 4}, "x"), ({"step": 8}, "x"), ({"samples": (20, 21, 22)}, "x")],
)
def test_noise_depends_on_seed_step_name_and_sample(change: dict[str, int], name: str) -> None:
    assert torch.equal(KEY.mask("x", SHAPE, 0.5, CPU), KEY.mask("x", SHAPE, 0.5, CPU))
    changed = replace(KEY, **change)  # type: ignore[arg-type]
    assert not torch.equal(changed.mask(name, SHAPE, 0.5, CPU), KEY.mask("x", SHAPE, 0.5, CPU))


def test_noise_does_not_depend_on_nor_move_torch_s_own_state() -> None:
    before = torch.get_rng_state()
    first = KEY.mask("x", SHAPE, 0.5, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(KEY.mask("x", SHAPE, 0.5, CPU), first)


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    ones = torch.ones(3, 200, 100, dtype=torch.float64)
    dropped = dropout(ones, 0.3, "x", KEY)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1.0 / 0.7])
    assert abs(float((dropped == 0).double().mean()) - 0.3) < 0.01
    assert abs(float(dropped.mean()) - 1) < 0.02


@pytest.mark.parametrize(("rate", "key"), [(0.0, KEY), (0.5, None)])
def test_nothing_is_dropped_without_a_rate_or_a_key(rate: float, key: DropoutKey | None) -> None:
    input = torch.randn(3, 4)
    assert dropout(input, rate, "x", key) is input


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert dropout(torch.ones(3, 4, dtype=dtype), 0.5, "x", KEY).dtype == dtype


def test_another_attend_is_left_as_it_is() -> None:
    class Own:
        def __call__(self, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query

    attend = Own()
    assert Context(documents=torch.zeros(1, VOCAB, dtype=torch.long), attend=attend).attend is attend


@pytest.mark.slow
def test_the_operations_of_dropout_pass_opcheck() -> None:
    key, rows = torch.tensor(5), torch.arange(3)
    torch.library.opcheck(operations._keep_mask, (key, rows, 2, 10, 0.5))
    indices = torch.tensor([[0, 1, 4], [2, 3, 6], [1, 2, 3]])
    torch.library.opcheck(operations._keep_mask_at, (key, rows, indices, 4, 0.5))
