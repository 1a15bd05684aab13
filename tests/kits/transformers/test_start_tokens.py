"""The token that the targets of a T5 begin with is the one that the folder names, for `transformers` and here."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from kitforge import Trainer, load_model, load_processor, pipeline, save_model
from kitforge.data.tokenizers.loading import ByteTokenizer, load_tokenizer
from tests.kits.transformers.test_generation_settings import network, tokenizer_of


def translated(folder: Path, text: str, **choices: Any) -> str:
    """What `transformers.generate` translates, the end left out."""
    tokenizer, model = load_processor(folder), transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    source = torch.tensor([[*tokenizer.encode_prompt(text), tokenizer.eos_id]])
    return tokenizer.decode(model.generate(source, max_new_tokens=8, do_sample=False, **choices)[0, 1:].tolist())


@pytest.mark.parametrize("kind", ["json", "model", "bytes"])
def test_targets_of_an_export_begin_for_transformers_as_they_do_here(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "source", None)
    for settings in (None, {"eos_token_id": [1, tokenizer.eos_id]}):
        if settings is not None:
            (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))
        folder = tmp_path / f"folder {settings}"
        save_model(network("t5"), folder, load_tokenizer(tmp_path / "source"))
        write = pipeline("translation", str(folder), options={"inference.max_new_tokens": 8})
        assert write("Beautiful")[0]["translation_text"] == translated(folder, "Beautiful")


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(
    "names", [("config.json",), ("generation_config.json",), ("config.json", "generation_config.json")]
)
def test_targets_begin_as_the_folder_says(tmp_path: Path, names: tuple[str, ...], start: int) -> None:
    folder = tmp_path / "folder"
    save_model(network("t5"), folder, ByteTokenizer())
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_start_token_id"]
    written = {"config.json": config, "generation_config.json": {"eos_token_id": 256, "pad_token_id": 257}}
    for number, name in enumerate(names):
        written[name] = written[name] | {"decoder_start_token_id": start if name == names[-1] else start + number + 1}
    for name in {"config.json", *names}:
        (folder / name).write_text(json.dumps(written[name]))
    wanted = translated(folder, "Beautiful")
    save_model(folder, tmp_path / "again")
    for each in (folder, tmp_path / "again"):
        write = pipeline("translation", str(each), options={"inference.max_new_tokens": 8})
        assert write("Beautiful")[0]["translation_text"] == wanted == translated(each, "Beautiful")


@pytest.mark.parametrize("start", [0, 5])
def test_training_begins_targets_as_config_json_says(tmp_path: Path, start: int) -> None:
    folder = tmp_path / "folder"
    save_model(network("t5"), folder, ByteTokenizer())
    config = json.loads((folder / "config.json").read_text()) | {"decoder_start_token_id": start}
    (folder / "config.json").write_text(json.dumps(config))
    # What decides the generation does not decide the training.
    generation = {"eos_token_id": 256, "decoder_start_token_id": start + 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    rows = [{"source": "Beautiful", "target": "better"}]
    trainer = Trainer(
        "translation",
        cast(Any, None),
        rows,
        rows,
        output_dir=tmp_path / "run",
        options={"checkpoint": str(folder), "data.eval_texts": 0, "device": "cpu", "trainer.max_steps": 1},
    )
    found = trainer.evaluate()["eval/loss"]
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    source, target = (torch.tensor([[*ByteTokenizer().encode(text), 256]]) for text in ("Beautiful", "better"))
    assert found == pytest.approx(theirs(input_ids=source, labels=target).loss.item(), rel=1e-5)
    assert load_model(folder).config.decoder_start_id == start
