"""Several tables as one module: features share them, one prefetcher goes ahead for all, and nothing depends on that."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import ConfigError, DataError

FEATURES = {"bought": "item", "seen": "item", "home": "city"}
Batch = dict[str, Any]


def collection(**tiers: Any) -> EmbeddingCollection:
    tables = {
        "item": CachedEmbedding(None, 4, name="item", optimizer="adam", **tiers),
        "city": CachedEmbedding(30, 2, name="city", optimizer="ftrl"),
    }
    return EmbeddingCollection(tables, FEATURES)


def batches(num: int = 12) -> list[Batch]:
    random = torch.Generator().manual_seed(1)

    def ids(*shape: int, high: int = 60) -> Tensor:
        return torch.randint(high, shape, generator=random)

    offsets = torch.tensor([0, 1, 1, 5, 9])
    return [{"bought": ids(4, 3), "seen": (ids(9), offsets), "home": ids(4, 1, high=30)} for _ in range(num)]


def train(embeddings: EmbeddingCollection, given: Iterator[Batch]) -> list[Tensor]:
    answers = []
    for batch in given:
        vectors = embeddings(batch)
        answer = torch.cat([vectors["bought"] * vectors["seen"], vectors["home"]], 1)
        (answer + 0.1).square().sum().backward()
        for table in embeddings.cached_tables():
            table.step(0.1)
        answers.append(answer.detach())
    return answers


def test_one_prefetcher_for_all_tables_changes_no_bit() -> None:
    expected = train(collection(), iter(batches()))
    with collection(device_rows=30) as embeddings:
        got = train(embeddings, embeddings.prefetch(batches(), depth=2))
        assert all(map(torch.equal, got, expected))
        stats = embeddings.stats()
        assert stats["item"].evicted > 0
        assert [stats["item"].lookups, stats["city"].lookups] == [2 * 12, 12]
        assert embeddings.cached_tables()[0].rows.pins.open_lookups() == []


def test_features_may_be_looked_up_by_a_function_and_a_batch_may_lack_some() -> None:
    embeddings = collection(device_rows=40)
    wrapped = [("any", batch) for batch in batches(3)]
    for _, batch in embeddings.prefetch(wrapped, 1, ids=lambda pair: pair[1]):
        assert list(embeddings(batch)) == ["bought", "seen", "home"]
    assert list(embeddings({"home": batches(1)[0]["home"]})) == ["home"]


def test_an_estimate_knows_what_each_table_is_asked_for_by_all_its_features() -> None:
    embeddings, given = collection(device_rows=30), batches()
    found = embeddings.estimate(given)
    assert embeddings.stats()["item"].lookups == 0
    train(embeddings, iter(given))
    stats = embeddings.stats()["item"]
    assert (found["item"].num_batches, found["item"].num_accesses) == (stats.lookups, stats.rows)
    assert found["item"].hit_rate(10**6) == 1 - stats.hits["new"] / stats.rows
    assert found["city"].num_rows == len(torch.cat([batch["home"] for batch in given]).unique())
    assert list(embeddings.estimate([{"home": given[0]["home"]}])) == ["city"]


def test_names_that_are_not_known_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)features\.seen.*did you mean 'item'"):
        EmbeddingCollection({"item": CachedEmbedding(None, 2)}, {"seen": "itm"})
    with pytest.raises(DataError, match=r"(?s)'bougt'.*did you mean 'bought'"):
        collection()({"bougt": torch.zeros(1, 1, dtype=torch.int64)})
