"""The task `text_classification`: rows and labels, exact sums, ranks, resumption, and what peers make of it."""

import random
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch

from kitforge.api import evaluate, load_model, pipeline
from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.kit import RunInputs
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.classification import read_data
from tests.distributed.ranks import run_ranks
from tests.distributed.training import TestRendezvous
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.kits.transformers.test_adapters import base
from tests.trainer import tiny

KIT: Any = TASKS["text_classification"]
OPTIONS = SHORT | {"model": tiny.LLAMA, "data.batch_size": 5, "data.sequence_length": 48, "trainer.max_steps": 8}
LABELS = ("bad", "fair", "good")


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Texts of very different lengths; a word says which label."""
    generator = random.Random(4)
    found = []
    for _ in range(count):
        label = generator.choice(LABELS)
        words = [generator.choice(tiny.WORDS[:4]) for _ in range(generator.randint(0, 5))]
        words.insert(generator.randint(0, len(words)), label)
        found.append({"text": " ".join(words), "label": label})
    return found


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, finish, run = RUNS.begin, tiny.finish, RUNS.ended


def test_a_resume_on_other_rows_is_refused(tmp_path: Path) -> None:
    run(tmp_path, {"trainer.checkpoint_every": 2})
    with pytest.raises(ConfigError, match="rows are not those"):
        run(tmp_path, {"resume": "auto"}, train_dataset=rows(50))


def test_labels_are_numbers_in_their_order_or_texts_by_the_alphabet() -> None:
    def labels(*values: Any) -> tuple[Any, ...]:
        given = [{"text": f"row {number}", "label": value} for number, value in enumerate(values)]
        model = begin(None, {"data.eval_fraction": 0.0}, train_dataset=given).loop.model
        return cast(tuple[Any, ...], model.labels)

    assert labels(10, 9, 2) == (2, 9, 10)
    assert labels("b", "a", "b") == ("a", "b")
    assert labels(1.0, 0.0) == (0, 1)
    # A number that is no name is an index.
    given = [{"text": "a", "label": 0}, {"text": "b", "label": 2}]
    data = begin(None, {"data.eval_fraction": 0.0, "labels": list(LABELS)}, train_dataset=given).loop.task._rows
    assert data.train.labels.tolist() == [0, 2]


def test_what_is_no_classifier_is_refused(tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    with pytest.raises(ModelError, match="no classifier here"):
        KIT.load(start, torch.device("cpu"))
    with pytest.raises(ModelError, match="no labels yet"):
        options = KIT.read_options(tiny.nested(OPTIONS | {"model": {}, "checkpoint": str(start)}))
        evaluate(options, RunInputs(eval_dataset=rows(9)), KIT)
    with pytest.raises(ModelError, match="does not label texts"):
        pipeline("text_classification", model=cast(Any, load_model(start)), processor=ByteTokenizer())


def sharded_adapter(_rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    degrees = ParallelConfig(shard=2, sequence_parallel=False)
    mesh = {"parallel.shard": 2, "parallel.sequence_parallel": False}
    choices = mesh | {"model": {}, "checkpoint": str(folder / "base"), "lora.rank": 2, "trainer.max_steps": 2}
    finish(begin(folder / "run", choices, TestRendezvous(degrees)))


@pytest.mark.slow
def test_two_ranks_write_the_whole_adapter_and_head(tmp_path: Path) -> None:
    base(tmp_path / "base")
    run_ranks(2, sharded_adapter, tmp_path)
    file = TensorFile(tmp_path / "run" / "adapter" / "adapter_model.safetensors", ModelError)
    model = cast(Any, load_model(tmp_path / "run"))
    assert torch.equal(file.tensor("base_model.model.score.weight"), model.score.weight)
    names = [name for name in file.names() if name.endswith("layers.1.self_attn.q_proj.lora_A.weight")]
    assert [tuple(file.tensor(name).shape) for name in names] == [(2, 32)]


def test_a_number_of_an_evaluation_row_that_is_none_of_the_labels_is_refused() -> None:
    given = [{"text": "a", "label": 1}, {"text": "b", "label": 2}, {"text": "c", "label": 3}]
    with pytest.raises(DataError, match=r"row \d.*(?s:unknown label.*got: +0)"):
        begin(None, {}, train_dataset=given, eval_dataset=[given[0], {"text": "d", "label": 0}])


def test_the_numbers_of_a_class_label_are_its_names_and_minus_100_is_none() -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["spam", "ham"])}
    )
    labelled = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    unlabelled = [
        {"text": "a", "label": np.int64(1)},
        {"text": "b", "label": np.int64(0)},
        {"text": "c", "label": -100},
    ]
    options = KIT.read_options(tiny.nested(OPTIONS | {"data.eval_fraction": 0.0}))
    # Its own names in their order, the same ones of a checkpoint, and a head of its own beside others.
    for known, names in (((), ("spam", "ham")), (("ham", "spam"), ("ham", "spam")), (("no", "yes"), ("spam", "ham"))):
        data = read_data(labelled, None, ByteTokenizer(), options, known)
        assert data.labels == names
        assert [data.labels[each] for each in data.train.labels] == ["ham", "spam"]
    with pytest.raises(DataError, match=r"row 3 of the data is not a labelled text\n.*label=-100"):
        read_data(unlabelled, None, ByteTokenizer(), options, ())
    assert read_data(unlabelled[:2], None, ByteTokenizer(), options, ("no", "yes")).train.labels.tolist() == [1, 0]
