"""The tasks `translation` and `summarization`: pairs, exact sums, ranks, resumption, and what peers make of a run."""

import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kitforge.api import load_model, pipeline, save_model
from kitforge.cli.main import run as run_command
from kitforge.core.nn.context import Context, EncoderInput
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.kit import RunInputs
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.seq2seq import PairDataOptions, Seq2SeqOptions, bleu, read_pairs, read_texts, rouge
from kitforge.models import loading
from kitforge.models.catalog import config_of
from tests.kits.transformers.task_runs import SHORT, TaskRuns
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
OPTIONS = SHORT | {
    "model": T5,
    "data.batch_size": 5,
    "data.sequence_length": 48,
    "data.target_length": 40,
    "data.eval_texts": 3,
    "data.prefix": "say: ",
    "inference.max_new_tokens": 6,
    "trainer.max_steps": 6,
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


def alone(model: Any, source: str, target: str) -> tuple[Tensor, int]:
    """The summed loss of one pair, and its tokens."""
    tokenizer = ByteTokenizer()
    ids = torch.tensor([[*tokenizer.encode(target), 256]])
    context = Context(source=EncoderInput(tokens=torch.tensor([[*tokenizer.encode("say: " + source), 256]])))
    logits = model(torch.cat([torch.tensor([[257]]), ids[:, :-1]], dim=1), context)
    return functional.cross_entropy(logits[0].double(), ids[0], reduction="sum"), ids.shape[1]


def test_the_training_loss_is_a_mean_over_target_tokens(tmp_path: Path) -> None:
    choices = {"data.eval_fraction": 0.0, "data.batch_size": 40, "trainer.max_steps": 1}
    with torch.no_grad():
        parts = [alone(begin(None, choices).loop.model, **row) for row in rows()]
    wanted = torch.stack([loss for loss, _ in parts]).sum() / sum(count for _, count in parts)
    run(tmp_path, choices)
    assert tiny.records(tmp_path, "train")[0]["loss"] == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
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
    theirs = peft.PeftModel.from_pretrained(
        transformers.T5ForConditionalGeneration.from_pretrained(start), tmp_path / "run" / "adapter"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(input_ids=source, decoder_input_ids=target).logits, wanted, atol=rounding)


def test_the_options_of_a_run_are_those_of_its_pipeline_and_its_predictions(tmp_path: Path) -> None:
    run(tmp_path / "run", {"data.prefix": "translate:", "trainer.max_steps": 1})
    found = [pipeline("translation", tmp_path / "run", options=each) for each in ({}, {"data.prefix": ""})]
    assert [each._options.data.prefix for each in found] == ["translate:", ""]
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n')
    words = [f"checkpoint={tmp_path / 'run'}", f"data.eval={tmp_path / 'other.jsonl'}", "output=o.jsonl"]
    with pytest.raises(DataError, match=r"(?s)lacks a column.*expected: source"):
        run_command(["predict", *words])


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task=translation"):
        TASKS["text_generation"].assemble(
            TASKS["text_generation"].read_options({"model": T5, "device": "cpu"}),
            RunInputs(train_dataset=["a text"], processor=ByteTokenizer()),
            Rendezvous.open(ParallelConfig(), "cpu"),
        )
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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=9), st.booleans())
def test_cut_pairs_are_counted_by_the_tokenizer(
    caplog: pytest.LogCaptureFixture, lengths: list[tuple[int, int]], has_eval: bool
) -> None:
    caplog.clear()
    data = PairDataOptions(
        sequence_length=20, target_length=12, on_too_long="cut_right", prefix="say: ", eval_fraction=0.0
    )
    given_rows = [{"source": "a" * source, "target": "b" * target} for source, target in lengths]
    texts = read_texts(given_rows, data)
    read = read_pairs(texts, texts[:2] if has_eval else None, ByteTokenizer(), Seq2SeqOptions(data=data)).train.pairs
    # A byte a token, and the end of the text.
    sizes = [(min(5 + source + 1, 20), min(target + 1, 12)) for source, target in lengths]
    assert [(len(each.source), len(each.target)) for each in read] == sizes
    cut = [5 + source + 1 > 20 or target + 1 > 12 for source, target in lengths]
    sets = [cut, cut[:2]] if has_eval else [cut]
    wanted = [f"{len(each)} pairs: {sum(each)} were cut" for each in sets if any(each)]
    assert [record.getMessage() for record in caplog.records] == wanted
