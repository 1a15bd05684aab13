"""The way of gradients and weights between a device and the host, one step at a time."""

import random
import threading

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.optim.build import OptimizerConfig
from kitforge.core.optim.grad_norm import ChunkNorms, chunk_norms, global_norm
from kitforge.core.optim.groups import decay_groups
from kitforge.core.parallel.offload import NUM_SLOTS, HostOptimizer, Offload, offloaded_blocks
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import World
from tests.other_device import other_device

CPU = torch.device("cpu")


def trained(device: torch.device, gradients: bool) -> tuple[list[Tensor], float, set[str]]:
    """Weights and norm after three steps of two micro-batches, and the devices of the states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(device)
    parallel = parallel_model_of(model, World(device=device))
    names = [name for name, _ in model.named_parameters()]
    offload = parallel.offload(names, gradients=gradients, fraction=1.0, compute_dtype=torch.float32)
    groups = parallel.local_groups(decay_groups(model.named_parameters(), weight_decay=0.1))
    optimizer = HostOptimizer(groups, OptimizerConfig(learning_rate=1e-2), offload)
    optimizer.init_state()
    for step in range(3):
        for row in range(2):
            model(torch.ones(3, 4).to(device) * (step + row)).square().sum().backward()
        norm = parallel.grad_norm()
        parallel.scale_gradients(0.5)
        optimizer.step(1.0)
        optimizer.zero_grad()
    parallel.wait()
    weights = [each.detach().cpu() for each in model.parameters()]
    return weights, float(norm), {str(each.device) for _, each in optimizer.tensors()}


@pytest.mark.parametrize("gradients", [False, True])
def test_only_copies_go_between_a_device_and_the_host(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    weights, norm, _ = trained(CPU, gradients)
    with other_device(monkeypatch) as device:
        got, its_norm, devices = trained(device, gradients)
    assert devices == {"cpu"} and its_norm == norm
    assert all(torch.equal(one, other) for one, other in zip(got, weights, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_the_norm_of_gradients_that_have_left_has_the_bits_of_one_over_those_that_are_here(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [draw.choice([1, 7, 65536, 70_001]) for _ in range(draw.randrange(1, 6))]
    here = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    mixed = [ChunkNorms(chunk_norms([each])) if draw.random() < 0.5 else each for each in here]
    assert torch.equal(global_norm(mixed), global_norm([each.float() for each in here]))


def test_the_last_blocks_are_on_the_host_with_at_most_the_fraction() -> None:
    blocks = [(None, ["table"]), (None, ["first"]), (None, ["second"])]
    sizes = {"table": 50, "first": 25, "second": 25}
    for fraction, count in ((1.0, 3), (0.99, 2), (0.5, 2), (0.49, 1), (0.25, 1), (0.2, 0)):
        assert offloaded_blocks(blocks, sizes, fraction) == blocks[3 - count :], fraction


def test_gradients_wait_for_a_free_buffer() -> None:
    """As many as there are buffers are on their way; the next one holds the backward pass up."""
    names = [f"weight{number}" for number in range(NUM_SLOTS + 1)]
    held = {name: nn.Parameter(torch.zeros(3)) for name in names}
    offload = Offload(held, [(None, names)], CPU)
    gate = threading.Event()
    offload._worker.submit(gate.wait)
    for name in names[:-1]:
        offload.add(name, torch.ones(3))
    thread = threading.Thread(target=offload.add, args=(names[-1], torch.ones(3)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.set()
    thread.join()
    assert all(float(each.norms) == pytest.approx(3**0.5) for each in offload.norms().values())


def test_an_error_of_an_update_reaches_whoever_waits_for_the_weights() -> None:
    class Broken:
        def step(self, scale: float) -> None:
            raise RuntimeError("no update")

    block = nn.Identity()
    held = {"weight": nn.Parameter(torch.zeros(3))}
    offload = Offload(held, [(block, ["weight"])], CPU)
    offload.step([Broken()], 1.0)
    with pytest.raises(RuntimeError, match="no update"):
        block(torch.zeros(1))
