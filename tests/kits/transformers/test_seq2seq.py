"""The tasks `translation` and `summarization`: pairs, exact sums, ranks, resumption, and what peers make of a run."""

import json
import random
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from kitforge.api import Trainer, load_model, load_processor, pipeline, save_model
from kitforge.cli.main import run as run_command
from kitforge.core.nn.context import Context, EncoderInput
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.inference.seq2seq import Seq2SeqInference, generate_targets
from kitforge.kits.kit import RunInputs
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.seq2seq import bleu, rouge
from kitforge.models import loading
from kitforge.models.catalog import config_of
from tests.distributed.ranks import run_ranks
from tests.distributed.training import TestRendezvous
from tests.kits.transformers.task_runs import TaskRuns
from tests.trainer import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
KIT: Any = TASKS["translation"]
CPU = torch.device("cpu")
T5 = {
    "family": "t5",
    "dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 48,
    "max_length": 128,
    "activation": "geglu",
}
OPTIONS: dict[str, Any] = {
    "model": T5,
    "data.batch_size": 5,
    "data.sequence_length": 48,
    "data.target_length": 40,
    "data.eval_fraction": 0.2,
    "data.eval_texts": 3,
    "data.prefix": "say: ",
    "inference.max_new_tokens": 6,
    "trainer.max_steps": 6,
    "trainer.progress": False,
    "trainer.log_every": 1,
    "optimizer.learning_rate": 1e-2,
    "device": "cpu",
}


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Pairs of very different lengths: the target is the words in reverse."""
    generator = random.Random(4)
    found = []
    for _ in range(count):
        words = [generator.choice(tiny.WORDS[:4]) for _ in range(generator.randint(1, 5))]
        found.append({"source": " ".join(words), "target": " ".join(reversed(words))})
    return found


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, finish, run = RUNS.begin, tiny.finish, RUNS.ended


def base(folder: Path) -> Path:
    """The Hugging Face folder of a random T5 with weights that matter."""
    model = loading.build(config_of({"vocab_size": 258, **T5}), device=CPU, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() == 2 else parameter.add_(0.1)
    save_model(model, folder, ByteTokenizer())
    return folder


@pytest.mark.slow
def test_it_learns_to_copy_a_word(tmp_path: Path) -> None:
    words = [{"source": word, "target": word} for word in ("sun", "moon", "river", "stone")]
    choices = {"trainer.max_steps": 150, "trainer.epochs": 200, "optimizer.learning_rate": 4e-3, "data.batch_size": 4}
    choices["trainer.eval_every"] = 150
    found = finish(begin(tmp_path, choices, train_dataset=words, eval_dataset=words))
    assert found["eval/loss"] < 0.1
    assert found["eval/bleu"] == 0 and found["eval/chrf"] == 100  # BLEU has no four-grams of one word
    translate = pipeline("translation", model=tmp_path)
    assert [each["translation_text"] for each in translate(["moon", "stone"])] == ["moon", "stone"]
    beams = pipeline("translation", model=tmp_path, options={"inference.num_beams": 3})
    assert beams("river") == [{"translation_text": "river"}]


def alone(model: Any, source: str, target: str) -> tuple[Tensor, int]:
    """The summed loss of one pair, and its tokens."""
    tokenizer = ByteTokenizer()
    ids = torch.tensor([[*tokenizer.encode(target), 256]])
    context = Context(source=EncoderInput(tokens=torch.tensor([[*tokenizer.encode("say: " + source), 256]])))
    logits = model(torch.cat([torch.tensor([[257]]), ids[:, :-1]], dim=1), context)
    return functional.cross_entropy(logits[0].double(), ids[0], reduction="sum"), ids.shape[1]


def test_the_loss_is_that_of_each_pair_alone() -> None:
    assembly = begin(None, {"data.eval_fraction": 0.0}, eval_dataset=rows(13))
    with torch.no_grad():
        parts = [alone(assembly.loop.model, **row) for row in rows(13)]
    wanted = torch.stack([loss for loss, _ in parts]).sum() / sum(count for _, count in parts)
    assert assembly.loop.evaluate()["eval/loss"] == pytest.approx(float(wanted), rel=1e-6)


def test_the_training_loss_is_a_mean_over_target_tokens(tmp_path: Path) -> None:
    choices = {"data.eval_fraction": 0.0, "data.batch_size": 40, "trainer.max_steps": 1}
    with torch.no_grad():
        parts = [alone(begin(None, choices).loop.model, **row) for row in rows()]
    wanted = torch.stack([loss for loss, _ in parts]).sum() / sum(count for _, count in parts)
    run(tmp_path, choices)
    assert tiny.records(tmp_path, "train")[0]["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_resume_on_other_rows_is_refused(tmp_path: Path) -> None:
    run(tmp_path, {"trainer.checkpoint_every": 2})
    with pytest.raises(ConfigError, match="rows are not those"):
        run(tmp_path, {"resume": "auto"}, train_dataset=rows(30))


def test_transformers_writes_the_same_targets_from_a_run(tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    run(tmp_path / "run", {"model": {}, "checkpoint": str(start), "trainer.max_steps": 2}, processor=None)
    save_model(tmp_path / "run", tmp_path / "folder")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "folder").eval()
    ours = cast(EncoderDecoder, load_model(tmp_path / "run"))
    sources = [[*ByteTokenizer().encode(text), 256] for text in ("say: sun", "say: a", "say: the old moon over")]
    for beams in (1, 3):
        options = Seq2SeqInference(max_new_tokens=9, num_beams=beams, batch_size=2)
        found = generate_targets(ours, sources, options, start_id=257, eos_ids=[256], pad_id=257)
        for source, tokens in zip(sources, found, strict=True):
            found_there = theirs.generate(torch.tensor([source]), max_new_tokens=9, num_beams=beams, do_sample=False)
            wanted = found_there[0].tolist()[1:]
            assert wanted[: wanted.index(256) if 256 in wanted else 9] == tokens


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_an_adapter_learns_and_peft_computes_what_it_computes(kind: str, tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    choices = {"model": {}, "checkpoint": str(start), "lora.rank": 4, "lora.kind": kind, "trainer.max_steps": 4}
    model = run(tmp_path / "run", choices, processor=None).loop.model.eval()
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all(".adapters." in name for name in trained)
    assert any(".cross." in name for name in trained) and any(name.startswith("encoder.") for name in trained)
    source, target = torch.tensor([[5, 6, 7, 256]]), torch.tensor([[257, 9, 8]])
    with torch.no_grad():
        wanted = model(target, Context(source=EncoderInput(tokens=source)))
        found = load_model(tmp_path / "run")(target, Context(source=EncoderInput(tokens=source)))
        # fp32 sums in the orders of different processors.
        rounding = 1e-5 * float(wanted.abs().max())
        assert torch.allclose(found, wanted, atol=rounding)
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    if kind == "qlora":
        return
    theirs = peft.PeftModel.from_pretrained(
        transformers.T5ForConditionalGeneration.from_pretrained(start), tmp_path / "run" / "adapter"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(input_ids=source, decoder_input_ids=target).logits, wanted, atol=rounding)


def test_frozen_parameters_stay_as_they_are(tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    choices = {"model": {}, "checkpoint": str(start), "freeze": ["encoder.*"], "trainer.max_steps": 2}
    model = run(tmp_path / "run", choices, processor=None).loop.model
    before = dict(loading.load(start, device=CPU).named_parameters())
    frozen = {name for name, each in model.named_parameters() if torch.equal(each, before[name])}
    assert frozen == {name for name in before if name.startswith("encoder.")}


@pytest.mark.slow
def test_python_trains_evaluates_and_predicts_in_a_few_lines(tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    short = {"trainer.max_steps": 2, "trainer.progress": False, "device": "cpu", "data.eval_texts": 2}
    options = short | {"data.sequence_length": 48, "inference.max_new_tokens": 3}
    trainer = Trainer("summarization", start, rows(), rows(9), output_dir=tmp_path / "run", options=options)
    assert trainer.options.optimizer.learning_rate == 5e-5
    first = trainer.train()
    assert set(trainer.evaluate()) == {"eval/loss", "eval/rouge1", "eval/rouge2", "eval/rougeL"}
    (answer,) = trainer.predict("moon")
    assert set(answer) == {"summary_text"}
    assert load_processor(first).vocab_size == 258  # type: ignore[attr-defined]
    assert Trainer("summarization", first, rows(), options=options).train().metrics


@pytest.mark.slow
def test_the_command_line_trains_evaluates_and_writes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"en": row["source"], "de": row["target"]} for row in rows()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, folder = f"data.train={tmp_path / 'rows.jsonl'}", tmp_path / "run"
    columns = ["data.source=en", "data.target=de", "data.prefix=translate:", "data.eval_texts=2"]
    short = ["trainer.max_steps=2", "trainer.progress=false", "device=cpu", "inference.max_new_tokens=4"]
    command = ["train", "task=translation", "model=t5_tiny", data, f"output_dir={folder}", *columns, *short]
    assert run_command(command) == 0
    capsys.readouterr()
    held = f"data.eval={tmp_path / 'rows.jsonl'}"
    assert run_command(["evaluate", f"checkpoint={folder}", held]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"loss", "bleu", "chrf"}
    # Columns, prefix and limits are those of the run.
    target = tmp_path / "written.jsonl"
    assert run_command(["predict", f"checkpoint={folder}", held, f"output={target}"]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["en"] for line in found] == [row["source"] for row in rows()]
    translate = pipeline("translation", model=folder)
    wanted = [each["translation_text"] for each in translate([row["source"] for row in rows()])]
    assert [line["predicted_de"] for line in found] == wanted
    other = pipeline("translation", model=folder, options={"data.prefix": ""})
    assert translate._options.data.prefix == "translate:" and other._options.data.prefix == ""
    (tmp_path / "other.jsonl").write_text('{"source": "a"}\n')
    with pytest.raises(DataError, match=r"(?s)lacks a column.*expected: en"):
        run_command(["predict", f"checkpoint={folder}", f"data.eval={tmp_path / 'other.jsonl'}", "output=o.jsonl"])


BAD: list[tuple[str, dict[str, Any], Any, str]] = [
    ("no target", {}, {"source": "a"}, "has no column 'target'"),
    ("no source", {}, {"target": "a"}, "has no column 'source'"),
    ("an empty text", {}, {"source": "a", "target": " "}, "row 41.*not a pair"),
    ("a long source", {}, {"source": "a" * 49, "target": "b"}, "source of .*row 41.*too long"),
    ("a long target", {}, {"source": "a", "target": "b" * 40}, "target of .*row 41.*too long"),
]


@pytest.mark.parametrize(("choices", "extra", "message"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_a_row_that_cannot_be_used_is_named(choices: dict[str, Any], extra: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        begin(None, choices, train_dataset=[*rows(), extra])


def test_rows_can_be_skipped_or_cut_instead() -> None:
    extra = [{"source": "a" * 60, "target": "b" * 60}, {"source": "no target"}]
    choices = {"data.on_invalid": "skip", "data.on_too_long": "cut_right", "data.eval_fraction": 0.0}
    pairs = begin(None, choices, train_dataset=[*rows(), *extra]).loop.task._rows.train.pairs
    assert len(pairs) == 41
    assert (len(pairs[40].source), pairs[40].source[-1], len(pairs[40].target)) == (48, 256, 40)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task=translation"):
        TASKS["text_generation"].assemble(
            TASKS["text_generation"].read_options({"model": T5, "device": "cpu"}),
            RunInputs(train_dataset=["a text"], processor=ByteTokenizer()),
            Rendezvous.open(ParallelConfig(), "cpu"),
        )
    with pytest.raises(ConfigError, match="task=text_generation"):
        begin(None, {"model": tiny.LLAMA})
    with pytest.raises(ConfigError, match="there are no pairs"):
        begin(None, train_dataset=None)
    with pytest.raises(ConfigError, match="sequence_parallel"):
        begin(None, {"parallel.tensor": 2})
    llama = loading.build(config_of({"vocab_size": 258, **tiny.LLAMA}), device=CPU, seed=0)
    with pytest.raises(ModelError, match="reads no source"):
        begin(None, model=llama)
    with pytest.raises(ModelError, match="reads no source"):
        pipeline("translation", model=llama, processor=ByteTokenizer())
    translate = KIT.open_pipeline(begin(None).loop.model, ByteTokenizer(), KIT.read_options({}))
    with pytest.raises(DataError, match="text 1 is too long"):
        translate(["a", "b" * 256])


def test_bleu_and_rouge_are_those_of_their_libraries() -> None:
    import sacrebleu

    texts, wanted = ["the cat sat on the mat .", "a dog"], ["the cat sat on a mat .", "the dog runs"]
    assert bleu(texts, wanted)["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [wanted]).score)
    assert bleu(wanted, wanted) == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    # One of two unigrams of "a dog" is among three: precision 1/2, recall 1/3.
    assert rouge(["a dog"], ["the dog runs"])["rouge1"] == pytest.approx(0.4)
    assert rouge(wanted, wanted) == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}


def on_rank(_rank: int, degrees: ParallelConfig, folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    names = ("data", "shard", "tensor", "sequence_parallel")
    mesh = {f"parallel.{name}": getattr(degrees, name) for name in names}
    return finish(begin(Path(folder), mesh, TestRendezvous(degrees)))


@pytest.mark.slow
def test_ranks_that_hold_shards_train_what_one_process_trains(tmp_path: Path) -> None:
    # The other axes are rows of tests/verify/test_contracts.py.
    degrees = ParallelConfig(shard=2, sequence_parallel=False)
    wanted = finish(begin(tmp_path / "alone"))
    for found in run_ranks(2, on_rank, degrees, str(tmp_path / "ranks")):
        assert found == pytest.approx(wanted, rel=1e-4)
    one, two = (cast(Any, load_model(tmp_path / name)) for name in ("alone", "ranks"))
    for name, parameter in one.named_parameters():
        assert torch.allclose(parameter, two.get_parameter(name), atol=1e-4), name
