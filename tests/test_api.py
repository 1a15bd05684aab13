"""The front door: names, folders, runs and objects in memory train, evaluate, predict and generate."""

import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

from kitforge.api import Trainer, load_model, load_processor, pipeline, replay, save_model
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, KitforgeError, ModelError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import Task
from tests.small_run import OPTIONS, TEXT, WITHOUT_MODEL

DOCUMENTS = [f"Document {number} says: {'word ' * (number % 7 + 3)}" for number in range(80)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KITFORGE_CACHE", str(tmp_path / "cache"))
    Path("corpus.txt").write_text(TEXT)
    return tmp_path


def trainer(data: Any = "corpus.txt", **options: Any) -> Trainer:
    chosen = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
    return Trainer("text_generation", "llama_tiny", data, options=chosen)


class Line(Task):
    """y = 2x + 1 with a loss of its own."""

    def build(self, world: World) -> nn.Module:
        return nn.Linear(1, 1).to(world.device)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in itertools.count(cursor.step):
            x = torch.rand(16, 1, generator=torch.Generator().manual_seed(step))
            yield [{"x": x, "y": 2 * x + 1}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": ((model(micro_batch["x"]) - micro_batch["y"]) ** 2).sum()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"eval/loss": float((model(torch.ones(1, 1)) - 3).square().sum())}


LINE = {"trainer.max_steps": 5, "trainer.progress": False, "optimizer.learning_rate": 0.1, "device": "cpu"}


# The interface is the one that the design fixes


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            Trainer,
            "(task, model=None, train_dataset=None, eval_dataset=None, *, roles=None, processor=None, "
            "output_dir=None, options=None, callbacks=())",
        ),
        (Trainer.train, "(self, resume=None)"),
        (Trainer.fit, "(self, resume=None)"),
        (Trainer.finetune, "(self, checkpoint)"),
        (Trainer.evaluate, "(self)"),
        (Trainer.predict, "(self, inputs)"),
        (pipeline, "(task, model, processor=None, options=None)"),
    ],
)
def test_signatures_are_those_that_others_rely_on(method: Any, expected: str) -> None:
    signature = inspect.signature(method)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == expected


def test_a_replay_knows_the_names_of_other_libraries_for_its_options(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: grpo\n")
    with pytest.raises(ConfigError, match=r"(?s)'n_samples_per_prompt'.*here it is 'rl\.num_generations'"):
        replay(tmp_path, 1, {"n_samples_per_prompt": 2})


def test_a_run_has_folder_model_tokenizer_and_metrics() -> None:
    run = trainer().train()
    assert isinstance(run, Run)
    assert isinstance(run.model, nn.Module)
    assert isinstance(run.processor, ByteTokenizer)
    assert set(run.metrics) == {"loss", "eval/loss", "eval/perplexity"}
    assert {path.name for path in run.folder.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "report.html",
        "samples",
        "tokenizer",
    }
    assert [row["step"] for row in run.history] == list(range(1, run.history[-1]["step"] + 1))
    assert run.history[-1]["eval/loss"] == run.metrics["eval/loss"]
    assert f'<a href="{run.folder}/report.html"' in run._repr_html_() and "<td>eval/loss</td>" in run._repr_html_()
    odd = Run(folder=Path("<script>"), model=run.model, processor=None, metrics={"<script>": 0.5})
    assert "<script" not in odd._repr_html_() and "report" not in odd._repr_html_()


# What training takes


@pytest.mark.parametrize(
    "data",
    [
        DOCUMENTS,
        (document for document in DOCUMENTS),
        [{"text": document} for document in DOCUMENTS],
        datasets.Dataset.from_dict({"text": DOCUMENTS}),
        Path("corpus.txt"),
        ["corpus.txt", "corpus.txt"],
    ],
    ids=["texts", "generator", "rows", "dataset", "path", "paths"],
)
def test_documents_come_in_many_shapes(data: Any) -> None:
    assert trainer(data).train().metrics["eval/loss"] > 0


def test_the_same_documents_give_the_same_weights_in_every_shape() -> None:
    runs = [trainer(data).train() for data in (DOCUMENTS, datasets.Dataset.from_dict({"text": DOCUMENTS}))]
    first, second = (run.model.state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_network_in_memory_is_trained_in_place(small_run: Path) -> None:
    network = load_model(small_run)
    run = Trainer("text_generation", network, "corpus.txt", processor=ByteTokenizer(), options=WITHOUT_MODEL).train()
    assert run.model is network


@pytest.mark.slow
def test_a_run_and_a_run_folder_are_models(small_run: Path) -> None:
    first = Trainer("text_generation", small_run, "corpus.txt", options=WITHOUT_MODEL).train()
    again = Trainer("text_generation", first, "corpus.txt", options=WITHOUT_MODEL)
    assert again.train().model is not first.model


def test_a_network_without_the_language_model_protocol_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear"):
        Trainer("text_generation", nn.Linear(2, 2), "corpus.txt", options=WITHOUT_MODEL).train()


def test_a_tokenizer_may_be_a_preset_or_a_folder(small_run: Path) -> None:
    options = OPTIONS | {"tokenizer.vocab_size": 300}
    run = Trainer("text_generation", "llama_tiny", "corpus.txt", processor="sentencepiece", options=options).train()
    again = Trainer("text_generation", None, "corpus.txt", processor=run.folder / "tokenizer", options=OPTIONS).train()
    assert again.processor.encode("ROMEO: line") == run.processor.encode("ROMEO: line")


# The other verbs


def test_fitting_evaluates_on_the_way() -> None:
    run = trainer(trainer__max_steps=10).fit()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == list(range(1, 11))


def test_finetuning_takes_weights_and_nothing_else(small_run: Path) -> None:
    still = WITHOUT_MODEL | {"optimizer.learning_rate": 1e-12, "optimizer.weight_decay": 0.0}
    run = Trainer("text_generation", None, "corpus.txt", options=still).finetune(small_run)
    assert steps(run.folder / "checkpoints") == [3]
    before = load_model(small_run).state_dict()
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-6)


def test_finetuning_does_not_drop_a_network_that_was_handed_over(small_run: Path) -> None:
    other = Trainer("text_generation", load_model(small_run), "corpus.txt", processor=ByteTokenizer())
    with pytest.raises(ConfigError, match="own network"):
        other.finetune(small_run)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(here: Path) -> None:
    whole = Trainer("text_generation", "llama_tiny", "corpus.txt", output_dir="whole", options=OPTIONS).train()
    options = OPTIONS | {"trainer.checkpoint_every": 1}
    Trainer("text_generation", "llama_tiny", "corpus.txt", output_dir="parts", options=options).train()
    resumed = Trainer("text_generation", "llama_tiny", "corpus.txt", output_dir="again", options=options)
    run = resumed.train(resume=here / "parts" / "checkpoints" / "step_1")
    weights = whole.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())


def test_evaluation_is_of_the_trained_run_or_of_the_model_as_given(small_run: Path) -> None:
    given = Trainer("text_generation", small_run, None, "corpus.txt", options=WITHOUT_MODEL)
    assert set(given.evaluate()) == {"eval/loss", "eval/perplexity"}
    trained = trainer()
    metrics = trained.train().metrics
    assert trained.evaluate()["eval/loss"] == pytest.approx(metrics["eval/loss"], abs=1e-6)


def test_prediction_answers_each_input(small_run: Path) -> None:
    given = Trainer("text_generation", small_run, options=WITHOUT_MODEL)
    answers = given.predict(["ROMEO", "JULIET"])
    assert [answer["generated_text"][:3] for answer in answers] == ["ROM", "JUL"]
    assert given.predict("ROMEO") == answers[:1]


def test_without_weights_there_is_nothing_to_predict_with() -> None:
    with pytest.raises(ModelError, match="train"):
        trainer().predict(["a"])


# Pipelines and folders


def test_a_pipeline_answers_in_the_shape_of_transformers(small_run: Path) -> None:
    generate = pipeline("text_generation", small_run, options={"inference.max_new_tokens": 3})
    (answer,) = generate("ROMEO")
    assert list(answer) == ["generated_text"]
    assert generate(["ROMEO", "JULIET"])[0] == [answer]
    assert "".join(generate.stream("ROMEO")) == answer["generated_text"].removeprefix("ROMEO")


def test_a_pipeline_loads_weights_as_they_are_stored_or_as_asked(small_run: Path, here: Path) -> None:
    tokenizer, prompt = load_processor(small_run), "ROMEO: line"
    save_model(load_model(small_run), here / "half", tokenizer, "bfloat16")
    options = {"inference.max_new_tokens": 8, "inference.temperature": 1.0, "device": "cpu"}
    halved = load_model(small_run, "cpu").bfloat16()
    wanted = pipeline("text_generation", halved, tokenizer, options)(prompt)
    assert pipeline("text_generation", here / "half", options=options)(prompt) == wanted
    assert pipeline("text_generation", small_run, options={**options, "inference.dtype": "bf16"})(prompt) == wanted
    assert {each.dtype for each in load_model(here / "half", "cpu").parameters()} == {torch.float32}
    assert {each.dtype for each in load_model(here / "half", "cpu", "auto").parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "step", "export", "memory", "Run"])
def test_a_pipeline_opens_every_kind_of_model(place: str, small_run: Path, here: Path) -> None:
    network, tokenizer = load_model(small_run), load_processor(small_run)
    save_model(network, here / "export", tokenizer)
    models: dict[str, Any] = {
        "run": small_run,
        "step": small_run / "checkpoints" / "step_3",
        "export": here / "export",
        "memory": network,
        "Run": Run(folder=small_run, model=network, processor=tokenizer, metrics={}),
    }
    options = {"inference.max_new_tokens": 3}
    given = pipeline("text_generation", models[place], tokenizer if place == "memory" else None, options)
    assert given("ROMEO") == pipeline("text_generation", small_run, options=options)("ROMEO")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pipeline("text_generation", nn.Linear(1, 1)), "without a processor"),
        (lambda: pipeline("text_generation", "nowhere"), "nowhere"),
        (lambda: pipeline("text_generation", "llama_tiny"), "without weights"),
        (lambda: pipeline("text_gen", "nowhere"), "did you mean 'text_generation'"),
        (lambda: Trainer("text_gen"), "did you mean 'text_generation'"),
        (lambda: Trainer("text_generation", "lama_tiny"), "did you mean 'llama_tiny'"),
        (lambda: Trainer("text_generation", options={"batch_size": 3}), "data.batch_size"),
        (lambda: Trainer("text_generation", options={"trainer": {"max_step": 3}}), "trainer.max_steps"),
        (lambda: Trainer("text_generation", roles={"reward": "x"}), "reward"),
        (lambda: Trainer("text_generation").train(), "nothing to train on"),
        (lambda: Trainer("text_generation").evaluate(), "nothing to evaluate on"),
        (lambda: Trainer("text_generation", None, "corpus.txt").evaluate(), "no model to evaluate"),
        (lambda: Trainer(Line(), "llama_tiny"), "brings its model"),
        (lambda: Trainer(Line(), options=LINE).finetune("x"), "builds its network"),
        (lambda: Trainer(Line(), options=LINE).predict(["x"]), "nothing to predict with yet"),
        (lambda: Trainer(Line(), options={"data.batch_size": 3}), "data"),
        (lambda: save_model(nn.Linear(1, 1), "out"), "Linear"),
    ],
)
def test_a_mistake_says_what_to_do(make: Any, words: str) -> None:
    with pytest.raises(KitforgeError) as told:
        make()
    assert words in str(told.value)


# A task of one's own


def test_a_task_of_ones_own_trains_evaluates_and_resumes(here: Path) -> None:
    own = Trainer(Line(), output_dir="runs/line", options=LINE)
    run = own.train()
    assert own.evaluate() == {"eval/loss": run.metrics["eval/loss"]}
    longer = LINE | {"trainer.max_steps": 60, "trainer.allow_config_changes": True}
    better = Trainer(Line(), output_dir="runs/line", options=longer).train(resume="auto")
    assert better.metrics["eval/loss"] < run.metrics["eval/loss"] / 4


def test_an_untrained_task_of_ones_own_is_evaluated_and_leaves_no_folder() -> None:
    assert Trainer(Line(), options=LINE).evaluate()["eval/loss"] > 0
    assert not Path("runs").exists()
