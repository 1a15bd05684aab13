"""The task `token_classification`: words and tags, entities, ranks, resumption, and what peers make of it."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
import transformers
from seqeval.metrics import f1_score, precision_score, recall_score

from kitforge.api import Trainer, load_model, pipeline, save_model
from kitforge.data.text.tagged_words import words_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError, ModelError
from kitforge.kits.registry import kit_of_folder, recorded_task
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.token_classification import TaggedRows, read_tagged
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.kits.transformers.test_adapters import base
from tests.trainer import tiny

KIT: Any = TASKS["token_classification"]
OPTIONS = SHORT | {"model": tiny.LLAMA, "data.batch_size": 5, "data.sequence_length": 64, "trainer.max_steps": 6}
LABELS = ("B-LOC", "B-PER", "I-PER", "O")


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Words of which some are names; of a name of two words the second is inside."""
    generator = random.Random(5)
    found = []
    for _ in range(count):
        words, tags = ["the"], ["O"]
        for _ in range(generator.randint(0, 3)):
            chosen, its = generator.choice(
                [(["moon"], ["O"]), (["Rome"], ["B-LOC"]), (["Ann", "Zoë"], ["B-PER", "I-PER"])]
            )
            words += chosen
            tags += its
        found.append({"tokens": words, "ner_tags": tags})
    return found


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, run = RUNS.begin, RUNS.run


def test_a_label_lies_on_the_first_token_of_its_word() -> None:
    tokens, owners = words_of(ByteTokenizer(), ["Zoë", "is"])
    assert bytes(tokens).decode() == "Zoë is"
    assert owners == [0, 0, 0, 0, -1, 1, 1]
    given = [{"tokens": ["Zoë", "is"], "ner_tags": ["B-PER", "O"]}] * 2
    for labels_all, wanted in ((False, [1, -1, -1, -1, -1, 3, -1]), (True, [1, 2, 2, 2, -1, 3, 3])):
        choices = {"data.eval_fraction": 0.0, "labels": list(LABELS), "data.label_all_tokens": labels_all}
        data = begin(None, choices, train_dataset=given).loop.task._rows
        batch = cast(TaggedRows, data.train).batch(torch.arange(1).numpy())
        assert batch["labels"].tolist() == [wanted]
        assert batch["firsts"].nonzero()[:, 1].tolist() == [0, 5]


@pytest.mark.parametrize("known", [(), ("I-PER", "O", "B-PER"), ("B-LOC", "O")])
def test_the_numbers_of_a_class_label_are_its_names(known: tuple[str, ...]) -> None:
    names, given = ["O", "B-PER", "I-PER"], [{"tokens": ["Zoë", "is"], "ner_tags": [1, 0]}] * 2
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    tagged = datasets.Dataset.from_list(given, features=features)
    for train_rows, held in ((tagged, None), (None, tagged)):
        if train_rows is None and not set(names) <= set(known):
            continue
        options = KIT.read_options(tiny.nested(OPTIONS | {"data.eval_fraction": 0.0}))
        data = read_tagged(train_rows, held, ByteTokenizer(), options, known)
        batch = (data.train if held is None else data.eval).batch(np.arange(1))
        labels = [data.labels[each] for each in batch["labels"][0].tolist() if each >= 0]
        assert labels == ["B-PER", "O"]
        # Other classes than the model's are learnt by a head of their own.
        assert data.labels == (known if set(names) <= set(known) else tuple(names))


@pytest.mark.parametrize("spell", [list, np.array, torch.tensor, lambda tags: list(map(np.int64, tags))])
def test_tags_of_numpy_and_torch_are_numbers_and_the_one_of_no_class_is_none(spell: Any) -> None:
    given = [{"tokens": np.array(["Zoë", "is"]), "ner_tags": spell(tags)} for tags in ([1, -100], [0, 1])]
    data = begin(None, {"data.eval_fraction": 0.0}, train_dataset=given).loop.task._rows
    assert data.labels == (0, 1)
    batch = data.train.batch(np.arange(2))
    assert [each[each >= 0].tolist() for each in batch["labels"]] == [[1], [0, 1]]


@pytest.mark.parametrize("labels_all", [False, True])
def test_the_metrics_are_those_of_each_row_alone(labels_all: bool) -> None:
    choices = {"trainer.micro_batch_size": 3, "data.label_all_tokens": labels_all, "data.batch_size": 3}
    assembly = begin(None, choices, eval_dataset=rows(17))
    model, found = assembly.loop.model, assembly.loop.evaluate()
    losses, wanted, ours = [], [], []
    for row in rows(17):
        tokens, owners = words_of(ByteTokenizer(), row["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0].double()
        seen: dict[int, str] = {}
        for position, word in enumerate(owners):
            is_first = word >= 0 and word not in seen
            if is_first or (labels_all and word >= 0):
                tag = row["ner_tags"][word]
                tag = tag if is_first else tag.replace("B-PER", "I-PER")
                losses.append(-logits[position].log_softmax(-1)[LABELS.index(tag)])
            seen.setdefault(word, LABELS[int(logits[position].argmax())])
        wanted.append(row["ner_tags"])
        ours.append([seen[number] for number in range(len(row["tokens"]))])
    assert found["eval/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
    assert found["eval/f1"] == pytest.approx(f1_score(wanted, ours))
    assert found["eval/precision"] == pytest.approx(precision_score(wanted, ours))
    assert found["eval/recall"] == pytest.approx(recall_score(wanted, ours))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_transformers_gives_the_same_logits_and_its_folder_is_read_back(family: str, tmp_path: Path) -> None:
    bloom = {"family": "bloom", "dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 64}
    run(tmp_path / "run", {"model": {"llama": tiny.LLAMA, "gpt2": tiny.GPT2, "bloom": bloom}[family]})
    save_model(tmp_path / "run", tmp_path / "folder")
    loader: Any = transformers.AutoModelForTokenClassification
    theirs, notes = loader.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert theirs.config.id2label == dict(enumerate(LABELS))
    ours = cast(Any, load_model(tmp_path / "run"))
    assert bool((ours.score.bias != 0).any())
    ids = torch.tensor([ByteTokenizer().encode("the moon of Rome")])
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(ids).logits, ours(ids), atol=1e-5)
        again = cast(Any, load_model(tmp_path / "folder"))
        assert torch.equal(again(ids), ours(ids))
    assert again.labels == LABELS
    assert recorded_task(tmp_path / "folder") == "token_classification"
    assert kit_of_folder(tmp_path / "folder") is KIT
    same = begin(None, {"model": {}, "checkpoint": str(tmp_path / "folder")}).loop.model
    assert torch.equal(same.score.bias, ours.score.bias)


def test_a_space_that_begins_a_word_by_itself_is_its_first_token_in_a_row_too() -> None:
    tokenizer: Any = SimpleNamespace(
        encode=lambda word: list(map(ord, f" {word}")),  # as in LLaMA 2's vocabulary
        encode_offsets=lambda text: (list(map(ord, text)), [(at, at + 1) for at in range(len(text))]),
    )
    assert words_of(tokenizer, ["ab", "c"]) == (list(map(ord, "ab c")), [0, 0, 1, 1])


def bpe_folder(folder: Path) -> Any:
    """A classifier of transformers with initial weights, and a byte-level tokenizer trained on these rows."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(row["tokens"]) for row in rows()], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        id2label=dict(enumerate(LABELS)), label2id={}, initializer_range=0.4,
    )  # fmt: skip
    model = transformers.LlamaForTokenClassification(config).eval()
    model.save_pretrained(folder)
    return transformers.pipeline("token-classification", model=model, tokenizer=fast)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_the_pipeline_gives_what_that_of_transformers_gives(strategy: Any, tmp_path: Path) -> None:
    theirs = bpe_folder(tmp_path)
    ours = pipeline("token_classification", model=tmp_path)
    # Each word begins as one of the training rows: of a space that is a token of its own they make an entity.
    text = "the moonlit Annex Zoë, Romes moon Ann"
    wanted = theirs(text, aggregation_strategy=strategy, ignore_labels=["O"])
    found = ours(text, aggregation_strategy=strategy)
    assert len(wanted) > 2
    for mine, other in zip(found, wanted, strict=True):
        # Their word is the spelling of the token, or loses spaces.
        assert {**mine, "word": "", "score": 0} == {**other, "word": "", "score": 0}
        assert mine["score"] == pytest.approx(float(other["score"]), abs=1e-5)
        assert mine["word"] == text[mine["start"] : mine["end"]]
    assert ours([text, "Rome"], aggregation_strategy=strategy)[0] == found


def test_labels_that_are_no_chunk_tags_have_no_entities() -> None:
    given = [{"tokens": ["a", "b"], "ner_tags": [1, 0]}] * 5
    found = begin(None, train_dataset=given).loop.evaluate()
    assert set(found) == {"eval/loss", "eval/accuracy", "eval/f1"}


@pytest.mark.parametrize("tags", ["ner_tags", "tags"])
def test_the_tags_are_found_in_either_column(tags: str) -> None:
    found = [{"tokens": each["tokens"], tags: each["ner_tags"]} for each in rows()]
    own, other = (begin(None, train_dataset=each).loop.task._rows for each in (rows(), found))
    assert own.labels == other.labels
    assert own.fingerprint == other.fingerprint


def test_another_model_and_a_long_text_are_refused(tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    with pytest.raises(ModelError, match="no classifier here"):
        KIT.load(start, torch.device("cpu"))
    with pytest.raises(ModelError, match="does not label tokens"):
        pipeline("token_classification", model=cast(Any, load_model(start)), processor=ByteTokenizer())
    options = {"trainer.max_steps": 1, "trainer.progress": False, "device": "cpu", "data.sequence_length": 64}
    trainer = Trainer("token_classification", start, rows(), rows(9), output_dir=tmp_path / "run", options=options)
    trainer.train()
    for text in ("", "a" * 5000):
        with pytest.raises(DataError, match="text 0 does not fit"):
            trainer.predict(text)
