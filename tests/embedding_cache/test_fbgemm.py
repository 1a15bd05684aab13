"""The table beside FBGEMM's, whose rules of training are the reference where it runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName
from kitforge.embedding_cache.table import CachedEmbedding

training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")

NUM, DIM, NUM_STEPS, RATE, EPS = 300, 8, 12, 0.1, 1e-6
RULES: dict[SparseOptimizerName, str] = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}


def lookups(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of bags, some of them empty and with ids that occur again and again; offsets, and weights."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (20,), generator=random)
    ids = (NUM ** torch.rand(int(lengths.sum()), generator=random)).long() - 1
    return (
        ids,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.rand(len(ids), generator=random),
    )


def theirs(rule: str, mode: str, begin: Tensor) -> Any:
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM, DIM, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=getattr(training.OptimType, rule),
        pooling_mode=getattr(common.PoolingMode, mode.upper()),
        learning_rate=RATE,
        eps=EPS,
        device=torch.device("cpu"),
    )
    table.split_embedding_weights()[0].copy_(begin)
    return table


# A weighted mean is left out: on a CPU FBGEMM 1.8 does not divide its gradients by the count, as its answers are.
@pytest.mark.parametrize(("mode", "is_weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("name", RULES)
def test_training_is_that_of_fbgemm(name: SparseOptimizerName, mode: Any, is_weighted: bool) -> None:
    every = torch.arange(NUM).unsqueeze(1)
    config = SparseOptimizerConfig(name=name, eps=EPS)
    with CachedEmbedding(NUM, DIM, optimizer=config, init_scale=0.5, mode=mode, device_rows=70) as ours:
        with torch.no_grad():
            other = theirs(RULES[name], mode, ours(every))
        for step in range(NUM_STEPS):
            ids, offsets, weights = lookups(step)
            given = weights if is_weighted else None
            got, expected = ours(ids, offsets, given), other(ids, offsets, given)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            for answer in (got, expected):
                torch.tanh(3.0 * answer + step).square().sum().backward()
            ours.step(RATE)
        with torch.no_grad():
            torch.testing.assert_close(ours(every), other.split_embedding_weights()[0], rtol=1e-5, atol=1e-6)
