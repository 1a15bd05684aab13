"""The task `embedding`: vectors of texts, in-batch negatives on any ranks and micro-batches, and retrieval by them."""

import json
import math
import random
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import ndcg_score
from torch.nn import functional

from kitforge.api import load_model, pipeline, save_model
from kitforge.composition import compose_config
from kitforge.core.nn.context import Context
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.schedule import token_budget_batches
from kitforge.data.text.text_pairs import pair_texts
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.inference.pooling import TextPooling, find_pooling, pool_rows
from kitforge.kits.transformers import embedding
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.contrastive import TextGroups, contrastive_losses, retrieval_metrics
from tests.distributed.ranks import ask_ranks
from tests.inference.server.conftest import serving
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.patience import PATIENCE
from tests.trainer import tiny

KIT: Any = TASKS["embedding"]
OPTIONS = SHORT | {"model": tiny.LLAMA, "data.batch_size": 7, "data.sequence_length": 64, "trainer.max_steps": 4}


def rows(count: int = 40, seed: int = 5) -> list[dict[str, Any]]:
    """Sentences and what says the same, of which some come twice, some with negatives."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        text = tiny.sentence(draw, draw.randint(1, 5)).strip()
        row: dict[str, Any] = {"anchor": text, "positive": f"{text} {draw.choice('xy')}"}
        if number % 3 == 0:
            row["negative"] = [tiny.sentence(draw, 3).strip() + "?" for _ in range(number % 4)] or "no"
        found.append(row)
    return found + found[:2]


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, run = RUNS.begin, RUNS.run


def vector(model: Any, text: str, mode: str) -> torch.Tensor:
    """By the definition: of one text alone, without padding."""
    hidden = model.hidden(torch.tensor([ByteTokenizer().encode(text)]), Context())[0]
    return {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[mode]


@pytest.mark.parametrize("mode", ["last", "mean", "cls"])
def test_a_vector_is_pooled_from_the_tokens_of_its_text_alone(mode: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    outputs, lengths = torch.randn(5, 6, 3, generator=draw, dtype=torch.float64), torch.tensor([1, 6, 3, 2, 5])
    found = pool_rows(outputs, lengths, mode)
    for row, own in enumerate(lengths.tolist()):
        kept = outputs[row, :own]
        assert torch.allclose(found[row], {"last": kept[-1], "mean": kept.mean(0), "cls": kept[0]}[mode])


@pytest.mark.parametrize(("column", "name"), [(None, "negative"), ("worse", "worse"), ("negative", "negative")])
def test_negatives_are_of_the_column_that_is_named_or_has_their_name(column: str | None, name: str) -> None:
    for found in ("c", ["c"]):
        row = {"anchor": "a", "positive": "b", name: found}
        assert pair_texts(row, ("anchor", "positive", column), "row 1") == ["a", "b", "c"]


def test_the_loss_is_the_cross_entropy_of_cosines_without_false_negatives() -> None:
    draw = random.Random(3)
    for _ in range(20):
        texts = [[draw.randint(0, 3), draw.randint(4, 7), *range(8, 8 + draw.randint(0, 2))] for _ in range(6)]
        groups, chosen = TextGroups(texts), np.array(draw.sample(range(6), 4))
        vectors = {number: torch.randn(8, dtype=torch.float64) for number in range(12)}
        candidates = [text for row in chosen for text in texts[row][1:]]
        excluded = groups.false_negatives(chosen, np.array(candidates))
        places = np.cumsum([0, *(len(texts[row]) - 1 for row in chosen)])[:-1]
        queries, others = (torch.stack([vectors[each] for each in part]) for part in (
            [texts[row][0] for row in chosen], candidates))  # fmt: skip
        losses, _ = contrastive_losses(queries, others, torch.from_numpy(places), excluded, 0.1, [4, 8])
        for index, row in enumerate(chosen):
            anchor, positive = texts[row][:2]
            known = {one[1] for one in texts if one[0] == anchor}
            wanted = 0.0
            for size in (4, 8):
                cosine = [float(functional.cosine_similarity(vectors[anchor][:size], vectors[text][:size], 0)) for text
                          in [positive, *(text for text in candidates if text not in known)]]  # fmt: skip
                wanted += math.log(sum(math.exp((each - cosine[0]) / 0.1) for each in cosine)) / 2
            assert float(losses[index]) == pytest.approx(wanted, rel=1e-9)


def test_metrics_are_those_of_each_query_sorted_by_cosine() -> None:
    draw = random.Random(4)
    for _ in range(10):
        texts = [[draw.randint(0, 4), draw.randint(3, 30), *(draw.randint(31, 40) for _ in range(draw.randint(0, 2)))]
                 for _ in range(25)]  # fmt: skip
        texts = [row for row in texts if row[0] != row[1]]
        groups, chosen = TextGroups(texts), np.array(sorted(draw.sample(range(len(texts)), 18)))
        of_text = {number: torch.randn(6, dtype=torch.float64) for number in range(41)}
        vectors = torch.stack([of_text[text] for row in texts for text in row])
        found = retrieval_metrics(vectors, groups, chosen, 0.1, [3, 6])
        corpus = sorted({text for row in chosen for text in texts[row][1:]})
        for size, suffix in ((6, ""), (3, "/3")):
            wanted: dict[str, list[float]] = {name: [] for name in ("recall@1", "recall@10", "mrr@10", "ndcg@10")}
            for anchor in {texts[row][0] for row in chosen}:
                relevant = {one[1] for one in texts if one[0] == anchor} & set(corpus)
                others = [text for text in corpus if text != anchor]
                score = {text: float(functional.cosine_similarity(of_text[anchor][:size], of_text[text][:size], 0))
                         for text in others}  # fmt: skip
                order = sorted(others, key=lambda text: -score[text])
                for cut in (1, 10):
                    wanted[f"recall@{cut}"].append(len(relevant & set(order[:cut])) / len(relevant))
                first = next((rank for rank, text in enumerate(order[:10], 1) if text in relevant), None)
                wanted["mrr@10"].append(0.0 if first is None else 1 / first)
                gains = [[float(text in relevant) for text in others]]
                wanted["ndcg@10"].append(ndcg_score(gains, [[score[text] for text in others]], k=10))
            for name, values in wanted.items():
                assert found[name + suffix] == pytest.approx(np.mean(values), rel=1e-9), name


@pytest.mark.parametrize(("count", "size"), [(38, 2), (2, 3), (2, 100)])
def test_the_gradient_is_that_of_the_definition_also_where_a_batch_has_a_row_twice(count: int, size: int) -> None:
    choices = {"trainer.micro_batch_size": size, "data.shuffle": False, "temperature": 0.2, "data.eval_fraction": 0.0}
    loop = begin(None, choices, train_dataset=rows(count)).loop
    model = loop.model.double()
    step = next(iter(loop.task.steps(model.train(), loop.state.cursor)))
    sums = loop._accumulate(step, loop.task.count(step))
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    groups = loop.task._rows.train.groups
    text_of = loop.task._rows.train._tokens
    batch = step[0]["batch"].numpy()
    slots = groups.slots(batch)
    candidates = [slot for slot in slots if slot not in set(groups.starts)]

    def of(slot: int) -> torch.Tensor:
        return functional.normalize(model.hidden(torch.from_numpy(text_of.row(slot))[None], Context())[0, -1], dim=0)

    total = torch.zeros((), dtype=torch.float64)
    for row in batch:
        anchor = groups.starts[row]
        known = groups.positives(int(groups.texts[anchor])) | {int(groups.texts[anchor])}
        others = [slot for slot in candidates if int(groups.texts[slot]) not in known]
        scores = torch.stack([of(anchor) @ of(slot) for slot in (anchor + 1, *others)]) / 0.2
        total = total - scores.log_softmax(0)[0]
    assert float(sums["loss"]) == pytest.approx(total.item(), rel=1e-9)
    (total / len(batch)).backward()
    for name, each in model.named_parameters():
        assert torch.allclose(found[name], each.grad, atol=1e-11, rtol=1e-7), name


MESHES = [
    ParallelConfig(),
    ParallelConfig(data=2),
    ParallelConfig(shard=2),
    ParallelConfig(context=2),
    ParallelConfig(tensor=2, sequence_parallel=False),
    ParallelConfig(data=2, shard=2),
]


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    sizes = {1: MESHES[:1], 2: MESHES[1:5], 4: MESHES[5:]}
    # The last step has one row.
    given = {"train_dataset": rows(13), "eval_dataset": rows(11)}
    asked = {}
    for world, size in ((1, None), (1, 8), (2, None), (2, 8), (4, None)):
        choices = {"trainer.micro_batch_size": size}
        asked[world, size] = (world, RUNS.on_meshes, tmp_path / str(size), sizes[world], choices, given)
    answers = ask_ranks(asked)
    alone = answers[1, None][0][0]
    assert len(alone[1]) == 3
    for (world, size), ranks in answers.items():
        for rank, found in enumerate(ranks):
            for mesh, (ended, losses) in zip(sizes[world], found, strict=True):
                assert ended == pytest.approx(alone[0], rel=2e-3, abs=1e-5), (mesh, size)
                if rank == 0:
                    assert losses == pytest.approx(alone[1], rel=1e-3), (mesh, size)


def test_texts_of_a_row_have_dropout_masks_of_their_own() -> None:
    same = [{"anchor": "moon", "positive": "mooN"}, {"anchor": "sun", "positive": "suN"}] * 3
    choices = {"model": tiny.GPT2 | tiny.DROPOUT, "data.eval_fraction": 0.0, "data.batch_size": 6}
    loop = begin(None, choices, train_dataset=same).loop
    keys = []
    loop.task.dropout_key = lambda micro_batch: keys.append(micro_batch["samples"].tolist())
    for step in (next(iter(loop.task.steps(loop.model.train(), loop.state.cursor))),):
        loop.task._vectors(loop.model, step[0])
    assert all(len(set(each)) == len(each) for each in keys) and len(keys[-1]) == 12


def test_the_pipeline_gives_the_vectors_of_single_texts_in_order(tmp_path: Path) -> None:
    texts = ["the moon", "sun", "a rather long sentence over the river", "夜"]
    for mode in ("last", "mean"):
        model = run(tmp_path / mode, {"pooling": mode, "trainer.max_steps": 1})[0].loop.model.eval()
        embed = pipeline("embedding", model=tmp_path / mode)
        found = embed(texts)
        with torch.no_grad():
            wanted = torch.stack([vector(model, text, mode) for text in texts])
        assert found.shape == (4, 32) and found.dtype == np.float32
        assert np.allclose(found, functional.normalize(wanted, dim=-1), atol=1e-6)
        assert np.allclose(embed(texts, normalize=False), wanted, atol=1e-5)
        assert np.allclose(embed(texts, size=8), functional.normalize(wanted[:, :8], dim=-1), atol=1e-6)
        assert np.array_equal(embed("sun"), embed(["sun"])[0])


def test_a_folder_says_how_it_is_pooled_and_is_read_back(tmp_path: Path) -> None:
    run(tmp_path / "run", {"pooling": "mean", "normalize": False, "trainer.max_steps": 1})
    save_model(tmp_path / "run", tmp_path / "folder")
    for place in ("run", "folder"):
        assert find_pooling(tmp_path / place, None, None) == TextPooling(mode="mean", normalize=False)
    kinds = [each["type"].rpartition(".")[2] for each in json.loads((tmp_path / "folder/modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling"]
    texts = ["the moon", "sun"]
    again, wanted = (pipeline("embedding", model=tmp_path / place)(texts) for place in ("folder", "run"))
    assert np.array_equal(again, wanted)
    assert not np.allclose(np.linalg.norm(wanted, axis=1), 1.0)
    # A run that starts from it pools as it does.
    options = begin(None, {"model": {}, "checkpoint": str(tmp_path / "folder")}).options
    assert (options.pooling, options.normalize) == ("mean", False)


def test_a_run_is_served_with_its_pooling(tmp_path: Path) -> None:
    run(tmp_path, {"pooling": "mean", "trainer.max_steps": 1})
    served = TASKS["text_generation"]
    options: Any = served.read_options(compose_config("text_generation", {"checkpoint": str(tmp_path)}).values)
    model, texts = load_model(tmp_path, "cpu", "fp32", "text_generation"), ["the moon", "sun"]
    with serving(served.open_service(model, ByteTokenizer(), "tiny", options)) as server:
        found = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=PATIENCE).json()["data"]
    wanted = pipeline("embedding", model=tmp_path)(texts)
    assert np.allclose([each["embedding"] for each in found], wanted, atol=1e-6)


def test_a_folder_without_the_head_of_a_language_model_embeds_and_learns(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MistralConfig(**sizes, vocab_size=258, num_key_value_heads=1, tie_word_embeddings=False)
    network = transformers.MistralModel(config).eval()
    network.save_pretrained(tmp_path / "base")
    tokens = torch.tensor([ByteTokenizer().encode("the moon")])
    wanted = functional.normalize(network(tokens).last_hidden_state[0, -1], dim=0).detach()
    tokenizer = ByteTokenizer()
    assert np.allclose(pipeline("embedding", tmp_path / "base", tokenizer)("the moon"), wanted, atol=1e-6)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        pipeline("text_generation", tmp_path / "base", tokenizer)
    for name, choices in {"whole": {}, "adapter": {"lora.rank": 2, "lora.target_modules": ["query"]}}.items():
        own = {"model": {}, "checkpoint": str(tmp_path / "base"), "trainer.max_steps": 1, "pooling": "last", **choices}
        model = run(tmp_path / name, own)[0].loop.model.eval()
        with torch.no_grad():
            learned = functional.normalize(vector(model, "moon", "last"), dim=0)
        assert np.allclose(pipeline("embedding", tmp_path / name)("moon"), learned, atol=2e-5)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run(tmp_path, {"trainer.max_steps": 1})
    embed = pipeline("embedding", model=tmp_path)
    for text in ("", "a" * 500):
        with pytest.raises(DataError, match="text 0 does not fit"):
            embed(text)
    with pytest.raises(ConfigError, match="size"):
        embed("a", size=33)
    assert cast(Any, load_model(tmp_path)).geometry.dim == 32


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"trainer.micro_batch_size": 3}], ids=["whole", "micro-batches"])
def test_passes_over_texts_of_like_lengths_learn_what_one_pass_learns(
    choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout, found = {"model": tiny.GPT2 | tiny.DROPOUT, "pooling": "mean"}, []
    monkeypatch.setattr(embedding, "PASS_TOKENS", 60)
    for name, cut in (("many", token_budget_batches), ("one", lambda texts, *_: [np.array(texts)])):
        monkeypatch.setattr(embedding, "token_budget_batches", cut)
        metrics = run(tmp_path / name, dropout | choices)[1]
        found.append([line["loss"] for line in tiny.records(tmp_path / name, "train")] + [*metrics.values()])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
