"""Classifiers of texts on BERT and RoBERTa: parity with transformers and PEFT both ways, training, ranks, and pairs."""

import json
import random
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import Tensor

from kitforge.api import load_model, pipeline, save_model
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.registry import recorded_task
from kitforge.kits.transformers.build import TASKS
from tests.kits.served import served
from tests.kits.transformers.task_runs import TaskRuns
from tests.kits.transformers.test_classification import OPTIONS, rows
from tests.kits.transformers.test_masked_lm import BERT, byte_pairs, texts, word_pieces
from tests.trainer import tiny

KIT: Any = TASKS["text_classification"]
KINDS: dict[str, Any] = {"Bert": word_pieces, "Roberta": byte_pairs, "XLMRoberta": byte_pairs}
PROBLEMS = [("single_label_classification", 2), ("single_label_classification", 5), ("regression", 1)]
PROBLEMS += [("regression", 2), ("multi_label_classification", 5), ("multi_label_classification", 1)]

# transformers warns of names of its own that PEFT uses.
THEIR_NAMES = pytest.mark.filterwarnings("ignore::FutureWarning")


RUNS = TaskRuns(kit=KIT, options=OPTIONS | {"model": BERT}, rows=rows)
begin, run = RUNS.begin, RUNS.run


def published(folder: Path, kind: str = "Bert", suffix: str = "ForSequenceClassification", **options: Any) -> Any:
    """A network of transformers with drawn weights, vectors too, its folder and its tokenizer."""
    fast = KINDS[kind](folder)
    torch.manual_seed(3)
    sizes = {"vocab_size": len(fast), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 48, "max_position_embeddings": 70, "initializer_range": 0.2,
             "type_vocab_size": 2 if kind == "Bert" else 1, "pad_token_id": fast.pad_token_id}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    theirs = getattr(transformers, f"{kind}{suffix}")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(folder)
    return theirs, fast


def label_of(draw: random.Random, problem: str, size: int) -> Any:
    if problem == "single_label_classification":
        return f"LABEL_{draw.randrange(size)}"
    if problem == "regression":
        numbers = [draw.gauss(0, 1) for _ in range(size)]
        return numbers if size > 1 else numbers[0]
    return [f"LABEL_{number}" for number in range(size) if draw.random() < 0.4]


def pooler(model: Any) -> Tensor:
    return cast(Tensor, model.pooler.weight.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_transformers_are_read_and_written_with_equal_logits(kind: str, tmp_path: Path) -> None:
    for number, (problem, size) in enumerate(PROBLEMS):
        folder, back = tmp_path / f"{number}", tmp_path / f"{number}-back"
        theirs, fast = published(folder, kind, num_labels=size, problem_type=problem)
        assert recorded_task(folder) == "text_classification"
        ours = cast(Any, load_model(folder))
        assert (ours.problem_type, len(ours.labels)) == (problem, size)
        draw = random.Random(number)
        pairs = [(tiny.sentence(draw, draw.randint(1, 8)), tiny.sentence(draw, draw.randint(1, 8))) for _ in range(7)]
        given = fast(*zip(*pairs, strict=True), padding=True, return_tensors="pt", return_token_type_ids=kind == "Bert")
        sizes = given["attention_mask"].sum(1)
        firsts = torch.tensor([len(fast(first)["input_ids"]) for first, _ in pairs])
        with torch.no_grad():
            wanted = theirs(**given).logits
            found = ours.logits_at(given["input_ids"], sizes - 1, sizes, firsts=firsts)
            assert torch.allclose(found, wanted, atol=1e-5)
            save_model(folder, back)
            auto = transformers.AutoModelForSequenceClassification
            again, report = auto.from_pretrained(back, output_loading_info=True)
            assert not any(report.values())
            assert (again.config.problem_type or PROBLEMS[0][0], again.config.num_labels) == (problem, size)
            assert torch.allclose(again.eval()(**given).logits, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_the_loss_of_each_problem_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    for number, (problem, size) in enumerate(PROBLEMS):
        theirs, fast = published(tmp_path / f"{number}", kind, num_labels=size, problem_type=problem)
        draw, names = random.Random(number), [f"LABEL_{each}" for each in range(size)]
        data = [{"text": text, "label": label_of(draw, problem, size)} for text in texts(9)]
        losses = []
        for row in data:
            label = row["label"]
            if problem == "single_label_classification":
                target = torch.tensor([names.index(label)])
            elif problem == "regression":
                target = torch.tensor([label if isinstance(label, list) else [label]])
            else:
                target = torch.tensor([[float(name in label) for name in names]])
            with torch.no_grad():
                losses.append(float(theirs(**fast(row["text"], return_tensors="pt"), labels=target).loss))
        choices = {"model": {}, "checkpoint": str(tmp_path / f"{number}"), "data.eval_fraction": 0.0}
        found = begin(None, choices, train_dataset=data, eval_dataset=data, processor=None).loop.evaluate()
        assert found["eval/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4), (problem, size)


def test_a_stored_pooler_is_the_first_one_and_another_is_drawn(tmp_path: Path) -> None:
    def started(name: str, **choices: Any) -> Any:
        own = {"model": {}, "checkpoint": str(tmp_path / name), **choices}
        return begin(None, own, processor=None).loop.model

    for suffix in ("Model", "ForPreTraining", "ForMaskedLM"):
        theirs = published(tmp_path / suffix, suffix=suffix)[0]
        first, second = started(suffix), started(suffix, seed=5)
        assert not torch.equal(first.score.weight, second.score.weight)
        if suffix == "ForMaskedLM":
            assert not torch.equal(pooler(first), pooler(second))
            continue
        held = (theirs if suffix == "Model" else theirs.bert).pooler.dense
        for model in (first, second):
            assert torch.equal(pooler(model), held.weight) and torch.equal(model.pooler.bias, held.bias)
    # RobertaForSequenceClassification has a layer of its own there.
    theirs = published(tmp_path / "roberta", "Roberta", "Model")[0]
    assert not torch.equal(pooler(started("roberta")), theirs.pooler.dense.weight)


def test_a_run_is_evaluated_and_trained_further_with_its_pooler_also_for_other_labels(tmp_path: Path) -> None:
    assembly, ended = run(tmp_path / "run", {"trainer.max_steps": 3})
    model = assembly.loop.model
    choices = {"model": {}, "checkpoint": str(tmp_path / "run"), "seed": 9}
    further = begin(None, choices, processor=None, eval_dataset=rows(12)).loop
    assert torch.equal(pooler(further.model), pooler(model))
    assert torch.equal(further.model.score.weight, model.score.weight)
    other = begin(None, choices | {"labels": ["good", "fair", "bad"]}, processor=None).loop.model
    assert torch.equal(pooler(other), pooler(model)) and not torch.equal(other.score.weight, model.score.weight)
    assert torch.equal(pooler(load_model(tmp_path / "run")), pooler(model))
    with pytest.raises(ConfigError, match="no program is written of this network"):
        values = {"checkpoint": str(tmp_path / "run"), "output_dir": str(tmp_path / "out"), "format": "torch_export"}
        KIT.export_program(KIT.read_options(values))
    initial = begin(None).loop.model
    assert not torch.equal(pooler(initial), pooler(model)) and ended["eval/loss"] > 0


@THEIR_NAMES
@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_an_adapter_and_the_head_are_those_of_peft_both_ways(kind: str, tmp_path: Path) -> None:
    start, auto = tmp_path / "base", transformers.AutoModelForSequenceClassification
    theirs, fast = published(start, kind, num_labels=3)
    labels = {"labels": ["a", "b", "c"]}
    data = [{"text": text, "label": "abc"[number % 3]} for number, text in enumerate(texts(12))]
    choices = {"model": {}, "checkpoint": str(start), "lora.rank": 2, "trainer.max_steps": 3} | labels
    # All dense layers, whose end is also that of the pooler.
    choices |= {"lora.target_modules": ["query", "out", "up", "down"]}
    model = run(tmp_path / "run", choices, train_dataset=data, processor=None)[0].loop.model.eval()
    trained = {name for name, each in model.named_parameters() if each.requires_grad and ".adapters." not in name}
    assert trained == {"pooler.weight", "pooler.bias", "score.weight", "score.bias"}
    tokens = fast(data[0]["text"], return_tensors="pt")["input_ids"]
    page = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert page["target_modules"] == ["dense", "query"]
    saved = ["classifier", "pooler"] if kind == "Bert" else ["classifier"]
    assert (page["task_type"], page["modules_to_save"]) == ("SEQ_CLS", saved)
    with torch.no_grad():
        wanted = model(tokens)
        assert torch.allclose(cast(Any, load_model(tmp_path / "run"))(tokens), wanted, atol=2e-5)
        adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(start), tmp_path / "run" / "adapter").eval()
        assert torch.allclose(adapted(tokens).logits, wanted, atol=2e-5)
        # The other way, as PEFT saves by default: the pooler of BERT is that of the base.
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query", "value"], init_lora_weights=False)
        adapted = peft.get_peft_model(theirs, config).eval()
        for name, each in adapted.named_parameters():
            if "modules_to_save" in name:
                each.add_(torch.randn_like(each) * 0.2)
        wanted = adapted(tokens).logits
        adapted.save_pretrained(tmp_path / "theirs")
        _name_base(tmp_path / "theirs", start)
        ours = cast(Any, KIT.load(tmp_path / "theirs", torch.device("cpu")))
        assert torch.allclose(ours(tokens), wanted, atol=2e-5)


def _name_base(adapter: Path, base: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))


@THEIR_NAMES
def test_a_pooler_that_peft_does_not_save_is_that_of_the_base_or_the_adapter_is_refused(tmp_path: Path) -> None:
    tokens, auto = torch.tensor([[2, 7, 9, 11, 3]]), transformers.AutoModelForSequenceClassification
    for suffix in ("ForPreTraining", "ForMaskedLM"):
        base, adapter = tmp_path / suffix, tmp_path / f"{suffix}-adapter"
        published(base, suffix=suffix)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query"], init_lora_weights=False)
        adapted = peft.get_peft_model(auto.from_pretrained(base, num_labels=3), config).eval()
        adapted.save_pretrained(adapter)
        _name_base(adapter, base)
        if suffix == "ForMaskedLM":
            with pytest.raises(ModelError, match=r"part of the classifier is missing[^$]*pooler\.weight"):
                KIT.load(adapter, torch.device("cpu"))
            continue
        with torch.no_grad():
            ours = KIT.load(adapter, torch.device("cpu"))
            assert torch.allclose(ours(tokens), adapted(tokens).logits, atol=1e-5)


def test_a_cross_encoder_scores_pairs_as_in_transformers(tmp_path: Path) -> None:
    theirs, fast = published(tmp_path, num_labels=1)
    # What CrossEncoder of sentence-transformers adds.
    page = json.loads((tmp_path / "config.json").read_text())
    note = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    (tmp_path / "config.json").write_text(json.dumps(page | note))
    draw = random.Random(2)
    query, *documents = [tiny.sentence(draw, draw.randint(1, 9)) for _ in range(40)]
    with torch.no_grad():
        pairs = fast([query] * 39, documents, padding=True, return_tensors="pt", return_token_type_ids=True)
        expected = theirs(**pairs).logits[:, 0].sigmoid().tolist()
    with served(tmp_path) as client:
        reply = client.post("/score", json={"text_1": query, "text_2": documents}).json()
        assert [each["score"] for each in reply["data"]] == pytest.approx(expected, abs=1e-5)
        reply = client.post("/rerank", json={"query": query, "documents": documents, "top_n": 5}).json()
        best = sorted(range(39), key=lambda number: -expected[number])[:5]
        assert [each["index"] for each in reply["results"]] == best


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_the_pipeline_gives_what_that_of_transformers_gives(kind: str, tmp_path: Path) -> None:
    published(tmp_path, kind, num_labels=3)
    given = texts(40, 2)
    wanted = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)(given)
    for found, each in zip(pipeline("text_classification", model=tmp_path)(given, top_k=None), wanted, strict=True):
        assert [row["label"] for row in found] == [row["label"] for row in each]
        assert [row["score"] for row in found] == pytest.approx([row["score"] for row in each], abs=1e-5)
