"""A model that was trained with a begin token gets it wherever it reads a text: the same texts as `transformers`."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kitforge import Trainer, load_model, load_processor, pipeline
from kitforge.cli import main as cli
from kitforge.data.chat.template import template_of
from kitforge.inference.logprobs import token_logprobs
from tests.small_run import WITHOUT_MODEL
from tests.tiny import published
from tests.tokenizer_folders import CORPUS, KINDS, write_kind

PROMPTS = ["Beautiful is", "x", "Explicit is better than"]
NEW_TOKENS = 12
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=["llama3", "glm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights beside a tokenizer that begins every text; without the begin other texts come of it."""
    folder = write_kind(request.param, tmp_path_factory.mktemp(request.param))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 64}
    ends = {"bos_token_id": KINDS[request.param][4][0], "eos_token_id": None}
    published(folder, "LlamaForCausalLM", vocab_size=300, **sizes, **ends)
    return folder


@functools.cache
def peer(folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the network of a folder as `transformers` reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(folder)


def theirs(folder: Path, prompt: str, **how: Any) -> str:
    tokenizer, network = peer(folder)
    tokens = tokenizer(prompt, return_tensors="pt", **how)["input_ids"]
    chosen = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    found = network.generate(tokens, **chosen, eos_token_id=list(load_processor(folder).eos_ids), pad_token_id=0)
    return str(tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True))


def command(verb: str, folder: Path, *arguments: str) -> int:
    return cli.run([verb, f"checkpoint={folder}", "device=cpu", f"inference.max_new_tokens={NEW_TOKENS}", *arguments])


@pytest.mark.slow
def test_every_way_to_generate_gives_the_texts_of_transformers(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    wanted = [theirs(folder, prompt) for prompt in PROMPTS]
    assert wanted != [theirs(folder, prompt, add_special_tokens=False) for prompt in PROMPTS]
    opened = pipeline("text_generation", str(folder))
    found = [each[0]["generated_text"] for each in opened(PROMPTS, max_new_tokens=NEW_TOKENS)]
    assert found == [prompt + text for prompt, text in zip(PROMPTS, wanted, strict=True)]
    assert "".join(opened.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS)) == wanted[0]
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    assert command("generate", folder, f"data.eval={prompts}", f"output={target}") == 0
    assert [json.loads(line)["generated_text"] for line in target.read_text().splitlines()] == wanted
    capsys.readouterr()
    assert command("generate", folder, f"prompt={PROMPTS[0]}") == 0
    assert capsys.readouterr().out == f"{found[0]}\n"


def test_a_chat_template_writes_the_begin_itself(tmp_path: Path) -> None:
    write_kind("llama3", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokens = template_of(load_processor(tmp_path)).tokens([{"role": "user", "content": "x"}], opens_reply=True)
    assert tokens.count(0) == 1 and tokens[0] == 0


def test_a_folder_is_measured_as_it_reads(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    tokenizer, network = load_processor(folder), load_model(folder, "cpu")
    texts = [[*tokenizer.encode_prompt(text), tokenizer.eos_id] for text in PROMPTS]
    length = sum(map(len, texts)) - 1
    arguments = [f"data.eval={tmp_path / 'corpus.jsonl'}", f"data.sequence_length={length}", f"data.cache={tmp_path}"]
    assert command("evaluate", folder, *arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    logprobs = [each for scores in token_logprobs(network, texts, 64) for each in scores]
    assert found == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-6)


def test_a_folder_that_is_finetuned_keeps_its_begin(folder: Path, tmp_path: Path) -> None:
    options = WITHOUT_MODEL | {
        "data.cache": str(tmp_path / "cache"),
        "trainer.max_steps": 1,
        "trainer.eval_first": True,
        "prompt": PROMPTS[0],
        "checkpoint": str(folder),
    }
    (tmp_path / "corpus.txt").write_text(CORPUS[0])
    run = Trainer(
        "text_generation", None, tmp_path / "corpus.txt", output_dir=tmp_path / "run", options=options
    ).train()
    samples = json.loads((run.folder / "samples" / "step_0.json").read_text())["samples"]
    assert theirs(folder, PROMPTS[0]).startswith(samples[0]["text"])
    assert load_processor(run.folder).encode_prompt("x") == load_processor(folder).encode_prompt("x")


def test_plain_text_of_alignment_begins_so_too(tmp_path: Path) -> None:
    from kitforge.data.chat.datasets import ChatDatasetReader

    tokenizer = load_processor(write_kind("glm", tmp_path))
    reader = ChatDatasetReader(tokenizer, template_of(tokenizer))
    (prompt,) = reader.prompts([{"prompt": "x y"}])
    assert list(prompt.tokens) == [1, 2, *tokenizer.encode("x y")]
    (response,) = reader.demonstrations([{"prompt": "x", "completion": " y"}])
    assert list(response.tokens) == [1, 2, *tokenizer.encode("x"), *tokenizer.encode(" y"), tokenizer.eos_id]
    assert list(response.loss_mask) == [False, False, False, *(True for _ in tokenizer.encode(" y")), True]
    (text,) = reader.demonstrations([{"text": "x"}])
    assert list(text.tokens) == [1, 2, *tokenizer.encode("x"), tokenizer.eos_id]
