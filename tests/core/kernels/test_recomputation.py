"""What a recomputed block keeps: taken once each, in order, unchanged, and let go with the graph."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kitforge.core.kernels.autograd.recomputation import is_recomputed, kept, kept_operations, passes, unread
from kitforge.foundation.errors import ModelError

CALLS: Counter[str] = Counter()


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def triple(input: Tensor) -> Tensor:
    CALLS["triple"] += 1
    return input * 3


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return kept(triple, input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return 3 * grad + 0 * input


def tripled(input: Tensor) -> Tensor:
    result: Tensor = Triple.apply(input)  # type: ignore[no-untyped-call]
    return result


def product(input: Tensor, weight: Tensor) -> Tensor:
    return kept_operations(functional.linear, input, weight)


def recomputed(block: Callable[[Tensor], Tensor], input: Tensor, *, keeps: bool = True) -> Tensor:
    """The block's output; all it keeps for its backward pass are its kept results."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    output: Tensor = checkpoint(block, input, context_fn=partial(passes, keeps=keeps), **options)
    return output


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def equal_to_plain(block: Callable[[Tensor], Tensor], input: Tensor, *, keeps: bool = True) -> bool:
    """Whether output and gradient of the block have the same bits recomputed and not."""
    plain, again = (input.clone().requires_grad_() for _ in range(2))
    output, other = block(plain), recomputed(block, again, keeps=keeps)
    output.square().sum().backward()
    other.square().sum().backward()
    assert plain.grad is not None and again.grad is not None
    return torch.equal(output, other) and torch.equal(plain.grad, again.grad)


@pytest.mark.parametrize(("keeps", "runs"), [(True, 1), (False, 2)])
def test_what_is_kept_runs_once(keeps: bool, runs: int) -> None:
    weight, input = some(4, 4), some(3, 4).requires_grad_()
    CALLS.clear()
    with Calls() as calls:
        output = recomputed(lambda x: tripled(product(x, weight).sin()).sin().exp(), input, keeps=keeps)
        forward = calls.counts["aten::mm"]
        output.sum().backward()
    # A third product is that of the gradient.
    assert (CALLS["triple"], forward, calls.counts["aten::mm"]) == (runs, 1, runs + 1)
    assert calls.counts["aten::sin"] == 4


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_are_those_of_no_recomputation(keeps: bool) -> None:
    first, second, bias = some(4, 4), some(5, 4), some(4)

    def block(x: Tensor) -> Tensor:
        x = kept_operations(functional.linear, x.sin(), first, bias)
        return product(tripled(x.tanh()).exp(), second).sin()

    assert equal_to_plain(block, some(2, 3, 4), keeps=keeps)
    # Not contiguous: torch multiplies a copy, and adds the bias afterwards.
    assert equal_to_plain(lambda x: block(x.transpose(0, 1)), some(3, 2, 4), keeps=keeps)
    assert equal_to_plain(block, some(0, 4), keeps=keeps)


def test_attention_brings_what_its_backward_pass_reads() -> None:
    def block(x: Tensor) -> Tensor:
        query = x.sin()
        attend = partial(functional.scaled_dot_product_attention, is_causal=True)
        return kept_operations(attend, query, query.cos(), query.exp()).sin()

    assert equal_to_plain(block, some(2, 2, 5, 8))
    with Calls() as calls:
        recomputed(block, some(2, 2, 5, 8).requires_grad_()).sum().backward()
    assert calls.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == 1


def test_the_result_of_the_neighbouring_call_would_show() -> None:
    first, second, input = some(4, 4), some(4, 4) + 1, some(3, 4).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return product(x, first).sin() + product(x, second).sin()

    found = []
    for is_swapped in (False, True):
        both = passes(keeps=True)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        output = checkpoint(block, input, context_fn=lambda both=both: both, **options)
        if is_swapped:
            both[0].results.reverse()
        found += torch.autograd.grad(output.sum(), input)
    (wanted,) = torch.autograd.grad(block(input).sum(), input)
    assert torch.equal(found[0], wanted) and not torch.equal(found[1], wanted)


def test_the_same_graph_may_run_backward_twice() -> None:
    weight, input = some(4, 4), some(3, 4).requires_grad_()
    output = recomputed(lambda x: tripled(product(x, weight).sin()).exp(), input).sum()
    (one,) = torch.autograd.grad(output, input, retain_graph=True)
    (two,) = torch.autograd.grad(output, input)
    assert torch.equal(one, two)


@pytest.mark.parametrize("way", [tripled, lambda x: product(x, torch.eye(4, dtype=torch.float64))])
def test_a_result_that_was_written_to_is_refused(way: Callable[[Tensor], Tensor]) -> None:
    output = recomputed(lambda x: way(x).add_(1).sin(), some(3, 4).requires_grad_())
    with pytest.raises(ModelError, match="written to"):
        output.sum().backward()


def test_another_path_in_the_recomputation_is_refused() -> None:
    weight, runs = some(4, 4), []

    def block(x: Tensor) -> Tensor:
        runs.append(x)
        ways = [tripled, partial(product, weight=weight)]
        return ways[len(runs) % 2](x).sin()

    output = recomputed(block, some(3, 4).requires_grad_())
    with pytest.raises(ModelError, match="something else than its forward pass"):
        output.sum().backward()


def test_more_in_the_recomputation_is_refused() -> None:
    runs: list[int] = []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return (tripled(x) if len(runs) > 1 else x).sin()

    output = recomputed(block, some(3, 4).requires_grad_())
    with pytest.raises(ModelError, match="no further result"):
        output.sum().backward()


def test_an_unread_result_is_let_go_and_is_nan_where_it_is_read_after_all() -> None:
    weight, memory = some(4, 4), []

    def block(x: Tensor, *, is_read: bool) -> Tensor:
        result = product(x.sin(), weight)
        memory.append(weakref.ref(result.untyped_storage()))
        branch = unread(result)
        return x + (branch * branch if is_read else branch)

    assert equal_to_plain(partial(block, is_read=False), some(3, 4))
    assert not equal_to_plain(partial(block, is_read=True), some(3, 4))
    memory.clear()
    input = some(3, 4).requires_grad_()
    output = recomputed(partial(block, is_read=False), input)
    gc.collect()
    assert [each() for each in memory] == [None]
    output.sum().backward()
    assert input.grad is not None and input.grad.isfinite().all()


def test_only_the_last_result_itself_is_let_go() -> None:
    weight = some(4, 4)

    def block(x: Tensor) -> Tensor:
        branch = product(x.sin(), weight)
        changed = unread(branch + 1)
        earlier = unread(branch) if changed.sum().isnan() else branch
        return (earlier * changed).sin()

    assert equal_to_plain(block, some(3, 4))


def test_results_are_let_go_with_the_graph() -> None:
    weight, memory = some(4, 4), []

    def block(x: Tensor) -> Tensor:
        result = product(x.sin(), weight)
        memory.append(weakref.ref(result.untyped_storage()))
        return result.sin()

    output = recomputed(block, some(3, 4).requires_grad_()).sum()
    gc.collect()
    assert memory[0]() is not None
    output.backward()
    gc.collect()
    assert memory[0]() is None
    del output


def test_a_pass_is_that_of_its_thread_and_ends_with_it() -> None:
    seen: list[bool] = []

    def block(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(is_recomputed()))
        thread.start()
        thread.join()
        seen.append(is_recomputed())
        return tripled(x).sin()

    recomputed(block, some(3, 4).requires_grad_()).sum().backward()
    assert seen == [False, True, False, True]
    assert not is_recomputed()


def test_a_failure_ends_the_pass() -> None:
    def fail(_: Tensor) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recomputed(fail, some(3, 4).requires_grad_())
    assert not is_recomputed()
