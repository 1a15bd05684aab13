"""One peer of the Wide & Deep benchmark in a process of its own, under whatever interpreter has it.

    python wide_deep_peers.py PEER DIM HIDDEN PRECISION STEPS     # prints one line of JSON

PEER: sparse_adam, adagrad (bare torch), deepctr, fbgemm, torchrec. HIDDEN: widths, joined by commas.
"""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from clicks import BATCH, NUM_DENSE, ROWS, batch, sizes
from torch import nn
from torch.nn import functional

NUM_FIELDS = len(sizes())


def mlp(width: int, hidden: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))


def rounding(precision: str):
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def bare(peer: str, dim: int, hidden: list[int], precision: str) -> Callable[[int], None]:
    deep = nn.EmbeddingBag(ROWS, dim, mode="sum", sparse=True, _weight=torch.empty(ROWS, dim).normal_(0, 0.01))
    wide = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True, _weight=torch.zeros(ROWS, 1))
    linear, tower = nn.Linear(NUM_DENSE, 1), mlp(NUM_FIELDS * dim + NUM_DENSE, hidden)
    rows = [deep.weight, wide.weight]
    sparse = torch.optim.SparseAdam(rows, lr=1e-3) if peer == "sparse_adam" else torch.optim.Adagrad(rows, lr=1e-2)
    dense = torch.optim.Adam([*tower.parameters(), *linear.parameters()], lr=1e-3, fused=True)
    starts = torch.tensor([0, *sizes()[:-1]]).cumsum(0)
    data = [tuple(map(torch.from_numpy, batch(seed))) for seed in range(4)]

    def step(number: int) -> None:
        ids, numbers, labels = data[number % len(data)]
        ids = ids + starts
        vectors = deep(ids.view(-1, 1)).view(BATCH, -1)
        with rounding(precision):
            logits = tower(torch.cat([vectors, numbers], dim=1))
        logits = logits.float() + wide(ids) + linear(numbers)
        functional.binary_cross_entropy_with_logits(logits.view(-1), labels).backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def fbgemm(dim: int, hidden: list[int], precision: str) -> Callable[[int], None]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    def tables(width: int):
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(size, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes()],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            device=torch.device("cpu"),
        )

    # Its rows have at least four numbers; of the wide ones the first is used.
    deep, wide = tables(dim), tables(4)
    deep.init_embedding_weights_uniform(-0.01, 0.01)
    linear, tower = nn.Linear(NUM_DENSE, 1), mlp(NUM_FIELDS * dim + NUM_DENSE, hidden)
    dense = torch.optim.Adam([*tower.parameters(), *linear.parameters()], lr=1e-3, fused=True)
    offsets = torch.arange(BATCH * NUM_FIELDS + 1)
    data = [tuple(map(torch.from_numpy, batch(seed))) for seed in range(4)]

    def step(number: int) -> None:
        ids, numbers, labels = data[number % len(data)]
        flat = ids.t().reshape(-1).contiguous()
        vectors = deep(flat, offsets)
        weights = wide(flat, offsets).view(BATCH, NUM_FIELDS, 4)[:, :, 0].sum(1, keepdim=True)
        with rounding(precision):
            logits = tower(torch.cat([vectors, numbers], dim=1))
        logits = logits.float() + weights + linear(numbers)
        functional.binary_cross_entropy_with_logits(logits.view(-1), labels).backward()
        dense.step()
        dense.zero_grad(set_to_none=True)

    return step


def torchrec(dim: int, hidden: list[int], precision: str) -> Callable[[int], None]:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    keys = [f"C{number}" for number in range(NUM_FIELDS)]

    def tables(width: int, name: str):
        configs = [
            EmbeddingBagConfig(
                name=f"{name}{number}",
                embedding_dim=width,
                num_embeddings=size,
                feature_names=[keys[number]],
                pooling=PoolingType.SUM,
            )
            for number, size in enumerate(sizes())
        ]
        return FusedEmbeddingBagCollection(
            tables=configs,
            optimizer_type=torch.optim.Adagrad,
            optimizer_kwargs={"lr": 0.01},
            device=torch.device("cpu"),
        )

    deep, wide = tables(dim, "deep"), tables(4, "wide")
    linear, tower = nn.Linear(NUM_DENSE, 1), mlp(NUM_FIELDS * dim + NUM_DENSE, hidden)
    dense = torch.optim.Adam([*tower.parameters(), *linear.parameters()], lr=1e-3, fused=True)
    lengths = torch.ones(BATCH * NUM_FIELDS, dtype=torch.int32)
    data = [tuple(map(torch.from_numpy, batch(seed))) for seed in range(4)]

    def step(number: int) -> None:
        ids, numbers, labels = data[number % len(data)]
        bags = KeyedJaggedTensor(keys=keys, values=ids.t().reshape(-1).contiguous(), lengths=lengths)
        weights = wide(bags).values().view(BATCH, NUM_FIELDS, 4)[:, :, 0].sum(1, keepdim=True)
        with rounding(precision):
            logits = tower(torch.cat([deep(bags).values(), numbers], dim=1))
        logits = logits.float() + weights + linear(numbers)
        functional.binary_cross_entropy_with_logits(logits.view(-1), labels).backward()
        dense.step()
        dense.zero_grad(set_to_none=True)

    return step


def deepctr(dim: int, hidden: list[int]) -> Callable[[int], None]:
    """DeepCTR-Torch's own network, loss and optimizer, without its L2, stepped as its `fit` does."""
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import WDL

    columns = [
        *(SparseFeat(f"C{place}", vocabulary_size=size, embedding_dim=dim) for place, size in enumerate(sizes())),
        *(DenseFeat(f"I{place}", 1) for place in range(NUM_DENSE)),
    ]
    model = WDL(columns, columns, dnn_hidden_units=tuple(hidden), l2_reg_linear=0, l2_reg_embedding=0, device="cpu")
    model.compile("adam", "binary_crossentropy", metrics=[])
    data = []
    for seed in range(4):
        ids, numbers, labels = batch(seed)
        data.append(
            (torch.cat([torch.from_numpy(ids).float(), torch.from_numpy(numbers)], 1), torch.from_numpy(labels))
        )

    def step(number: int) -> None:
        inputs, labels = data[number % len(data)]
        predicted = model(inputs).squeeze()
        model.optim.zero_grad()
        loss = model.loss_func(predicted, labels, reduction="sum")
        (loss + model.get_regularization_loss() + model.aux_loss).backward()
        model.optim.step()

    return step


def timed(step: Callable[[int], None], num_steps: int) -> dict[str, object]:
    """Seconds of each step after the first, and the most memory that was resident."""
    step(0)
    seconds = []
    for number in range(1, num_steps + 1):
        started = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    peer, dim, hidden, precision, num_steps = sys.argv[1:]
    widths = [int(width) for width in hidden.split(",")]
    torch.manual_seed(0)
    if peer in ("sparse_adam", "adagrad"):
        step = bare(peer, int(dim), widths, precision)
    elif peer == "fbgemm":
        step = fbgemm(int(dim), widths, precision)
    elif peer == "torchrec":
        step = torchrec(int(dim), widths, precision)
    else:
        step = deepctr(int(dim), widths)
    sys.stdout.write(json.dumps(timed(step, int(num_steps))) + "\n")


if __name__ == "__main__":
    main()
