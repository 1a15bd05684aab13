"""What a real pretrained model says: SmolLM2-135M-Instruct, by `kitforge models fetch smollm2`.

`.ci/run` fetches it; without it these tests say so and are skipped.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kitforge.api import load_model, load_processor, pipeline, save_model
from kitforge.models.hub import NAMED, resolve
from tests.differential.drawn import WHOLE
from tests.warm.shell import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not NAMED["smollm2"].path.is_file(),
        reason="smollm2 is not here: kitforge models fetch smollm2 (or make models)",
    ),
]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Übergrößenträger, naïve 日本語 1234567 it's  two\n\n\tend",
]
NUM_NEW = 24 if WHOLE else 6
GREEDY = {"inference.temperature": 0, "inference.max_new_tokens": NUM_NEW}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    target = tmp_path_factory.mktemp("smollm2")
    save_model("smollm2", target, dtype="float32")
    return target


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The network of transformers, read from that folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def chat(run: Run, folder: Path, lines: str) -> list[str]:
    """The replies of the terminal's chat to those lines."""
    options = "checkpoint=smollm2 temperature=0 max_new_tokens=30"
    return run(["sh", "-c", f"printf '{lines}' | kitforge chat {options}"], folder).splitlines()


def test_the_capital_of_france_is_paris_by_the_command_of_the_readme(run: Run, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if line.startswith('echo "What is the capital of France?"'))
    assert run(["sh", "-c", command], tmp_path) == "The capital of France is Paris.\n"


def test_a_second_question_is_answered_as_transformers_answers_the_whole_chat(
    folder: Path, theirs: Any, run: Run, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    replies = chat(run, tmp_path, "What is the capital of France?\nAnd of Italy?\n")
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": replies[0]},
        {"role": "user", "content": "And of Italy?"},
    ]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = theirs.generate(**asked, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert replies[1] == tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.prove
def test_transformers_computes_the_same_on_the_exported_folder_and_on_the_file(theirs: Any) -> None:
    ours, tokenizer = load_model("smollm2"), load_processor("smollm2")
    others, file = [theirs], resolve("smollm2")
    # Ten seconds; tests/differential reads the numbers of such files otherwise.
    if WHOLE:
        others.append(transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval())
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])  # type: ignore[attr-defined]
        with torch.no_grad():
            found = ours(ids).log_softmax(-1)
            for other in others:
                assert float((other(ids).logits.log_softmax(-1) - found).abs().max()) < 1e-3


@pytest.mark.prove
def test_transformers_generates_the_same_text(folder: Path, theirs: Any) -> None:
    generate = pipeline("text_generation", model="smollm2", options=GREEDY)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS if WHOLE else TEXTS[2:]:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        found = theirs.generate(**ids, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        assert generate(text)[0]["generated_text"] == tokenizer.decode(found[0], skip_special_tokens=True)


def test_chat_templates_and_tokens_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_processor("smollm2"), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]  # type: ignore[attr-defined]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert "<|im_start|>assistant\nHello<|im_end|>" in theirs.apply_chat_template(messages, tokenize=False)
