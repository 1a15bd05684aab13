"""The task `masked_lm`: masks as a function of seed, pass and row, any micro-batches and ranks, and filled masks."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch.nn import functional

from kitforge.api import load_model, pipeline, save_model
from kitforge.cli.main import run as run_command
from kitforge.data.text.masking import MaskToken, framed_rows, masked
from kitforge.data.tokenizers.loading import ByteTokenizer, load_tokenizer
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import IGNORED
from kitforge.kits.registry import recorded_task
from kitforge.kits.transformers.build import TASKS
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.tiny import published
from tests.trainer import tiny

KIT: Any = TASKS["masked_lm"]
BERT = {"family": "bert", "dim": 32, "num_layers": 2, "num_heads": 2, "mlp_dim": 48, "max_length": 128}
OPTIONS = SHORT | {"model": BERT, "data.batch_size": 7, "data.sequence_length": 48, "trainer.max_steps": 4}


def texts(count: int = 40, seed: int = 5) -> list[str]:
    draw = random.Random(seed)
    return [tiny.sentence(draw, draw.randint(1, 12)).strip() for _ in range(count)]


def rows(count: int = 40, seed: int = 5) -> list[dict[str, str]]:
    return [{"text": text} for text in texts(count, seed)]


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, run = RUNS.begin, RUNS.run


def word_pieces(folder: Path) -> Any:
    """A WordPiece tokenizer of BERT, trained on these texts, as transformers reads it."""
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(texts(200), vocab_size=60, min_frequency=1, show_progress=False)
    ends = [(text, tokenizer.token_to_id(text)) for text in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "raw.json"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"), mask_token="[MASK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", unk_token="[UNK]",
    )  # fmt: skip
    fast.save_pretrained(folder)
    (folder / "raw.json").unlink()
    return fast


def byte_pairs(folder: Path) -> Any:
    """A byte-level tokenizer of RoBERTa, whose mask takes the space before it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(texts(200), vocab_size=290, special_tokens=special, show_progress=False)
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "raw.json"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"), mask_token=tokenizers.AddedToken("<mask>", lstrip=True),
        bos_token="<s>", pad_token="<pad>", cls_token="<s>", sep_token="</s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    fast.save_pretrained(folder)
    (folder / "raw.json").unlink()
    return fast


def test_of_the_chosen_tokens_eight_of_ten_are_masked_and_one_is_any() -> None:
    tokens = np.arange(40_000) % 200
    words = np.arange(1, 40_001)
    words[3::4] = 0
    changed, targets = masked(tokens, words, (0, "mask", 3, 7), 0.15, 200, 200)
    is_chosen = targets != IGNORED
    assert np.array_equal(targets[is_chosen], tokens[is_chosen]) and np.array_equal(
        changed[~is_chosen], tokens[~is_chosen]
    )
    # Any word may be chosen, and no special token.
    assert np.array_equal(masked(tokens, words, (0,), 1.0, 200, 200)[1] != IGNORED, words > 0)
    assert is_chosen[words > 0].mean() == pytest.approx(0.15, abs=0.006)
    kept = changed[is_chosen]
    assert (kept == 200).mean() == pytest.approx(0.8, abs=0.02)
    # One of 200 of the drawn tokens is what stood there.
    assert (kept == tokens[is_chosen]).mean() == pytest.approx(0.1 + 0.1 / 200, abs=0.015)
    others = kept[(kept != 200) & (kept != tokens[is_chosen])]
    assert len(set(others.tolist())) > 150 and others.min() >= 0 and others.max() < 200


def test_masks_are_a_function_of_seed_pass_and_row() -> None:
    tokens, words = np.arange(400), np.arange(1, 401)
    found = {seed: masked(tokens, words, seed, 0.15, 999, 400) for seed in ((0, 0, 1), (0, 1, 1), (0, 0, 2), (1, 0, 1))}
    assert all(np.array_equal(one, other) for one, other in
               zip(found[0, 0, 1], masked(tokens, words, (0, 0, 1), 0.15, 999, 400), strict=True))  # fmt: skip
    assert len({targets.tobytes() for _, targets in found.values()}) == 4
    loop = begin(None, {"data.batch_size": 40, "data.eval_fraction": 0.0, "trainer.max_steps": 9}).loop
    by_epoch: dict[int, dict[int, list[int]]] = {}
    count = len(loop.task._rows.train)
    for step in loop.task.steps(loop.model, loop.state.cursor):
        for each in step:
            for row, sample, own in zip(each["rows"].tolist(), each["samples"].tolist(), each["targets"], strict=True):
                by_epoch.setdefault(sample // count, {})[row] = own[: int(loop.task._rows.train.lengths[row])].tolist()
        if len(by_epoch) == 3:
            break
    assert set(by_epoch[0]) == set(by_epoch[1]) == set(range(count))
    assert sum(by_epoch[0][row] != by_epoch[1][row] for row in range(count)) > 30
    again = begin(None, {"data.batch_size": 5, "data.eval_fraction": 0.0, "trainer.micro_batch_size": 2}).loop
    step = next(iter(again.task.steps(again.model, again.state.cursor)))
    for each in step:
        for row, own in zip(each["rows"].tolist(), each["targets"], strict=True):
            assert own[: len(by_epoch[0][row])].tolist() == by_epoch[0][row]


@pytest.mark.parametrize("make", [word_pieces, byte_pairs])
def test_words_are_those_of_transformers_collator_and_are_masked_whole(make: Any, tmp_path: Path) -> None:
    fast = make(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in texts(30, 8):
        ((tokens, words),) = framed_rows(tokenizer, text, 512)
        encoded = fast(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        assert tokens == encoded["input_ids"]
        their_words, not_first = transformers.DataCollatorForLanguageModeling._calc_word_ids_and_prob_mask(
            np.array([encoded["offset_mapping"]]), np.array([encoded["special_tokens_mask"]])
        )
        theirs = [max(int(word), 0) for word in their_words[0]]
        assert words == theirs
        # Theirs draw at the first token of a word.
        assert [word > 0 and word not in words[:index] for index, word in enumerate(words)] == (~not_first[0]).tolist()
        _, targets = masked(np.array(tokens), np.array(words), (1, text), 0.4, tokenizer.mask_id, tokenizer.vocab_size)
        chosen = {word for word, target in zip(words, targets, strict=True) if target != IGNORED}
        assert [target != IGNORED for target in targets.tolist()] == [word in chosen for word in words]


def test_a_long_text_becomes_rows_between_special_tokens(tmp_path: Path) -> None:
    fast = word_pieces(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), " ".join(texts(20))
    pieces = framed_rows(tokenizer, text, 16)
    whole = fast(text)["input_ids"]
    assert all(len(tokens) <= 16 and (tokens[0], tokens[-1]) == (whole[0], whole[-1]) for tokens, _ in pieces)
    assert [token for tokens, _ in pieces for token in tokens[1:-1]] == whole[1:-1]
    assert framed_rows(tokenizer, "", 16) == []


@pytest.mark.parametrize("whole_words", [False, True])
def test_the_loss_is_that_of_masked_tokens(whole_words: bool) -> None:
    choices = {"data.whole_words": whole_words, "data.mask_fraction": 0.3, "trainer.micro_batch_size": 2}
    loop = begin(None, choices).loop
    loop.model.double().eval()
    step = next(iter(loop.task.steps(loop.model, loop.state.cursor)))
    total = torch.zeros((), dtype=torch.float64)
    for each in step:
        for tokens, targets, length in zip(each["tokens"], each["targets"], each["lengths"].tolist(), strict=True):
            with torch.no_grad():
                logits = loop.model(tokens[None, :length])[0]
            total += functional.cross_entropy(logits, targets[:length], reduction="sum", ignore_index=IGNORED)
    with torch.no_grad():
        found = sum(float(loop.task.loss(loop.model, each)["loss"]) for each in step)
    assert found == pytest.approx(float(total), rel=1e-6)


@pytest.mark.parametrize("make", [word_pieces, byte_pairs])
def test_the_pipeline_gives_what_that_of_transformers_gives(make: Any, tmp_path: Path) -> None:
    fast = make(tmp_path)
    kind = "Bert" if make is word_pieces else "Roberta"
    options = {"vocab_size": len(fast), "max_position_embeddings": 66, "pad_token_id": fast.pad_token_id}
    model = published(tmp_path, f"{kind}ForMaskedLM", moved=0.3, **options)
    theirs = transformers.pipeline("fill-mask", model=model, tokenizer=fast)
    assert recorded_task(tmp_path) == "masked_lm"
    ours = pipeline("masked_lm", model=tmp_path)
    mask = fast.mask_token
    for text in (f"the moon {mask} over", f"{mask} river", f"stone sings {mask}"):
        found, wanted = ours(text, top_k=4), theirs(text, top_k=4)
        assert [each["token"] for each in found] == [each["token"] for each in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one["score"] == pytest.approx(float(other["score"]), abs=1e-5)
            assert one["token_str"].strip() == other["token_str"].strip()
            assert one["sequence"].strip() == other["sequence"].strip()
    several = ours(f"the {mask} over the {mask}")
    wanted = theirs(f"the {mask} over the {mask}")
    assert [[each["token"] for each in one] for one in several] == [[each["token"] for each in one] for one in wanted]


def test_it_learns_and_is_exported_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(150)))
    given = ["task=masked_lm", f"data.train={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'run'}", "device=cpu"]
    given += ["model=bert_tiny", "model.dim=32", "model.num_layers=2", "model.num_heads=2", "trainer.max_steps=50"]
    given += ["optimizer.learning_rate=1e-2", "trainer.progress=false", "trainer.eval_first=true", "data.batch_size=16"]
    assert run_command(["train", *given]) == 0
    lines = tiny.records(tmp_path / "run", "eval")
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] - 1.5
    capsys.readouterr()
    assert run_command(["evaluate", f"checkpoint={tmp_path / 'run'}", f"data.eval={tmp_path / 'rows.jsonl'}"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"loss", "accuracy"}
    save_model(tmp_path / "run", tmp_path / "folder")
    loader: Any = transformers.AutoModelForMaskedLM
    theirs, notes = loader.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    tokens = torch.tensor([ByteTokenizer().encode("the moon")])
    with torch.no_grad():
        wanted = load_model(tmp_path / "run")(tokens)
        assert torch.allclose(theirs.eval()(tokens).logits, wanted, atol=1e-5)
        assert torch.equal(load_model(tmp_path / "folder")(tokens), wanted)
    fill = pipeline("masked_lm", model=tmp_path / "run")
    assert len(fill("the mo[MASK]n")) == 5
    assert [len(each["predicted_tokens"]) for each in fill.predictions(["the mo[MASK]n", "[MASK]h[MASK]"])] == [1, 2]
    (tmp_path / "masks.jsonl").write_text(json.dumps({"text": "the mo[MASK]n sin[MASK]s"}) + "\n")
    target = tmp_path / "out.jsonl"
    chosen = [f"checkpoint={tmp_path / 'run'}", f"data.eval={tmp_path / 'masks.jsonl'}", f"output={target}"]
    assert run_command(["predict", *chosen]) == 0
    assert len(json.loads(target.read_text())["predicted_tokens"]) == 2
    # An encoder embeds texts too, without its head.
    embed = pipeline("embedding", model=tmp_path / "run", options={"pooling": "mean"})
    with torch.no_grad():
        hidden: Any = load_model(tmp_path / "run")
        wanted = functional.normalize(hidden.hidden(tokens)[0].mean(0), dim=0)
    assert np.allclose(embed(["the moon", "a far longer text"])[0], wanted, atol=1e-6)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run(tmp_path, {"trainer.max_steps": 1})
    fill = pipeline("masked_lm", model=tmp_path)
    for text in ("no mask", "[MASK]" + "a" * 300):
        with pytest.raises(DataError, match="text 0 cannot be filled"):
            fill(text)
    assert MaskToken.of(ByteTokenizer()).number == 258
